"""How often a model is right. Counts are summed, never averages averaged, so batches of any sizes and ranks add up."""

import dataclasses
from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor

from vitrail.config import Preprocess
from vitrail.data.loader import Batch
from vitrail.data.transforms import normalise
from vitrail.errors import DataError
from vitrail.model.build import Model


@dataclasses.dataclass(frozen=True)
class Counts:
    """Sums over labelled images, each of one class."""

    images: int
    right: int
    right_in_five: int
    loss: float
    """Minus the log probability of the true class, summed."""
    confusion: Tensor
    """int64 (L, L): rows are true classes, columns what the model said."""

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
        """The share that is right."""
        return self.right / self.images

    @property
    def top5(self) -> float:
        """The share whose class is among the five likeliest."""
        return self.right_in_five / self.images

    @property
    def mean_loss(self) -> float:
        """The loss of an image on average."""
        return self.loss / self.images


def count(logits: Tensor, targets: Tensor) -> Counts:
    """The counts of one batch: logits (B, L), classes (B,)."""
    logits, classes = logits.float(), logits.shape[1]
    five = logits.topk(min(5, classes), dim=1).indices  # (B, 5)
    said = five[:, 0]
    confusion = torch.bincount(targets * classes + said, minlength=classes * classes).reshape(classes, classes)
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    return Counts(
        len(targets),
        int((said == targets).sum()),
        int((five == targets[:, None]).any(dim=1).sum()),
        float(loss),
        confusion.cpu(),
    )


@torch.inference_mode()
def classify(model: Model, batches: Iterable[Batch], preprocess: Preprocess) -> Counts:
    """The counts of a model over labelled images; the model is left in eval mode."""
    device = next(model.parameters()).device
    model.eval()
    total: Counts | None = None
    for batch in batches:
        if batch.targets.ndim != 1 or (batch.targets < 0).any():
            raise DataError("accuracy is of images with one label each; some of these have none or several")
        if not len(batch.targets):
            continue
        logits = model(normalise(batch.pixels.to(device, non_blocking=True), preprocess))
        counts = count(logits, batch.targets.to(device))
        total = counts if total is None else total + counts
    if total is None:
        raise DataError("there is no image to evaluate on")
    return total
