"""Tables of samples: columns as arrays, memory-mapped on disk, so that rows cost no memory and workers share one copy.

A table on disk is a folder of NumPy's .npy files and a JSON of metadata: readable anywhere, without pickle. Text is
stored as its joined bytes and the end of each entry. The table of a source that takes long to list stays in the cache
while the source is unchanged.
"""

import atexit
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail import remote
from vitrail.errors import DataError
from vitrail.files import get_cache_home, write_atomically

UNLABELED = -1
"""The label of an image without one."""
_FACTS_FILE = "facts.json"
_COLUMN_NAME = re.compile(r"\w+(\.\w+)*")
_READ_ATTEMPTS = 10
_INDEX_VERSION = 4
_SETTLE_NANOSECONDS = 2_000_000_000  # a file system's clock is coarse, so a change this recent may hide another
Array = NDArray[Any]
_Content = tuple[Mapping[str, Array], Mapping[str, Any]]  # columns, metadata


class SampleTable:
    """Columns of equal length, and metadata about them; in memory, or in a folder."""

    def __init__(self, columns: Mapping[str, Array], metadata: Mapping[str, Any] | None = None) -> None:
        self.columns, self.metadata = columns, metadata or {}

    def __getitem__(self, column: str) -> Array:
        return self.columns[column]

    def __contains__(self, column: str) -> bool:
        return column in self.columns

    def get_text(self, column: str, row: int) -> str:
        """Return one entry of a column made by `encode_text_column`."""
        ends = self.columns[f"{column}.ends"]
        start = int(ends[row - 1]) if row else 0
        return os.fsdecode(self.columns[f"{column}.bytes"][start : int(ends[row])].tobytes())


class StoredSampleTable(SampleTable):
    """A table in a folder. A worker process receives the folder's path, and maps the files when it first reads them."""

    def __init__(self, folder: Path, identity: str, content: _Content | None = None) -> None:
        self.folder, self.identity = folder, identity
        if content is not None:
            self.__dict__["_content"] = content  # fills the cached property

    def __reduce__(self) -> Any:
        return StoredSampleTable, (self.folder, self.identity)

    @cached_property
    def _content(self) -> _Content:
        for is_last in (*[False] * _READ_ATTEMPTS, True):
            try:
                columns, metadata = _read_folder(self.folder)
                break
            except (OSError, ValueError, KeyError) as error:  # gone, or just being replaced
                if is_last:
                    raise DataError(f"{self.folder} can no longer be read ({error}); run the command again") from error
                time.sleep(0.05)
        if metadata.get("identity") != self.identity:
            raise DataError(f"the dataset in {self.folder} has changed since it was opened; run the command again")
        return columns, metadata

    @property
    def columns(self) -> Mapping[str, Array]:  # type: ignore[override]
        return self._content[0]

    @property
    def metadata(self) -> Mapping[str, Any]:  # type: ignore[override]
        return self._content[1]


def encode_text_column(column: str, values: Iterable[str]) -> dict[str, Array]:
    """Build the two columns that hold text; any file name survives, even one that is not valid UTF-8."""
    encoded = [os.fsencode(value) for value in values]
    ends = np.cumsum(np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)))
    return {f"{column}.bytes": np.frombuffer(b"".join(encoded), dtype=np.uint8), f"{column}.ends": ends}


def encode_label_columns(labels: Iterable[Sequence[int]], *, multi_label: bool) -> dict[str, Array]:
    """The column of labels and, if an image may have several, the column of where the labels of each image end."""
    if not multi_label:
        return {"label": np.array([row[0] if row else UNLABELED for row in labels], dtype=np.int32)}
    rows = list(labels)
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    return {"label": np.array([label for row in rows for label in row], dtype=np.int32), "label.ends": ends}


def write_table(folder: Path, columns: Mapping[str, Array], metadata: Mapping[str, Any]) -> SampleTable:
    """Write a table whole or not at all, and open it."""
    identity = _compute_identity(columns, metadata)
    with write_atomically(folder, overwrite=True) as fresh:
        fresh.mkdir()
        for name, values in columns.items():
            np.save(fresh / f"{name}.npy", values, allow_pickle=False)
        own_metadata = {"columns": sorted(columns), "identity": identity}
        (fresh / _FACTS_FILE).write_text(json.dumps({**metadata, **own_metadata}))
        content = _read_folder(fresh)  # mapped before the rename: another process may replace the folder at any time
    return StoredSampleTable(folder, identity, content)


