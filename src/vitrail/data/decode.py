"""Image bytes to pixels, the same in every command.

JPEG, PNG, WebP, BMP, GIF, TIFF and AVIF are decoded completely, and HEIF where pillow-heif is installed (the extra
`heif`). A truncated file is an error. EXIF rotation is applied. 16 bits are scaled to 8 rather than clipped, and so are
floats from 0 to 1, 255 or 65535. CMYK becomes RGB, transparency is laid on white, and an animation gives its first
frame. Pillow does this. Where simplejpeg is installed (the extra `fast`), it decodes plain JPEGs instead, once it has
shown in this process that its pixels equal Pillow's to the bit.

A JPEG of more pixels than the limit is decoded at half its sides, which libjpeg does while it decodes: a photo of 200
megapixels gives 50, the same in every command. `image_headers` refuses harmful files first. Pixels are converted strip
by strip, so that memory holds the decoded image and the result, and no third copy.
"""

import contextlib
import io
import itertools
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor

from vitrail.data import image_headers
from vitrail.data.image_headers import read_orientation, wrap_decode_errors
from vitrail.errors import DataError

_STRIP_PIXELS = 2**20  # pixels that are converted at once
_CHANNEL_MODES = {1: "L", 3: "RGB"}
_FLOAT_WHITE_LEVELS = (1, 255, 65535)  # values that stand for white in float images

PixelArray = NDArray[np.uint8]  # (H, W) or (H, W, C)
ImageSource = str | Path | bytes | Image.Image | PixelArray


def decode(source: ImageSource, channels: int = 3, *, name: str | None = None) -> Tensor:
    """Decode a path, the bytes of an image file, a Pillow image or an array to uint8 (C, H, W). Errors use `name`."""
    return open_image(source, name=name).decode_pixels(channels)


class EncodedImage(NamedTuple):
    """An image whose header was read: its size is known, and its pixels can be decoded."""

    name: str
    height: int
    width: int
    jpeg_bytes: bytes | None
    """The file, where simplejpeg can decode it."""
    image: Image.Image | None
    """The image as Pillow opened it, for all other files."""
    reduction: int = 1
    """The factor by which the sides of the file were divided."""

    def decode_pixels(self, channels: int = 3, min_rows: int | None = None) -> Tensor:
        """Decode to uint8 (C, H, W). With `min_rows`, rows below these may be omitted where that saves time."""
        if channels not in _CHANNEL_MODES:
            raise DataError(f"image files hold 1 or 3 channels and the model takes {channels}: give it tensors instead")
        with wrap_decode_errors(self.name):
            pixels = _decode_with_simplejpeg(self, min_rows) if channels == 3 else None
            if pixels is None:
                pixels = _convert_to_pixels(self.image or _open_with_pillow(self.jpeg_bytes), channels)
        return torch.from_numpy(pixels).permute(2, 0, 1)


def open_image(source: ImageSource, *, name: str | None = None) -> EncodedImage:
    """Read the header of an image and refuse an unacceptable one; its pixels are not decoded yet."""
    if not isinstance(source, str | Path | bytes | Image.Image | np.ndarray):
        kind = type(source).__name__
        raise DataError(f"an image is a path, the bytes of a file, a Pillow image or a NumPy array, not {kind}")
    name = name or (str(source) if isinstance(source, str | Path) else "the image")
    with wrap_decode_errors(name):
        if isinstance(source, np.ndarray):
            source = _convert_array(source, name)
        if isinstance(source, Image.Image):
            return EncodedImage(name, *image_headers.check_image(source, name), None, source)
        content = source if isinstance(source, bytes) else image_headers.read_image_file(Path(source), name=name)
        image_headers.check_file_structure(content, name)
        if image_headers.is_large_jpeg(content):
            return _open_large_jpeg(content, name)
        size = _read_plain_jpeg_size(content)
        if size is None:
            image = _open_with_pillow(content)
            return EncodedImage(name, *image_headers.check_image(image, name), None, image)
        image_headers.check_size(*size, name)
        return EncodedImage(name, *size, content, None)


