"""Google's .npz files: ViT and hybrids of vision_transformer, ViT, SigLIP and LiT of big_vision, and BiT ResNets.

Names are paths, and kernels are stored input first. The two ViT projects number a block's parts differently.
vision_transformer adds positions to class token and patches; big_vision adds them to the patches, before the class
token joins. Both orders are kept. What the files never state is fixed by the authors' code: tanh GELU and the epsilons
of `presets`.

`list_layers` names every layer's path and own name once. Reading and writing use that list in both directions.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from vitrail import presets
from vitrail.config import BiTConfig, ModelConfig, ViTConfig, from_json
from vitrail.errors import ModelError
from vitrail.model.vit import ViT
from vitrail.weights import foreign_format, tensor_files
from vitrail.weights.foreign_format import BACKBONE, ForeignModelInfo
from vitrail.weights.tensor_files import ModelFiles
from vitrail.weights.trained import Tensors, Trained, build_matching_model

FORMAT: Final = "google"
TRAINING_PREFIXES = ("opt/target/", "params/img/", "img/", "params/")
POSITIONS = "Transformer/posembed_input/pos_embedding"  # with one of the class token
PATCH_POSITIONS = "pos_embedding"  # without
DEFAULT_SIDE = 224  # the image size where no positions are stored, which would tell it

GoogleProject = Literal["vision_transformer", "big_vision", "bit"]
LayerKind = Literal["dense", "conv", "norm", "gamma", "heads", "out", "whole"]
"""heads is a query, key or value, (D, H, K) and (H, K); out is attention's output, (H, K, D) and (D,)."""
KERNEL_LEAVES = {"kernel": "weight", "bias": "bias"}  # the last part of a path -> of a name
NORM_LEAVES = {"norm": {"scale": "weight", "bias": "bias"}, "gamma": {"gamma": "weight", "beta": "bias"}}
GoogleLayer = tuple[str, str, LayerKind]
"""Google's path, the model's own name, and the kind."""


class GoogleLayout(NamedTuple):
    """What the list of layers depends on."""

    project: GoogleProject
    depth: int = 0
    units: tuple[int, ...] = ()
    patch_positions_only: bool = False


def list_layers(layout: GoogleLayout) -> Iterator[GoogleLayer]:
    """List every layer that a model of this layout may have."""
    if layout.project == "bit":
        yield from _list_bit_layers(layout.units)
        return
    yield "embedding", "patch_embed.proj", "conv"
    yield "cls", "cls_token", "whole"
    yield PATCH_POSITIONS if layout.patch_positions_only else POSITIONS, "pos_embed", "whole"
    yield "conv_root", f"{BACKBONE}stem.conv", "conv"
    yield "gn_root", f"{BACKBONE}stem.norm", "norm"
    for stage, unit in _list_units(layout.units):
        path, own = f"block{stage + 1}/unit{unit + 1}", f"{BACKBONE}stages.{stage}.blocks.{unit}"
        for part in "123":
            yield f"{path}/conv{part}", f"{own}.conv{part}", "conv"
            yield f"{path}/gn{part}", f"{own}.norm{part}", "norm"
        yield f"{path}/conv_proj", f"{own}.downsample.conv", "conv"
        yield f"{path}/gn_proj", f"{own}.downsample.norm", "norm"
    attention, norm, mlp = ("1", "2", "3") if layout.project == "vision_transformer" else ("0", "1", "0")
    for index in range(layout.depth):
        path, own = f"Transformer/encoderblock_{index}", f"blocks.{index}"
        yield f"{path}/LayerNorm_0", f"{own}.norm1", "norm"
        yield from _list_attention_layers(f"{path}/MultiHeadDotProductAttention_{attention}", f"{own}.attn")
        yield f"{path}/LayerNorm_{norm}", f"{own}.norm2", "norm"
        yield from _list_mlp_layers(f"{path}/MlpBlock_{mlp}", f"{own}.mlp")
    yield "Transformer/encoder_norm", "norm", "norm"
    yield "MAPHead_0/probe", "attn_pool.latent", "whole"
    yield from _list_attention_layers("MAPHead_0/MultiHeadDotProductAttention_0", "attn_pool")
    yield "MAPHead_0/LayerNorm_0", "attn_pool.norm", "norm"
    yield from _list_mlp_layers("MAPHead_0/MlpBlock_0", "attn_pool.mlp")
    yield "pre_logits", "pre_logits.fc", "dense"
    yield "head", "head", "dense"


def _list_attention_layers(path: str, own: str) -> Iterator[GoogleLayer]:
    for theirs, ours in (("query", "q"), ("key", "k"), ("value", "v")):
        yield f"{path}/{theirs}", f"{own}.{ours}", "heads"
    yield f"{path}/out", f"{own}.proj", "out"


