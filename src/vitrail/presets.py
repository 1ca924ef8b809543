"""Models by name: the papers' size tables, and the preprocessing that weights are usually trained with.

A preset is a size and a patch side, `b16`; any patch side may be written, `PATCHES` lists the published ones. Presets
compute what the paper's own code computes (tanh GELU, LayerNorm epsilon 1e-6, positions resampled as scipy's zoom).
"""

import dataclasses
import difflib
import re
from typing import Any, NamedTuple

from vitrail.config import Preprocess, ViTConfig
from vitrail.errors import UsageError


class Size(NamedTuple):
    width: int
    depth: int
    mlp: int
    heads: int


SIZES = {  #        width depth  mlp  heads
    "ti":     Size( 192,   12,   768,  3),  # Touvron et al. 2021, table 1
    "s":      Size( 384,   12,  1536,  6),  # Touvron et al. 2021, table 1
    "m":      Size( 512,   12,  2048,  8),  # big_vision
    "b":      Size( 768,   12,  3072, 12),  # Dosovitskiy et al. 2021, table 1
    "l":      Size(1024,   24,  4096, 16),  # Dosovitskiy et al. 2021, table 1
    "so400m": Size(1152,   27,  4304, 16),  # Alabdulmohsin et al. 2023
    "h":      Size(1280,   32,  5120, 16),  # Dosovitskiy et al. 2021, table 1
    "g":      Size(1408,   40,  6144, 16),  # Zhai et al. 2022, table 2
    "bigg":   Size(1664,   48,  8192, 16),  # Zhai et al. 2022, table 2: "G"
}  # fmt: skip

PATCHES = {
    "ti": (16,),
    "s": (16, 32),
    "m": (16, 32),
    "b": (8, 16, 32),
    "l": (14, 16, 32),
    "so400m": (14,),
    "h": (14,),
    "g": (14,),
    "bigg": (14,),
}

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
PREPROCESS: dict[str, dict[str, Any]] = {
    "imagenet": IMAGENET | {"interpolation": "bicubic"},  # DeiT and most of timm
    "inception": {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "interpolation": "bicubic"},  # Google, AugReg
    "torchvision": IMAGENET | {"interpolation": "bilinear"},
}

_PRESET = re.compile(rf"({'|'.join(SIZES)})([1-9]\d*)")


def names() -> list[str]:
    """The published presets, smallest first."""
    return [f"{size}{patch}" for size in SIZES for patch in PATCHES[size]]


def exists(name: str) -> bool:
    """Whether `name` is a size with a patch side, published or not."""
    return _PRESET.fullmatch(name) is not None


def vit(name: str, **changes: Any) -> ViTConfig:
    """The configuration of a preset, `changes` applied."""
    found = _PRESET.fullmatch(name)
    if found is None:
        close = difflib.get_close_matches(name, names(), n=1)
        meant = f" Did you mean {close[0]}?" if close else ""
        raise UsageError(f"there is no preset {name!r}.{meant} `vitrail list` shows them; `b16` is size b, patch 16.")
    if unknown := sorted(changes.keys() - {field.name for field in dataclasses.fields(ViTConfig)}):
        raise UsageError(f"a ViT has no setting {unknown[0]!r}")
    patch = int(changes.get("patch") or found[2])
    side = max(1, round(224 / patch)) * patch  # 224 for every published patch side
    return ViTConfig(**(SIZES[found[1]]._asdict() | {"patch": patch, "image_size": (side, side)} | changes))


def heads(width: int, depth: int) -> int | None:
    """The number of heads of the published size with this width and depth, where there is one."""
    return next((size.heads for size in SIZES.values() if (size.width, size.depth) == (width, depth)), None)


def preprocess(name: str, size: tuple[int, int], channels: int = 3) -> Preprocess:
    """The usual evaluation view of `name`'s weights: short side at 8/7 of the crop, as 256 is to 224."""
    if name not in PREPROCESS:
        raise UsageError(f"there is no preprocessing {name!r}; choose one of {', '.join(PREPROCESS)}")
    resize = (round(size[0] * 8 / 7),) if size[0] == size[1] else size
    fields: dict[str, Any] = {
        key: value if key == "interpolation" else in_turn(value, channels) for key, value in PREPROCESS[name].items()
    }
    return Preprocess(size=size, resize=resize, **fields)


def in_turn(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """A value for each channel: the given ones in turn, or their mean for a single channel."""
    if channels == 1:
        return (sum(values) / len(values),)
    return tuple(values[channel % len(values)] for channel in range(channels))
