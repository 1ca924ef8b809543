"""Google's .npz files: ViT and hybrids of vision_transformer, ViT of big_vision, and BiT ResNets.

Names are paths, kernels are stored input first. The two projects name the same things differently, and place positions
differently: vision_transformer adds them to class token and patches, big_vision to the patches, before the class token
joins. Both orders are computed as they are. What the files never say is fixed by the authors' code: tanh GELU and the
epsilons of `presets`.
"""

import dataclasses
import re
from pathlib import Path

import torch
from torch import Tensor

from vitrail import presets
from vitrail.config import BiTConfig, ViTConfig, from_json
from vitrail.errors import ModelError
from vitrail.model.build import Config
from vitrail.weights import foreign, storage
from vitrail.weights.trained import Tensors, Trained

FORMAT = "google"
PREFIXES = ("opt/target/", "params/img/", "params/")
POSITIONS, BARE_POSITIONS = "Transformer/posembed_input/pos_embedding", "pos_embedding"  # with the class token, without

_LEAF = {"scale": "weight", "gamma": "weight", "kernel": "weight", "bias": "bias", "beta": "bias"}
_NORM1, _ATTENTION = r"LayerNorm_0", r"MultiHeadDotProductAttention_[01]"
_VIT = {  # a path without its leaf -> the model's own name
    r"embedding": "patch_embed.proj",
    r"pre_logits": "pre_logits.fc",
    r"head": "head",
    r"Transformer/encoder_norm": "norm",
    rf"Transformer/encoderblock_(\d+)/{_NORM1}": r"blocks.\1.norm1",
    rf"Transformer/encoderblock_(\d+)/{_ATTENTION}/query": r"blocks.\1.attn.q",
    rf"Transformer/encoderblock_(\d+)/{_ATTENTION}/key": r"blocks.\1.attn.k",
    rf"Transformer/encoderblock_(\d+)/{_ATTENTION}/value": r"blocks.\1.attn.v",
    rf"Transformer/encoderblock_(\d+)/{_ATTENTION}/out": r"blocks.\1.attn.proj",
    r"Transformer/encoderblock_(\d+)/LayerNorm_[12]": r"blocks.\1.norm2",
    r"Transformer/encoderblock_(\d+)/MlpBlock_[03]/Dense_0": r"blocks.\1.mlp.fc1",
    r"Transformer/encoderblock_(\d+)/MlpBlock_[03]/Dense_1": r"blocks.\1.mlp.fc2",
    r"MAPHead_0/MultiHeadDotProductAttention_0/query": "attn_pool.q",
    r"MAPHead_0/MultiHeadDotProductAttention_0/key": "attn_pool.k",
    r"MAPHead_0/MultiHeadDotProductAttention_0/value": "attn_pool.v",
    r"MAPHead_0/MultiHeadDotProductAttention_0/out": "attn_pool.proj",
    r"MAPHead_0/LayerNorm_0": "attn_pool.norm",
    r"MAPHead_0/MlpBlock_0/Dense_0": "attn_pool.mlp.fc1",
    r"MAPHead_0/MlpBlock_0/Dense_1": "attn_pool.mlp.fc2",
}
_BACKBONE = "patch_embed.backbone."
_HYBRID = {
    r"conv_root": f"{_BACKBONE}stem.conv",
    r"gn_root": f"{_BACKBONE}stem.norm",
    r"block(\d+)/unit(\d+)/conv([123])": r"blockunit \1 \2 conv\3",
    r"block(\d+)/unit(\d+)/gn([123])": r"blockunit \1 \2 norm\3",
    r"block(\d+)/unit(\d+)/conv_proj": r"blockunit \1 \2 downsample.conv",
    r"block(\d+)/unit(\d+)/gn_proj": r"blockunit \1 \2 downsample.norm",
}
_LETTERS = {"a": "1", "b": "2", "c": "3"}
_BIT = {
    r"resnet/root_block/standardized_conv2d": "stem.conv",
    r"resnet/group_norm": "norm",
    r"resnet/head/conv2d": "head.fc",
    r"resnet/block(\d+)/unit(\d+)/a/proj/standardized_conv2d": r"blockunit \1 \2 downsample.conv",
    r"resnet/block(\d+)/unit(\d+)/([abc])/standardized_conv2d": r"blockunit \1 \2 conv\3",
    r"resnet/block(\d+)/unit(\d+)/([abc])/group_norm": r"blockunit \1 \2 norm\3",
}
_WHOLE = {
    "cls": "cls_token",
    POSITIONS: "pos_embed",
    BARE_POSITIONS: "pos_embed",
    "MAPHead_0/probe": "attn_pool.latent",
}


