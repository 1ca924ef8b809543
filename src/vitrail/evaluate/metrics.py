"""Everything that is measured of a model's answers, each number with its interval.

n images   B images of a batch   L outputs
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.data.loader import Batch
from vitrail.evaluate import abstention, calibration, intervals, multi_label
from vitrail.evaluate.intervals import Interval
from vitrail.evaluate.predictions import Counts, Predictions


class EvalWrapper(nn.Module):
    """A model as it is measured: of an image and its mirror image the mean, of all outputs some."""

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
    """The batches with the model's outputs, `total` of them, in place of the data's classes."""
    places = torch.tensor(outputs)
    for batch in batches:
        targets = batch.targets
        if targets.ndim == 1:
            fresh = torch.where(targets >= 0, places[targets], targets)
        else:
            fresh = targets.new_zeros(len(targets), num_outputs).index_copy_(1, places, targets)
        yield batch._replace(targets=fresh)


@dataclasses.dataclass(frozen=True)
class EvaluationMetrics:
    """The numbers of one model on one set."""

    images: int
    right: int
    top1: float
    top1_interval: Interval
    top5: float
    top5_interval: Interval
    macro: float | None
    """None where images have several labels."""
    macro_interval: Interval | None
    loss: float
    """Minus the log probability of the true class: the negative log-likelihood."""
    loss_interval: Interval | None
    calibration_error: float
    calibration_error_interval: Interval
    aurc: float
    """Wrong answers on average over all coverages, where the least sure are left out first."""
    real: float | None = None
    """The share of answers in the image's set of ReaL labels, of images that have any."""
    real_interval: Interval | None = None
    real_images: int | None = None
    labels: dict[str, Any] | None = None
    """F1 and mean average precision of multi-label predictions, with intervals; `top1` is exact match then."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        if self.labels is None:
            return found
        exact = {"exact_match": found.pop("top1"), "exact_match_interval": found.pop("top1_interval")}
        others = {key: value for key, value in found.items() if key not in ("top5", "top5_interval", "labels")}
        return exact | self.labels | others


def compute_metrics(
    counts: Counts, predictions: Predictions, real_labels: Sequence[frozenset[int]] | None = None
) -> EvaluationMetrics:
    """Of the counts and what was said of each image; `real` by the images' numbers in their split."""
    sure, true = predictions.calibration_pairs
    macro = interval = None
    if counts.has_confusion:
        macro, interval = counts.macro_accuracy, _bootstrap_macro_accuracy(counts.confusion)
    more: dict[str, Any] = {} if real_labels is None else _measure_real_accuracy(predictions, real_labels)
    if predictions.multi_label:
        more["labels"] = _measure_label_scores(predictions)
    return EvaluationMetrics(
        images=counts.images,
        right=counts.correct,
        top1=counts.top1,
        top1_interval=intervals.wilson_interval(counts.correct, counts.images),
        top5=counts.top5,
        top5_interval=intervals.wilson_interval(counts.correct_top5, counts.images),
        macro=macro,
        macro_interval=interval,
        loss=counts.mean_loss,
        loss_interval=intervals.mean_interval(predictions.losses.double().numpy()),
        calibration_error=calibration.expected_calibration_error(sure, true),
        calibration_error_interval=_bootstrap_calibration_error(
            sure.reshape(len(predictions.images), -1).double().numpy(),
            true.reshape(len(predictions.images), -1).numpy(),
        ),
        aurc=abstention.compute_aurc(abstention.compute_risk_coverage(predictions.confidence, predictions.correct)),
        **more,
    )


def _measure_label_scores(predictions: Predictions) -> dict[str, Any]:
    found, between = multi_label.measure_labels(predictions), multi_label.measure_label_intervals(predictions)
    return {
        key: value
        for name, interval in between.items()
        for key, value in ((name, getattr(found, name)), (f"{name}_interval", interval))
    }


def _bootstrap_macro_accuracy(confusion: Tensor) -> Interval:
    hits = confusion.diagonal().numpy()
    counts = np.concatenate([hits, confusion.sum(dim=1).numpy() - hits])
    right, wrong = np.split(intervals.resample_counts(counts), 2, axis=1)  # (R, L) each
    images = right + wrong
    shares = np.divide(right, images, out=np.full(images.shape, np.nan), where=images > 0)
    return intervals.percentile_interval(np.nanmean(shares, axis=1))


def _bootstrap_calibration_error(
    probabilities: np.ndarray[Any, Any], correct: np.ndarray[Any, Any], bins: int = 15
) -> Interval:
    """Of probabilities (n, L), one of each image or one of each label; images are drawn, with all of theirs."""
    bin_of = np.clip(np.ceil(probabilities * bins).astype(np.int64) - 1, 0, bins - 1)
    gap = probabilities - correct

    def compute_error(indices: np.ndarray[Any, np.dtype[np.int64]]) -> float:
        some, gaps = bin_of[indices].ravel(), gap[indices].ravel()
        return float(np.abs(np.bincount(some, weights=gaps, minlength=bins)).sum() / len(some))

    low, high = intervals.bootstrap_interval(compute_error, len(probabilities))
    return max(0.0, low), max(0.0, high)


def _measure_real_accuracy(predictions: Predictions, real_labels: Sequence[frozenset[int]]) -> dict[str, Any]:
    first = predictions.classes[:, 0].tolist()
    counted = [
        (answer, real_labels[image])
        for answer, image in zip(first, predictions.images.tolist(), strict=True)
        if real_labels[image]
    ]
    right = sum(answer in labels for answer, labels in counted)
    return {
        "real": right / len(counted) if counted else None,
        "real_interval": intervals.wilson_interval(right, len(counted)) if counted else None,
        "real_images": len(counted),
    }