def _list_mlp_layers(path: str, own: str) -> Iterator[GoogleLayer]:
    yield f"{path}/Dense_0", f"{own}.fc1", "dense"
    yield f"{path}/Dense_1", f"{own}.fc2", "dense"


def _list_bit_layers(units: tuple[int, ...]) -> Iterator[GoogleLayer]:
    convolution, norm = "standardized_conv2d", "group_norm"
    yield f"resnet/root_block/{convolution}", "stem.conv", "conv"
    for stage, unit in _list_units(units):
        path, own = f"resnet/block{stage + 1}/unit{unit + 1:02d}", f"stages.{stage}.blocks.{unit}"
        for letter, part in zip("abc", "123", strict=True):
            yield f"{path}/{letter}/{convolution}", f"{own}.conv{part}", "conv"
            yield f"{path}/{letter}/{norm}", f"{own}.norm{part}", "gamma"
        yield f"{path}/a/proj/{convolution}", f"{own}.downsample.conv", "conv"
    yield f"resnet/{norm}", "norm", "gamma"
    yield "resnet/head/conv2d", "head.fc", "conv"


def _list_units(units: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return ((stage, unit) for stage, count in enumerate(units) for unit in range(count))


def list_arrays(layout: GoogleLayout) -> Iterator[GoogleLayer]:
    """List every array by Google's name, the model's own name and the kind of its layer."""
    for path, own, kind in list_layers(layout):
        if kind == "whole":
            yield path, own, kind
        else:
            leaves = NORM_LEAVES.get(kind, KERNEL_LEAVES)
            yield from ((f"{path}/{theirs}", f"{own}.{ours}", kind) for theirs, ours in leaves.items())


def convert_from_google(name: str, kind: LayerKind, array: Tensor) -> Tensor:
    """Convert an array to the model's layout: output first, heads joined, norms flat."""
    kernel, sides = name.endswith("/kernel"), tuple(array.shape)
    match kind:
        case "whole":
            return array
        case "conv" if kernel and len(sides) == 4:
            return array.permute(3, 2, 0, 1)  # HWIO -> OIHW
        case "dense" if kernel and len(sides) == 2:
            return array.mT
        case "heads" if kernel and len(sides) == 3:
            return array.flatten(1).mT  # (D, H, K) -> (D, D)
        case "heads" if not kernel and len(sides) == 2:
            return array.flatten()
        case "out" if kernel and len(sides) == 3:
            return array.flatten(0, 1).mT  # (H, K, D) -> (D, D)
        case "norm" | "gamma" if sides[:-1] in ((), (1, 1, 1)) and sides:
            return array.flatten()
        case "conv" | "dense" | "out" if not kernel and len(sides) == 1:
            return array
    raise ModelError(f"array {name!r} has the shape {sides}, which a layer of its kind cannot have")


def convert_to_google(name: str, kind: LayerKind, tensor: Tensor, heads: int) -> Tensor:
    """Invert `convert_from_google`."""
    kernel = name.endswith("/kernel")
    match kind:
        case "conv" if kernel:
            return tensor.permute(2, 3, 1, 0)
        case "dense" if kernel:
            return tensor.mT
        case "heads":
            return tensor.mT.unflatten(1, (heads, -1)) if kernel else tensor.unflatten(0, (heads, -1))
        case "out" if kernel:
            return tensor.mT.unflatten(0, (heads, -1))
    return tensor


def select_image_model_arrays(names: Collection[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Map the image model's array names, without the training code's prefix, to full names; note the other arrays."""
    prefix = next((p for p in TRAINING_PREFIXES if any(name.startswith(p) for name in names)), "")
    full_names = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    others = Counter(name.removeprefix("params/").split("/")[0] for name in names if not name.startswith(prefix))
    notes = (f"{top}: {count} arrays left out, no part of the image model" for top, count in sorted(others.items()))
    return full_names, tuple(notes)


def has_text_tower(names: Collection[str]) -> bool:
    """Whether a text tower is beside the image tower (SigLIP, LiT), whose head then leads into the space of texts."""
    towers = [{name[len(root) :].split("/")[0] for name in names if name.startswith(root)} for root in ("params/", "")]
    return any({"img", "txt"} <= names for names in towers)


class RenamedArrays(NamedTuple):
    """The tensors under the model's own names, and the facts that only Google's names and shapes tell."""

    tensors: dict[str, Tensor]
    heads: int | None
    prefix_positions: bool


def rename_arrays(google_arrays: Tensors, path: Path, *, beside_text: bool = False) -> RenamedArrays:
    """Convert the arrays of the image model to the model's own tensors; beside texts its head is a projection."""
    google_arrays = _unstack_blocks(google_arrays, path)
    table = {theirs: (own, kind) for theirs, own, kind in list_arrays(_infer_layout(google_arrays))}
    if unknown := sorted(google_arrays.keys() - table.keys()):
        raise ModelError(f"{path} has an array this model has no place for: {unknown[0]!r:.120}")
    own = {table[name][0]: convert_from_google(name, table[name][1], array) for name, array in google_arrays.items()}
    heads = {array.shape[1] for name, array in google_arrays.items() if name.endswith("/query/kernel")}
    if len(heads) > 1:
        raise ModelError(f"{path} has blocks of {', '.join(map(str, sorted(heads)))} heads; a plain ViT has one number")
    own = _fuse_pool_kv(foreign_format.fuse_qkv(own))
    if beside_text:
        own = {re.sub(r"^head\.", "projection.", name): tensor for name, tensor in own.items()}
    return RenamedArrays(own, next(iter(heads), None), POSITIONS in google_arrays)


def _infer_layout(names: Collection[str]) -> GoogleLayout:
    """Read the layout off the paths; a number that is skipped shows later as a missing tensor."""
    blocks = [int(m[1]) for name in names if (m := re.match(r"Transformer/encoderblock_(\d{1,4})/", name))]
    units: dict[int, int] = {}
    for name in names:
        if unit := re.match(r"(?:resnet/)?block([1-4])/unit(\d{1,3})/", name):
            units[int(unit[1])] = max(units.get(int(unit[1]), 0), int(unit[2]))
    counts = tuple(units.get(stage, 0) for stage in range(1, max(units, default=0) + 1))
    project: GoogleProject = "big_vision"
    if any(name.startswith("resnet/") for name in names):
        project = "bit"
    elif any("/MlpBlock_3/" in name for name in names):
        project = "vision_transformer"
    return GoogleLayout(project, 1 + max(blocks, default=-1), counts, PATCH_POSITIONS in names)


def _unstack_blocks(google_arrays: Tensors, path: Path) -> dict[str, Tensor]:
    """Split arrays in which big_vision stored all blocks along a leading axis into one a block."""
    arrays: dict[str, Tensor] = {}
    for name, array in google_arrays.items():
        if not name.startswith("Transformer/encoderblock/"):
            arrays[name] = array
            continue
        if not array.ndim or array.shape[0] > 1_024:
            raise ModelError(f"{path}: array {name!r} of shape {tuple(array.shape)} has no axis of layers")
        for index, layer in enumerate(array):
            arrays[name.replace("encoderblock/", f"encoderblock_{index}/", 1)] = layer
    return arrays


def _fuse_pool_kv(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join the attention pool's keys and values in one tensor."""
    for leaf in ("weight", "bias"):
        key, value = (own.pop(f"attn_pool.{part}.{leaf}", None) for part in "kv")
        if key is not None and value is not None and key.shape == value.shape:
            own[f"attn_pool.kv.{leaf}"] = torch.cat([key, value])
        elif key is not None or value is not None:
            raise ModelError("keys and values of the attention pool do not fit each other")
    return own


def recognize(model_files: ModelFiles) -> bool:
    """Whether a file has the suffix that only Google's weights have."""
    return model_files.weights.suffix == ".npz"


def read(model_files: ModelFiles) -> Trained:
    """Read the model in an .npz: its headers first, and its arrays when every name and shape fits."""
    path = model_files.weights
    headers = tensor_files.read_npz_headers(path)
    names, notes = select_image_model_arrays(headers)
    beside_text = has_text_tower(headers)
    shapes = tensor_files.build_npz_meta_tensors(headers, names.values(), path)
    meta = rename_arrays({name: shapes[full] for name, full in names.items()}, path, beside_text=beside_text)
    info = read_info(meta, path)
    build_matching_model(info.config, meta.tensors)
    arrays = tensor_files.read_npz(path, names.values())
    images = {name: arrays[full] for name, full in names.items()}
    tensors = rename_arrays(images, path, beside_text=beside_text).tensors
    return foreign_format.build_trained(FORMAT, model_files, tensors, info, notes)


def read_info(renamed: RenamedArrays, path: Path) -> ForeignModelInfo:
    """Infer the function that these arrays compute in the authors' code."""
    tensors = renamed.tensors
    if "stem.conv.weight" in tensors:
        config = foreign_format.infer_resnet_config(tensors, presets.BIT_NUMERICS, (DEFAULT_SIDE, DEFAULT_SIDE), path)
        return _add_preprocess(config, ["image size: 224 x 224, a ResNet's file does not state it"])
    fields, assumptions = foreign_format.infer_fields(tensors, path), list[str]()
    count, prefix = foreign_format.count_tokens(tensors, "pos_embed", path), int("cls_token" in tensors)
    stem = foreign_format.infer_stem(tensors, presets.HYBRID_NUMERICS, path)
    stride = fields["patch"] * (stem.stride if stem else 1)
    side = _get_default_grid_side(stride)
    if count:
        side = foreign_format.find_square_side(count - prefix * renamed.prefix_positions)
    if not side:
        raise ModelError(f"{path}: its {count} positions are no square grid{' and a class token' if prefix else ''}")
    if not count:
        assumptions.append(f"positions: none are stored, so sin-cos ones at {side * stride} x {side * stride} pixels")
    if (side, stride) == (27, 14):  # So400m/14 at 384
        assumptions.append("image size: 378 x 378, as positions tell; weights of 384 x 384 pixels leave 6 unread")
    pool = "map" if "attn_pool.latent" in tensors else "class" if prefix else "norm-mean"
    if pool == "map" and prefix:
        raise ModelError(f"{path} has both a class token and attention pooling, which Google's code never has")
    fields |= {
        "heads": renamed.heads,
        "stem": None if stem is None else dataclasses.asdict(stem),
        "image_size": (side * stride, side * stride),
        "class_token": bool(prefix),
        "pool": pool,
        "projection": foreign_format.count_rows(tensors, "projection.weight", path),
        "positions": "learned-1d" if count else "sincos-2d",
        "prefix_positions": renamed.prefix_positions,
    }
    return _add_preprocess(from_json(ViTConfig, fields), assumptions)


def _get_default_grid_side(stride: int) -> int:
    return max(1, DEFAULT_SIDE // stride)


def _add_preprocess(config: ModelConfig, assumptions: list[str]) -> ForeignModelInfo:
    """Add the preprocessing of Google's evaluation: pixels from -1 to 1, resized without keeping the aspect ratio."""
    preprocess = presets.build_preprocess_config("inception", config.image_size, config.channels)
    preprocess = dataclasses.replace(preprocess, resize=config.image_size, interpolation="bilinear")
    assumptions.append("preprocessing: mean and std 0.5, resized to the input's size, as Google's code does")
    return ForeignModelInfo(config=config, preprocess=preprocess, assumptions=tuple(assumptions))


def write(trained: Trained, path: Path) -> list[str]:
    """Write an .npz that Google's code reads; the notes say what it loses."""
    model = trained.model
    config, tensors, notes = model.config, dict(model.state_dict()), list[str]()
    if isinstance(model, ViT) and _needs_table(model.config):
        config, tensors, notes = foreign_format.convert_positions_to_table(model, prefix=model.config.class_token)
    table = {own: (theirs, kind) for theirs, own, kind in list_arrays(_choose_layout(config))}
    tensors = _split_pool_kv(dict(foreign_format.split_qkv(tensors)))
    if unknown := sorted(tensors.keys() - table.keys()):
        raise ModelError(f"the google format cannot hold this model: it has no place for {unknown[0]!r}")
    heads = config.heads if isinstance(config, ViTConfig) else 0
    arrays = {table[name][0]: convert_to_google(*table[name], tensor, heads) for name, tensor in tensors.items()}
    held = read_info(rename_arrays(arrays, foreign_format.DRAFT_PATH), foreign_format.DRAFT_PATH).config
    notes += foreign_format.check_round_trip(FORMAT, config, held)
    tensor_files.write_npz(path, arrays)
    size = "" if isinstance(config, ViTConfig) else ", image size"
    return [*notes, f"an .npz has no place for preprocessing, labels{size} and origin: they were left out"]


def _needs_table(config: ViTConfig) -> bool:
    """Whether positions must be stored as the table that vision_transformer has."""
    if config.positions == "sincos-2d":  # big_vision stores none, so the size must be the default that a reader assumes
        return config.stem is not None or config.grid != (_get_default_grid_side(config.stride),) * 2
    return config.positions in ("none", "learned-2d") or (config.stem is not None and not config.prefix_positions)


def _choose_layout(config: ModelConfig) -> GoogleLayout:
    if isinstance(config, BiTConfig):
        return GoogleLayout("bit", units=config.conv.units)
    if config.stem is not None:
        if config.pool == "map":
            raise ModelError("the google format cannot hold this model: it has no hybrid with attention pooling")
        return GoogleLayout("vision_transformer", config.depth, config.stem.units)
    bare = config.pool == "map" or config.positions == "sincos-2d" or not config.prefix_positions
    return GoogleLayout("big_vision" if bare else "vision_transformer", config.depth, patch_positions_only=bare)


def _split_pool_kv(own: dict[str, Tensor]) -> dict[str, Tensor]:
    for leaf in ("weight", "bias"):
        if (both := own.pop(f"attn_pool.kv.{leaf}", None)) is not None:
            own[f"attn_pool.k.{leaf}"], own[f"attn_pool.v.{leaf}"] = both.chunk(2)
    return own
