"""Small models with random, non-zero weights everywhere, and images for them."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from vitrail.config import BiTConfig, ConvConfig, PreprocessConfig, RotaryConfig, ViTConfig
from vitrail.model.resnet import BiT
from vitrail.model.vit import Model, ViT
from vitrail.weights.trained import Origin, Trained

STEM = ConvConfig(units=(1,), norm_eps=1e-6, standardization="std + eps", standardization_eps=1e-5)
SMALL: dict[str, Any] = {
    "width": 32,
    "depth": 3,
    "mlp": 64,
    "heads": 4,
    "patch": 8,
    "image_size": (32, 32),
    "classes": 7,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "erf": {"gelu": "erf"},
    "no-bias": {"qkv_bias": False},
    "hidden-head": {"hidden_head": True},
    "headless": {"classes": 0},
    "hidden-headless": {"classes": 0, "hidden_head": True},
    "norm-mean": {"pool": "norm-mean", "class_token": False},
    "mean-norm": {"pool": "mean-norm"},
    "map": {"pool": "map", "class_token": False},
    "class-mean": {"pool": "class-mean"},
    "registers": {"registers": 4, "prefix_positions": False},
    "placed-registers": {"registers": 4},
    "distilled": {"distillation_token": True, "distillation_head": True},
    "distillation-token": {"distillation_token": True},
    "layer-scale": {"layer_scale": True},
    "no-positions": {"positions": "none"},
    "2d": {"positions": "learned-2d"},
    "sincos": {"positions": "sincos-2d"},
    "relative": {"positions": "relative"},
    "every-layer": {"positions_at": "every-layer"},
    "every-layer-shared": {"positions_at": "every-layer-shared"},
    "2d-every-layer": {"positions": "learned-2d", "positions_at": "every-layer"},
    "sincos-shared": {"positions": "sincos-2d", "positions_at": "every-layer-shared"},
    "hybrid": {"stem": STEM, "patch": 2},
    "wide": {"image_size": (24, 40)},
    "grey": {"channels": 1},
    "epsilon": {"norm_eps": 1e-3},
    "rotary-normalized": {
        "rotary": RotaryConfig(places="normalized"),
        "positions": "none",
        "registers": 4,
        "image_size": (24, 40),
    },
    "rotary-index": {
        "rotary": RotaryConfig(places="index", base=10_000.0, reference=(5, 6), offset=1, order="xy"),
        "image_size": (24, 40),
    },
    "rotary-mean": {"rotary": RotaryConfig(places="index", bfloat16_periods=True), "pool": "norm-mean"},
    "gated": {"gated_mlp": True},
    "gated-normed": {"gated_mlp": True, "mlp_norm": True, "attention_norm": True},
    "clip": {"gelu": "quick", "norm_pre": True, "projection": 24},
    "zero-shot": {"pool": "mean-norm", "normalize_features": True},
    "bias-table": {"positions": "relative-bias", "image_size": (24, 40)},
    "bias-table-mean": {"positions": "relative-bias", "pool": "mean-norm", "class_token": False},
    "map-of-all": {"pool": "map", "pool_heads": 2, "pool_prefix": True, "registers": 2},
    "drop-remainder": {"drop_remainder": True},
}


def build_config(**changes: Any) -> ViTConfig:
    return ViTConfig(**(SMALL | changes))


def build_vit(seed: int = 0, **changes: Any) -> ViT:
    """A ViT in which no parameter is zero, one or equal to another."""
    return fill_parameters(ViT(build_config(**changes)), seed)


def build_bit(seed: int = 0, **changes: Any) -> BiT:
    """A small BiT ResNet, likewise."""
    conv = ConvConfig(units=(1, 2), norm_eps=1e-5, standardization="sqrt(var + eps)", standardization_eps=1e-10)
    return fill_parameters(BiT(BiTConfig(**({"conv": conv, "classes": 7, "image_size": (32, 32)} | changes))), seed)


M = TypeVar("M", ViT, BiT)


def fill_parameters(model: M, seed: int) -> M:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2, generator=generator)
    return model.eval()


def build_trained(model: Model, **changes: Any) -> Trained:
    channels, size = model.config.channels, model.config.image_size
    preprocess = PreprocessConfig(size=size, resize=size, mean=(0.4,) * channels, std=(0.3,) * channels)
    labels = tuple(f"kind {index}" for index in range(model.config.classes)) if model.config.classes else None
    origin = Origin(format="random", name="test")
    return Trained(**({"model": model, "preprocess": preprocess, "labels": labels, "origin": origin} | changes))


def draw_images(
    of: ViTConfig | BiTConfig, count: int = 2, seed: int = 1, size: tuple[int, int] | None = None
) -> Tensor:
    return torch.randn(count, of.channels, *(size or of.image_size), generator=torch.Generator().manual_seed(seed))
