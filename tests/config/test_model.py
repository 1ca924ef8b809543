"""Configurations that no model can have are refused."""

from typing import Any

import pytest

from tests import model_factory
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
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
        ({"width": 0}, "width is 0; it must be from 1 to"),
        ({"image_size": (32, 0)}, "image_size is 0"),
    ],
)
def test_an_impossible_model_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        model_factory.build_config(**change)
