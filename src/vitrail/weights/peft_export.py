"""Write LoRA adapters as PEFT does, under the names of transformers or timm.

    r rank   I inputs   O outputs   A (r, I)   B (O, r)

timm has one layer for queries, keys and values, transformers has three. An addition to the one is three additions with
the same A. Additions to some of the three are one whose A stacks theirs and whose B has a block for each.
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
from vitrail.weights import foreign_format, tensor_files, transformers
from vitrail.weights.foreign_format import TensorNameMap
from vitrail.weights.formats import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILES, check_adapter_destination
from vitrail.weights.peft_adapters import HEADER_KEY, KEY_PREFIX, Adapter, AdapterHeader, LowRankAddition
from vitrail.weights.trained import Origin, Tensors, Trained

AdapterFormat = Literal["peft", "peft-v4", "peft-timm"]
"""The names of transformers from 5.9 on, those before, and timm's."""
ADAPTER_FORMATS: tuple[AdapterFormat, ...] = get_args(AdapterFormat)

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
        backbone=choose_backbone(trained),
        base=hub_name[1] if hub_name else None,
        header=AdapterHeader(labels=trained.labels, multi_label=trained.multi_label, preprocess=trained.preprocess),
    )


def choose_backbone(trained: Trained) -> str:
    """What transformers calls the blocks' part of this model."""
    config = trained.model.config
    assert isinstance(config, ViTConfig)
    if config.distillation_token:
        return "deit."
    if config.layer_scale:
        return "dinov2_with_registers." if config.registers else "dinov2."
    return "vit."


def choose_format(trained: Trained) -> AdapterFormat:
    """The format whose names the base has where PEFT would load it: timm's if it is timm's, or transformers' if it can
    be that."""
    config = trained.model.config
    is_transformers = isinstance(config, ViTConfig) and config.stem is None and config.pool in ("class", "class-mean")
    return "peft" if is_transformers and trained.origin.format != "timm" else "peft-timm"


def write_adapter(adapter: Adapter, folder: Path, format: AdapterFormat = "peft", *, overwrite: bool = False) -> None:  # noqa: A002
    """Write the adapter's folder whole or not at all."""
    check_adapter_destination(folder, overwrite=overwrite)
    adapter = fuse_qkv(adapter) if format == "peft-timm" else split_qkv(adapter)
    names = None if format == "peft-timm" else _build_name_map(adapter, format)

    def rename(own: str) -> str:
        return own if names is None else _rename_for_transformers(own, names, adapter.backbone)

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
    is_dino = adapter.backbone.startswith("dinov2")
    mlp = _V4_MLP if format == "peft-v4" and not is_dino else _MLP
    return dataclasses.replace(
        transformers.TENSOR_NAMES,
        layer_template="layers.{}." if format == "peft" and not is_dino else "encoder.layer.{}.",
        block_prefixes=_ATTENTION[format] | mlp | (_DINO_NORMS if is_dino else _NORMS),
        top_prefixes={"cls_classifier." if "head_dist.weight" in adapter.replaced else "classifier.": "head."}
        | transformers.TENSOR_NAMES.top_prefixes,
    )


def _rename_for_transformers(own: str, names: TensorNameMap, backbone: str) -> str:
    theirs = names.to_foreign_name(own)
    return (
        theirs
        if theirs.startswith(("classifier.", "cls_classifier.", "distillation_classifier."))
        else backbone + theirs
    )


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


# --- one layer for queries, keys and values, or three -----------------------------------------------------------------


def split_qkv(adapter: Adapter) -> Adapter:
    """The adapter with three additions for each to a fused layer."""
    additions: dict[str, LowRankAddition] = {}
    for path, addition in adapter.additions.items():
        if not path.endswith(".attn.qkv"):
            additions[path] = addition
            continue
        thirds = [
            (None,) * 3 if tensor is None else tensor.chunk(3)
            for tensor in (addition.lora_b, addition.magnitude, addition.bias)
        ]
        for part, lora_b, magnitude, bias in zip("qkv", *thirds, strict=True):
            third = dataclasses.replace(addition, lora_b=lora_b, magnitude=magnitude, bias=bias)
            additions[f"{path.removesuffix('qkv')}{part}"] = third
    return dataclasses.replace(adapter, additions=additions, replaced=dict(foreign_format.split_qkv(adapter.replaced)))


