"""What a model predicts for each image, and counts of correct predictions.

Counts are summed, and averages never averaged, so that batches of any size and ranks add up.

    n images   B images of a batch   L classes

A multi-label prediction is correct if it has all labels of the image and no other (exact match). A label is predicted
where its probability is above its class's threshold, or one half. An image without a label is correct if none is
predicted.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.config import PreprocessConfig
from vitrail.data.loader import Batch
from vitrail.errors import DataError
from vitrail.inference.precision import prepare_inputs
from vitrail.model.vit import Model
from vitrail.runtime import distributed
from vitrail.runtime.devices import finish_one_late, start_copy_to_cpu
from vitrail.weights.trained import is_label_predicted, logits_to_probabilities

__all__ = ["Counts"]

MAX_CONFUSION_CLASSES = 4096  # classes: a matrix of 134 MB
MIN_TOP5_CLASSES = 10  # with fewer, five guesses say little, and top-5 is not shown


@dataclasses.dataclass(frozen=True)
class Counts:
    """Sums over labeled images.

    `ValidationResult.val` is one.

        vitrail.train("digits", data="digits", epochs=5, on_evaluation=lambda result: print(result.val.top1))
    """

    images: int
    correct: int
    correct_top5: int
    loss: float
    """The summed negative log-likelihood of the true class; for multi-label images, of every class's presence."""
    confusion: Tensor
    """int64 (L, L): rows are true classes, columns predicted ones; zeros for multi-label images, and (0, 0) above
    MAX_CONFUSION_CLASSES."""

    def __add__(self, other: Self) -> "Counts":
        return Counts(*map(operator.add, vars(self).values(), vars(other).values()))

    @property
    def top1(self) -> float:
        """The accuracy; for multi-label images, exact match."""
        return self.correct / self.images

    @property
    def top5(self) -> float:
        """The share of images whose class is among the five likeliest."""
        return self.correct_top5 / self.images

    @property
    def has_confusion(self) -> bool:
        """Whether correct images are known by class."""
        return bool(self.confusion.any())

    @property
    def macro_accuracy(self) -> float:
        """The accuracy of each class, averaged over the classes that have images."""
        images = self.confusion.sum(dim=1)
        return float((self.confusion.diagonal() / images)[images > 0].mean())

    @property
    def mean_loss(self) -> float:
        """The mean loss of an image."""
        return self.loss / self.images


def _all_reduce_counts(counts: Counts, device: torch.device) -> Counts:
    """The counts of all ranks' images."""
    if not distributed.is_distributed():
        return counts
    numbers = torch.tensor([counts.images, counts.correct, counts.correct_top5], device=device)
    images, correct, correct_top5 = distributed.all_reduce_sum(numbers).tolist()
    loss = float(distributed.all_reduce_sum(torch.tensor(counts.loss, dtype=torch.float64, device=device)))
    confusion = distributed.all_reduce_sum(counts.confusion.to(device)).cpu()
    return Counts(images, correct, correct_top5, loss, confusion)


class Predictions(NamedTuple):
    """What a model predicts for each image: the five likeliest classes, and the loss."""

    classes: Tensor  # int64 (n, 5)
    probabilities: Tensor  # float32 (n, 5)
    losses: Tensor  # float32 (n,)
    correct: Tensor  # bool (n,)
    images: Tensor  # int64 (n,): the index of each image in the split
    labels: Tensor  # int64 (n,): the true class; -1 for multi-label images
    in_top5: Tensor  # bool (n,): whether a true class is among the five
    label_probabilities: Tensor = torch.zeros(0, 0)  # float32 (n, L): of every class, for multi-label images only
    label_targets: Tensor = torch.zeros(0, 0, dtype=torch.bool)  # bool (n, L): whether the image has the label
    predicted_labels: Tensor = torch.zeros(0, 0, dtype=torch.bool)  # bool (n, L): whether the label is predicted

    @property
    def multi_label(self) -> bool:
        """Whether images may have several labels."""
        return self.label_probabilities.shape[1] > 0

    @property
    def confidence(self) -> Tensor:
        """The probability of each prediction, float32 (n,); for a multi-label one, that all its labels are correct."""
        if self.multi_label:
            probabilities = self.label_probabilities
            return torch.where(self.predicted_labels, probabilities, 1 - probabilities).prod(dim=1)
        return self.probabilities[:, 0]

    @property
    def calibration_pairs(self) -> tuple[Tensor, Tensor]:
        """Probabilities and whether each came true: one a prediction, or one a label for multi-label images."""
        if self.multi_label:
            return self.label_probabilities.flatten(), self.label_targets.flatten()
        return self.confidence, self.correct

    def get_predicted_classes(self, row: int) -> list[int]:
        """The classes predicted for an image: one, or any number for multi-label images."""
        if self.multi_label:
            return [int(index) for index in self.predicted_labels[row].nonzero()[:, 0]]
        return [int(self.classes[row, 0])]


