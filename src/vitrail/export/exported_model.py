"""Open an exported file: how it is run, and what its metadata state."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.config import PreprocessConfig, from_json
from vitrail.errors import ModelError, UsageError
from vitrail.export.export import EXPORT_FORMATS, ExportFormat, import_export_format
from vitrail.export.graph import OLD_METADATA_KEYS, REQUIRED_METADATA, GraphRunner

_RUNNABLE_FORMATS: tuple[ExportFormat, ...] = ("onnx", "openvino")  # a .pt2 holds pickles


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


def is_exported(name: str) -> bool:
    """Whether a MODEL is an exported file, by its suffix."""
    return Path(name).suffix in {form.suffix for form in EXPORT_FORMATS.values()} and Path(name).is_file()


def open_exported_model(path: Path) -> ExportedModel:
    """Open a file with its runtime, on the CPU."""
    format = next((name for name in _RUNNABLE_FORMATS if EXPORT_FORMATS[name].suffix == path.suffix), None)  # noqa: A001
    if format is None:
        raise UsageError(
            f"{path} is for torch.export.load (docs/exporting.md); give an .onnx, an .xml, or the model itself"
        )
    try:
        module = import_export_format(format)
    except ImportError as error:
        raise UsageError(f"{path} needs {error.name}: pip install 'vitrail[{format}]'") from None
    try:
        entries = {OLD_METADATA_KEYS.get(name, name): value for name, value in module.read_metadata(path).items()}
        metadata = {name: json.loads(entries[name]) for name in REQUIRED_METADATA if name in entries}
        run = module.load_runner(path)
    except (RuntimeError, ValueError, OSError, *module.READ_ERRORS) as error:
        raise ModelError(f"{path} cannot be read: {' '.join(str(error).split()):.300}") from error
    return _build_exported_model(path, metadata, run, format)


def _build_exported_model(
    path: Path,
    metadata: dict[str, Any],
    run: GraphRunner,
    format: ExportFormat,  # noqa: A002
) -> ExportedModel:
    if not set(REQUIRED_METADATA) <= metadata.keys():
        raise ModelError(
            f"{path} does not say how images are prepared and what its outputs mean, as files exported by vitrail do:"
            f" vitrail convert MODEL {path.name} --to {format}"
        )
    try:
        pixels = dict(metadata["pixels"])
        channels = int(pixels.pop("channels"))
        preprocess = from_json(PreprocessConfig, pixels | metadata["normalization"])
        labels = tuple(str(label) for label in metadata["labels"] or ())
        temperature, threshold = float(metadata["temperature"]), float(metadata["threshold"])
        multi_label = metadata["multi_label"] is True
    except (UsageError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error
    return ExportedModel(path, run, preprocess, channels, labels, multi_label, temperature, threshold)
