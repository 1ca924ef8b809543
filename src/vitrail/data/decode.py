"""Image bytes to pixels, the same in every command.

JPEG, PNG, WebP, BMP, GIF and TIFF are read, fully; a truncated file is an error. EXIF rotation is applied, 16 bits are
scaled to 8 rather than clipped, CMYK becomes RGB, transparency is laid on white, and of an animation the first frame
counts. Pillow does this. Where simplejpeg is installed (the extra `fast`) it decodes plain JPEGs in Pillow's place, in
every command alike, after it has shown once a process that its pixels are Pillow's to the bit.
"""

import contextlib
import io
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from vitrail.errors import DataError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
FILE_LIMIT = 2**30  # bytes
PIXEL_LIMIT = 89_478_485  # where Pillow begins to warn; at twice that it refuses
RATIO_LIMIT = 600  # of the sides: a line of pixels is no picture, and resized it would fill the memory
DAMAGE = (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error)
"""What Pillow raises of files that are damaged."""
_CHANNELS = {1: "L", 3: "RGB"}
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Pixels = NDArray[np.uint8]  # (H, W) or (H, W, C)
Source = str | Path | bytes | Image.Image | Pixels


def decode(source: Source, channels: int = 3, *, name: str | None = None) -> Tensor:
    """A path, the bytes of an image file, a Pillow image or an array -> uint8 (C, H, W). Errors call it `name`."""
    return opened(source, name=name).pixels(channels)


class Encoded(NamedTuple):
    """An image whose header was read: its size is known, and its pixels can be had."""

    name: str
    height: int
    width: int
    jpeg: bytes | None
    """The file, where simplejpeg can decode it."""
    image: Image.Image | None
    """All others."""

    def pixels(self, channels: int = 3, rows: int | None = None) -> Tensor:
        """uint8 (C, H, W). With `rows`, at least so many: what lies below may be left out where that saves time."""
        if channels not in _CHANNELS:
            raise DataError(f"image files hold 1 or 3 channels and the model takes {channels}: give it tensors instead")
        with _named(self.name):
            found = None
            if self.jpeg is not None and channels == 3:
                found = _by_simplejpeg(self.jpeg, self.height, self.width, rows)
            if found is None:
                image = _image(self.jpeg) if self.image is None else self.image
                found = np.array(_plain(image).convert(_CHANNELS[channels]))
        return torch.from_numpy(found).reshape(*found.shape[:2], channels).permute(2, 0, 1)


def opened(source: Source, *, name: str | None = None) -> Encoded:
    """The image of a source, its header read and its size found acceptable."""
    if not isinstance(source, str | Path | bytes | Image.Image | np.ndarray):
        kind = type(source).__name__
        raise DataError(f"an image is a path, the bytes of a file, a Pillow image or a NumPy array, not {kind}")
    name = name or (str(source) if isinstance(source, str | Path) else "the image")
    with _named(name):
        if isinstance(source, np.ndarray):
            source = _from_array(source, name)
        if isinstance(source, Image.Image):
            return _checked(name, source)
        content = source if isinstance(source, bytes) else _content(Path(source), name)
        size = _plain_jpeg_size(content)
        if size is None:
            return _checked(name, _image(content))
        _check_size(*size, name)
        return Encoded(name, *size, content, None)


