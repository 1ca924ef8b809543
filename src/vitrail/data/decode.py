"""Image bytes to pixels, the same in every command.

JPEG, PNG, WebP, BMP, GIF and TIFF are read, fully; a truncated file is an error. EXIF rotation is applied, 16 bits are
scaled to 8 rather than clipped, CMYK becomes RGB, transparency is laid on white, and of an animation the first frame
counts. Pillow does this. Where simplejpeg is installed (the extra `fast`) it decodes plain JPEGs in Pillow's place, in
every command alike, after it has shown once a process that its pixels are Pillow's to the bit.
"""

import io
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from vitrail.errors import DataError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
PIXEL_LIMIT = 89_478_485  # where Pillow begins to warn; at twice that it refuses
RATIO_LIMIT = 600  # of the sides: a line of pixels is no picture, and resized it would fill the memory
_CHANNELS = {1: "L", 3: "RGB"}

DAMAGE = (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error)
"""What Pillow raises of files that are damaged."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Source = str | Path | bytes | Image.Image
Pixels = NDArray[np.uint8]  # (H, W) or (H, W, 3)


def decode(source: Source, channels: int = 3, *, name: str | None = None) -> Tensor:
    """A path, the bytes of an image file or a Pillow image -> uint8 (C, H, W). Errors call it `name`."""
    if channels not in _CHANNELS:
        raise DataError(f"image files hold 1 or 3 channels and the model takes {channels}: give it tensors instead")
    if not isinstance(source, str | Path | bytes | Image.Image):
        raise DataError(f"an image is a path, the bytes of a file or a Pillow image, not {type(source).__name__}")
    name = name or (str(source) if isinstance(source, str | Path) else "the image")
    try:
        pixels = _pixels(source, channels, name)
    except Image.DecompressionBombError as error:
        raise DataError(f"{name} is too large: {error}") from error
    except UnidentifiedImageError as error:
        raise DataError(f"{name} is no image of a known kind ({', '.join(FORMATS)})") from error
    except FileNotFoundError as error:
        raise DataError(f"{name} does not exist") from error
    except DAMAGE as error:
        raise DataError(f"{name} cannot be decoded: {error}") from error
    return torch.from_numpy(pixels).reshape(*pixels.shape[:2], channels).permute(2, 0, 1)


def decoder() -> str:
    """What decodes JPEGs in this process, for a run's records."""
    return "Pillow" if _simplejpeg() is None else "simplejpeg, bit-equal to Pillow"


def _pixels(source: Source, channels: int, name: str) -> Pixels:
    if isinstance(source, Image.Image):
        return _converted(source, channels, name)
    with io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb") as file:
        image = Image.open(file, formats=FORMATS)
        _check_size(image, name)
        fast = _fast(image, file, channels)
        return _converted(image, channels, name) if fast is None else fast


def _check_size(image: Image.Image, name: str) -> None:
    if not 0 < image.width * image.height <= PIXEL_LIMIT:
        raise DataError(f"{name} has {image.width} x {image.height} pixels; from 1 to {PIXEL_LIMIT:,} are decoded")
    if max(image.size) > RATIO_LIMIT * min(image.size):
        raise DataError(
            f"{name} has {image.width} x {image.height} pixels; one side is over {RATIO_LIMIT} times the other"
        )


def _converted(image: Image.Image, channels: int, name: str) -> Pixels:
    _check_size(image, name)
    return np.array(_plain(image).convert(_CHANNELS[channels]))


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


def _fast(image: Image.Image, file: BinaryIO, channels: int) -> Pixels | None:
    """The pixels of an upright colour or grey JPEG by simplejpeg; None where Pillow is to decode."""
    if image.format != "JPEG" or image.mode not in ("RGB", "L") or channels != 3:
        return None
    module = _simplejpeg()
    if module is None or _orientation(image) != 1:
        return None
    file.seek(0)
    try:
        return module.decode_jpeg(file.read(), "RGB")
    except ValueError:  # a file with a flaw: whether it is one to Pillow decides
        file.seek(0)
        return None


@lru_cache(maxsize=1)
def _simplejpeg() -> Any | None:
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
