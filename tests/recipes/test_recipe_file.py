"""Recipes as files: every built-in one survives the way through TOML, and mistakes are named."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from vitrail import recipes
from vitrail.config import AugmentConfig, MaskedConfig, OptimizerConfig, Recipe, ScheduleConfig, to_json
from vitrail.config.field_docstrings import read_field_docstrings
from vitrail.errors import UsageError
from vitrail.recipes import check_recipe, format_recipe, load_recipe

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


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("image_size = 16", "image_size is none of the model's settings: it is a field of the recipe itself"),
        ("classes = 5", "classes is none of the model's settings: the data decide it"),
        ("stem = 5", "stem is none of the model's settings: the preset decides it"),
        ("depht = 4", "a ViT has no setting 'depht': did you mean depth?"),
        ("depth = 0.5", "depth is 0.5; it must be an integer"),
        ("heads = 5", "width 192 is not a multiple of heads 5"),
    ],
)
def test_wrong_settings_of_the_model_are_refused_with_the_file(setting: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    text = format_recipe(dataclasses.replace(recipes.RECIPES["digits"], settings={}), "x")
    path.write_text(re.sub(r"(?m)^\[settings\].*$", f"[settings]\n{setting}", text))
    with pytest.raises(UsageError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    recipe = dataclasses.replace(recipes.RECIPES["digits"], settings=dict([setting.split(" = ")]))
    with pytest.raises(UsageError):
        check_recipe(recipe)


def test_settings_are_not_for_a_trained_model() -> None:
    with pytest.raises(UsageError, match="settings are for random weights, and a trained model keeps its own"):
        check_recipe(dataclasses.replace(FINETUNE["paper"], settings={"depth": 3}))


def test_the_settings_that_a_model_has_are_listed(tmp_path: Path) -> None:
    for name, expected, missing in (("digits", "positions", "stem"), ("bit-r50x1-jft", "channels", "depth")):
        text = format_recipe(recipes.RECIPES[name], name).partition("[settings]")[2].partition("\n[")[0]
        listed = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
        assert f"{recipes.RECIPES[name].model} has " in listed
        assert expected in listed
        assert missing not in listed


def test_every_field_of_a_recipe_has_a_meaning() -> None:
    for kind in (Recipe, OptimizerConfig, ScheduleConfig, AugmentConfig, MaskedConfig):
        assert read_field_docstrings(kind).keys() == {field.name for field in dataclasses.fields(kind)}


def test_a_control_character_survives_toml(tmp_path: Path) -> None:
    recipe = dataclasses.replace(recipes.RECIPES["digits"], data="a\x7f\u0085b\t")
    path = tmp_path / "my.toml"
    path.write_text(format_recipe(recipe, "x"), encoding="utf-8")
    assert load_recipe(path) == recipe


def test_a_missing_file_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"vitrail recipe show NAME > .*my\.toml` writes one"):
        load_recipe(tmp_path / "my.toml")
    with pytest.raises(UsageError, match=r"vitrail recipe show NAME --json > .*my\.json` writes one"):
        load_recipe(tmp_path / "my.json")


def test_a_name_is_a_built_in_recipe() -> None:
    assert load_recipe("digits") is recipes.RECIPES["digits"]
    with pytest.raises(UsageError, match="did you mean digits"):
        load_recipe("digit")
    with pytest.raises(UsageError, match="the recipe default is for fine-tuning: vitrail finetune DATA"):
        load_recipe("default")


def test_a_short_file_takes_defaults(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('model = "ti16"\nepochs = 2\nsource = "me"\n[optimizer]\nlr = 1e-3\n[schedule]\n')
    expected = Recipe(
        model="ti16", epochs=2.0, source="me", optimizer=OptimizerConfig(lr=1e-3), schedule=ScheduleConfig()
    )
    assert load_recipe(path) == expected
