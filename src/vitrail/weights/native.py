"""vitrail's own file: safetensors with timm's tensor names, and everything else as JSON in its header.

The header's `vitrail` entry is a `NativeHeader`. Version 1 is the only one so far. A newer version is refused by its
number; whoever raises it writes the reader of the older header. Keys of earlier releases are renamed by `from_json`.

A run's speeds in other precisions lie beside its weights (`best.precision.json`), not in them: each measurement
differs, and equal runs must give equal bytes. `convert --measure` writes them into the file.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from vitrail import files
from vitrail.config import BiTConfig, PreprocessConfig, ViTConfig, from_json
from vitrail.errors import ModelError, UsageError
from vitrail.weights import tensor_files
from vitrail.weights.precision_measurements import PrecisionMeasurement
from vitrail.weights.tensor_files import ModelFiles
from vitrail.weights.trained import Origin, Trained, assemble_model

VERSION = 1
METADATA_KEY = "vitrail"
OPTIONAL_FIELDS = ("label_thresholds", "precision_measurements", "activation_ranges")
"""Omitted where empty, so that older releases read the file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeHeader:
    """Everything a native file holds besides its tensors; all but the first two fields are those of `Trained`."""

    version: int
    architecture: ViTConfig | BiTConfig
    preprocess: PreprocessConfig | None
    labels: tuple[str, ...] | None
    origin: Origin
    temperature: float = 1.0
    multi_label: bool = False
    threshold: float = 0.0
    label_thresholds: tuple[float, ...] = ()
    precision_measurements: tuple[PrecisionMeasurement, ...] = ()
    activation_ranges: tuple[float, ...] = ()


def recognize(model_files: ModelFiles) -> bool:
    """Whether vitrail wrote this file."""
    return model_files.weights.suffix == ".safetensors" and METADATA_KEY in model_files.content.metadata


def write(trained: Trained, path: Path) -> list[str]:
    """Write all of `trained` to the file `path`; nothing is lost, so there are no notes."""
    shared = {field.name: getattr(trained, field.name) for field in dataclasses.fields(NativeHeader)[2:]}
    header = dataclasses.asdict(NativeHeader(version=VERSION, architecture=trained.model.config, **shared))
    fields = {name: value for name, value in header.items() if value or name not in OPTIONAL_FIELDS}
    text = json.dumps(fields, ensure_ascii=False, sort_keys=True)
    tensor_files.write_tensors(path, trained.model.state_dict(), {METADATA_KEY: text})
    return []


def read(model_files: ModelFiles) -> Trained:
    """Read the model in a native file."""
    path = model_files.weights
    fields = tensor_files.parse_json(model_files.content.metadata[METADATA_KEY], path)
    version = fields.get("version")
    if type(version) is not int or version < 1:
        raise ModelError(f"{path} is damaged: its format version is {version!r:.40}, not a whole number from 1")
    if version > VERSION:
        raise ModelError(
            f"{path} has format version {version}, and this vitrail reads {VERSION} at most: pip install -U vitrail"
        )
    try:
        header = from_json(NativeHeader, fields)
        shared = {field.name: getattr(header, field.name) for field in dataclasses.fields(header)[2:]}
        shared["precision_measurements"] = header.precision_measurements or read_measurements(path)
        config = header.architecture
        if isinstance(config, ViTConfig) and len(header.activation_ranges) == 8 * config.depth:
            shared["activation_ranges"] = ()  # of an early file, without those of queries and keys: measured again
        return Trained(assemble_model(config, model_files.tensors), **shared)
    except (UsageError, ModelError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error


def write_measurements(path: Path, precision_measurements: Sequence[PrecisionMeasurement]) -> None:
    """Write the measurements of a file's precisions beside it; without any, remove an older file of them."""
    beside = _get_measurements_path(path)
    if not precision_measurements:
        beside.unlink(missing_ok=True)
        return
    rows = [dataclasses.asdict(measurement) for measurement in precision_measurements]
    with files.write_atomically(beside, overwrite=True) as fresh:
        tensor_files.write_json(fresh, {"model": _digest_header(path), "precision_measurements": rows})


def read_measurements(path: Path) -> tuple[PrecisionMeasurement, ...]:
    """Read the measurements that lie beside a file; none where they are of other weights."""
    beside = _get_measurements_path(path)
    if not beside.is_file():
        return ()
    content = tensor_files.read_json(beside)
    if content.get("model") != _digest_header(path):
        return ()
    rows = content.get("precision_measurements", content.get("tried"))  # version 0.1.0 called them tried
    try:
        if not isinstance(rows, list):
            raise UsageError(f"its precision_measurements are {rows!r:.40}, not a list")
        return tuple(from_json(PrecisionMeasurement, row) for row in rows)
    except UsageError as error:
        raise ModelError(f"{beside} is damaged: {error}. Remove it to compute in float32") from error


def _get_measurements_path(path: Path) -> Path:
    return path.with_suffix(".precision.json")  # best.safetensors -> best.precision.json


def _digest_header(path: Path) -> str:
    return hashlib.sha256(tensor_files.read_safetensors_metadata(path).get(METADATA_KEY, "").encode()).hexdigest()
