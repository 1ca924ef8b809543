"""What the readers and writers of foreign formats share.

Every format is read into timm's tensor names, which are the model's own. A writer never decides on its own what its
format can hold: it makes the tensors and settings, has its own reader look at them, and refuses where that reader would
see another function (`check_held`).
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail import presets
from vitrail.config import BiTConfig, ConvConfig, ModelConfig, PreprocessConfig, ViTConfig
from vitrail.errors import ModelError
from vitrail.model.build import Model
from vitrail.model.vit import ViT
from vitrail.weights.trained import Origin, Tensors

STEM_KERNEL = "patch_embed.backbone.stem.conv.weight"
DRAFT_PATH = Path("the file to be written")  # what a reader calls tensors that a writer shows it


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForeignModelInfo:
    """What a checkpoint says besides its tensors, and what had to be assumed."""

    config: ModelConfig
    preprocess: PreprocessConfig | None = None
    labels: tuple[str, ...] | None = None
    license: str | None = None
    assumptions: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorNameMap:
    """How a format names its tensors: prefixes to replace, outside of the blocks and inside one."""

    layer_pattern: re.Pattern[str]
    """Matches the start of a block's tensor name; its group is the block's number."""
    layer_template: str
    top_prefixes: dict[str, str]
    """Their prefix -> ours. Where several mean the same, the first is written."""
    block_prefixes: dict[str, str]

    def rename_tensors(self, tensors: Tensors) -> dict[str, Tensor]:
        """The tensors under the model's own names."""
        renamed: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            own = self.to_own_name(name)
            if own in renamed:
                raise ModelError(f"the file has two tensors for {own!r}, one of them {name!r}")
            renamed[own] = tensor
        return renamed

    def to_own_name(self, theirs: str) -> str:
        """The model's own name for a tensor of theirs."""
        if found := self.layer_pattern.match(theirs):
            own = _replace_prefix(theirs[found.end() :], self.block_prefixes)
            own = own and f"blocks.{found[1]}.{own}"
        else:
            own = _replace_prefix(theirs, self.top_prefixes)
        if own is None:
            raise ModelError(f"the file has a tensor this model has no place for: {theirs!r}")
        return own

    def to_foreign_name(self, own: str) -> str:
        """The format's name for a tensor of ours."""
        if found := re.match(r"blocks\.(\d+)\.", own):
            theirs = _replace_prefix(own[found.end() :], _invert_table(self.block_prefixes))
            theirs = theirs and self.layer_template.format(found[1]) + theirs
        else:
            theirs = _replace_prefix(own, _invert_table(self.top_prefixes))
        if theirs is None:
            raise ModelError(f"the format cannot hold this model: it has no place for {own!r}")
        return theirs


def _replace_prefix(name: str, table: dict[str, str]) -> str | None:
    return next((new + name[len(old) :] for old, new in table.items() if name.startswith(old)), None)


def _invert_table(table: dict[str, str]) -> dict[str, str]:
    return {own: theirs for theirs, own in reversed(table.items())}


class ViTSizes(NamedTuple):
    """What the tensors alone tell about an architecture."""

    width: int
    depth: int
    mlp: int
    patch: int
    channels: int
    classes: int


def get_dimensions(tensors: Tensors, name: str, count: int, path: Path) -> tuple[int, ...]:
    """The shape of a tensor that must be there and have so many dimensions."""
    if name not in tensors or tensors[name].ndim != count:
        raise ModelError(f"{path} is no plain ViT: it has no {count}-dimensional tensor for {name!r}")
    return tuple(tensors[name].shape)


def count_tokens(tensors: Tensors, name: str, path: Path) -> int:
    """How many tokens a table such as `reg_token` or `pos_embed` has; 0 where there is none."""
    return get_dimensions(tensors, name, 3, path)[1] if name in tensors else 0


