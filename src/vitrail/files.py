"""Atomic writes of files and folders, and the folders where vitrail keeps its own data."""

import contextlib
import difflib
import hashlib
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from vitrail.errors import DataError, UsageError

_MAX_COMPARED_NAMES = 1000
_OPEN_FLAGS = sum(
    getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOCTTY", "O_NONBLOCK", "O_BINARY")
)  # without O_NONBLOCK, opening a pipe would block; systems differ in which of them they have


@contextlib.contextmanager
def write_atomically(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary path that becomes `path` when the block succeeds, and is deleted when it fails.

    The data is on disk before the rename, so a crash leaves either the old file or the complete new one. A folder to
    be overwritten is moved aside first; a crash at that instant leaves both versions in the hidden folder beside it.
    """
    check_path_free(path, overwrite=overwrite)
    make_folder(path.parent)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        fresh = staging / path.name
        yield fresh
        for entry in [fresh, *fresh.rglob("*")] if fresh.is_dir() else [fresh]:
            fsync_path(entry)
        _rename_into_place(fresh, path, backup=staging / "previous")
        fsync_path(path.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def open_regular_file(path: Path, *, name: str | None = None) -> Iterator[IO[bytes]]:
    """Open a regular file for reading. Refuse pipes and devices, which may never start or never end.

    The error uses `name`, or the path where it is None.
    """
    descriptor = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{name or path} is a folder, pipe, socket or device: pass a regular file")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and return when their names are on disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync_path(path.parent)


def check_path_free(path: Path, *, overwrite: bool) -> None:
    """Refuse a path that exists, unless it may be overwritten; never replace a link."""
    if path.is_symlink():
        raise UsageError(f"{path} is a link; pass the file or folder it points to")
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists already; choose another name or overwrite it (--overwrite)")


def suggest_path(path: Path) -> str:
    """What may be meant by a path that does not exist, as the end of an error, if its folder has a similar name."""
    names: list[str] = []
    with contextlib.suppress(OSError):  # no such folder, or not to be read
        names = [entry.name for entry in itertools.islice(path.parent.iterdir(), _MAX_COMPARED_NAMES)]
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f"; did you mean {path.with_name(close[0])}?" if close else ""


def get_data_home() -> Path:
    """The folder of downloaded datasets, by the XDG Base Directory Specification."""
    return _get_home("XDG_DATA_HOME", ".local/share")


def get_cache_home() -> Path:
    """The folder of caches, whose contents can be computed again."""
    return _get_home("XDG_CACHE_HOME", ".cache")


def _get_home(variable: str, default: str) -> Path:
    configured = Path(os.environ.get(variable, ""))
    if not configured.is_absolute():  # the specification says to ignore a relative path
        configured = Path.home() / default
    return configured / "vitrail"


def compute_sha256(*paths: Path) -> str:
    """The hexadecimal SHA-256 of a file's bytes, or of the bytes of several one after another.

    Large blocks keep a background thread from contending with training steps for the interpreter lock.
    """
    size = max(path.stat().st_size for path in paths)
    digest, block = hashlib.sha256(), memoryview(bytearray(min(2**24, size + 1)))
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while length := file.readinto(block):
                digest.update(block[:length])
    return digest.hexdigest()


def _rename_into_place(fresh: Path, path: Path, backup: Path) -> None:
    """Rename `fresh` to `path`; a folder already there moves to `backup`, and back if the rename fails."""
    if not path.is_dir():
        fresh.replace(path)
        return
    if not fresh.is_dir():
        raise UsageError(f"{path} is a folder and cannot be replaced by a file; choose another name")
    path.rename(backup)
    try:
        fresh.rename(path)
    except OSError:
        backup.rename(path)
        raise


def fsync_path(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on disk."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folder; NTFS logs its entries
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows flushes what can be written
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
