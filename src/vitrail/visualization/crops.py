"""The part of an image inside the model input, and the share of attention inside an object's bounding box."""

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

_CENTER_PRIOR_STD = 0.25  # standard deviation of the center prior, in sides of the model input


class Box(NamedTuple):
    """A rectangle by its edges, in pixels of the image."""

    left: float
    top: float
    right: float
    bottom: float

    def scale(self, factor: float) -> "Box":
        """The same box in an image enlarged by `factor`."""
        return Box(*(factor * edge for edge in self))


@dataclasses.dataclass(frozen=True)
class BoxAttention:
    """Shares of the model input that lie inside a bounding box."""

    energy: float  # of the rollout, with each patch's share spread evenly over the patch
    area: float  # of the area, which uniform attention would reach; 0 if the crop cuts the box off
    center: float  # of a normal distribution around the center, its deviation a quarter of each side: photographers aim


def compute_crop_box(height: int, width: int, preprocess: PreprocessConfig) -> Box:
    """The part of an image of so many pixels that `make_eval_input` keeps."""
    (resized_height, resized_width), top, left = compute_eval_crop(height, width, preprocess)
    down, right = height / resized_height, width / resized_width  # pixels of the image for one of the resized
    return Box(left * right, top * down, (left + preprocess.size[1]) * right, (top + preprocess.size[0]) * down)


def measure_box_attention(rollout: NDArray[np.float32], box: Box, crop: Box) -> BoxAttention:
    """Measure how much of a rollout (R, C) over `crop` of the image lies inside `box`, and how much would by chance."""
    width, height = crop.right - crop.left, crop.bottom - crop.top
    x_ends = [min(max(edge - crop.left, 0), width) / width for edge in (box.left, box.right)]
    y_ends = [min(max(edge - crop.top, 0), height) / height for edge in (box.top, box.bottom)]
    rows, columns = _compute_cell_coverage(y_ends, rollout.shape[0]), _compute_cell_coverage(x_ends, rollout.shape[1])
    return BoxAttention(
        energy=float(rows @ rollout.astype(np.float64) @ columns),
        area=(y_ends[1] - y_ends[0]) * (x_ends[1] - x_ends[0]),
        center=_integrate_center_prior(y_ends) * _integrate_center_prior(x_ends),
    )


def summarize_box_attention(measurements: Sequence[BoxAttention]) -> dict[str, float]:
    """Average over images whose box is inside the crop, and count how often the rollout beats area and center prior."""
    kept = [each for each in measurements if each.area > 0]
    fields = ("energy", "area", "center")
    means = {name: sum(getattr(each, name) for each in kept) / len(kept) for name in fields}
    for name in ("area", "center"):
        means[f"more_than_{name}"] = sum(each.energy > getattr(each, name) for each in kept) / len(kept)
    return {"images": len(kept), "cut_off": len(measurements) - len(kept)} | means


def _compute_cell_coverage(ends: Sequence[float], cells: int) -> NDArray[np.float64]:
    """(cells,): the share of each of `cells` equal cells from 0 to 1 that lies between two ends."""
    return cells * np.diff(np.linspace(0, 1, cells + 1).clip(ends[0], ends[1]))


def _integrate_center_prior(ends: Sequence[float]) -> float:
    """The probability of a normal distribution around 0.5, truncated at 0 and 1, between two ends."""
    upper, low, high = (math.erf((edge - 0.5) / (_CENTER_PRIOR_STD * math.sqrt(2))) for edge in (1, *ends))
    return (high - low) / (2 * upper)


def read_boxes(path: Path) -> dict[str, Box]:
    """Read the box of each file name, in Tiny-ImageNet's format: name, class, first and last pixel x0 y0 x1 y1."""
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
                f"{path}, line {number}: the box {rest[1:]} is empty: it needs 0 <= x0 <= x1 and 0 <= y0 <= y1"
            )
        boxes[name] = Box(left, top, right + 1, bottom + 1)
    if not boxes:
        raise DataError(f"{path} holds no boxes: a line is a name, a class and x0 y0 x1 y1")
    return boxes
