"""timm's weights: a folder of config.json and model.safetensors, or the bare state dict.

The tensor names are the model's own. A bare state dict does not say its heads, GELU form, pooling order or
preprocessing; what is assumed for them is listed with the origin.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

from vitrail.config import Preprocess, ViTConfig, from_json
from vitrail.errors import ModelError, UsageError
from vitrail.weights import foreign, labels, storage
from vitrail.weights.trained import Tensors, Trained

FORMAT = "timm"
TANH_GELU = re.compile(  # the architectures that timm itself builds with act_layer="gelu_tanh"
    r"vit_(base_patch32_siglip|large_patch16_siglip_(gap_)?512|so400m_patch16_siglip|giantopt_patch16_siglip)"
)
_KNOWN_ARGUMENTS = {
    "img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias",
    "init_values", "class_token", "no_embed_class", "reg_tokens", "global_pool", "fc_norm", "act_layer", "pos_embed",
    "dynamic_img_size", "drop_rate", "drop_path_rate", "weight_init",
}  # fmt: skip


def recognises(tensors: Tensors) -> bool:
    """Whether these are timm's tensor names."""
    return "patch_embed.proj.weight" in tensors and "blocks.0.norm1.weight" in tensors


def architecture(tensors: Tensors, settings: dict[str, Any] | None, path: Path) -> foreign.Read:
    """The function these weights compute; `settings` is config.json where there is one."""
    size, assumptions = foreign.shape(tensors, path), []
    arguments = storage.section(settings or {}, "model_args", path)
    name = str((settings or {}).get("architecture", ""))
    _refuse_unknown(name, arguments, path)
    heads = arguments.get("num_heads")
    if heads is None:
        heads, sentence = foreign.guess_heads(size.width, size.depth)
        assumptions.append(sentence)
    if settings is None:
        assumptions.append("GELU: the erf form, timm's default")
    registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
    prefix = ("cls_token" in tensors) + ("dist_token" in tensors) + registers
    grid, prefix_positions = _grid(tensors, prefix, _stated_grid(settings or {}, size.patch, path), path)
    stated_pool = arguments.get("global_pool") or (settings or {}).get("global_pool")
    config = size._asdict() | {
        "heads": heads,
        "image_size": (grid[0] * size.patch, grid[1] * size.patch),
        "class_token": "cls_token" in tensors,
        "distillation_token": "dist_token" in tensors,
        "distillation_head": "head_dist.weight" in tensors,
        "registers": registers,
        "pool": _pool(tensors, stated_pool, path),
        "hidden_head": "pre_logits.fc.weight" in tensors,
        "positions": "learned-1d" if "pos_embed" in tensors else "none",
        "prefix_positions": prefix_positions,
        "resample": "bicubic-antialias",
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
        "layer_scale": "blocks.0.ls1.gamma" in tensors,
        "gelu": _gelu(arguments.get("act_layer"), name, path),
    }
    return foreign.Read(config=from_json(ViTConfig, config), assumptions=tuple(assumptions))


def _refuse_unknown(name: str, arguments: dict[str, Any], path: Path) -> None:
    if unknown := sorted(arguments.keys() - _KNOWN_ARGUMENTS):
        raise ModelError(f"{path} was built with {unknown[0]}={arguments[unknown[0]]!r}, which no plain ViT has")
    if "quickgelu" in name:
        raise ModelError(f"{path} is {name}, whose QuickGELU no plain ViT has")


def _gelu(activation: object, name: str, path: Path) -> str:
    match activation or ("gelu_tanh" if TANH_GELU.match(name) else "gelu"):
        case "gelu":
            return "erf"
        case "gelu_tanh":
            return "tanh"
    raise ModelError(f"{path} uses the activation {activation!r}; a plain ViT has 'gelu' or 'gelu_tanh'")