def infer_sizes(tensors: Tensors, path: Path) -> ViTSizes:
    """The sizes of a plain ViT, read off its tensors under timm's names."""
    width, channels, patch, across = get_dimensions(tensors, "patch_embed.proj.weight", 4, path)
    if STEM_KERNEL in tensors:
        _, channels, _, _ = get_dimensions(tensors, STEM_KERNEL, 4, path)
    if patch != across or not patch:
        raise ModelError(f"{path} has patches of {patch} x {across} pixels; only square ones are supported")
    blocks = {int(found[1]) for name in tensors if (found := re.match(r"blocks\.(\d{1,4})\.", name))}
    if blocks != set(range(len(blocks))):
        raise ModelError(f"{path} is damaged: its blocks are numbered {sorted(blocks)}")
    mlp, _ = get_dimensions(tensors, "blocks.0.mlp.fc1.weight", 2, path)
    classes = get_dimensions(tensors, "head.weight", 2, path)[0] if "head.weight" in tensors else 0
    return ViTSizes(width=width, depth=len(blocks), mlp=mlp, patch=patch, channels=channels, classes=classes)


def guess_heads(width: int, depth: int) -> tuple[int, str]:
    """The number of heads for sizes that do not state it, and the sentence that says how it was chosen."""
    if known := presets.find_published_heads(width, depth):
        return known, f"heads: {known}, as the published size of width {width} and depth {depth} has"
    if width % 64:
        raise ModelError(
            f"nothing says how many heads a ViT of width {width} has, and no published size tells:"
            " a folder whose config.json states it would"
        )
    return width // 64, f"heads: {width // 64}, assumed from width {width} / 64"


def find_square_grid(patches: int) -> tuple[int, int] | None:
    """The square grid of that many patches, where there is one."""
    side = math.isqrt(max(patches, 0))
    return (side, side) if side and side * side == patches else None


