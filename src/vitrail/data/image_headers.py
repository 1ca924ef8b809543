"""What is known of an image before its pixels: formats, sizes, and the checks that refuse a harmful file.

Files are read as if they were made to do harm. A file that costs more than its pixels do is refused before decoding,
except for AVIF and HEIF: their frames may be larger than the file states, so the decoders' own limits hold there
(SECURITY.md).
"""

import contextlib
import io
import os
import re
import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from PIL import AvifImagePlugin, ExifTags, Image, UnidentifiedImageError, features
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile

from vitrail.errors import DataError
from vitrail.files import open_regular_file

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "HEIF")
"""All formats that may be read; `get_readable_formats` lists those that this process can read."""
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Suffixes of images that can be read everywhere."""
_OPTIONAL_SUFFIXES = {".avif": "AVIF", ".heic": "HEIF", ".heif": "HEIF"}
_RAW_SUFFIXES = (".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf")
UNSUPPORTED_SUFFIXES = (*_OPTIONAL_SUFFIXES, ".jxl", ".jp2", *_RAW_SUFFIXES)
"""Suffixes of photos that are never read, or only with an extra decoder."""
FILE_LIMIT = 2**30  # bytes
PIXEL_LIMIT = 89_478_485  # where Pillow begins to warn; at twice that it refuses
JPEG_PIXEL_LIMIT = 205_000_000  # decoded at half the sides: 8 bytes a pixel then cost no more than other formats
ASPECT_RATIO_LIMIT = 600  # a line of pixels is no picture, and resized it would fill the memory
SCAN_LIMIT = 100  # of a JPEG: encoders write about 10, and each costs as much as a pass over all pixels
LARGE_SCAN_LIMIT = 40  # where a pass is over more than PIXEL_LIMIT
MARKER_LIMIT = 2_000  # before a JPEG's first scan: a large color profile and a depth map take some hundreds
JUNK_LIMIT = 2**16  # bytes between those markers, which Pillow skips one by one
PROFILE_LIMIT = 16  # color profiles of a PNG
TILE_LIMIT = 2**22  # pixels of a TIFF's tile that is larger than the image
DECODE_ERRORS = (
    *(OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error),
    RuntimeError,  # from libavif
)
"""The exceptions that Pillow raises on damaged files."""
_JPEG_LIMIT_NOTE = f", of a JPEG {JPEG_PIXEL_LIMIT:,}"
_SOI, _SOS, _EOI = 0xD8, 0xDA, 0xD9
_FRAME_MARKERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers that state the size
_MARKER_PATTERN = re.compile(rb"\xff([\x02-\xcf\xd8-\xfe])")  # none of those that stand within a scan
_MARKERS_WITHOUT_LENGTH = {0xC8, _SOI, _EOI, *range(0xF0, 0xFE)}


class ImageHeader(NamedTuple):
    """The format and the upright size that an image file states."""

    format: str
    """One of FORMATS."""
    height: int
    width: int


def read_header(source: Path | bytes, *, name: str) -> ImageHeader:
    """Read an image's format and size, and no more of the file than that takes. Errors call it `name`."""
    with wrap_decode_errors(name), _open_source(source, name) as file:
        head = file.read(2**16)
        if bytes((0xFF, _SOS)) not in head:
            head += file.read() if head.startswith(bytes((0xFF, _SOI))) else b""
        _check_markers(head, name)
        _check_profiles(head, name)
        file.seek(0)
        large = is_large_jpeg(head)
        with JpegImageFile(file) if large else Image.open(file, formats=get_readable_formats()) as image:
            height, width = check_image(image, name, JPEG_PIXEL_LIMIT if large else None)
            image_format = "JPEG" if image.format == "MPO" else str(image.format)  # MPO: a JPEG with others behind it
    return ImageHeader(image_format, height, width)


def read_image_file(path: Path, *, name: str) -> bytes:
    """Read a whole image file. Errors call it `name`."""
    with _open_source(path, name) as file:
        return file.read(_check_file_size(file, name))  # and no more, in case it grows meanwhile


@contextlib.contextmanager
def _open_source(source: Path | bytes, name: str) -> Iterator[IO[bytes]]:
    if isinstance(source, bytes):
        yield io.BytesIO(source)
        return
    with open_regular_file(source, name=name) as file:
        _check_file_size(file, name)
        yield file


