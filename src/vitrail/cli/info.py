"""`vitrail info MODEL`: a model's architecture, cost, preprocessing, labels and origin."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitrail import presets
from vitrail.cli import output
from vitrail.cli.arguments.models import InfoArguments
from vitrail.config import BiTConfig, ConvConfig, PreprocessConfig, ViTConfig, to_json
from vitrail.formatting import format_count, format_giga, pluralize
from vitrail.inference.precision import list_available_precisions
from vitrail.model import cost
from vitrail.model.quantized import describe_processor
from vitrail.runtime.devices import find_best_device
from vitrail.weights import builtin, hub
from vitrail.weights.load import find_model_path, is_builtin, load
from vitrail.weights.precision_measurements import choose_precision
from vitrail.weights.trained import Trained

Rows = list[tuple[str, str]]


def run(arguments: InfoArguments) -> None:
    """Print what is known of a model."""
    name = arguments.model
    if find_model_path(name) is None and presets.has_preset(name):
        _print_preset(name, as_json=arguments.output.json)
        return
    trained = load(name)
    if is_builtin(name):
        _print_trained(trained, f"{name}, inside the package", card=str(builtin.CARD), as_json=arguments.output.json)
        return
    kind = "Hub:" if hub.is_remote(name) else "folder" if Path(name).is_dir() else "file"
    _print_trained(trained, f"{kind} {name}", as_json=arguments.output.json)


def _print_preset(name: str, *, as_json: bool) -> None:
    config = presets.get_preset_config(name)
    preprocess = presets.build_preprocess_config("inception", config.image_size)
    source, warning = f"preset {name}", "a preset has random weights"
    if as_json:
        output.print_json(
            {"source": source}
            | _compute_cost(config)
            | {"preprocess": to_json(preprocess), "labels": None, "origin": None, "warnings": [warning]}
        )
    else:
        output.print_table([*_format_rows(source, config, preprocess, None), ("warning", warning)])


def _print_trained(trained: Trained, source: str, *, card: str | None = None, as_json: bool) -> None:
    config, origin, measurements = trained.model.config, trained.origin, trained.precision_measurements
    warnings = _list_warnings(trained)
    device = find_best_device()
    precision = choose_precision(measurements, describe_processor(device), list_available_precisions(trained))
    if as_json:
        facts = {
            "source": source,
            **_compute_cost(config),
            "preprocess": None if trained.preprocess is None else to_json(trained.preprocess),
            "labels": None if trained.labels is None else list(trained.labels),
            "origin": dataclasses.asdict(origin),
            "card": card,
            "warnings": warnings,
            "precision_measurements": [dataclasses.asdict(measurement) for measurement in measurements],
            "precision": precision,
        }
        output.print_json(facts)
        return
    rows = _format_rows(source, config, trained.preprocess, trained.labels)
    rows.append(("origin", f"{origin.format}: {origin.name}"))
    rows.append(("sha256", origin.sha256 or "unknown"))
    rows.append(("license", origin.license or "not stated by the source"))
    rows.extend(("card", path) for path in [card] if path is not None)
    rows.extend(("changed", change) for change in origin.changes)
    if measurements:
        rows.extend(("measured", measurement.describe()) for measurement in measurements)
        rows.append(
            (f"on this {'GPU' if device.type == 'cuda' else 'CPU'}", f"{precision} by default; --precision changes it")
        )
    rows.extend(("warning", warning) for warning in warnings)
    output.print_table(rows)


def _compute_cost(config: ViTConfig | BiTConfig) -> dict[str, Any]:
    multiply_adds = cost.count_multiply_adds(config)
    return {
        "architecture": to_json(config),
        "parameters": cost.count_parameters(config),
        "multiply_adds": multiply_adds,
        "flops": 2 * multiply_adds,
    }


def _list_warnings(trained: Trained) -> list[str]:
    tensors = trained.model.state_dict()
    head = tensors.get("head.weight", tensors.get("head.fc.weight"))
    warnings = list(trained.origin.assumptions)
    if head is not None and not head.any():
        warnings.append("head: all zeros, so every class is equally likely; it was never trained or was removed")
    if head is None:
        warnings.append("head: none, the model ends with its features")
    elif trained.labels is None:
        warnings.append("labels: unnamed; `vitrail convert ... --labels imagenet1k` or a text file names them")
    return warnings


# --- as text ---------------------------------------------------------------------------------------------------------


def _format_rows(
    source: str, config: ViTConfig | BiTConfig, preprocess: PreprocessConfig | None, labels: tuple[str, ...] | None
) -> Rows:
    facts = _compute_cost(config)
    multiply_adds, flops = format_giga(facts["multiply_adds"]), format_giga(facts["flops"])
    return [
        ("model", source),
        *(_format_vit(config) if isinstance(config, ViTConfig) else _format_resnet(config)),
        ("parameters", format_count(facts["parameters"])),
        ("multiply-adds", f"{multiply_adds} per image ({flops}FLOPs)"),
        ("preprocess", _format_preprocess(preprocess)),
        (
            "labels",
            "unnamed"
            if labels is None
            else f"{len(labels)}: {'; '.join(labels[:3])}{'; ...' if len(labels) > 3 else ''}",
        ),
    ]


def _format_vit(config: ViTConfig) -> Rows:
    """Describe a ViT or hybrid."""
    size, channels = _format_size(config.image_size), pluralize(config.channels, "channel")
    patches = f"patches of {config.patch} x {config.patch}"
    if config.stem is not None:
        patches += f" of the stem's feature map, {config.stride} pixels apart"
    mlp = f"{'gated ' if config.gated_mlp else ''}MLP {config.mlp}"
    width = f"width {config.width}, depth {config.depth}, heads {config.heads}, {mlp}"
    norms = {"before the blocks": config.norm_pre, "in attention": config.attention_norm, "in the MLP": config.mlp_norm}
    more_norms = [place for place, present in norms.items() if present]
    norm = f"LayerNorm epsilon {config.norm_eps:g}{', also ' if more_norms else ''}{' and '.join(more_norms)}"
    return [
        ("architecture", f"ViT: {width}"),
        *([] if config.stem is None else [("stem", _format_conv(config.stem))]),
        ("input", f"{size} pixels, {channels}, {patches}"),
        ("tokens", _format_tokens(config)),
        ("positions", _format_positions(config)),
        ("head", ", ".join([pluralize(config.classes, "class"), f"pool {config.pool}", *_list_head_parts(config)])),
        ("numerics", f"{'SiLU' if config.gated_mlp else f'GELU {config.gelu}'}, {norm}"),
    ]


def _format_positions(config: ViTConfig) -> str:
    added = f"{config.positions}, added at: {config.positions_at}; resampled by {config.resample}"
    if config.rotary is None:
        return added
    rotary = f"rotary by {config.rotary.places} places, base {config.rotary.base:g}"
    return rotary if config.positions == "none" else f"{added}; {rotary}"


def _list_head_parts(config: ViTConfig) -> Iterator[str]:
    """What is between pooling and the classes."""
    if config.pool_heads:
        yield f"{config.pool_heads} pooling heads"
    if config.hidden_head:
        yield "hidden layer"
    if config.projection:
        yield f"projection to {config.projection}"
    if config.normalize_features:
        yield "features of length 1"


def _format_resnet(config: BiTConfig) -> Rows:
    """Describe a BiT ResNet."""
    size, channels = _format_size(config.image_size), pluralize(config.channels, "channel")
    return [
        ("architecture", f"BiT ResNet: {_format_conv(config.conv)}"),
        ("input", f"{size} pixels, {channels}; any other size too"),
        ("head", f"{pluralize(config.classes, 'class')}, global average"),
    ]


def _format_conv(conv: ConvConfig) -> str:
    units = "+".join(map(str, conv.units)) or "no"
    divisor = conv.standardization.replace("eps", format(conv.standardization_eps, "g"))
    how = f"{divisor}, group norm epsilon {conv.norm_eps:g}"
    return f"{units} units, width x{conv.width_factor:g}, kernels standardized by {how}"


def _format_tokens(config: ViTConfig) -> str:
    counts = {
        "class": int(config.class_token),
        "distillation": int(config.distillation_token),
        "register": config.registers,
    }
    prefix = [f"{count} {name}" for name, count in counts.items() if count]
    return " + ".join([*prefix, f"{config.grid[0]} x {config.grid[1]} patches"])


def _format_preprocess(preprocess: PreprocessConfig | None) -> str:
    if preprocess is None:
        return "unknown"
    resize = preprocess.resize
    resized = f"short side {resize[0]}" if len(resize) == 1 else _format_size(resize)
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (preprocess.mean, preprocess.std))
    crop = _format_size(preprocess.size)
    return f"resize to {resized} ({preprocess.interpolation}), crop {crop}, mean {mean}, std {std}"


def _format_size(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))
