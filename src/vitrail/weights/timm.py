"""timm's weights: a folder of config.json and model.safetensors, or the bare state dict.

The tensor names are the model's own. A bare state dict does not state its heads, GELU form, pooling order or
preprocessing. The origin lists what is assumed for them.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any, Final

from vitrail.config import ConvConfig, ViTConfig, from_json
from vitrail.errors import ModelError
from vitrail.model.positions import count_biases
from vitrail.weights import foreign_format, tensor_files, timm_config, timm_preprocess, timm_tensors
from vitrail.weights.foreign_format import ForeignModelInfo
from vitrail.weights.formats import TENSOR_SUFFIXES
from vitrail.weights.tensor_files import ModelFiles
from vitrail.weights.timm_architectures import (
    STEM_ARCHITECTURES,
    guess_arguments,
    parse_gelu,
    parse_rotary,
    resolve_arguments,
)
from vitrail.weights.trained import Tensors, Trained

FORMAT: Final = "timm"
NUMERICS: dict[str, Any] = {"norm_eps": 1e-5, "standardization": "sqrt(var + eps)", "standardization_eps": 1e-8}
BIAS_TABLE = "blocks.0.attn.relative_position_bias_table"


def recognize(model_files: ModelFiles) -> bool:
    """Whether a file has timm's tensor names."""
    tensors = model_files.tensors
    is_vit = "patch_embed.proj.weight" in tensors and "blocks.0.norm1.weight" in tensors
    return is_vit or is_bit_resnet(tensors)


def read(model_files: ModelFiles) -> Trained:
    """Read the model in a folder or a bare state dict."""
    named = {"blocks.0.gamma_1", "blocks.0.attn.qkv.bias", "cls_token", "pos_embed"}
    if model_files.config is None and named <= model_files.tensors.keys():
        raise ModelError(
            f"{model_files.path} has the names of timm's RoPE ViTs and of the authors' DeiT III: give timm's folder"
            " with its config.json, or the authors' .pth as it was downloaded"
        )
    tensors = timm_tensors.rename_tensors(model_files.tensors)
    info = read_info(tensors, model_files.config, model_files.path)
    if isinstance(info.config, ViTConfig) and info.config.projection:
        tensors = timm_tensors.rename_projection(tensors)
    return foreign_format.build_trained(FORMAT, model_files, tensors, info)


def infer_architecture(tensors: Tensors, settings: dict[str, Any] | None, path: Path) -> ForeignModelInfo:
    """Infer the function that these weights compute; `settings` is config.json where there is one."""
    if is_bit_resnet(tensors):
        return infer_resnet_architecture(tensors, settings, path)
    fields, stem = foreign_format.infer_fields(tensors, path), foreign_format.infer_stem(tensors, NUMERICS, path)
    if settings is None:
        settings, (arguments, assumptions) = {}, guess_arguments(tensors, path)
    else:
        arguments, assumptions = _read_arguments(settings, stem, path), []
    heads = arguments.get("num_heads")
    if heads is None:
        heads, sentence = foreign_format.guess_heads(fields["width"], fields["depth"])
        assumptions.insert(0, sentence)
    fields |= _infer_tokens(tensors, arguments, settings, fields, stem, path)
    fields |= _infer_blocks(tensors, arguments, path)
    fields |= _infer_pooling(tensors, arguments, heads, path)
    fields |= {"heads": heads, "stem": None if stem is None else dataclasses.asdict(stem)}
    if _is_clip(settings, tensors, path):
        fields |= {"projection": fields["classes"], "classes": 0}
    config = from_json(ViTConfig, fields)
    return ForeignModelInfo(config=config, assumptions=(*assumptions, *_check_settings(config, settings, path)))


