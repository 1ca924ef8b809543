"""Faithfulness of relevance maps: the probability of a class as patches are removed in the order of their relevance.

    B images   L classes   n = R C patches in R rows and C columns   S steps

Deletion and insertion (Petsiuk, Das and Saenko, "RISE", 2018), by patches rather than pixels.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.visualization import Array

STEPS = 10  # a tenth of the patches is removed or inserted at a time


@dataclasses.dataclass(frozen=True)
class Faithfulness:
    """The probability of the images' classes as patches are removed or inserted, the most relevant first."""

    fractions: Array  # (S + 1,) from 0 to 1: the share of the patches
    deletion: Array  # (B, S + 1): from the whole image to an empty one
    insertion: Array  # (B, S + 1): from an empty image to the whole one

    @property
    def deletion_area(self) -> float:
        """The area under the mean curve: the smaller, the better the order."""
        return self._compute_area(self.deletion)

    @property
    def insertion_area(self) -> float:
        """The area under the mean curve: the larger, the better the order."""
        return self._compute_area(self.insertion)

    def _compute_area(self, curves: Array) -> float:
        mean, widths = curves.mean(axis=0, dtype=np.float64), np.diff(self.fractions.astype(np.float64))
        return float(widths @ (mean[1:] + mean[:-1]) / 2)


@torch.no_grad()
def measure_faithfulness(
    predict: Callable[[Tensor], Tensor], images: Tensor, maps: Array, classes: NDArray[np.int64]
) -> Faithfulness:
    """Delete and insert the patches of normalized images (B, C, S, S), in the order of their values in `maps`.

    `predict` turns images into probabilities (B, L); the curves follow that of each image's class. `maps` are
    (B, R, C); of equal values the first patch comes first. A removed patch is 0 everywhere, the mean color.
    """
    _, rows, columns = maps.shape
    if images.shape[2] % rows or images.shape[3] % columns:
        raise UsageError(
            f"images of {images.shape[2]} x {images.shape[3]} do not divide into {rows} x {columns} patches"
        )
    num_patches = rows * columns
    order = torch.from_numpy(maps.reshape(len(maps), num_patches)).argsort(dim=1, descending=True, stable=True)
    ranks = order.argsort(dim=1).unflatten(1, (rows, columns))  # 0 is the most relevant
    ranks = ranks.repeat_interleave(images.shape[2] // rows, 1).repeat_interleave(images.shape[3] // columns, 2)
    ranks = ranks[:, None].to(images.device)
    counts = sorted({round(step * num_patches / STEPS) for step in range(STEPS + 1)})  # a small grid has fewer steps
    class_indices = torch.from_numpy(classes).to(images.device)[:, None]

    def measure_curve(make_mask: Callable[[int], Tensor]) -> Array:
        steps = [predict(images * make_mask(count)).gather(1, class_indices) for count in counts]
        return torch.cat(steps, dim=1).float().cpu().numpy()  # (B, S + 1)

    fractions = np.array(counts, dtype=np.float32) / num_patches
    return Faithfulness(
        fractions, measure_curve(lambda count: ranks >= count), measure_curve(lambda count: ranks < count)
    )


def join_faithfulness(parts: Sequence[Faithfulness]) -> Faithfulness:
    """Join the curves of several batches."""
    deletion, insertion = (
        np.concatenate([getattr(part, field) for part in parts]) for field in ("deletion", "insertion")
    )
    return Faithfulness(parts[0].fractions, deletion, insertion)
