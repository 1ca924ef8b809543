"""The members of a tar by its headers alone, read as if the tar was made to do harm.

Not by Python's tarfile: a header with a negative size sends it back to where it was, headers that extend one another
end it by recursion, and a number of 200,000 digits takes it half a minute. Here every number is bounded before it is
used, and nothing of a header is kept but a name, a size and a place.

Read are the names and sizes of V7, ustar, GNU (long names, sizes over 8 GiB) and pax. Sparse files are refused.
"""

import os
import re
from collections.abc import Iterator
from typing import IO, NamedTuple

EXTENSION_LIMIT = 2**20  # bytes of one extended header: a path has at most some thousands
CHAIN_LIMIT = 16  # extended headers of one member: 4 occur, a path, a link's path, attributes of it and of all
_BLOCK = 512
_DIRECTORY, _FILE = b"5", (b"0", b"\0", b"7")  # 7: contiguous, which only tapes were
_LONG_NAME, _LONG_LINK = b"L", b"K"
_PAX, _GLOBAL_PAX = (b"x", b"X"), b"g"
_OCTAL_PATTERN = re.compile(rb" *([0-7]*)(?:[ \0].*)?", re.DOTALL)
_PAX_RECORD = re.compile(rb"(\d{1,7}) ([^=]+)=")


class TarMember(NamedTuple):
    """One entry of a tar."""

    name: str
    offset_data: int
    """Where its content begins."""
    size: int
    is_file: bool
    is_folder: bool


class TarError(ValueError):
    """A tar that cannot be read further; the text says what it is or does."""


def walk_members(file: IO[bytes], length: int | None = None) -> Iterator[TarMember]:
    """The members of an open tar in its order. With its `length`, each must end within it."""
    place, name, size, extended = 0, None, None, 0
    while (header := _read_at(file, place, _BLOCK)) != bytes(_BLOCK):  # which ends it
        kind = _check_header(header, place)
        stated = _parse_size(header, place)
        place += _BLOCK
        if kind in (_LONG_NAME, _LONG_LINK, *_PAX, _GLOBAL_PAX):
            extended += 1
            content = _read_extension(file, place, stated, extended)
            if kind == _LONG_NAME:
                name = os.fsdecode(content.partition(b"\0")[0])
            elif kind != _LONG_LINK:
                pax_name, pax_size = _parse_pax_records(content, place)
                if kind == _GLOBAL_PAX and (pax_name, pax_size) != (None, None):
                    raise TarError(f"gives all members one path or size at byte {place:,}: pack it again")
                name, size = pax_name or name, size if pax_size is None else pax_size
            place += _round_up_to_blocks(stated)
            continue
        name = name or _parse_short_name(header)
        is_folder = kind == _DIRECTORY or (kind == b"\0" and name.endswith("/"))
        name = name.rstrip("/") if is_folder else name
        member = TarMember(name, place, stated if size is None else size, kind in _FILE and not is_folder, is_folder)
        if length is not None and not is_folder and place + member.size > length:
            raise TarError(f"is truncated or damaged at {name!r:.120}")
        yield member
        place += (
            0 if is_folder or kind in b"12346" else _round_up_to_blocks(member.size)
        )  # links and devices have no content
        name, size, extended = None, None, 0


def _read_at(file: IO[bytes], offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _round_up_to_blocks(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _check_header(header: bytes, offset: int) -> bytes:
    """The kind of a member, of a header whose checksum is right."""
    if len(header) == _BLOCK:
        rest, checksum = header[:148] + b" " * 8 + header[156:], _parse_number(header[148:156])
        if checksum == sum(rest) or checksum == sum(memoryview(rest).cast("b")):  # signed, as old writers summed
            return header[156:157]
    if offset:
        raise TarError(f"is truncated or damaged at byte {offset:,}")
    raise TarError("is no readable tar (compressed? then it cannot be read at random: unpack it first)")


def _parse_size(header: bytes, offset: int) -> int:
    size = _parse_number(header[124:136])
    if size is None:
        raise TarError(f"is damaged at byte {offset:,}: {header[124:136]!r} is no size")
    return size


def _parse_number(field: bytes) -> int | None:
    """A number in octal digits, or, where it would have too many, in binary behind a byte 128."""
    if field[0] == 128:
        return int.from_bytes(field[1:], "big")
    octal = _OCTAL_PATTERN.fullmatch(field)  # behind a byte 255 it would be negative
    return None if octal is None else int(octal[1] or b"0", 8)


def _parse_short_name(header: bytes) -> str:
    """The name in a header of 512 bytes, behind a prefix unless GNU's tar keeps times in its place."""
    name, prefix = header[:100].partition(b"\0")[0], header[345:500].partition(b"\0")[0]
    return os.fsdecode(name if header[257:265] == b"ustar  \0" or not prefix else prefix + b"/" + name)


def _read_extension(file: IO[bytes], offset: int, size: int, number: int) -> bytes:
    """The content of an extended header, the how-manieth of its member."""
    if number > CHAIN_LIMIT or size > EXTENSION_LIMIT:
        raise TarError(
            f"is damaged at byte {offset - _BLOCK:,}: a member has at most {CHAIN_LIMIT} extended headers"
            f" of {EXTENSION_LIMIT:,} bytes each"
        )
    content = _read_at(file, offset, size)
    if len(content) != size:
        raise TarError(f"is truncated at byte {offset:,}")
    return content


def _parse_pax_records(content: bytes, offset: int) -> tuple[str | None, int | None]:
    """What the records of a pax header, `length key=value\\n` each, say of a member's path and size."""
    found: dict[bytes, bytes] = {}
    start = 0
    while start < len(content) and content[start]:  # zeros fill the rest
        record = _PAX_RECORD.match(content, start)
        end = start + int(record[1]) if record else 0
        if record is None or not record.end() < end <= len(content) or content[end - 1] != ord("\n"):
            raise TarError(f"is damaged at byte {offset + start:,}: a pax header holds what is no record")
        found[record[2]] = content[record.end() : end - 1]
        start = end
    if any(key.startswith(b"GNU.sparse.") for key in found):
        raise TarError(f"holds a sparse file at byte {offset:,}: pack it without --sparse")
    size = found.get(b"size", b"")
    if size and not re.fullmatch(rb"\d{1,19}", size):
        raise TarError(f"is damaged at byte {offset:,}: {size!r:.40} is no size")
    return os.fsdecode(found[b"path"]) if found.get(b"path") else None, int(size) if size else None
