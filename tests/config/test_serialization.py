"""JSON restores what was written, also by earlier versions, and refuses everything else."""

import dataclasses
import json
from typing import Any

import pytest

from tests import model_factory
from tests.model_factory import VARIANTS
from vitrail import presets
from vitrail.config import BiTConfig, ConvConfig, MaskedConfig, Recipe, ScheduleConfig, ViTConfig, from_json, to_json
from vitrail.config.serialization import (
    _RENAMES,
    parse_field,
    upgrade_keys,
    upgrade_result_keys,
    upgrade_run_config,
)
from vitrail.errors import UsageError
from vitrail.recipes import RECIPES, build_finetune_recipe
from vitrail.studies.grid import Cell
from vitrail.weights.native import NativeHeader
from vitrail.weights.precision_measurements import PrecisionMeasurement
from vitrail.weights.trained import Origin

RENAMED_CLASSES = (Cell, ConvConfig, MaskedConfig, NativeHeader, Origin, PrecisionMeasurement, Recipe, ScheduleConfig)


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
def test_json_and_back_is_the_identity(change: dict[str, Any]) -> None:
    config = model_factory.build_config(**change)
    assert from_json(ViTConfig, json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_come_back(name: str) -> None:
    assert from_json(Recipe, json.loads(json.dumps(to_json(RECIPES[name])))) == RECIPES[name]


@pytest.mark.parametrize("name", ["r50-b16", "bit-r50x1"])
def test_nested_configurations_come_back(name: str) -> None:
    config = presets.get_preset_config(name)
    assert from_json(type(config), json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widht": 1}, "ViTConfig has no field 'widht': did you mean width?"),
        ({"width": "32"}, "width is '32'; it must be an integer"),
        ({"width": True}, "width is True; it must be an integer"),
        ({"image_size": [32]}, r"image_size is \[32\]; it must be 2 integers"),
        ({"gelu": "relu"}, "gelu is 'relu'; it must be one of erf, tanh"),
        ({"norm_eps": 2**60}, "norm_eps is .*; it must be a number"),
        ({"stem": {}}, "ConvConfig lacks the field 'norm_eps'"),
        ({"stem": [1]}, "ConvConfig must be an object of fields"),
    ],
)
def test_unknown_missing_and_mistyped_fields_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_json(ViTConfig, to_json(model_factory.build_config()) | change)


# --- files of earlier versions ---------------------------------------------------------------------------------------


def test_the_table_of_old_names_leads_to_fields_that_exist() -> None:
    assert {kind.__name__ for kind in RENAMED_CLASSES} == _RENAMES.keys()
    for kind in RENAMED_CLASSES:
        renames = _RENAMES[kind.__name__]
        fields = {field.name for field in dataclasses.fields(kind)}
        assert fields >= {*renames.fields.values(), *renames.values}
        assert not fields & renames.fields.keys()  # an old name never takes the place of a field


def write_as_before(kind: type, value: Any) -> dict[str, Any]:
    """The JSON of a configuration as version 0.1.0 wrote it."""
    renames = _RENAMES.get(kind.__name__)
    old_names = {} if renames is None else {new: old for old, new in renames.fields.items()}
    old: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        old_values = {} if renames is None else {new: old for old, new in renames.values.get(field.name, {}).items()}
        if dataclasses.is_dataclass(content):
            content = write_as_before(type(content), content)
        elif isinstance(content, str):
            content = old_values.get(content, content)
        old[old_names.get(field.name, field.name)] = content
    return json.loads(json.dumps(old))


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_of_an_earlier_version_has_the_recipe_of_today(name: str) -> None:
    """So it can be resumed: the trainer compares the whole recipe."""
    old = write_as_before(Recipe, RECIPES[name])
    assert "optimiser" in old
    assert "optimizer" not in old
    assert upgrade_keys(Recipe, old) == json.loads(json.dumps(to_json(RECIPES[name])))
    assert from_json(Recipe, old) == RECIPES[name]


@pytest.mark.parametrize("neighbor", ["neighbour", "neighbor"])
def test_the_result_of_the_digits_in_earlier_versions(neighbor: str) -> None:
    old = to_json(RECIPES["digits"])
    old["result"] = f"97.8 % of 179 test digits, seed 0, as many as the nearest {neighbor}"
    assert from_json(Recipe, old) == RECIPES["digits"]


