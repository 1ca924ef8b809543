"""Reading archives member by member, without extracting them: tars, compressed or not, zips and Debian packages.

The tar reader is for untrusted files and lists members from their headers alone, which Python's tarfile does not do
safely. There a negative size makes it loop, chained extended headers exhaust its recursion, and a number of 200,000
digits takes it half a minute. Here every number is bounded before it is used, and a header yields nothing but a name, a
size and an offset. Supported are the names and sizes of V7, ustar, GNU (long names, sizes over 8 GiB) and pax. Sparse
files are refused.
"""

import bz2
import gzip
import io
import itertools
import lzma
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from vitrail.errors import DataError

MEMBER_LIMIT = 2**28  # bytes; the largest member of any public dataset has 221 million
_DAMAGE_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    *(EOFError, OSError, ValueError, OverflowError, NotImplementedError),
)
_COMPRESSIONS: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
EXTENSION_LIMIT = 2**20  # bytes of one extended header; a path has a few thousand at most
CHAIN_LIMIT = (
    16  # extended headers of one member; 4 occur: its path, a link's path, its attributes, those of all members
)
_BLOCK = 512
_DIRECTORY, _FILE = b"5", (b"0", b"\0", b"7")  # 7: contiguous files, which only tapes had
_LONG_NAME, _LONG_LINK = b"L", b"K"
_PAX, _GLOBAL_PAX = (b"x", b"X"), b"g"
_OCTAL_PATTERN = re.compile(rb" *([0-7]*)(?:[ \0].*)?", re.DOTALL)
_PAX_RECORD = re.compile(rb"(\d{1,7}) ([^=]+)=")


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
    except _DAMAGE_ERRORS as error:
        reason = f"it {error}" if isinstance(error, TarError) else error
        raise DataError(f"{path} cannot be read as an archive: {reason}") from error


