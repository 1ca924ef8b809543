"""All metrics of a model's predictions, each with its confidence interval.

    n images   L outputs

Averages over classes omit those without an image.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.evaluation import calibration, statistics
from vitrail.evaluation.label_metrics import measure_labels_with_intervals
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
    """The metrics of multi-label predictions (`label_metrics`), with intervals; `top1` is then exact match."""

    def to_dict(self) -> dict[str, Any]:
        """The metrics as JSON has them, without those that do not apply."""
        metrics = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        if self.labels is None:
            return metrics
        exact = {"exact_match": metrics.pop("top1"), "exact_match_interval": metrics.pop("top1_interval")}
        others = {key: value for key, value in metrics.items() if key not in ("top5", "top5_interval", "labels")}
        return self.labels | exact | others


def compute_metrics(
    counts: Counts, predictions: Predictions, real_labels: Sequence[frozenset[int]] | None = None
) -> EvaluationMetrics:
    """All metrics of predictions; `real_labels` are in the order of the split's images."""
    probabilities, correct = predictions.calibration_pairs
    curve = calibration.compute_risk_coverage(predictions.confidence, predictions.correct)
    optional: dict[str, Any] = {} if real_labels is None else _measure_real_accuracy(predictions, real_labels)
    if predictions.multi_label:
        optional["labels"] = measure_labels_with_intervals(predictions)
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