def decoder() -> str:
    """What decodes JPEGs in this process, for a run's records."""
    return "Pillow" if _simplejpeg() is None else "simplejpeg, bit-equal to Pillow"


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Whatever goes wrong with an image is said in one line that begins with its name."""
    try:
        yield
    except Image.DecompressionBombError as error:
        raise DataError(f"{name} has too many pixels: at most {PIXEL_LIMIT:,} are decoded") from error
    except UnidentifiedImageError as error:
        raise DataError(f"{name} is no image of a known kind ({', '.join(FORMATS)})") from error
    except FileNotFoundError as error:
        raise DataError(f"{name} does not exist") from error
    except DAMAGE as error:
        raise DataError(f"{name} cannot be decoded: {error}") from error


def _from_array(array: Pixels, name: str) -> Image.Image:
    """The image of an array (H, W) or (H, W, C): grey, RGB, or RGB with transparency."""
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))):
        raise DataError(
            f"{name} is an array of {array.dtype}, {array.shape}; an image is uint8, (H, W) or (H, W, C) with 1, 3 or 4"
        )
    if not array.size:
        raise DataError(f"{name} is an array of {array.shape}, which has no pixel")
    flat = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    return Image.fromarray(np.ascontiguousarray(flat))


def _content(path: Path, name: str) -> bytes:
    size = path.stat().st_size
    if size > FILE_LIMIT:
        raise DataError(f"{name} has {size:,} bytes; images of at most {FILE_LIMIT:,} are read")
    return path.read_bytes()


# --- Pillow ----------------------------------------------------------------------------------------------------------


def _image(content: bytes | None) -> Image.Image:
    assert content is not None, "an image is a file or Pillow's"
    return Image.open(io.BytesIO(content), formats=FORMATS)


def _checked(name: str, image: Image.Image) -> Encoded:
    height, width = image.height, image.width
    _check_size(height, width, name)
    return Encoded(name, *((width, height) if _orientation(image) >= 5 else (height, width)), None, image)


def _check_size(height: int, width: int, name: str) -> None:
    if not 0 < width * height <= PIXEL_LIMIT:
        raise DataError(f"{name} has {width} x {height} pixels; from 1 to {PIXEL_LIMIT:,} are decoded")
    if max(width, height) > RATIO_LIMIT * min(width, height):
        raise DataError(f"{name} has {width} x {height} pixels; one side is over {RATIO_LIMIT} times the other")


def _plain(image: Image.Image) -> Image.Image:
    """The image upright, with 8 bits a channel and nothing transparent."""
    turn = _TURNS.get(_orientation(image))
    image = image if turn is None else image.transpose(turn)
    if image.mode.startswith("I;16") or image.mode == "I":
        wide = np.asarray(image).astype(np.int64)
        image = Image.fromarray((wide.clip(0, 65535) * 255 // 65535).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image)
    return image


def _orientation(image: Image.Image) -> int:
    """How the camera was held, 1 to 8; a damaged EXIF block says nothing, and costs the image nothing else."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except DAMAGE:
        return 1


# --- simplejpeg ------------------------------------------------------------------------------------------------------


def _plain_jpeg_size(content: bytes) -> tuple[int, int] | None:
    """Height and width of an upright colour or grey JPEG, if simplejpeg is there to decode it."""
    if content[:2] != b"\xff\xd8" or _simplejpeg() is None:
        return None
    try:
        height, width, colours, _ = _simplejpeg().decode_jpeg_header(content)
    except ValueError:
        return None
    return (height, width) if colours in ("YCbCr", "Gray", "RGB") and not _may_be_turned(content) else None


def _may_be_turned(content: bytes) -> bool:
    """Whether metadata say that the camera was not held upright; most files hold none, which is quickly seen."""
    head = content[: content.find(b"\xff\xda")]  # metadata stand before the scan, or the first of them does
    if b"Exif\0\0" not in head and b"http://ns.adobe.com/xap" not in head:
        return False
    return _orientation(_image(content)) != 1


def _by_simplejpeg(content: bytes, height: int, width: int, rows: int | None) -> Pixels | None:
    """The pixels of a JPEG, or its first rows and some more; None of a file with a flaw, which Pillow is to judge."""
    kept = height if rows is None else (rows + 31) // 16 * 16  # whole blocks, and one more: colours blend downwards
    place = _height_field(content) if kept < height else None
    if place is None:
        with contextlib.suppress(ValueError):
            return _simplejpeg().decode_jpeg(content, "RGB")
        return None
    shorter = b"".join((content[:place], kept.to_bytes(2, "big"), content[place + 2 :]))
    pixels = np.empty((kept, width, 3), dtype=np.uint8)
    try:
        _simplejpeg().decode_jpeg(shorter, "RGB", buffer=pixels)
    except ValueError as error:  # of a whole file it says that data are left, up to the mark that ends the image
        return pixels if str(error).endswith("extraneous bytes before marker 0xd9") else None
    return None


def _height_field(content: bytes) -> int | None:
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
def _simplejpeg() -> Any:
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
