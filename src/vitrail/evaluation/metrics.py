"""All metrics of a model's predictions, each with its confidence interval.

    n images   L outputs

A label of a multi-label image is predicted where its probability is above one half. Averages over classes omit those
without an image.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.evaluation import calibration, statistics
from vitrail.evaluation.predictions import Counts, Predictions
from vitrail.evaluation.statistics import Interval, wilson_interval


@dataclasses.dataclass(frozen=True)
class EvaluationMetrics:
    """The metrics of one model on one dataset."""

    images: int
    correct: int
    top1: float
    top1_interval: Interval
    top5: float
    top5_interval: Interval
    macro: float | None
    """The mean accuracy over classes; None for multi-label images."""
    macro_interval: Interval | None
    loss: float
    """The negative log-likelihood of the true class."""
    loss_interval: Interval | None
    calibration_error: float
    calibration_error_interval: Interval
    aurc: float
    """The error rate averaged over all coverages, where the least confident predictions are dropped first."""
    real: float | None = None
    """The share of predictions among the image's ReaL labels, of the images that have any."""
    real_interval: Interval | None = None
    real_images: int | None = None
    labels: dict[str, Any] | None = None
    """F1 and mean average precision of multi-label predictions, with intervals; `top1` is then exact match."""

    def to_dict(self) -> dict[str, Any]:
        """The metrics as JSON has them, without those that do not apply."""
        metrics = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        if self.labels is None:
            return metrics
        exact = {"exact_match": metrics.pop("top1"), "exact_match_interval": metrics.pop("top1_interval")}
        others = {key: value for key, value in metrics.items() if key not in ("top5", "top5_interval", "labels")}
        return exact | self.labels | others


def compute_metrics(
    counts: Counts, predictions: Predictions, real_labels: Sequence[frozenset[int]] | None = None
) -> EvaluationMetrics:
    """All metrics of predictions; `real_labels` are in the order of the split's images."""
    probabilities, correct = predictions.calibration_pairs
    curve = calibration.compute_risk_coverage(predictions.confidence, predictions.correct)
    optional: dict[str, Any] = {} if real_labels is None else _measure_real_accuracy(predictions, real_labels)
    if predictions.multi_label:
        optional["labels"] = _measure_labels_with_intervals(predictions)
    return EvaluationMetrics(
        images=counts.images,
        correct=counts.correct,
        top1=counts.top1,
        top1_interval=wilson_interval(counts.correct, counts.images),
        top5=counts.top5,
        top5_interval=wilson_interval(counts.correct_top5, counts.images),
        macro=counts.macro_accuracy if counts.has_confusion else None,
        macro_interval=_bootstrap_macro_accuracy(counts.confusion) if counts.has_confusion else None,
        loss=counts.mean_loss,
        loss_interval=statistics.mean_interval(predictions.losses.double().numpy()),
        calibration_error=calibration.expected_calibration_error(probabilities, correct),
        calibration_error_interval=_bootstrap_calibration_error(
            probabilities.reshape(len(predictions.images), -1).double().numpy(),
            correct.reshape(len(predictions.images), -1).numpy(),
        ),
        aurc=calibration.compute_aurc(curve),
        **optional,
    )


def _bootstrap_macro_accuracy(confusion: Tensor) -> Interval:
    hits = confusion.diagonal().numpy()
    counts = np.concatenate([hits, confusion.sum(dim=1).numpy() - hits])
    correct, wrong = np.split(statistics.resample_counts(counts), 2, axis=1)  # (R, L) each
    images = correct + wrong
    accuracies = np.divide(correct, images, out=np.full(images.shape, np.nan), where=images > 0)
    return statistics.percentile_interval(np.nanmean(accuracies, axis=1))


def _bootstrap_calibration_error(probabilities: NDArray[np.float64], correct: NDArray[np.bool_]) -> Interval:
    """The interval for probabilities (n, L), L of each image; images are drawn, each with all of its probabilities."""
    bins, gaps = calibration.assign_bins(probabilities), probabilities - correct

    def compute_error(indices: NDArray[np.int64]) -> float:
        drawn_bins, drawn_gaps = bins[indices].ravel(), gaps[indices].ravel()
        bin_gaps = np.bincount(drawn_bins, weights=drawn_gaps, minlength=calibration.CALIBRATION_BINS)
        return float(np.abs(bin_gaps).sum() / len(drawn_bins))

    low, high = statistics.bootstrap_interval(compute_error, len(probabilities))
    return max(0.0, low), max(0.0, high)


def _measure_real_accuracy(predictions: Predictions, real_labels: Sequence[frozenset[int]]) -> dict[str, Any]:
    predicted = zip(predictions.classes[:, 0].tolist(), predictions.images.tolist(), strict=True)
    hits = [output in real_labels[image] for output, image in predicted if real_labels[image]]
    return {
        "real": sum(hits) / len(hits) if hits else None,
        "real_interval": wilson_interval(sum(hits), len(hits)) if hits else None,
        "real_images": len(hits),
    }


# --- multi-label predictions -----------------------------------------------------------------------------------------


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
        calibration_error=calibration.expected_calibration_error(*predictions.calibration_pairs),
        bins=tuple((int(count), float(total), int(true)) for count, total, true in zip(*binned, strict=True)),
        classes=classes,
    )


def _measure_labels_with_intervals(predictions: Predictions) -> dict[str, Any]:
    """The scores over all classes, and their 95 % intervals over the choice of images."""
    scores, truths = predictions.label_probabilities.double().numpy(), predictions.label_targets.numpy()
    measures: dict[str, Callable[[NDArray[np.int64]], float]] = {
        "micro_f1": lambda drawn: micro_f1(scores[drawn] > 0.5, truths[drawn]),
        "macro_f1": lambda drawn: macro_f1(scores[drawn] > 0.5, truths[drawn]),
        "mean_average_precision": lambda drawn: mean_average_precision(scores[drawn], truths[drawn]),
    }
    facts: dict[str, Any] = {}
    for name, measure in measures.items():
        low, high = statistics.bootstrap_interval(measure, len(scores))
        facts |= {name: measure(np.arange(len(scores))), f"{name}_interval": (max(0.0, low), min(1.0, high))}
    return facts


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
