"""How sure a measured number is: confidence intervals, paired comparison of two models, agreement of two precisions.

n images   L classes   R resamples
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.errors import DataError

Z_95 = 1.959963984540054  # 95 % of a normal distribution lie within this many standard deviations
BOOTSTRAP_RESAMPLES = 400
CONFIDENT_MARGIN = 0.1  # float32 is confident where its best class leads the second by more than this

Interval = tuple[float, float]


# --- 95 % intervals over the choice of images ------------------------------------------------------------------------


def wilson_interval(correct: int, images: int) -> Interval:
    """The interval of a share (Wilson 1927): within 0 and 1, and valid for few images and shares near the ends too."""
    share, spread = correct / images, Z_95 * Z_95 / images
    middle = (share + spread / 2) / (1 + spread)
    half = Z_95 * math.sqrt(share * (1 - share) / images + spread / (4 * images)) / (1 + spread)
    return max(0.0, middle - half) if correct else 0.0, min(1.0, middle + half) if correct < images else 1.0


def mean_interval(values: NDArray[np.floating]) -> Interval | None:
    """The interval of a mean, by its standard error; None for a single value."""
    if len(values) < 2:
        return None
    middle = float(values.mean())
    half = Z_95 * float(values.std(ddof=1)) / math.sqrt(len(values))
    return middle - half, middle + half


def paired_interval(differences: Sequence[float]) -> Interval | None:
    """The interval of the mean of a few differences, by Student's t; None for a single one."""
    if len(differences) < 2:
        return None
    middle, error = statistics.mean(differences), statistics.stdev(differences) / math.sqrt(len(differences))
    half = compute_t_quantile(len(differences) - 1) * error
    return middle - half, middle + half


def compute_t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, by the integral of its density."""
    factor = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    angles = np.linspace(0, math.pi / 2, 200_001)  # t = sqrt(degrees) tan(angle), whose density is a power of cos
    density = factor * np.cos(angles) ** (degrees - 1)
    masses = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(angles))])
    return math.sqrt(degrees) * math.tan(float(np.interp(0.475, masses, angles)))


def bootstrap_interval(measure: Callable[[NDArray[np.int64]], float], images: int, *, seed: int = 0) -> Interval:
    """The interval of a measure without a formula (Efron 1979), from `measure(indices)` of images with replacement.

    Noise biases the resamples' mean as much as the measure itself, so that bias is subtracted.
    """
    rng = np.random.default_rng(seed)
    resamples = np.array([measure(rng.integers(0, images, images)) for _ in range(BOOTSTRAP_RESAMPLES)])
    center, half = 2 * measure(np.arange(images)) - float(resamples.mean()), Z_95 * float(resamples.std())
    return center - half, center + half


def resample_counts(counts: NDArray[np.int64], *, seed: int = 0) -> NDArray[np.int64]:
    """(R, kinds): how many images of each kind a bootstrap draws, for measures that depend on these counts alone."""
    images = counts.sum()
    return np.random.default_rng(seed).multinomial(images, counts / images, size=BOOTSTRAP_RESAMPLES)


def percentile_interval(resamples: NDArray[np.float64]) -> Interval:
    """The range of the middle 95 % of the resamples."""
    low, high = np.quantile(resamples, (0.025, 0.975))
    return float(low), float(high)


# --- two models on the same images -----------------------------------------------------------------------------------


class PairedComparison(NamedTuple):
    """How many images two models classify correctly, together and alone."""

    both: int
    only_first: int
    only_second: int
    neither: int
    p_value: float
    """The chance that equally good models differ this much or more: McNemar's exact test (1947)."""


def compare_models(first_correct: Tensor, second_correct: Tensor) -> PairedComparison:
    """Compare two models by whether each is correct, bool (n,), on the same images in the same order."""
    both, neither = int((first_correct & second_correct).sum()), int((~first_correct & ~second_correct).sum())
    only_first = int((first_correct & ~second_correct).sum())
    only_second = int((~first_correct & second_correct).sum())
    return PairedComparison(both, only_first, only_second, neither, mcnemar_p_value(only_first, only_second))


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """The two-sided p-value of McNemar's exact test, from the images that only one of two models gets right.

    Under the null hypothesis each such image is a coin toss. The binomial terms are summed through logarithms, so any
    number of images works.
    """
    tosses = only_first + only_second
    terms = (
        math.lgamma(tosses + 1) - math.lgamma(k + 1) - math.lgamma(tosses - k + 1)
        for k in range(min(only_first, only_second) + 1)
    )
    tail = math.fsum(math.exp(term - tosses * math.log(2)) for term in terms)
    return min(1.0, 2 * tail)


# --- one model in two precisions -------------------------------------------------------------------------------------


class Agreement(NamedTuple):
    """How far a lower precision predicts the same as float32."""

    images: int
    top1_agreement: float
    """The share of images with the same likeliest class."""
    confident_agreement: float | None
    """The same share of the images on which float32 is confident; None without such images."""
    confident_images: int
    mean_probability_change: float
    """The mean absolute change of the probability of float32's likeliest class."""


def measure_agreement(reference: Tensor, candidate: Tensor) -> Agreement:
    """Compare the probabilities (n, L) of float32 and of another precision for the same images in the same order."""
    if not len(reference):
        raise DataError("there is no image on which to compare")
    if reference.shape[1] == 1:  # one class: present or absent
        reference, candidate = (torch.cat([present, 1 - present], dim=1) for present in (reference, candidate))
    best = reference.topk(2, dim=1)
    likeliest = best.indices[:, :1]  # (n, 1)
    same = likeliest[:, 0] == candidate.argmax(dim=1)
    confident = best.values[:, 0] - best.values[:, 1] > CONFIDENT_MARGIN
    change = (candidate.gather(1, likeliest) - best.values[:, :1]).abs()
    return Agreement(
        images=len(same),
        top1_agreement=float(same.double().mean()),
        confident_agreement=float(same[confident].double().mean()) if confident.any() else None,
        confident_images=int(confident.sum()),
        mean_probability_change=float(change.double().mean()),
    )