def _check_file_size(file: IO[bytes], name: str) -> int:
    size = os.fstat(file.fileno()).st_size
    if size > FILE_LIMIT:
        raise DataError(f"{name} has {size:,} bytes; images of at most {FILE_LIMIT:,} are read")
    return size


@contextlib.contextmanager
def wrap_decode_errors(name: str) -> Iterator[None]:
    """Turn whatever fails while an image is read into a DataError of one line that begins with its name."""
    try:
        yield
    except Image.DecompressionBombError as error:
        raise DataError(f"{name} has too many pixels: at most {PIXEL_LIMIT:,} are decoded{_JPEG_LIMIT_NOTE}") from error
    except UnidentifiedImageError as error:
        formats = ", ".join(get_readable_formats())
        raise DataError(f"{name} is not an image of a known format ({formats}){suggest_decoder([name])}") from error
    except FileNotFoundError as error:
        raise DataError(f"{name} does not exist") from error
    except DECODE_ERRORS as error:
        raise DataError(f"{name} cannot be decoded: {' '.join(str(error).split())}") from error


# --- formats ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def get_readable_formats() -> tuple[str, ...]:
    """List those of FORMATS that this process can read."""
    missing = set() if features.check("avif") else {"AVIF"}
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # images are decoded in parallel already
    try:
        import pillow_heif

        pillow_heif.register_heif_opener(thumbnails=False, decode_threads=1)
    except ImportError:
        missing.add("HEIF")
    return tuple(name for name in FORMATS if name not in missing)


@lru_cache(maxsize=1)
def get_image_suffixes() -> tuple[str, ...]:
    """List the suffixes of the images that this process can read."""
    readable = get_readable_formats()
    return (*IMAGE_SUFFIXES, *(suffix for suffix, name in _OPTIONAL_SUFFIXES.items() if name in readable))


def suggest_decoder(names: Iterable[str]) -> str:
    """Return a hint on how to read HEIC where some files are HEIC and nothing reads them yet; else an empty string."""
    unread = "HEIF" not in get_readable_formats() and any(name.lower().endswith((".heic", ".heif")) for name in names)
    return "; pip install 'vitrail[heif]' reads .heic" if unread else ""


# --- sizes and orientation of an opened image ------------------------------------------------------------------------


def check_image(image: Image.Image, name: str, limit: int | None = None) -> tuple[int, int]:
    """Return the height and width of the upright image, or refuse an image that is too large. Reads the header only."""
    width, height = _get_stored_size(image)
    check_size(height, width, name, limit)
    _check_tiles(image, name)
    return (width, height) if read_orientation(image) >= 5 else (height, width)


def check_size(height: int, width: int, name: str, limit: int | None = None) -> None:
    """Refuse more than `limit` pixels (PIXEL_LIMIT by default), and sides too unequal."""
    limit = limit or PIXEL_LIMIT
    if not 0 < width * height <= limit:
        note = "" if limit == JPEG_PIXEL_LIMIT else _JPEG_LIMIT_NOTE
        raise DataError(f"{name} has {width} x {height} pixels; from 1 to {limit:,} are decoded{note}")
    if max(width, height) > ASPECT_RATIO_LIMIT * min(width, height):
        raise DataError(f"{name} has {width} x {height} pixels; one side is over {ASPECT_RATIO_LIMIT} times the other")


def read_orientation(image: Image.Image) -> int:
    """Read the EXIF orientation, 1 to 8. A damaged EXIF block counts as 1 and costs the image nothing else."""
    try:
        orientation = int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except DECODE_ERRORS:
        return 1
    return orientation if 1 <= orientation <= 8 else 1


def _get_stored_size(image: Image.Image) -> tuple[int, int]:
    """Return width and height as stored. Some versions of Pillow give those of an unloaded TIFF already rotated."""
    if isinstance(image, TiffImageFile) and image.tile:  # not loaded
        return image.tag_v2[ExifTags.Base.ImageWidth], image.tag_v2[ExifTags.Base.ImageLength]
    return image.size


def _check_tiles(image: Image.Image, name: str) -> None:
    """Refuse a TIFF with tiles far larger than itself: each is unpacked whole, whatever is kept of it."""
    if isinstance(image, TiffImageFile):
        width, height = (image.tag_v2.get(tag, 0) for tag in (ExifTags.Base.TileWidth, ExifTags.Base.TileLength))
        if width * height > max(TILE_LIMIT, image.width * image.height):
            raise DataError(f"{name} has tiles of {width} x {height} pixels, far larger than itself: save it again")


