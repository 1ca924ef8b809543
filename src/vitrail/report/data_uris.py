"""Images as data URIs, so that an HTML page needs no other file."""

import base64
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.figures import Pixels, plots


def encode_webp(pixels: Pixels) -> str:
    """Encode (H, W, 3), or 4 channels with transparency, as WebP."""
    return _encode_data_uri(pixels, "WEBP", quality=80)


def encode_png(pixels: Pixels) -> str:
    """Encode (H, W, 3), or 4 channels with transparency, as PNG, for images of few colors or pixels."""
    return _encode_data_uri(pixels, "PNG", optimize=True)


def encode_image_file(path: Path, max_width: int) -> str:
    """Encode an image file, reduced to at most `max_width` pixels."""
    with Image.open(path) as file:
        image = file.convert("RGB")
    image.thumbnail((max_width, 10 * max_width), Image.Resampling.LANCZOS)
    return encode_webp(np.asarray(image))


def _encode_data_uri(pixels: Pixels, image_format: str, **options: object) -> str:
    content = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(content, image_format, **options)
    return f"data:image/{image_format.lower()};base64,{base64.b64encode(content.getvalue()).decode()}"


def apply_heat_colormap(values: NDArray[np.floating], low: float, high: float, side: int) -> Pixels:
    """(..., R, C) -> (..., H, W, 3): dark at `low`, bright at `high`, the longer side about `side` pixels."""
    scaled = np.clip((values - low) / (high - low if high > low else 1.0), 0, 1)
    return enlarge_tiles(plots.get_heat_colormap()[(255 * scaled).round().astype(np.uint8)], side)


def enlarge_tiles(tiles: Pixels, side: int) -> Pixels:
    """Enlarge (..., H, W, 3) with sharp pixels, by the whole factor that brings the longer side near `side`."""
    factor = max(1, side // max(tiles.shape[-3:-1]))
    return tiles.repeat(factor, axis=-3).repeat(factor, axis=-2)


def arrange_tiles(tiles: Pixels, columns: int, gap: int) -> Pixels:
    """(n, H, W, 3) -> one image (H', W', 4), transparent between the tiles."""
    count, height, width = tiles.shape[:3]
    rows = -(-count // columns)
    sheet = np.zeros((rows * (height + gap) - gap, columns * (width + gap) - gap, 4), dtype=np.uint8)
    for index, tile in enumerate(tiles):
        top, left = index // columns * (height + gap), index % columns * (width + gap)
        sheet[top : top + height, left : left + width, :3] = tile
        sheet[top : top + height, left : left + width, 3] = 255
    return sheet
