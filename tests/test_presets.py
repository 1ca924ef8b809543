"""Presets by name."""

import pytest

from vitrail import presets
from vitrail.config import RotaryConfig, ViTConfig
from vitrail.errors import UsageError


def test_a_preset_may_have_any_patch_side() -> None:
    assert presets.get_preset_config("b20").image_size == (220, 220)
    assert presets.get_preset_config("h14").image_size == (224, 224)
    assert presets.get_preset_config("bigg14").width == 1664  # not size g with a prefix
    with pytest.raises(UsageError, match="no setting 'color'"):
        presets.get_preset_config("b16", color=1)
    for name in ("b0", "b", "16", "b16x", "B16", "b-16"):
        assert not presets.has_preset(name)


def test_families_are_what_their_weights_compute() -> None:
    dinov3 = presets.get_preset_config("dinov3-h16plus", image_size=(256, 256))
    assert isinstance(dinov3, ViTConfig)
    assert (dinov3.heads, dinov3.mlp, dinov3.gated_mlp, dinov3.registers, dinov3.grid) == (20, 5120, True, 4, (16, 16))
    assert dinov3.rotary == RotaryConfig(places="normalized")
    for name, (_, fields) in presets.FAMILIES.items():
        config = presets.get_preset_config(name, classes=10)
        assert isinstance(config, ViTConfig)
        assert (config.patch, config.classes) == (fields["patch"], 10)
        assert name.rpartition("-")[2].removesuffix("plus").endswith(str(config.patch))
        assert presets.has_preset(name)
    assert "Did you mean dinov3-b16?" in presets.describe_unknown_preset("dinov3-b61")
    with pytest.raises(UsageError, match="vitrail list"):
        presets.get_preset_config("dinov3-b32")


def test_preprocessing_by_name() -> None:
    view = presets.build_preprocess_config("imagenet", (224, 224))
    assert (view.resize, view.mean) == ((256,), (0.485, 0.456, 0.406))
    assert presets.build_preprocess_config("inception", (224, 112), channels=1).mean == (0.5,)
    with pytest.raises(UsageError, match="no preprocessing 'x'"):
        presets.build_preprocess_config("x", (224, 224))
