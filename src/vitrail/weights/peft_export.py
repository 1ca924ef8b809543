"""Write LoRA adapters as PEFT does, under the names of transformers or timm.

    r rank   I inputs   O outputs   A (r, I)   B (O, r)

timm has one layer for queries, keys and values, transformers has three. An addition to the one is three additions with
the same A. Additions to some of the three are one whose A stacks theirs and whose B has a block for each. So it is with
the first layer of a gated MLP, which is one layer or two.
"""

import collections
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vitrail import files
from vitrail.config import LoRAConfig, ViTConfig
from vitrail.config.training import compute_lora_scale
from vitrail.errors import ModelError
from vitrail.model.lora import ADDED_NAMES
from vitrail.weights import tensor_files, transformers
from vitrail.weights.foreign_format import TensorNameMap
from vitrail.weights.formats import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILES, check_adapter_destination
from vitrail.weights.peft_adapters import EVA02, HEADER_KEY, KEY_PREFIX, Adapter, AdapterHeader, LowRankAddition
from vitrail.weights.trained import Origin, Tensors, Trained
from vitrail.weights.transformers_families import CLIP_NAMES, DINOV2_NAMES, DINOV3_NAMES, FAMILIES

AdapterFormat = Literal["peft", "peft-v4", "peft-timm"]
"""The names of transformers from 5.9 on, those before, and timm's."""
ADAPTER_FORMATS: tuple[AdapterFormat, ...] = get_args(AdapterFormat)

_PARTS = {"attn.qkv": ("attn.q", "attn.k", "attn.v"), "mlp.fc1": ("mlp.gate", "mlp.up")}
"""Layers whose rows are stacked, and what they are where each is a layer of its own."""
_ATTENTION = {
    "peft": {
        **{f"attention.{part}_proj.": f"attn.{part}." for part in "qkv"},
        "attention.o_proj.": "attn.proj.",
    },
    "peft-v4": {
        **{f"attention.attention.{part}.": f"attn.{part[0]}." for part in ("query", "key", "value")},
        "attention.output.dense.": "attn.proj.",
    },
}
_MLP = {"mlp.fc1.": "mlp.fc1.", "mlp.fc2.": "mlp.fc2."}
_V4_MLP = {"intermediate.dense.": "mlp.fc1.", "output.dense.": "mlp.fc2."}
_GATED_MLP = {"mlp.gate_proj.": "mlp.gate.", "mlp.up_proj.": "mlp.up.", "mlp.down_proj.": "mlp.fc2."}
_V4_GATED_MLP = {"mlp.weights_in.": "mlp.fc1.", "mlp.weights_out.": "mlp.fc2."}
_NORMS = {"layernorm_before.": "norm1.", "layernorm_after.": "norm2."}
_DINO_NORMS = {"norm1.": "norm1.", "norm2.": "norm2."}