def read_table(folder: Path, *, max_verified_bytes: int = 0) -> SampleTable:
    """Open the table of a folder; raise OSError, ValueError or KeyError where there is none, or it is damaged.

    A table of up to `max_verified_bytes` is read whole and compared with the digest that was written with it.
    """
    columns, metadata = _read_folder(folder)
    is_small = sum(column.nbytes for column in columns.values()) <= max_verified_bytes
    if is_small and _compute_identity(columns, metadata) != metadata["identity"]:
        raise ValueError(f"{folder} is not as it was written")
    return StoredSampleTable(folder, metadata["identity"], (columns, metadata))


def _compute_identity(columns: Mapping[str, Array], metadata: Mapping[str, Any]) -> str:
    """Compute the digest of a table's columns and classes."""
    identity = hashlib.blake2b(json.dumps(metadata.get("classes")).encode(), digest_size=16)
    for name in sorted(columns):
        identity.update(name.encode())
        identity.update(np.ascontiguousarray(columns[name]).reshape(-1).view(np.uint8).data)
    return identity.hexdigest()


def _read_folder(folder: Path) -> _Content:
    metadata = json.loads((folder / _FACTS_FILE).read_text())
    if not isinstance(metadata, dict):
        raise ValueError(f"{folder / _FACTS_FILE} holds no object")
    names = metadata["columns"]
    if not isinstance(names, list) or not all(isinstance(name, str) and _COLUMN_NAME.fullmatch(name) for name in names):
        raise ValueError(f"{folder / _FACTS_FILE} has invalid column names")
    memory_maps = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
    return {name: np.asarray(values) for name, values in memory_maps.items()}, metadata  # plain arrays index faster


# --- the cache -------------------------------------------------------------------------------------------------------


def get_cache_folder(kind: str, source: str) -> Path:
    """Return the folder of the cache that holds a source's table of this kind."""
    return get_cache_home() / kind / hashlib.sha256(source.encode(errors="surrogateescape")).hexdigest()[:24]


def load_or_build_table(
    source: str,
    list_watched_paths: Callable[[], Iterable[str]],
    build: Callable[[], tuple[Mapping[str, Array], dict[str, Any]]],
) -> SampleTable:
    """Load a source's table from the cache, or build it if one of the paths watched at that time has changed since."""
    folder = get_cache_folder("index", source)
    cached = _load_unchanged_table(folder, source)
    if cached is not None:
        return cached
    started = time.time_ns()
    columns, metadata = build()
    paths = list(list_watched_paths())
    stamps = dict(zip(paths, _read_stamps(paths), strict=True))
    latest_change = max((stamp[0] for stamp in stamps.values()), default=0)
    is_settled = latest_change < started - _SETTLE_NANOSECONDS
    metadata |= {"version": _INDEX_VERSION, "source": source, "watched": stamps if is_settled else None}
    try:
        return write_table(folder, columns, metadata)
    except OSError:  # a cache that cannot be written costs time, not the run
        temporary = Path(tempfile.mkdtemp(prefix="vitrail-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return write_table(temporary / "index", columns, metadata)


def read_stamp(path: str) -> list[int]:
    """Read a path's last change in nanoseconds and its size; for a remote path, what the store reports."""
    if remote.is_remote(path):
        return remote.compute_stamp(path)
    status = os.stat(path)  # noqa: PTH116, a path from the file system as it is
    return [status.st_mtime_ns, status.st_size]


def _read_stamps(paths: Sequence[str]) -> Iterator[list[int]]:
    """Read the stamps of paths that are all local or all remote."""
    map_paths = remote.map_concurrently if paths and remote.is_remote(paths[0]) else map
    return map_paths(read_stamp, paths)


def _load_unchanged_table(folder: Path, source: str) -> SampleTable | None:
    try:
        table = read_table(folder)
        metadata, watched = table.metadata, table.metadata.get("watched")
        if metadata.get("version") != _INDEX_VERSION or metadata.get("source") != source or watched is None:
            return None
        stamps = zip(_read_stamps([*watched]), watched.values(), strict=True)
        is_unchanged = all(current == recorded for current, recorded in stamps)
    except (OSError, ValueError, KeyError, EOFError):  # absent or damaged: it is built again
        return None
    return table if is_unchanged else None
