"""timm's BiT ResNets: folders of `resnetv2_50x1_bit` and similar, or the bare state dict."""

import re
from pathlib import Path
from typing import Any

from vitrail import presets
from vitrail.config import BiTConfig
from vitrail.errors import ModelError
from vitrail.weights import foreign_format
from vitrail.weights.json_files import get_section
from vitrail.weights.trained import Tensors

NUMERICS: dict[str, Any] = {"norm_eps": 1e-5, "standardization": "sqrt(var + eps)", "standardization_eps": 1e-8}
TIMM_VARIANTS = ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4")  # those that timm has names for


def is_bit_resnet(tensors: Tensors) -> bool:
    """Whether these are the tensor names of timm's pre-activation ResNets."""
    return "stem.conv.weight" in tensors and "stages.0.blocks.0.conv3.weight" in tensors


def infer_resnet_architecture(
    tensors: Tensors, settings: dict[str, Any] | None, path: Path
) -> foreign_format.ForeignModelInfo:
    """Infer the function that these weights compute; `settings` is config.json where there is one."""
    _check_settings(settings or {}, path)
    size: Any = get_section(settings or {}, "pretrained_cfg", path).get("input_size")
    is_stated = isinstance(size, list) and len(size) == 3 and all(type(side) is int for side in size)
    image_size = (size[1], size[2]) if is_stated else (224, 224)
    config = foreign_format.infer_resnet_config(tensors, NUMERICS, image_size, path)
    if (settings or {}).get("num_classes") not in (None, config.classes):
        raise ModelError(f"{path} is damaged: config.json and the tensors differ in the number of classes")
    assumptions = () if is_stated else ("image size: 224 x 224, the file does not state it",)
    return foreign_format.ForeignModelInfo(config=config, assumptions=assumptions)


def _check_settings(settings: dict[str, Any], path: Path) -> None:
    """Refuse a config.json of another network than BiT's."""
    arguments = get_section(settings, "model_args", path)
    name = settings.get("architecture", "resnetv2_bit")
    pools = {settings.get("global_pool"), arguments.get("global_pool")}
    if not isinstance(name, str) or not re.fullmatch(r"resnetv2_\w*bit\w*", name):
        raise ModelError(f"{path} is {name!r:.80}; of timm's ResNets only those of BiT are read")
    if unknown := sorted(arguments.keys() - {"global_pool", "in_chans", "num_classes", "drop_rate", "drop_path_rate"}):
        raise ModelError(f"{path} was built with {unknown[0]}={arguments[unknown[0]]!r:.40}, which no BiT ResNet has")
    if not pools <= {None, "avg"}:
        raise ModelError(f"{path}: global_pool is {sorted(map(str, pools))}; a BiT ResNet averages")


def find_architecture_name(config: BiTConfig) -> str:
    """Find timm's name for a ResNet of these units and width."""
    for name in TIMM_VARIANTS:
        depth, factor = name.split("x")
        if (presets.RESNET_UNITS[depth], int(factor)) == (config.conv.units, config.conv.width_factor):
            return f"resnetv2_{name}_bit"
    shape = f"units {list(config.conv.units)}, width x{config.conv.width_factor:g}"
    raise ModelError(f"the timm format cannot hold this model: it has no name for a ResNet of {shape}")
