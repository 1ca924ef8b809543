"""timm's BiT ResNets: folders of `resnetv2_50x1_bit` and its like, or the bare state dict."""

from pathlib import Path
from typing import Any

from vitrail import presets
from vitrail.config import BiTConfig
from vitrail.errors import ModelError
from vitrail.weights import foreign, storage
from vitrail.weights.trained import Tensors

NUMERICS: dict[str, Any] = {"norm_eps": 1e-5, "standardise": "sqrt(var + eps)", "standardise_eps": 1e-8}
PUBLISHED = ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4")  # what timm has names for


def recognises(tensors: Tensors) -> bool:
    """Whether these are the tensor names of timm's pre-activation ResNets."""
    return "stem.conv.weight" in tensors and "stages.0.blocks.0.conv3.weight" in tensors


def architecture(tensors: Tensors, settings: dict[str, Any] | None, path: Path) -> foreign.Read:
    """The function these weights compute."""
    name = str((settings or {}).get("architecture", "_bit"))
    if "_bit" not in name:
        raise ModelError(f"{path} is {name}; of timm's ResNets those of BiT are read")
    _, channels, _, _ = foreign.dimensions(tensors, "stem.conv.weight", 4, path)
    classes = foreign.dimensions(tensors, "head.fc.weight", 4, path)[0] if "head.fc.weight" in tensors else 0
    size: Any = storage.section(settings or {}, "pretrained_cfg", path).get("input_size")
    stated = isinstance(size, list) and len(size) == 3 and all(type(side) is int for side in size)
    sides = (size[1], size[2]) if stated else (224, 224)
    conv = foreign.conv(tensors, "", NUMERICS, path)
    config = BiTConfig(conv=conv, channels=channels, classes=classes, image_size=sides)
    return foreign.Read(
        config=config, assumptions=() if stated else ("image size: 224 x 224, the file does not state it",)
    )


def architecture_name(config: BiTConfig) -> str:
    """timm's name for a ResNet of these units and width."""
    for name in PUBLISHED:
        depth, factor = name.split("x")
        if (presets.UNITS[depth], int(factor)) == (config.conv.units, config.conv.width_factor):
            return f"resnetv2_{name}_bit"
    shape = f"units {list(config.conv.units)}, width x{config.conv.width_factor}"
    raise ModelError(f"the timm format cannot hold this model: it has no name for a ResNet of {shape}")
