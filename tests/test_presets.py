"""Presets by name."""

import pytest

from vitrail import presets
from vitrail.errors import UsageError


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
