"""The families of transformers' models: what each calls its tensors, and what its config.json leaves unsaid.

Files have the tensor names of version 4, which version 5 reads and writes too; a model of version 5 in memory has
others. Both are read, and version 4's are written. Several families leave out biases: those read as zeros.
"""

import dataclasses
import re
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from vitrail.config import Resample, ViTConfig
from vitrail.errors import ModelError
from vitrail.weights import foreign_format
from vitrail.weights.foreign_format import TensorNameMap
from vitrail.weights.trained import Tensors

ATTENTION_NAMES = {
    "attention.attention.query.": "attn.q.",  # in files
    "attention.attention.key.": "attn.k.",
    "attention.attention.value.": "attn.v.",
    "attention.output.dense.": "attn.proj.",
    "attention.q_proj.": "attn.q.",  # version 5 in memory
    "attention.k_proj.": "attn.k.",
    "attention.v_proj.": "attn.v.",
    "attention.o_proj.": "attn.proj.",
}
NORM_AND_SCALE_NAMES = {
    "norm1.": "norm1.",
    "norm2.": "norm2.",
    "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma",
}
GATED_MLP_NAMES = {  # `gate` and `up` are joined in `fc1`, see join_gate
    "mlp.weights_in.": "mlp.fc1.",
    "mlp.weights_out.": "mlp.fc2.",
    "mlp.gate_proj.": "mlp.gate.",
    "mlp.up_proj.": "mlp.up.",
    "mlp.down_proj.": "mlp.fc2.",
}
VIT_NAMES = TensorNameMap(
    layer_pattern=re.compile(r"(?:encoder\.layer|layers)\.(\d+)\."),
    layer_template="encoder.layer.{}.",
    top_prefixes={
        "embeddings.cls_token": "cls_token",
        "embeddings.distillation_token": "dist_token",
        "embeddings.register_tokens": "reg_token",
        "embeddings.position_embeddings": "pos_embed",
        "embeddings.patch_embeddings.projection.": "patch_embed.proj.",
        "layernorm.": "norm.",
        "pooler.layernorm.": "fc_norm.",
        "pooler.dense.": "pre_logits.fc.",
        "classifier.": "head.",
        "cls_classifier.": "head.",
        "distillation_classifier.": "head_dist.",
    },
    block_prefixes={
        "layernorm_before.": "norm1.",
        **ATTENTION_NAMES,
        "layernorm_after.": "norm2.",
        "intermediate.dense.": "mlp.fc1.",
        "output.dense.": "mlp.fc2.",
        **NORM_AND_SCALE_NAMES,
        "mlp.fc1.": "mlp.fc1.",
        "mlp.fc2.": "mlp.fc2.",
        **GATED_MLP_NAMES,
    },
)
DINOV2_NAMES = dataclasses.replace(
    VIT_NAMES,
    block_prefixes={
        **NORM_AND_SCALE_NAMES,
        **ATTENTION_NAMES,
        "mlp.fc1.": "mlp.fc1.",
        "mlp.fc2.": "mlp.fc2.",
        **GATED_MLP_NAMES,
    },
)
DINOV2_GATED_NAMES = dataclasses.replace(
    DINOV2_NAMES, block_prefixes={**NORM_AND_SCALE_NAMES, **ATTENTION_NAMES, **GATED_MLP_NAMES}
)
BEIT_NAMES = dataclasses.replace(
    VIT_NAMES,
    block_prefixes={
        "attention.attention.relative_position_bias.": "attn.",
        "relative_position_bias.": "attn.",
        "lambda_1": "ls1.gamma",
        "lambda_2": "ls2.gamma",
        **VIT_NAMES.block_prefixes,
    },
)
DINOV3_NAMES = TensorNameMap(
    layer_pattern=re.compile(r"(?:model\.)?layer\.(\d+)\."),
    layer_template="layer.{}.",
    top_prefixes={
        "embeddings.cls_token": "cls_token",
        "embeddings.register_tokens": "reg_token",
        "embeddings.patch_embeddings.": "patch_embed.proj.",
        "norm.": "norm.",
    },
    block_prefixes={
        **NORM_AND_SCALE_NAMES,
        **{theirs: own for theirs, own in ATTENTION_NAMES.items() if "_proj" in theirs},
        **{theirs: own for theirs, own in GATED_MLP_NAMES.items() if "_proj" in theirs},
    },
)
CLIP_NAMES = TensorNameMap(
    layer_pattern=re.compile(r"encoder\.layers\.(\d+)\."),
    layer_template="encoder.layers.{}.",
    top_prefixes={
        "embeddings.class_embedding": "cls_token",
        "embeddings.patch_embedding.": "patch_embed.proj.",
        "embeddings.position_embedding.weight": "pos_embed",
        "pre_layrnorm.": "norm_pre.",  # sic
        "post_layernorm.": "norm.",
        "visual_projection.": "projection.",
        "head.probe": "attn_pool.latent",
        "head.attention.in_proj_": "attn_pool.qkv.",
        "head.attention.out_proj.": "attn_pool.proj.",
        "head.layernorm.": "attn_pool.norm.",
        "head.mlp.": "attn_pool.mlp.",
        "classifier.": "head.",
    },
    block_prefixes={
        "layer_norm1.": "norm1.",
        "self_attn.q_proj.": "attn.q.",
        "self_attn.k_proj.": "attn.k.",
        "self_attn.v_proj.": "attn.v.",
        "self_attn.out_proj.": "attn.proj.",
        "layer_norm2.": "norm2.",
        "mlp.fc1.": "mlp.fc1.",
        "mlp.fc2.": "mlp.fc2.",
    },
)
SHARED_TABLES = ("shared_position_bias.relative_position_bias_table",
                 "encoder.relative_position_bias.relative_position_bias_table")  # fmt: skip
