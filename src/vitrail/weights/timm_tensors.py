"""timm's tensor names beside the model's own, which are those of its `VisionTransformer`.

Its `Eva` and `Beit` keep query and value biases apart from the weights, may split queries, keys and values or the two
halves of a gated MLP, and call LayerScale `gamma_1`. A bias that is absent is zero. A writer leaves one out only if it
is zero.
"""

import re
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.errors import ModelError
from vitrail.weights import foreign_format
from vitrail.weights.foreign_format import BACKBONE
from vitrail.weights.trained import Tensors

TimmClass = Literal["VisionTransformer", "Eva", "Beit"]
OWN_STEM = f"{BACKBONE}stem."  # which timm calls BACKBONE where it has no stages
PATCH_BIAS = "patch_embed.proj.bias"
_SHARED_TABLE = "rel_pos_bias.relative_position_bias_table"


def rename_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """Put timm's tensors under the model's own names."""
    bare = {f"{BACKBONE}{part}": f"{OWN_STEM}{part}" for part in ("conv.weight", "norm.weight", "norm.bias")}
    renames = bare | {name: rename_in_block(name) for name in tensors if name.startswith("blocks.")}
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("relative_position_index"):
            continue  # which entry of the table belongs to which pair of patches: computed
        renamed = renames.get(name, name)
        if renamed in own:
            raise ModelError(f"the file has two tensors for {renamed!r}, one of them {name!r}")
        own[renamed] = tensor
    own = _merge_gates(foreign_format.fuse_qkv(_add_key_biases(own)))
    kernels = own.get("patch_embed.proj.weight", torch.empty(()))
    if "norm_pre.weight" in own and kernels.ndim and PATCH_BIAS not in own:
        own[PATCH_BIAS] = torch.zeros(len(kernels))
    return _copy_shared_table(own)


def rename_in_block(name: str) -> str:
    """Return the model's own name for a tensor of a block; of a fused layer's parts `attn.q` and the like."""
    name = re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name)
    name = re.sub(r"\.attn\.([qkv])_proj\.", r".attn.\1.", name)
    return re.sub(r"\.attn\.([qkv])_bias$", r".attn.\1.bias", name)


def _add_key_biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the key biases, zeros, where there are biases of queries and values alone."""
    added = {}
    for name, tensor in tensors.items():
        if name.endswith(".attn.q.bias") and (key := name.replace(".attn.q.", ".attn.k.")) not in tensors:
            added[key] = torch.zeros_like(tensor)
    return tensors | added


def _merge_gates(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the two halves of a gated MLP's first layer, the gate first."""
    merged: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".mlp.fc1_g." in name:
            value = tensors.get(name.replace(".fc1_g.", ".fc1_x."))
            if value is None or value.shape != tensor.shape or not tensor.ndim:
                raise ModelError(f"the file has the gate {name!r} but not the values beside it, of one shape")
            merged[name.replace(".fc1_g.", ".fc1.")] = torch.cat([tensor, value])
        elif ".mlp.fc1_x." not in name or name.replace(".fc1_x.", ".fc1_g.") not in tensors:
            merged[name] = tensor
    return merged


def split_gates(tensors: Tensors) -> dict[str, Tensor]:
    """Invert `_merge_gates`: the gate's half as fc1_g, the values' as fc1_x."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if re.match(r"blocks\.\d+\.mlp\.fc1\.", name):
            gate, value = tensor.chunk(2)
            split |= {name.replace(".fc1.", ".fc1_g."): gate, name.replace(".fc1.", ".fc1_x."): value}
        else:
            split[name] = tensor
    return split


def _copy_shared_table(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give each layer its own copy of a table of relative biases that all of them share."""
    if _SHARED_TABLE not in tensors or any(".attn.relative_position_bias_table" in name for name in tensors):
        return tensors
    blocks = {match[0] for name in tensors if (match := re.match(r"blocks\.\d+\.", name))}
    table = tensors.pop(_SHARED_TABLE)
    return tensors | {f"{block}attn.relative_position_bias_table": table.clone() for block in sorted(blocks)}


def is_projection(tensors: Tensors) -> bool:
    """Whether the head has only zero biases and some weight, as timm makes it from CLIP's visual projection."""
    weight, bias = tensors.get("head.weight"), tensors.get("head.bias")
    return weight is not None and bias is not None and not bias.any() and bool(weight.any())


def rename_projection(tensors: Tensors) -> dict[str, Tensor]:
    """Put the head's tensors under the name of the projection."""
    return {re.sub(r"^head\.", "projection.", name): tensor for name, tensor in tensors.items()}


def find_family(config: ViTConfig) -> TimmClass:
    """The class of timm that computes this config."""
    if config.positions == "relative-bias":
        return "Beit"
    # Eva pools prefix tokens too, always, and VisionTransformer gives the pooling's MLP the activation of the blocks
    only_eva = config.rotary or config.attention_norm or config.mlp_norm or config.pool_heads or config.pool_mlp
    gated = config.gated_mlp and (config.norm_eps == 1e-5 or config.pool == "map")
    is_eva = only_eva or gated or (config.projection and config.norm_eps == 1e-6)
    return "Eva" if is_eva else "VisionTransformer"


def to_timm_names(config: ViTConfig, tensors: Tensors, family: TimmClass) -> dict[str, Tensor]:
    """Put the model's own tensors under the names of one of timm's classes."""
    tensors = {re.sub(r"^projection\.", "head.", name): tensor for name, tensor in tensors.items()}
    if config.norm_pre:
        if tensors[PATCH_BIAS].any():
            raise ModelError("the timm format cannot hold this model: with norm_pre its patch embedding has no bias")
        del tensors[PATCH_BIAS]
    if config.stem is not None and not config.stem.units:
        tensors = {name.replace(OWN_STEM, BACKBONE): tensor for name, tensor in tensors.items()}
    if family == "VisionTransformer":
        return tensors
    splits_bias = not foreign_format.has_key_bias(tensors)
    if config.mlp_norm:
        tensors = split_gates(tensors)
    return dict(_iterate_eva_names(tensors, splits_bias=splits_bias))


def _iterate_eva_names(tensors: Tensors, *, splits_bias: bool) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if name.endswith(".attn.qkv.bias") and splits_bias:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                if part != "k":
                    yield name.replace("qkv.bias", f"{part}_bias"), piece
        else:
            yield re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", name), tensor
