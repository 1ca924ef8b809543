"""Two models on the same images: is one better, or was it chance?

n images
"""

import math
from typing import NamedTuple

from torch import Tensor


class PairedComparison(NamedTuple):
    """On how many images two models are right."""

    both: int
    only_first: int
    """Where only the first is."""
    only_second: int
    """Where only the second is."""
    neither: int
    p_value: float
    """How likely models that are equally good differ so much or more: McNemar's test (1947), in its exact form."""


def compare_models(first_correct: Tensor, second_correct: Tensor) -> PairedComparison:
    """Of whether each was right, bool (n,), of the same images in the same order."""
    both, neither = int((first_correct & second_correct).sum()), int((~first_correct & ~second_correct).sum())
    one, other = int((first_correct & ~second_correct).sum()), int((~first_correct & second_correct).sum())
    return PairedComparison(both, one, other, neither, mcnemar_p_value(one, other))


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """The chance that of the images on which two equal models differ, one has so many or fewer, or so many or more.

    Each such image is a coin's toss, so the sum is of binomial terms: taken in logarithms it serves any number.
    """
    tosses = only_first + only_second
    terms = (
        math.lgamma(tosses + 1) - math.lgamma(k + 1) - math.lgamma(tosses - k + 1)
        for k in range(min(only_first, only_second) + 1)
    )
    tail = math.fsum(math.exp(term - tosses * math.log(2)) for term in terms)
    return min(1.0, 2 * tail)
