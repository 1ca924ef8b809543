"""How many pixels a file says it has, by a look at its first bytes: who is decoded first must not depend on decoding.

Nothing else depends on it. Pillow knows more formats and cases, and takes as long as a file wants.
"""

import math
from typing import Literal

_MARKERS = 64  # of a JPEG, before it says its size
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})  # the markers that say it


def estimate_pixels(file: memoryview) -> float:
    """Width times height; infinity where that is not seen at once, as in a TIFF."""
    head = bytes(file[:32])
    if len(head) < 32:
        return 0
    if head.startswith(b"\x89PNG"):
        return _number(head[16:20], "big") * _number(head[20:24], "big")
    if head.startswith(b"GIF8"):
        return _number(head[6:8]) * _number(head[8:10])
    if head.startswith(b"BM"):
        return abs(_number(head[18:22], signed=True) * _number(head[22:26], signed=True))
    if head.startswith(b"RIFF"):
        return _estimate_webp(head)
    return _estimate_jpeg(file) if head.startswith(b"\xff\xd8") else math.inf


def _estimate_webp(head: bytes) -> float:
    match head[12:16]:
        case b"VP8X":
            return (1 + _number(head[24:27])) * (1 + _number(head[27:30]))
        case b"VP8L":
            sides = _number(head[21:25])
            return (1 + sides % 2**14) * (1 + (sides >> 14) % 2**14)
        case b"VP8 ":
            return (_number(head[26:28]) % 2**14) * (_number(head[28:30]) % 2**14)
    return math.inf


def _estimate_jpeg(file: memoryview) -> float:
    place = 2
    for _ in range(_MARKERS):
        segment = bytes(file[place : place + 9])  # a marker, its length, bits of a sample, height, width
        if len(segment) < 9 or segment[0] != 0xFF:
            break
        if segment[1] in _FRAMES:
            return _number(segment[5:7], "big") * _number(segment[7:9], "big")
        place += 2 + _number(segment[2:4], "big")
    return math.inf


def _number(part: bytes, order: Literal["little", "big"] = "little", *, signed: bool = False) -> int:
    return int.from_bytes(part, order, signed=signed)
