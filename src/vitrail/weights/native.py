"""vitrail's own file: safetensors with timm's tensor names, and everything else as JSON in its header.

The header's `vitrail` entry is a `Header`. Version 1 is the only one so far; a newer one is refused by number, and
whoever raises it writes the reader that turns the older header into the newer.

How fast a run's weights are in other precisions lies beside them (`best.precision.json`), not in them: it is never
measured twice alike, and the same run shall give the same bytes. `convert --measure` puts it into the file it writes.
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
from vitrail.weights.tensor_files import TensorFile
from vitrail.weights.trained import Origin, Trained, assemble_model

VERSION = 1
METADATA_KEY = "vitrail"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeHeader:
    version: int
    architecture: ViTConfig | BiTConfig
    preprocess: PreprocessConfig | None
    labels: tuple[str, ...] | None
    origin: Origin
    temperature: float = 1.0
    multi_label: bool = False
    threshold: float = 0.0
    precision_measurements: tuple[PrecisionMeasurement, ...] = ()
    activation_ranges: tuple[float, ...] = ()


def can_read(stored: TensorFile) -> bool:
    """Whether vitrail wrote this file."""
    return METADATA_KEY in stored.metadata


def write(trained: Trained, path: Path) -> None:
    """Write all of `trained` to the file `path`."""
    header = NativeHeader(
        version=VERSION,
        architecture=trained.model.config,
        preprocess=trained.preprocess,
        labels=trained.labels,
        origin=trained.origin,
        temperature=trained.temperature,
        multi_label=trained.multi_label,
        threshold=trained.threshold,
        precision_measurements=trained.precision_measurements,
        activation_ranges=trained.activation_ranges,
    )
    fields = dataclasses.asdict(header)
    for name in (
        "precision_measurements",
        "activation_ranges",
    ):  # files without keep the bytes they had before there were such fields
        if not fields[name]:
            del fields[name]
    text = json.dumps(fields, ensure_ascii=False, sort_keys=True)
    tensor_files.write_tensors(path, trained.model.state_dict(), {METADATA_KEY: text})


def write_measurements(path: Path, precision_measurements: Sequence[PrecisionMeasurement]) -> None:
    """Write what was measured of a file's precisions beside it: equal weights then have equal bytes.

    Without measurements there is no file beside it.
    """
    beside = _get_measurements_path(path)
    if not precision_measurements:
        beside.unlink(missing_ok=True)
        return
    measurements = [dataclasses.asdict(each) for each in precision_measurements]
    with files.write_atomically(beside, overwrite=True) as fresh:
        tensor_files.write_json(fresh, {"model": _digest_header(path), "precision_measurements": measurements})


def read_measurements(path: Path) -> tuple[PrecisionMeasurement, ...]:
    """What was measured of the file's precisions, if that lies beside it and is of this file."""
    beside = _get_measurements_path(path)
    if not beside.is_file():
        return ()
    content = tensor_files.read_json(beside)
    if content.get("model") != _digest_header(path):
        return ()  # of weights that were here before
    measurements = content.get("precision_measurements", content.get("tried"))  # as earlier versions called them
    try:
        if not isinstance(measurements, list):
            raise UsageError(f"its precision_measurements are {measurements!r:.40}, not a list")
        return tuple(from_json(PrecisionMeasurement, each) for each in measurements)
    except UsageError as error:
        raise ModelError(f"{beside} is damaged: {error}. Remove it to compute in float32") from error


def _get_measurements_path(path: Path) -> Path:
    return path.with_suffix(".precision.json")  # best.safetensors -> best.precision.json


def _digest_header(path: Path) -> str:
    return hashlib.sha256(tensor_files.read_safetensors_metadata(path).get(METADATA_KEY, "").encode()).hexdigest()


def read(stored: TensorFile, path: Path) -> Trained:
    """The model in a native file."""
    found = tensor_files.parse_json(stored.metadata[METADATA_KEY], path)
    version = found.get("version")
    if type(version) is not int or version < 1:
        raise ModelError(f"{path} is damaged: its format version is {version!r:.40}, not a whole number from 1")
    if version > VERSION:
        raise ModelError(
            f"{path} has format version {version}, and this vitrail reads {VERSION} at most: pip install -U vitrail"
        )
    try:
        header = from_json(NativeHeader, found)
        model = assemble_model(header.architecture, stored.tensors)
        depth = header.architecture.depth if isinstance(header.architecture, ViTConfig) else 0
        without_queries = (
            len(header.activation_ranges) == 8 * depth
        )  # as they once were: to be measured anew, as if there were none
        return Trained(
            model,
            header.preprocess,
            header.labels,
            header.origin,
            header.temperature,
            header.multi_label,
            header.threshold,
            header.precision_measurements or read_measurements(path),
            () if without_queries else header.activation_ranges,
        )
    except (UsageError, ModelError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error
