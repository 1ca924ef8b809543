"""Two models on the same images: is one better, or was it chance?

n images
"""

import math
from typing import NamedTuple

from torch import Tensor


class Compared(NamedTuple):
    """On how many images two models are right."""

    both: int
    first: int
    """Where only the first is."""
    second: int
    """Where only the second is."""
    neither: int
    chance: float
    """How likely models that are equally good differ so much or more: McNemar's test (1947), in its exact form."""


def compared(first: Tensor, second: Tensor) -> Compared:
    """Of whether each was right, bool (n,), of the same images in the same order."""
    both, neither = int((first & second).sum()), int((~first & ~second).sum())
    one, other = int((first & ~second).sum()), int((~first & second).sum())
    return Compared(both, one, other, neither, mcnemar(one, other))


def mcnemar(one: int, other: int) -> float:
    """The chance that of the images on which two equal models differ, one has so many or fewer, or so many or more.

    Each such image is a coin's toss, so the sum is of binomial terms: taken in logarithms it serves any number.
    """
    tosses = one + other
    terms = (
        math.lgamma(tosses + 1) - math.lgamma(k + 1) - math.lgamma(tosses - k + 1) for k in range(min(one, other) + 1)
    )
    tail = math.fsum(math.exp(term - tosses * math.log(2)) for term in terms)
    return min(1.0, 2 * tail)