def fuse_qkv(adapter: Adapter) -> Adapter:
    """The adapter with one addition to each fused layer."""
    additions: dict[str, LowRankAddition] = {}
    groups: dict[str, dict[str, LowRankAddition]] = {}
    for path, addition in adapter.additions.items():
        if re.search(r"\.attn\.[qkv]$", path):
            groups.setdefault(f"{path[:-1]}qkv", {})[path[-1]] = addition
        else:
            additions[path] = addition
    for path, parts in groups.items():
        additions[path] = _fuse_additions(path, parts, adapter)
    replaced: dict[str, Tensor] = {}
    for name, tensor in adapter.replaced.items():
        if not re.search(r"\.attn\.[qkv]\.", name):
            replaced[name] = tensor
        elif ".attn.q." in name:
            names = [name.replace(".attn.q.", f".attn.{part}.") for part in "qkv"]
            replaced[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat([_get_third(adapter, each) for each in names])
        else:
            _get_third(adapter, re.sub(r"\.attn\.[qkv]\.", ".attn.q.", name))
    return dataclasses.replace(adapter, additions=additions, replaced=replaced)


def _get_third(adapter: Adapter, name: str) -> Tensor:
    if name not in adapter.replaced:
        raise _explain_missing_third(name)
    return adapter.replaced[name]


def _explain_missing_third(name: str) -> ModelError:
    return ModelError(
        f"timm's one layer for queries, keys and values cannot hold this adapter: it has nothing for {name!r}. Merge it"
        " into its base instead: vitrail convert BASE OUT.safetensors --adapter FOLDER"
    )


def _fuse_additions(path: str, parts: dict[str, LowRankAddition], adapter: Adapter) -> LowRankAddition:
    """One addition to `path` for those to queries, keys and values, of which some may be missing."""
    first = next(iter(parts.values()))
    for field in ("magnitude", "bias"):
        if any(getattr(part, field) is not None for part in parts.values()) and len(parts) < 3:
            raise _explain_missing_third(next(f"{path[:-3]}{part}" for part in "qkv" if part not in parts))
    magnitude, bias = (
        None if getattr(first, field) is None else torch.cat([getattr(parts[part], field) for part in "qkv"])
        for field in ("magnitude", "bias")
    )
    is_shared = all(part.alpha == first.alpha and torch.equal(part.lora_a, first.lora_a) for part in parts.values())
    if is_shared and len(parts) == 3:
        lora_b = torch.cat([parts[part].lora_b for part in "qkv"])
        return dataclasses.replace(first, lora_b=lora_b, magnitude=magnitude, bias=bias)
    # Of another rank, so its alpha is chosen to have the scale of the first, and the others' B makes up for theirs.
    scale, rank, outputs = adapter.compute_scale(first), sum(part.rank for part in parts.values()), len(first.lora_b)
    lora_b, start = first.lora_b.new_zeros(3 * outputs, rank), 0
    for index, name in enumerate("qkv"):
        if (part := parts.get(name)) is not None:
            rows = slice(index * outputs, (index + 1) * outputs)
            lora_b[rows, start : start + part.rank] = part.lora_b * (adapter.compute_scale(part) / scale)
            start += part.rank
    if bias is not None:
        factors = [adapter.compute_scale(parts[part]) / scale for part in "qkv"]
        bias = torch.cat([third * factor for third, factor in zip(bias.chunk(3), factors, strict=True)])
    return LowRankAddition(
        lora_a=torch.cat([parts[part].lora_a for part in "qkv" if part in parts]),
        lora_b=lora_b,
        alpha=scale / compute_lora_scale(1, rank, rank_stabilized=adapter.rank_stabilized),
        magnitude=magnitude,
        bias=bias,
    )
