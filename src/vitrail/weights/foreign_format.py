"""What the readers and writers of foreign formats share.

Every format is read into timm's tensor names, which are the model's own. A writer never decides by itself what its
format can hold. It builds tensors and settings, passes them to its own reader, and refuses where that reader would
get another function (`check_round_trip`).
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail import files, presets
from vitrail.config import BiTConfig, ConvConfig, ModelConfig, PreprocessConfig, RotaryConfig, ViTConfig
from vitrail.errors import ModelError
from vitrail.model.vit import Model, ViT
from vitrail.weights.formats import WeightsFormat
from vitrail.weights.hub import read_license
from vitrail.weights.tensor_files import ModelFiles
from vitrail.weights.trained import Origin, Tensors, Trained, assemble_model

BACKBONE = "patch_embed.backbone."  # of a hybrid
STEM_KERNEL = f"{BACKBONE}stem.conv.weight"
DRAFT_PATH = Path("the file to be written")  # the path in errors when a writer calls its reader


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForeignModelInfo:
    """What a checkpoint states besides its tensors, and what had to be assumed."""

    config: ModelConfig
    preprocess: PreprocessConfig | None = None
    labels: tuple[str, ...] | None = None
    license: str | None = None
    assumptions: tuple[str, ...] = ()


def build_trained(
    format_name: WeightsFormat,
    model_files: ModelFiles,
    tensors: Tensors,
    info: ForeignModelInfo,
    changes: tuple[str, ...] = (),
) -> Trained:
    """Build the model of tensors under its own names, with where they came from."""
    origin = Origin(
        format=format_name,
        name=model_files.path.resolve().name,
        sha256=files.compute_sha256(*model_files.shards),
        license=info.license or read_license(model_files.path),
        assumptions=info.assumptions,
        changes=changes,
    )
    model = assemble_model(info.config, tensors)
    return Trained(model=model, preprocess=info.preprocess, labels=info.labels, origin=origin)


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
        """Put tensors under the model's own names."""
        renamed: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            own = self.to_own_name(name)
            if own in renamed:
                raise ModelError(f"the file has two tensors for {own!r}, one of them {name!r}")
            renamed[own] = tensor
        return renamed

    def to_own_name(self, theirs: str) -> str:
        """Return the model's own name for a tensor of the format."""
        own = self.find_own_name(theirs)
        if own is None:
            raise ModelError(f"the file has a tensor this model has no place for: {theirs!r}")
        return own

    def find_own_name(self, theirs: str) -> str | None:
        """Return the model's own name for a tensor of the format; None where the format has no such tensor."""
        return _rename_tensor(theirs, self.layer_pattern, "blocks.{}.", self.block_prefixes, self.top_prefixes)

    def to_foreign_name(self, own: str) -> str:
        """Return the format's name for a tensor of the model."""
        block, top = (
            {own: theirs for theirs, own in reversed(table.items())}
            for table in (self.block_prefixes, self.top_prefixes)
        )
        theirs = _rename_tensor(own, re.compile(r"blocks\.(\d+)\."), self.layer_template, block, top)
        if theirs is None:
            raise ModelError(f"the format cannot hold this model: it has no place for {own!r}")
        return theirs


def _rename_tensor(
    name: str, block_pattern: re.Pattern[str], block_template: str, block: dict[str, str], top: dict[str, str]
) -> str | None:
    """Replace the prefix of a name by the table for tensors in a block or by the one for all others."""
    start, prefixes = "", top
    if match := block_pattern.match(name):
        start, prefixes, name = block_template.format(match[1]), block, name[match.end() :]
    return next((start + new + name[len(old) :] for old, new in prefixes.items() if name.startswith(old)), None)


def get_dimensions(tensors: Tensors, name: str, count: int, path: Path) -> tuple[int, ...]:
    """Return the shape of a tensor; refuse a file where it is missing or has another number of dimensions."""
    if name not in tensors or tensors[name].ndim != count:
        raise ModelError(f"{path} is no plain ViT: it has no {count}-dimensional tensor for {name!r}")
    return tuple(tensors[name].shape)


def count_tokens(tensors: Tensors, name: str, path: Path) -> int:
    """Count the tokens of a table such as `reg_token` or `pos_embed`; 0 where there is none."""
    return get_dimensions(tensors, name, 3, path)[1] if name in tensors else 0


def count_rows(tensors: Tensors, name: str, path: Path) -> int:
    """Count the outputs of a linear layer by its weight; 0 where there is none."""
    return get_dimensions(tensors, name, 2, path)[0] if name in tensors else 0


