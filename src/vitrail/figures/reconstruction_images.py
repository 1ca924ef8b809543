"""Pictures of what a masked model tells of hidden patches.

B images   C channels   H, W height and width   N patches of an image   M hidden ones   P pixels along a patch's side
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.config import MASK_TOKEN
from vitrail.figures import image_grids

CAPTIONS = ("input", "corrupted", "predicted", "target")
MASK_GRAY = 128  # of the [mask]
Pixels = NDArray[np.uint8]


def draw_reconstruction(pixels: Any, masks: Any, predicted: Any, target: Any, path: Path) -> None:
    """Write a row for each image as one JPEG: itself, corrupted, as predicted, and the target.

    `pixels` are uint8 (B, C, H, W), or one image more, the partner of the last. `hiding` is (B, 2, N), `told` and
    `true` uint8 (B, M, C, p, p): hidden patches of p x p places.
    """
    shown, number = np.asarray(pixels), len(masks)
    rows = [
        panel
        for index in range(number)
        for panel in make_panels(
            shown[index],
            shown[(index + 1) % len(shown)],
            np.asarray(masks[index]),
            np.asarray(predicted[index]),
            np.asarray(target[index]),
        )
    ]
    image_grids.write_image_grid(np.stack(rows), CAPTIONS * number, path, columns=len(CAPTIONS))


def make_panels(
    image: Pixels, partner: Pixels, mask: NDArray[np.int64], predicted: Pixels, target: Pixels
) -> list[Pixels]:
    """(C, H, W) four times: the image, its patches hidden, and the hidden ones painted as told and as they are."""
    order, stands = mask.tolist()
    side = math.isqrt(image.shape[1] * image.shape[2] // len(order))
    squares = [
        (slice(None), slice(top, top + side), slice(left, left + side))
        for top in range(0, image.shape[1], side)
        for left in range(0, image.shape[2], side)
    ]
    hidden, said, truth = image.copy(), image.copy(), image.copy()
    for square, by in zip(squares, stands, strict=True):
        if by == MASK_TOKEN:
            hidden[square] = MASK_GRAY
        elif by >= 0:
            hidden[square] = partner[squares[by]]
    for picture, patches in ((said, predicted), (truth, target)):
        for place, patch in zip(order, patches, strict=False):  # the first of the order are the hidden ones
            enlarged = side // patch.shape[-1]
            picture[squares[place]] = patch.repeat(enlarged, axis=1).repeat(enlarged, axis=2)
    return [image, hidden, said, truth]
