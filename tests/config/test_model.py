"""Configurations that no model can have are refused."""

from typing import Any

import pytest

from tests import model_factory
from vitrail.config import RotaryConfig
from vitrail.errors import UsageError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool": "max"}, "pool is 'max'; choose one of class, "),
        ({"class_token": False}, "reads the class token"),
        ({"distillation_token": True, "class_token": False, "pool": "norm-mean"}, "needs a class token"),
        ({"distillation_head": True}, "distillation_head needs"),
        ({"hidden_head": True, "pool": "class-mean"}, "concatenates two"),
        ({"positions": "relative", "positions_at": "every-layer"}, "positions_at must be 'stem'"),
        ({"positions": "sincos-2d", "width": 30, "heads": 3}, "a multiple of 4, at least 8, not 30"),
        ({"positions": "learned-2d", "width": 33, "heads": 3}, "need an even width, not 33"),
        ({"hidden_head": True, "projection": 8}, "hidden_head or projection, not both"),
        ({"projection": 8, "pool": "class-mean"}, "projection reads one token's width"),
        ({"pool_heads": 2}, "of pool 'map', not 'class'"),
        ({"pool_prefix": True}, "of pool 'map', not 'class'"),
        ({"pool": "map", "pool_heads": 3}, "width 32 is not a multiple of pool_heads 3"),
        ({"mlp_norm": True}, "set gated_mlp=True"),
        ({"positions": "relative-bias", "positions_at": "every-layer"}, "positions_at must be 'stem'"),
        ({"positions": "relative-bias", "registers": 1}, "no entries for registers"),
        (
            {"positions": "relative-bias", "registers": 1, "class_token": False, "pool": "map"},
            "no entries for registers",
        ),
        ({"rotary": RotaryConfig(places="index"), "width": 30, "heads": 5}, "a multiple of 4, not 6"),
        ({"image_size": (36, 32)}, "36 x 32 does not divide into patches of 8 x 8"),
        ({"image_size": (7, 32), "drop_remainder": True}, "7 x 32 does not divide"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
        ({"width": 0}, "width is 0; it must be from 1 to"),
        ({"image_size": (32, 0)}, "image_size is 0"),
    ],
)
def test_an_impossible_model_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        model_factory.build_config(**change)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"places": "polar"}, "places is 'polar'; choose one of normalized, index"),
        ({"places": "index", "base": 1.0}, "base is 1; it must be above 1"),
        ({"places": "index", "base": float("nan")}, "base is nan"),
        ({"places": "normalized", "offset": 1}, "no reference grid and no offset"),
        ({"places": "normalized", "reference": (14, 14)}, "no reference grid and no offset"),
        ({"places": "index", "reference": (0, 14)}, "both sides must be from 1"),
        ({"places": "index", "offset": -1}, "offset is -1"),
    ],
)
def test_impossible_rotary_positions_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RotaryConfig(**fields)


def test_pixels_that_fill_no_patch_are_not_in_the_grid() -> None:
    config = model_factory.build_config(image_size=(39, 23), drop_remainder=True)
    assert (config.grid, config.compute_grid((40, 24))) == ((4, 2), (5, 3))
