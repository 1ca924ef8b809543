"""`vitrail info MODEL`: what a model is, costs, expects, answers, and where it came from."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitrail import presets
from vitrail.cli import show
from vitrail.config import BiTConfig, ViTConfig, from_json, to_json

if TYPE_CHECKING:
    from vitrail.weights.trained import Trained


def main(model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")], json: bool = False) -> None:
    """Show what a model is: architecture, cost, preprocessing, labels, origin, warnings.

    Args:
        model: A file or folder of any known format, hf:ORG/NAME[@REVISION], timm:NAME, or a preset such as b16.
        json: Print JSON.
    """
    from vitrail.weights import hub
    from vitrail.weights.load import load, locate

    if locate(model) is None and presets.exists(model):
        found = {"source": f"preset {model}"} | _cost(presets.config(model)) | _unweighted(presets.config(model))
    else:
        trained = load(model)
        kind = "Hub:" if hub.is_remote(model) else "folder" if Path(model).is_dir() else "file"
        found = {"source": f"{kind} {model}"} | _cost(trained.model.config) | _weighted(trained)
    if json:
        show.as_json(found)
    else:
        _print(found)


def _cost(config: ViTConfig | BiTConfig) -> dict[str, Any]:
    from vitrail.model import count

    return {
        "architecture": to_json(config),
        "parameters": count.parameters(config),
        "multiply_adds": count.multiply_adds(config),
        "flops": 2 * count.multiply_adds(config),
    }


def _unweighted(config: ViTConfig | BiTConfig) -> dict[str, Any]:
    default = presets.preprocess("inception", config.image_size)
    warnings = ["a preset has random weights"]
    return {"preprocess": to_json(default), "labels": None, "origin": None, "warnings": warnings}


def _weighted(trained: "Trained") -> dict[str, Any]:
    from vitrail import compute
    from vitrail.model.lowered import cpu
    from vitrail.weights.precision import chosen

    tensors = trained.model.state_dict()
    head = tensors.get("head.weight", tensors.get("head.fc.weight"))
    warnings = list(trained.origin.assumptions)
    if head is not None and not head.any():
        warnings.append("head: all zeros, so every class is equally likely; it was never trained or was removed")
    if head is None:
        warnings.append("head: none, the model ends with its features")
    elif trained.labels is None:
        warnings.append("labels: unnamed; `vitrail convert ... --labels imagenet1k` or a text file names them")
    return {
        "preprocess": None if trained.preprocess is None else to_json(trained.preprocess),
        "labels": None if trained.labels is None else list(trained.labels),
        "origin": dataclasses.asdict(trained.origin),
        "warnings": warnings,
        "tried": [dataclasses.asdict(tried) for tried in trained.tried],
        "precision": chosen(trained.tried, cpu(), compute.possible(trained)),
    }


def _print(found: dict[str, Any]) -> None:
    a, origin, labels = found["architecture"], found["origin"], found["labels"]
    rows = [
        ("model", found["source"]),
        *(_vit(a) if a["kind"] == "vit" else _resnet(a)),
        ("parameters", show.count(found["parameters"])),
        ("multiply-adds", f"{show.giga(found['multiply_adds'])} an image ({show.giga(found['flops'])}FLOPs)"),
        ("preprocess", _preprocess(found["preprocess"])),
        ("labels", "unnamed" if labels is None else f"{len(labels)}: {'; '.join(labels[:3])}; ..."),
    ]
    if origin is not None:
        rows.append(("origin", f"{origin['format']}: {origin['name']}"))
        rows.append(("sha256", origin["sha256"] or "unknown"))
        rows.append(("licence", origin["licence"] or "not stated by the source"))
        rows.extend(("changed", change) for change in origin["changes"])
    if found.get("tried"):
        rows.extend(("measured", _tried(tried)) for tried in found["tried"])
        rows.append(("on this CPU", f"{found['precision']} unless --precision says otherwise"))
    rows.extend(("warning", warning) for warning in found["warnings"])
    show.table(rows)


def _tried(tried: dict[str, Any]) -> str:
    """What fewer bits were found to do."""
    from vitrail.weights.precision import Tried

    return from_json(Tried, tried).told()


def _vit(a: dict[str, Any]) -> list[tuple[str, str]]:
    """What there is to say of a ViT or hybrid."""
    size, patch = " x ".join(map(str, a["image_size"])), f"{a['patch']} x {a['patch']}"
    of = f" of the stem's map, {_stride(a)} pixels apart" if a["stem"] else ""
    stem = [("stem", _conv(a["stem"]))] if a["stem"] else []
    return [
        ("architecture", f"ViT: width {a['width']}, depth {a['depth']}, heads {a['heads']}, MLP {a['mlp']}"),
        *stem,
        ("input", f"{size} pixels, {_channels(a)}, patches of {patch}{of}"),
        ("tokens", _tokens(a)),
        ("positions", f"{a['positions']}, added at: {a['positions_at']}; resampled by {a['resample']}"),
        (
            "head",
            f"{show.plural(a['classes'], 'class')}, pool {a['pool']}{', hidden layer' if a['hidden_head'] else ''}",
        ),
        ("numerics", f"GELU {a['gelu']}, LayerNorm epsilon {a['norm_eps']:g}"),
    ]


def _resnet(a: dict[str, Any]) -> list[tuple[str, str]]:
    """What there is to say of a BiT ResNet."""
    size = " x ".join(map(str, a["image_size"]))
    return [
        ("architecture", f"BiT ResNet: {_conv(a['conv'])}"),
        ("input", f"{size} pixels, {_channels(a)}; any other size too"),
        ("head", f"{show.plural(a['classes'], 'class')}, global average"),
    ]


def _channels(a: dict[str, Any]) -> str:
    return show.plural(a["channels"], "channel")


def _conv(c: dict[str, Any]) -> str:
    units = "+".join(map(str, c["units"])) or "no"
    how = f"{c['standardise'].replace('eps', format(c['standardise_eps'], 'g'))}, group norm epsilon {c['norm_eps']:g}"
    return f"{units} units, width x{c['width_factor']:g}, kernels standardised by {how}"


def _stride(a: dict[str, Any]) -> int:
    return from_json(ViTConfig, a).stride


def _tokens(a: dict[str, Any]) -> str:
    grid = from_json(ViTConfig, a).grid
    names = [("class", a["class_token"]), ("distillation", a["distillation_token"]), ("register", a["registers"])]
    prefix = [f"{int(count)} {name}" for name, count in names if count]
    return " + ".join([*prefix, f"{grid[0]} x {grid[1]} patches"])


def _preprocess(p: dict[str, Any] | None) -> str:
    if p is None:
        return "unknown"
    how = f"short side {p['resize'][0]}" if len(p["resize"]) == 1 else f"{p['resize'][0]} x {p['resize'][1]}"
    crop = " x ".join(map(str, p["size"]))
    mean, std = (", ".join(f"{value:g}" for value in p[name]) for name in ("mean", "std"))
    return f"resize to {how} ({p['interpolation']}), crop {crop}, mean {mean}, std {std}"
