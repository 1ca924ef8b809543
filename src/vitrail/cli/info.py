"""`vitrail info MODEL`: what a model is, costs, expects, answers, and where it came from."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitrail import presets
from vitrail.cli import output
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
    from vitrail.weights.load import find_model_path, load

    if find_model_path(model) is None and presets.has_preset(model):
        found = (
            {"source": f"preset {model}"}
            | _compute_cost(presets.get_preset_config(model))
            | _describe_preset(presets.get_preset_config(model))
        )
    else:
        trained = load(model)
        kind = "Hub:" if hub.is_remote(model) else "folder" if Path(model).is_dir() else "file"
        found = {"source": f"{kind} {model}"} | _compute_cost(trained.model.config) | _describe_trained(trained)
    if json:
        output.print_json(found)
    else:
        _print_model(found)


def _compute_cost(config: ViTConfig | BiTConfig) -> dict[str, Any]:
    from vitrail.model import cost

    return {
        "architecture": to_json(config),
        "parameters": cost.count_parameters(config),
        "multiply_adds": cost.count_multiply_adds(config),
        "flops": 2 * cost.count_multiply_adds(config),
    }


def _describe_preset(config: ViTConfig | BiTConfig) -> dict[str, Any]:
    default = presets.build_preprocess_config("inception", config.image_size)
    warnings = ["a preset has random weights"]
    return {"preprocess": to_json(default), "labels": None, "origin": None, "warnings": warnings}


def _describe_trained(trained: "Trained") -> dict[str, Any]:
    from vitrail.inference.precision import list_available_precisions
    from vitrail.model.quantized import describe_cpu
    from vitrail.weights.precision_measurements import choose_precision

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
        "tried": [dataclasses.asdict(tried) for tried in trained.precision_measurements],
        "precision": choose_precision(
            trained.precision_measurements, describe_cpu(), list_available_precisions(trained)
        ),
    }


def _print_model(facts: dict[str, Any]) -> None:
    a, origin, labels = facts["architecture"], facts["origin"], facts["labels"]
    rows = [
        ("model", facts["source"]),
        *(_format_vit(a) if a["kind"] == "vit" else _format_resnet(a)),
        ("parameters", output.format_count(facts["parameters"])),
        (
            "multiply-adds",
            f"{output.format_giga(facts['multiply_adds'])} an image ({output.format_giga(facts['flops'])}FLOPs)",
        ),
        ("preprocess", _format_preprocess(facts["preprocess"])),
        ("labels", "unnamed" if labels is None else f"{len(labels)}: {'; '.join(labels[:3])}; ..."),
    ]
    if origin is not None:
        rows.append(("origin", f"{origin['format']}: {origin['name']}"))
        rows.append(("sha256", origin["sha256"] or "unknown"))
        rows.append(("licence", origin["licence"] or "not stated by the source"))
        rows.extend(("changed", change) for change in origin["changes"])
    if facts.get("tried"):
        rows.extend(("measured", _format_measurement(tried)) for tried in facts["tried"])
        rows.append(("on this CPU", f"{facts['precision']} unless --precision says otherwise"))
    rows.extend(("warning", warning) for warning in facts["warnings"])
    output.print_table(rows)


def _format_measurement(measurement: dict[str, Any]) -> str:
    """What fewer bits were found to do."""
    from vitrail.weights.precision_measurements import PrecisionMeasurement

    return from_json(PrecisionMeasurement, measurement).describe()


def _format_vit(a: dict[str, Any]) -> list[tuple[str, str]]:
    """What there is to say of a ViT or hybrid."""
    size, patch = " x ".join(map(str, a["image_size"])), f"{a['patch']} x {a['patch']}"
    of = f" of the stem's map, {_get_stride(a)} pixels apart" if a["stem"] else ""
    stem = [("stem", _format_conv(a["stem"]))] if a["stem"] else []
    return [
        ("architecture", f"ViT: width {a['width']}, depth {a['depth']}, heads {a['heads']}, MLP {a['mlp']}"),
        *stem,
        ("input", f"{size} pixels, {_format_channels(a)}, patches of {patch}{of}"),
        ("tokens", _format_tokens(a)),
        ("positions", f"{a['positions']}, added at: {a['positions_at']}; resampled by {a['resample']}"),
        (
            "head",
            f"{output.pluralize(a['classes'], 'class')}, pool {a['pool']}{', hidden layer' if a['hidden_head'] else ''}",
        ),
        ("numerics", f"GELU {a['gelu']}, LayerNorm epsilon {a['norm_eps']:g}"),
    ]


def _format_resnet(a: dict[str, Any]) -> list[tuple[str, str]]:
    """What there is to say of a BiT ResNet."""
    size = " x ".join(map(str, a["image_size"]))
    return [
        ("architecture", f"BiT ResNet: {_format_conv(a['conv'])}"),
        ("input", f"{size} pixels, {_format_channels(a)}; any other size too"),
        ("head", f"{output.pluralize(a['classes'], 'class')}, global average"),
    ]


def _format_channels(a: dict[str, Any]) -> str:
    return output.pluralize(a["channels"], "channel")


def _format_conv(c: dict[str, Any]) -> str:
    units = "+".join(map(str, c["units"])) or "no"
    how = f"{c['standardise'].replace('eps', format(c['standardise_eps'], 'g'))}, group norm epsilon {c['norm_eps']:g}"
    return f"{units} units, width x{c['width_factor']:g}, kernels standardised by {how}"


def _get_stride(a: dict[str, Any]) -> int:
    return from_json(ViTConfig, a).stride


def _format_tokens(a: dict[str, Any]) -> str:
    grid = from_json(ViTConfig, a).grid
    names = [("class", a["class_token"]), ("distillation", a["distillation_token"]), ("register", a["registers"])]
    prefix = [f"{int(count)} {name}" for name, count in names if count]
    return " + ".join([*prefix, f"{grid[0]} x {grid[1]} patches"])


def _format_preprocess(p: dict[str, Any] | None) -> str:
    if p is None:
        return "unknown"
    how = f"short side {p['resize'][0]}" if len(p["resize"]) == 1 else f"{p['resize'][0]} x {p['resize'][1]}"
    crop = " x ".join(map(str, p["size"]))
    mean, std = (", ".join(f"{value:g}" for value in p[name]) for name in ("mean", "std"))
    return f"resize to {how} ({p['interpolation']}), crop {crop}, mean {mean}, std {std}"
