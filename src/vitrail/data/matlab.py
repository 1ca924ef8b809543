"""A reader of numbers and structures in MATLAB version 5 files, which hold the labels of some image datasets.

It reads little-endian files, compressed or not: real numeric matrices, and arrays of structures of these and of text.
SciPy reads the whole format, but is larger than vitrail's other dependencies together, torch excepted.
"""

import math
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import DataError

_TYPES = {1: "<i1", 2: "<u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
_MATRIX, _COMPRESSED = 14, 15
_STRUCTURE_CLASS, _TEXT_CLASS = 2, 4
_NUMERIC_CLASSES = range(6, 16)  # double, single and integers; lower numbers are cells, structures, text and others
_UTF16_TYPES = (4, 17)
_COMPLEX = 0x800
_MAX_VARIABLE_BYTES = 2**30  # unpacked size of one variable, against decompression bombs
T = TypeVar("T")


def read_matrices(content: bytes) -> dict[str, NDArray[np.generic]]:
    """The numeric matrices of a file by name, in MATLAB's shapes; other variables are omitted."""
    return _read_variables(content, _parse_matrix)


def read_structures(content: bytes) -> dict[str, list[dict[str, Any]]]:
    """The arrays of structures of a file by name; a field is a matrix, text, or None if it is neither."""
    return _read_variables(content, _parse_structures)


def _read_variables(content: bytes, parse: Callable[[memoryview], tuple[str, T] | None]) -> dict[str, T]:
    """The variables of a file that `parse` accepts, by name."""
    if len(content) < 128 or content[124:128] != b"\x00\x01IM":
        raise DataError("the file is not a little-endian MATLAB file of version 5")
    variables = {}
    try:
        for kind, data in _iter_elements(content, 128):
            if kind == _COMPRESSED:
                kind, data = next(_iter_elements(_decompress(data), 0))
            if kind == _MATRIX and (variable := parse(data)):
                variables[variable[0]] = variable[1]
    except (struct.error, zlib.error, ValueError, KeyError, IndexError, StopIteration) as error:
        raise DataError(f"the MATLAB file is damaged: {type(error).__name__} {error}") from error
    return variables


def _iter_elements(content: bytes, start: int) -> Iterator[tuple[int, memoryview]]:
    """The type and bytes of each data element; up to 4 bytes may be in the tag itself, others are padded to 8."""
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


def _decompress(data: memoryview) -> bytes:
    decompressor = zlib.decompressobj()
    content = decompressor.decompress(data, _MAX_VARIABLE_BYTES)
    if not decompressor.eof:
        raise ValueError(f"a variable is truncated or larger than {_MAX_VARIABLE_BYTES:,} bytes")
    return content


def _parse_matrix(data: memoryview) -> tuple[str, NDArray[np.generic]] | None:
    """The name and values of a matrix, in whatever type the file stores its numbers."""
    parts = _iter_elements(data, 0)  # type: ignore[arg-type]  # struct reads any buffer
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


def _parse_structures(data: memoryview) -> tuple[str, list[dict[str, Any]]] | None:
    """The name and elements of an array of structures, stored element by element."""
    parts = _iter_elements(data, 0)  # type: ignore[arg-type]
    if int.from_bytes(next(parts)[1][:4], "little") & 0xFF != _STRUCTURE_CLASS:
        return None
    count = math.prod(np.frombuffer(next(parts)[1], "<i4").tolist())
    name = bytes(next(parts)[1]).decode("ascii")
    length = int.from_bytes(next(parts)[1], "little")
    joined = bytes(next(parts)[1])
    if not 0 < length <= 64 or count < 0 or len(joined) % length:
        raise ValueError(f"{name} has field names of {length} characters in {len(joined)} bytes")
    starts = range(0, len(joined), length)
    names = [joined[start : start + length].partition(b"\0")[0].decode("ascii") for start in starts]
    values = [_parse_field(field) for _, field in parts]
    if len(values) != count * len(names):
        raise ValueError(f"{name} has {len(values)} values for {count} structures of {len(names)} fields")
    rows = [values[start : start + len(names)] for start in range(0, len(values), len(names))]
    return name, [dict(zip(names, row, strict=True)) for row in rows]


def _parse_field(data: memoryview) -> NDArray[np.generic] | str | None:
    """A matrix of numbers or a line of text."""
    if not len(data):
        return None
    if matrix := _parse_matrix(data):
        return matrix[1]
    parts = _iter_elements(data, 0)  # type: ignore[arg-type]
    if int.from_bytes(next(parts)[1][:4], "little") & 0xFF != _TEXT_CLASS:
        return None
    next(parts), next(parts)  # shape and name
    kind, text = next(parts)
    return bytes(text).decode("utf-16-le" if kind in _UTF16_TYPES else "utf-8")