def build_adapter(tensors: Tensors, config: LoRAConfig, trained: Trained, base: Origin) -> Adapter:
    """The adapter of a run: `tensors` are all that it trained, `trained` its model, and `base` what it started from."""
    additions = {}
    for path in [name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")]:
        lora_a, lora_b, magnitude = (tensors.get(f"{path}.{name}") for name in ADDED_NAMES)
        assert lora_a is not None
        assert lora_b is not None
        additions[path] = LowRankAddition(lora_a=lora_a, lora_b=lora_b, alpha=config.used_alpha, magnitude=magnitude)
    hub_name = re.fullmatch(r"(?:.*, from )?hf:([^@\s]+)@\w+", base.name)
    return Adapter(
        additions=additions,
        replaced={name: tensor for name, tensor in tensors.items() if not name.endswith(ADDED_NAMES)},
        rank_stabilized=config.rank_stabilized,
        **_describe_family(trained),
        base=hub_name[1] if hub_name else None,
        header=AdapterHeader(labels=trained.labels, multi_label=trained.multi_label, preprocess=trained.preprocess),
    )


def _describe_family(trained: Trained) -> dict[str, Any]:
    """The fields of an `Adapter` that its base tells: what transformers, or timm, calls this model's layers."""
    config = trained.model.config
    assert isinstance(config, ViTConfig)
    kind = transformers.choose_model_type(config)
    if config.mlp_norm:
        return {"family": EVA02, "gated": config.gated_mlp, "backbone": ""}
    if config.rotary is not None and config.rotary.places != "normalized":
        kind = "vit"  # of timm alone
    is_bare = kind == "dinov3_vit" or (FAMILIES[kind].names is CLIP_NAMES and not config.projection)
    return {"family": kind, "gated": config.gated_mlp, "backbone": "" if is_bare else f"{FAMILIES[kind].prefix}."}


def choose_format(trained: Trained) -> AdapterFormat:
    """The format whose names the base has where PEFT would load it: timm's if it is timm's, or transformers' if that
    has a classifier of its kind."""
    config = trained.model.config
    if not isinstance(config, ViTConfig) or config.stem is not None or trained.origin.format == "timm":
        return "peft-timm"
    kind = transformers.choose_model_type(config)
    pools = {"beit": ("class", "mean-norm"), "ijepa": ("norm-mean",)}.get(kind, ("class", "class-mean"))
    is_lacking = (kind == "beit" and config.positions != "relative-bias") or (kind == "ijepa" and config.registers)
    has_classifier = transformers.CLASSES[kind][1] is not None and config.pool in pools and not is_lacking
    return "peft" if has_classifier else "peft-timm"


def write_adapter(adapter: Adapter, folder: Path, format: AdapterFormat = "peft", *, overwrite: bool = False) -> None:  # noqa: A002
    """Write the adapter's folder whole or not at all."""
    check_adapter_destination(folder, overwrite=overwrite)
    names = None if format == "peft-timm" else _build_name_map(adapter, format)
    if names is CLIP_NAMES and "projection.bias" in adapter.replaced:
        raise ModelError("transformers cannot hold this adapter: it trained a bias that visual_projection lacks")
    adapter = _arrange_for_timm(adapter) if names is None else _arrange_for_transformers(adapter, names)
    backbone = adapter.backbone
    if format == "peft-v4" and names is CLIP_NAMES:
        backbone = "vision_model."  # also in models of images alone

    def rename(own: str) -> str:
        return (
            _rename_for_timm(own, adapter.family) if names is None else _rename_for_transformers(own, names, backbone)
        )

    tensors: dict[str, Tensor] = {}
    for path, addition in adapter.additions.items():
        theirs = rename(f"{path}.")
        parts = {
            "lora_A.weight": addition.lora_a,
            "lora_B.weight": addition.lora_b,
            "lora_B.bias": addition.bias,
            "lora_magnitude_vector": addition.magnitude,
        }
        tensors |= {f"{KEY_PREFIX}{theirs}{name}": tensor for name, tensor in parts.items() if tensor is not None}
    for own, tensor in adapter.replaced.items():
        path, _, kind = own.rpartition(".")
        layer = "base_layer." if path in adapter.additions else ""
        theirs = f"{rename(f'{path}.')}{layer}{kind}"
        tensors[f"{KEY_PREFIX}{theirs}"] = tensor
    header = json.dumps(dataclasses.asdict(adapter.header), ensure_ascii=False, sort_keys=True)
    with files.write_atomically(folder, overwrite=overwrite) as fresh:
        fresh.mkdir()
        tensor_files.write_json(fresh / ADAPTER_CONFIG_FILE, _build_config(adapter, rename))
        tensor_files.write_tensors(fresh / ADAPTER_WEIGHTS_FILES[0], tensors, {HEADER_KEY: header})


def _build_name_map(adapter: Adapter, format: AdapterFormat) -> TensorNameMap:  # noqa: A002
    """The names of a version of transformers for the adapter's kind of model."""
    family = FAMILIES.get(adapter.family)
    if family is None or (adapter.gated and family.names not in (DINOV2_NAMES, DINOV3_NAMES)):
        raise ModelError(
            f"transformers has no model of the family {adapter.family!r} with such layers: write the adapter"
            " with --to peft-timm"
        )
    if family.names is DINOV3_NAMES:
        return (
            DINOV3_NAMES if format == "peft-v4" else dataclasses.replace(DINOV3_NAMES, layer_template="model.layer.{}.")
        )
    if family.names is CLIP_NAMES:
        return CLIP_NAMES
    is_dino = family.names is DINOV2_NAMES
    version = "peft-v4" if adapter.family == "data2vec-vision" else format  # whose names never changed
    mlp = _V4_MLP if version == "peft-v4" and not is_dino else _MLP
    if adapter.gated:
        mlp = _V4_GATED_MLP if version == "peft-v4" else _GATED_MLP
    return dataclasses.replace(
        family.names,
        layer_template="layers.{}." if version == "peft" and not is_dino else "encoder.layer.{}.",
        block_prefixes=_ATTENTION[version] | mlp | (_DINO_NORMS if is_dino else _NORMS),
        top_prefixes={"cls_classifier." if "head_dist.weight" in adapter.replaced else "classifier.": "head."}
        | family.names.top_prefixes,
    )


def _rename_for_transformers(own: str, names: TensorNameMap, backbone: str) -> str:
    theirs = names.to_foreign_name(own)
    return theirs if theirs.startswith(("cls_classifier.", *transformers.HEADS)) else backbone + theirs


def _rename_for_timm(own: str, family: str) -> str:
    own = re.sub(r"^projection\.", "head.", own).replace(".mlp.gate.", ".mlp.fc1_g.").replace(".mlp.up.", ".mlp.fc1_x.")
    return re.sub(r"\.attn\.([qkv])\.", r".attn.\1_proj.", own) if family == EVA02 else own


def _build_config(adapter: Adapter, rename: Any) -> dict[str, Any]:
    """The content of adapter_config.json."""
    paths = {path: rename(f"{path}.").removesuffix(".") for path in adapter.additions}
    ranks = {paths[path]: addition.rank for path, addition in adapter.additions.items()}
    alphas = {paths[path]: _simplify(addition.alpha) for path, addition in adapter.additions.items()}
    (rank, rank_pattern), (alpha, alpha_pattern) = _find_exceptions(ranks), _find_exceptions(alphas)
    owners = {own.rpartition(".")[0] for own in adapter.replaced}
    saved = {path for path in owners if f"{path}.weight" in adapter.replaced}
    biases = owners - saved
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": adapter.base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "target_modules": sorted(paths.values()),
        "modules_to_save": sorted(rename(f"{path}.").removesuffix(".") for path in saved) or None,
        "bias": "none" if not biases else "lora_only" if biases <= adapter.additions.keys() else "all",
        "lora_bias": any(addition.bias is not None for addition in adapter.additions.values()),
        "use_rslora": adapter.rank_stabilized,
        "use_dora": any(addition.magnitude is not None for addition in adapter.additions.values()),
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def _simplify(number: float) -> float:
    return int(number) if number == int(number) else number


def _find_exceptions(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The most frequent value, and those that differ."""
    usual = collections.Counter(values.values()).most_common(1)[0][0] if values else 1
    return usual, {name: value for name, value in values.items() if value != usual}


# --- one layer, or one for each of its parts --------------------------------------------------------------------------


def _arrange_for_transformers(adapter: Adapter, names: TensorNameMap) -> Adapter:
    """The adapter with the layers of a model of transformers: three for queries, keys and values."""
    adapter = split_layer(adapter, "attn.qkv")
    if "mlp.up." not in names.block_prefixes.values():
        return join_layer(adapter, "mlp.fc1")
    return split_layer(adapter, "mlp.fc1") if adapter.gated else _rename_layers(adapter, "mlp.fc1", "mlp.up")


def _arrange_for_timm(adapter: Adapter) -> Adapter:
    """The adapter with the layers of timm's model of its family."""
    adapter = (split_layer if adapter.family == EVA02 else join_layer)(adapter, "attn.qkv")
    if not adapter.gated:
        return _rename_layers(adapter, "mlp.up", "mlp.fc1")
    return (split_layer if adapter.family in (EVA02, "dinov3_vit") else join_layer)(adapter, "mlp.fc1")


def _rename_layers(adapter: Adapter, old: str, new: str) -> Adapter:
    """The adapter whose layers called `old` in each block are called `new`."""
    pattern = re.compile(rf"^(blocks\.\d+)\.{re.escape(old)}\b")
    additions = {pattern.sub(rf"\1.{new}", path): addition for path, addition in adapter.additions.items()}
    replaced = {pattern.sub(rf"\1.{new}", name): tensor for name, tensor in adapter.replaced.items()}
    return dataclasses.replace(adapter, additions=additions, replaced=replaced)


def split_layer(adapter: Adapter, layer: str) -> Adapter:
    """The adapter with an addition for each part of each layer called `layer`, which is in `_PARTS`."""
    additions: dict[str, LowRankAddition] = {}
    replaced: dict[str, Tensor] = {}
    parts, pattern = _PARTS[layer], re.compile(rf"^(blocks\.\d+)\.{re.escape(layer)}(?:\.(\w+))?$")
    for path, addition in adapter.additions.items():
        if (match := pattern.match(path)) is None:
            additions[path] = addition
            continue
        pieces = [
            (None,) * len(parts) if tensor is None else tensor.chunk(len(parts))
            for tensor in (addition.lora_b, addition.magnitude, addition.bias)
        ]
        for part, lora_b, magnitude, bias in zip(parts, *pieces, strict=True):
            piece = dataclasses.replace(addition, lora_b=lora_b, magnitude=magnitude, bias=bias)
            additions[f"{match[1]}.{part}"] = piece
    for name, tensor in adapter.replaced.items():
        if match := pattern.match(name):
            chunks = zip(parts, tensor.chunk(len(parts)), strict=True)
            replaced |= {f"{match[1]}.{part}.{match[2]}": chunk for part, chunk in chunks}
        else:
            replaced[name] = tensor
    return dataclasses.replace(adapter, additions=additions, replaced=replaced)


def join_layer(adapter: Adapter, layer: str) -> Adapter:
    """Invert `split_layer`: the adapter with one addition to each layer called `layer`."""
    additions: dict[str, LowRankAddition] = {}
    groups: dict[str, dict[str, LowRankAddition]] = {}
    parts = _PARTS[layer]
    pattern = re.compile(rf"^(blocks\.\d+)\.({'|'.join(map(re.escape, parts))})(?:\.(\w+))?$")
    for path, addition in adapter.additions.items():
        if match := pattern.match(path):
            groups.setdefault(match[1], {})[match[2]] = addition
        else:
            additions[path] = addition
    for block, pieces in groups.items():
        additions[f"{block}.{layer}"] = _join_additions(block, layer, pieces, adapter)
    replaced: dict[str, Tensor] = {}
    for name, tensor in adapter.replaced.items():
        if match := pattern.match(name):
            names = [f"{match[1]}.{part}.{match[3]}" for part in parts]
            if missing := [each for each in names if each not in adapter.replaced]:
                raise _explain_missing_part(layer, missing[0])
            replaced[f"{match[1]}.{layer}.{match[3]}"] = torch.cat([adapter.replaced[each] for each in names])
        else:
            replaced[name] = tensor
    return dataclasses.replace(adapter, additions=additions, replaced=replaced)


def _explain_missing_part(layer: str, name: str) -> ModelError:
    return ModelError(
        f"the one layer {layer} of such a model cannot hold this adapter: it has nothing for {name!r}. Merge it"
        " into its base instead: vitrail convert BASE OUT.safetensors --adapter FOLDER"
    )


def _join_additions(block: str, layer: str, pieces: dict[str, LowRankAddition], adapter: Adapter) -> LowRankAddition:
    """One addition to the layer for those to its parts, of which some may be missing."""
    parts, first = _PARTS[layer], next(iter(pieces.values()))
    for field in ("magnitude", "bias"):
        if any(getattr(piece, field) is not None for piece in pieces.values()) and len(pieces) < len(parts):
            raise _explain_missing_part(layer, next(f"{block}.{part}" for part in parts if part not in pieces))
    magnitude, bias = (
        None if getattr(first, field) is None else torch.cat([getattr(pieces[part], field) for part in parts])
        for field in ("magnitude", "bias")
    )
    is_shared = all(piece.alpha == first.alpha and torch.equal(piece.lora_a, first.lora_a) for piece in pieces.values())
    if is_shared and len(pieces) == len(parts):
        lora_b = torch.cat([pieces[part].lora_b for part in parts])
        return dataclasses.replace(first, lora_b=lora_b, magnitude=magnitude, bias=bias)
    # Of another rank, so its alpha is chosen to have the scale of the first, and the others' B makes up for theirs.
    scale, rank, outputs = adapter.compute_scale(first), sum(piece.rank for piece in pieces.values()), len(first.lora_b)
    lora_b, start = first.lora_b.new_zeros(len(parts) * outputs, rank), 0
    for index, part in enumerate(parts):
        if (piece := pieces.get(part)) is not None:
            rows = slice(index * outputs, (index + 1) * outputs)
            lora_b[rows, start : start + piece.rank] = piece.lora_b * (adapter.compute_scale(piece) / scale)
            start += piece.rank
    if bias is not None:
        factors = [adapter.compute_scale(pieces[part]) / scale for part in parts]
        chunks = bias.chunk(len(parts))
        bias = torch.cat([chunk * factor for chunk, factor in zip(chunks, factors, strict=True)])
    return LowRankAddition(
        lora_a=torch.cat([pieces[part].lora_a for part in parts if part in pieces]),
        lora_b=lora_b,
        alpha=scale / compute_lora_scale(1, rank, rank_stabilized=adapter.rank_stabilized),
        magnitude=magnitude,
        bias=bias,
    )
