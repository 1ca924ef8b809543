"""How far a model's probabilities can be trusted: the temperature that calibrates them, their error, and abstention.

n images   L classes   T temperature: probabilities are of logits / T (Guo et al. 2017)
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vitrail.errors import DataError

TEMPERATURE_RANGE = (0.05, 20.0)
PRIOR_STD = 0.3
"""The prior on log T is normal around 0 with this deviation; docs/experiments/README.md has the measurements."""
CALIBRATION_BINS = 15
_BISECTION_STEPS = 60


def fit_temperature(logits: Tensor, targets: Tensor, *, prior_std: float = PRIOR_STD) -> float:
    """The most probable temperature for targets, classes (n,) of a softmax or shares (n, L) of sigmoids.

    Under the prior, few images move T little and many move it fully; an infinite `prior_std` gives the maximum
    likelihood. The derivative of the log posterior is 0 there, which bisection finds. If every prediction is correct,
    the likelihood has no maximum: the prior alone keeps T from 0, and without one T is 1.
    """
    logits = logits.double()
    correct = logits.argmax(dim=1) == targets if targets.ndim == 1 else (logits > 0) == (targets > 0)
    if not len(logits) or (math.isinf(prior_std) and correct.all()):
        return 1.0
    low, high = -math.log(TEMPERATURE_RANGE[1]), -math.log(TEMPERATURE_RANGE[0])
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2  # of log 1 / T
        scale = math.exp(middle)
        if len(logits) * scale * _differentiate_loss(logits, targets, scale) + middle / prior_std**2 > 0:
            high = middle
        else:
            low = middle
    return math.exp(-(low + high) / 2)


def _differentiate_loss(logits: Tensor, targets: Tensor, scale: float) -> float:
    """The derivative of the loss by the scale that multiplies the logits."""
    if targets.ndim == 1:
        expected = ((logits * scale).softmax(dim=1) * logits).sum(dim=1)
        return float((expected - logits.gather(1, targets[:, None])[:, 0]).mean())
    return float((((logits * scale).sigmoid() - targets) * logits).sum(dim=1).mean())


# --- calibration error -----------------------------------------------------------------------------------------------


class BinCounts(NamedTuple):
    """Predictions in bins of equal width by their probability, one entry for each bin."""

    counts: NDArray[np.int64]
    probability_sums: NDArray[np.float64]
    correct: NDArray[np.int64]


def assign_bins(probabilities: ArrayLike) -> NDArray[np.int64]:
    """The bin of each probability, from 0; a bin includes its upper edge, the first also 0."""
    scaled = np.ceil(np.asarray(probabilities, dtype=np.float64) * CALIBRATION_BINS)
    return np.clip(scaled.astype(np.int64) - 1, 0, CALIBRATION_BINS - 1)


def count_bins(probabilities: ArrayLike, correct: ArrayLike) -> BinCounts:
    """Sort predictions, (n,) each, into bins: how many, the sum of their probabilities, how many are correct."""
    indices = assign_bins(probabilities)
    sums = np.bincount(indices, weights=np.asarray(probabilities, dtype=np.float64), minlength=CALIBRATION_BINS)
    hits = np.bincount(indices, weights=np.asarray(correct), minlength=CALIBRATION_BINS)
    return BinCounts(np.bincount(indices, minlength=CALIBRATION_BINS), sums.astype(np.float64), hits.astype(np.int64))


def expected_calibration_error(confidences: Tensor, correct: Tensor) -> float:
    """The mean gap between probability and accuracy, (n,) each, over bins of equal width."""
    binned = count_bins(confidences, correct)
    return float(torch.from_numpy(binned.probability_sums - binned.correct).abs().sum() / len(confidences))


# --- abstention: predictions only where the model is confident -------------------------------------------------------


class RiskCoverageCurve(NamedTuple):
    """Coverage and accuracy at each distinct probability as the threshold, the greatest first."""

    thresholds: Tensor  # float (n,)
    coverage: Tensor  # float64 (n,): the share of images that get a prediction
    accuracy: Tensor  # float64 (n,): the share of these that is correct


def compute_risk_coverage(probabilities: Tensor, correct: Tensor) -> RiskCoverageCurve:
    """Accuracy against coverage (El-Yaniv and Wiener 2010), from probabilities and whether predictions are correct."""
    order = probabilities.argsort(descending=True, stable=True)
    sorted_probabilities, hits = probabilities[order], correct[order].double().cumsum(0)
    is_last = torch.ones(len(order), dtype=torch.bool)  # of a group of equal probabilities
    is_last[:-1] = sorted_probabilities[:-1] != sorted_probabilities[1:]
    covered = torch.arange(1, len(order) + 1, dtype=torch.float64)
    return RiskCoverageCurve(sorted_probabilities[is_last], covered[is_last] / len(order), (hits / covered)[is_last])


def find_threshold(probabilities: Tensor, correct: Tensor, accuracy: float) -> float:
    """The lowest threshold at which the share `accuracy` of the predictions on these images is correct."""
    curve = compute_risk_coverage(probabilities, correct)
    sufficient = (curve.accuracy >= accuracy).nonzero()
    if not len(sufficient):
        raise DataError(
            f"no threshold reaches an accuracy of {accuracy:.2%}: the most confident predictions reach"
            f" {float(curve.accuracy[0]):.2%}. Ask for less"
        )
    return float(curve.thresholds[sufficient[-1]])


def compute_aurc(curve: RiskCoverageCurve) -> float:
    """The area under the risk-coverage curve: the error rate, averaged over all coverages."""
    widths = torch.diff(curve.coverage, prepend=curve.coverage.new_zeros(1))
    return float(((1 - curve.accuracy) * widths).sum())
