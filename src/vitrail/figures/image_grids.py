"""Pictures of images: grids with captions, attention laid over an image, panels side by side.

B images   C channels   S image side   H, W height and width of an image   R, K rows and columns of patches
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vitrail.figures.crops import Box
from vitrail.figures.plots import BLUE, INK, ORANGE, WHITE, get_font_path, get_heat_colormap, make_printable
from vitrail.files import write_atomically

MAX_TILES = 64
_TILE = 144  # pixels: eight in a row fit a screen
_GAP = 14
_FONT_SIZE = 12
_OUTSIDE_BRIGHTNESS = 0.4  # of the light of what a model does not see
_OPACITY_RANGE = (0.3, 0.7)  # opacity of attention's colours, where it is least and where it is greatest
_EPSILON = 1e-30
_PRINT_DPI = (300, 300)  # dots per inch
_FRAME_STYLES = {True: (BLUE, 2), False: (ORANGE, 5)}  # a wrong answer is known by the width, too


def write_image_grid(
    images: Any, captions: Sequence[str], path: Path, *, columns: int = 8, correct: Sequence[bool] | None = None
) -> None:
    """Write uint8 images (B, C, S, S), the first 64 of them, as one JPEG with a caption under each.

    `marks` frames them: True is a right answer, False a wrong one.
    """
    tiles = [_make_tile(image) for image in np.asarray(images[:MAX_TILES])]
    columns = min(columns, len(tiles))
    rows = -(-len(tiles) // columns)
    width, height = _TILE + _GAP, tiles[0].height + 2 * _GAP + _FONT_SIZE
    sheet = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), WHITE)
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.truetype(get_font_path(), _FONT_SIZE)
    for place, (tile, caption) in enumerate(zip(tiles, captions[:MAX_TILES], strict=True)):
        left, top = place % columns * width + _GAP, place // columns * height + _GAP
        inset, bottom = left + (_TILE - tile.width) // 2, top + tile.height
        if correct is not None:
            colour, thick = _FRAME_STYLES[bool(correct[place])]
            box = (inset - thick, top - thick, inset + tile.width + thick - 1, bottom + thick - 1)
            pen.rectangle(box, fill=colour)
        sheet.paste(tile, (inset, top))
        pen.text((left + _TILE / 2, bottom + 7), _fit_caption(caption, font, _TILE), fill=INK, font=font, anchor="ma")
    with write_atomically(path, overwrite=True) as fresh:
        sheet.save(fresh, "JPEG", quality=90, subsampling=0)  # colours whole: thin frames would fade


def overlay_attention(image: Any, attention: NDArray[np.float32], crop: Box | None = None) -> NDArray[np.uint8]:
    """uint8 (C, H, W) and a map (R, K) -> uint8 (H, W, 3): the image in grey, and over it the map in colour.

    The map covers the part `within` of the image, the whole unless told otherwise. Colours go from its least value to
    its greatest and hide less of the image where there is less; what lies outside is dim.
    """
    grey = _to_rgb_image(image).convert("L")
    box = _round_crop(grey, crop)
    smooth = Image.fromarray(attention.astype(np.float32)).resize(_get_crop_size(box), Image.Resampling.BICUBIC)
    least, most = float(attention.min()), float(attention.max())
    shares = ((np.asarray(smooth) - least) / max(most - least, _EPSILON)).clip(0, 1)
    colours = Image.fromarray(get_heat_colormap()[(255 * shares).round().astype(np.uint8)])
    opacity = Image.fromarray(
        (255 * (_OPACITY_RANGE[0] + (_OPACITY_RANGE[1] - _OPACITY_RANGE[0]) * shares)).round().astype(np.uint8)
    )
    return _paste_crop(grey, Image.composite(colours, grey.crop(box).convert("RGB"), opacity), box)


def paint_patch_colors(image: Any, colors: NDArray[np.float32], crop: Box | None = None) -> NDArray[np.uint8]:
    """uint8 (C, H, W) and colours (R, K, 3) from 0 to 1 -> uint8 (H, W, 3): patches in place of what the model sees."""
    grey = _to_rgb_image(image).convert("L")
    box = _round_crop(grey, crop)
    cells = Image.fromarray((255 * colors).round().astype(np.uint8))
    return _paste_crop(grey, cells.resize(_get_crop_size(box), Image.Resampling.NEAREST), box)


def write_panels(images: Sequence[NDArray[np.uint8]], captions: Sequence[str], path: Path, *, columns: int) -> None:
    """Write pictures uint8 (H, W, 3) of one size in rows of `columns`, unscaled, as PNG with a caption under each."""
    height, width = images[0].shape[:2]
    letter = max(_FONT_SIZE, min(width, height) // 24)
    font = ImageFont.truetype(get_font_path(), letter)
    columns = min(columns, len(images))
    across, down = width + letter, height + 3 * letter
    sheet = Image.new("RGB", (columns * across + letter, -(-len(images) // columns) * down + letter), WHITE)
    pen = ImageDraw.Draw(sheet)
    for place, (panel, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = place % columns * across + letter, place // columns * down + letter
        sheet.paste(Image.fromarray(panel), (left, top))
        text = _fit_caption(caption, font, width)
        pen.text((left + width / 2, top + height + letter // 2), text, fill=INK, font=font, anchor="ma")
    with write_atomically(path, overwrite=True) as fresh:
        sheet.save(fresh, "PNG", dpi=_PRINT_DPI)


def to_rgb_array(image: Any) -> NDArray[np.uint8]:
    """uint8 (C, H, W) -> uint8 (H, W, 3)."""
    return np.asarray(_to_rgb_image(image))


def _to_rgb_image(image: Any) -> Image.Image:
    """(C, H, W) in its first three channels, or in grey."""
    planes = np.asarray(image)
    shown = planes[:3] if len(planes) >= 3 else planes[:1].repeat(3, axis=0)
    return Image.fromarray(np.ascontiguousarray(shown.transpose(1, 2, 0)))


def resize_image(image: Any, factor: float) -> NDArray[np.uint8]:
    """uint8 (C, H, W) -> uint8 (3, H', W'): reduced smoothly, or enlarged so that pixels stay squares."""
    shown = _to_rgb_image(image)
    size = max(1, round(shown.width * factor)), max(1, round(shown.height * factor))
    way = Image.Resampling.LANCZOS if factor < 1 else Image.Resampling.NEAREST
    return np.asarray(shown.resize(size, way)).transpose(2, 0, 1)


def _round_crop(image: Image.Image, crop: Box | None) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of the part, in whole pixels of the image and at least one."""
    if crop is None:
        return 0, 0, image.width, image.height
    left, top = min(round(crop.left), image.width - 1), min(round(crop.top), image.height - 1)
    right, bottom = min(round(crop.right), image.width), min(round(crop.bottom), image.height)
    return left, top, max(left + 1, right), max(top + 1, bottom)


