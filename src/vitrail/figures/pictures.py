"""Grids of images with captions.

B images   C channels   S image side
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vitrail.figures.draw import BLUE, INK, ORANGE, PAPER, font_file, legible
from vitrail.files import replacing

MOST = 64
_TILE = 144  # pixels: eight in a row fit a screen
_GAP = 14
_LETTER = 12
_FRAMES = {True: (BLUE, 2), False: (ORANGE, 5)}  # a wrong answer is known by the width, too


def grid(
    images: Any, captions: Sequence[str], path: Path, *, columns: int = 8, marks: Sequence[bool] | None = None
) -> None:
    """Write uint8 images (B, C, S, S), the first 64 of them, as one JPEG with a caption under each.

    `marks` frames them: True is a right answer, False a wrong one.
    """
    tiles = [_tile(image) for image in np.asarray(images[:MOST])]
    columns = min(columns, len(tiles))
    rows = -(-len(tiles) // columns)
    width, height = _TILE + _GAP, tiles[0].height + 2 * _GAP + _LETTER
    sheet = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), PAPER)
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.truetype(font_file(), _LETTER)
    for place, (tile, caption) in enumerate(zip(tiles, captions[:MOST], strict=True)):
        left, top = place % columns * width + _GAP, place // columns * height + _GAP
        inset, bottom = left + (_TILE - tile.width) // 2, top + tile.height
        if marks is not None:
            colour, thick = _FRAMES[bool(marks[place])]
            box = (inset - thick, top - thick, inset + tile.width + thick - 1, bottom + thick - 1)
            pen.rectangle(box, fill=colour)
        sheet.paste(tile, (inset, top))
        pen.text((left + _TILE / 2, bottom + 7), _fitted(caption, font), fill=INK, font=font, anchor="ma")
    with replacing(path, overwrite=True) as fresh:
        sheet.save(fresh, "JPEG", quality=90, subsampling=0)  # colours whole: thin frames would fade


def _tile(image: NDArray[np.uint8]) -> Image.Image:
    """(C, S, S) -> a picture no larger than a tile: enlarged by a whole factor, pixels sharp, or reduced smoothly."""
    shown = image[:3] if len(image) >= 3 else image[:1].repeat(3, axis=0)
    picture = Image.fromarray(np.ascontiguousarray(shown.transpose(1, 2, 0)))
    side = max(picture.size)
    if side > _TILE:
        picture.thumbnail((_TILE, _TILE), Image.Resampling.LANCZOS)
        return picture
    factor = _TILE // side
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def _fitted(caption: str, font: ImageFont.FreeTypeFont) -> str:
    """The caption in one line, its end replaced by an ellipsis where it is wider than a tile."""
    text = legible(caption)
    if font.getlength(text) <= _TILE:
        return text
    ends = range(min(len(text), _TILE), -1, -1)  # no letter is narrower than a pixel
    return next(cut for end in ends if font.getlength(cut := text[:end].rstrip() + "…") <= _TILE)
