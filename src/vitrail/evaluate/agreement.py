"""How far a cheaper way to compute a model says what its float32 does: of every image both say something.

n images   L classes
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import DataError

CONFIDENT_MARGIN = 0.1  # float32 is sure of an answer that is this much likelier than the next


class Agreement(NamedTuple):
    """On how many images two ways to compute a model agree."""

    images: int
    top1: float
    """The share with the same likeliest class."""
    sure: float | None
    """The same of the images of which float32 is sure; None where there is none."""
    sure_images: int
    change: float
    """By how much the probability of float32's likeliest class is another, on average."""


def measure_agreement(reference: Tensor, candidate: Tensor) -> Agreement:
    """Of the probabilities (n, L) that both give to the same images in the same order."""
    if not len(reference):
        raise DataError("there is no image on which to compare")
    if reference.shape[1] == 1:  # a class, or not
        reference, candidate = (torch.cat([yes, 1 - yes], dim=1) for yes in (reference, candidate))
    best = reference.topk(2, dim=1)
    likeliest = best.indices[:, :1]  # (n, 1)
    same = likeliest[:, 0] == candidate.argmax(dim=1)
    sure = best.values[:, 0] - best.values[:, 1] > CONFIDENT_MARGIN
    change = (candidate.gather(1, likeliest) - best.values[:, :1]).abs()
    return Agreement(
        images=len(same),
        top1=float(same.double().mean()),
        sure=float(same[sure].double().mean()) if sure.any() else None,
        sure_images=int(sure.sum()),
        change=float(change.double().mean()),
    )