def test_the_old_words_of_masking_and_steps() -> None:
    old = write_as_before(Recipe, RECIPES["mpp-cifar10"])
    assert old["masked"] == {"kind": "mpp", "share": 0.5, "target": "mean-colour"}
    assert from_json(MaskedConfig, old["masked"]) == RECIPES["mpp-cifar10"].masked
    schedule = build_finetune_recipe("bit", 1000, 16).schedule
    old_schedule = write_as_before(ScheduleConfig, schedule)
    assert (old_schedule["decay"], old_schedule["stairs"], old_schedule["final"]) == ("stairs", [0.4, 0.6, 0.8], 0.0)
    assert from_json(ScheduleConfig, old_schedule) == schedule


@pytest.mark.parametrize("name", ["r50-b16", "bit-r50x1"])
def test_convolutions_of_an_earlier_version(name: str) -> None:
    config = presets.get_preset_config(name)
    old = write_as_before(type(config), config)
    assert "standardise_eps" in old["conv" if isinstance(config, BiTConfig) else "stem"]
    assert from_json(type(config), old) == config
    assert upgrade_keys(ViTConfig | BiTConfig, old) == json.loads(json.dumps(to_json(config)))


def test_a_cell_of_a_study_of_an_earlier_version() -> None:
    cell = Cell(name="a", result_fields={"lr": 1}, model="b16", data={}, recipe=RECIPES["digits"], eval_split="val")
    old = write_as_before(Cell, cell)
    assert {"about", "measured", "keeps"} <= old.keys()
    assert from_json(Cell, old) == cell


def test_old_names_in_lists() -> None:
    old = {"tried": [{"speed": 2.0, "sure": 0.9}], "several": True}
    new = upgrade_keys(NativeHeader, old)
    assert new["multi_label"] is True
    assert new["precision_measurements"] == [{"speedup": 2.0, "confident_agreement": 0.9}]


def test_a_runs_configuration_of_an_earlier_version() -> None:
    recipe = RECIPES["digits"]
    old = {"recipe": write_as_before(Recipe, recipe), "several": False, "everything": True, "measured": "val",
           "view": None, "world": 2, "seed": 3, "model": {"name": "x", "licence": "mit"}}  # fmt: skip
    new = upgrade_run_config(old)
    assert new.pop("recipe") == json.loads(json.dumps(to_json(recipe)))
    expected = {"multi_label": False, "train_on_val": True, "eval_split": "val", "train_preprocess": None}
    assert new == expected | {"world_size": 2, "seed": 3, "model": {"name": "x", "license": "mit"}}


def test_a_run_of_bits_rule_of_an_earlier_version_resizes_whole_images() -> None:
    recipe = json.loads(json.dumps(to_json(build_finetune_recipe("bit", 100, 16))))
    old = {"recipe": {name: value for name, value in recipe.items() if name != "resize_whole_image"}}
    assert upgrade_run_config(old | {"train_preprocess": {"resize": [512, 512]}})["recipe"] == recipe
    assert "resize_whole_image" not in upgrade_run_config(old | {"train_preprocess": None})["recipe"]


def test_what_is_new_stays_as_it_is() -> None:
    new = json.loads(json.dumps(to_json(RECIPES["mae-cifar10"])))
    assert upgrade_keys(Recipe, new) == new
    assert upgrade_keys(Recipe, None) is None


def test_a_field_from_a_command_line() -> None:
    assert parse_field(ScheduleConfig, "milestones", "0.5,0.75", "milestones") == (0.5, 0.75)
    assert parse_field(ScheduleConfig, "decay", "stairs", "decay") == "step"  # of an earlier version
    assert parse_field(ViTConfig, "positions", "none", "positions") == "none"
    assert parse_field(ViTConfig, "class_token", "False", "class_token") is False
    with pytest.raises(UsageError, match="decay is 'stair'; it must be one of cosine"):
        parse_field(ScheduleConfig, "decay", "stair", "decay")


def test_results_of_version_0_1_0_are_read_under_todays_names() -> None:
    """ "right" counted the correct images in events, cells' results and tables."""
    assert upgrade_result_keys({"images": 10, "right": 7}) == {"images": 10, "correct": 7}
    assert upgrade_result_keys({"images": 10, "correct": 7}) == {"images": 10, "correct": 7}
