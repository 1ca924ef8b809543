"""The table of a source that takes long to list, kept in the cache for as long as the source is unchanged."""

import atexit
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail import remote
from vitrail.data import table
from vitrail.data.table import Array, Table
from vitrail.files import cache_home

_VERSION = 3
_SETTLED = 2_000_000_000  # ns: a file system's clock is coarse, so a change this young may hide another
Stamps = dict[str, list[int]]


def cached(
    source: str, watched: Callable[[], Iterable[str]], build: Callable[[], tuple[Mapping[str, Array], dict[str, Any]]]
) -> Table:
    """What `build` gives, from the cache if none of the `watched` paths of that time has changed since."""
    folder = cache_home() / "index" / hashlib.sha256(source.encode(errors="surrogateescape")).hexdigest()[:24]
    known = _known(folder, source)
    if known is not None:
        return known
    started = time.time_ns()
    columns, facts = build()
    paths = list(watched())
    stamps = dict(zip(paths, _stamps(paths), strict=True))
    youngest = max((values[0] for values in stamps.values()), default=0)
    settled = youngest < started - _SETTLED
    facts |= {"version": _VERSION, "source": source, "watched": stamps if settled else None}
    try:
        return table.write(folder, columns, facts)
    except OSError:  # a cache that cannot be written costs time, not the run
        temporary = Path(tempfile.mkdtemp(prefix="vitrail-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return table.write(temporary / "index", columns, facts)


def stamp(path: str) -> list[int]:
    """When a file or folder changed last, in nanoseconds, and its size; elsewhere, what the store says of it."""
    if remote.is_remote(path):
        return remote.stamp(path)
    status = os.stat(path)  # noqa: PTH116, a path from the file system as it is
    return [status.st_mtime_ns, status.st_size]


def _stamps(paths: Sequence[str]) -> Iterator[list[int]]:
    """The stamps of all paths, which lie here or elsewhere together."""
    return remote.at_once(stamp, paths) if paths and remote.is_remote(paths[0]) else map(stamp, paths)


def _known(folder: Path, source: str) -> Table | None:
    try:
        known = table.read(folder)
        facts = known.facts
        if facts.get("version") != _VERSION or facts.get("source") != source or facts.get("watched") is None:
            return None
        watched = facts["watched"]
        unchanged = all(now == before for now, before in zip(_stamps([*watched]), watched.values(), strict=True))
    except (OSError, ValueError, KeyError, EOFError):  # absent, or damaged: it is built again
        return None
    return known if unchanged else None
