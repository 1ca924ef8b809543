"""Which part of an image a model sees, and how much of its attention falls into an object's box."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.config import PreprocessConfig
from vitrail.data.transforms import compute_eval_crop
from vitrail.errors import DataError

_CENTER_PRIOR_STD = 0.25  # standard deviation of the centre prior, in sides of what the model sees


class Box(NamedTuple):
    """The edges of a rectangle, in pixels of the image."""

    left: float
    top: float
    right: float
    bottom: float

    def scale(self, factor: float) -> "Box":
        """The same in an image whose sides are so many times as long."""
        return Box(*(factor * edge for edge in self))


@dataclasses.dataclass(frozen=True)
class BoxAttention:
    """Shares of what the model sees that lie in a box."""

    energy: float
    """Of the rollout, each patch's share spread evenly over it."""
    area: float
    """Of the area, which attention to everything alike would reach; 0 where the crop cut the box off."""
    center: float
    """Of a bell in the middle, with a quarter of each side for its standard deviation: photographers aim."""


def compute_crop_box(height: int, width: int, preprocess: PreprocessConfig) -> Box:
    """The part of an image of so many pixels that `evaluation_view` keeps."""
    (resized_height, resized_width), top, left = compute_eval_crop(height, width, preprocess)
    down, right = height / resized_height, width / resized_width  # pixels of the image for one of the resized
    return Box(left * right, top * down, (left + preprocess.size[1]) * right, (top + preprocess.size[0]) * down)


def measure_box_attention(rollout: NDArray[np.float32], box: Box, crop: Box) -> BoxAttention:
    """How much of a rollout (R, C), which covers `within` of the image, falls into `box`, and what would by chance."""
    width, height = crop.right - crop.left, crop.bottom - crop.top
    across = [min(max(edge - crop.left, 0), width) / width for edge in (box.left, box.right)]
    down = [min(max(edge - crop.top, 0), height) / height for edge in (box.top, box.bottom)]
    rows, columns = _compute_cell_coverage(down, rollout.shape[0]), _compute_cell_coverage(across, rollout.shape[1])
    energy = float(rows @ rollout.astype(np.float64) @ columns)
    return BoxAttention(
        energy,
        (down[1] - down[0]) * (across[1] - across[0]),
        _integrate_center_prior(down) * _integrate_center_prior(across),
    )


def summarize_box_attention(measurements: Sequence[BoxAttention]) -> dict[str, float]:
    """The means over images whose box is not all cut off, and of how many of them the rollout beats area and bell."""
    kept = [each for each in measurements if each.area > 0]
    means = {
        "energy": sum(each.energy for each in kept),
        "area": sum(each.area for each in kept),
        "center": sum(each.center for each in kept),
        "more_than_area": sum(each.energy > each.area for each in kept),
        "more_than_center": sum(each.energy > each.center for each in kept),
    }
    shares = {name: value / len(kept) for name, value in means.items()}
    return {"images": len(kept), "cut_off": len(measurements) - len(kept)} | shares


def _compute_cell_coverage(ends: Sequence[float], cells: int) -> NDArray[np.float64]:
    """(number,): how much of each of so many equal cells from 0 to 1 lies between two ends."""
    return cells * np.diff(np.linspace(0, 1, cells + 1).clip(ends[0], ends[1]))


def _integrate_center_prior(ends: Sequence[float]) -> float:
    """The share of a normal distribution around 0.5, cut at 0 and 1, that lies between two ends."""
    beyond, low, high = (math.erf((edge - 0.5) / (_CENTER_PRIOR_STD * math.sqrt(2))) for edge in (1, *ends))
    return (high - low) / (2 * beyond)


def read_boxes(path: Path) -> dict[str, Box]:
    """The box of each file name, from lines of name, class, and first and last pixel: x0 y0 x1 y1 (Tiny-ImageNet's)."""
    boxes = {}
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        name, *rest = line.split("\t") if "\t" in line else line.split()
        try:
            left, top, right, bottom = (float(value) for value in rest[1:])
        except ValueError:
            raise DataError(f"{path}, line {number}: {line!r:.80} is not a name, a class and x0 y0 x1 y1") from None
        if not (0 <= left <= right < math.inf and 0 <= top <= bottom < math.inf):
            raise DataError(
                f"{path}, line {number}: the box {rest[1:]} has no inside: x0 <= x1 and y0 <= y1 are needed"
            )
        boxes[name] = Box(left, top, right + 1, bottom + 1)
    if not boxes:
        raise DataError(f"{path} holds no box: a line is a name, a class and x0 y0 x1 y1")
    return boxes
