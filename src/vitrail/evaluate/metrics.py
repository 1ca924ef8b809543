"""All metrics of a model's predictions, each with its confidence interval.

n images   B images of a batch   L outputs
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.data.loader import Batch
from vitrail.evaluate import abstention, calibration, multi_label, statistics
from vitrail.evaluate.predictions import Counts, Predictions
from vitrail.evaluate.statistics import Interval, wilson_interval


class EvalWrapper(nn.Module):
    """A model as it is evaluated: averaged over an image and its mirror image, restricted to some outputs."""

    def __init__(self, model: nn.Module, *, flip_tta: bool = False, outputs: Sequence[int] | None = None) -> None:
        super().__init__()
        self.model, self.flip_tta = model, flip_tta
        self.outputs = None if outputs is None else torch.tensor(outputs)

    def forward(self, images: Tensor) -> Tensor:
        logits = self.model(images)
        if self.flip_tta:
            logits = (logits + self.model(images.flip(-1))) / 2
        return logits if self.outputs is None else logits[:, self.outputs.to(logits.device)]


def relabel_batches(batches: Iterable[Batch], outputs: Sequence[int], num_outputs: int) -> Iterator[Batch]:
    """Replace the dataset's classes in batches by the model's outputs: class k is `outputs[k]` of `num_outputs`."""
    output_of_class = torch.tensor(outputs)
    for batch in batches:
        targets = batch.targets
        if targets.ndim == 1:
            relabeled = torch.where(targets >= 0, output_of_class[targets], targets)
        else:
            relabeled = targets.new_zeros(len(targets), num_outputs).index_copy_(1, output_of_class, targets)
        yield batch._replace(targets=relabeled)


@dataclasses.dataclass(frozen=True)
class EvaluationMetrics:
    """The metrics of one model on one dataset."""

    images: int
    right: int
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
    macro = macro_interval = None
    if counts.has_confusion:
        macro, macro_interval = counts.macro_accuracy, _bootstrap_macro_accuracy(counts.confusion)
    optional: dict[str, Any] = {} if real_labels is None else _measure_real_accuracy(predictions, real_labels)
    if predictions.multi_label:
        optional["labels"] = _measure_label_scores(predictions)
    return EvaluationMetrics(
        images=counts.images,
        right=counts.correct,
        top1=counts.top1,
        top1_interval=wilson_interval(counts.correct, counts.images),
        top5=counts.top5,
        top5_interval=wilson_interval(counts.correct_top5, counts.images),
        macro=macro,
        macro_interval=macro_interval,
        loss=counts.mean_loss,
        loss_interval=statistics.mean_interval(predictions.losses.double().numpy()),
        calibration_error=calibration.expected_calibration_error(probabilities, correct),
        calibration_error_interval=_bootstrap_calibration_error(
            probabilities.reshape(len(predictions.images), -1).double().numpy(),
            correct.reshape(len(predictions.images), -1).numpy(),
        ),
        aurc=abstention.compute_aurc(abstention.compute_risk_coverage(predictions.confidence, predictions.correct)),
        **optional,
    )


def _measure_label_scores(predictions: Predictions) -> dict[str, Any]:
    scores, intervals = multi_label.measure_labels(predictions), multi_label.measure_label_intervals(predictions)
    return {
        key: value
        for name, interval in intervals.items()
        for key, value in ((name, getattr(scores, name)), (f"{name}_interval", interval))
    }


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