def get_jpeg_decoder_name() -> str:
    """Return the name of this process's JPEG decoder, for a run's records."""
    image_headers.get_readable_formats()  # loads the decoders' modules
    return "Pillow" if _load_simplejpeg() is None else "simplejpeg, bit-equal to Pillow"


def _convert_array(array: PixelArray, name: str) -> Image.Image:
    """Convert an array (H, W) or (H, W, C) to an image: gray, RGB, or RGB with transparency."""
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))):
        raise DataError(
            f"{name} is an array of {array.dtype}, {array.shape}; an image is uint8, (H, W) or (H, W, C) with 1, 3 or 4"
        )
    if not array.size:
        raise DataError(f"{name} is an array of {array.shape}, which has no pixel")
    return convert_to_pillow(array)


def convert_to_pillow(pixels: PixelArray) -> Image.Image:
    """Convert uint8 (H, W) or (H, W, C) to a Pillow image; one channel is gray."""
    return Image.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels))


# --- Pillow ----------------------------------------------------------------------------------------------------------


def _open_with_pillow(content: bytes | None) -> Image.Image:
    assert content is not None, "an EncodedImage holds a file's bytes or a Pillow image"
    return Image.open(io.BytesIO(content), formats=image_headers.get_readable_formats())


def _open_large_jpeg(content: bytes, name: str) -> EncodedImage:
    """Open a JPEG to be decoded at half its sides. Image.open would refuse it by the size that the file states."""
    image = JpegImageFile(io.BytesIO(content))
    height, width = image_headers.check_image(image, name, image_headers.JPEG_PIXEL_LIMIT)
    image.draft(None, (image.width // 2, image.height // 2))
    return EncodedImage(name, -(-height // 2), -(-width // 2), None, image, reduction=2)


def _convert_to_pixels(image: Image.Image, channels: int) -> PixelArray:
    """Convert to upright pixels (H, W, C), strip by strip: Pillow's second copy of 50 megapixels would take 200 MB."""
    image.load()  # rotates a TIFF, and updates its orientation
    orientation = read_orientation(image)
    height, width = (image.width, image.height) if orientation >= 5 else (image.height, image.width)
    pixels = np.empty((height, width, channels), dtype=np.uint8)
    stored = _view_in_stored_orientation(pixels, orientation)
    rows, white = max(1, _STRIP_PIXELS // image.width), _find_white_level(image)
    for top in range(0, image.height, rows):
        bottom = min(image.height, top + rows)
        strip = image if bottom - top == image.height else image.crop((0, top, image.width, bottom))
        converted = np.asarray(_convert_to_opaque_8bit(strip, white).convert(_CHANNEL_MODES[channels]))
        stored[top:bottom] = converted.reshape(*converted.shape[:2], channels)
    return pixels


def _view_in_stored_orientation(pixels: PixelArray, orientation: int) -> PixelArray:
    """Return a NumPy view of upright pixels (H, W, C) as the camera stored them."""
    row_step = -1 if orientation in (3, 4, 6, 7) else 1
    column_step = -1 if orientation in (2, 3, 7, 8) else 1
    return (pixels.swapaxes(0, 1) if orientation >= 5 else pixels)[::row_step, ::column_step]


def _find_white_level(image: Image.Image) -> int:
    """Return the value that stands for white: for floats and 32-bit integers, the least usual one that none exceeds.

    Up to a tenth beyond either end is clipped: resampling overshoots.
    """
    if image.mode not in ("F", "I"):
        return 65535
    minimum, maximum = cast("tuple[float, float]", image.getextrema())
    if image.mode == "I":
        return 255 if maximum <= 255 else 65535
    white = next((level for level in _FLOAT_WHITE_LEVELS if maximum <= 1.1 * level), 0)
    if not white or minimum < -0.1 * white:
        raise ValueError(
            f"its pixels are floats from {minimum:.4g} to {maximum:.4g}; 0 to 1, 255 or 65535 are known: save it with 8"
            " or 16 bits"
        )
    return white


def _convert_to_opaque_8bit(image: Image.Image, white: int) -> Image.Image:
    """Convert to 8 bits a channel without transparency; `white` is the highest value where the image has more bits."""
    if image.mode.startswith("I;16") or image.mode == "I":
        values = np.asarray(image).astype(np.int64)
        image = Image.fromarray((values.clip(0, white) * 255 // white).astype(np.uint8))
    if image.mode == "F":
        values = np.asarray(image)
        if not np.isfinite(values).all():
            raise ValueError("some of its pixels are not finite")
        image = Image.fromarray(np.rint(values.clip(0, white) * np.float32(255 / white)).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image


# --- simplejpeg ------------------------------------------------------------------------------------------------------


def _read_plain_jpeg_size(content: bytes) -> tuple[int, int] | None:
    """Return the height and width of an upright color or gray JPEG if simplejpeg is installed to decode it."""
    if content[:2] != b"\xff\xd8" or _load_simplejpeg() is None:
        return None
    try:
        height, width, color_space, _ = _load_simplejpeg().decode_jpeg_header(content)
    except ValueError:
        return None
    head = content[: content.find(b"\xff\xda")]  # metadata stand before the scan, or the first of them does
    has_metadata = b"Exif\0\0" in head or b"http://ns.adobe.com/xap" in head  # the many files without cost no time
    if color_space not in ("YCbCr", "Gray", "RGB") or (
        has_metadata and read_orientation(_open_with_pillow(content)) != 1
    ):
        return None
    return height, width


def _decode_with_simplejpeg(image: EncodedImage, min_rows: int | None) -> PixelArray | None:
    """Decode a JPEG, or at least its first rows; None for a file with a flaw, which Pillow then judges."""
    content = image.jpeg_bytes
    if content is None:
        return None
    rows = image.height if min_rows is None else (min_rows + 31) // 16 * 16  # whole blocks, one more: colors blend down
    height_field = _find_height_field(content) if rows < image.height else None
    if height_field is None:
        with contextlib.suppress(ValueError):
            return _load_simplejpeg().decode_jpeg(content, "RGB")
        return None
    shorter = b"".join((content[:height_field], rows.to_bytes(2, "big"), content[height_field + 2 :]))
    pixels = np.empty((rows, image.width, 3), dtype=np.uint8)
    try:
        _load_simplejpeg().decode_jpeg(shorter, "RGB", buffer=pixels)
    except ValueError as error:  # of a whole file it says that data are left, up to the marker that ends the image
        return pixels if str(error).endswith("extraneous bytes before marker 0xd9") else None
    return None


def _find_height_field(content: bytes) -> int | None:
    """Return the offset at which a JPEG states its height, if it is decoded from top to bottom."""
    start = 2
    while content[start : start + 1] == b"\xff" and start + 9 < len(content):
        kind = content[start + 1]
        if kind in (0xC0, 0xC1):
            return start + 5
        if kind == 0xDA or kind in (0xC2, *range(0xC5, 0xC8), *range(0xC9, 0xD0)):
            return None  # the scan begins, or the image comes in several passes
        start += 2 + int.from_bytes(content[start + 2 : start + 4], "big")
    return None


@lru_cache(maxsize=1)
def _load_simplejpeg() -> Any:
    """Return the module if it is installed and decodes noise, in every usual kind of JPEG, to Pillow's pixels."""
    try:
        import simplejpeg
    except ImportError:
        return None
    noise = np.random.default_rng(0).integers(0, 256, (37, 51, 3), dtype=np.uint8)
    for subsampling, progressive in itertools.product((0, 1, 2), (False, True)):
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "JPEG", quality=80, subsampling=subsampling, progressive=progressive)
        if not np.array_equal(simplejpeg.decode_jpeg(file.getvalue(), "RGB"), np.array(Image.open(file))):
            return None
    return simplejpeg
