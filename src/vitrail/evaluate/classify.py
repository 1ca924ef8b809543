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

from vitrail.config import Preprocess
from vitrail.data.loader import Batch
from vitrail.data.transforms import normalise
from vitrail.errors import DataError
from vitrail.model.build import Model

CONFUSED = 4096  # classes: a matrix of 134 MB
TOP5_CLASSES = 10  # with fewer, five guesses of them say little and top-5 is not shown


@dataclasses.dataclass(frozen=True)
class Counts:
    """Sums over labelled images."""

    images: int
    right: int
    right_in_five: int
    loss: float
    """Minus the log probability of the true class, summed; of several labels, of each class's yes or no."""
    confusion: Tensor
    """int64 (L, L): rows are true classes, columns what the model said; zeros where images have several labels, and
    (0, 0) above CONFUSED classes."""

    def __add__(self, other: Self) -> "Counts":
        return Counts(
            self.images + other.images,
            self.right + other.right,
            self.right_in_five + other.right_in_five,
            self.loss + other.loss,
            self.confusion + other.confusion,
        )

    @property
    def top1(self) -> float:
        """The share that is right; of several labels exact match."""
        return self.right / self.images

    @property
    def top5(self) -> float:
        """The share whose class is among the five likeliest."""
        return self.right_in_five / self.images

    @property
    def by_class(self) -> bool:
        """Whether it is known of which class the images are that are right."""
        return bool(self.confusion.any())

    @property
    def macro(self) -> float:
        """The share that is right of each class, averaged over the classes that have images."""
        each = self.confusion.sum(dim=1)
        return float((self.confusion.diagonal() / each)[each > 0].mean())

    @property
    def mean_loss(self) -> float:
        """The loss of an image on average."""
        return self.loss / self.images


class Answers(NamedTuple):
    """What a model said of each image, the likeliest five first, and how wrong it was."""

    classes: Tensor  # int64 (n, 5)
    probabilities: Tensor  # float32 (n, 5)
    losses: Tensor  # float32 (n,)
    right: Tensor  # bool (n,)
    images: Tensor  # int64 (n,): which of the split's images
    labels: Tensor  # int64 (n,): the true class; -1 where there may be several
    in_five: Tensor  # bool (n,): whether a true class is among the five
    scores: Tensor = torch.zeros(0, 0)  # float32 (n, L): each class's probability, where images are multi-label
    truths: Tensor = torch.zeros(0, 0, dtype=torch.bool)  # bool (n, L): whether the image has the label

    @property
    def multi_label(self) -> bool:
        """Whether images may have several labels."""
        return self.scores.shape[1] > 0

    @property
    def confidence(self) -> Tensor:
        """The probability of each answer, float32 (n,); of a multi-label one that all its labels are right."""
        return self.scores.maximum(1 - self.scores).prod(dim=1) if self.multi_label else self.probabilities[:, 0]

    @property
    def claims(self) -> tuple[Tensor, Tensor]:
        """Probabilities, and whether what each is of is so: of answers, or of every label where images have several."""
        if self.multi_label:
            return self.scores.flatten(), self.truths.flatten()
        return self.confidence, self.right

    def predicted(self, place: int) -> list[int]:
        """The classes that an image was given: one, or of several labels any number."""
        if self.multi_label:
            return [int(index) for index in (self.scores[place] > 0.5).nonzero()[:, 0]]
        return [int(self.classes[place, 0])]


def count(logits: Tensor, targets: Tensor) -> Counts:
    """The counts of one batch: logits (B, L), classes (B,) or shares (B, L)."""
    return total(_said(logits.float(), targets, 1.0, several=targets.ndim == 2), logits.shape[1])


def _nothing(classes: int) -> Tensor:
    """A confusion of no image; of so many classes that it would take gigabytes, none at all."""
    side = classes if classes <= CONFUSED else 0
    return torch.zeros(side, side, dtype=torch.int64)


def _said(logits: Tensor, targets: Tensor, temperature: float, *, several: bool) -> Answers:
    logits = logits / temperature
    probabilities = logits.sigmoid() if several else logits.softmax(dim=1)
    if targets.ndim == 1:
        losses = F.cross_entropy(logits, targets, reduction="none")
    else:
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices  # (B, 5)
    likeliest, images = probabilities.gather(1, best), torch.arange(len(logits))
    if targets.ndim == 1:
        in_five = (best == targets[:, None]).any(dim=1)
        return Answers(best, likeliest, losses, targets == best[:, 0], images, targets, in_five)
    truths = targets > 0
    right = ((probabilities > 0.5) == truths).all(dim=1)
    labels, in_five = torch.full_like(best[:, 0], -1), truths.gather(1, best).any(dim=1)
    return Answers(best, likeliest, losses, right, images, labels, in_five, probabilities, truths)


def classify(
    model: Model,
    batches: Iterable[Batch],
    preprocess: Preprocess,
    *,
    over_ranks: Callable[[Counts], Counts] = lambda counts: counts,
) -> Counts:
    """The counts of a model over labelled images, those of other processes included by `over_ranks`.

    The model is left in eval mode.
    """
    classes = model.config.classes
    total = Counts(0, 0, 0, 0.0, _nothing(classes))
    for logits, targets, _ in outputs(model, batches, preprocess):
        total = total + count(logits, targets)
    total = over_ranks(total)
    if not total.images:
        raise DataError("there is no image to evaluate on")
    return total


def asked(
    model: nn.Module,
    batches: Iterable[Batch],
    preprocess: Preprocess,
    *,
    temperature: float,
    classes: int,
    several: bool = False,
) -> Answers:
    """What a model of so many classes says of each image, on the CPU; no rows where there is none.

    With `several` each class has a probability of its own.
    """
    kept = []
    for logits, targets, images in outputs(model, batches, preprocess):
        said = _said(logits, targets, temperature, several=several or targets.ndim == 2)._replace(images=images)
        kept.append(Answers(*(column.cpu() for column in said)))
    if not kept:
        nothing = torch.zeros(0, classes), torch.zeros(0, dtype=torch.int64)
        return _said(*nothing, temperature, several=several)
    return Answers(*(torch.cat(columns) for columns in zip(*kept, strict=True)))


def total(said: Answers, classes: int) -> Counts:
    """The counts of all that was said, by a model of so many classes."""
    if not len(said.images):
        raise DataError("there is no image to evaluate on")
    confusion = _nothing(classes)
    if len(confusion) and bool((said.labels >= 0).all()):
        pairs = said.labels * classes + said.classes[:, 0]
        confusion = torch.bincount(pairs, minlength=classes * classes).reshape(classes, classes)
    loss = float(said.losses.cpu().double().sum())
    return Counts(len(said.images), int(said.right.sum()), int(said.in_five.sum()), loss, confusion.cpu())


@torch.inference_mode()
def outputs(
    model: nn.Module, batches: Iterable[Batch], preprocess: Preprocess
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
        logits = model(normalise(batch.pixels.to(device, non_blocking=True), preprocess)).float()
        yield logits, targets.to(device), batch.positions
