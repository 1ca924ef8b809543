"""Image bytes to pixels, the same in every command.

JPEG, PNG, WebP, BMP, GIF, TIFF and AVIF are read, fully, and HEIF where pillow-heif is installed (the extra `heif`); a
truncated file is an error. EXIF rotation is applied, 16 bits are scaled to 8 rather than clipped, floats from 0 to 1,
255 or 65535 likewise, CMYK becomes RGB, transparency is laid on white, and of an animation the first frame counts.
Pillow does this. Where simplejpeg is installed (the extra `fast`) it decodes plain JPEGs in Pillow's place, in every
command alike, after it has shown once a process that its pixels are Pillow's to the bit.

A JPEG of more pixels than fit is decoded at half its sides, which libjpeg does while it decodes: a photo of 200
megapixels gives 50, the same in every command.

Files are read as if they were made to do harm. What costs more than its pixels do is refused before it is decoded, but
for AVIF and HEIF, whose frames may be larger than the file states: there the decoders' own limits hold (SECURITY.md).
Pixels are converted strip by strip, so that memory holds the decoded image and the result, and no third copy.
"""

import contextlib
import io
import os
import re
import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import AvifImagePlugin, ExifTags, Image, UnidentifiedImageError, features
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor

from vitrail.errors import DataError
from vitrail.files import open_regular_file

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "HEIF")
"""All that may be read; `readable_formats` are those that can be, here."""
_OPTIONAL_SUFFIXES = {".avif": "AVIF", ".heic": "HEIF", ".heif": "HEIF"}
UNSUPPORTED_SUFFIXES = (
    *_OPTIONAL_SUFFIXES,
    ".jxl",
    ".jp2",
    ".dng",
    ".cr2",
    ".cr3",
    ".nef",
    ".arw",
    ".orf",
    ".rw2",
    ".raf",
)
"""Of photos that are read nowhere, or not without a decoder."""
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Of images that can be read everywhere."""
FILE_LIMIT = 2**30  # bytes
PIXEL_LIMIT = 89_478_485  # where Pillow begins to warn; at twice that it refuses
JPEG_PIXEL_LIMIT = (
    205_000_000  # pixels of a JPEG, decoded at half its sides: at 8 bytes a pixel no more than others take
)
ASPECT_RATIO_LIMIT = 600  # of the sides: a line of pixels is no picture, and resized it would fill the memory
DECODE_ERRORS = (
    *(OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error),
    RuntimeError,  # libavif's
)
"""What Pillow raises of files that are damaged."""
SCAN_LIMIT = 100  # of a JPEG: encoders write about 10, and each costs as much as a pass over all pixels
LARGE_SCAN_LIMIT = 40  # where a pass is over more than PIXEL_LIMIT
MARKER_LIMIT = 2_000  # before a JPEG's first scan: a large color profile and a depth map take some hundreds
JUNK_LIMIT = 2**16  # bytes between those markers, which Pillow skips one by one
PROFILE_LIMIT = 16  # of a PNG
TILE_LIMIT = 2**22  # pixels of a TIFF's tile that is larger than the image
_STRIP_PIXELS = 2**20  # pixels that are converted at once
_CHANNEL_MODES = {1: "L", 3: "RGB"}
_FLOAT_WHITE_LEVELS = (1, 255, 65535)  # levels of white in float images
_JPEG_LIMIT_NOTE = f", of a JPEG {JPEG_PIXEL_LIMIT:,}"
_SOI, _SOS, _EOI = 0xD8, 0xDA, 0xD9
_FRAME_MARKERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers that state the size
_MARKER_PATTERN = re.compile(rb"\xff([\x02-\xcf\xd8-\xfe])")  # none of those that stand within a scan
_MARKERS_WITHOUT_LENGTH = {0xC8, _SOI, _EOI, *range(0xF0, 0xFE)}

PixelArray = NDArray[np.uint8]  # (H, W) or (H, W, C)
ImageSource = str | Path | bytes | Image.Image | PixelArray


def decode(source: ImageSource, channels: int = 3, *, name: str | None = None) -> Tensor:
    """A path, the bytes of an image file, a Pillow image or an array -> uint8 (C, H, W). Errors call it `name`."""
    return open_image(source, name=name).decode_pixels(channels)


class EncodedImage(NamedTuple):
    """An image whose header was read: its size is known, and its pixels can be had."""

    name: str
    height: int
    width: int
    jpeg_bytes: bytes | None
    """The file, where simplejpeg can decode it."""
    image: Image.Image | None
    """All others."""
    reduction: int = 1
    """By which the sides of the file were divided."""

    def decode_pixels(self, channels: int = 3, min_rows: int | None = None) -> Tensor:
        """uint8 (C, H, W). With `rows`, at least so many: what lies below may be left out where that saves time."""
        if channels not in _CHANNEL_MODES:
            raise DataError(f"image files hold 1 or 3 channels and the model takes {channels}: give it tensors instead")
        with _wrap_decode_errors(self.name):
            found = None
            if self.jpeg_bytes is not None and channels == 3:
                found = _decode_with_simplejpeg(self.jpeg_bytes, self.height, self.width, min_rows)
            if found is None:
                found = _convert_to_pixels(
                    _open_with_pillow(self.jpeg_bytes) if self.image is None else self.image, channels
                )
        return torch.from_numpy(found).permute(2, 0, 1)


def open_image(source: ImageSource, *, name: str | None = None) -> EncodedImage:
    """The image of a source, its header read and its size found acceptable."""
    if not isinstance(source, str | Path | bytes | Image.Image | np.ndarray):
        kind = type(source).__name__
        raise DataError(f"an image is a path, the bytes of a file, a Pillow image or a NumPy array, not {kind}")
    name = name or (str(source) if isinstance(source, str | Path) else "the image")
    with _wrap_decode_errors(name):
        if isinstance(source, np.ndarray):
            source = _convert_array(source, name)
        if isinstance(source, Image.Image):
            return _check_image(name, source)
        content = source if isinstance(source, bytes) else read_image_file(Path(source), name=name)
        _check_jpeg(content, name)
        _check_profiles(content, name)
        if _is_large_jpeg(content):
            return _open_large_jpeg(content, name)
        size = _read_plain_jpeg_size(content)
        if size is None:
            return _check_image(name, _open_with_pillow(content))
        _check_size(*size, name, PIXEL_LIMIT)
        return EncodedImage(name, *size, content, None)


class ImageHeader(NamedTuple):
    """What an image file says before its pixels."""

    format: str
    """One of FORMATS."""
    height: int
    width: int


def read_header(source: Path | bytes, *, name: str) -> ImageHeader:
    """Read an image's format and size, and of a file no more than it takes; errors call it `name`."""
    with _wrap_decode_errors(name), _open_source(source, name) as file:
        head = file.read(2**16)
        if bytes((0xFF, _SOS)) not in head:
            head += file.read() if head.startswith(bytes((0xFF, _SOI))) else b""
        _check_markers(head, name)
        _check_profiles(head, name)
        file.seek(0)
        large = _is_large_jpeg(head)
        with JpegImageFile(file) if large else Image.open(file, formats=get_readable_formats()) as image:
            encoded = _check_image(name, image, JPEG_PIXEL_LIMIT if large else PIXEL_LIMIT)
            kind = str(image.format)
    return ImageHeader(
        "JPEG" if kind == "MPO" else kind, encoded.height, encoded.width
    )  # MPO: a JPEG with others behind it


