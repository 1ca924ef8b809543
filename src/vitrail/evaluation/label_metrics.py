"""Metrics of multi-label predictions: average precision, F1, precision and recall, and which labels are mistaken.

    n images   L classes

A label is predicted where its probability is above its class's threshold, or above one half. Averages over classes
omit those without an image, and `classes_without_images` counts them.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.evaluation import calibration, statistics
from vitrail.evaluation.predictions import Predictions

CURVE_THRESHOLDS = tuple(percent / 100 for percent in range(1, 100))
"""The common thresholds at which F1 is listed."""


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


class ThresholdScore(NamedTuple):
    """F1 where one threshold serves for all labels."""

    threshold: float
    micro_f1: float
    macro_f1: float


class LabelConfusion(NamedTuple):
    """A label that an image has and that was missed, and one that was predicted instead or besides."""

    missed: int
    extra: int
    images: int


@dataclasses.dataclass(frozen=True)
class LabelScores:
    """The metrics of multi-label predictions beside exact match."""

    micro_f1: float
    """Over all labels of all images."""
    macro_f1: float
    """Averaged over classes."""
    mean_average_precision: float
    micro_average_precision: float
    """Of all labels of all images in one ranking."""
    precision: float
    """The share of predicted labels that are true."""
    recall: float
    """The share of true labels that are predicted."""
    classes_without_images: int
    """Classes that no image has; averages over classes omit them."""
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
    scores, truths, predicted = _get_arrays(predictions)
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
        micro_average_precision=micro_average_precision(scores, truths),
        precision=compute_precision(predicted, truths),
        recall=compute_recall(predicted, truths),
        classes_without_images=sum(not score.images for score in classes),
        calibration_error=calibration.expected_calibration_error(*predictions.calibration_pairs),
        bins=tuple((int(count), float(total), int(true)) for count, total, true in zip(*binned, strict=True)),
        classes=classes,
    )


def measure_labels_with_intervals(predictions: Predictions) -> dict[str, Any]:
    """The scores over all classes, and their 95 % intervals over the choice of images."""
    scores, truths, predicted = _get_arrays(predictions)
    measures: dict[str, Callable[[NDArray[np.int64]], float]] = {
        "mean_average_precision": lambda drawn: mean_average_precision(scores[drawn], truths[drawn]),
        "micro_f1": lambda drawn: micro_f1(predicted[drawn], truths[drawn]),
        "macro_f1": lambda drawn: macro_f1(predicted[drawn], truths[drawn]),
        "precision": lambda drawn: compute_precision(predicted[drawn], truths[drawn]),
        "recall": lambda drawn: compute_recall(predicted[drawn], truths[drawn]),
    }
    facts: dict[str, Any] = {}
    for name, measure in measures.items():
        low, high = statistics.bootstrap_interval(measure, len(scores))
        facts |= {name: measure(np.arange(len(scores))), f"{name}_interval": (max(0.0, low), min(1.0, high))}
    facts["micro_average_precision"] = micro_average_precision(scores, truths)  # which takes long to bootstrap
    return facts | {"classes_without_images": int((~truths.any(axis=0)).sum())}


def collect_class_facts(predictions: Predictions, names: Sequence[str], thresholds: Sequence[float]) -> dict[str, Any]:
    """For JSON the scores of each class, and F1 at common thresholds; nothing where images have one label each."""
    if not predictions.multi_label:
        return {}
    rows = zip(names, measure_labels(predictions).classes, thresholds, strict=True)
    return {
        "per_class": {
            name: {**dataclasses.asdict(score), "f1": score.f1, "threshold": threshold}
            for name, score, threshold in rows
        },
        "f1_by_threshold": [score._asdict() for score in list_threshold_scores(predictions)],
    }


def list_threshold_scores(
    predictions: Predictions, thresholds: Sequence[float] = CURVE_THRESHOLDS
) -> list[ThresholdScore]:
    """F1 at each threshold, if it served for all labels."""
    scores, truths, _ = _get_arrays(predictions)
    return [
        ThresholdScore(threshold, micro_f1(predicted, truths), macro_f1(predicted, truths))
        for threshold in thresholds
        for predicted in [scores > threshold]
    ]


def list_label_confusions(predictions: Predictions) -> list[LabelConfusion]:
    """Each pair of a missed and an extra label that some images share, the most frequent first."""
    _, truths, predicted = _get_arrays(predictions)
    pairs: Counter[tuple[int, int]] = Counter()
    for truth, labels in zip(truths, predicted, strict=True):
        extra = np.flatnonzero(labels & ~truth).tolist()
        pairs.update((missed, label) for missed in np.flatnonzero(truth & ~labels).tolist() for label in extra)
    ordered = sorted(pairs.items(), key=lambda pair: (-pair[1], pair[0]))
    return [LabelConfusion(*pair, images) for pair, images in ordered]


def _get_arrays(predictions: Predictions) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Probabilities, true labels and predicted labels, (n, L) each."""
    columns = predictions.label_targets, predictions.predicted_labels
    truths, predicted = (column.numpy() for column in columns)
    return predictions.label_probabilities.double().numpy(), truths, predicted


def micro_f1(predicted: NDArray[np.bool_], truths: NDArray[np.bool_]) -> float:
    """F1 over all labels of all images, (n, L) each."""
    return 2 * float((predicted & truths).sum()) / max(1, int(predicted.sum() + truths.sum()))


def macro_f1(predicted: NDArray[np.bool_], truths: NDArray[np.bool_]) -> float:
    """F1 of each class, averaged over the classes that have an image."""
    images = truths.sum(axis=0)
    scores = 2 * (predicted & truths).sum(axis=0) / np.maximum(1, predicted.sum(axis=0) + images)
    return float(scores[images > 0].mean()) if images.any() else 0.0


def compute_precision(predicted: NDArray[np.bool_], truths: NDArray[np.bool_]) -> float:
    """The share of predicted labels that are true, (n, L) each; 0 where none is predicted."""
    return float((predicted & truths).sum()) / max(1, int(predicted.sum()))


def compute_recall(predicted: NDArray[np.bool_], truths: NDArray[np.bool_]) -> float:
    """The share of true labels that are predicted, (n, L) each; 0 where none is true."""
    return float((predicted & truths).sum()) / max(1, int(truths.sum()))


def mean_average_precision(scores: NDArray[np.float64], truths: NDArray[np.bool_]) -> float:
    """Average precision, averaged over the classes that have an image."""
    has_images = truths.any(axis=0)
    pairs = zip(scores.T[has_images], truths.T[has_images], strict=True)
    return float(np.mean([average_precision(score, truth) for score, truth in pairs])) if has_images.any() else 0.0


def micro_average_precision(scores: NDArray[np.float64], truths: NDArray[np.bool_]) -> float:
    """The average precision of all labels of all images in one ranking, (n, L) each."""
    return average_precision(scores.ravel(), truths.ravel()) if truths.any() else 0.0


def average_precision(scores: NDArray[np.float64], truths: NDArray[np.bool_]) -> float:
    """Precision at each threshold, weighted by the recall it adds; images with equal scores share a threshold."""
    order = np.argsort(-scores, kind="stable")
    hits = truths[order].cumsum()
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)  # of each group of equal scores
    precision = hits[last] / (last + 1)
    return float((precision * np.diff(hits[last], prepend=0)).sum() / hits[-1])
