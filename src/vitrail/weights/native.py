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
from vitrail.config import BiTConfig, Preprocess, ViTConfig, from_json
from vitrail.errors import ModelError, UsageError
from vitrail.weights import storage
from vitrail.weights.precision import Tried
from vitrail.weights.storage import Stored
from vitrail.weights.trained import Origin, Trained, assemble

VERSION = 1
KEY = "vitrail"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    version: int
    architecture: ViTConfig | BiTConfig
    preprocess: Preprocess | None
    labels: tuple[str, ...] | None
    origin: Origin
    temperature: float = 1.0
    several: bool = False
    threshold: float = 0.0
    tried: tuple[Tried, ...] = ()
    ranges: tuple[float, ...] = ()


def recognises(stored: Stored) -> bool:
    """Whether vitrail wrote this file."""
    return KEY in stored.metadata


def write(trained: Trained, path: Path) -> None:
    """Write all of `trained` to the file `path`."""
    header = Header(
        version=VERSION,
        architecture=trained.model.config,
        preprocess=trained.preprocess,
        labels=trained.labels,
        origin=trained.origin,
        temperature=trained.temperature,
        several=trained.several,
        threshold=trained.threshold,
        tried=trained.tried,
        ranges=trained.ranges,
    )
    fields = dataclasses.asdict(header)
    for name in ("tried", "ranges"):  # files without keep the bytes they had before there were such fields
        if not fields[name]:
            del fields[name]
    text = json.dumps(fields, ensure_ascii=False, sort_keys=True)
    storage.write(path, trained.model.state_dict(), {KEY: text})


def write_measurements(path: Path, tried: Sequence[Tried]) -> None:
    """Write what was measured of a file's precisions beside it: equal weights then have equal bytes.

    A file that `tried` is empty for has none beside it.
    """
    beside = _measurements_path(path)
    if not tried:
        beside.unlink(missing_ok=True)
        return
    measurements = [dataclasses.asdict(each) for each in tried]
    with files.replacing(beside, overwrite=True) as fresh:
        storage.write_json(fresh, {"model": _digest_header(path), "precision_measurements": measurements})


def read_measurements(path: Path) -> tuple[Tried, ...]:
    """What was measured of the file's precisions, if that lies beside it and is of this file."""
    beside = _measurements_path(path)
    if not beside.is_file():
        return ()
    content = storage.read_json(beside)
    if content.get("model") != _digest_header(path):
        return ()  # of weights that were here before
    measurements = content.get("precision_measurements")
    try:
        if not isinstance(measurements, list):
            raise UsageError(f"its precision_measurements are {measurements!r:.40}, not a list")
        return tuple(from_json(Tried, each) for each in measurements)
    except UsageError as error:
        raise ModelError(f"{beside} is damaged: {error}. Remove it to compute in float32") from error


def _measurements_path(path: Path) -> Path:
    return path.with_suffix(".precision.json")  # best.safetensors -> best.precision.json


def _digest_header(path: Path) -> str:
    return hashlib.sha256(storage.metadata(path).get(KEY, "").encode()).hexdigest()


def read(stored: Stored, path: Path) -> Trained:
    """The model in a native file."""
    found = storage.parse_json(stored.metadata[KEY], path)
    version = found.get("version")
    if type(version) is not int or version < 1:
        raise ModelError(f"{path} is damaged: its format version is {version!r:.40}, not a whole number from 1")
    if version > VERSION:
        raise ModelError(
            f"{path} has format version {version}, and this vitrail reads {VERSION} at most: pip install -U vitrail"
        )
    try:
        header = from_json(Header, found)
        model = assemble(header.architecture, stored.tensors)
        depth = header.architecture.depth if isinstance(header.architecture, ViTConfig) else 0
        without_queries = (
            len(header.ranges) == 8 * depth
        )  # as they once were: to be measured anew, as if there were none
        return Trained(
            model,
            header.preprocess,
            header.labels,
            header.origin,
            header.temperature,
            header.several,
            header.threshold,
            header.tried or read_measurements(path),
            () if without_queries else header.ranges,
        )
    except (UsageError, ModelError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error