def read_image_file(path: Path, *, name: str) -> bytes:
    """Read an image file, whole; errors call it `name`."""
    with _open_source(path, name) as file:
        return file.read(_check_file_size(file, name))  # and no more, should it grow meanwhile


@lru_cache(maxsize=1)
def get_readable_formats() -> tuple[str, ...]:
    """Those of FORMATS that can be read in this process."""
    missing = set() if features.check("avif") else {"AVIF"}
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # images are decoded side by side already
    try:
        import pillow_heif

        pillow_heif.register_heif_opener(thumbnails=False, decode_threads=1)
    except ImportError:
        missing.add("HEIF")
    return tuple(kind for kind in FORMATS if kind not in missing)


@lru_cache(maxsize=1)
def get_image_suffixes() -> tuple[str, ...]:
    """The suffixes of the images that can be read in this process."""
    return (*IMAGE_SUFFIXES, *(suffix for suffix, kind in _OPTIONAL_SUFFIXES.items() if kind in get_readable_formats()))


def suggest_decoder(names: Iterable[str]) -> str:
    """What reads those of the files that are HEIC, where nothing does yet; else nothing."""
    unread = "HEIF" not in get_readable_formats() and any(name.lower().endswith((".heic", ".heif")) for name in names)
    return "; pip install 'vitrail[heif]' reads .heic" if unread else ""


def get_jpeg_decoder_name() -> str:
    """What decodes JPEGs in this process, for a run's records."""
    get_readable_formats()  # loads its modules
    return "Pillow" if _load_simplejpeg() is None else "simplejpeg, bit-equal to Pillow"


