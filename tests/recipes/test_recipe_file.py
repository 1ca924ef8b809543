"""Recipes as files: every built-in one survives the way through TOML, and mistakes are named."""

import dataclasses
import json
from pathlib import Path

import pytest

from vitrail import recipes
from vitrail.config import OptimizerConfig, Recipe, ScheduleConfig, to_json
from vitrail.errors import UsageError
from vitrail.recipes import format_recipe, load_recipe

FINETUNE = {kind: recipes.build_finetune_recipe(kind, 1000, 16) for kind in ("default", "paper", "bit")}


@pytest.mark.parametrize("name", [*recipes.RECIPES, *FINETUNE])
def test_every_recipe_is_the_same_after_toml(name: str, tmp_path: Path) -> None:
    recipe = FINETUNE.get(name) or recipes.RECIPES[name]
    path = tmp_path / "my.toml"
    path.write_text(format_recipe(recipe, name), encoding="utf-8")
    assert load_recipe(path) == recipe


def test_toml_names_every_field_with_its_meaning_and_the_source() -> None:
    text = format_recipe(recipes.RECIPES["vit-b16-imagenet"], "vit-b16-imagenet")
    assert text.startswith("# vit-b16-imagenet: Dosovitskiy et al. 2021, table 3\n")
    for field in (*dataclasses.fields(OptimizerConfig), *dataclasses.fields(ScheduleConfig)):
        assert f"\n{field.name} = " in text or f"\n# {field.name} =" in text, field.name
    assert "lr = 0.003                      # The peak learning rate." in text
    assert "vitrail train my.toml --data DATA" in text


def test_json_of_a_recipe_and_of_a_run_are_recipes(tmp_path: Path) -> None:
    recipe = recipes.RECIPES["mae-cifar10"]
    bare, run = tmp_path / "recipe.json", tmp_path / "config.json"
    bare.write_text(json.dumps(to_json(recipe)))
    run.write_text(json.dumps({"recipe": to_json(recipe), "seed": 3}))
    assert load_recipe(bare) == load_recipe(str(run)) == recipe


def test_config_of_an_earlier_version_is_a_recipe(tmp_path: Path) -> None:
    old = to_json(recipes.RECIPES["cifar10"])
    old["optimiser"] = old.pop("optimizer")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"recipe": old}))
    assert load_recipe(path) == recipes.RECIPES["cifar10"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs = ", "cannot be read"),
        ("epochs = 3", "Recipe lacks the field"),
        ("epochz = 3", "has no field 'epochz'"),
        ('model = "b16"\nepochs = "many"\nsource = "me"\n[optimizer]\nlr = 1.0\n[schedule]\n', "epochs is 'many'"),
        ('model = "b16"\nepochs = 1\nsource = "me"\n[optimizer]\nlr = -1.0\n[schedule]\n', "lr is -1.0"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"vitrail recipe show NAME > "):
        load_recipe(tmp_path / "my.toml")


def test_a_name_is_a_built_in_recipe() -> None:
    assert load_recipe("digits") is recipes.RECIPES["digits"]
    with pytest.raises(UsageError, match="did you mean digits"):
        load_recipe("digit")


def test_a_short_file_takes_defaults(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('model = "ti16"\nepochs = 2\nsource = "me"\n[optimizer]\nlr = 1e-3\n[schedule]\n')
    expected = Recipe(
        model="ti16", epochs=2.0, source="me", optimizer=OptimizerConfig(lr=1e-3), schedule=ScheduleConfig()
    )
    assert load_recipe(path) == expected
