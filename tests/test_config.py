"""Configurations refuse what cannot be meant, and JSON brings back what was written."""

import math
from typing import Any

import pytest

from tests import making
from tests.making import VARIANTS
from vitrail import presets
from vitrail.config import MaskedConfig, PreprocessConfig, ViTConfig, from_json, to_json
from vitrail.errors import UsageError


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
def test_json_and_back_is_the_identity(change: dict[str, Any]) -> None:
    config = making.config(**change)
    assert from_json(ViTConfig, to_json(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool": "max"}, "pool is 'max'; choose one of class, "),
        ({"class_token": False}, "reads the class token"),
        ({"distillation_token": True, "class_token": False, "pool": "norm-mean"}, "beside a class token"),
        ({"distillation_head": True}, "distillation_head needs"),
        ({"hidden_head": True, "pool": "class-mean"}, "joins two"),
        ({"positions": "relative", "positions_at": "every-layer"}, "added nowhere"),
        ({"positions": "sincos-2d", "width": 30, "heads": 3}, "that 4 divides, not 30"),
        ({"positions": "learned-2d", "width": 33, "heads": 3}, "33 is odd"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
        ({"width": 0}, "width is 0; it must be from 1 to"),
        ({"image_size": (32, 0)}, "image_size is 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        making.config(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resize": (10,)}, "smaller than the crop"),
        ({"resize": (40, 40, 40)}, "one or two sides"),
        ({"mean": (0.5,)}, "the same channels"),
        *(({"std": (0.5, 0.5, value)}, "std must be from") for value in (-1.0, 0.0, 1e-300, 1e300, math.inf, math.nan)),
        *(({"mean": (0.5, 0.5, value)}, "mean at most") for value in (-1e300, 1e300, math.inf, math.nan)),
        ({"interpolation": "nearest"}, "choose one of"),
    ],
)
def test_preprocessing_that_cannot_be_meant_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PreprocessConfig(**({"size": (32, 32), "resize": (36,)} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"share": 0.0}, "share is 0.0; it must lie between 0 and 1"),
        ({"share": 1.0}, "share is 1.0"),
        ({"kind": "bert"}, "kind is 'bert'; choose one of mpp, mae"),
        ({"target": "words"}, "target is 'words'; choose one of mean-colour, 4x4-colours, pixels, normalised-pixels"),
    ],
)
def test_hiding_that_cannot_be_meant_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MaskedConfig(**({"kind": "mpp", "share": 0.5, "target": "pixels"} | change))


def test_a_preset_may_have_any_patch_side() -> None:
    assert presets.get_preset_config("b20").image_size == (220, 220)
    assert presets.get_preset_config("h14").image_size == (224, 224)
    assert presets.get_preset_config("bigg14").width == 1664  # not size g with a prefix
    with pytest.raises(UsageError, match="no setting 'color'"):
        presets.get_preset_config("b16", color=1)
    for name in ("b0", "b", "16", "b16x", "B16", "b-16"):
        assert not presets.has_preset(name)


def test_preprocessing_by_name() -> None:
    view = presets.build_preprocess_config("imagenet", (224, 224))
    assert (view.resize, view.mean) == ((256,), (0.485, 0.456, 0.406))
    assert presets.build_preprocess_config("inception", (224, 112), channels=1).mean == (0.5,)
    with pytest.raises(UsageError, match="no preprocessing 'x'"):
        presets.build_preprocess_config("x", (224, 224))
