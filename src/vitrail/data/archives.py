"""Reading archives member by member, without extracting them: compressed tars, zips and Debian packages."""

import bz2
import gzip
import io
import itertools
import lzma
import stat
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any

from vitrail.data.tar_headers import TarError, check_member, walk_members
from vitrail.errors import DataError

MEMBER_LIMIT = 2**28  # bytes; the largest member of any public dataset has 221 million
_DAMAGE_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    *(EOFError, OSError, ValueError, OverflowError, NotImplementedError),
)
_COMPRESSIONS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ": lzma.LZMAFile,
}


def iter_members(path: Path, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """The wanted files of a tar, zip or deb, as (name, content) in archive order."""
    try:
        with path.open("rb") as file:
            magic = file.read(8)
            file.seek(0)
            if magic.startswith(b"PK"):
                yield from _read_zip_members(path, file, is_wanted)
            else:
                tar = _open_debian_data(file) if magic == b"!<arch>\n" else file
                yield from _read_tar_members(path, tar, is_wanted)
    except TarError as error:
        raise DataError(f"{path} cannot be read as an archive: it {error}") from error
    except _DAMAGE_ERRORS as error:
        raise DataError(f"{path} cannot be read as an archive: {error}") from error


def _read_tar_members(path: Path, file: IO[bytes], is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    magic = file.read(6)
    file.seek(0)
    unpack = next((unpack for start, unpack in _COMPRESSIONS.items() if magic.startswith(start)), None)
    tar = file if unpack is None else unpack(file)
    for member in walk_members(tar):
        name = member.name.removeprefix("./")
        if is_wanted(name):
            _check_member(path, name, is_file=member.is_file, size=member.size)
            tar.seek(member.offset_data)
            content = tar.read(member.size)
            if len(content) != member.size:
                raise EOFError(f"{name!r:.120} is truncated")
            yield name, content


def _read_zip_members(path: Path, file: IO[bytes], is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if is_wanted(member.filename):
                kind = stat.S_IFMT(member.external_attr >> 16)
                is_file = kind in (0, stat.S_IFREG) and not member.flag_bits & 1  # 1: encrypted
                _check_member(path, member.filename, is_file=is_file, size=member.file_size)
                yield member.filename, archive.read(member)


def _check_member(path: Path, name: str, *, is_file: bool, size: int) -> None:
    check_member(path, name, is_file=is_file)
    if not 0 <= size <= MEMBER_LIMIT:
        raise DataError(f"{path} holds {name!r:.120} with {size:,} bytes; the limit is {MEMBER_LIMIT:,}")


def _open_debian_data(file: IO[bytes]) -> IO[bytes]:
    """The tar that holds the files of a Debian package, which is an `ar` archive of three members."""
    file.seek(8)
    while header := file.read(60):
        name, digits = header[:16].decode("ascii").strip(" /"), header[48:58].strip()
        if not digits.isdigit():
            raise ValueError(f"the Debian package has a member size of {digits!r}")
        size = int(digits)
        if name.startswith("data.tar"):
            return io.BytesIO(file.read(size))
        file.seek(size + size % 2, io.SEEK_CUR)
    raise ValueError("the Debian package has no data.tar")


def read_members(path: Path, names: Collection[str]) -> dict[str, bytes]:
    """Read the named files of an archive, and stop after the last of them."""
    contents = dict(itertools.islice(iter_members(path, set(names).__contains__), len(names)))
    for name in names:
        if name not in contents:
            raise DataError(f"{path} does not contain {name} exactly once")
    return contents


def read_text_lines(path: Path, *names: str) -> list[list[str]]:
    """The lines of each named text file of an archive, without empty ones."""
    texts = read_members(path, names)
    return [[line for line in texts[name].decode().splitlines() if line] for name in names]
