"""How the authors of models name tensors, and what their own code computes with them.

Each family's names are close to timm's. They are put under timm's, and what the tensors do not state comes from the
timm architecture that computes the same. Where the authors' code computes something else, the authors' is kept: class
token or mean, how positions are resampled, and the periods of rotary positions that DINOv3's files store.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.config.model import Resample
from vitrail.errors import ModelError
from vitrail.weights import foreign_format, timm, timm_tensors
from vitrail.weights.foreign_format import ForeignModelInfo
from vitrail.weights.trained import Tensors

PERIODS = "rope_embed.periods"
BIAS_MASK = ".attn.qkv.bias_mask"
_ROTARY_BASE = 100.0  # of DINOv3


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuthorsFamily:
    """How the authors of a family name its tensors, and what their code computes."""

    title: str
    architecture: str
    """A timm architecture of the family, whose numerics hold for all sizes."""
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    """Part of their tensor names -> part of timm's."""
    pool: str | None = None
    """timm's name for the pooling of the authors' code; None for what the tensors tell."""
    resample: Resample = "bicubic"
    heads: Callable[[int, int], int] | None = None
    """The number of heads of a width and a depth, where it is not that of the published sizes or width / 64."""


_SWIGLU = {".mlp.w12.": ".mlp.fc1.", ".mlp.w1.": ".mlp.fc1_g.", ".mlp.w2.": ".mlp.fc1_x.", ".mlp.w3.": ".mlp.fc2."}
_EVA = {**_SWIGLU, ".mlp.ffn_ln.": ".mlp.norm.", ".attn.inner_attn_ln.": ".attn.norm."}
_PE = {
    "conv1.": "patch_embed.proj.",
    "positional_embedding": "pos_embed",
    "class_embedding": "cls_token",
    "transformer.resblocks.": "blocks.",
    "ln_pre.": "norm_pre.",
    "ln_post.": "norm.",
    "ln_1.": "norm1.",
    "ln_2.": "norm2.",
    "ls_1.gamma": "ls1.gamma",
    "ls_2.gamma": "ls2.gamma",
    "attn_pool.probe": "attn_pool.latent",
    "attn_pool.attn.": "attn_pool.",
    "attn_pool.layernorm.": "attn_pool.norm.",
    "in_proj_": "qkv.",
    "out_proj.": "proj.",
    "mlp.c_fc.": "mlp.fc1.",
    "mlp.c_proj.": "mlp.fc2.",
}
FAMILIES = {
    "dinov2": AuthorsFamily(
        title="DINOv2",
        architecture="vit_base_patch14_dinov2",
        names={**_SWIGLU, "register_tokens": "reg_token", "linear_head.": "head."},
        pool="token",
        resample="bicubic-offset",
        heads=lambda width, _: max(1, width // 64),
    ),
    "dinov3": AuthorsFamily(
        title="DINOv3",
        architecture="vit_base_patch16_dinov3_qkvb",
        names={**_SWIGLU, "storage_tokens": "reg_token", "linear_head.": "head."},
        pool="token",
        heads=lambda width, _: 32 if width == 4096 else max(1, width // 64),
    ),
    "mae": AuthorsFamily(title="masked autoencoders", architecture="vit_base_patch16_224"),
    "ijepa": AuthorsFamily(title="I-JEPA", architecture="vit_huge_patch14_gap_224", pool="avg"),
    "deit3": AuthorsFamily(title="DeiT III", architecture="deit3_base_patch16_224", pool="token"),
    "beit": AuthorsFamily(title="BEiT", architecture="beit_base_patch16_224"),
    "eva01": AuthorsFamily(title="EVA-01", architecture="eva_giant_patch14_224"),
    "eva02": AuthorsFamily(title="EVA-02", architecture="eva02_base_patch14_224", names=_EVA),
    "eva02-clip": AuthorsFamily(
        title="EVA-02 of CLIP", architecture="eva02_base_patch16_clip_224", names=_EVA, pool="token"
    ),
    "pe": AuthorsFamily(
        title="the perception encoder",
        architecture="vit_pe_core_",
        names=_PE,
        pool="map",
        resample="bilinear",
        heads=lambda width, _: 16 if width == 1536 else max(1, width // 64),
    ),
}
_UNUSED = {  # what only pre-training or another network reads
    r"mask_token": "only pre-training uses it",
    r"lm_head\.": "only pre-training uses it",
    r"cls_pt_layers\.": "only pre-training uses it",
    r"dino_head\.|ibot_head\.": "only pre-training uses it",
    r"decoder_": "only pre-training uses it",
    r"local_cls_norm\.": "only training uses it",
    r"projectors\.": "only distillation uses it",
    r"rope\.|rope_embed\.|.*\.rope\.freqs_": "computed",
}


def identify_family(tensors: Tensors, section: str | None = None) -> str | None:
    """Name the family whose authors call tensors so, and keep them in this section; None for another format."""
    names = strip_prefix(tensors).keys()
    if "attn_pool.probe" in names or ("conv1.weight" in names and any("resblocks.0.ls_1." in name for name in names)):
        return "pe"
    if "patch_embed.proj.weight" not in names or "blocks.0.norm1.weight" not in names:
        return None
    block = {name.removeprefix("blocks.0.") for name in names if name.startswith("blocks.0.")}
    if {"storage_tokens", PERIODS} & names or "attn.qkv.bias_mask" in block:
        return "dinov3"
    if "register_tokens" in names or ("ls1.gamma" in block and ("mask_token" in names or "mlp.w12.weight" in block)):
        return "dinov2"
    if "linear_head.weight" in names:
        return "dinov2"
    if "attn.inner_attn_ln.weight" in block:
        return "eva02-clip"
    if {"mlp.w1.weight", "mlp.w12.weight"} & block:
        return "eva02"
    if "lm_head.weight" in names:
        return "beit" if any("relative_position_bias_table" in name for name in names) else "eva01"
    if "decoder_embed.weight" in names:
        return "mae"
    if section == "model" and {"gamma_1", "attn.qkv.bias"} <= block and {"cls_token", "pos_embed"} <= names:
        return "deit3"
    return "ijepa" if section == "encoder" and "cls_token" not in names else None


def strip_prefix(tensors: Tensors) -> dict[str, Tensor]:
    """The image tower of a CLIP model, or the backbone below a linear head, under the names it has alone."""
    if any(name.startswith("visual.") for name in tensors):
        return {name.removeprefix("visual."): tensor for name, tensor in tensors.items() if name.startswith("visual.")}
    return {name.removeprefix("backbone."): tensor for name, tensor in tensors.items()}


def _drop_unused(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Leave out what the model does not read; return a sentence on each kind that is no buffer."""
    kept, changes = {}, {}
    for name, tensor in tensors.items():
        reason = next((reason for pattern, reason in _UNUSED.items() if re.match(pattern, name)), None)
        if reason is None:
            kept[name] = tensor
        elif reason != "computed":
            part = re.split(r"[._]", name)[0] if name.startswith("decoder_") else name.split(".")[0]
            changes[part] = f"{part}: left out, {reason}"
    return kept, list(changes.values())


def convert_model(name: str, stored: Tensors, path: Path) -> tuple[dict[str, Tensor], ForeignModelInfo, list[str]]:
    """Put a family's tensors under the model's own names, infer what they compute, and say which were left out."""
    family, assumptions = FAMILIES[name], ["preprocessing: unknown, the file does not state it"]
    tensors, changes = _drop_unused(strip_prefix(stored))
    renamed, prepare = _rename(family, tensors), _PREPARE.get(name)
    own = timm_tensors.rename_tensors(renamed if prepare is None else prepare(renamed, path))
    width, depth = foreign_format.get_dimensions(own, "patch_embed.proj.weight", 4, path)[0], _count_blocks(own)
    arguments: dict[str, Any] = {"global_pool": family.pool} if family.pool else {}
    if family.heads:
        arguments["num_heads"] = family.heads(width, depth)
    if name == "pe":
        arguments |= _state_reference_grid(own, path)
    if name in ("beit", "eva01", "eva02") and "fc_norm.weight" not in own:  # pre-trained: fine-tuning begins so
        own = {re.sub(r"^norm\.", "fc_norm.", key): tensor for key, tensor in own.items()}
        assumptions.append("pooling: the mean of the patches before the last norm, as the authors' fine-tuning begins")
    info = timm.infer_architecture(own, {"architecture": family.architecture, "model_args": arguments}, path)
    assert isinstance(info.config, ViTConfig)
    config = dataclasses.replace(info.config, resample=_choose_resample(family, info.config))
    config, own, sentences = _restore_heads(name, config, own)
    if name == "dinov3":
        config, sentence = _read_periods(config, stored.get(PERIODS), path)
        sentences.append(sentence)
    if name == "deit3":
        sentences.append("positions: no rotary ones; Naver's RoPE-ViT files with learned positions look the same")
    first = f"architecture: that of {family.title} in its authors' code, as the tensors' names say"
    assumptions = [first, *info.assumptions, *assumptions, *sentences]
    return own, ForeignModelInfo(config=config, assumptions=tuple(assumptions)), changes


def _count_blocks(tensors: Tensors) -> int:
    return len({match[1] for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))})


def _rename(family: AuthorsFamily, tensors: Tensors) -> dict[str, Tensor]:
    """Put tensors under timm's names."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        theirs = name
        for part, new in family.names.items():
            name = name.replace(part, new)
        if name in renamed:
            raise ModelError(f"the file has two tensors for {name!r}, one of them {theirs!r}")
        renamed[name] = tensor
    return renamed


def rename_to_theirs(names: dict[str, str], tensors: Tensors) -> dict[str, Tensor]:
    """Put tensors under the names of a family: the inverse of reading, for names that are part of `names`."""
    renamed = {}
    for name, tensor in tensors.items():
        for theirs, own in names.items():
            name = name.replace(own, theirs)
        renamed[name] = tensor
    return renamed


def _prepare_dinov2(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Add the class token's position to it where there are registers, which have none."""
    if "reg_token" not in tensors:
        return tensors
    token, position = (tensors.get(name, torch.empty(0)) for name in ("cls_token", "pos_embed"))
    if not token.ndim == position.ndim == 3 or token.shape[2] != position.shape[2]:
        raise ModelError(f"{path} has registers, but no class token and positions of one width beside them")
    return tensors | {"cls_token": token + position[:, :1], "pos_embed": position[:, 1:]}


def _prepare_dinov3(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Multiply biases by their masks: ones, zeros for keys, ones. What stands in the keys' part is never used."""
    prepared = {}
    for name, tensor in tensors.items():
        if name.endswith(BIAS_MASK):
            thirds = tensor.float().chunk(3) if tensor.ndim == 1 and len(tensor) and not len(tensor) % 3 else ()
            is_expected = [
                ((part == wanted) | part.isnan()).all() for part, wanted in zip(thirds, (1, 0, 1), strict=False)
            ]
            if not is_expected or not all(is_expected):
                raise ModelError(f"{path}: {name!r} is not 1 for queries and values and 0 for keys")
        elif f"{name}_mask" in tensors:
            query, key, value = (tensor if tensor.numel() % 3 == 0 else tensor.new_zeros(3)).chunk(3)
            prepared[name] = torch.cat([query, torch.zeros_like(key), value])
        else:
            prepared[name] = tensor
    return prepared


def _prepare_pe(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Give tokens and positions the dimensions of timm's, and split the pooling's projection."""
    if "attn_pool.latent" not in tensors:
        raise ModelError(f"{path} is a perception encoder with no norm after its last block, which no plain ViT has")
    prepared = dict(tensors)
    for name, dimensions in (("pos_embed", 1), ("cls_token", 2)):
        if name in prepared:
            prepared[name] = prepared[name][(None,) * dimensions]
    for kind in ("weight", "bias"):
        packed = prepared.pop(f"attn_pool.qkv.{kind}", torch.zeros(3))
        if not packed.ndim:
            raise ModelError(f"{path}: queries, keys and values of its pooling are a single number")
        third = len(packed) // 3
        prepared |= {f"attn_pool.q.{kind}": packed[:third], f"attn_pool.kv.{kind}": packed[third:]}
    if (projection := prepared.pop("proj", None)) is not None:
        if projection.ndim != 2:
            raise ModelError(f"{path}: its projection has the shape {tuple(projection.shape)}")
        prepared |= {"head.weight": projection.mT, "head.bias": torch.zeros(projection.shape[-1])}
    return prepared


_PREPARE: dict[str, Callable[[dict[str, Tensor], Path], dict[str, Tensor]]] = {
    "dinov2": _prepare_dinov2,
    "dinov3": _prepare_dinov3,
    "pe": _prepare_pe,
}


def _state_reference_grid(tensors: Tensors, path: Path) -> dict[str, Any]:
    """The arguments of rotary positions that are stretched to the model's own grid."""
    has_class_token = "cls_token" in tensors
    patches = foreign_format.count_tokens(tensors, "pos_embed", path) - has_class_token
    return {"ref_feat_shape": math.isqrt(max(patches, 0)), "rope_grid_offset": int(has_class_token)}


def _choose_resample(family: AuthorsFamily, config: ViTConfig) -> Resample:
    """How the authors' code resamples positions."""
    if config.positions == "relative-bias":
        return config.resample
    return "bicubic-antialias" if family.resample == "bicubic-offset" and config.registers else family.resample


def _restore_heads(
    name: str, config: ViTConfig, tensors: dict[str, Tensor]
) -> tuple[ViTConfig, dict[str, Tensor], list[str]]:
    """Tell linear heads of class token and mean, and projections of CLIP, from heads of classes."""
    if name.startswith("dino") and config.classes:
        inputs = tensors["head.weight"].shape[1]
        if inputs != 2 * config.width:
            raise ModelError(
                f"a linear head of {inputs} inputs reads several layers, and this model's {config.width} features are"
                " of the last: use the head of one layer (linear_head, not linear4_head)"
            )
        return dataclasses.replace(config, pool="class-mean"), tensors, []
    if name in ("pe", "eva02-clip") and (config.classes or config.projection):
        projected = dataclasses.replace(config, projection=config.classes or config.projection, classes=0)
        return projected, timm_tensors.rename_projection(tensors), []
    return config, tensors, []


def compute_periods(head_width: int) -> Tensor:
    """The periods of DINOv3's rotary positions, in double precision."""
    bands = head_width // 4
    return _ROTARY_BASE ** (torch.arange(bands, dtype=torch.float64) / bands)


def _read_periods(config: ViTConfig, periods: Tensor | None, path: Path) -> tuple[ViTConfig, str]:
    """Keep the stored periods of rotary positions: those of float32, or rounded to bfloat16; return what to say."""
    assert config.rotary is not None
    if periods is None:
        return config, "rotary positions: periods in float32, as the file does not store them"
    exact, stored = compute_periods(config.width // config.heads), periods.double()
    if stored.shape == exact.shape and torch.equal(stored, exact.bfloat16().double()):
        rotary = dataclasses.replace(config.rotary, bfloat16_periods=True)
        sentence = "rotary positions: periods in bfloat16, as the file stores them; timm and transformers use float32"
        return dataclasses.replace(config, rotary=rotary), sentence
    if stored.shape != exact.shape or not torch.allclose(stored, exact, rtol=1e-5):
        raise ModelError(f"{path}: its {PERIODS} are not those of DINOv3 with {config.heads} heads and base 100")
    return config, "rotary positions: periods in float32, as the file stores them"
