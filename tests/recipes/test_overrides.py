"""`--set`: other settings for a recipe."""

import importlib
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from vitrail import presets
from vitrail.cli import COMMANDS
from vitrail.cli.signature import list_options
from vitrail.config import LoRAConfig, Recipe, RotaryConfig, ViTConfig, from_json, to_json
from vitrail.errors import UsageError
from vitrail.recipes import (
    ABLATION_RESERVED,
    TRANSFER_RESERVED,
    build_finetune_recipe,
    format_recipe,
    get_recipe,
    load_recipe,
    override_settings,
)
from vitrail.recipes.overrides import FINETUNE_RESERVED, TRAIN_RESERVED
from vitrail.studies import sweep, vtab


def test_every_section_of_a_recipe_can_be_overridden() -> None:
    changed = override_settings(
        get_recipe("vit-b16-imagenet"),
        ["positions=none", "pool=norm-mean", "class_token=false", "hidden_head=false", "depth=6", "width=384",
         "mlp=768", "optimizer=sgd", "lr=.1", "weight_decay=0.03", "clip=none", "decay=linear",
         "randaugment=2,10", "dropout=0"],
    )  # fmt: skip
    settings = {"pool": "norm-mean", "class_token": False, "hidden_head": False, "positions": "none"}
    assert changed.settings == settings | {"depth": 6, "width": 384, "mlp": 768}
    optimizer = changed.optimizer
    assert (optimizer.kind, optimizer.lr, optimizer.weight_decay, optimizer.clip) == ("sgd", 0.1, 0.03, None)
    assert (changed.schedule.decay, changed.augment.randaugment, changed.dropout) == ("linear", (2, 10), 0)
    assert override_settings(get_recipe("vit-h14-jft"), ["depth=31"]).result is None  # which was that of another model
    assert override_settings(get_recipe("vit-h14-jft"), []) == get_recipe("vit-h14-jft")