def _pool(tensors: Tensors, stated: object, path: Path) -> str:
    if "attn_pool.latent" in tensors:
        return "map"
    if "fc_norm.weight" in tensors:
        return "mean-norm"
    if stated not in (None, "token", "avg", ""):
        raise ModelError(f"{path}: global_pool is {stated!r}; a plain ViT has 'token', 'avg' or 'map'")
    return "norm-mean" if stated == "avg" or "cls_token" not in tensors else "class"


def _grid(tensors: Tensors, prefix: int, stated: tuple[int, int] | None, path: Path) -> tuple[tuple[int, int], bool]:
    """The grid the positions belong to, and whether the prefix tokens have positions."""
    if "pos_embed" not in tensors:
        if stated is None:
            raise ModelError(f"{path} has no positions and no config.json, so nothing says which image size it is for")
        return stated, True
    if tensors["pos_embed"].ndim != 3:
        raise ModelError(f"{path} is damaged: pos_embed has {tensors['pos_embed'].ndim} dimensions, not 3")
    count = tensors["pos_embed"].shape[1]
    for positioned in (True, False):
        patches = count - (prefix if positioned else 0)
        grid = stated or foreign.square_grid(patches)
        if grid is not None and patches == grid[0] * grid[1]:
            return grid, positioned
    where = f"a grid of {stated[0]} x {stated[1]}" if stated else "a square grid"
    raise ModelError(f"{path}: its {count} positions fit {where} neither with nor without {prefix} prefix tokens")


def _stated_grid(settings: dict[str, Any], patch: int, path: Path) -> tuple[int, int] | None:
    """The grid of the image size in config.json."""
    stated = storage.section(settings, "model_args", path).get("img_size")
    if stated is None:
        stated = (storage.section(settings, "pretrained_cfg", path).get("input_size") or [])[1:]
    sides = [stated, stated] if isinstance(stated, int) else stated
    if isinstance(sides, list) and len(sides) == 2 and all(type(side) is int and side > 0 for side in sides):
        return sides[0] // patch, sides[1] // patch
    return None


def read(tensors: Tensors, settings: dict[str, Any] | None, path: Path) -> foreign.Read:
    """Everything a timm folder or bare state dict says."""
    found = architecture(tensors, settings, path)
    if settings is None:
        unknown = "preprocessing: unknown, the file does not state it"
        return dataclasses.replace(found, assumptions=(*found.assumptions, unknown))
    pretrained = storage.section(settings, "pretrained_cfg", path)
    preprocess, sentences = _preprocess(pretrained)
    licence = pretrained.get("license")
    return dataclasses.replace(
        found,
        preprocess=preprocess,
        labels=_labels(settings, pretrained, found.config.classes),
        licence=licence if isinstance(licence, str) else None,
        assumptions=(*found.assumptions, *sentences),
    )


def _preprocess(pretrained: dict[str, Any]) -> tuple[Preprocess | None, list[str]]:
    """The preprocessing, or why it is unknown."""
    try:
        height, width = pretrained["input_size"][1:]
        fraction, mode = float(pretrained["crop_pct"]), pretrained.get("crop_mode", "center")
        if mode not in ("center", "squash"):
            raise UsageError(f"crop_mode {mode!r}")
        scaled = (math.floor(height / fraction), math.floor(width / fraction))
        fields = {name: pretrained[name] for name in ("interpolation", "mean", "std")}
        fields |= {"size": (height, width), "resize": scaled[:1] if mode == "center" and height == width else scaled}
        return from_json(Preprocess, fields), []
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        return None, [f"preprocessing: unknown, config.json does not state it in full ({error})"]


def _labels(settings: dict[str, Any], pretrained: dict[str, Any], classes: int) -> tuple[str, ...] | None:
    named = settings.get("label_names") or pretrained.get("label_names")
    if isinstance(named, list) and len(named) == classes and all(isinstance(label, str) for label in named):
        return tuple(named)
    tag = str(pretrained.get("tag") or "")
    if classes == 1000 and re.search(r"(^|_)in1k$", tag):  # "augreg_in21k_ft_in1k": the head is ImageNet's
        return labels.named("imagenet1k")
    return None


