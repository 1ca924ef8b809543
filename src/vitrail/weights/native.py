"""vitrail's own file: safetensors with timm's tensor names, and everything else as JSON in its header.

The header's `vitrail` entry is a `Header`. Version 1 is the only one so far; a newer one is refused by number, and
whoever raises it writes the reader that turns the older header into the newer.
"""

import dataclasses
import json
from pathlib import Path

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
            header.tried,
            () if without_queries else header.ranges,
        )
    except (UsageError, ModelError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error
