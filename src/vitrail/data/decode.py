"""Image bytes to pixels, the same in every command.

JPEG, PNG, WebP, BMP, GIF and TIFF are read, fully; a truncated file is an error. EXIF rotation is applied, 16 bits are
scaled to 8 rather than clipped, CMYK becomes RGB, transparency is laid on white, and of an animation the first frame
counts.
"""

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from vitrail.errors import DataError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
PIXEL_LIMIT = 89_478_485  # where Pillow begins to warn; at twice that it refuses
_CHANNELS = {1: "L", 3: "RGB"}

Source = str | Path | bytes | Image.Image


def decode(source: Source, channels: int = 3) -> Tensor:
    """A path, the bytes of an image file or a Pillow image -> uint8 (C, H, W)."""
    if channels not in _CHANNELS:
        raise DataError(f"image files hold 1 or 3 channels and the model takes {channels}: give it tensors instead")
    if not isinstance(source, str | Path | bytes | Image.Image):
        raise DataError(f"an image is a path, the bytes of a file or a Pillow image, not {type(source).__name__}")
    name = str(source) if isinstance(source, str | Path) else "the image"
    try:
        image = source if isinstance(source, Image.Image) else _open(source)
        if not 0 < image.width * image.height <= PIXEL_LIMIT:
            raise DataError(f"{name} has {image.width} x {image.height} pixels; from 1 to {PIXEL_LIMIT:,} are decoded")
        pixels = np.array(_plain(image).convert(_CHANNELS[channels]))
    except Image.DecompressionBombError as error:
        raise DataError(f"{name} is too large: {error}") from error
    except UnidentifiedImageError as error:
        raise DataError(f"{name} is no image of a known kind ({', '.join(FORMATS)})") from error
    except FileNotFoundError as error:
        raise DataError(f"{name} does not exist") from error
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise DataError(f"{name} cannot be decoded: {error}") from error
    return torch.from_numpy(pixels).reshape(*pixels.shape[:2], channels).permute(2, 0, 1)


def _open(source: str | Path | bytes) -> Image.Image:
    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)


def _plain(image: Image.Image) -> Image.Image:
    """The image upright, with 8 bits a channel and nothing transparent."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or image.mode == "I":
        wide = np.asarray(image).astype(np.int64)
        image = Image.fromarray((wide.clip(0, 65535) * 255 // 65535).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image)
    return image
