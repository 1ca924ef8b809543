"""Answering only where the model is sure: how many answers that leaves, and how many of them are right.

n images
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import DataError


class RiskCoverageCurve(NamedTuple):
    """For each probability that an answer may need, the greatest first; equal ones are one place."""

    thresholds: Tensor  # float (n,)
    coverage: Tensor  # float64 (n,): the share of images that get an answer
    accuracy: Tensor  # float64 (n,): the share of these that is right


def compute_risk_coverage(probabilities: Tensor, correct: Tensor) -> RiskCoverageCurve:
    """Accuracy against coverage (El-Yaniv and Wiener 2010), of answers' probabilities and whether they were right."""
    order = probabilities.argsort(descending=True, stable=True)
    sorted_probabilities, hits = probabilities[order], correct[order].double().cumsum(0)
    last = torch.ones(len(order), dtype=torch.bool)
    last[:-1] = sorted_probabilities[:-1] != sorted_probabilities[1:]
    answered = torch.arange(1, len(order) + 1, dtype=torch.float64)
    return RiskCoverageCurve(sorted_probabilities[last], answered[last] / len(order), (hits / answered)[last])


def find_threshold(probabilities: Tensor, correct: Tensor, accuracy: float) -> float:
    """The least probability an answer must have so that the share `accuracy` of answers is right on these images."""
    found = compute_risk_coverage(probabilities, correct)
    enough = (found.accuracy >= accuracy).nonzero()
    if not len(enough):
        raise DataError(
            f"no threshold makes {accuracy:.2%} of the answers right: of the surest it is"
            f" {float(found.accuracy[0]):.2%}. Ask for less"
        )
    return float(found.thresholds[enough[-1]])


def compute_aurc(curve: RiskCoverageCurve) -> float:
    """The mean share of wrong answers over all coverages: the area under the risk-coverage curve."""
    widths = torch.diff(curve.coverage, prepend=curve.coverage.new_zeros(1))
    return float(((1 - curve.accuracy) * widths).sum())
