"""Files and folders written whole or not at all, and where vitrail keeps its own."""

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from vitrail.errors import DataError, UsageError


@contextlib.contextmanager
def write_atomically(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A path to write a file or folder at, which becomes `path` when the block ends well and vanishes otherwise.

    The data is on disk before the name changes, so a crash leaves a file as it was or as it should be. A folder that
    is overwritten is set aside first; a crash in that instant leaves both versions in the hidden folder beside it.
    """
    check_path_free(path, overwrite=overwrite)
    make_folder(path.parent)
    workshop = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        fresh = workshop / path.name
        yield fresh
        for written in [fresh, *fresh.rglob("*")] if fresh.is_dir() else [fresh]:
            fsync_path(written)
        _rename_into_place(fresh, path, backup=workshop / "previous")
        fsync_path(path.parent)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


@contextlib.contextmanager
def open_regular_file(path: Path, *, name: str | None = None) -> Iterator[IO[bytes]]:
    """Open a regular file to read. A pipe or device may have no end, or never begin: it is refused, by `name`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)  # or a pipe's opening waits
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{name or path} is a folder, pipe, socket or device: give a regular file")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing; their names are on disk when this returns."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        fsync_path(each.parent)


def check_path_free(path: Path, *, overwrite: bool) -> None:
    """Refuse a name that is taken, unless it may be overwritten; a link is never replaced."""
    if path.is_symlink():
        raise UsageError(f"{path} is a link; give the file or folder it points to")
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists already; choose another name or overwrite it (--overwrite, overwrite=True)")


def get_data_home() -> Path:
    """Where data sets that were got are kept: the XDG base directories' rule."""
    return _get_home("XDG_DATA_HOME", ".local/share")


def get_cache_home() -> Path:
    """Where what can be computed again is kept."""
    return _get_home("XDG_CACHE_HOME", ".cache")


def _get_home(variable: str, default: str) -> Path:
    given = Path(os.environ.get(variable, ""))  # a relative path is to be ignored, says the specification
    return (given if given.is_absolute() else Path.home() / default) / "vitrail"


def compute_sha256(path: Path) -> str:
    """The hexadecimal sha256 of a file's bytes.

    In pieces so large that a thread in the background hardly asks for the interpreter's lock, for which the steps of a
    run would wait, and it for them.
    """
    found, piece = hashlib.sha256(), memoryview(bytearray(min(2**24, path.stat().st_size + 1)))
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(piece):
            found.update(piece[:length])
    return found.hexdigest()


def _rename_into_place(fresh: Path, path: Path, backup: Path) -> None:
    """Give `fresh` the name `path`; a folder of that name goes `aside` and comes back if this fails."""
    if not path.is_dir():
        fresh.replace(path)
        return
    if not fresh.is_dir():
        raise UsageError(f"{path} is a folder, and a file is to be written; choose another name")
    path.rename(backup)
    try:
        fresh.rename(path)
    except OSError:
        backup.rename(path)
        raise


def fsync_path(path: Path) -> None:
    """Return when a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
