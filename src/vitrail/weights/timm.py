"""timm's weights: a folder of config.json and model.safetensors, or the bare state dict.

The tensor names are the model's own. A bare state dict does not state its heads, GELU form, pooling order or
preprocessing. The origin lists what is assumed for them.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from vitrail import presets
from vitrail.config import BiTConfig, ConvConfig, ModelConfig, PreprocessConfig, ViTConfig, from_json
from vitrail.errors import ModelError, UsageError
from vitrail.model.vit import Model, ViT
from vitrail.weights import foreign_format, tensor_files
from vitrail.weights.foreign_format import BACKBONE, ForeignModelInfo
from vitrail.weights.formats import TENSOR_SUFFIXES
from vitrail.weights.tensor_files import ModelFiles
from vitrail.weights.trained import Tensors, Trained, list_imagenet1k_labels

FORMAT: Final = "timm"
TANH_GELU_NAMES = re.compile(  # the architectures that timm itself builds with act_layer="gelu_tanh"
    r"vit_(base_patch32_siglip|large_patch16_siglip_(gap_)?512|so400m_patch16_siglip|giantopt_patch16_siglip)"
)
KNOWN_HEADS = {  # architectures whose number of heads neither the published sizes nor width / 64 tell
    r"vit_giantopt_patch16_siglip": 16,
    r"vit_base_patch16_gap_224": 16,
    r"test_vit2?$": 2,
    r"test_vit4$": 3,
}
REFUSED_NAMES = {  # part of an architecture's name -> what its tensors and model_args do not state
    "quickgelu": "QuickGELU",
    "_rpn_": "post-normalized blocks",
    "test_vit3": "attention pooling over its register too (pool_include_prefix)",
}
INTERPOLATION_NAMES = {"box": "area"}  # the one that timm names differently
_KNOWN_ARGUMENTS = {
    "img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias",
    "init_values", "class_token", "no_embed_class", "reg_tokens", "global_pool", "fc_norm", "act_layer", "pos_embed",
    "dynamic_img_size", "drop_rate", "drop_path_rate", "weight_init",
}  # fmt: skip
_CHECKED_ARGUMENTS = (  # those that the tensors tell too
    "num_classes", "embed_dim", "depth", "patch_size", "in_chans", "qkv_bias", "class_token", "reg_tokens", "pos_embed",
)  # fmt: skip
STEM_ARCHITECTURES = {  # units of a hybrid's stem -> the architecture that timm builds with it
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
NUMERICS: dict[str, Any] = {"norm_eps": 1e-5, "standardization": "sqrt(var + eps)", "standardization_eps": 1e-8}
TIMM_VARIANTS = ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4")  # those that timm has names for
_OWN_STEM = f"{BACKBONE}stem."  # which timm calls BACKBONE where it has no stages


def recognize(model_files: ModelFiles) -> bool:
    """Whether a file has timm's tensor names."""
    tensors = model_files.tensors
    is_vit = "patch_embed.proj.weight" in tensors and "blocks.0.norm1.weight" in tensors
    return is_vit or is_bit_resnet(tensors)


def read(model_files: ModelFiles) -> Trained:
    """Read the model in a folder or a bare state dict."""
    tensors = rename_tensors(model_files.tensors)
    info = read_info(tensors, model_files.config, model_files.path)
    return foreign_format.build_trained(FORMAT, model_files, tensors, info)


def rename_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """Put tensors under the model's own names."""
    bare = {f"{BACKBONE}{part}": f"{_OWN_STEM}{part}" for part in ("conv.weight", "norm.weight", "norm.bias")}
    if both := [name for name, own in bare.items() if name in tensors and own in tensors]:
        raise ModelError(f"the file has two tensors for {bare[both[0]]!r}, one of them {both[0]!r}")
    return {bare.get(name, name): tensor for name, tensor in tensors.items()}


