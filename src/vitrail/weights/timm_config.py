"""The config.json with which timm builds a model, and its tensors; a model that timm cannot build is refused.

timm builds an architecture by name, with `model_args` instead of the name's own arguments. Only the epsilon of norms is
no such argument. So a name with the right class and epsilon is chosen, and every other argument is stated.
"""

import dataclasses
from typing import Any

from torch import Tensor

from vitrail import presets
from vitrail.config import BiTConfig, ModelConfig, ViTConfig
from vitrail.errors import ModelError
from vitrail.model.vit import Model, ViT
from vitrail.weights import foreign_format, timm_preprocess, timm_tensors
from vitrail.weights.foreign_format import BACKBONE
from vitrail.weights.timm_architectures import STEM_ARCHITECTURES, list_rotary_arguments
from vitrail.weights.timm_tensors import OWN_STEM, find_family
from vitrail.weights.trained import Tensors, Trained

TIMM_VARIANTS = ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4")  # ResNets that timm has names for


def convert_model(model: Model) -> tuple[ModelConfig, dict[str, Tensor], list[str]]:
    """Convert config and tensors, still under their own names, to what timm has; refuse what it lacks."""
    if not isinstance(model, ViT):
        return model.config, dict(model.state_dict()), []
    for what, needed in _list_lacks(drop_ineffective_fields(model.config)).items():
        if needed:
            raise ModelError(f"the timm format cannot hold this model: timm's ViT has no {what}")
    if model.config.positions == "relative-bias":
        return drop_ineffective_fields(model.config), *foreign_format.drop_key_biases(model.state_dict())
    if model.config.positions == "none":
        return drop_ineffective_fields(model.config), dict(model.state_dict()), []
    config, tensors, notes = foreign_format.convert_positions_to_table(model, prefix=model.config.prefix_positions)
    return drop_ineffective_fields(config), tensors, notes


def _list_lacks(config: ViTConfig) -> dict[str, bool]:
    """What timm's classes do not have, and whether this config needs it."""
    family, stem = find_family(config), config.stem
    return {
        "hidden layer before the head": config.hidden_head,
        "positions but those added at the stem": config.positions == "relative" or config.positions_at != "stem",
        "pooling of the class token and the mean together": config.pool == "class-mean",
        "distillation token without a head of its own": config.distillation_token and not config.distillation_head,
        "registers beside a distillation token": config.distillation_token and config.registers > 0,
        "distillation token without a position": config.distillation_token and not config.num_positioned_prefix_tokens,
        "distillation token in a hybrid": config.distillation_token and stem is not None,
        "distillation token beside gated MLPs, a projection or a norm before the blocks": config.distillation_token
        and (family != "VisionTransformer" or config.gated_mlp or config.projection > 0 or config.norm_pre),
        "stem of these units and width": stem is not None
        and (stem.units not in STEM_ARCHITECTURES or stem.width_factor != 1),
        "stem beside rotary positions, gated MLPs or norms but the usual ones": stem is not None
        and (family != "VisionTransformer" or config.gated_mlp or config.norm_pre or config.norm_eps != 1e-6),
        "head after a projection": config.projection > 0 and config.classes > 0,
        "features of length 1 before its head": config.normalize_features,
        "GELU but the erf form beside rotary positions or relative biases": family != "VisionTransformer"
        and config.gelu != "erf"
        and (not config.gated_mlp or config.pool == "map"),
        "relative biases without a class token, or with this pooling": family == "Beit"
        and (config.num_prefix_tokens != 1 or not config.class_token or config.pool not in ("class", "mean-norm")),
        "relative biases beside rotary positions or more norms": family == "Beit"
        and (config.rotary is not None or config.attention_norm or config.mlp_norm or config.norm_pre),
        "relative biases of a grid that is not square, which it resizes at load": family == "Beit"
        and config.grid[0] != config.grid[1],
        "attention pooling of patches alone beside rotary positions": family == "Eva"
        and config.pool == "map"
        and config.num_prefix_tokens > 0
        and not config.pool_prefix,
    }


def drop_ineffective_fields(config: ViTConfig) -> ViTConfig:
    """The same function, with fields that change nothing as timm's reader sets them."""
    is_divided = all(side % config.stride == 0 for side in config.image_size)
    return dataclasses.replace(
        config,
        gelu="erf" if config.gated_mlp and config.pool != "map" else config.gelu,
        drop_remainder=config.drop_remainder and not is_divided,
        pool_heads=0 if config.pool_heads == config.heads else config.pool_heads,
        pool_mlp=0 if config.pool_mlp == config.mlp else config.pool_mlp,
        pool_prefix=config.pool_prefix and config.num_prefix_tokens > 0,
    )


def convert_tensors(config: ModelConfig, tensors: Tensors) -> dict[str, Tensor]:
    """Put the model's own tensors under timm's names."""
    if isinstance(config, BiTConfig):
        return dict(tensors)
    return timm_tensors.to_timm_names(config, tensors, find_family(config))


