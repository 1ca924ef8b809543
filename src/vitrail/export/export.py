"""Export a model to a file, which is written whole, and only if it computes what vitrail computes; open such a file.

B images   C channels   S image side
"""

import copy
import dataclasses
import importlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail import files
from vitrail.config import PreprocessConfig, from_json
from vitrail.data.transforms import normalize
from vitrail.errors import ModelError, UsageError
from vitrail.export.graph import (
    OLD_METADATA_KEYS,
    REQUIRED_METADATA,
    THRESHOLDS_KEY,
    GraphRunner,
    name_outputs,
    prepare_for_export,
)
from vitrail.formatting import pluralize
from vitrail.model.resnet import BiT
from vitrail.weights.trained import Trained, require_preprocess, require_trained

MAX_DIFFERENCE = 1e-5
BATCH_SIZES = (1, 3)
ExportFormat = Literal["onnx", "torch-export", "openvino"]
LowerPrecision = Literal["int8", "float16"]
MeasurePrecision = Callable[[list[GraphRunner]], dict[str, Any]]
"""The float32 file, that of lower precision, and for float16 a graph that rounds as a GPU does -> measurements of the
loss, as JSON values. An error that it raises prevents the file."""


class ExportFormatInfo(NamedTuple):
    """How an export format is kept on disk."""

    suffix: str
    weights_suffix: str | None
    """The suffix of a second file with the weights."""
    module: str
    """The module with `write(trained, path)`, `load_runner(path)` and `read_metadata(path)`; it needs the packages."""
    required_packages: tuple[str, ...]


EXPORT_FORMATS: dict[ExportFormat, ExportFormatInfo] = {
    "onnx": ExportFormatInfo(".onnx", ".onnx.data", "vitrail.export.onnx", ("onnx", "onnxscript", "onnxruntime")),
    "torch-export": ExportFormatInfo(".pt2", None, "vitrail.export.graph", ()),
    "openvino": ExportFormatInfo(".xml", ".bin", "vitrail.export.openvino", ("openvino",)),
}


_RUNNABLE_FORMATS: tuple[ExportFormat, ...] = ("onnx", "openvino")  # a .pt2 holds pickles


class Parity(NamedTuple):
    """The largest difference of a file from vitrail, relative to an output's largest value where that is above 1."""

    difference: float
    allowed: float
    """MAX_DIFFERENCE; for deep ResNets, whose float32 itself is less exact, three times their distance from float64."""


class ExportedModel(NamedTuple):
    """A file that `vitrail convert --to onnx` or `--to openvino` wrote."""

    path: Path
    run: GraphRunner
    preprocess: PreprocessConfig
    channels: int
    labels: tuple[str, ...]
    multi_label: bool
    temperature: float
    threshold: float
    label_thresholds: tuple[float, ...] = ()


def check_export_destination(path: Path, format: ExportFormat, *, overwrite: bool = False) -> None:  # noqa: A002
    """Refuse a name that does not fit the format or is taken, and a format whose runtime is not installed."""
    suffix, weights_suffix, _, packages = EXPORT_FORMATS[format]
    if path.suffix != suffix:
        raise UsageError(f"{format} writes a {suffix} file; call it {path.with_suffix(suffix)}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder, and {format} writes a file; choose another name")
    if weights_suffix and not path.exists() and (weights := path.with_suffix(weights_suffix)).exists():
        raise UsageError(
            f"{weights} exists already and may belong to another model: remove it, or choose another name than {path}"
        )
    files.check_path_free(path, overwrite=overwrite)
    for name in packages:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UsageError(f"--to {format} needs {error.name or name}: pip install 'vitrail[{format}]'") from None


