"""An image's pixels by its first bytes, to decide which upload is decoded first without decoding it.

Nothing else depends on it. Pillow knows more formats and cases, but its time is in the hands of the file.
"""

import math
from typing import Literal

_MAX_JPEG_MARKERS = 64  # before the one with the size
_JPEG_FRAME_MARKERS = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})  # the markers with the size


def estimate_pixels(file: memoryview) -> float:
    """Width times height; infinity if the first bytes do not tell, as in a TIFF."""
    head = bytes(file[:32])
    if len(head) < 32:
        return 0
    if head.startswith(b"\x89PNG"):
        return _parse_integer(head[16:20], "big") * _parse_integer(head[20:24], "big")
    if head.startswith(b"GIF8"):
        return _parse_integer(head[6:8]) * _parse_integer(head[8:10])
    if head.startswith(b"BM"):
        return abs(_parse_integer(head[18:22], signed=True) * _parse_integer(head[22:26], signed=True))
    if head.startswith(b"RIFF"):
        return _estimate_webp(head)
    return _estimate_jpeg(file) if head.startswith(b"\xff\xd8") else math.inf


def _estimate_webp(head: bytes) -> float:
    match head[12:16]:
        case b"VP8X":
            return (1 + _parse_integer(head[24:27])) * (1 + _parse_integer(head[27:30]))
        case b"VP8L":
            sides = _parse_integer(head[21:25])
            return (1 + sides % 2**14) * (1 + (sides >> 14) % 2**14)
        case b"VP8 ":
            return (_parse_integer(head[26:28]) % 2**14) * (_parse_integer(head[28:30]) % 2**14)
    return math.inf


def _estimate_jpeg(file: memoryview) -> float:
    offset = 2
    for _ in range(_MAX_JPEG_MARKERS):
        segment = bytes(file[offset : offset + 9])  # a marker, its length, bits of a sample, height, width
        if len(segment) < 9 or segment[0] != 0xFF:
            break
        if segment[1] in _JPEG_FRAME_MARKERS:
            return _parse_integer(segment[5:7], "big") * _parse_integer(segment[7:9], "big")
        offset += 2 + _parse_integer(segment[2:4], "big")
    return math.inf


def _parse_integer(part: bytes, order: Literal["little", "big"] = "little", *, signed: bool = False) -> int:
    return int.from_bytes(part, order, signed=signed)
