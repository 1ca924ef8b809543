"""Whether a model is right as often as it says it is, and the one number that makes it so.

n images   L classes   T temperature: probabilities are of logits / T (Guo et al. 2017)
"""

import math

import torch
from torch import Tensor

TEMPERATURE_RANGE = (0.05, 20.0)
PRIOR_STD = 0.3
"""Of the prior on log T, a normal distribution around 0; docs/experiments/README.md has the measurements."""
_BISECTION_STEPS = 60


def fit_temperature(logits: Tensor, targets: Tensor, *, prior_std: float = PRIOR_STD) -> float:
    """The likeliest temperature of targets, classes (n,) of a softmax or shares (n, L) of sigmoids, given a prior.

    The prior says that log T is normal around 0 with a standard deviation: few images move T little, many fully. With
    an infinite one this is the maximum of the likelihood. The slope of the logarithm of both is 0 there, which is found
    by halving. Where every answer is right nothing says how sure is too sure, and it stays 1.
    """
    logits = logits.double()
    right = logits.argmax(dim=1) == targets if targets.ndim == 1 else (logits > 0) == (targets > 0)
    if not len(logits) or right.all():
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
    """The loss's derivative by the scale that multiplies the logits."""
    if targets.ndim == 1:
        expected = ((logits * scale).softmax(dim=1) * logits).sum(dim=1)
        return float((expected - logits.gather(1, targets[:, None])[:, 0]).mean())
    return float((((logits * scale).sigmoid() - targets) * logits).sum(dim=1).mean())


def expected_calibration_error(confidences: Tensor, correct: Tensor, bins: int = 15) -> float:
    """The gap between how sure answers were and how often they were right, over bins of equal width."""
    confidences = confidences.double()
    places = ((confidences * bins).ceil().long() - 1).clamp(0, bins - 1)  # a bin holds its upper edge
    sure = torch.zeros(bins, dtype=torch.float64).index_add_(0, places, confidences)
    true = torch.zeros(bins, dtype=torch.float64).index_add_(0, places, correct.double())
    return float((sure - true).abs().sum() / len(confidences))