def _read_tar_members(path: Path, file: IO[bytes], is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    magic = _read_at(file, 0, 6)
    file.seek(0)
    unpack = next((unpack for start, unpack in _COMPRESSIONS.items() if magic.startswith(start)), None)
    tar = file if unpack is None else unpack(file)
    for member in walk_members(tar):
        name = member.name.removeprefix("./")
        if is_wanted(name):
            check_member(path, name, is_file=member.is_file, size=member.size)
            content = _read_at(tar, member.offset_data, member.size)
            if len(content) != member.size:
                raise EOFError(f"{name!r:.120} is truncated")
            yield name, content


def _read_zip_members(path: Path, file: IO[bytes], is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if is_wanted(member.filename):
                kind = stat.S_IFMT(member.external_attr >> 16)
                is_file = kind in (0, stat.S_IFREG) and not member.flag_bits & 1  # 1: encrypted
                check_member(path, member.filename, is_file=is_file, size=member.file_size)
                yield member.filename, archive.read(member)


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


def read_text_lines(path: Path, template: str, *names: str) -> list[list[str]]:
    """The lines of text files of an archive, without empty ones; `template` makes each name the path of a file."""
    members = [template.format(name) for name in names]
    contents = read_members(path, members)
    return [[line for line in contents[member].decode().splitlines() if line] for member in members]


# --- tar headers ---------------------------------------------------------------------------------------------------


class TarMember(NamedTuple):
    """One entry of a tar."""

    name: str
    offset_data: int
    """Byte offset of its content."""
    size: int
    is_file: bool
    is_folder: bool


class TarError(ValueError):
    """A tar that cannot be read further; the message completes a sentence that starts with its path."""


def walk_members(file: IO[bytes], length: int | None = None, *, start: int = 0) -> Iterator[TarMember]:
    """The members of an open tar, in order. If `length` is given, each must end within it.

    The tar begins at byte `start` of the file, and offsets are relative to that.
    """

    def read_at(offset: int, size: int) -> bytes:
        return _read_at(file, start + offset, size if length is None else max(0, min(size, length - offset)))

    offset, name, size, extended = 0, None, None, 0
    while (header := read_at(offset, _BLOCK)) != bytes(_BLOCK):  # a block of zeros ends the tar
        kind = _check_header(header, offset)
        header_size = _parse_number(header[124:136])
        if header_size is None:
            raise TarError(f"is damaged at byte {offset:,}: {header[124:136]!r} is not a size")
        offset += _BLOCK
        if kind in (_LONG_NAME, _LONG_LINK, *_PAX, _GLOBAL_PAX):
            extended += 1
            content = _read_extension(read_at, offset, header_size, extended)
            if kind == _LONG_NAME:
                name = os.fsdecode(content.partition(b"\0")[0])
            elif kind != _LONG_LINK:
                pax_name, pax_size = _parse_pax_records(content, offset)
                if kind == _GLOBAL_PAX and (pax_name, pax_size) != (None, None):
                    raise TarError(f"sets one path or size for all members at byte {offset:,}: pack it again")
                name, size = pax_name or name, size if pax_size is None else pax_size
            offset += _round_up_to_blocks(header_size)
            continue
        name = name or _parse_short_name(header)
        is_folder = kind == _DIRECTORY or (kind == b"\0" and name.endswith("/"))
        name = name.rstrip("/") if is_folder else name
        is_file = kind in _FILE and not is_folder
        member = TarMember(name, offset, header_size if size is None else size, is_file, is_folder)
        if length is not None and not is_folder and offset + member.size > length:
            raise TarError(f"is truncated or damaged at {name!r:.120}")
        yield member
        has_content = not is_folder and kind not in b"12346"  # links and devices have none
        offset += _round_up_to_blocks(member.size) if has_content else 0
        name, size, extended = None, None, 0


def check_member(archive: Path | str, name: str, *, is_file: bool, size: int = 0) -> None:
    """Refuse a member that is not a regular file, leads outside of the archive, or has a size beyond the limit."""
    path = PurePosixPath(name)
    if not is_file:
        raise DataError(f"{archive} holds {name!r:.120}, which is not a regular file")
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise DataError(f"{archive} holds {name!r:.120}, a path that leads outside of it")
    if size > MEMBER_LIMIT:
        raise DataError(f"{archive} holds {name!r:.120} with {size:,} bytes; the limit is {MEMBER_LIMIT:,}")


def _read_at(file: IO[bytes], offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _round_up_to_blocks(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _check_header(header: bytes, offset: int) -> bytes:
    """Verify the checksum of a header and return the type of its member."""
    if len(header) == _BLOCK:
        rest, checksum = header[:148] + b" " * 8 + header[156:], _parse_number(header[148:156])
        if checksum == sum(rest) or checksum == sum(memoryview(rest).cast("b")):  # signed sums, from old writers
            return header[156:157]
    if offset:
        raise TarError(f"is truncated or damaged at byte {offset:,}")
    raise TarError("is not a readable tar; if it is compressed, unpack it first, as it needs random access")


def _parse_number(field: bytes) -> int | None:
    """A number in octal digits or, if it is too large for them, in binary after a byte 128."""
    if field[0] == 128:
        return int.from_bytes(field[1:], "big")
    octal = _OCTAL_PATTERN.fullmatch(field)  # after a byte 255 a number is negative, which is refused
    return None if octal is None else int(octal[1] or b"0", 8)


def _parse_short_name(header: bytes) -> str:
    """The name in a header of 512 bytes, after its prefix; GNU tar stores times instead of a prefix."""
    name, prefix = header[:100].partition(b"\0")[0], header[345:500].partition(b"\0")[0]
    return os.fsdecode(name if header[257:265] == b"ustar  \0" or not prefix else prefix + b"/" + name)


def _read_extension(read_at: Callable[[int, int], bytes], offset: int, size: int, number: int) -> bytes:
    """Read the content of a member's extended header, given its number among them."""
    if number > CHAIN_LIMIT or size > EXTENSION_LIMIT:
        raise TarError(
            f"is damaged at byte {offset - _BLOCK:,}: a member has at most {CHAIN_LIMIT} extended headers"
            f" of {EXTENSION_LIMIT:,} bytes each"
        )
    content = read_at(offset, size)
    if len(content) != size:
        raise TarError(f"is truncated at byte {offset:,}")
    return content


def _parse_pax_records(content: bytes, offset: int) -> tuple[str | None, int | None]:
    """A member's path and size from a pax header, whose records are `length key=value\\n`."""
    records: dict[bytes, bytes] = {}
    start = 0
    while start < len(content) and content[start]:  # zeros pad the rest
        record = _PAX_RECORD.match(content, start)
        end = start + int(record[1]) if record else 0
        if record is None or not record.end() < end <= len(content) or content[end - 1] != ord("\n"):
            raise TarError(f"is damaged at byte {offset + start:,}: a pax header holds an invalid record")
        records[record[2]] = content[record.end() : end - 1]
        start = end
    if any(key.startswith(b"GNU.sparse.") for key in records):
        raise TarError(f"holds a sparse file at byte {offset:,}: pack it without --sparse")
    size = records.get(b"size", b"")
    if size and not re.fullmatch(rb"\d{1,19}", size):
        raise TarError(f"is damaged at byte {offset:,}: {size!r:.40} is not a size")
    return os.fsdecode(records[b"path"]) if records.get(b"path") else None, int(size) if size else None
