"""Export a model to a file, which is written whole, and only if it computes what vitrail computes."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from vitrail import files
from vitrail.errors import UsageError
from vitrail.export import parity
from vitrail.export.graph import GraphRunner, prepare_for_export
from vitrail.export.parity import Parity
from vitrail.model.resnet import BiT
from vitrail.weights.trained import Trained, require_trained

ExportFormat = Literal["onnx", "torch-export", "openvino"]
MeasureInt8 = Callable[[GraphRunner, GraphRunner], dict[str, Any]]
"""The float32 and the int8 file as functions -> measurements of the second, as JSON values."""


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
    "torch-export": ExportFormatInfo(".pt2", None, "vitrail.export.torch_export", ()),
    "openvino": ExportFormatInfo(".xml", ".bin", "vitrail.export.openvino", ("openvino",)),
}


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
        result = parity.check_parity(module.load_runner(fresh), trained)
        _move_weights_file(fresh, path, format)
    return result


def export_int8_model(
    trained: Trained, path: Path, measure: MeasureInt8, *, overwrite: bool = False
) -> tuple[Parity, dict[str, Any]]:
    """Write the ONNX graph of a model with int8 weights; return its float32's parity and the measurements.

    The results of `measure` are also stored in the file's metadata, under `int8`.
    """
    check_export_destination(path, "onnx", overwrite=overwrite)
    trained, onnx = prepare_for_export(require_trained(trained)), import_export_format("onnx")
    if isinstance(trained.model, BiT):
        raise UsageError("--int8 quantizes matrix products, and a ResNet has convolutions: omit it")
    if not trained.model.config.classes:
        raise UsageError("--int8 is measured by predictions, and the model has no head: omit it")
    with files.write_atomically(path, overwrite=overwrite) as fresh:
        float32_path = fresh.with_name(f"float32-{fresh.name}")
        onnx.write(trained, float32_path)
        float32 = onnx.load_runner(float32_path)
        result = parity.check_parity(float32, trained)
        onnx.quantize(float32_path, fresh)
        measurements = measure(float32, onnx.load_runner(fresh))
        onnx.add_metadata(fresh, "int8", measurements)
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
    for written in (fresh, weights):
        if written.exists():
            files.fsync_path(written)
    if weights.exists() or destination.exists():
        path.unlink(missing_ok=True)
        files.fsync_path(path.parent)
        weights.replace(destination) if weights.exists() else destination.unlink()
        files.fsync_path(path.parent)