def export_model(trained: Trained, path: Path, format: ExportFormat, *, overwrite: bool = False) -> Parity:  # noqa: A002
    """Write the float32 graph of a model and return its difference from vitrail; if too large, nothing is written."""
    check_export_destination(path, format, overwrite=overwrite)
    trained, module = prepare_for_export(require_trained(trained)), import_export_format(format)
    with files.write_atomically(path, overwrite=overwrite) as fresh:
        module.write(trained, fresh)
        result = check_parity(module.load_runner(fresh), trained)
        _move_weights_file(fresh, path, format)
    return result


def export_in_precision(
    trained: Trained, path: Path, precision: LowerPrecision, measure: MeasurePrecision, *, overwrite: bool = False
) -> tuple[Parity, dict[str, Any]]:
    """Write the ONNX graph of a model in lower precision; return its float32's parity and the measurements.

    The results of `measure` are also stored in the file's metadata, under the precision.
    """
    check_export_destination(path, "onnx", overwrite=overwrite)
    trained, onnx = prepare_for_export(require_trained(trained)), import_export_format("onnx")
    if isinstance(trained.model, BiT) and precision == "int8":
        raise UsageError("--int8 quantizes matrix products, and a ResNet has convolutions: omit it")
    if not trained.model.config.classes:
        raise UsageError(f"--{precision} is measured by predictions, and the model has no head: omit it")
    with files.write_atomically(path, overwrite=overwrite) as fresh:
        float32_path = fresh.with_name(f"float32-{fresh.name}")
        onnx.write(trained, float32_path)
        float32 = onnx.load_runner(float32_path)
        result = check_parity(float32, trained)
        convert = onnx.quantize if precision == "int8" else onnx.convert_to_float16
        measurements = measure([float32, *convert(float32_path, fresh)])
        onnx.add_metadata(fresh, precision, measurements)
        _move_weights_file(fresh, path, "onnx")
    return result, measurements


def import_export_format(format: ExportFormat) -> ModuleType:  # noqa: A002
    """Import the module of a format, which imports its runtime."""
    return importlib.import_module(EXPORT_FORMATS[format].module)


def _move_weights_file(fresh: Path, path: Path, format: ExportFormat) -> None:  # noqa: A002
    """Move the weights into place before the graph that names them, and remove those of an old graph.

    The old graph is removed first: a crash here leaves no graph, rather than one that reads another's weights.
    """
    suffix = EXPORT_FORMATS[format].weights_suffix
    if suffix is None:
        return
    weights, destination = fresh.with_suffix(suffix), path.with_suffix(suffix)
    for written in filter(Path.exists, (fresh, weights)):
        files.fsync_path(written)
    if weights.exists() or destination.exists():
        path.unlink(missing_ok=True)
        files.fsync_path(path.parent)
        weights.replace(destination) if weights.exists() else destination.unlink()
        files.fsync_path(path.parent)


def check_parity(run: GraphRunner, trained: Trained) -> Parity:
    """Measure the difference of an opened file from vitrail's own float32; raise an error where it is too large."""
    batches = [make_test_pixels(batch, trained) for batch in BATCH_SIZES]
    float32 = [compute_reference_outputs(trained, pixels) for pixels in batches]
    difference = _compute_max_difference(zip(float32, map(run, batches), strict=True))
    allowed = MAX_DIFFERENCE
    if not difference <= MAX_DIFFERENCE and isinstance(trained.model, BiT):
        double = dataclasses.replace(trained, model=copy.deepcopy(trained.model).double())
        float64 = (compute_reference_outputs(double, pixels) for pixels in batches)
        allowed = max(MAX_DIFFERENCE, 3 * _compute_max_difference(zip(float32, float64, strict=True)))
    if not difference <= allowed:
        raise ModelError(
            f"nothing was written: the exported file differs from vitrail's own float32 by {difference:.1e}, and"
            f" {allowed:.1e} is allowed. Another format (--to) may do better"
        )
    return Parity(difference, allowed)


