"""Evaluation of a masked model: its predictions of masked patches of held-out images, always the same patches.

B images of a batch   N patches of an image   M masked ones   p pixels along the side of a predicted patch
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.config import PreprocessConfig
from vitrail.data.loader import Batch
from vitrail.data.transforms import normalize
from vitrail.errors import DataError
from vitrail.model.masked import MaskedViT, compute_masked_losses

MAX_EXAMPLES = 6  # images in the reconstruction image


class MaskedExamples(NamedTuple):
    """A few images with predicted and target patches, on the CPU."""

    pixels: Tensor  # uint8 (B, C, S, S), or one more: the partner that patches may be taken from
    masking: Tensor  # int64 (B, 2, N)
    predicted_patches: Tensor  # uint8 (B, M, C, p, p): the masked patches as predicted
    target_patches: Tensor  # uint8 (B, M, C, p, p): the masked patches themselves


@dataclasses.dataclass(frozen=True)
class MaskedCounts:
    """Sums over held-out images."""

    images: int
    patches: int
    """Masked ones."""
    loss: float
    """The mean over an image's masked patches, summed over images."""
    num_colors: int
    """Colors to predict; 0 where the target is pixels."""
    right: int
    right_in_five: int
    examples: MaskedExamples | None = None

    @property
    def mean_loss(self) -> float:
        """The mean loss of an image."""
        return self.loss / self.images

    @property
    def top1(self) -> float | None:
        """The share of colors predicted correctly."""
        return self.right / self.num_colors if self.num_colors else None

    @property
    def top5(self) -> float | None:
        """The share of colors among the five most likely predictions."""
        return self.right_in_five / self.num_colors if self.num_colors else None


@torch.inference_mode()
def evaluate_masked(
    model: MaskedViT,
    batches: Iterable[Batch],
    preprocess: PreprocessConfig,
    *,
    reduce_ranks: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> MaskedCounts:
    """The sums over batches of images with their masks; `reduce_ranks` adds those of other processes.

    The first few images are returned as examples. The model is left in eval mode.
    """
    device = next(model.parameters()).device
    model.eval()
    sums = torch.zeros(6, dtype=torch.float64, device=device)
    examples = None
    for batch in batches:
        images = normalize(batch.pixels.to(device, non_blocking=True), preprocess)
        masking = batch.targets.to(device, non_blocking=True)
        predictions, targets = model(images, masking).float(), model.compute_targets(images, masking)
        counts = (
            len(predictions),
            predictions.shape[0] * predictions.shape[1],
            compute_masked_losses(predictions, targets).sum(),
            *_count_right_colors(predictions, targets),
        )
        sums += torch.stack([torch.as_tensor(count, dtype=torch.float64, device=device) for count in counts])
        if examples is None:
            examples = _select_examples(model, batch.pixels, images, masking, predictions, targets)
    count, patches, loss, colors, right, right_in_five = reduce_ranks(sums).tolist()
    if not count:
        raise DataError("there is no image to evaluate on")
    return MaskedCounts(int(count), int(patches), loss, int(colors), int(right), int(right_in_five), examples)


def _count_right_colors(predictions: Tensor, targets: Tensor) -> tuple[int | Tensor, int | Tensor, int | Tensor]:
    """The colors to predict, those predicted correctly, and those among the five most likely."""
    if targets.is_floating_point():
        return 0, 0, 0
    logits = predictions.unflatten(-1, (targets.shape[-1], -1))  # (B, M, 1 or 16, L)
    hits = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == targets[..., None]
    return targets.numel(), hits[..., 0].sum(), hits.sum()


def _select_examples(
    model: MaskedViT, pixels: Tensor, images: Tensor, masking: Tensor, predictions: Tensor, targets: Tensor
) -> MaskedExamples:
    """The first images of a batch, and the partner of the last of them."""
    count = min(MAX_EXAMPLES, len(predictions))
    partner = len(pixels) - len(predictions)
    rendered = [
        model.render_patches(patches[:count], images, masking[:count]).cpu() for patches in (predictions, targets)
    ]
    return MaskedExamples(pixels[: count + partner].cpu(), masking[:count].cpu(), *rendered)