def test_rotary_positions_are_a_word_or_a_configuration(tmp_path: Path) -> None:
    """In a file they are a table; the model has them, and a resumed run reads the same recipe."""
    recipe = get_recipe("vit-b16-imagenet")
    rotary = RotaryConfig(places="index", base=10_000.0, reference=(14, 14))
    for settings in (["rotary=normalized"], {"rotary": rotary}, {"rotary": {"places": "index", "offset": 1}}):
        changed = override_settings(recipe, settings)
        (tmp_path / "my.toml").write_text(format_recipe(changed, "my"), encoding="utf-8")
        assert load_recipe(tmp_path / "my.toml") == from_json(Recipe, to_json(changed)) == changed
    assert changed.settings["rotary"]["places"] == "index"
    assert changed.model is not None
    config = presets.get_preset_config(changed.model, **override_settings(recipe, {"rotary": rotary}).settings)
    assert isinstance(config, ViTConfig)
    assert config.rotary == rotary
    assert override_settings(changed, ["rotary=none"]).settings["rotary"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rotary=spiral", "places is 'spiral'; it must be one of normalized, index"),
        ("rotary=3", "RotaryConfig must be an object of fields, not 3"),
        ("depht=8", r"no setting 'depht': did you mean depth\?"),
        ("depth", "'depth' has no value; give NAME=VALUE"),
        ("depth=deep", "depth is 'deep'; it must be an integer"),
        ("depth=0", "depth is 0; it must be from 1 to"),
        ("width=100", "width 100 is not a multiple of heads 12"),
        ("positions=3d", "positions is '3d'; it must be one of none, learned-1d"),
        ("optimizer=lamb", "optimizer is 'lamb'; it must be one of adam, sgd, muon"),
        ("decay=0.1", "decay is '0.1'; it must be one of cosine, linear"),
        ("weight_decay=-1", "weight_decay is -1.0; it must be 0 or more"),
        ("hidden_head=2", "hidden_head is 2; it must be true or false"),
        ("randaugment=2", r"randaugment is 2; it must be 2 integers, such as \[2,10\]$"),
        ("milestones=0.5", r"milestones is 0.5; it must be a list of numbers, such as \[0.5,0.75\]"),
        ("milestones=[0.5]", r"milestones are for the decay step, and the decay is cosine$"),
        ("kind=adam", r"no setting 'kind': did you mean optimizer.kind\?"),
        ("settings.depht=2", r"no setting 'settings.depht': did you mean model.depth\?"),
        ("settings.stem=2", "no setting 'settings.stem'"),
        ("lr=-1", "^lr is -1.0; it must be above 0$"),
        ("warmup=5", "warmup cannot be set here: give --warmup STEPS$"),
        ("layers=2", "layers cannot be set here: it is for fine-tuning"),
        ("classes=5", "no setting 'classes'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_name_and_rule(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        override_settings(get_recipe("vit-b16-imagenet"), [text])


def test_the_shape_of_a_resnet_or_of_a_trained_model_is_its_own() -> None:
    with pytest.raises(UsageError, match="depth is for recipes of ViTs with random weights: bit-r50x1 is a ResNet"):
        override_settings(get_recipe("bit-r50x1-jft"), ["depth=3"])
    with pytest.raises(UsageError, match=r"positions is for recipes of ViTs .*: a trained model keeps its own"):
        override_settings(build_finetune_recipe("paper", 1000, 16), ["positions=none"])
    with pytest.raises(UsageError, match="the setting depth is given twice"):
        override_settings(get_recipe("vit-b16-imagenet"), ["depth=3", "depth=4"])


def test_names_and_values_of_an_earlier_version_are_accepted() -> None:
    recipe = get_recipe("vit-b16-imagenet")
    changed = override_settings(recipe, ["optimiser=sgd", "final=0.1", "decay=linear"])
    assert (changed.optimizer.kind, changed.schedule.final_lr_scale) == ("sgd", 0.1)
    schedule = override_settings(recipe, ["decay=stairs", "stairs=0.5,0.75"]).schedule
    assert (schedule.decay, schedule.milestones) == ("step", (0.5, 0.75))
    with pytest.raises(UsageError, match="the setting final is given twice"):
        override_settings(recipe, ["final_lr_scale=0.2", "final=0.1"])
    with pytest.raises(UsageError, match=r"^balanced cannot be set here: give --balanced$"):
        override_settings(recipe, ["balanced=true"])


def test_a_section_may_be_named_and_values_may_be_python() -> None:
    recipe = get_recipe("cifar10")
    by_text = override_settings(recipe, ["optimizer.lr=1e-3", "augment.mixup=0.3", "model.depth=3"])
    by_value = override_settings(recipe, {"optimizer.lr": 1e-3, "augment.mixup": 0.3, "model.depth": 3})
    assert by_text == by_value
    assert (by_text.optimizer.lr, by_text.augment.mixup, by_text.settings["depth"]) == (1e-3, 0.3, 3)
    masked = override_settings(get_recipe("mae-cifar10"), ["masked.mask_ratio=0.6"])
    assert masked.masked is not None
    assert masked.masked.mask_ratio == 0.6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["augment.mixp=1"], r"did you mean augment.mixup\?"),
        (["optimizer.mixup=1"], "no setting 'optimizer.mixup'"),
        (["schedule.warmup=3"], "schedule.warmup cannot be set here: give --warmup"),
        (["mixup=0.1", "augment.mixup=0.2"], "twice"),
        ({"augment.mixup": "much"}, "mixup is 'much'; it must be a number"),
        ({"augment.flip": 3}, "flip is 3; it must be true or false"),
    ],
)
def test_a_wrong_section_or_value_is_refused(settings: list[str] | dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        override_settings(get_recipe("cifar10"), settings)


@pytest.mark.parametrize(
    ("command", "reserved"),
    [
        ("train", TRAIN_RESERVED),
        ("finetune", FINETUNE_RESERVED),
        ("study ablate", ABLATION_RESERVED),
        ("study sweep", TRANSFER_RESERVED | sweep._RESERVED),
        ("study vtab", TRANSFER_RESERVED | vtab._RESERVED),
    ],
)
def test_only_options_that_the_command_has_are_advised(command: str, reserved: Mapping[str, str]) -> None:
    module, _, name = COMMANDS[command].arguments.partition(".")
    signature = getattr(importlib.import_module(f"vitrail.cli.arguments.{module}"), name)
    options = {option.name for option in list_options(signature)}
    recipe = to_json(get_recipe("mae-cifar10")) | {"lora": to_json(LoRAConfig(rank=1))}
    for setting, instead in reserved.items():
        section, _, field = setting.partition(".")
        assert field in (recipe if section == "recipe" else recipe[section]), setting
        assert set(re.findall(r"--[a-z-]+", instead)) <= options, setting


def test_settings_of_lora_are_for_recipes_that_have_it() -> None:
    recipe = build_finetune_recipe("default", 1000, 16, lora=4)
    settings = ["lora.layers=all", "lora.alpha=3", "lora.dora=true", "rank_stabilized=true", "optimizer.lr=1e-3"]
    changed = override_settings(recipe, settings)
    assert changed.lora == LoRAConfig(rank=4, alpha=3.0, layers="all", dora=True, rank_stabilized=True)
    with pytest.raises(UsageError, match=r"lora\.rank cannot be set here: give --lora RANK"):
        override_settings(recipe, ["lora.rank=2"])
    with pytest.raises(UsageError, match="for a recipe with LoRA: `vitrail finetune --lora RANK` adds it"):
        override_settings(build_finetune_recipe("default", 1000, 16), ["lora.alpha=3"])
    with pytest.raises(UsageError, match="cannot be set here: give --layers N"):
        override_settings(recipe, ["layers=2"])


def test_names_and_notation_of_a_file_are_accepted() -> None:
    recipe = get_recipe("vit-b16-imagenet")
    changed = override_settings(recipe, ["settings.depth=2", "randaugment=[2, 9]", "decay=step", "milestones=[0.5]"])
    assert (changed.settings["depth"], changed.augment.randaugment) == (2, (2, 9))
    assert changed.schedule.milestones == (0.5,)


def test_numbers_of_numpy_become_pythons() -> None:
    changed = override_settings(
        get_recipe("cifar10"), {"depth": np.int64(3), "lr": np.float32(0.5), "ema": np.int64(0)}
    )
    values = (changed.settings["depth"], changed.optimizer.lr, changed.ema)
    assert (values, [type(value) for value in values]) == ((3, 0.5, 0.0), [int, float, float])
    with pytest.raises(UsageError, match=r"depth is 0\.5; it must be an integer"):
        override_settings(get_recipe("cifar10"), {"depth": np.float64(0.5)})


def test_what_a_command_has_no_option_for_can_be_set() -> None:
    changed = override_settings(get_recipe("cifar10"), ["warmup=7", "balanced=true"], ABLATION_RESERVED)
    assert (changed.schedule.warmup, changed.logit_adjustment) == (7, True)
    transfer = build_finetune_recipe("paper", 1000, 16)
    changed = override_settings(transfer, ["schedule.warmup=7", "layers=2"], TRANSFER_RESERVED)
    assert (changed.schedule.warmup, changed.trainable_layers) == (7, 2)
    for setting, advice in (
        ("epochs=3", "--steps N"),
        ("recipe.batch=3", "--batch N"),
        ("image_size=32", "--image-size"),
    ):
        with pytest.raises(UsageError, match=f"cannot be set here: give {advice}"):
            override_settings(transfer, [setting], TRANSFER_RESERVED)