OUTSIDE_IMAGE_MODEL = re.compile(r"(text_model|text_projection|logit_scale|logit_bias|decoder|lm_head)(?:\..*)?$")
DINOV3_QKV_BIASES = {"query_bias": True, "key_bias": False, "value_bias": True}  # and whether unstated ones exist


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One of transformers' model types."""

    prefix: str
    """What tensor names start with in a model for a task."""
    names: TensorNameMap = VIT_NAMES
    defaults: dict[str, Any]
    """What its config.json means where it lacks a key."""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of a ViTConfig that are the same in all its models."""
    resample: Resample = "bicubic"
    absent_biases: tuple[str, ...] = ()
    """The ends of the names of biases that its models do not have."""


_EPSILON_12, _EPSILON_6 = {"layer_norm_eps": 1e-12}, {"layer_norm_eps": 1e-6}
_DINOV2 = Family(prefix="dinov2", names=DINOV2_NAMES, defaults=_EPSILON_6, fields={"layer_scale": True})
_BEIT = Family(
    prefix="beit", names=BEIT_NAMES, defaults=_EPSILON_12, resample="bilinear", absent_biases=("attn.k.bias",)
)
_CLIP = Family(
    prefix="vision_model",
    names=CLIP_NAMES,
    defaults={"layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"},
    fields={"norm_pre": True},
    absent_biases=("patch_embed.proj.bias", "projection.bias"),
)
_SIGLIP = Family(
    prefix="vision_model",
    names=CLIP_NAMES,
    defaults={"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"},
    fields={"class_token": False},
)
_NAFLEX = dataclasses.replace(_SIGLIP, resample="bilinear-antialias")
FAMILIES: dict[str, Family] = {
    "vit": Family(prefix="vit", defaults=_EPSILON_12),
    "deit": Family(prefix="deit", defaults=_EPSILON_12),
    "dinov2": _DINOV2,
    "dinov2_with_registers": dataclasses.replace(_DINOV2, prefix="dinov2_with_registers", resample="bicubic-antialias"),
    "dinov3_vit": Family(
        prefix="dinov3_vit",
        names=DINOV3_NAMES,
        defaults={"layer_norm_eps": 1e-5, "num_attention_heads": 6},
        fields={"layer_scale": True, "positions": "none"},
    ),
    "beit": _BEIT,
    "data2vec-vision": dataclasses.replace(_BEIT, prefix="data2vec_vision"),
    "ijepa": Family(prefix="ijepa", defaults=_EPSILON_12, fields={"class_token": False}),
    "vit_mae": Family(prefix="vit", defaults=_EPSILON_12),
    "vit_msn": Family(prefix="vit", defaults=_EPSILON_6),
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "metaclip_2": _CLIP,
    "metaclip_2_vision_model": _CLIP,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
    "siglip2": _NAFLEX,
    "siglip2_vision_model": _NAFLEX,
}


def convert_to_own(tensors: Tensors, family: Family, settings: dict[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    """Put tensors under the model's own names; also return a sentence on each that it does not use as it is."""
    base = re.compile(rf"^(?:{re.escape(family.prefix)}\.)+")
    inner: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if base.sub("", name) in inner:
            raise ModelError(f"the file has two tensors for {base.sub('', name)!r}, one of them {name!r}")
        inner[base.sub("", name)] = tensor
    notes = _drop_unused(inner, family) + _copy_shared_table(inner, family)
    own = family.names.rename_tensors(inner)
    if family.names is DINOV3_NAMES and not settings.get("num_register_tokens") and "reg_token" in own:
        if own["reg_token"].numel():
            raise ModelError("the file has registers, and its config.json states none")
        del own["reg_token"]
    if family.names is BEIT_NAMES and settings.get("use_mean_pooling", True) and "norm.weight" in own:
        own |= {f"fc_norm.{leaf}": own.pop(f"norm.{leaf}") for leaf in ("weight", "bias") if f"norm.{leaf}" in own}
        notes.append("layernorm: read as the norm after the mean of the patches, as fine-tuning has it")
    _restore_shapes(own, settings)
    join_gate(own)
    split_pool_query(own)
    absent = list_absent_biases(family, settings)
    if stated := next((name for name in own if name.endswith(absent)), None):
        raise ModelError(f"the file has {stated!r}, which models with its config.json lack")
    own = foreign_format.add_zero_biases(own, tuple(end.removesuffix(".bias") for end in absent))
    own = foreign_format.fuse_qkv(own)
    _fold_class_position(own)
    return own, notes