@dataclasses.dataclass(frozen=True)
class Renamed:
    """The tensors under the model's own names, with what only their old names and shapes told."""

    tensors: dict[str, Tensor]
    heads: int | None
    prefix_positions: bool
    dropped: tuple[str, ...]


def rename(arrays: Tensors) -> Renamed:
    """Google's arrays as the model's own tensors."""
    arrays, dropped = _strip(arrays)
    arrays = _unscan(arrays)
    queries = [tensor for name, tensor in arrays.items() if name.endswith("/query/kernel") and tensor.ndim == 3]
    own: dict[str, Tensor] = {}
    for name, tensor in arrays.items():
        ours, converted = _convert(name, tensor)
        if ours in own:
            raise ModelError(f"the file has two arrays for {ours!r}, one of them {name!r}")
        own[ours] = converted
    own = _fuse_pool(foreign.fuse_qkv(own))
    heads = queries[0].shape[1] if queries else None
    return Renamed(own, heads, POSITIONS in arrays, tuple(dropped))


def _strip(arrays: Tensors) -> tuple[dict[str, Tensor], list[str]]:
    """The arrays of the image model without the prefix that training code left, and a sentence on all others."""
    prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in arrays)), "")
    kept = {name.removeprefix(prefix): tensor for name, tensor in arrays.items() if name.startswith(prefix)}
    others = sorted(name for name in arrays if not name.startswith(prefix))
    return kept, [f"{name}: left out, it is no part of the image model" for name in others]


