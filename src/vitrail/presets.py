"""Models by name: the papers' size tables, and the usual preprocessing of their weights.

`b16` is size b with patches of 16; any patch side is allowed, `PATCH_SIDES` lists the published ones. `r50-b16` is a
hybrid, `bit-r50x1` a BiT ResNet. Presets compute what the paper's own code computes: tanh GELU, LayerNorm epsilon 1e-6,
positions resampled as scipy's zoom, Google's epsilons of group norm and weight standardization.

`dinov3-b16` and the others of `FAMILIES` are the architectures of published weights: what their own code computes, at
224 x 224 pixels (Perception Encoders: at the size they were trained at). Biases that they lack are there, and may be 0.
"""

import dataclasses
import difflib
import re
from typing import Any, NamedTuple, TypeVar

from vitrail.config import BiTConfig, ConvConfig, PreprocessConfig, RotaryConfig, ViTConfig
from vitrail.config.serialization import convert_field
from vitrail.errors import UsageError


class ViTSize(NamedTuple):
    """The dimensions of a ViT."""

    width: int
    depth: int
    mlp: int
    heads: int


SIZES = {  #        width depth  mlp  heads
    "ti":     ViTSize( 192,   12,   768,  3),  # Touvron et al. 2021, table 1
    "s":      ViTSize( 384,   12,  1536,  6),  # Touvron et al. 2021, table 1
    "m":      ViTSize( 512,   12,  2048,  8),  # big_vision
    "b":      ViTSize( 768,   12,  3072, 12),  # Dosovitskiy et al. 2021, table 1
    "l":      ViTSize(1024,   24,  4096, 16),  # Dosovitskiy et al. 2021, table 1
    "so400m": ViTSize(1152,   27,  4304, 16),  # Alabdulmohsin et al. 2023
    "h":      ViTSize(1280,   32,  5120, 16),  # Dosovitskiy et al. 2021, table 1
    "g":      ViTSize(1408,   40,  6144, 16),  # Zhai et al. 2022, table 2
    "bigg":   ViTSize(1664,   48,  8192, 16),  # Zhai et al. 2022, table 2: "G"
}  # fmt: skip

