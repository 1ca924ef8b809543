"""Abstention: predicting only where the model is confident, how many images that leaves, and how accurate it is there.

n images
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import DataError


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
