"""Whether a model is right as often as it says it is, and the one number that makes it so.

n images   L classes   T temperature: probabilities are of logits / T (Guo et al. 2017)
"""

import torch
from torch import Tensor

RANGE = (0.05, 20.0)
_HALVINGS = 60


def temperature(logits: Tensor, targets: Tensor) -> float:
    """The temperature under which the targets are likeliest: classes (n,) of a softmax, or shares (n, L) of sigmoids.

    In 1 / T the loss is convex, so the place where its slope is 0 is found by halving. Where every answer is right
    nothing says how sure is too sure, and it stays 1.
    """
    logits = logits.double()
    best = logits.argmax(dim=1, keepdim=True)
    right = best[:, 0] == targets if targets.ndim == 1 else targets.gather(1, best)[:, 0] > 0
    if not len(logits) or right.all():
        return 1.0
    low, high = 1 / RANGE[1], 1 / RANGE[0]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _slope(logits, targets, middle) > 0:
            high = middle
        else:
            low = middle
    return 2 / (low + high)


def _slope(logits: Tensor, targets: Tensor, scale: float) -> float:
    """The loss's derivative by the scale that multiplies the logits."""
    if targets.ndim == 1:
        expected = ((logits * scale).softmax(dim=1) * logits).sum(dim=1)
        return float((expected - logits.gather(1, targets[:, None])[:, 0]).mean())
    return float((((logits * scale).sigmoid() - targets) * logits).sum(dim=1).mean())


def expected_calibration_error(confidences: Tensor, right: Tensor, bins: int = 15) -> float:
    """The gap between how sure answers were and how often they were right, over bins of equal width."""
    confidences = confidences.double()
    places = ((confidences * bins).ceil().long() - 1).clamp(0, bins - 1)  # a bin holds its upper edge
    sure = torch.zeros(bins, dtype=torch.float64).index_add_(0, places, confidences)
    true = torch.zeros(bins, dtype=torch.float64).index_add_(0, places, right.double())
    return float((sure - true).abs().sum() / len(confidences))
