"""A model to an exported file, which appears whole, and only if it says what vitrail says."""

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
"""Given how the float32 and the int8 file are run: what is to be known of the second, as JSON values."""


class ExportFormatInfo(NamedTuple):
    """How a format is kept."""

    suffix: str
    weights_suffix: str | None
    """The suffix of a second file with the weights."""
    module: str
    required_packages: tuple[str, ...]


EXPORT_FORMATS: dict[ExportFormat, ExportFormatInfo] = {
    "onnx": ExportFormatInfo(".onnx", ".onnx.data", "vitrail.export.onnx", ("onnx", "onnxscript", "onnxruntime")),
    "torch-export": ExportFormatInfo(".pt2", None, "vitrail.export.torch_export", ()),
    "openvino": ExportFormatInfo(".xml", ".bin", "vitrail.export.openvino", ("openvino",)),
}


def check_export_destination(path: Path, format: ExportFormat, *, overwrite: bool = False) -> None:  # noqa: A002
    """Refuse a name that does not suit the format or is taken, and a format whose runtime is not installed."""
    suffix, beside, _, needs = EXPORT_FORMATS[format]
    if path.suffix != suffix:
        raise UsageError(f"{format} writes a {suffix} file; call it {path.with_suffix(suffix)}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder, and a file is to be written; choose another name")
    if beside and not path.exists() and (other := path.with_suffix(beside)).exists():
        raise UsageError(
            f"{other} exists already and may be of something else: remove it, or choose another name than {path}"
        )
    files.check_path_free(path, overwrite=overwrite)
    for name in needs:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UsageError(f"--to {format} needs {error.name or name}: pip install 'vitrail[{format}]'") from None


def export_model(trained: Trained, path: Path, format: ExportFormat, *, overwrite: bool = False) -> Parity:  # noqa: A002
    """Write the float32 graph of a model to `path`, and tell how far it is from vitrail: too far, and nothing is."""
    check_export_destination(path, format, overwrite=overwrite)
    trained, module = prepare_for_export(require_trained(trained)), _import_format_module(format)
    with files.write_atomically(path, overwrite=overwrite) as fresh:
        module.write(trained, fresh)
        found = parity.check_parity(module.load_runner(fresh), trained)
        _move_weights_file(fresh, path, format)
    return found


def export_int8_model(
    trained: Trained, path: Path, measure: MeasureInt8, *, overwrite: bool = False
) -> tuple[Parity, dict[str, Any]]:
    """Write the ONNX graph of a model with int8 weights; how far its float32 is from vitrail, and what was measured.

    What `measure` finds goes into the file's metadata too, under `int8`.
    """
    check_export_destination(path, "onnx", overwrite=overwrite)
    trained, onnx = prepare_for_export(require_trained(trained)), _import_format_module("onnx")
    if isinstance(trained.model, BiT):
        raise UsageError("--int8 is of matrix products, and a ResNet has convolutions: leave it away")
    if not trained.model.config.classes:
        raise UsageError("--int8 is measured by answers, and the model has no head: leave it away")
    with files.write_atomically(path, overwrite=overwrite) as fresh:
        whole = fresh.with_name(f"float32-{fresh.name}")
        onnx.write(trained, whole)
        float32 = onnx.load_runner(whole)
        found = parity.check_parity(float32, trained)
        onnx.quantize(whole, fresh)
        measured = measure(float32, onnx.load_runner(fresh))
        onnx.add_metadata(fresh, "int8", measured)
        _move_weights_file(fresh, path, "onnx")
    return found, measured


def _import_format_module(format: ExportFormat) -> ModuleType:  # noqa: A002
    """The module that writes and runs a format, imported when it is asked for: each brings a runtime along."""
    return importlib.import_module(EXPORT_FORMATS[format].module)


def _move_weights_file(fresh: Path, path: Path, format: ExportFormat) -> None:  # noqa: A002
    """Give the weights their place before the graph that names them gets its own; those of an old graph go.

    The old graph goes first: a crash here leaves none, rather than one that reads the weights of another.
    """
    beside = EXPORT_FORMATS[format].weights_suffix
    if beside is None:
        return
    weights, old = fresh.with_suffix(beside), path.with_suffix(beside)
    for each in (fresh, weights):
        if each.exists():
            files.fsync_path(each)
    if weights.exists() or old.exists():
        path.unlink(missing_ok=True)
        files.fsync_path(path.parent)
        weights.replace(old) if weights.exists() else old.unlink()
        files.fsync_path(path.parent)