def _compute_max_difference(pairs: Iterable[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> float:
    """The largest difference over all outputs of all batches; NaN where one is."""
    differences = [
        (outputs[name] - values).abs().max().double() / values.abs().max().clamp(min=1)
        for reference, outputs in pairs
        for name, values in reference.items()
    ]
    return float(torch.stack(differences).max())


@torch.inference_mode()
def compute_reference_outputs(trained: Trained, pixels: Tensor) -> dict[str, Tensor]:
    """Compute vitrail's own outputs, in the precision of its weights."""
    images = normalize(pixels, require_preprocess(trained)).to(next(trained.model.parameters()).dtype)
    return name_outputs(trained.model(images), trained.model.config, trained.temperature, trained.multi_label)


def make_test_pixels(batch: int, trained: Trained) -> Tensor:
    """Make pixels, uint8 (B, C, S, S): smooth shapes and noise in turn, the same in every call."""
    channels, size = trained.model.config.channels, require_preprocess(trained).size
    generator = torch.Generator().manual_seed(batch)
    noise = torch.rand(batch, channels, *size, generator=generator)
    coarse = torch.rand(batch, channels, 4, 4, generator=generator)
    smooth = F.interpolate(coarse, size, mode="bicubic").clamp(0, 1)
    mixed = torch.where(torch.arange(batch)[:, None, None, None] % 2 == 0, smooth, noise)
    return (mixed * 255).round().to(torch.uint8)


def is_exported(name: str) -> bool:
    """Whether a MODEL is an exported file, by its suffix."""
    return Path(name).suffix in {form.suffix for form in EXPORT_FORMATS.values()} and Path(name).is_file()


def open_exported_model(path: Path) -> ExportedModel:
    """Open a file with its runtime, on the CPU."""
    format_name = next((name for name in _RUNNABLE_FORMATS if EXPORT_FORMATS[name].suffix == path.suffix), None)
    if format_name is None:
        raise UsageError(
            f"{path} is for torch.export.load (docs/exporting.md); give an .onnx, an .xml, or the model itself"
        )
    try:
        module = import_export_format(format_name)
    except ImportError as error:
        raise UsageError(f"{path} needs {error.name}: pip install 'vitrail[{format_name}]'") from None
    try:
        entries = {OLD_METADATA_KEYS.get(name, name): value for name, value in module.read_metadata(path).items()}
        metadata = {name: json.loads(entries[name]) for name in (*REQUIRED_METADATA, THRESHOLDS_KEY) if name in entries}
        run = module.load_runner(path)
    except (RuntimeError, ValueError, OSError, *module.READ_ERRORS) as error:
        raise ModelError(f"{path} cannot be read: {' '.join(str(error).split()):.300}") from error
    return _build_exported_model(path, metadata, run, format_name)


def _build_exported_model(path: Path, metadata: dict[str, Any], run: GraphRunner, format_name: str) -> ExportedModel:
    if not set(REQUIRED_METADATA) <= metadata.keys():
        raise ModelError(
            f"{path} does not say how images are prepared and what its outputs mean, as files exported by vitrail do:"
            f" vitrail convert MODEL {path.name} --to {format_name}"
        )
    try:
        pixels = dict(metadata["pixels"])
        channels = int(pixels.pop("channels"))
        preprocess = from_json(PreprocessConfig, pixels | metadata["normalization"])
        labels = tuple(str(label) for label in metadata["labels"] or ())
        temperature, threshold = float(metadata["temperature"]), float(metadata["threshold"])
        multi_label = metadata["multi_label"] is True
        label_thresholds = tuple(float(value) for value in metadata.get(THRESHOLDS_KEY, ()))
        if len(label_thresholds) not in (0, len(labels)):
            raise ValueError(f"{pluralize(len(label_thresholds), 'threshold')} for {pluralize(len(labels), 'label')}")
    except (UsageError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error
    return ExportedModel(path, run, preprocess, channels, labels, multi_label, temperature, threshold, label_thresholds)