def write(trained: Trained, path: Path) -> list[str]:
    """Write a folder, or where `path` names a file the bare state dict; the notes say what that loses."""
    config = trained.model.config
    lacks = {
        "hidden layer before the head": config.hidden_head,
        "pooling of the class token and the mean together": config.pool == "class-mean",
        "distillation token without a head of its own": config.distillation_token and not config.distillation_head,
    }
    for what, wanted in lacks.items():
        if wanted:
            raise ModelError(f"the timm format cannot hold this model: timm's ViT has no {what}")
    tensors, notes = dict(trained.model.state_dict()), list[str]()
    if config.positions != "none":
        config, tensors, notes = foreign.with_table(trained.model, prefix=config.prefix_positions)
    if path.suffix:
        foreign.check_held("bare timm", config, architecture(tensors, None, foreign.DRAFT).config)
        storage.write(path, tensors, {})
        return [*notes, "a bare state dict has no place for preprocessing, labels and origin: they were left out"]
    settings = _settings(config, trained)
    foreign.check_held(FORMAT, config, architecture(tensors, settings, foreign.DRAFT).config)
    path.mkdir()
    storage.write_json(path / "config.json", settings)
    storage.write(path / "model.safetensors", tensors, {})
    if trained.preprocess is not None and _preprocess(settings["pretrained_cfg"])[0] != trained.preprocess:
        notes.append(
            f"preprocessing: timm cannot say resize {list(trained.preprocess.resize)}; the nearest was written"
        )
    return notes


def _settings(config: ViTConfig, trained: Trained) -> dict[str, Any]:
    """config.json. timm builds the named architecture with model_args in place of its own arguments."""
    ratio = config.mlp / config.width
    if int(config.width * ratio) != config.mlp:
        ratio = (config.mlp + 0.5) / config.width
    size = list(config.image_size)
    pool = {"class": "token", "norm-mean": "avg", "mean-norm": "avg", "map": "map"}[config.pool]
    arguments = {
        "img_size": size,
        "patch_size": config.patch,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": ratio,
        "qkv_bias": config.qkv_bias,
        "init_values": 1e-5 if config.layer_scale else None,
        "class_token": config.class_token,
        "no_embed_class": not config.prefix_positions,
        "reg_tokens": config.registers,
        "global_pool": pool,
        "fc_norm": config.pool == "mean-norm",
        "act_layer": "gelu_tanh" if config.gelu == "tanh" else "gelu",
        "pos_embed": "none" if config.positions == "none" else "learn",
        "in_chans": config.channels,
    }
    settings: dict[str, Any] = {
        "architecture": "deit_base_distilled_patch16_224" if config.distillation_token else "vit_base_patch16_224",
        "num_classes": config.classes,
        "num_features": config.width,
        "global_pool": pool,
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [config.channels, *size],
            "fixed_input_size": True,
            "num_classes": config.classes,
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": ["head", "head_dist"] if config.distillation_head else "head",
            **({} if trained.preprocess is None else _pretrained(trained.preprocess)),
            **({} if trained.origin.licence is None else {"license": trained.origin.licence}),
        },
    }
    if trained.labels is not None:
        settings["label_names"] = list(trained.labels)
    return settings


def _pretrained(preprocess: Preprocess) -> dict[str, Any]:
    """timm's words for the preprocessing; the crop fraction is chosen so that timm's own rounding gives our sizes."""
    side, scaled = preprocess.size[0], preprocess.resize[0]
    fraction = round(side / scaled, 3)
    if math.floor(side / fraction) != scaled:
        fraction = side / (scaled + 0.5)
    return {
        "interpolation": preprocess.interpolation,
        "crop_pct": fraction,
        "crop_mode": "center" if len(preprocess.resize) == 1 else "squash",
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
    }
