"""The config.json with which timm builds what we write, and what timm has no place for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import model_factory
from tests.conftest import peer
from vitrail.config import RotaryConfig
from vitrail.errors import ModelError
from vitrail.weights.load import load, save


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rotary": RotaryConfig(places="normalized", bfloat16_periods=True), "gelu": "erf"},
            r"rotary\.bfloat16_periods is True",
        ),
        ({"rotary": RotaryConfig(places="index"), "gelu": "quick"}, "no GELU but the erf form"),
        ({"projection": 6, "classes": 7}, "no head after a projection"),
        ({"classes": 0, "projection": 6, "gelu": "erf"}, "classes is 0, and would be read as 6"),
        ({"normalize_features": True}, "no features of length 1"),
        ({"norm_pre": True}, "its patch embedding has no bias"),
        ({"positions": "relative-bias", "pool": "norm-mean", "gelu": "erf"}, "or with this pooling"),
        ({"positions": "relative-bias", "pool": "mean-norm", "image_size": (16, 32), "gelu": "erf"}, "not square"),
    ],
)
def test_what_timm_has_no_place_for_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        save(model_factory.build_trained(model_factory.build_vit(**change)), tmp_path / "model", "timm")


def test_beits_keys_lose_their_biases_which_no_softmax_notices(tmp_path: Path) -> None:
    timm = peer("timm")
    ours = model_factory.build_vit(positions="relative-bias", pool="mean-norm", gelu="erf", image_size=(16, 16))
    notes = save(model_factory.build_trained(ours), tmp_path / "model", "timm")
    assert "attn.k.bias: left out, since no softmax depends on it" in notes
    theirs = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    images = model_factory.draw_images(ours.config)
    with torch.no_grad():
        assert (theirs(images) - ours(images)).abs().max() <= 1e-5


def test_key_biases_are_kept_beside_rotary_positions(tmp_path: Path) -> None:
    timm = peer("timm")
    ours = model_factory.build_vit(rotary=RotaryConfig(places="index", reference=(3, 2)), gelu="erf", layer_scale=True)
    save(model_factory.build_trained(ours), tmp_path / "model", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    images = model_factory.draw_images(ours.config)
    with torch.no_grad():
        assert (theirs(images) - ours(images)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("change", "architecture"),
    [
        ({}, "vit_base_patch16_224"),
        ({"norm_eps": 1e-5}, "vit_base_patch16_clip_224"),
        ({"gated_mlp": True}, "vit_giant_patch14_dinov2"),
        ({"gated_mlp": True, "norm_eps": 1e-5}, "vit_base_patch16_dinov3_qkvb"),
        ({"rotary": RotaryConfig(places="index"), "gelu": "erf"}, "eva02_base_patch14_224"),
        ({"resample": "bilinear"}, "flexivit_base"),
        ({"distillation_token": True, "distillation_head": True}, "deit_base_distilled_patch16_224"),
    ],
)
def test_the_architecture_has_the_class_and_the_epsilon(
    change: dict[str, Any], architecture: str, tmp_path: Path
) -> None:
    save(model_factory.build_trained(model_factory.build_vit(**change)), tmp_path / "model", "timm")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architecture"] == architecture


@pytest.mark.parametrize("mlp", [61, 63, 97, 170])
@pytest.mark.parametrize("gated", [True, False])
def test_any_width_of_the_mlp_survives_timms_ratio(mlp: int, gated: bool, tmp_path: Path) -> None:
    timm = peer("timm")
    ours = model_factory.build_vit(mlp=mlp, gated_mlp=gated)
    save(model_factory.build_trained(ours), tmp_path / "model", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    images = model_factory.draw_images(ours.config)
    with torch.no_grad():
        assert (theirs(images) - ours(images)).abs().max() <= 1e-5


def test_fields_without_an_effect_are_no_reason_to_refuse(tmp_path: Path) -> None:
    """Pooling of class token and registers where there are none, heads and MLP stated though they are a block's."""
    pool = {"pool": "map", "class_token": False, "pool_prefix": True, "pool_heads": 4, "pool_mlp": 64}
    ours = model_factory.build_vit(drop_remainder=True, **pool)
    save(model_factory.build_trained(ours), tmp_path / "model", "timm")
    images = model_factory.draw_images(ours.config)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "model").model(images), ours(images))
