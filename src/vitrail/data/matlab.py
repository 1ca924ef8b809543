"""Numbers out of MATLAB's version 5 files, which some image sets keep their labels in.

Little-endian files, compressed or not, and real numeric matrices: what these sets hold. SciPy reads all of the format,
and is more to install than the rest of vitrail's dependencies beside torch.
"""

import math
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import DataError

_TYPES = {1: "<i1", 2: "<u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
_MATRIX, _COMPRESSED = 14, 15
_NUMERIC_CLASSES = range(6, 16)  # double, single and the integers; below are cells, structures, text and the like
_COMPLEX = 0x800
_LIMIT = 2**30  # bytes of one variable, against files that unpack without end


def read(content: bytes) -> dict[str, NDArray[np.generic]]:
    """The numeric matrices of a file by name, with MATLAB's shapes; variables of other kinds are left out."""
    if len(content) < 128 or content[124:128] != b"\x00\x01IM":
        raise DataError("the file is no little-endian MATLAB file of version 5")
    found = {}
    try:
        for kind, data in _elements(content, 128):
            if kind == _COMPRESSED:
                kind, data = next(_elements(_unpacked(data), 0))
            if kind == _MATRIX and (matrix := _matrix(data)):
                found[matrix[0]] = matrix[1]
    except (struct.error, zlib.error, ValueError, KeyError, StopIteration) as error:
        raise DataError(f"the MATLAB file is damaged: {type(error).__name__} {error}") from error
    return found


def _elements(content: bytes, start: int) -> Iterator[tuple[int, memoryview]]:
    """Each data element's type and bytes; up to 4 bytes may stand in the tag itself, and others are padded to 8."""
    view = memoryview(content)
    while start < len(content):
        kind, size = struct.unpack_from("<II", content, start)
        if kind >> 16:
            kind, size, data, following = kind & 0xFFFF, kind >> 16, start + 4, start + 8
        else:
            data = start + 8
            following = data + size + (0 if kind == _COMPRESSED else -size % 8)
        if data + size > len(content) or (data == start + 4 and size > 4):
            raise ValueError(f"an element at byte {start} ends outside of the file")
        yield kind, view[data : data + size]
        start = following


def _unpacked(data: memoryview) -> bytes:
    unpacker = zlib.decompressobj()
    unpacked = unpacker.decompress(data, _LIMIT)
    if not unpacker.eof:
        raise ValueError(f"a variable is cut short or larger than {_LIMIT:,} bytes")
    return unpacked


def _matrix(data: memoryview) -> tuple[str, NDArray[np.generic]] | None:
    """A matrix's name and values, whatever type its numbers were narrowed to in the file."""
    parts = _elements(data, 0)  # type: ignore[arg-type]  # struct reads any buffer
    flags = int.from_bytes(next(parts)[1][:4], "little")
    if flags & 0xFF not in _NUMERIC_CLASSES or flags & _COMPLEX:
        return None
    shape = np.frombuffer(next(parts)[1], "<i4").tolist()
    name = bytes(next(parts)[1]).decode("ascii")
    kind, numbers = next(parts)
    values = np.frombuffer(numbers, _TYPES[kind])
    if min(shape, default=-1) < 0 or math.prod(shape) != values.size:
        raise ValueError(f"{name} has {values.size} numbers for the shape {shape}")
    return name, values.reshape(shape, order="F")