def _drop_unused(inner: dict[str, Tensor], family: Family) -> list[str]:
    """Remove tensors that are no part of the image model's function."""
    outside = [match for name in inner if (match := OUTSIDE_IMAGE_MODEL.match(name))]
    for match in outside:
        del inner[match.string]
    counts = Counter(match[1] for match in outside)
    notes = [f"{part}: {count} tensors left out, no part of the image model" for part, count in sorted(counts.items())]
    reasons = {"embeddings.mask_token": "only pre-training uses it"}
    if any(name.endswith("classifier.weight") for name in inner):
        pooler = "head." if family.names is CLIP_NAMES else "pooler.dense."
        reasons |= {name: "the classifier does not read the pooler" for name in inner if name.startswith(pooler)}
    elif family.prefix == "ijepa":
        reasons |= {name: "it reads a class token, and there is none" for name in inner if name.startswith("pooler.")}
    return notes + [f"{name}: left out, {why}" for name, why in reasons.items() if inner.pop(name, None) is not None]


def _copy_shared_table(inner: dict[str, Tensor], family: Family) -> list[str]:
    """Give each layer its own copy of a table of relative biases that all of them share (BEiT before fine-tuning)."""
    shared = next((inner.pop(name) for name in SHARED_TABLES if name in inner), None)
    if shared is None:
        return []
    layers = sorted({match[0] for name in inner if (match := family.names.layer_pattern.match(name))})
    for layer in layers:
        inner[f"{layer}relative_position_bias.relative_position_bias_table"] = shared.clone()
    return [f"relative_position_bias_table: copied into each of {len(layers)} layers, which shared one"]