def count_batch(logits: Tensor, targets: Tensor) -> Counts:
    """The counts of one batch: logits (B, L), classes (B,) or shares (B, L)."""
    return count_predictions(
        _make_predictions(logits.float(), targets, 1.0, multi_label=targets.ndim == 2), logits.shape[1]
    )


def _make_empty_confusion(num_classes: int) -> Tensor:
    """A confusion matrix of no image; (0, 0) for so many classes that it would take gigabytes."""
    side = num_classes if num_classes <= MAX_CONFUSION_CLASSES else 0
    return torch.zeros(side, side, dtype=torch.int64)


def _make_predictions(
    logits: Tensor, targets: Tensor, temperature: float, *, multi_label: bool, label_thresholds: Sequence[float] = ()
) -> Predictions:
    logits = logits / temperature
    probabilities = logits_to_probabilities(logits, multi_label=multi_label)
    if targets.ndim == 1:
        losses = F.cross_entropy(logits, targets, reduction="none")
    else:
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices  # (B, 5)
    likeliest, images = probabilities.gather(1, best), torch.arange(len(logits))
    if targets.ndim == 1:
        in_top5 = (best == targets[:, None]).any(dim=1)
        return Predictions(best, likeliest, losses, targets == best[:, 0], images, targets, in_top5)
    truths = targets > 0
    predicted = is_label_predicted(probabilities, label_thresholds)
    correct = (predicted == truths).all(dim=1)
    labels, in_top5 = torch.full_like(best[:, 0], -1), truths.gather(1, best).any(dim=1)
    return Predictions(best, likeliest, losses, correct, images, labels, in_top5, probabilities, truths, predicted)


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


def evaluate_batches(model: Model, batches: Iterable[Batch], preprocess: PreprocessConfig) -> Counts:
    """The counts of a model over the labeled images of all ranks; the model is left in eval mode."""
    total = Counts(0, 0, 0, 0.0, _make_empty_confusion(model.config.classes))
    for logits, targets, _ in iterate_logits(model, batches, preprocess):
        total = total + count_batch(logits, targets)
    total = _all_reduce_counts(total, next(model.parameters()).device)
    if not total.images:
        raise DataError("there is no image to evaluate on")
    return total


def predict_batches(
    model: nn.Module,
    batches: Iterable[Batch],
    preprocess: PreprocessConfig,
    *,
    temperature: float,
    num_classes: int,
    multi_label: bool = False,
    label_thresholds: Sequence[float] = (),
) -> Predictions:
    """The predictions of a model for all images of the batches, on the CPU.

    With `multi_label`, or for multi-label images, each class has a probability of its own, and its label is predicted
    above its threshold.
    """

    def start(logits: Tensor, targets: Tensor, images: Tensor) -> Callable[[], Predictions]:
        part = _make_predictions(
            logits,
            targets,
            temperature,
            multi_label=multi_label or targets.ndim == 2,
            label_thresholds=label_thresholds,
        )
        wait = start_copy_to_cpu(*part._replace(images=images.to(logits.device)))
        return lambda: Predictions(*wait())

    computed = iterate_logits(model, batches, preprocess)
    parts = list(finish_one_late(start(*batch) for batch in computed))
    if not parts:
        empty = torch.zeros(0, num_classes), torch.zeros(0, dtype=torch.int64)
        return _make_predictions(*empty, temperature, multi_label=multi_label)
    return Predictions(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def count_predictions(predictions: Predictions, num_classes: int) -> Counts:
    """The counts of predictions by a model of `num_classes` classes."""
    if not len(predictions.images):
        raise DataError("there is no image to evaluate on")
    confusion = _make_empty_confusion(num_classes)
    if len(confusion) and bool((predictions.labels >= 0).all()):
        pairs = predictions.labels * num_classes + predictions.classes[:, 0]
        confusion = torch.bincount(pairs, minlength=num_classes * num_classes).reshape(num_classes, num_classes)
    loss = float(predictions.losses.cpu().double().sum())
    return Counts(
        len(predictions.images), int(predictions.correct.sum()), int(predictions.in_top5.sum()), loss, confusion.cpu()
    )


@torch.inference_mode()
def iterate_logits(
    model: nn.Module, batches: Iterable[Batch], preprocess: PreprocessConfig
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Logits (B, L), float32, and targets, on the model's device; and the indices of the images in the split."""
    device = next(model.parameters()).device
    network = model.model if isinstance(model, EvalWrapper) else model
    model.eval()
    for batch in batches:
        targets = batch.targets
        if targets.ndim == 1 and (targets < 0).any():
            raise DataError("accuracy needs images with a label, and some of these have none")
        if not len(targets):
            continue
        logits = model(prepare_inputs(network, batch.pixels.to(device, non_blocking=True), preprocess)).float()
        yield logits, targets.to(device, non_blocking=True), batch.positions
