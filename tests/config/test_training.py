"""Training configurations that cannot be run are refused."""

from typing import Any

import pytest

from vitrail.config import AugmentConfig, LoRAConfig, MaskedConfig, OptimizerConfig, Recipe, ScheduleConfig
from vitrail.errors import UsageError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_ratio": 0.0}, "mask_ratio is 0.0; it must lie between 0 and 1"),
        ({"mask_ratio": 1.0}, "mask_ratio is 1.0"),
        ({"kind": "bert"}, "kind is 'bert'; choose one of mpp, mae"),
        ({"target": "words"}, "target is 'words'; choose one of mean-color, 4x4-colors, pixels, normalized-pixels"),
    ],
)
def test_impossible_masking_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MaskedConfig(**({"kind": "mpp", "mask_ratio": 0.5, "target": "pixels"} | change))


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (AugmentConfig, {"area": (0.5, 0.2)}, "area is (0.5, 0.2)"),
        (AugmentConfig, {"mixup": 3.0}, "mixup is 3.0; it must be from 0 to 2"),
        (AugmentConfig, {"randaugment": (0, 10)}, "give 1 to 16 operations"),
        (OptimizerConfig, {"lr": 0.0}, "lr is 0.0; it must be above 0"),
        (OptimizerConfig, {"lr": 1e-3, "beta2": 1.0}, "beta2 is 1.0; it must be from 0 to below 1"),
        (OptimizerConfig, {"lr": 1e-3, "clip": 0.0}, "clip is 0.0; it must be above 0, or None"),
        (OptimizerConfig, {"lr": 1e-3, "adam_lr": 1e-3}, "adam takes only lr"),
        (LoRAConfig, {"rank": 0}, "the rank of LoRA is 0; it must be 1 or more"),
        (LoRAConfig, {"rank": 4, "alpha": 0.0}, "the alpha of LoRA is 0.0; it must be above 0"),
        (LoRAConfig, {"rank": 4, "layers": "head"}, "layers is 'head'; choose one of qkv, attention, mlp, all"),
        (ScheduleConfig, {"warmup": -1}, "warmup is -1; it must be 0 or more"),
        (
            ScheduleConfig,
            {"decay": "constant", "final_lr_scale": 0.1},
            "final_lr_scale is for the decays cosine and linear",
        ),
        (ScheduleConfig, {"decay": "step"}, "the decay step needs milestones, such as [0.5, 0.75]"),
        (ScheduleConfig, {"milestones": (0.5,)}, "milestones are for the decay step, and the decay is cosine"),
    ],
)
def test_impossible_settings_are_refused(kind: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        kind(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"resize": 0.5}, "resize is 0.5; it must be from 1 to 4"),
        ({"trainable_layers": -1}, "trainable_layers is -1"),
        (
            {"lora": LoRAConfig(rank=4)},
            "lora adds to the layers of a trained model, and this recipe starts from random",
        ),
        (
            {"model": None, "lora": LoRAConfig(rank=4), "optimizer": OptimizerConfig(kind="muon", lr=1e-3)},
            "muon moves whole matrices",
        ),
        ({"resize_whole_image": True}, "resize_whole_image is for fine-tuning with a `resize`"),
        ({"epochs": 0}, "epochs is 0; it must be above 0"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be from 0 to below 1"),
        ({"loss": "hinge"}, "choose one of softmax, sigmoid"),
    ],
)
def test_an_impossible_recipe_is_refused(fields: dict[str, Any], message: str) -> None:
    optimizer, schedule = OptimizerConfig(lr=1e-3), ScheduleConfig()
    recipe = {"model": "b16", "epochs": 1, "optimizer": optimizer, "schedule": schedule, "source": "here"}
    with pytest.raises(UsageError, match=message):
        Recipe(**(recipe | fields))


def test_lora_and_whole_layers_are_not_trained_together() -> None:
    fields: dict[str, Any] = {"epochs": 1, "optimizer": OptimizerConfig(lr=1e-3), "schedule": ScheduleConfig()}
    with pytest.raises(UsageError, match="trainable_layers whole layers: give one"):
        Recipe(model=None, source="here", lora=LoRAConfig(rank=4), trainable_layers=2, **fields)
