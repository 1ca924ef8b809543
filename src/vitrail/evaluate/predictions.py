"""How often a model is right. Counts are summed, never averages averaged, so batches of any sizes and ranks add up.

    n images   B images of a batch   L classes

A multi-label prediction is right where it has all labels of the image and no other (exact match); a label is predicted
where its probability is above one half. An image without a label is right where it is given none.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.config import PreprocessConfig
from vitrail.data.loader import Batch
from vitrail.data.transforms import normalize
from vitrail.errors import DataError
from vitrail.model.build import Model
from vitrail.runtime import distributed

MAX_CONFUSION_CLASSES = 4096  # classes: a matrix of 134 MB
MIN_TOP5_CLASSES = 10  # with fewer, five guesses of them say little and top-5 is not shown


@dataclasses.dataclass(frozen=True)
class Counts:
    """Sums over labelled images."""

    images: int
    correct: int
    correct_top5: int
    loss: float
    """Minus the log probability of the true class, summed; of several labels, of each class's yes or no."""
    confusion: Tensor
    """int64 (L, L): rows are true classes, columns what the model said; zeros where images have several labels, and
    (0, 0) above CONFUSED classes."""

    def __add__(self, other: Self) -> "Counts":
        return Counts(
            self.images + other.images,
            self.correct + other.correct,
            self.correct_top5 + other.correct_top5,
            self.loss + other.loss,
            self.confusion + other.confusion,
        )

    @property
    def top1(self) -> float:
        """The share that is right; of several labels exact match."""
        return self.correct / self.images

    @property
    def top5(self) -> float:
        """The share whose class is among the five likeliest."""
        return self.correct_top5 / self.images

    @property
    def has_confusion(self) -> bool:
        """Whether it is known of which class the images are that are right."""
        return bool(self.confusion.any())

    @property
    def macro_accuracy(self) -> float:
        """The share that is right of each class, averaged over the classes that have images."""
        each = self.confusion.sum(dim=1)
        return float((self.confusion.diagonal() / each)[each > 0].mean())

    @property
    def mean_loss(self) -> float:
        """The loss of an image on average."""
        return self.loss / self.images


def all_reduce_counts(counts: Counts, device: torch.device) -> Counts:
    """The counts of all ranks' images."""
    if not distributed.is_distributed():
        return counts
    numbers = torch.tensor([counts.images, counts.correct, counts.correct_top5], device=device)
    images, right, five = distributed.all_reduce_sum(numbers).tolist()
    loss = float(distributed.all_reduce_sum(torch.tensor(counts.loss, dtype=torch.float64, device=device)))
    return Counts(images, right, five, loss, distributed.all_reduce_sum(counts.confusion.to(device)).cpu())


class Predictions(NamedTuple):
    """What a model said of each image, the likeliest five first, and how wrong it was."""

    classes: Tensor  # int64 (n, 5)
    probabilities: Tensor  # float32 (n, 5)
    losses: Tensor  # float32 (n,)
    correct: Tensor  # bool (n,)
    images: Tensor  # int64 (n,): which of the split's images
    labels: Tensor  # int64 (n,): the true class; -1 where there may be several
    in_top5: Tensor  # bool (n,): whether a true class is among the five
    label_probabilities: Tensor = torch.zeros(
        0, 0
    )  # float32 (n, L): each class's probability, where images are multi-label
    label_targets: Tensor = torch.zeros(0, 0, dtype=torch.bool)  # bool (n, L): whether the image has the label

    @property
    def multi_label(self) -> bool:
        """Whether images may have several labels."""
        return self.label_probabilities.shape[1] > 0

    @property
    def confidence(self) -> Tensor:
        """The probability of each answer, float32 (n,); of a multi-label one that all its labels are right."""
        return (
            self.label_probabilities.maximum(1 - self.label_probabilities).prod(dim=1)
            if self.multi_label
            else self.probabilities[:, 0]
        )

    @property
    def calibration_pairs(self) -> tuple[Tensor, Tensor]:
        """Probabilities, and whether what each is of is so: of answers, or of every label where images have several."""
        if self.multi_label:
            return self.label_probabilities.flatten(), self.label_targets.flatten()
        return self.confidence, self.correct

    def get_predicted_classes(self, row: int) -> list[int]:
        """The classes that an image was given: one, or of several labels any number."""
        if self.multi_label:
            return [int(index) for index in (self.label_probabilities[row] > 0.5).nonzero()[:, 0]]
        return [int(self.classes[row, 0])]