def infer_architecture(tensors: Tensors, settings: dict[str, Any] | None, path: Path) -> ForeignModelInfo:
    """Infer the function that these weights compute; `settings` is config.json where there is one."""
    if is_bit_resnet(tensors):
        return infer_resnet_architecture(tensors, settings, path)
    assumptions = [] if settings is not None else ["GELU: the erf form, timm's default"]
    settings = settings or {}
    fields, stem = foreign_format.infer_fields(tensors, path), foreign_format.infer_stem(tensors, NUMERICS, path)
    stride = fields["patch"] * (stem.stride if stem else 1)
    arguments, name = tensor_files.get_section(settings, "model_args", path), str(settings.get("architecture", ""))
    _check_architecture_name(name, arguments, stem, path)
    known_heads = (heads for pattern, heads in KNOWN_HEADS.items() if re.match(pattern, name))
    heads = arguments.get("num_heads") or next(known_heads, None)
    if heads is None:
        heads, sentence = foreign_format.guess_heads(fields["width"], fields["depth"])
        assumptions.insert(0, sentence)
    registers = foreign_format.count_tokens(tensors, "reg_token", path)
    prefix = ("cls_token" in tensors) + fields["distillation_token"] + registers
    stated_grid = _parse_stated_grid(settings, stride, path)
    num_positions = foreign_format.count_tokens(tensors, "pos_embed", path)
    grid, prefix_positions = _infer_grid(num_positions, prefix, stated_grid, path)
    if stated_grid not in (None, grid):
        assumptions.append(f"image size: from the {grid[0]} x {grid[1]} positions, config.json states another")
    stated_pool = arguments.get("global_pool") or settings.get("global_pool")
    fields |= {
        "heads": heads,
        "stem": None if stem is None else dataclasses.asdict(stem),
        "image_size": (grid[0] * stride, grid[1] * stride),
        "class_token": "cls_token" in tensors,
        "registers": registers,
        "pool": _infer_pool(tensors, stated_pool, path),
        "positions": "learned-1d" if "pos_embed" in tensors else "none",
        "prefix_positions": prefix_positions,
        "resample": "bicubic-antialias",
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
        "layer_scale": "blocks.0.ls1.gamma" in tensors,
        "gelu": _parse_gelu(arguments.get("act_layer"), name, path),
    }
    config = from_json(ViTConfig, fields)
    _check_stated_config(config, {"num_classes": settings.get("num_classes")} | arguments, path)
    return ForeignModelInfo(config=config, assumptions=tuple(assumptions))


def _check_stated_config(config: ViTConfig, stated: dict[str, Any], path: Path) -> None:
    """Refuse a config.json that contradicts the tensors: one of them is damaged."""
    inferred = _build_model_args(config) | {"num_classes": config.classes}
    for name in _CHECKED_ARGUMENTS:
        if stated.get(name) not in (None, inferred[name]):
            raise ModelError(
                f"{path} is damaged: config.json says {name} is {stated[name]!r:.40}, the tensors {inferred[name]!r}"
            )


def _check_architecture_name(name: str, arguments: dict[str, Any], stem: ConvConfig | None, path: Path) -> None:
    """Refuse an architecture that is no plain ViT, or whose name implies another stem than the tensors have."""
    if unknown := sorted(arguments.keys() - _KNOWN_ARGUMENTS):
        raise ModelError(f"{path} was built with {unknown[0]}={arguments[unknown[0]]!r}, which no plain ViT has")
    for part, what in REFUSED_NAMES.items():
        if part in name:
            raise ModelError(f"{path} is {name} with {what}, which no plain ViT has")
    units = None if stem is None else stem.units
    part_of_name = re.search(r"_r(?:26|50)?_s(?:16|32)", name)
    stated = next((u for u, known in STEM_ARCHITECTURES.items() if part_of_name and part_of_name[0] in known), None)
    if name and stated != units:
        raise ModelError(f"{path} is damaged: {name} has the stem {stated}, the tensors {units}")


def _parse_gelu(activation: object, name: str, path: Path) -> str:
    match activation or ("gelu_tanh" if TANH_GELU_NAMES.match(name) else "gelu"):
        case "gelu":
            return "erf"
        case "gelu_tanh":
            return "tanh"
    raise ModelError(f"{path} uses the activation {activation!r}; a plain ViT has 'gelu' or 'gelu_tanh'")


def _infer_pool(tensors: Tensors, stated: object, path: Path) -> str:
    inferred = "map" if "attn_pool.latent" in tensors else "avg" if "fc_norm.weight" in tensors else None
    pool = stated or inferred or ("token" if "cls_token" in tensors else "avg")
    if pool not in ("token", "avg", "map") or inferred not in (None, pool) or (pool == "map" and not inferred):
        raise ModelError(f"{path}: global_pool is {stated!r:.40}, and no plain ViT with that has its tensors")
    return {"token": "class", "map": "map", "avg": "mean-norm" if inferred else "norm-mean"}[str(pool)]


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


