"""Metrics of multi-label predictions: F1 and mean average precision.

    n images   L classes

A label is predicted where its probability is above one half. Averages omit classes without an image.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.evaluate import calibration
from vitrail.evaluate.predictions import Predictions
from vitrail.evaluate.statistics import Interval, bootstrap_interval


@dataclasses.dataclass(frozen=True)
class ClassScore:
    """The counts and scores of one label."""

    images: int
    """Images that have the label."""
    predicted: int
    """Images for which it is predicted."""
    correct: int
    """Images that have it and for which it is predicted."""
    average_precision: float | None
    """None where no image has the label."""

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        return 2 * self.correct / max(1, self.images + self.predicted)


@dataclasses.dataclass(frozen=True)
class LabelScores:
    """The metrics of multi-label predictions beside exact match."""

    micro_f1: float
    """Over all labels of all images."""
    macro_f1: float
    """Averaged over classes."""
    mean_average_precision: float
    calibration_error: float
    """Over every label's probability, not the likeliest alone."""
    bins: tuple[tuple[int, float, int], ...]
    """For each bin of equal width: labels, the sum of their probabilities, how many are true."""
    classes: tuple[ClassScore, ...]

    def to_dict(self) -> dict[str, Any]:
        """The metrics as JSON has them, without the classes."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "classes"}


def measure_labels(predictions: Predictions) -> LabelScores:
    """The scores of multi-label predictions."""
    scores, truths = predictions.label_probabilities.double().numpy(), predictions.label_targets.numpy()  # (n, L) each
    predicted = scores > 0.5
    classes = tuple(
        ClassScore(
            int(truth.sum()),
            int(label_predicted.sum()),
            int((truth & label_predicted).sum()),
            average_precision(score, truth) if truth.any() else None,
        )
        for score, truth, label_predicted in zip(scores.T, truths.T, predicted.T, strict=True)
    )
    binned = calibration.count_bins(scores.ravel(), truths.ravel())
    return LabelScores(
        micro_f1=micro_f1(predicted, truths),
        macro_f1=macro_f1(predicted, truths),
        mean_average_precision=mean_average_precision(scores, truths),
        calibration_error=calibration.expected_calibration_error(
            predictions.label_probabilities.flatten(), predictions.label_targets.flatten()
        ),
        bins=tuple((int(count), float(total), int(true)) for count, total, true in zip(*binned, strict=True)),
        classes=classes,
    )


def measure_label_intervals(predictions: Predictions) -> dict[str, Interval]:
    """The 95 % intervals of the scores, over the choice of images."""
    scores, truths = predictions.label_probabilities.double().numpy(), predictions.label_targets.numpy()
    measures: dict[str, Callable[[NDArray[np.int64]], float]] = {
        "micro_f1": lambda drawn: micro_f1(scores[drawn] > 0.5, truths[drawn]),
        "macro_f1": lambda drawn: macro_f1(scores[drawn] > 0.5, truths[drawn]),
        "mean_average_precision": lambda drawn: mean_average_precision(scores[drawn], truths[drawn]),
    }
    intervals = {name: bootstrap_interval(measure, len(scores)) for name, measure in measures.items()}
    return {name: (max(0.0, low), min(1.0, high)) for name, (low, high) in intervals.items()}


def micro_f1(predicted: NDArray[np.bool_], truths: NDArray[np.bool_]) -> float:
    """F1 over all labels of all images, (n, L) each."""
    return 2 * float((predicted & truths).sum()) / max(1, int(predicted.sum() + truths.sum()))


def macro_f1(predicted: NDArray[np.bool_], truths: NDArray[np.bool_]) -> float:
    """F1 of each class, averaged over the classes that have an image."""
    images = truths.sum(axis=0)
    scores = 2 * (predicted & truths).sum(axis=0) / np.maximum(1, predicted.sum(axis=0) + images)
    return float(scores[images > 0].mean()) if images.any() else 0.0


def mean_average_precision(scores: NDArray[np.float64], truths: NDArray[np.bool_]) -> float:
    """Average precision, averaged over the classes that have an image."""
    has_images = truths.any(axis=0)
    pairs = zip(scores.T[has_images], truths.T[has_images], strict=True)
    return float(np.mean([average_precision(score, truth) for score, truth in pairs])) if has_images.any() else 0.0


def average_precision(scores: NDArray[np.float64], truths: NDArray[np.bool_]) -> float:
    """Precision at each threshold, weighted by the recall it adds; images with equal scores share a threshold."""
    order = np.argsort(-scores, kind="stable")
    hits = truths[order].cumsum()
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)  # of each group of equal scores
    precision = hits[last] / (last + 1)
    return float((precision * np.diff(hits[last], prepend=0)).sum() / hits[-1])