@contextlib.contextmanager
def _wrap_decode_errors(name: str) -> Iterator[None]:
    """Whatever goes wrong with an image is said in one line that begins with its name."""
    try:
        yield
    except Image.DecompressionBombError as error:
        raise DataError(f"{name} has too many pixels: at most {PIXEL_LIMIT:,} are decoded{_JPEG_LIMIT_NOTE}") from error
    except UnidentifiedImageError as error:
        known = ", ".join(get_readable_formats())
        raise DataError(f"{name} is no image of a known kind ({known}){suggest_decoder([name])}") from error
    except FileNotFoundError as error:
        raise DataError(f"{name} does not exist") from error
    except DECODE_ERRORS as error:
        raise DataError(f"{name} cannot be decoded: {' '.join(str(error).split())}") from error


def _convert_array(array: PixelArray, name: str) -> Image.Image:
    """The image of an array (H, W) or (H, W, C): grey, RGB, or RGB with transparency."""
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))):
        raise DataError(
            f"{name} is an array of {array.dtype}, {array.shape}; an image is uint8, (H, W) or (H, W, C) with 1, 3 or 4"
        )
    if not array.size:
        raise DataError(f"{name} is an array of {array.shape}, which has no pixel")
    flat = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    return Image.fromarray(np.ascontiguousarray(flat))


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


# --- files that would take longer than their pixels ------------------------------------------------------------------


def _check_jpeg(content: bytes, name: str) -> None:
    """Refuse a JPEG whose markers or scans would take longer than its pixels; other files pass."""
    if _check_markers(content, name):
        limit = LARGE_SCAN_LIMIT if _is_large_jpeg(content) else SCAN_LIMIT
        if _count_byte_pair(content, bytes((0xFF, _SOS))) > limit:  # embedded previews too
            _check_scans(content, name, limit)


def _check_markers(content: bytes, name: str) -> bool:
    """Refuse a JPEG with much before its first scan, which Pillow reads in Python; whether several scans may follow."""
    markers, junk, components = 0, 0, 0
    for kind, skipped, place in _walk_markers(content):
        if kind == _SOS:
            return content[place + 2 : place + 3] != bytes((components,))
        if kind in (0xC0, 0xC1):  # a frame whose components may come together, in the one scan it then has
            components = content[place + 7] if place + 7 < len(content) else 0
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
    """The markers of a JPEG: kind, bytes skipped before it, and where its segment begins; nothing of other files.

    Where none comes for long, kind 0 stands for what was skipped so far.
    """
    place = 2 if content.startswith(bytes((0xFF, _SOI))) else len(content)
    while place < len(content):
        found = _MARKER_PATTERN.search(content, place, place + JUNK_LIMIT)
        if found is None:
            yield 0, min(JUNK_LIMIT, len(content) - place), place
            place += JUNK_LIMIT - 1  # its last byte may be a marker's first
            continue
        kind, skipped, place = found[1][0], found.start() - place, found.end()
        yield kind, skipped, place
        if kind not in _MARKERS_WITHOUT_LENGTH:
            place += int.from_bytes(content[place : place + 2], "big")


def _read_jpeg_size(content: bytes) -> tuple[int, int]:
    """Height and width as a JPEG states them; zeros of other files."""
    for kind, _, place in _walk_markers(content):
        if kind in _FRAME_MARKERS:
            height, width = content[place + 3 : place + 5], content[place + 5 : place + 7]
            return int.from_bytes(height, "big"), int.from_bytes(width, "big")
        if kind == _SOS:
            break
    return 0, 0


def _is_large_jpeg(content: bytes) -> bool:
    height, width = _read_jpeg_size(content)
    return height * width > PIXEL_LIMIT


def _check_profiles(content: bytes, name: str) -> None:
    """Refuse a PNG with many color profiles, each of which Pillow unpacks; of a sound one there is one at most."""
    place, profiles = 8, 0
    while content.startswith(b"\x89PNG") and place < len(content):
        profiles += content[place + 4 : place + 8] == b"iCCP"
        place += 12 + int.from_bytes(content[place : place + 4], "big")
        if profiles > PROFILE_LIMIT:
            raise DataError(f"{name} has over {PROFILE_LIMIT} color profiles; a PNG has one at most: save it again")