def _parse_stated_grid(settings: dict[str, Any], stride: int, path: Path) -> tuple[int, int] | None:
    """The grid of the image size in config.json."""
    size: Any = tensor_files.get_section(settings, "model_args", path).get("img_size")
    if size is None:
        size = tensor_files.get_section(settings, "pretrained_cfg", path).get("input_size")
        size = size[1:] if isinstance(size, list) else None
    sides = [size, size] if isinstance(size, int) else size
    if isinstance(sides, list) and len(sides) == 2 and all(type(side) is int and side >= stride for side in sides):
        return sides[0] // stride, sides[1] // stride
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
    preprocess, sentences = parse_preprocess_config(pretrained)
    if preprocess is not None and isinstance(info.config, ViTConfig):
        _check_whole_patches(preprocess.size, info.config, path)
    license_name = pretrained.get("license")
    labels = parse_labels(settings, pretrained, info.config.classes)
    if labels is None and settings.get("label_names"):
        sentences.append("labels: unnamed, label_names in config.json is no list with a name for every class")
    return dataclasses.replace(
        info,
        preprocess=preprocess,
        labels=labels,
        license=license_name if isinstance(license_name, str) else None,
        assumptions=(*info.assumptions, *sentences),
    )


def _check_whole_patches(size: tuple[int, int], config: ViTConfig, path: Path) -> None:
    """Refuse images of which timm drops the last rows and columns, since no whole patch fits into them."""
    (height, width), stride = size, config.stride
    if height % stride or width % stride:
        fitting = " x ".join(str(side // stride * stride) for side in size)
        raise ModelError(
            f"{path} is for {height} x {width} pixels, which patches of {stride} do not divide. timm drops the pixels"
            f" that are left over; vitrail does not. Use a model for {fitting}, such as timm's"
            " vit_so400m_patch14_siglip_378 instead of _384, or the weights alone (model.safetensors) at that size"
        )


def parse_preprocess_config(pretrained: dict[str, Any]) -> tuple[PreprocessConfig | None, list[str]]:
    """Parse the preprocessing; where that fails, return None and why."""
    try:
        height, width = pretrained["input_size"][1:]
        fraction, mode = float(pretrained["crop_pct"]), pretrained.get("crop_mode", "center")
        if mode not in ("center", "squash") or (mode == "center" and height != width):
            raise UsageError(f"crop_mode {mode!r} for {height} x {width}")
        scaled = (math.floor(height / fraction), math.floor(width / fraction))
        fields = {name: pretrained[name] for name in ("interpolation", "mean", "std")}
        fields["interpolation"] = INTERPOLATION_NAMES.get(fields["interpolation"], fields["interpolation"])
        fields |= {"size": (height, width), "resize": scaled[:1] if mode == "center" else scaled}
        return from_json(PreprocessConfig, fields), []
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        return None, [f"preprocessing: unknown, config.json does not state it in full ({error})"]


def parse_labels(settings: dict[str, Any], pretrained: dict[str, Any], classes: int) -> tuple[str, ...] | None:
    """Parse the class names: those stated, or ImageNet's where the weights' tag says so."""
    stated = settings.get("label_names") or pretrained.get("label_names")
    if isinstance(stated, list) and len(stated) == classes and all(isinstance(label, str) for label in stated):
        return tuple(stated)
    tag = str(pretrained.get("tag") or "")
    if classes == 1000 and re.search(r"(^|_)in1k$", tag):  # "augreg_in21k_ft_in1k": the head is ImageNet's
        return list_imagenet1k_labels()
    return None


def write(trained: Trained, path: Path) -> list[str]:
    """Write a folder, or the bare state dict where `path` names a file; the notes say what it loses."""
    config, tensors, notes = _convert_for_timm(trained.model)
    bare = path.suffix in TENSOR_SUFFIXES
    settings = None if bare else _build_config_json(config, trained)
    held = infer_architecture(tensors, settings, foreign_format.DRAFT_PATH).config
    notes += foreign_format.check_round_trip("bare timm" if bare else FORMAT, config, held)
    if isinstance(config, ViTConfig) and config.stem is not None and not config.stem.units:
        tensors = {name.replace(_OWN_STEM, BACKBONE): tensor for name, tensor in tensors.items()}
    if settings is None:
        tensor_files.write_tensors(path, tensors, {})
        return [*notes, "a bare state dict has no place for preprocessing, labels and origin: they were left out"]
    path.mkdir()
    tensor_files.write_json(path / "config.json", settings)
    tensor_files.write_tensors(path / "model.safetensors", tensors, {})
    notes += _describe_lost_preprocess(trained.preprocess, settings)
    return notes + foreign_format.describe_lost_origin(FORMAT, trained.origin)


def _describe_lost_preprocess(preprocess: PreprocessConfig | None, settings: dict[str, Any]) -> list[str]:
    """Note the fields of the preprocessing that config.json cannot state exactly."""
    held, _ = parse_preprocess_config(settings["pretrained_cfg"])
    if preprocess is None or held == preprocess:
        return []
    names = [field.name for field in dataclasses.fields(PreprocessConfig)]
    differ = [name for name in names if getattr(held, name, None) != getattr(preprocess, name)]
    return [f"preprocessing: timm cannot state this model's {', '.join(differ)}; the nearest was written"]


def _convert_for_timm(model: Model) -> tuple[ModelConfig, dict[str, Tensor], list[str]]:
    """Convert config and tensors to what timm has, with notes; refuse what it lacks."""
    if not isinstance(model, ViT):
        return model.config, dict(model.state_dict()), []
    config = model.config
    lacks = {
        "hidden layer before the head": config.hidden_head,
        "positions but those added at the stem": config.positions == "relative" or config.positions_at != "stem",
        "pooling of the class token and the mean together": config.pool == "class-mean",
        "distillation token without a head of its own": config.distillation_token and not config.distillation_head,
        "registers beside a distillation token": config.distillation_token and config.registers > 0,
        "distillation token without a position": config.distillation_token and not config.num_positioned_prefix_tokens,
        "distillation token in a hybrid": config.distillation_token and config.stem is not None,
        "stem of these units and width": config.stem is not None
        and (config.stem.units not in STEM_ARCHITECTURES or config.stem.width_factor != 1),
    }
    for what, needed in lacks.items():
        if needed:
            raise ModelError(f"the timm format cannot hold this model: timm's ViT has no {what}")
    if config.positions == "none":
        return config, dict(model.state_dict()), []
    return foreign_format.convert_positions_to_table(model, prefix=config.prefix_positions)


def _build_config_json(config: ModelConfig, trained: Trained) -> dict[str, Any]:
    """Build config.json. timm builds the named architecture with model_args instead of its own arguments."""
    if isinstance(config, ViTConfig):
        name, first_conv = "vit_base_patch16_224", "patch_embed.proj"
        if config.distillation_token:
            name = "deit_base_distilled_patch16_224"
        if config.stem is not None:
            name = STEM_ARCHITECTURES[config.stem.units]
            first_conv = f"{_OWN_STEM if config.stem.units else BACKBONE}conv"
        arguments = _build_model_args(config)
        architecture = {"architecture": name, "global_pool": arguments["global_pool"], "model_args": arguments}
        classifier: Any = ["head", "head_dist"] if config.distillation_head else "head"
    else:
        architecture = {"architecture": _find_resnet_name(config)}
        first_conv, classifier = "stem.conv", "head.fc"
    settings = architecture | {
        "num_classes": config.classes,
        "num_features": config.num_features,
        "pretrained_cfg": {
            "input_size": [config.channels, *config.image_size],
            "fixed_input_size": isinstance(config, ViTConfig),
            "num_classes": config.classes,
            "pool_size": None,
            "first_conv": first_conv,
            "classifier": classifier,
            **({} if trained.preprocess is None else _format_preprocess_config(trained.preprocess)),
            **({} if trained.origin.license is None else {"license": trained.origin.license}),
        },
    }
    if trained.labels is not None:
        settings["label_names"] = list(trained.labels)
    return settings


def _build_model_args(config: ViTConfig) -> dict[str, Any]:
    """Build the arguments with which timm builds this ViT."""
    ratio = config.mlp / config.width
    if int(config.width * ratio) != config.mlp:
        ratio = (config.mlp + 0.5) / config.width
    return {
        "img_size": list(config.image_size),
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
        "global_pool": {"class": "token", "norm-mean": "avg", "mean-norm": "avg", "map": "map"}[config.pool],
        "fc_norm": config.pool == "mean-norm",
        "act_layer": "gelu_tanh" if config.gelu == "tanh" else "gelu",
        "pos_embed": "none" if config.positions == "none" else "learn",
        "in_chans": config.channels,
    }


def _find_resnet_name(config: BiTConfig) -> str:
    """Find timm's name for a ResNet of these units and width."""
    for name in TIMM_VARIANTS:
        depth, factor = name.split("x")
        if (presets.RESNET_UNITS[depth], int(factor)) == (config.conv.units, config.conv.width_factor):
            return f"resnetv2_{name}_bit"
    shape = f"units {list(config.conv.units)}, width x{config.conv.width_factor:g}"
    raise ModelError(f"the timm format cannot hold this model: it has no name for a ResNet of {shape}")


def _format_preprocess_config(preprocess: PreprocessConfig) -> dict[str, Any]:
    """Format the preprocessing for timm; the crop fraction is chosen so that timm's rounding gives the same sizes."""
    side, scaled = preprocess.size[0], preprocess.resize[0]
    fraction = round(side / scaled, 3)
    if math.floor(side / fraction) != scaled:
        fraction = side / (scaled + 0.5)
    return {
        "interpolation": "box" if preprocess.interpolation == "area" else preprocess.interpolation,
        "crop_pct": fraction,
        "crop_mode": "center" if len(preprocess.resize) == 1 else "squash",
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
    }