PATCH_SIDES = {
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

IMAGENET_NORMALIZATION: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
PREPROCESS_PRESETS: dict[str, dict[str, Any]] = {
    "imagenet": IMAGENET_NORMALIZATION | {"interpolation": "bicubic"},  # DeiT and most of timm
    "inception": {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "interpolation": "bicubic"},  # Google, AugReg
    "torchvision": IMAGENET_NORMALIZATION | {"interpolation": "bilinear"},
}

RESNET_UNITS = {
    "26": (2, 2, 2, 2),
    "50": (3, 4, 6, 3),
    "101": (3, 4, 23, 3),
    "152": (3, 8, 36, 3),
    "200": (3, 24, 36, 3),
}
BIT_VARIANTS = ("50x1", "50x2", "50x3", "101x1", "101x3", "152x1", "152x2", "152x4", "200x3")


class HybridSize(NamedTuple):
    """A hybrid: the ViT's size, the stem's units in each stage, and the patch on its feature map."""

    size: str
    units: tuple[int, ...]
    patch: int


HYBRIDS = {  # /16 moves the last stage's units into the third
    "r-ti16": HybridSize("ti", (), 8),  # the name says 16, its stride is 32
    "r26-s32": HybridSize("s", RESNET_UNITS["26"], 1),
    "r26-b32": HybridSize("b", RESNET_UNITS["26"], 1),
    "r50-b16": HybridSize("b", (3, 4, 9), 1),
    "r50-b32": HybridSize("b", RESNET_UNITS["50"], 1),
    "r50-l16": HybridSize("l", (3, 4, 9), 1),
    "r50-l32": HybridSize("l", RESNET_UNITS["50"], 1),
}
HYBRID_NUMERICS: dict[str, Any] = {"norm_eps": 1e-6, "standardization": "std + eps", "standardization_eps": 1e-5}
BIT_NUMERICS: dict[str, Any] = {"norm_eps": 1e-5, "standardization": "sqrt(var + eps)", "standardization_eps": 1e-10}

_DINOV2: dict[str, Any] = {"gelu": "erf", "layer_scale": True, "resample": "bicubic-offset"}
_DINOV3 = _DINOV2 | {
    "norm_eps": 1e-5,
    "registers": 4,
    "positions": "none",
    "rotary": RotaryConfig(places="normalized"),
}
_DINOV2_REGISTERS = _DINOV2 | {"registers": 4, "prefix_positions": False, "resample": "bicubic-antialias"}
_CLIP = {"gelu": "quick", "norm_eps": 1e-5, "norm_pre": True, "resample": "bicubic-antialias"}
_OPENCLIP = _CLIP | {"gelu": "erf"}
_SIGLIP = {"class_token": False, "pool": "map"}
_EVA02 = {
    "gated_mlp": True,
    "pool": "mean-norm",
    "rotary": RotaryConfig(places="index", base=10_000.0, reference=(16, 16)),
    "resample": "bicubic-antialias",
}
_EVA02_CLIP = _EVA02 | {"pool": "class", "mlp_norm": True, "attention_norm": True}
_EVA01 = {"gelu": "erf", "pool": "mean-norm", "resample": "bicubic-antialias"}
_MAE = {"gelu": "erf", "pool": "mean-norm", "resample": "bicubic"}
_IJEPA = {"gelu": "erf", "class_token": False, "pool": "norm-mean", "resample": "bicubic"}
_DEIT3 = {"gelu": "erf", "layer_scale": True, "prefix_positions": False, "resample": "bicubic"}
_BEIT = {"gelu": "erf", "layer_scale": True, "positions": "relative-bias", "pool": "mean-norm", "resample": "bilinear"}
_PE = {"gelu": "erf", "norm_eps": 1e-5, "norm_pre": True, "pool": "map", "pool_heads": 8, "pool_prefix": True}


def _list_pe_fields(side: int, patch: int, projection: int, *, class_token: bool = True) -> dict[str, Any]:
    """What a Perception Encoder has: rotary positions on the grid it was trained at, from 1 beside a class token."""
    grid = (side // patch, side // patch)
    rotary = RotaryConfig(places="index", base=10_000.0, reference=grid, offset=int(class_token), order="xy")
    size = {"image_size": (side, side), "projection": projection, "resample": "bicubic-antialias"}
    return _PE | {"patch": patch, "rotary": rotary, "class_token": class_token} | size


_PE_GIGANTIC = _list_pe_fields(448, 14, 1280, class_token=False) | {"pool_mlp": 6144}
FAMILIES: dict[str, tuple[ViTSize, dict[str, Any]]] = {
    "dinov2-s14":      (SIZES["s"], _DINOV2 | {"patch": 14}),  # Oquab et al. 2023
    "dinov2-b14":      (SIZES["b"], _DINOV2 | {"patch": 14}),
    "dinov2-l14":      (SIZES["l"], _DINOV2 | {"patch": 14}),
    "dinov2-g14":      (ViTSize(1536, 40, 4096, 24), _DINOV2 | {"patch": 14, "gated_mlp": True}),
    "dinov2-reg-s14":  (SIZES["s"], _DINOV2_REGISTERS | {"patch": 14}),  # Darcet et al. 2024
    "dinov2-reg-b14":  (SIZES["b"], _DINOV2_REGISTERS | {"patch": 14}),
    "dinov2-reg-l14":  (SIZES["l"], _DINOV2_REGISTERS | {"patch": 14}),
    "dinov2-reg-g14":  (ViTSize(1536, 40, 4096, 24), _DINOV2_REGISTERS | {"patch": 14, "gated_mlp": True}),
    "eupe-ti16":       (SIZES["ti"], _DINOV3 | {"patch": 16}),  # its S and B are DINOv3's
    "dinov3-s16":      (SIZES["s"], _DINOV3 | {"patch": 16}),  # Siméoni et al. 2025
    "dinov3-s16plus":  (SIZES["s"], _DINOV3 | {"patch": 16, "gated_mlp": True}),
    "dinov3-b16":      (SIZES["b"], _DINOV3 | {"patch": 16}),
    "dinov3-l16":      (SIZES["l"], _DINOV3 | {"patch": 16}),
    "dinov3-l16plus":  (SIZES["l"], _DINOV3 | {"patch": 16, "gated_mlp": True}),
    "dinov3-h16plus":  (ViTSize(1280, 32, 5120, 20), _DINOV3 | {"patch": 16, "gated_mlp": True}),
    "dinov3-7b16":     (ViTSize(4096, 40, 8192, 32), _DINOV3 | {"patch": 16, "gated_mlp": True, "qkv_bias": False}),
    "clip-b32":        (SIZES["b"], _CLIP | {"patch": 32, "projection": 512}),  # Radford et al. 2021
    "clip-b16":        (SIZES["b"], _CLIP | {"patch": 16, "projection": 512}),
    "clip-l14":        (SIZES["l"], _CLIP | {"patch": 14, "projection": 768}),
    "clip-h14":        (SIZES["h"], _OPENCLIP | {"patch": 14, "projection": 1024}),  # Cherti et al. 2023
    "clip-g14":        (SIZES["g"], _OPENCLIP | {"patch": 14, "projection": 1024}),
    "clip-bigg14":     (SIZES["bigg"], _OPENCLIP | {"patch": 14, "projection": 1280}),
    "siglip-b16":      (SIZES["b"], _SIGLIP | {"patch": 16}),  # Zhai et al. 2023
    "siglip-l16":      (SIZES["l"], _SIGLIP | {"patch": 16}),
    "siglip-so400m14": (SIZES["so400m"], _SIGLIP | {"patch": 14}),
    "siglip-so400m16": (SIZES["so400m"], _SIGLIP | {"patch": 16}),  # Tschannen et al. 2025, as the next
    "siglip-g16":      (ViTSize(1536, 40, 6144, 16), _SIGLIP | {"patch": 16}),
    "eva-g14":         (SIZES["g"], _EVA01 | {"patch": 14}),  # Fang et al. 2022
    "eva02-ti14":      (ViTSize(192, 12, 512, 3), _EVA02 | {"patch": 14}),  # Fang et al. 2023
    "eva02-s14":       (ViTSize(384, 12, 1024, 6), _EVA02 | {"patch": 14}),
    "eva02-b14":       (ViTSize(768, 12, 2048, 12), _EVA02 | {"patch": 14, "mlp_norm": True}),
    "eva02-l14":       (ViTSize(1024, 24, 2730, 16), _EVA02 | {"patch": 14, "mlp_norm": True}),
    "eva02-clip-b16":  (ViTSize(768, 12, 2048, 12), _EVA02_CLIP | {"patch": 16, "projection": 512}),  # Sun et al. 2023
    "eva02-clip-l14":  (ViTSize(1024, 24, 2730, 16), _EVA02_CLIP | {"patch": 14, "projection": 768}),
    "mae-b16":         (SIZES["b"], _MAE | {"patch": 16}),  # He et al. 2022, as fine-tuned
    "mae-l16":         (SIZES["l"], _MAE | {"patch": 16}),
    "mae-h14":         (SIZES["h"], _MAE | {"patch": 14}),
    "ijepa-h14":       (SIZES["h"], _IJEPA | {"patch": 14}),  # Assran et al. 2023
    "ijepa-g16":       (SIZES["g"], _IJEPA | {"patch": 16}),
    "deit3-s16":       (SIZES["s"], _DEIT3 | {"patch": 16}),  # Touvron et al. 2022
    "deit3-m16":       (SIZES["m"], _DEIT3 | {"patch": 16}),
    "deit3-b16":       (SIZES["b"], _DEIT3 | {"patch": 16}),
    "deit3-l16":       (SIZES["l"], _DEIT3 | {"patch": 16}),
    "deit3-h14":       (SIZES["h"], _DEIT3 | {"patch": 14}),
    "beit-b16":        (SIZES["b"], _BEIT | {"patch": 16}),  # Bao et al. 2022
    "beit-l16":        (SIZES["l"], _BEIT | {"patch": 16}),
    "pe-core-ti16":    (SIZES["ti"], _list_pe_fields(384, 16, 512)),  # Bolya et al. 2025
    "pe-core-s16":     (SIZES["s"], _list_pe_fields(384, 16, 512)),
    "pe-core-b16":     (SIZES["b"], _list_pe_fields(224, 16, 1024)),
    "pe-core-l14":     (SIZES["l"], _list_pe_fields(336, 14, 1024)),
    "pe-core-g14":     (ViTSize(1536, 50, 8960, 16), _PE_GIGANTIC),
}  # fmt: skip

_VIT_PATTERN = re.compile(rf"({'|'.join(SIZES)})([1-9]\d*)")
_BIT_PATTERN = re.compile(rf"bit-r({'|'.join(RESNET_UNITS)})x([1-9]\d*)")


def list_presets() -> list[str]:
    """The published presets: ViTs, their families, hybrids, ResNets, each smallest first."""
    vits = [f"{size}{patch}" for size in SIZES for patch in PATCH_SIDES[size]]
    return [*vits, *FAMILIES, *HYBRIDS, *(f"bit-r{name}" for name in BIT_VARIANTS)]


def has_preset(name: str) -> bool:
    """Whether `name` is a preset: of a family, a hybrid, a ResNet, or a size with a patch side, published or not."""
    return (
        name in HYBRIDS or name in FAMILIES or any(pattern.fullmatch(name) for pattern in (_VIT_PATTERN, _BIT_PATTERN))
    )


def get_preset_config(name: str, **changes: Any) -> ViTConfig | BiTConfig:
    """The configuration of a preset, with `changes` to its fields."""
    if bit := _BIT_PATTERN.fullmatch(name):
        conv = ConvConfig(units=RESNET_UNITS[bit[1]], width_factor=int(bit[2]), **BIT_NUMERICS)
        return _build_config(BiTConfig, {"conv": conv} | changes)
    if name in HYBRIDS:
        hybrid = HYBRIDS[name]
        stem = ConvConfig(units=hybrid.units, **HYBRID_NUMERICS)
        return _build_config(ViTConfig, SIZES[hybrid.size]._asdict() | {"patch": hybrid.patch, "stem": stem} | changes)
    if name in FAMILIES:
        size, fields = FAMILIES[name]
        return _build_config(ViTConfig, size._asdict() | fields | changes)
    vit = _VIT_PATTERN.fullmatch(name)
    if vit is None:
        raise UsageError(describe_unknown_preset(name))
    patch = convert_field(ViTConfig, "patch", changes.get("patch") or int(vit[2]), "patch")
    side = max(1, round(224 / patch)) * patch  # 224 for every published patch side
    return _build_config(ViTConfig, SIZES[vit[1]]._asdict() | {"patch": patch, "image_size": (side, side)} | changes)


def describe_unknown_preset(name: str) -> str:
    """The error message for a name that no preset has."""
    close = [name.lower()] if has_preset(name.lower()) else difflib.get_close_matches(name.lower(), list_presets(), n=1)
    suggestion = f" Did you mean {close[0]}?" if close else ""
    return f"there is no preset {name!r:.80}.{suggestion} `vitrail list` shows them; `b16` is size b, patch 16."


C = TypeVar("C", ViTConfig, BiTConfig)


def _build_config(kind: type[C], fields: dict[str, Any]) -> C:
    if unknown := sorted(fields.keys() - {field.name for field in dataclasses.fields(kind)}):
        close = difflib.get_close_matches(unknown[0], [field.name for field in dataclasses.fields(kind)], n=1)
        suggestion = f": did you mean {close[0]}?" if close else ""
        raise UsageError(f"a {'ViT' if kind is ViTConfig else 'ResNet'} has no setting {unknown[0]!r:.80}{suggestion}")
    checked: dict[str, Any] = {
        name: value if dataclasses.is_dataclass(value) else convert_field(kind, name, value, name)
        for name, value in fields.items()
    }
    return kind(**checked)


def find_published_heads(width: int, depth: int) -> int | None:
    """The number of heads of the published size with this width and depth, if there is one."""
    return next((size.heads for size in SIZES.values() if (size.width, size.depth) == (width, depth)), None)


def build_preprocess_config(name: str, size: tuple[int, int], channels: int = 3) -> PreprocessConfig:
    """The usual preprocessing of `name`'s weights: the short side is 8/7 of the crop, as 256 is of 224."""
    if name not in PREPROCESS_PRESETS:
        raise UsageError(f"there is no preprocessing {name!r}; choose one of {', '.join(PREPROCESS_PRESETS)}")
    resize = (round(size[0] * 8 / 7),) if size[0] == size[1] else size
    fields: dict[str, Any] = {
        key: value if key == "interpolation" else spread_over_channels(value, channels)
        for key, value in PREPROCESS_PRESETS[name].items()
    }
    return PreprocessConfig(size=size, resize=resize, **fields)


def spread_over_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """A value for each channel: `values` in turn, or their mean for a single channel."""
    if channels == 1:
        return (sum(values) / len(values),)
    return tuple(values[channel % len(values)] for channel in range(channels))