def _count_byte_pair(content: bytes, pair: bytes) -> int:
    """How often two bytes follow each other; ten times as quick as bytes.count."""
    word = np.frombuffer(pair, dtype=np.uint16)[0]
    halves = (np.frombuffer(content, np.uint16, (len(content) - first) // 2, first) for first in (0, 1))
    return sum(int(np.count_nonzero(half == word)) for half in halves)


# --- Pillow ----------------------------------------------------------------------------------------------------------


def _open_with_pillow(content: bytes | None) -> Image.Image:
    assert content is not None, "an image is a file or Pillow's"
    return Image.open(io.BytesIO(content), formats=get_readable_formats())


def _open_large_jpeg(content: bytes, name: str) -> EncodedImage:
    """A JPEG that is decoded at half its sides. Image.open would refuse it by the size that the file states."""
    image = JpegImageFile(io.BytesIO(content))
    whole = _check_image(name, image, JPEG_PIXEL_LIMIT)
    image.draft(None, (image.width // 2, image.height // 2))
    return whole._replace(height=-(-whole.height // 2), width=-(-whole.width // 2), reduction=2)


def _check_image(name: str, image: Image.Image, limit: int | None = None) -> EncodedImage:
    width, height = _get_stored_size(image)
    _check_size(height, width, name, limit or PIXEL_LIMIT)
    _check_tiles(image, name)
    return EncodedImage(name, *((width, height) if _read_orientation(image) >= 5 else (height, width)), None, image)


def _get_stored_size(image: Image.Image) -> tuple[int, int]:
    """Width and height of the pixels as `_orientation` finds them.

    Pillow turns TIFFs itself when it loads them, and some of its versions give the turned size before that.
    """
    if isinstance(image, TiffImageFile) and image.tile:  # not loaded
        return image.tag_v2[ExifTags.Base.ImageWidth], image.tag_v2[ExifTags.Base.ImageLength]
    return image.size


def _check_size(height: int, width: int, name: str, limit: int) -> None:
    if not 0 < width * height <= limit:
        other = "" if limit == JPEG_PIXEL_LIMIT else _JPEG_LIMIT_NOTE
        raise DataError(f"{name} has {width} x {height} pixels; from 1 to {limit:,} are decoded{other}")
    if max(width, height) > ASPECT_RATIO_LIMIT * min(width, height):
        raise DataError(f"{name} has {width} x {height} pixels; one side is over {ASPECT_RATIO_LIMIT} times the other")


def _convert_to_pixels(image: Image.Image, channels: int) -> PixelArray:
    """The image upright, (H, W, C), strip by strip: a second copy of 50 megapixels in Pillow would take 200 MB."""
    image.load()  # a TIFF is turned by this, and says so
    orientation = _read_orientation(image)
    height, width = (image.width, image.height) if orientation >= 5 else (image.height, image.width)
    pixels = np.empty((height, width, channels), dtype=np.uint8)
    stored = _view_in_stored_orientation(pixels, orientation)
    rows = max(1, _STRIP_PIXELS // image.width)
    white = _find_white_level(image)
    for top in range(0, image.height, rows):
        bottom = min(image.height, top + rows)
        strip = image if bottom - top == image.height else image.crop((0, top, image.width, bottom))
        converted = np.asarray(_convert_to_opaque_8bit(strip, white).convert(_CHANNEL_MODES[channels]))
        stored[top:bottom] = converted.reshape(*converted.shape[:2], channels)
    return pixels


def _view_in_stored_orientation(pixels: PixelArray, orientation: int) -> PixelArray:
    """A view of upright pixels (H, W, C) as a camera held that way stores them."""
    match orientation:
        case 2:
            return pixels[:, ::-1]
        case 3:
            return pixels[::-1, ::-1]
        case 4:
            return pixels[::-1]
        case 5:
            return pixels.swapaxes(0, 1)
        case 6:
            return np.rot90(pixels)
        case 7:
            return pixels[::-1, ::-1].swapaxes(0, 1)
        case 8:
            return np.rot90(pixels, -1)
    return pixels


def _check_tiles(image: Image.Image, name: str) -> None:
    """Refuse a TIFF with tiles far larger than itself: each is unpacked whole, whatever is kept of it."""
    if isinstance(image, TiffImageFile):
        sides = [image.tag_v2.get(tag, 0) for tag in (ExifTags.Base.TileWidth, ExifTags.Base.TileLength)]
        if sides[0] * sides[1] > max(TILE_LIMIT, image.width * image.height):
            raise DataError(
                f"{name} has tiles of {sides[0]} x {sides[1]} pixels, far larger than itself: save it again"
            )


def _find_white_level(image: Image.Image) -> int:
    """The value that stands for white: of floats and 32-bit integers the least usual one that no value exceeds.

    A tenth more, or less than 0, is clipped: resampling overshoots.
    """
    if image.mode not in ("F", "I"):
        return 65535
    least, most = image.getextrema()
    assert isinstance(least, int | float)
    assert isinstance(most, int | float)
    if image.mode == "I":
        return 255 if most <= 255 else 65535
    white = next((level for level in _FLOAT_WHITE_LEVELS if most <= 1.1 * level), 0)
    if not white or least < -0.1 * white:
        raise ValueError(
            f"its pixels are floats from {least:.4g} to {most:.4g}, and 0 to 1, 255 or 65535 are known: save it with 8"
            " or 16 bits"
        )
    return white


def _convert_to_opaque_8bit(image: Image.Image, white: int) -> Image.Image:
    """The image with 8 bits a channel and nothing transparent; `white` is the highest value where it has more."""
    if image.mode.startswith("I;16") or image.mode == "I":
        wide = np.asarray(image).astype(np.int64)
        image = Image.fromarray((wide.clip(0, white) * 255 // white).astype(np.uint8))
    if image.mode == "F":
        values = np.asarray(image)
        if not np.isfinite(values).all():
            raise ValueError("some of its pixels are no finite numbers")
        image = Image.fromarray(np.rint(values.clip(0, white) * np.float32(255 / white)).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image


def _read_orientation(image: Image.Image) -> int:
    """How the camera was held, 1 to 8; a damaged EXIF block says nothing, and costs the image nothing else."""
    try:
        orientation = int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except DECODE_ERRORS:
        return 1
    return orientation if 1 <= orientation <= 8 else 1


# --- simplejpeg ------------------------------------------------------------------------------------------------------


def _read_plain_jpeg_size(content: bytes) -> tuple[int, int] | None:
    """Height and width of an upright colour or grey JPEG, if simplejpeg is there to decode it."""
    if content[:2] != b"\xff\xd8" or _load_simplejpeg() is None:
        return None
    try:
        height, width, colours, _ = _load_simplejpeg().decode_jpeg_header(content)
    except ValueError:
        return None
    return (height, width) if colours in ("YCbCr", "Gray", "RGB") and not _is_rotated(content) else None


def _is_rotated(content: bytes) -> bool:
    """Whether metadata say that the camera was not held upright; most files hold none, which is quickly seen."""
    head = content[: content.find(b"\xff\xda")]  # metadata stand before the scan, or the first of them does
    if b"Exif\0\0" not in head and b"http://ns.adobe.com/xap" not in head:
        return False
    return _read_orientation(_open_with_pillow(content)) != 1


def _decode_with_simplejpeg(content: bytes, height: int, width: int, min_rows: int | None) -> PixelArray | None:
    """The pixels of a JPEG, or its first rows and some more; None of a file with a flaw, which Pillow is to judge."""
    kept = (
        height if min_rows is None else (min_rows + 31) // 16 * 16
    )  # whole blocks, and one more: colours blend downwards
    place = _find_height_field(content) if kept < height else None
    if place is None:
        with contextlib.suppress(ValueError):
            return _load_simplejpeg().decode_jpeg(content, "RGB")
        return None
    shorter = b"".join((content[:place], kept.to_bytes(2, "big"), content[place + 2 :]))
    pixels = np.empty((kept, width, 3), dtype=np.uint8)
    try:
        _load_simplejpeg().decode_jpeg(shorter, "RGB", buffer=pixels)
    except ValueError as error:  # of a whole file it says that data are left, up to the mark that ends the image
        return pixels if str(error).endswith("extraneous bytes before marker 0xd9") else None
    return None


def _find_height_field(content: bytes) -> int | None:
    """Where a JPEG states its height, if it is one that is decoded from top to bottom."""
    place = 2
    while content[place : place + 1] == b"\xff" and place + 9 < len(content):
        kind = content[place + 1]
        if kind in (0xC0, 0xC1):
            return place + 5
        if kind == 0xDA or kind in (0xC2, *range(0xC5, 0xC8), *range(0xC9, 0xD0)):
            return None  # the scan begins, or the image comes in several passes
        place += 2 + int.from_bytes(content[place + 2 : place + 4], "big")
    return None


@lru_cache(maxsize=1)
def _load_simplejpeg() -> Any:
    """The module, if it is installed and its pixels are Pillow's on noise in every usual kind of JPEG."""
    try:
        import simplejpeg
    except ImportError:
        return None
    noise = np.random.default_rng(0).integers(0, 256, (37, 51, 3), dtype=np.uint8)
    for subsampling in (0, 1, 2):
        for progressive in (False, True):
            file = io.BytesIO()
            Image.fromarray(noise).save(file, "JPEG", quality=80, subsampling=subsampling, progressive=progressive)
            theirs = np.array(Image.open(file))
            if not np.array_equal(simplejpeg.decode_jpeg(file.getvalue(), "RGB"), theirs):
                return None
    return simplejpeg
