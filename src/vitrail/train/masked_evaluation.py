"""How well a masked model tells what is hidden of images held out, always the same patches of them.

B images of a batch   N patches of an image   M hidden ones   p pixels along a side of what is told of a patch
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

MAX_EXAMPLES = 6  # images of a picture


class MaskedExamples(NamedTuple):
    """A few images and what was told of them, on the CPU."""

    pixels: Tensor  # uint8 (B, C, S, S), or one more: the partner that patches may be taken of
    masking: Tensor  # int64 (B, 2, N)
    predicted_patches: Tensor  # uint8 (B, M, C, p, p): the hidden patches as the model tells them
    target_patches: Tensor  # uint8 (B, M, C, p, p): and as they are


@dataclasses.dataclass(frozen=True)
class MaskedCounts:
    """Sums over images held out."""

    images: int
    patches: int
    """Hidden ones."""
    loss: float
    """Of an image, over its hidden patches on average, summed over images."""
    num_colors: int
    """That were to be told; none where the target is pixels."""
    right: int
    right_in_five: int
    examples: MaskedExamples | None = None

    @property
    def mean_loss(self) -> float:
        """The loss of an image on average."""
        return self.loss / self.images

    @property
    def top1(self) -> float | None:
        """The share of colours that are right."""
        return self.right / self.num_colors if self.num_colors else None

    @property
    def top5(self) -> float | None:
        """The share of colours that are among the five likeliest."""
        return self.right_in_five / self.num_colors if self.num_colors else None


@torch.inference_mode()
def evaluate_masked(
    model: MaskedViT,
    batches: Iterable[Batch],
    preprocess: PreprocessConfig,
    *,
    reduce_ranks: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> MaskedCounts:
    """The sums over batches with what is hidden of them, those of other processes included by `reduce_ranks`.

    The first few images are kept to be shown. The model is left in eval mode.
    """
    device = next(model.parameters()).device
    model.eval()
    sums = torch.zeros(6, dtype=torch.float64, device=device)
    shown = None
    for batch in batches:
        images = normalize(batch.pixels.to(device, non_blocking=True), preprocess)
        hiding = batch.targets.to(device, non_blocking=True)
        told, targets = model(images, hiding).float(), model.compute_targets(images, hiding)
        counted = (
            len(told),
            told.shape[0] * told.shape[1],
            compute_masked_losses(told, targets).sum(),
            *_count_right_colors(told, targets),
        )
        sums += torch.stack([torch.as_tensor(each, dtype=torch.float64, device=device) for each in counted])
        if shown is None:
            shown = _select_examples(model, batch.pixels, images, hiding, told, targets)
    count, patches, loss, colours, right, right_in_five = reduce_ranks(sums).tolist()
    if not count:
        raise DataError("there is no image to evaluate on")
    return MaskedCounts(int(count), int(patches), loss, int(colours), int(right), int(right_in_five), shown)


def _count_right_colors(predictions: Tensor, targets: Tensor) -> tuple[int | Tensor, int | Tensor, int | Tensor]:
    """Colours that were to be told, those that are right, and those that are among the five likeliest."""
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
    painted = [model.render_patches(each[:count], images, masking[:count]).cpu() for each in (predictions, targets)]
    return MaskedExamples(pixels[: count + partner].cpu(), masking[:count].cpu(), *painted)