def build_config_json(config: ModelConfig, trained: Trained, tensors: Tensors) -> dict[str, Any]:
    """Build config.json for a model with these tensors under its own names."""
    if isinstance(config, ViTConfig):
        first_conv = "patch_embed.proj"
        if config.stem is not None:
            first_conv = f"{OWN_STEM if config.stem.units else BACKBONE}conv"
        arguments = _build_model_args(config, tensors)
        name = _choose_architecture(config)
        architecture = {"architecture": name, "global_pool": arguments["global_pool"], "model_args": arguments}
        classifier: Any = ["head", "head_dist"] if config.distillation_head else "head"
        classes, features = config.classes or config.projection, config.width
    else:
        architecture = {"architecture": _find_resnet_name(config)}
        first_conv, classifier = "stem.conv", "head.fc"
        classes, features = config.classes, config.num_features
    settings = architecture | {
        "num_classes": classes,
        "num_features": features,
        "pretrained_cfg": {
            "input_size": [config.channels, *config.image_size],
            "fixed_input_size": isinstance(config, ViTConfig),
            "num_classes": classes,
            "pool_size": None,
            "first_conv": first_conv,
            "classifier": classifier,
            **({} if trained.preprocess is None else timm_preprocess.format_preprocess_config(trained.preprocess)),
            **({} if trained.origin.license is None else {"license": trained.origin.license}),
        },
    }
    if trained.labels is not None:
        settings["label_names"] = list(trained.labels)
    return settings


def _choose_architecture(config: ViTConfig) -> str:
    """A name whose class and epsilon are those of this config."""
    if config.stem is not None:
        return STEM_ARCHITECTURES[config.stem.units]
    has_clip_epsilon = config.norm_eps == 1e-5
    match find_family(config):
        case "Beit":
            return "beit_base_patch16_224"
        case "Eva" if has_clip_epsilon:
            return "vit_pe_core_base_patch16_224" if config.projection else "vit_base_patch16_dinov3_qkvb"
        case "Eva":
            return "eva02_base_patch16_clip_224" if config.projection else "eva02_base_patch14_224"
    if config.distillation_token:
        return "deit_base_distilled_patch16_224"
    if config.gated_mlp:
        return "vit_giant_patch14_dinov2"
    if has_clip_epsilon:
        return "vit_base_patch16_clip_224"
    return (
        "flexivit_base" if config.resample == "bilinear" else "vit_base_patch16_224"
    )  # whose positions timm resamples


def _build_model_args(config: ViTConfig, tensors: Tensors) -> dict[str, Any]:
    """Build the arguments with which timm builds this ViT."""
    family = find_family(config)
    packed = 2 if config.gated_mlp and family == "VisionTransformer" else 1  # which counts both halves of a gated MLP
    arguments = {
        "img_size": list(config.image_size),
        "patch_size": config.patch,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": _compute_ratio(packed * config.mlp, config.width),
        "qkv_bias": config.qkv_bias,
        "init_values": 1e-5 if config.layer_scale else None,
        "global_pool": {"class": "token", "norm-mean": "avg", "mean-norm": "avg", "map": "map"}[config.pool],
        "in_chans": config.channels,
    }
    if family == "VisionTransformer":
        return arguments | _list_vit_arguments(config)
    return arguments | (_list_beit_arguments(config) if family == "Beit" else _list_eva_arguments(config, tensors))


def _compute_ratio(hidden: int, width: int) -> float:
    """The ratio from which timm computes this hidden width, rounding down."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width


def _list_vit_arguments(config: ViTConfig) -> dict[str, Any]:
    """The arguments of timm's `VisionTransformer` alone."""
    arguments: dict[str, Any] = {
        "class_token": config.class_token,
        "no_embed_class": not config.prefix_positions,
        "reg_tokens": config.registers,
        "fc_norm": config.pool == "mean-norm",
        "pos_embed": "none" if config.positions == "none" else "learn",
    }
    if config.norm_pre or config.norm_eps == 1e-5:  # some names state another
        arguments["pre_norm"] = config.norm_pre
    if config.pool_prefix:
        arguments["pool_include_prefix"] = True
    if not config.gated_mlp:  # where the activation is the gate's
        arguments["act_layer"] = {"erf": "gelu", "tanh": "gelu_tanh", "quick": "quick_gelu"}[config.gelu]
    return arguments


def _list_eva_arguments(config: ViTConfig, tensors: Tensors) -> dict[str, Any]:
    """The arguments of timm's `Eva` alone; its attention of type "rope" has key biases."""
    return {
        "class_token": config.class_token,
        "no_embed_class": not config.prefix_positions,
        "num_reg_tokens": config.registers,
        "use_abs_pos_emb": config.positions != "none",
        "use_fc_norm": config.pool == "mean-norm",
        "use_pre_transformer_norm": config.norm_pre,
        "qkv_fused": True,
        "attn_type": "rope" if foreign_format.has_key_bias(tensors) else "eva",
        "swiglu_mlp": config.gated_mlp,
        "swiglu_align_to": 0,
        "scale_mlp": config.mlp_norm,
        "scale_attn_inner": config.attention_norm,
        "attn_pool_num_heads": config.pool_heads or config.heads,
        "attn_pool_mlp_ratio": _compute_ratio(config.pool_mlp or config.mlp, config.width),
        "dynamic_img_size": False,
    } | list_rotary_arguments(config.rotary)


def _list_beit_arguments(config: ViTConfig) -> dict[str, Any]:
    """The arguments of timm's `Beit` alone."""
    return {"swiglu_mlp": config.gated_mlp, "use_abs_pos_emb": False, "use_rel_pos_bias": True}


def _find_resnet_name(config: BiTConfig) -> str:
    """Find timm's name for a ResNet of these units and width."""
    for name in TIMM_VARIANTS:
        depth, factor = name.split("x")
        if (presets.RESNET_UNITS[depth], int(factor)) == (config.conv.units, config.conv.width_factor):
            return f"resnetv2_{name}_bit"
    shape = f"units {list(config.conv.units)}, width x{config.conv.width_factor:g}"
    raise ModelError(f"the timm format cannot hold this model: it has no name for a ResNet of {shape}")
