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
from vitrail.data import sample_table
from vitrail.data.sample_table import Array, SampleTable
from vitrail.files import get_cache_home

_INDEX_VERSION = 4
_SETTLE_NANOSECONDS = 2_000_000_000  # ns: a file system's clock is coarse, so a change this young may hide another
Stamps = dict[str, list[int]]


def load_or_build_table(
    source: str,
    list_watched_paths: Callable[[], Iterable[str]],
    build: Callable[[], tuple[Mapping[str, Array], dict[str, Any]]],
) -> SampleTable:
    """What `build` gives, from the cache if none of the `watched` paths of that time has changed since."""
    folder = get_cache_home() / "index" / hashlib.sha256(source.encode(errors="surrogateescape")).hexdigest()[:24]
    known = _load_unchanged_table(folder, source)
    if known is not None:
        return known
    started = time.time_ns()
    columns, facts = build()
    paths = list(list_watched_paths())
    stamps = dict(zip(paths, _read_stamps(paths), strict=True))
    youngest = max((values[0] for values in stamps.values()), default=0)
    settled = youngest < started - _SETTLE_NANOSECONDS
    facts |= {"version": _INDEX_VERSION, "source": source, "watched": stamps if settled else None}
    try:
        return sample_table.write_table(folder, columns, facts)
    except OSError:  # a cache that cannot be written costs time, not the run
        temporary = Path(tempfile.mkdtemp(prefix="vitrail-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return sample_table.write_table(temporary / "index", columns, facts)


def read_stamp(path: str) -> list[int]:
    """When a file or folder changed last, in nanoseconds, and its size; elsewhere, what the store says of it."""
    if remote.is_remote(path):
        return remote.compute_stamp(path)
    status = os.stat(path)  # noqa: PTH116, a path from the file system as it is
    return [status.st_mtime_ns, status.st_size]


def _read_stamps(paths: Sequence[str]) -> Iterator[list[int]]:
    """The stamps of all paths, which lie here or elsewhere together."""
    return (
        remote.map_concurrently(read_stamp, paths) if paths and remote.is_remote(paths[0]) else map(read_stamp, paths)
    )


def _load_unchanged_table(folder: Path, source: str) -> SampleTable | None:
    try:
        known = sample_table.read_table(folder)
        facts = known.metadata
        if facts.get("version") != _INDEX_VERSION or facts.get("source") != source or facts.get("watched") is None:
            return None
        watched = facts["watched"]
        unchanged = all(now == before for now, before in zip(_read_stamps([*watched]), watched.values(), strict=True))
    except (OSError, ValueError, KeyError, EOFError):  # absent, or damaged: it is built again
        return None
    return known if unchanged else None
