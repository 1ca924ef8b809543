"""Tables of samples: columns as arrays, on disk as memory maps, so that rows cost no memory and workers share one copy.

A table on disk is a folder of NumPy's own .npy files beside a JSON of facts: readable anywhere, and without pickle.
Text is stored as its bytes joined and where each ends.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import DataError
from vitrail.files import write_atomically

_FACTS_FILE = "facts.json"
_COLUMN_NAME = re.compile(r"\w+(\.\w+)*")
_READ_ATTEMPTS = 10
Array = NDArray[Any]


class SampleTable:
    """Columns of equal length, and facts about them; in memory, or in a folder."""

    def __init__(self, columns: Mapping[str, Array], metadata: Mapping[str, Any] | None = None) -> None:
        self.columns, self.metadata = columns, metadata or {}

    def __getitem__(self, column: str) -> Array:
        return self.columns[column]

    def __contains__(self, column: str) -> bool:
        return column in self.columns

    def get_text(self, column: str, row: int) -> str:
        """One entry of a column made by `texts`."""
        ends = self.columns[f"{column}.ends"]
        start = int(ends[row - 1]) if row else 0
        return os.fsdecode(self.columns[f"{column}.bytes"][start : int(ends[row])].tobytes())


class StoredSampleTable(SampleTable):
    """A table of which a process gets the folder's name; it maps the same files when it first looks at them."""

    def __init__(self, folder: Path, identity: str) -> None:
        self.folder, self.identity = folder, identity

    def __reduce__(self) -> Any:
        return StoredSampleTable, (self.folder, self.identity)

    @cached_property
    def _content(self) -> tuple[Mapping[str, Array], Mapping[str, Any]]:
        for last in (*[False] * _READ_ATTEMPTS, True):
            try:
                columns, facts = _read_folder(self.folder)
                break
            except (OSError, ValueError, KeyError) as error:  # or in the instant in which it is replaced
                if last:
                    raise DataError(f"{self.folder} can no longer be read ({error}); run the command again") from error
                time.sleep(0.05)
        if facts.get("identity") != self.identity:
            raise DataError(f"the set in {self.folder} has changed since it was opened; run the command again")
        return columns, facts

    @property
    def columns(self) -> Mapping[str, Array]:  # type: ignore[override]
        """The columns, as memory maps."""
        return self._content[0]

    @property
    def metadata(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The facts."""
        return self._content[1]


def encode_text_column(column: str, values: Iterable[str]) -> dict[str, Array]:
    """The two columns that hold text; any file name survives, even one that is no valid UTF-8."""
    encoded = [os.fsencode(value) for value in values]
    ends = np.cumsum(np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)))
    return {f"{column}.bytes": np.frombuffer(b"".join(encoded), dtype=np.uint8), f"{column}.ends": ends}


def write_table(folder: Path, columns: Mapping[str, Array], metadata: Mapping[str, Any]) -> SampleTable:
    """Write a table whole or not at all, and open it."""
    identity = _compute_identity(columns, metadata)
    with write_atomically(folder, overwrite=True) as fresh:
        fresh.mkdir()
        for name, values in columns.items():
            np.save(fresh / f"{name}.npy", values, allow_pickle=False)
        known = {"columns": sorted(columns), "identity": identity}
        (fresh / _FACTS_FILE).write_text(json.dumps({**metadata, **known}))
        content = _read_folder(
            fresh
        )  # mapped before the name is given: another process may replace the folder at any time
    return _build_stored_table(folder, content)


def read_table(folder: Path, *, max_verified_bytes: int = 0) -> SampleTable:
    """The table of a folder; OSError, ValueError or KeyError where there is none, or it is damaged.

    A table of up to `verify` bytes is read whole and compared with the digest that was written with it.
    """
    columns, facts = _read_folder(folder)
    small = sum(column.nbytes for column in columns.values()) <= max_verified_bytes
    if small and _compute_identity(columns, facts) != facts["identity"]:
        raise ValueError(f"{folder} is not as it was written")
    return _build_stored_table(folder, (columns, facts))


def _compute_identity(columns: Mapping[str, Array], metadata: Mapping[str, Any]) -> str:
    """The digest of a table's columns and classes."""
    identity = hashlib.blake2b(json.dumps(metadata.get("classes")).encode(), digest_size=16)
    for name in sorted(columns):
        identity.update(name.encode())
        identity.update(np.ascontiguousarray(columns[name]).reshape(-1).view(np.uint8).data)
    return identity.hexdigest()


def _build_stored_table(folder: Path, content: tuple[dict[str, Array], dict[str, Any]]) -> SampleTable:
    found = StoredSampleTable(folder, content[1]["identity"])
    found.__dict__["_content"] = content
    return found


def _read_folder(folder: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    facts = json.loads((folder / _FACTS_FILE).read_text())
    if not isinstance(facts, dict):
        raise ValueError(f"{folder / _FACTS_FILE} holds no object")
    names = facts["columns"]
    if not isinstance(names, list) or not all(isinstance(name, str) and _COLUMN_NAME.fullmatch(name) for name in names):
        raise ValueError(f"{folder / _FACTS_FILE} names columns that are none")
    return {name: _map_array(folder / f"{name}.npy") for name in names}, facts


def _map_array(path: Path) -> Array:
    values = np.load(path, mmap_mode="r", allow_pickle=False)
    return np.asarray(values)  # a plain view of the map: indexing it is several times faster