def count_batch(logits: Tensor, targets: Tensor) -> Counts:
    """The counts of one batch: logits (B, L), classes (B,) or shares (B, L)."""
    return count_predictions(
        _make_predictions(logits.float(), targets, 1.0, multi_label=targets.ndim == 2), logits.shape[1]
    )


def _make_empty_confusion(num_classes: int) -> Tensor:
    """A confusion of no image; of so many classes that it would take gigabytes, none at all."""
    side = num_classes if num_classes <= MAX_CONFUSION_CLASSES else 0
    return torch.zeros(side, side, dtype=torch.int64)


def _make_predictions(logits: Tensor, targets: Tensor, temperature: float, *, multi_label: bool) -> Predictions:
    logits = logits / temperature
    probabilities = logits.sigmoid() if multi_label else logits.softmax(dim=1)
    if targets.ndim == 1:
        losses = F.cross_entropy(logits, targets, reduction="none")
    else:
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices  # (B, 5)
    likeliest, images = probabilities.gather(1, best), torch.arange(len(logits))
    if targets.ndim == 1:
        in_five = (best == targets[:, None]).any(dim=1)
        return Predictions(best, likeliest, losses, targets == best[:, 0], images, targets, in_five)
    truths = targets > 0
    right = ((probabilities > 0.5) == truths).all(dim=1)
    labels, in_five = torch.full_like(best[:, 0], -1), truths.gather(1, best).any(dim=1)
    return Predictions(best, likeliest, losses, right, images, labels, in_five, probabilities, truths)


def evaluate_batches(
    model: Model,
    batches: Iterable[Batch],
    preprocess: PreprocessConfig,
    *,
    reduce_ranks: Callable[[Counts], Counts] = lambda counts: counts,
) -> Counts:
    """The counts of a model over labelled images, those of other processes included by `over_ranks`.

    The model is left in eval mode.
    """
    classes = model.config.classes
    total = Counts(0, 0, 0, 0.0, _make_empty_confusion(classes))
    for logits, targets, _ in iterate_logits(model, batches, preprocess):
        total = total + count_batch(logits, targets)
    total = reduce_ranks(total)
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
) -> Predictions:
    """What a model of so many classes says of each image, on the CPU; no rows where there is none.

    With `several` each class has a probability of its own.
    """
    kept = []
    for logits, targets, images in iterate_logits(model, batches, preprocess):
        said = _make_predictions(logits, targets, temperature, multi_label=multi_label or targets.ndim == 2)._replace(
            images=images
        )
        kept.append(Predictions(*(column.cpu() for column in said)))
    if not kept:
        nothing = torch.zeros(0, num_classes), torch.zeros(0, dtype=torch.int64)
        return _make_predictions(*nothing, temperature, multi_label=multi_label)
    return Predictions(*(torch.cat(columns) for columns in zip(*kept, strict=True)))


def count_predictions(predictions: Predictions, num_classes: int) -> Counts:
    """The counts of all that was said, by a model of so many classes."""
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
    """Logits (B, L), float32, and targets of the images, on the model's device; and which images they are."""
    device = next(model.parameters()).device
    model.eval()
    for batch in batches:
        targets = batch.targets
        if targets.ndim == 1 and (targets < 0).any():
            raise DataError("accuracy is of images with a label; some of these have none")
        if not len(targets):
            continue
        logits = model(normalize(batch.pixels.to(device, non_blocking=True), preprocess)).float()
        yield logits, targets.to(device), batch.positions
