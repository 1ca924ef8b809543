"""What the predictions of a multi-label model are worth: exact match, F1 and mean average precision.

    n images   L classes

A label is predicted where its probability is above one half. Classes that no image has are left out of averages.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.evaluate import calibration, intervals
from vitrail.evaluate.intervals import Interval
from vitrail.evaluate.predictions import Predictions

BINS = 15


@dataclasses.dataclass(frozen=True)
class ClassScore:
    """How well one label is found."""

    images: int
    """That have the label."""
    predicted: int
    """That were given it."""
    correct: int
    """That have it and were given it."""
    average_precision: float | None
    """None where no image has the label."""

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        return 2 * self.correct / max(1, self.images + self.predicted)


@dataclasses.dataclass(frozen=True)
class LabelScores:
    """The numbers of a multi-label model beside exact match, which is the share of images that are right."""

    micro_f1: float
    """Over all labels of all images."""
    macro_f1: float
    """Averaged over classes."""
    mean_average_precision: float
    calibration_error: float
    """Of every label's probability, not of the likeliest alone."""
    bins: tuple[tuple[int, float, int], ...]
    """Labels, the sum of their probabilities and how many of them are true, in bins of equal width."""
    classes: tuple[ClassScore, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: all but the classes."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "classes"}


def measure_labels(predictions: Predictions) -> LabelScores:
    """The scores of multi-label predictions."""
    scores, truths = predictions.label_probabilities.double().numpy(), predictions.label_targets.numpy()  # (n, L) each
    predicted = scores > 0.5
    classes = tuple(
        ClassScore(
            int(truth.sum()),
            int(given.sum()),
            int((truth & given).sum()),
            average_precision(score, truth) if truth.any() else None,
        )
        for score, truth, given in zip(scores.T, truths.T, predicted.T, strict=True)
    )
    return LabelScores(
        micro_f1=micro_f1(predicted, truths),
        macro_f1=macro_f1(predicted, truths),
        mean_average_precision=mean_average_precision(scores, truths),
        calibration_error=calibration.expected_calibration_error(
            predictions.label_probabilities.flatten(), predictions.label_targets.flatten(), BINS
        ),
        bins=_count_bins(scores.ravel(), truths.ravel()),
        classes=classes,
    )


def measure_label_intervals(predictions: Predictions) -> dict[str, Interval]:
    """95 % intervals of the scores, over the choice of images."""
    scores, truths = predictions.label_probabilities.double().numpy(), predictions.label_targets.numpy()
    measures: dict[str, Callable[[NDArray[np.int64]], float]] = {
        "micro_f1": lambda places: micro_f1(scores[places] > 0.5, truths[places]),
        "macro_f1": lambda places: macro_f1(scores[places] > 0.5, truths[places]),
        "mean_average_precision": lambda places: mean_average_precision(scores[places], truths[places]),
    }
    found = {name: intervals.bootstrap_interval(measure, len(scores)) for name, measure in measures.items()}
    return {name: (max(0.0, low), min(1.0, high)) for name, (low, high) in found.items()}


def micro_f1(predicted: NDArray[np.bool_], truths: NDArray[np.bool_]) -> float:
    """F1 over all labels of all images, (n, L) each."""
    return 2 * float((predicted & truths).sum()) / max(1, int(predicted.sum() + truths.sum()))


def macro_f1(predicted: NDArray[np.bool_], truths: NDArray[np.bool_]) -> float:
    """F1 of each class, averaged over the classes that an image has."""
    images = truths.sum(axis=0)
    shares = 2 * (predicted & truths).sum(axis=0) / np.maximum(1, predicted.sum(axis=0) + images)
    return float(shares[images > 0].mean()) if images.any() else 0.0


def mean_average_precision(scores: NDArray[np.float64], truths: NDArray[np.bool_]) -> float:
    """Average precision, averaged over the classes that an image has."""
    there = truths.any(axis=0)
    pairs = zip(scores.T[there], truths.T[there], strict=True)
    return float(np.mean([average_precision(score, truth) for score, truth in pairs])) if there.any() else 0.0


def average_precision(scores: NDArray[np.float64], truths: NDArray[np.bool_]) -> float:
    """Precision at each threshold, weighted by the recall it adds; images of equal score pass a threshold together."""
    order = np.argsort(-scores, kind="stable")
    hits = truths[order].cumsum()
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)  # of each group of equal scores
    precision = hits[last] / (last + 1)
    return float((precision * np.diff(hits[last], prepend=0)).sum() / hits[-1])


def _count_bins(scores: NDArray[np.float64], truths: NDArray[np.bool_]) -> tuple[tuple[int, float, int], ...]:
    places = np.clip(np.ceil(scores * BINS).astype(np.int64) - 1, 0, BINS - 1)  # a bin holds its upper edge
    columns = (np.bincount(places, weights=weights, minlength=BINS) for weights in (None, scores, truths))
    return tuple((int(count), float(total), int(true)) for count, total, true in zip(*columns, strict=True))