def infer_fields(tensors: Tensors, path: Path) -> dict[str, Any]:
    """Read the fields of a ViT's config that every format's tensors tell, under timm's names."""
    width, channels, patch, across = get_dimensions(tensors, "patch_embed.proj.weight", 4, path)
    if STEM_KERNEL in tensors:
        _, channels, _, _ = get_dimensions(tensors, STEM_KERNEL, 4, path)
    if patch != across or not patch:
        raise ModelError(f"{path} has patches of {patch} x {across} pixels; only square ones are supported")
    blocks = {int(block[1]) for name in tensors if (block := re.match(r"blocks\.(\d{1,4})\.", name))}
    if blocks != set(range(len(blocks))):
        raise ModelError(f"{path} is damaged: its blocks are numbered {sorted(blocks)}")
    mlp, _ = get_dimensions(tensors, "blocks.0.mlp.fc1.weight", 2, path)
    classes = get_dimensions(tensors, "head.weight", 2, path)[0] if "head.weight" in tensors else 0
    return {
        "width": width,
        "depth": len(blocks),
        "mlp": mlp,
        "patch": patch,
        "channels": channels,
        "classes": classes,
        "hidden_head": "pre_logits.fc.weight" in tensors,
        "distillation_token": "dist_token" in tensors,
        "distillation_head": "head_dist.weight" in tensors,
    }


def guess_heads(width: int, depth: int) -> tuple[int, str]:
    """Guess the number of heads where nothing states it; also return the sentence that says how."""
    if known := presets.find_published_heads(width, depth):
        return known, f"heads: {known}, as in the published size of width {width} and depth {depth}"
    if width % 64:
        raise ModelError(
            f"nothing says how many heads a ViT of width {width} has, and no published size has that width:"
            " give a folder whose config.json states it"
        )
    return width // 64, f"heads: {width // 64}, assumed from width {width} / 64"


def find_square_side(patches: int) -> int:
    """Return the side of the square grid of that many patches; 0 where there is none."""
    side = math.isqrt(max(patches, 0))
    return side if side * side == patches else 0


