"""Pictures of masked patch prediction: images, masked images, predictions and targets.

B images   C channels   H, W height and width   N patches of an image   M masked patches   P patch side
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.config import MASK_TOKEN
from vitrail.figures import Pixels, image_grids

CAPTIONS = ("input", "corrupted", "predicted", "target")
MASK_GRAY = 128  # of a patch replaced by the [mask] token


def draw_reconstruction(pixels: Any, masks: Any, predicted: Any, target: Any, path: Path) -> None:
    """Write one JPEG with a row for each image: input, corrupted input, prediction and target.

    `pixels` are uint8 (B, C, H, W), or one image more, the partner of the last. `masks` are (B, 2, N), `predicted` and
    `target` uint8 (B, M, C, p, p): masked patches of p x p pixels.
    """
    images = np.asarray(pixels)
    panels: list[Pixels] = []
    for index, rows in enumerate(zip(masks, predicted, target, strict=True)):
        panels += make_panels(images[index], images[(index + 1) % len(images)], *map(np.asarray, rows))
    image_grids.write_image_grid(np.stack(panels), CAPTIONS * len(masks), path, columns=len(CAPTIONS))


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