# --- files that would take longer than their pixels ------------------------------------------------------------------


def check_file_structure(content: bytes, name: str) -> None:
    """Refuse a JPEG or PNG whose markers, scans or color profiles would take longer than its pixels."""
    if _check_markers(content, name):
        limit = LARGE_SCAN_LIMIT if is_large_jpeg(content) else SCAN_LIMIT
        if _count_byte_pair(content, bytes((0xFF, _SOS))) > limit:  # counts embedded previews too
            _check_scans(content, name, limit)
    _check_profiles(content, name)


def is_large_jpeg(content: bytes) -> bool:
    """Tell whether a file is a JPEG of more than PIXEL_LIMIT pixels, which is decoded at half its sides."""
    height, width = _read_jpeg_size(content)
    return height * width > PIXEL_LIMIT


def _check_markers(content: bytes, name: str) -> bool:
    """Refuse a JPEG with much before its first scan, which Pillow reads in Python; tell whether more may follow."""
    markers, junk, components = 0, 0, 0
    for kind, skipped, start in _walk_markers(content):
        if kind == _SOS:
            return content[start + 2 : start + 3] != bytes((components,))
        if kind in (0xC0, 0xC1):  # a frame whose components may come together, in the one scan it then has
            components = content[start + 7] if start + 7 < len(content) else 0
        markers, junk = markers + 1, junk + skipped
        if markers > MARKER_LIMIT or junk > JUNK_LIMIT:
            raise DataError(
                f"{name} has over {MARKER_LIMIT:,} markers or {JUNK_LIMIT:,} bytes between them before its pixels;"
                " no camera writes this: save it again"
            )
    return False


def _check_scans(content: bytes, name: str, limit: int) -> None:
    scans = 0
    for kind, _, _ in _walk_markers(content):
        if kind == _EOI and scans:
            return
        scans += kind == _SOS
        if scans > limit:
            raise DataError(f"{name} has over {limit} scans; encoders write about 10: save it again")


def _walk_markers(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield each marker of a JPEG: kind, bytes skipped before it, start of its segment. Other files yield nothing.

    Where no marker comes for long, kind 0 stands for the bytes skipped so far.
    """
    start = 2 if content.startswith(bytes((0xFF, _SOI))) else len(content)
    while start < len(content):
        marker = _MARKER_PATTERN.search(content, start, start + JUNK_LIMIT)
        if marker is None:
            yield 0, min(JUNK_LIMIT, len(content) - start), start
            start += JUNK_LIMIT - 1  # its last byte may be a marker's first
            continue
        kind, skipped, start = marker[1][0], marker.start() - start, marker.end()
        yield kind, skipped, start
        if kind not in _MARKERS_WITHOUT_LENGTH:
            start += int.from_bytes(content[start : start + 2], "big")


def _read_jpeg_size(content: bytes) -> tuple[int, int]:
    """Return height and width as a JPEG states them; zeros for other files."""
    for kind, _, start in _walk_markers(content):
        if kind in _FRAME_MARKERS:
            height, width = content[start + 3 : start + 5], content[start + 5 : start + 7]
            return int.from_bytes(height, "big"), int.from_bytes(width, "big")
        if kind == _SOS:
            break
    return 0, 0


def _check_profiles(content: bytes, name: str) -> None:
    """Refuse a PNG with many color profiles, each of which Pillow unpacks; a valid one has at most one."""
    start, profiles = 8, 0
    while content.startswith(b"\x89PNG") and start < len(content):
        profiles += content[start + 4 : start + 8] == b"iCCP"
        start += 12 + int.from_bytes(content[start : start + 4], "big")
        if profiles > PROFILE_LIMIT:
            raise DataError(f"{name} has over {PROFILE_LIMIT} color profiles; a PNG has one at most: save it again")


def _count_byte_pair(content: bytes, pair: bytes) -> int:
    """Count how often two bytes follow each other, ten times as fast as bytes.count."""
    word = np.frombuffer(pair, dtype=np.uint16)[0]
    halves = (np.frombuffer(content, np.uint16, (len(content) - first) // 2, first) for first in (0, 1))
    return sum(int(np.count_nonzero(half == word)) for half in halves)