def split_qkv(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Split timm's fused qkv into `attn.q`, `attn.k` and `attn.v`; leave everything else."""
    for name, tensor in tensors.items():
        if ".attn.qkv." in name:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                yield name.replace(".attn.qkv.", f".attn.{part}."), piece
        else:
            yield name, tensor


def fuse_qkv(tensors: Tensors) -> dict[str, Tensor]:
    """Invert `split_qkv`."""
    fused: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        projection = re.search(r"\.attn\.([qkv])\.", name)
        if projection is None:
            fused[name] = tensor
            continue
        parts = [f"{name[: projection.start()]}.attn.{part}.{name[projection.end() :]}" for part in "qkv"]
        if missing := [part for part in parts if part not in tensors]:
            raise ModelError(f"the file has the tensor of {name!r} but not of {missing[0]!r}")
        pieces = [tensors[part] for part in parts]
        if not tensor.ndim or any(piece.shape != tensor.shape for piece in pieces):
            raise ModelError(f"query, key and value of {name!r} have the shapes {[tuple(p.shape) for p in pieces]}")
        if projection[1] == "q":
            fused[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat(pieces)
    return fused


def add_zero_biases(own: Tensors, ends: tuple[str, ...]) -> dict[str, Tensor]:
    """Give layers without a bias, whose names end like this, one of zeros: the same function."""
    added = dict(own)
    for name, weight in own.items():
        layer = name.removesuffix(".weight")
        if layer != name and layer.endswith(ends) and weight.ndim:
            added.setdefault(f"{layer}.bias", weight.new_zeros(len(weight)))
    return added


def has_key_bias(tensors: Tensors) -> bool:
    """Whether some key has a bias that is not zero."""
    biases = (tensor for name, tensor in tensors.items() if name.endswith(".attn.qkv.bias"))
    return any(bool(bias.chunk(3)[1].any()) for bias in biases)


def drop_key_biases(tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
    """Zero the keys' biases, which BEiT lacks: each query adds the same number to all its logits for them."""
    kept, dropped = dict(tensors), False
    for name in [name for name in tensors if name.endswith(".attn.qkv.bias")]:
        q, k, v = tensors[name].chunk(3)
        dropped = dropped or bool(k.any())
        kept[name] = torch.cat([q, torch.zeros_like(k), v])
    return kept, ["attn.k.bias: left out, since no softmax depends on it"] if dropped else []


def count_units(tensors: Tensors, prefix: str, path: Path) -> tuple[int, ...]:
    """Count the units of each stage of a ResNet whose stages are named `prefix`0, `prefix`1 and so on."""
    pattern = re.compile(rf"{re.escape(prefix)}(\d)\.blocks\.(\d{{1,3}})\.")
    units = {(int(match[1]), int(match[2])) for name in tensors if (match := pattern.match(name))}
    num_stages = 1 + max((stage for stage, _ in units), default=-1)
    counts = tuple(sum(stage == index for stage, _ in units) for index in range(num_stages))
    if units != {(stage, unit) for stage, count in enumerate(counts) for unit in range(count)}:
        raise ModelError(f"{path} is damaged: the units of its stages are not numbered in turn")
    return counts


def infer_conv_config(tensors: Tensors, prefix: str, numerics: dict[str, Any], path: Path) -> ConvConfig:
    """Read the config of convolutions named behind `prefix` off their tensors; `numerics` are those of their origin."""
    width, _, _, _ = get_dimensions(tensors, f"{prefix}stem.conv.weight", 4, path)
    if width % 32 or not width:
        raise ModelError(f"{path}: its first convolution has {width} channels; group norm needs a multiple of 32")
    return ConvConfig(units=count_units(tensors, f"{prefix}stages.", path), width_factor=width / 64, **numerics)


def infer_stem(tensors: Tensors, numerics: dict[str, Any], path: Path) -> ConvConfig | None:
    """Read the config of a hybrid's stem off its tensors; None for a plain ViT."""
    return infer_conv_config(tensors, BACKBONE, numerics, path) if STEM_KERNEL in tensors else None


def infer_resnet_config(
    tensors: Tensors, numerics: dict[str, Any], image_size: tuple[int, int], path: Path
) -> BiTConfig:
    """Read the config of a BiT ResNet off its tensors, which do not tell the image size."""
    _, channels, _, _ = get_dimensions(tensors, "stem.conv.weight", 4, path)
    classes = get_dimensions(tensors, "head.fc.weight", 4, path)[0] if "head.fc.weight" in tensors else 0
    conv = infer_conv_config(tensors, "", numerics, path)
    return BiTConfig(conv=conv, channels=channels, classes=classes, image_size=image_size)


def require_vit(format_name: str, model: Model) -> ViT:
    """Return the model, or refuse a hybrid or a ResNet."""
    if not isinstance(model, ViT) or model.config.stem is not None:
        kind = "hybrid" if isinstance(model, ViT) else "ResNet"
        raise ModelError(f"the {format_name} format cannot hold this model: it has no place for a {kind}")
    return model


def convert_positions_to_table(model: ViT, *, prefix: bool) -> tuple[ViTConfig, dict[str, Tensor], list[str]]:
    """Store positions that are added at the stem as one learned table; return config, tensors and notes.

    The function stays the same, for formats that know no other positions. `prefix` gives prefix tokens without a
    position the position zero. Positions that no table can replace are left as they are.
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
    """Refuse to write a model that would be read back as another function; note one that differs at other sizes.

    `held` is the config that the format's reader gets. No foreign format states how its positions are resampled.
    """
    irrelevant = ["image_size"] if isinstance(wanted, BiTConfig) else ["resample"]  # at the model's own size
    if isinstance(wanted, ViTConfig) and wanted.gated_mlp and wanted.pool != "map":
        irrelevant.append("gelu")
    if isinstance(wanted, ViTConfig) and not (wanted.num_prefix_tokens and wanted.positions == "learned-1d"):
        irrelevant.append("prefix_positions")
    for name, value, read_value in _find_differences(wanted, held):
        if name not in irrelevant:
            raise ModelError(
                f"the {format_name} format cannot hold this model: {name} is {value!r}, and would be read as"
                f" {read_value!r}"
            )
    if isinstance(wanted, BiTConfig) or isinstance(held, BiTConfig) or wanted.resample == held.resample:
        return []
    if wanted.positions in ("none", "sincos-2d"):
        return []
    return [f"resample: at other image sizes {format_name} uses {held.resample}, this model {wanted.resample}"]


def _find_differences(wanted: Any, held: Any, within: str = "") -> Iterator[tuple[str, object, object]]:
    """Name and both values of every field in which two configs differ, `stem.norm_eps` among them."""
    for field in dataclasses.fields(wanted):
        value, held_value = getattr(wanted, field.name), getattr(held, field.name, None)
        if isinstance(value, ConvConfig | RotaryConfig) and isinstance(held_value, type(value)):
            yield from _find_differences(value, held_value, f"{field.name}.")
        elif value != held_value:
            yield within + field.name, value, held_value


def describe_lost_origin(format_name: str, origin: Origin) -> list[str]:
    """Note what a folder, which can state the license, cannot state of the weights' origin."""
    parts = {"assumptions": origin.assumptions, "changes": origin.changes}
    missing = [name for name, sentences in parts.items() if sentences]
    return [f"origin: {format_name} has no place for the {' and '.join(missing)}"] if missing else []
