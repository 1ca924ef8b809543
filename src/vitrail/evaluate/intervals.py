"""How far a measured number may be from the true one: 95 % intervals over the choice of images.

n images   R resamples
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Z_95 = 1.959963984540054  # of the normal distribution 95 % lie within so many deviations
BOOTSTRAP_RESAMPLES = 400

Interval = tuple[float, float]


def wilson_interval(correct: int, images: int) -> Interval:
    """Of a share (Wilson 1927): it stays between 0 and 1, and is right for few images and shares near the ends too."""
    share, spread = correct / images, Z_95 * Z_95 / images
    middle = (share + spread / 2) / (1 + spread)
    half = Z_95 * math.sqrt(share * (1 - share) / images + spread / (4 * images)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(values: NDArray[np.floating]) -> Interval | None:
    """Of an average, by its standard error; one value alone says nothing of it."""
    if len(values) < 2:
        return None
    middle = float(values.mean())
    half = Z_95 * float(values.std(ddof=1)) / math.sqrt(len(values))
    return middle - half, middle + half


def bootstrap_interval(measure: Callable[[NDArray[np.int64]], float], images: int, *, seed: int = 0) -> Interval:
    """Of what no formula fits (Efron 1979): `measure` of images drawn with replacement, by their places, many times.

    What noise adds to the resamples' mean it has added to the measure itself, and is taken away.
    """
    draws = np.random.default_rng(seed)
    found = np.array([measure(draws.integers(0, images, images)) for _ in range(BOOTSTRAP_RESAMPLES)])
    centre, half = 2 * measure(np.arange(images)) - float(found.mean()), Z_95 * float(found.std())
    return centre - half, centre + half


def resample_counts(counts: NDArray[np.int64], *, seed: int = 0) -> NDArray[np.int64]:
    """(R, kinds): how many images of each kind a bootstrap draws, for measures that know images by their kind alone."""
    images = counts.sum()
    return np.random.default_rng(seed).multinomial(images, counts / images, size=BOOTSTRAP_RESAMPLES)


def percentile_interval(resamples: NDArray[np.float64]) -> Interval:
    """Where the middle 95 % of the resamples lie."""
    low, high = np.quantile(resamples, (0.025, 0.975))
    return float(low), float(high)
