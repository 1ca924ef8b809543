"""Tables of samples: columns as arrays, on disk as memory maps, so that rows cost no memory and workers share one copy.

A table on disk is a folder of NumPy's own .npy files beside a JSON of facts: readable anywhere, and without pickle.
Text is stored as its bytes joined and where each ends.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.files import replacing

_FACTS = "facts.json"
Array = NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Table:
    """Columns of equal length, and facts about them."""

    columns: Mapping[str, Array]
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    folder: Path | None = None
    """Where it lies, if it does: a process that gets the table maps the same files."""

    def __getitem__(self, column: str) -> Array:
        return self.columns[column]

    def __contains__(self, column: str) -> bool:
        return column in self.columns

    def text(self, column: str, row: int) -> str:
        """One entry of a column made by `texts`."""
        ends = self.columns[f"{column}.ends"]
        start = int(ends[row - 1]) if row else 0
        return os.fsdecode(self.columns[f"{column}.bytes"][start : int(ends[row])].tobytes())

    def __reduce__(self) -> Any:
        if self.folder is not None:
            return read, (self.folder,)
        return Table, (dict(self.columns), dict(self.facts))


def texts(column: str, values: Iterable[str]) -> dict[str, Array]:
    """The two columns that hold text; any file name survives, even one that is no valid UTF-8."""
    encoded = [os.fsencode(value) for value in values]
    ends = np.cumsum(np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)))
    return {f"{column}.bytes": np.frombuffer(b"".join(encoded), dtype=np.uint8), f"{column}.ends": ends}


def write(folder: Path, columns: Mapping[str, Array], facts: Mapping[str, Any]) -> Table:
    """Write a table whole or not at all, and open it."""
    with replacing(folder, overwrite=True) as fresh:
        fresh.mkdir()
        for name, values in columns.items():
            np.save(fresh / f"{name}.npy", values, allow_pickle=False)
        (fresh / _FACTS).write_text(json.dumps(facts, ensure_ascii=True))
    return read(folder)


def read(folder: Path) -> Table:
    """The table of a folder, its columns as memory maps."""
    facts = json.loads((folder / _FACTS).read_text())
    columns = {path.stem: _mapped(path) for path in sorted(folder.glob("*.npy"))}
    return Table(columns, facts, folder)


def _mapped(path: Path) -> Array:
    values = np.load(path, mmap_mode="r", allow_pickle=False)
    return np.asarray(values)  # a plain view of the map: indexing it is several times faster