def _restore_shapes(own: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Give class token, positions and the kernels of NaFlex the axes that the model has."""
    if "cls_token" in own and own["cls_token"].ndim == 1:
        own["cls_token"] = own["cls_token"][None, None]
    if "pos_embed" in own and own["pos_embed"].ndim == 2:
        own["pos_embed"] = own["pos_embed"][None]
    kernels, patch = own.get("patch_embed.proj.weight"), settings.get("patch_size", 16)
    if kernels is not None and kernels.ndim == 2 and isinstance(patch, int) and patch > 0:
        if not kernels.numel() or kernels.shape[1] % patch**2:
            raise ModelError(f"kernels of {kernels.shape[1]} numbers are no patches of {patch} x {patch} pixels")
        own["patch_embed.proj.weight"] = kernels.unflatten(1, (patch, patch, -1)).permute(0, 3, 1, 2)


def join_gate(own: dict[str, Tensor]) -> None:
    """Join the two first layers of a gated MLP, the gate first; `up` alone is a plain MLP's first layer."""
    for name in [name for name in own if ".mlp.up." in name]:
        up, gate = own.pop(name), own.pop(name.replace(".up.", ".gate."), None)
        if gate is not None and (gate.shape != up.shape or not up.ndim):
            raise ModelError(f"the gate of {name!r} has the shape {tuple(gate.shape)}, not {tuple(up.shape)}")
        own[name.replace(".up.", ".fc1.")] = up if gate is None else torch.cat([gate, up])


def split_pool_query(own: dict[str, Tensor]) -> None:
    """Split what attention pooling stores as one: its query, and its keys and values."""
    for leaf in ("weight", "bias"):
        if (joined := own.pop(f"attn_pool.qkv.{leaf}", None)) is not None:
            if not joined.ndim or len(joined) % 3:
                raise ModelError(f"query, key and value of the attention pool have the shape {tuple(joined.shape)}")
            own[f"attn_pool.q.{leaf}"], own[f"attn_pool.kv.{leaf}"] = joined.tensor_split([len(joined) // 3])


def has_qkv_bias(family: Family, settings: dict[str, Any]) -> bool:
    """Whether a model with this config.json has a bias for queries, keys or values."""
    if family.names is DINOV3_NAMES:
        return any(settings.get(key, default) for key, default in DINOV3_QKV_BIASES.items())
    return bool(settings.get("qkv_bias", True))


def list_absent_biases(family: Family, settings: dict[str, Any]) -> tuple[str, ...]:
    """The ends of the names of biases that files with this config.json lack, where ours are then zero."""
    absent = list(family.absent_biases)
    if family.names is DINOV3_NAMES:
        if has_qkv_bias(family, settings):
            stated = {key: settings.get(key, default) for key, default in DINOV3_QKV_BIASES.items()}
            absent += [f"attn.{key[0]}.bias" for key, has_bias in stated.items() if not has_bias]
        absent += [] if settings.get("proj_bias", True) else ["attn.proj.bias"]
        absent += [] if settings.get("mlp_bias", True) else ["mlp.fc1.bias", "mlp.fc2.bias"]
    return tuple(absent)


def _fold_class_position(own: dict[str, Tensor]) -> None:
    """Add the class token's position to it where registers follow, which have none."""
    if "reg_token" not in own or "pos_embed" not in own:
        return
    token, position = own.get("cls_token", torch.empty(0)), own["pos_embed"]
    if not token.ndim == position.ndim == 3 or token.shape[2] != position.shape[2]:
        raise ModelError("the file has registers, but no class token and positions of one width beside them")
    own |= {"cls_token": token + position[:, :1], "pos_embed": position[:, 1:]}


def convert_from_own(
    tensors: Tensors, config: ViTConfig, family: Family, settings: dict[str, Any]
) -> dict[str, Tensor]:
    """Invert `convert_to_own`: tensors under the names of the family's files, without a prefix."""
    names, absent = family.names, list_absent_biases(family, settings)
    if names is DINOV2_NAMES and config.gated_mlp:
        names = DINOV2_GATED_NAMES
    own = dict(tensors)
    if config.registers and "pos_embed" in own:  # their class token has a position, ours was added to it
        own["pos_embed"] = torch.cat([torch.zeros(1, 1, config.width), own["pos_embed"]], dim=1)
    if names is CLIP_NAMES:
        shapes = {"cls_token": (config.width,), "pos_embed": (-1, config.width)}
        own |= {name: own[name].reshape(shape) for name, shape in shapes.items() if name in own}
        for leaf in ("weight", "bias"):
            if f"attn_pool.kv.{leaf}" in own:
                parts = [own.pop(f"attn_pool.{part}.{leaf}") for part in ("q", "kv")]
                own[f"attn_pool.qkv.{leaf}"] = torch.cat(parts)
    extra = {}
    if names is DINOV3_NAMES:
        own = {"reg_token": torch.zeros(1, 0, config.width), **split_gate(own, gated=config.gated_mlp)}
        extra = {"embeddings.mask_token": torch.zeros(1, 1, config.width)}  # its class always has one
    elif config.registers:  # and so has that of DINOv2 with registers
        extra = {"embeddings.mask_token": torch.zeros(1, config.width)}
    held = {name: tensor for name, tensor in foreign_format.split_qkv(own) if not name.endswith(absent)}
    return {names.to_foreign_name(name): tensor for name, tensor in held.items()} | extra


def split_gate(own: Tensors, *, gated: bool) -> dict[str, Tensor]:
    """Invert `join_gate`: the two halves of a gated MLP's first layer; a plain one is `up`."""
    split: dict[str, Tensor] = {}
    for name, tensor in own.items():
        if ".mlp.fc1." not in name:
            split[name] = tensor
        elif gated:
            split[name.replace(".fc1.", ".gate.")], split[name.replace(".fc1.", ".up.")] = tensor.chunk(2)
        else:
            split[name.replace(".fc1.", ".up.")] = tensor
    return split