def _unscan(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """One array a block, where big_vision stored all blocks in one with a leading axis."""
    split: dict[str, Tensor] = {}
    for name, tensor in arrays.items():
        if not name.startswith("Transformer/encoderblock/"):
            split[name] = tensor
            continue
        if not tensor.ndim or tensor.shape[0] > 1_024:
            raise ModelError(f"array {name!r} of shape {tuple(tensor.shape)} has no axis of layers")
        for index, layer in enumerate(tensor):
            split[name.replace("encoderblock/", f"encoderblock_{index}/", 1)] = layer
    return split


def _convert(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """The model's own name of an array and its tensor: output first, heads joined, norms flat."""
    if name in _WHOLE:
        return _WHOLE[name], tensor
    path, _, leaf = name.rpartition("/")
    for pattern, target in (_VIT | _HYBRID | _BIT).items():
        found = re.fullmatch(pattern, path)
        if found and leaf in _LEAF:
            own = f"{_unit(found.expand(target), path)}.{_LEAF[leaf]}"
            return own, _transposed(own, leaf, tensor)
    raise ModelError(f"the file has an array this model has no place for: {name!r:.120}")


def _unit(own: str, path: str) -> str:
    """`blockunit 1 02 conva` -> `stages.0.blocks.1.conv1`, behind the hybrid's backbone unless it is BiT's."""
    if not own.startswith("blockunit "):
        return own
    _, block, unit, part = own.split(" ")
    part = part[:-1] + _LETTERS.get(part[-1], part[-1]) if part[:-1] in ("conv", "norm") else part
    return f"{'' if path.startswith('resnet/') else _BACKBONE}stages.{int(block) - 1}.blocks.{int(unit) - 1}.{part}"


def _transposed(own: str, leaf: str, tensor: Tensor) -> Tensor:
    if leaf != "kernel":
        plain = (
            tensor.ndim == 1
            or (tensor.ndim == 2 and re.search(r"\.[qkv]\.bias$", own))
            or tensor.shape[:-1] == (1, 1, 1)
        )
        if not plain:
            raise ModelError(f"the array of {own!r} has the shape {tuple(tensor.shape)}, which no {leaf} has")
        return tensor.flatten()
    if tensor.ndim == 4:
        return tensor.permute(3, 2, 0, 1)  # HWIO -> OIHW
    if tensor.ndim == 3 and own.endswith(".proj.weight"):
        return tensor.flatten(0, 1).mT  # (heads, K, D) -> (D, D)
    if tensor.ndim == 3:
        return tensor.flatten(1).mT  # (D, heads, K) -> (D, D)
    if tensor.ndim == 2:
        return tensor.mT
    raise ModelError(f"the array of {own!r} has {tensor.ndim} dimensions; a kernel has 2, 3 or 4")


def _fuse_pool(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """The attention pool's keys and values in one."""
    for leaf in ("weight", "bias"):
        key, value = (own.pop(f"attn_pool.{part}.{leaf}", None) for part in "kv")
        if key is not None and value is not None and key.ndim and value.ndim and key.shape == value.shape:
            own[f"attn_pool.kv.{leaf}"] = torch.cat([key, value])
        elif key is not None or value is not None:
            raise ModelError("keys and values of the attention pool do not fit each other")
    return own


def architecture(renamed: Renamed, path: Path) -> foreign.Read:
    """The function these arrays compute in the authors' code."""
    tensors = renamed.tensors
    if "stem.conv.weight" in tensors:
        return _resnet(tensors, path)
    size, assumptions = foreign.shape(tensors, path), []
    count = foreign.tokens(tensors, "pos_embed", path)
    prefix = int("cls_token" in tensors)
    grid = foreign.square_grid(count - prefix * renamed.prefix_positions) if count else None
    stem = foreign.conv(tensors, _BACKBONE, presets.HYBRID_NUMERICS, path) if foreign.STEM in tensors else None
    stride = size.patch * (stem.stride if stem else 1)
    if count and grid is None:
        raise ModelError(f"{path}: its {count} positions are no square grid{' and a class token' if prefix else ''}")
    if grid is None:
        grid = (max(1, 224 // stride), max(1, 224 // stride))
        assumptions.append(
            f"positions: none are stored, so sin-cos ones at {grid[0] * stride} x {grid[1] * stride} pixels"
        )
    config = size._asdict() | {
        "heads": renamed.heads,
        "stem": None if stem is None else dataclasses.asdict(stem),
        "image_size": (grid[0] * stride, grid[1] * stride),
        "class_token": bool(prefix),
        "pool": "map" if "attn_pool.latent" in tensors else "class" if prefix else "norm-mean",
        "hidden_head": "pre_logits.fc.weight" in tensors,
        "positions": "learned-1d" if count else "sincos-2d",
        "prefix_positions": renamed.prefix_positions,
    }
    return _with_view(from_json(ViTConfig, config), assumptions)


def _resnet(tensors: Tensors, path: Path) -> foreign.Read:
    _, channels, _, _ = foreign.dimensions(tensors, "stem.conv.weight", 4, path)
    classes = foreign.dimensions(tensors, "head.fc.weight", 4, path)[0] if "head.fc.weight" in tensors else 0
    conv = foreign.conv(tensors, "", presets.BIT_NUMERICS, path)
    assumptions = ["image size: 224 x 224, a ResNet's file does not state it"]
    return _with_view(BiTConfig(conv=conv, channels=channels, classes=classes), assumptions)


def _with_view(config: Config, assumptions: list[str]) -> foreign.Read:
    """Google's evaluation of the time: pixels from -1 to 1, resized without keeping the shape."""
    view = presets.preprocess("inception", config.image_size, config.channels)
    view = dataclasses.replace(view, resize=config.image_size, interpolation="bilinear")
    assumptions.append("preprocessing: mean and std 0.5, resized to the input's size, as Google's code does")
    return foreign.Read(config=config, preprocess=view, assumptions=tuple(assumptions))


def write(trained: Trained, path: Path) -> list[str]:
    """Write an .npz that Google's code reads; the notes say what that loses."""
    model = trained.model
    config, tensors = model.config, dict(model.state_dict())
    if isinstance(config, ViTConfig) and config.positions in ("none", "learned-2d"):
        config, tensors, notes = foreign.with_table(
            foreign.require_vit(FORMAT, model, hybrid=True), prefix=config.class_token
        )
    else:
        notes = []
    big_vision = isinstance(config, ViTConfig) and (
        config.pool == "map" or config.positions == "sincos-2d" or not config.prefix_positions
    )
    arrays = {}
    for name, tensor in _split_pool(dict(foreign.split_qkv(tensors))).items():
        theirs, converted = _theirs(name, tensor, config, big_vision=big_vision)
        arrays[theirs] = converted.contiguous()
    notes += foreign.check_held(FORMAT, config, architecture(rename(arrays), foreign.DRAFT).config)
    storage.write_npz(path, arrays)
    return [*notes, "an .npz has no place for preprocessing, labels and origin: they were left out"]


def _split_pool(own: dict[str, Tensor]) -> dict[str, Tensor]:
    for leaf in ("weight", "bias"):
        if (both := own.pop(f"attn_pool.kv.{leaf}", None)) is not None:
            own[f"attn_pool.k.{leaf}"], own[f"attn_pool.v.{leaf}"] = both.chunk(2)
    return own


def _theirs(name: str, tensor: Tensor, config: Config, *, big_vision: bool) -> tuple[str, Tensor]:
    """Google's name of a tensor of ours, and its array."""
    if name == "pos_embed":
        return (BARE_POSITIONS if big_vision else POSITIONS), tensor
    whole = {own: theirs for theirs, own in _WHOLE.items()}
    if name in whole:
        return whole[name], tensor
    stem, _, leaf = name.rpartition(".")
    path = _their_path(stem, big_vision=big_vision, resnet=isinstance(config, BiTConfig))
    if path is None or leaf not in ("weight", "bias"):
        raise ModelError(f"the google format cannot hold this model: it has no place for {name!r}")
    norm = re.search(r"norm|gn", path.rpartition("/")[2], re.IGNORECASE) is not None
    if norm:
        names = ("gamma", "beta") if isinstance(config, BiTConfig) else ("scale", "bias")
        return f"{path}/{names[leaf == 'bias']}", tensor
    if leaf == "bias":
        split = re.search(r"/(query|key|value)$", path)
        return f"{path}/bias", tensor.unflatten(0, (_heads(config), -1)) if split else tensor
    return f"{path}/kernel", _stored(path, tensor, config)


def _heads(config: Config) -> int:
    assert isinstance(config, ViTConfig)
    return config.heads


def _stored(path: str, tensor: Tensor, config: Config) -> Tensor:
    """A kernel, input first; those of attention split by heads."""
    if tensor.ndim == 4:
        return tensor.permute(2, 3, 1, 0)
    if re.search(r"/(query|key|value)$", path):
        return tensor.mT.unflatten(1, (_heads(config), -1))
    if re.search(r"Attention_\d/out$", path):
        return tensor.mT.unflatten(0, (_heads(config), -1))
    return tensor.mT


def _their_path(own: str, *, big_vision: bool, resnet: bool) -> str | None:
    """The path in which Google's code keeps a layer of ours."""
    unit = re.fullmatch(rf"({re.escape(_BACKBONE)})?stages\.(\d+)\.blocks\.(\d+)\.(\w+)\.?(\w*)", own)
    if unit:
        return _their_unit(int(unit[2]) + 1, int(unit[3]) + 1, unit[4], unit[5], hybrid=bool(unit[1]))
    if found := re.fullmatch(r"blocks\.(\d+)\.(.+)", own):
        attention, norm2, mlp = ("0", "1", "0") if big_vision else ("1", "2", "3")
        parts = {
            "norm1": "LayerNorm_0",
            "norm2": f"LayerNorm_{norm2}",
            "mlp.fc1": f"MlpBlock_{mlp}/Dense_0",
            "mlp.fc2": f"MlpBlock_{mlp}/Dense_1",
        } | {
            f"attn.{ours}": f"MultiHeadDotProductAttention_{attention}/{theirs}"
            for ours, theirs in (("q", "query"), ("k", "key"), ("v", "value"), ("proj", "out"))
        }
        return f"Transformer/encoderblock_{found[1]}/{parts[found[2]]}" if found[2] in parts else None
    families = (_BIT,) if resnet else (_VIT, _HYBRID)
    plain = {ours: pattern for family in families for pattern, ours in family.items() if "\\" not in pattern}
    return plain.get(own)


def _their_unit(block: int, unit: int, part: str, inner: str, *, hybrid: bool) -> str:
    if hybrid:
        name = {"downsample": {"conv": "conv_proj", "norm": "gn_proj"}.get(inner, "")}.get(
            part, part.replace("norm", "gn")
        )
        return f"block{block}/unit{unit}/{name}"
    base = f"resnet/block{block}/unit{unit:02d}"
    if part == "downsample":
        return f"{base}/a/proj/standardized_conv2d"
    return f"{base}/{'abc'[int(part[-1]) - 1]}/{'standardized_conv2d' if part.startswith('conv') else 'group_norm'}"