def split_qkv(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """timm's fused qkv as `attn.q`, `attn.k` and `attn.v`; everything else as it is."""
    for name, tensor in tensors.items():
        if ".attn.qkv." in name:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                yield name.replace(".attn.qkv.", f".attn.{part}."), piece
        else:
            yield name, tensor


def fuse_qkv(tensors: Tensors) -> dict[str, Tensor]:
    """The inverse of `split_qkv`."""
    fused: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found = re.search(r"\.attn\.([qkv])\.", name)
        if found is None:
            fused[name] = tensor
            continue
        parts = [f"{name[: found.start()]}.attn.{part}.{name[found.end() :]}" for part in "qkv"]
        if missing := [part for part in parts if part not in tensors]:
            raise ModelError(f"the file has the tensor of {name!r} but not of {missing[0]!r}")
        pieces = [tensors[part] for part in parts]
        if not tensor.ndim or any(piece.shape != tensor.shape for piece in pieces):
            raise ModelError(f"query, key and value of {name!r} have the shapes {[tuple(p.shape) for p in pieces]}")
        if found[1] == "q":
            fused[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat(pieces)
    return fused


def count_units(tensors: Tensors, prefix: str, path: Path) -> tuple[int, ...]:
    """How many units each stage of a ResNet has whose stages are named `prefix`0, `prefix`1 and so on."""
    pattern = re.compile(rf"{re.escape(prefix)}(\d)\.blocks\.(\d{{1,3}})\.")
    found = {(int(match[1]), int(match[2])) for name in tensors if (match := pattern.match(name))}
    counts = tuple(
        sum(stage == index for stage, _ in found) for index in range(1 + max((s for s, _ in found), default=-1))
    )
    if found != {(stage, unit) for stage, count in enumerate(counts) for unit in range(count)}:
        raise ModelError(f"{path} is damaged: the units of its stages are not numbered in turn")
    return counts


def infer_conv_config(tensors: Tensors, prefix: str, numerics: dict[str, Any], path: Path) -> ConvConfig:
    """The convolutions whose stem and stages are named behind `prefix`, with the numerics of their origin."""
    width, _, _, _ = get_dimensions(tensors, f"{prefix}stem.conv.weight", 4, path)
    if width % 32 or not width:
        raise ModelError(f"{path}: its first convolution has {width} channels; group norm needs a multiple of 32")
    return ConvConfig(units=count_units(tensors, f"{prefix}stages.", path), width_factor=width / 64, **numerics)


def require_vit(format_name: str, model: Model) -> ViT:
    """The model, if it is a ViT and no hybrid."""
    if not isinstance(model, ViT) or model.config.stem is not None:
        kind = "hybrid" if isinstance(model, ViT) else "ResNet"
        raise ModelError(f"the {format_name} format cannot hold this model: it has no place for a {kind}")
    return model


def convert_positions_to_table(model: ViT, *, prefix: bool) -> tuple[ViTConfig, dict[str, Tensor], list[str]]:
    """Configuration and tensors with positions added at the stem stored as one learned table; notes on what changed.

    The same function of the same pixels, for formats that know no other positions. `prefix` gives bare prefix tokens
    the position zero. Positions that no table can replace are left as they are.
    """
    config, tensors = model.config, dict(model.state_dict())
    if config.positions == "relative" or config.positions_at != "stem":
        return config, tensors, []
    changed = dataclasses.replace(config, positions="learned-1d", prefix_positions=prefix)
    if changed.num_positioned_prefix_tokens == config.num_positioned_prefix_tokens and config.positions == "learned-1d":
        return changed, tensors, []
    with torch.no_grad():
        table = model.compute_positions(config.grid)
    if table is None:
        table = torch.zeros(1, config.num_prefix_tokens + config.grid[0] * config.grid[1], config.width)
    for name in ("pos_embed_x", "pos_embed_y"):
        tensors.pop(name, None)
    tensors["pos_embed"] = table[:, config.num_prefix_tokens - changed.num_positioned_prefix_tokens :]
    stored = "as their values" if config.positions != "learned-1d" else "with zeros for the tokens that had none"
    return changed, tensors, [f"positions: {config.positions} were stored as one learned table, {stored}"]


def check_round_trip(format_name: str, wanted: ModelConfig, held: ModelConfig) -> list[str]:
    """Refuse to write what would be read back as another function; a note if it would be at another size only.

    No foreign format says how its positions are to be resampled.
    """
    for name, mine, theirs in _find_differences(wanted, held):
        if name not in _list_irrelevant_fields(wanted):
            raise ModelError(
                f"the {format_name} format cannot hold this model: {name} is {mine!r}, and a reader would take it"
                f" for {theirs!r}"
            )
    if isinstance(wanted, BiTConfig) or isinstance(held, BiTConfig):
        return []
    if wanted.positions in ("none", "sincos-2d") or wanted.resample == held.resample:
        return []
    return [
        f"resample: at other image sizes {format_name} uses {held.resample}, where this model has {wanted.resample}"
    ]


def _find_differences(wanted: Any, held: Any, within: str = "") -> Iterator[tuple[str, object, object]]:
    """Name and both values of every field in which two configurations differ, `stem.norm_eps` among them."""
    for field in dataclasses.fields(wanted):
        mine, theirs = getattr(wanted, field.name), getattr(held, field.name, None)
        if isinstance(mine, ConvConfig) and isinstance(theirs, ConvConfig):
            yield from _find_differences(mine, theirs, f"{field.name}.")
        elif mine != theirs:
            yield within + field.name, mine, theirs


def _list_irrelevant_fields(config: ModelConfig) -> tuple[str, ...]:
    """Fields that change nothing about the function of this configuration at its own size."""
    if isinstance(config, BiTConfig):
        return ("image_size",)
    bare = not config.num_prefix_tokens or config.positions != "learned-1d"
    return ("resample", "prefix_positions") if bare else ("resample",)


def describe_lost_origin(format_name: str, origin: Origin) -> list[str]:
    """Notes on what a folder, which can name the licence, cannot say of the weights' past."""
    parts = {"assumptions": origin.assumptions, "changes": origin.changes}
    missing = [name for name, sentences in parts.items() if sentences]
    return [f"origin: {format_name} has no place for the {' and '.join(missing)}"] if missing else []
