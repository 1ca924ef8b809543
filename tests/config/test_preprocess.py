"""Preprocessing that cannot be computed is refused."""

import math
from typing import Any

import pytest

from vitrail.config import PreprocessConfig
from vitrail.errors import UsageError


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
def test_impossible_preprocessing_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PreprocessConfig(**({"size": (32, 32), "resize": (36,)} | change))