def _infer_tokens(
    tensors: Tensors,
    arguments: dict[str, Any],
    settings: dict[str, Any],
    fields: dict[str, Any],
    stem: ConvConfig | None,
    path: Path,
) -> dict[str, Any]:
    """Prefix tokens, positions, and the image size that they are for."""
    stride = fields["patch"] * (stem.stride if stem else 1)
    registers = foreign_format.count_tokens(tensors, "reg_token", path)
    prefix = ("cls_token" in tensors) + fields["distillation_token"] + registers
    size = _parse_stated_size(settings, path)
    stated_grid = None if size is None or min(size) < stride else (size[0] // stride, size[1] // stride)
    table = tensors.get(BIAS_TABLE)
    rotary = parse_rotary(arguments, path)
    if table is not None:
        if "pos_embed" in tensors:
            raise ModelError(f"{path} has both learned positions and tables of relative biases, which no plain ViT has")
        count, _ = foreign_format.get_dimensions(tensors, BIAS_TABLE, 2, path)
        grid, prefix_positions = _infer_bias_grid(count, stated_grid, path), True
    else:
        positions = foreign_format.count_tokens(tensors, "pos_embed", path)
        default = (224 // stride, 224 // stride) if rotary and stride <= 224 else None
        grid, prefix_positions = _infer_grid(positions, prefix, stated_grid or default, path)
    image_size = (grid[0] * stride, grid[1] * stride)
    has_remainder = size is not None and grid == stated_grid and image_size != size
    return {
        "image_size": size if has_remainder else image_size,
        "drop_remainder": has_remainder,
        "class_token": "cls_token" in tensors,
        "registers": registers,
        "positions": "relative-bias" if table is not None else "learned-1d" if "pos_embed" in tensors else "none",
        "prefix_positions": prefix_positions,
        "resample": "bilinear" if table is not None else arguments.get("resample", "bicubic-antialias"),
        "rotary": None if rotary is None else dataclasses.asdict(rotary),
    }


def _infer_blocks(tensors: Tensors, arguments: dict[str, Any], path: Path) -> dict[str, Any]:
    """What a block computes."""
    hidden, (_, mlp) = (foreign_format.get_dimensions(tensors, f"blocks.0.mlp.{name}.weight", 2, path)
                        for name in ("fc1", "fc2"))  # fmt: skip
    is_gated = hidden[0] == 2 * mlp
    if is_gated and "attn_pool.latent" in tensors and not arguments.get("is_eva"):
        raise ModelError(f"{path} has attention pooling beside gated MLPs, with an activation that no plain ViT has")
    if "blocks.0.mlp.norm.weight" in tensors and not is_gated:
        raise ModelError(f"{path} has a norm inside MLPs that have no gate, which no plain ViT has")
    return {
        "mlp": mlp,
        "gated_mlp": is_gated,
        "mlp_norm": "blocks.0.mlp.norm.weight" in tensors,
        "attention_norm": "blocks.0.attn.norm.weight" in tensors,
        "norm_pre": "norm_pre.weight" in tensors,
        "norm_eps": arguments.get("norm_eps", 1e-6),
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
        "layer_scale": "blocks.0.ls1.gamma" in tensors,
        "gelu": parse_gelu(arguments, path),
    }


def _infer_pooling(tensors: Tensors, arguments: dict[str, Any], heads: object, path: Path) -> dict[str, Any]:
    """How tokens become the features that the head reads."""
    if ("norm.weight" in tensors) == ("fc_norm.weight" in tensors):
        count = "both before and after pooling" if "norm.weight" in tensors else "neither before nor after pooling"
        raise ModelError(f"{path} has a norm {count}; a plain ViT has one of them")
    stated = arguments.get("global_pool")
    inferred = "map" if "attn_pool.latent" in tensors else "avg" if "fc_norm.weight" in tensors else None
    pool = stated or inferred or ("token" if "cls_token" in tensors else "avg")
    if pool not in ("token", "avg", "map") or inferred not in (None, pool) or (pool == "map" and not inferred):
        raise ModelError(f"{path}: global_pool is {stated!r:.40}, and no plain ViT with that has its tensors")
    if pool != "map":
        return {"pool": {"token": "class", "avg": "mean-norm" if inferred else "norm-mean"}[str(pool)]}
    pool_mlp, _ = foreign_format.get_dimensions(tensors, "attn_pool.mlp.fc1.weight", 2, path)
    _, mlp = foreign_format.get_dimensions(tensors, "blocks.0.mlp.fc2.weight", 2, path)
    pool_heads, has_prefix = arguments.get("attn_pool_num_heads") or heads, {"cls_token", "reg_token"} & tensors.keys()
    return {
        "pool": "map",
        "pool_heads": 0 if pool_heads == heads else pool_heads,
        "pool_mlp": 0 if pool_mlp == mlp else pool_mlp,
        "pool_prefix": bool(arguments.get("pool_include_prefix") and has_prefix),
    }


def _is_clip(settings: dict[str, Any], tensors: Tensors, path: Path) -> bool:
    """Whether the head is the projection of a CLIP model, which timm stores as a head with a bias of zeros."""
    name, pretrained = str(settings.get("architecture", "")), tensor_files.get_section(settings, "pretrained_cfg", path)
    is_named = "_clip_" in name or "vit_pe_core_" in name or (not name and "norm_pre.weight" in tensors)
    return is_named and "_ft_" not in str(pretrained.get("tag")) and timm_tensors.is_projection(tensors)


def _read_arguments(settings: dict[str, Any], stem: ConvConfig | None, path: Path) -> dict[str, Any]:
    """Read what timm builds the network with; refuse an architecture with another stem than the tensors have."""
    stated, name = tensor_files.get_section(settings, "model_args", path), str(settings.get("architecture", ""))
    if "global_pool" not in stated and settings.get("global_pool"):
        stated = stated | {"global_pool": settings["global_pool"]}
    arguments = resolve_arguments(name, stated, path)
    units = None if stem is None else stem.units
    part_of_name = re.search(r"_r(?:26|50)?_s(?:16|32)", name)
    known = next((u for u, known in STEM_ARCHITECTURES.items() if part_of_name and part_of_name[0] in known), None)
    if name and known != units:
        raise ModelError(f"{path} is damaged: {name} has the stem {known}, the tensors {units}")
    return arguments


def _check_settings(config: ViTConfig, settings: dict[str, Any], path: Path) -> list[str]:
    """Refuse a config.json that contradicts the tensors: one of them is damaged; return what else to say."""
    stated = {"num_classes": settings.get("num_classes")} | tensor_files.get_section(settings, "model_args", path)
    for name, inferred in _list_checked_arguments(config).items():
        if stated.get(name) not in (None, inferred):
            raise ModelError(
                f"{path} is damaged: config.json says {name} is {stated[name]!r:.40}, the tensors {inferred!r}"
            )
    sentences, size = [], _parse_stated_size(settings, path)
    if size is not None and min(size) >= config.stride and config.grid != tuple(side // config.stride for side in size):
        rows, columns = config.grid
        sentences.append(f"image size: from the {rows} x {columns} positions, config.json states another")
    if config.positions == "relative-bias":
        sentences.append("positions: resampled bilinearly for other image sizes, where timm fits splines")
    return sentences


def _list_checked_arguments(config: ViTConfig) -> dict[str, Any]:
    """The arguments of timm's that the tensors tell too."""
    has_absolute = config.positions == "learned-1d"
    return {
        "num_classes": config.classes or config.projection,
        "embed_dim": config.width,
        "depth": config.depth,
        "patch_size": config.patch,
        "in_chans": config.channels,
        "qkv_bias": config.qkv_bias,
        "class_token": config.class_token,
        "reg_tokens": config.registers,
        "num_reg_tokens": config.registers,
        "pos_embed": "learn" if has_absolute else "none",
        "use_abs_pos_emb": has_absolute,
        "use_rel_pos_bias": config.positions == "relative-bias",
        "pre_norm": config.norm_pre,
        "use_pre_transformer_norm": config.norm_pre,
        "swiglu_mlp": config.gated_mlp,
        "scale_mlp": config.mlp_norm,
        "scale_attn_inner": config.attention_norm,
    }


def _infer_bias_grid(count: int, stated: tuple[int, int] | None, path: Path) -> tuple[int, int]:
    """Infer the grid of a table of relative biases with so many rows."""
    side = (foreign_format.find_square_side(count - 3) + 1) // 2
    for grid in (stated, (side, side)):
        if grid is not None and count_biases(grid) == count:
            return grid
    raise ModelError(f"{path}: its tables of {count} relative biases fit neither the stated image size nor a square")


def _infer_grid(count: int, prefix: int, stated: tuple[int, int] | None, path: Path) -> tuple[tuple[int, int], bool]:
    """Infer the grid of `count` positions, and whether prefix tokens have some of them."""
    if not count:
        if stated is None:
            raise ModelError(f"{path} has no positions, and nothing says which image size it is for")
        return stated, True
    for positioned in (True, False):
        if stated is not None and count - prefix * positioned == stated[0] * stated[1]:
            return stated, positioned
    for positioned in (True, False):
        if side := foreign_format.find_square_side(count - prefix * positioned):
            return (side, side), positioned
    where = f"a grid of {stated[0]} x {stated[1]}" if stated else "a square grid"
    raise ModelError(f"{path}: its {count} positions fit {where} neither with nor without {prefix} prefix tokens")


def _parse_stated_size(settings: dict[str, Any], path: Path) -> tuple[int, int] | None:
    """Parse the image size in config.json."""
    size: Any = tensor_files.get_section(settings, "model_args", path).get("img_size")
    if size is None:
        size = tensor_files.get_section(settings, "pretrained_cfg", path).get("input_size")
        size = size[1:] if isinstance(size, list) else None
    sides = [size, size] if isinstance(size, int) else size
    if isinstance(sides, list) and len(sides) == 2 and all(type(side) is int for side in sides):
        return sides[0], sides[1]
    return None


def is_bit_resnet(tensors: Tensors) -> bool:
    """Whether these are the tensor names of timm's pre-activation ResNets."""
    return "stem.conv.weight" in tensors and "stages.0.blocks.0.conv3.weight" in tensors


def infer_resnet_architecture(tensors: Tensors, settings: dict[str, Any] | None, path: Path) -> ForeignModelInfo:
    """Infer the function that these weights compute; `settings` is config.json where there is one."""
    settings = settings or {}
    arguments = tensor_files.get_section(settings, "model_args", path)
    name = settings.get("architecture", "resnetv2_bit")
    pools = {settings.get("global_pool"), arguments.get("global_pool")}
    if not isinstance(name, str) or not re.fullmatch(r"resnetv2_\w*bit\w*", name):
        raise ModelError(f"{path} is {name!r:.80}; of timm's ResNets only those of BiT are read")
    if unknown := sorted(arguments.keys() - {"global_pool", "in_chans", "num_classes", "drop_rate", "drop_path_rate"}):
        raise ModelError(f"{path} was built with {unknown[0]}={arguments[unknown[0]]!r:.40}, which no BiT ResNet has")
    if not pools <= {None, "avg"}:
        raise ModelError(f"{path}: global_pool is {sorted(map(str, pools))}; a BiT ResNet averages")
    size: Any = tensor_files.get_section(settings, "pretrained_cfg", path).get("input_size")
    is_stated = isinstance(size, list) and len(size) == 3 and all(type(side) is int for side in size)
    image_size = (size[1], size[2]) if is_stated else (224, 224)
    config = foreign_format.infer_resnet_config(tensors, NUMERICS, image_size, path)
    if settings.get("num_classes") not in (None, config.classes):
        raise ModelError(f"{path} is damaged: config.json and the tensors differ in the number of classes")
    assumptions = () if is_stated else ("image size: 224 x 224, the file does not state it",)
    return ForeignModelInfo(config=config, assumptions=assumptions)


def read_info(tensors: Tensors, settings: dict[str, Any] | None, path: Path) -> ForeignModelInfo:
    """Read everything that a timm folder or bare state dict states."""
    info = infer_architecture(tensors, settings, path)
    if settings is None:
        unknown = "preprocessing: unknown, the file does not state it"
        return dataclasses.replace(info, assumptions=(*info.assumptions, unknown))
    pretrained = tensor_files.get_section(settings, "pretrained_cfg", path)
    preprocess, sentences = timm_preprocess.parse_preprocess_config(pretrained)
    license_name = pretrained.get("license")
    labels = timm_preprocess.parse_labels(settings, pretrained, info.config.classes)
    if labels is None and settings.get("label_names"):
        sentences.append("labels: unnamed, label_names in config.json is no list with a name for every class")
    return dataclasses.replace(
        info,
        preprocess=preprocess,
        labels=labels,
        license=license_name if isinstance(license_name, str) else None,
        assumptions=(*info.assumptions, *sentences),
    )


def write(trained: Trained, path: Path) -> list[str]:
    """Write a folder, or the bare state dict where `path` names a file; the notes say what it loses."""
    config, own, notes = timm_config.convert_model(trained.model)
    tensors = timm_config.convert_tensors(config, own)
    bare = path.suffix in TENSOR_SUFFIXES
    settings = None if bare else timm_config.build_config_json(config, trained, own)
    held = infer_architecture(timm_tensors.rename_tensors(tensors), settings, foreign_format.DRAFT_PATH).config
    notes += foreign_format.check_round_trip("bare timm" if bare else FORMAT, config, held)
    if settings is None:
        tensor_files.write_tensors(path, tensors, {})
        return [*notes, "a bare state dict has no place for preprocessing, labels and origin: they were left out"]
    path.mkdir()
    tensor_files.write_json(path / "config.json", settings)
    tensor_files.write_tensors(path / "model.safetensors", tensors, {})
    notes += timm_preprocess.describe_lost_preprocess(trained.preprocess, settings)
    return notes + foreign_format.describe_lost_origin(FORMAT, trained.origin)
