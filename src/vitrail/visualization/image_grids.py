"""Pictures made of images: grids with captions, masked patches and their predictions, attention overlays, panels.

B images   C channels   S image side   H, W height and width   R, K rows and columns of patches   N patches   M masked
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vitrail.config.training import MASK_TOKEN
from vitrail.files import write_atomically
from vitrail.visualization import Array, Pixels
from vitrail.visualization.crops import Box
from vitrail.visualization.plots import BLUE, INK, ORANGE, WHITE, get_font_path, get_heat_colormap, make_printable

MAX_TILES = 64
MASK_GRAY = 128  # of a patch replaced by the [mask] token
_PANEL_CAPTIONS = ("input", "corrupted", "predicted", "target")
_TILE = 144  # pixels: eight in a row fit a screen
_GAP = 14
_FONT_SIZE = 12
_OUTSIDE_BRIGHTNESS = 0.4  # of the pixels outside the model input
_OPACITY_RANGE = (0.3, 0.7)  # of an overlay, at the least and at the greatest attention
_EPSILON = 1e-30
_PRINT_DPI = (300, 300)
_FRAME_STYLES = {True: (BLUE, 2), False: (ORANGE, 5)}  # color and width: a wrong prediction differs in both


def make_image_grid(
    images: Any, captions: Sequence[str], *, columns: int = 8, correct: Sequence[bool] | None = None
) -> Image.Image:
    """Arrange uint8 images (B, C, S, S), at most the first 64, in one picture with a caption under each.

    `correct` adds frames that tell correct predictions from wrong ones.
    """
    tiles = [_make_tile(image) for image in np.asarray(images[:MAX_TILES])]
    columns = min(columns, len(tiles))
    rows = -(-len(tiles) // columns)
    width, height = _TILE + _GAP, tiles[0].height + 2 * _GAP + _FONT_SIZE
    sheet = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), WHITE)
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.truetype(get_font_path(), _FONT_SIZE)
    for index, (tile, caption) in enumerate(zip(tiles, captions[:MAX_TILES], strict=True)):
        left, top = index % columns * width + _GAP, index // columns * height + _GAP
        inset, bottom = left + (_TILE - tile.width) // 2, top + tile.height
        if correct is not None:
            color, thickness = _FRAME_STYLES[bool(correct[index])]
            right = inset + tile.width + thickness - 1
            pen.rectangle((inset - thickness, top - thickness, right, bottom + thickness - 1), fill=color)
        sheet.paste(tile, (inset, top))
        pen.text((left + _TILE / 2, bottom + 7), _fit_caption(caption, font, _TILE), fill=INK, font=font, anchor="ma")
    return sheet


def write_image_grid(
    images: Any, captions: Sequence[str], path: Path, *, columns: int = 8, correct: Sequence[bool] | None = None
) -> None:
    """Write a grid of images as a JPEG."""
    write_jpeg(make_image_grid(images, captions, columns=columns, correct=correct), path)


def write_jpeg(picture: Image.Image, path: Path) -> None:
    """Write a picture whole or not at all."""
    with write_atomically(path, overwrite=True) as temporary:
        picture.save(temporary, "JPEG", quality=90, subsampling=0)  # full color resolution: thin frames would fade


def draw_reconstruction(pixels: Any, masks: Any, predicted: Any, target: Any, path: Path) -> None:
    """Write one JPEG with a row for each image: input, corrupted input, prediction and target.

    `pixels` are uint8 (B, C, H, W), or one image more, the partner of the last. `masks` are (B, 2, N), `predicted` and
    `target` uint8 (B, M, C, p, p): masked patches of p x p pixels.
    """
    images = np.asarray(pixels)
    panels: list[Pixels] = []
    for index, rows in enumerate(zip(masks, predicted, target, strict=True)):
        panels += make_panels(images[index], images[(index + 1) % len(images)], *map(np.asarray, rows))
    write_image_grid(np.stack(panels), _PANEL_CAPTIONS * len(masks), path, columns=len(_PANEL_CAPTIONS))


def make_panels(
    image: Pixels, partner: Pixels, mask: NDArray[np.int64], predicted: Pixels, target: Pixels
) -> list[Pixels]:
    """Four pictures (C, H, W): the image, the corrupted image, and the masked patches as predicted and as targets."""
    order, replacements = mask.tolist()
    side = math.isqrt(image.shape[1] * image.shape[2] // len(order))
    squares = [
        (slice(None), slice(top, top + side), slice(left, left + side))
        for top in range(0, image.shape[1], side)
        for left in range(0, image.shape[2], side)
    ]
    corrupted, prediction_panel, target_panel = image.copy(), image.copy(), image.copy()
    for square, replacement in zip(squares, replacements, strict=True):
        if replacement == MASK_TOKEN:
            corrupted[square] = MASK_GRAY
        elif replacement >= 0:
            corrupted[square] = partner[squares[replacement]]
    for panel, patches in ((prediction_panel, predicted), (target_panel, target)):
        for index, patch in zip(order, patches, strict=False):  # masked patches come first in the order
            factor = side // patch.shape[-1]
            panel[squares[index]] = patch.repeat(factor, axis=1).repeat(factor, axis=2)
    return [image, corrupted, prediction_panel, target_panel]


def color_attention(
    attention: Array,
    size: tuple[int, int],
    *,
    limits: tuple[float, float] | None = None,
    opacity_range: tuple[float, float] = _OPACITY_RANGE,
) -> Pixels:
    """(R, K) -> uint8 RGBA (H, W, 4), smoothed to `size` (W, H): brighter and more opaque with more attention.

    `limits` are the values of the darkest and the brightest color: by default the least and the greatest.
    """
    low, high = limits or (float(attention.min()), float(attention.max()))
    smooth = Image.fromarray(attention.astype(np.float32)).resize(size, Image.Resampling.BICUBIC)
    scaled = ((np.asarray(smooth) - low) / max(high - low, _EPSILON)).clip(0, 1)
    colors = get_heat_colormap()[(255 * scaled).round().astype(np.uint8)]
    opacity = 255 * (opacity_range[0] + (opacity_range[1] - opacity_range[0]) * scaled)
    return np.concatenate([colors, opacity.round().astype(np.uint8)[..., None]], axis=2)


def overlay_attention(image: Any, attention: Array, crop: Box | None = None) -> Pixels:
    """Draw attention (R, K) in color over an image in gray: uint8 (C, H, W) -> uint8 (H, W, 3).

    The attention covers `crop` of the image, by default all of it; pixels outside the crop are dimmed.
    """
    gray = _to_rgb_image(image).convert("L")
    box = _round_crop(gray, crop)
    inside = gray.crop(box).convert("RGB")
    overlay = Image.fromarray(color_attention(attention, inside.size))
    return _paste_crop(gray, Image.composite(overlay.convert("RGB"), inside, overlay.getchannel("A")), box)


def paint_patch_colors(image: Any, colors: Array, crop: Box | None = None) -> Pixels:
    """Replace the model input by one color for each patch: uint8 (C, H, W) and (R, K, 3) -> uint8 (H, W, 3)."""
    gray = _to_rgb_image(image).convert("L")
    box = _round_crop(gray, crop)
    cells = Image.fromarray((255 * colors).round().astype(np.uint8))
    return _paste_crop(gray, cells.resize((box[2] - box[0], box[3] - box[1]), Image.Resampling.NEAREST), box)


def write_panels(images: Sequence[Pixels], captions: Sequence[str], path: Path, *, columns: int) -> None:
    """Write pictures uint8 (H, W, 3) of one size in rows of `columns`, unscaled, as PNG with a caption under each."""
    height, width = images[0].shape[:2]
    font_size = max(_FONT_SIZE, min(width, height) // 24)
    font = ImageFont.truetype(get_font_path(), font_size)
    columns = min(columns, len(images))
    x_step, y_step = width + font_size, height + 3 * font_size
    sheet = Image.new("RGB", (columns * x_step + font_size, -(-len(images) // columns) * y_step + font_size), WHITE)
    pen = ImageDraw.Draw(sheet)
    for index, (panel, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = index % columns * x_step + font_size, index // columns * y_step + font_size
        sheet.paste(Image.fromarray(panel), (left, top))
        text = _fit_caption(caption, font, width)
        pen.text((left + width / 2, top + height + font_size // 2), text, fill=INK, font=font, anchor="ma")
    with write_atomically(path, overwrite=True) as temporary:
        sheet.save(temporary, "PNG", dpi=_PRINT_DPI)


def to_rgb_array(image: Any) -> Pixels:
    """uint8 (C, H, W) -> uint8 (H, W, 3)."""
    return np.asarray(_to_rgb_image(image))


def _to_rgb_image(image: Any) -> Image.Image:
    """(C, H, W) as RGB: the first three channels, or the first one in gray."""
    planes = np.asarray(image)
    channels = planes[:3] if len(planes) >= 3 else planes[:1].repeat(3, axis=0)
    return Image.fromarray(np.ascontiguousarray(channels.transpose(1, 2, 0)))


def resize_image(image: Any, factor: float) -> Pixels:
    """uint8 (C, H, W) -> uint8 (3, H', W'): reduced smoothly, or enlarged with sharp pixels."""
    rgb = _to_rgb_image(image)
    size = max(1, round(rgb.width * factor)), max(1, round(rgb.height * factor))
    resampling = Image.Resampling.LANCZOS if factor < 1 else Image.Resampling.NEAREST
    return np.asarray(rgb.resize(size, resampling)).transpose(2, 0, 1)


def _round_crop(image: Image.Image, crop: Box | None) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of the crop in whole pixels, at least one pixel wide and high."""
    if crop is None:
        return 0, 0, image.width, image.height
    left, top = min(round(crop.left), image.width - 1), min(round(crop.top), image.height - 1)
    right, bottom = min(round(crop.right), image.width), min(round(crop.bottom), image.height)
    return left, top, max(left + 1, right), max(top + 1, bottom)


def _paste_crop(gray: Image.Image, crop: Image.Image, box: tuple[int, int, int, int]) -> Pixels:
    """Paste the crop into the image and dim the rest."""
    canvas = Image.blend(Image.new("L", gray.size), gray, _OUTSIDE_BRIGHTNESS).convert("RGB")
    canvas.paste(crop, box)
    return np.asarray(canvas)


def _make_tile(image: Pixels) -> Image.Image:
    """Fit (C, S, S) into a tile: enlarged by a whole factor with sharp pixels, or reduced smoothly."""
    tile = _to_rgb_image(image)
    side = max(tile.size)
    if side > _TILE:
        tile.thumbnail((_TILE, _TILE), Image.Resampling.LANCZOS)
        return tile
    factor = _TILE // side
    return tile.resize((tile.width * factor, tile.height * factor), Image.Resampling.NEAREST)


def _fit_caption(caption: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """The caption in one line of at most `width` pixels; a longer one ends in an ellipsis."""
    text = make_printable(caption)
    if font.getlength(text) <= width:
        return text
    ends = range(min(len(text), width), -1, -1)  # no letter is narrower than a pixel
    return next((cut for end in ends if font.getlength(cut := text[:end].rstrip() + "…") <= width), "")
