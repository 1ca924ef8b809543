"""Pictures inside a page: arrays as data URIs, so that the file needs no other."""

import base64
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.figures import plots

Pixels = NDArray[np.uint8]  # (H, W, 3), or 4 with transparency


def encode_webp(pixels: Pixels) -> str:
    """As a WebP."""
    return _encode_data_uri(pixels, "WEBP", quality=80)


def encode_png(pixels: Pixels) -> str:
    """As a PNG, for pictures of few colours or pixels."""
    return _encode_data_uri(pixels, "PNG", optimize=True)


def encode_image_file(path: Path, width: int) -> str:
    """A picture file, at most so many pixels wide."""
    with Image.open(path) as picture:
        shown = picture.convert("RGB")
    shown.thumbnail((width, 10 * width), Image.Resampling.LANCZOS)
    return encode_webp(np.asarray(shown))


def _encode_data_uri(pixels: Pixels, kind: str, **options: object) -> str:
    content = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(content, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(content.getvalue()).decode()}"


def apply_heat_colormap(values: NDArray[np.floating], low: float, high: float, side: int) -> Pixels:
    """(..., R, C) -> (..., H, W, 3): dark at `low`, bright at `high`, a longer side of about `side` pixels."""
    shares = np.clip((values - low) / (high - low if high > low else 1.0), 0, 1)
    return enlarge_tiles(plots.get_heat_colormap()[(255 * shares).round().astype(np.uint8)], side)


def enlarge_tiles(tiles: Pixels, side: int) -> Pixels:
    """(..., H, W, 3) with pixels that are squares, by the whole factor that brings the longer side near `side`."""
    factor = max(1, side // max(tiles.shape[-3:-1]))
    return tiles.repeat(factor, axis=-3).repeat(factor, axis=-2)


def arrange_tiles(tiles: Pixels, columns: int, gap: int) -> Pixels:
    """(n, H, W, 3) -> one picture (H', W', 4), transparent between the tiles."""
    number, height, width = tiles.shape[:3]
    rows = -(-number // columns)
    sheet = np.zeros((rows * (height + gap) - gap, columns * (width + gap) - gap, 4), dtype=np.uint8)
    for place, tile in enumerate(tiles):
        top, left = place // columns * (height + gap), place % columns * (width + gap)
        sheet[top : top + height, left : left + width, :3] = tile
        sheet[top : top + height, left : left + width, 3] = 255
    return sheet