def _get_crop_size(box: tuple[int, int, int, int]) -> tuple[int, int]:
    return box[2] - box[0], box[3] - box[1]


def _paste_crop(gray: Image.Image, part: Image.Image, box: tuple[int, int, int, int]) -> NDArray[np.uint8]:
    """The part in its place, and the rest of the image dim."""
    whole = Image.blend(Image.new("L", gray.size), gray, _OUTSIDE_BRIGHTNESS).convert("RGB")
    whole.paste(part, box)
    return np.asarray(whole)


def _make_tile(image: NDArray[np.uint8]) -> Image.Image:
    """(C, S, S) -> a picture no larger than a tile: enlarged by a whole factor, pixels sharp, or reduced smoothly."""
    shown = _to_rgb_image(image)
    side = max(shown.size)
    if side > _TILE:
        shown.thumbnail((_TILE, _TILE), Image.Resampling.LANCZOS)
        return shown
    factor = _TILE // side
    return shown.resize((shown.width * factor, shown.height * factor), Image.Resampling.NEAREST)


def _fit_caption(caption: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """The caption in one line, its end replaced by an ellipsis where it is wider than so many pixels."""
    text = make_printable(caption)
    if font.getlength(text) <= width:
        return text
    ends = range(min(len(text), width), -1, -1)  # no letter is narrower than a pixel
    return next((cut for end in ends if font.getlength(cut := text[:end].rstrip() + "…") <= width), "")
