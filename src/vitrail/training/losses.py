"""The losses of a batch, as sums over its images.

    B batch   L classes

Sums add up however a batch is divided into micro-batches and ranks; the step divides by its images.
All is computed in float32: bf16 logits hold no more than three digits, and a sum over 21,843 classes needs them all.

Targets are class indices, int64 (B,), or rows of shares (B, L): mixed images, or a 1 for each of several labels.
An index of -1 is an image without a label. It adds nothing to the loss or to any gradient. The caller, who knows the
batch, decides whether it is allowed: to ask the device here would cost a wait in every step. Any other index outside
of the classes is torch's error. A row of zeros is an image of no class: softmax gives 0, sigmoid lowers every class.

Smoothing moves that share of an image's labels evenly to all classes (Szegedy et al. 2016), for both losses alike.

Class weights multiply the term of each true label: an image with one of weight w counts as w images that have it, as
torch's `weight` of a cross-entropy and `pos_weight` of a binary one do. They are not normalized: the step divides by
the number of images, not by the sum of their weights.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.sample_table import UNLABELED

__all__ = ["LossFunction", "sigmoid_cross_entropy", "smooth_labels", "softmax_cross_entropy"]

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Logits (B, L) and targets, int64 (B,) or float (B, L) with mixup -> (), the loss summed over the images."""
_MEAN_TOLERANCE = 0.05  # of logits in bf16


def softmax_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, class_weights: Tensor | None = None
) -> Tensor:
    """(B, L) -> (): minus the log probability of the targets, summed over images; k labels count k times.

    A loss of your own may use it:

        from vitrail.training.losses import softmax_cross_entropy

        def tempered(logits, targets):  # a LossFunction
            return softmax_cross_entropy(2 * logits, targets, smoothing=0.1)

        vitrail.train("digits", data="digits", epochs=5, loss=tempered)
    """
    logits = logits.float()
    if targets.ndim == 1:
        return F.cross_entropy(
            logits, targets, class_weights, ignore_index=UNLABELED, reduction="sum", label_smoothing=smoothing
        )
    shares = smooth_labels(targets, smoothing)
    return -((shares if class_weights is None else class_weights * shares) * logits.log_softmax(dim=-1)).sum()


def sigmoid_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, class_weights: Tensor | None = None
) -> Tensor:
    """(B, L) -> (): binary cross-entropy of each class, summed over classes and images, as for ImageNet-21k.

    An image may have several labels, or none:

        from vitrail.training.losses import sigmoid_cross_entropy

        logits, targets = torch.zeros(2, 3), torch.tensor([[1, 1, 0], [0, 0, 0]])  # two images, three classes
        print(sigmoid_cross_entropy(logits, targets) / len(logits))
    """
    logits = logits.float()
    if targets.ndim == 2:
        shares = smooth_labels(targets, smoothing)
        return F.binary_cross_entropy_with_logits(logits, shares, pos_weight=class_weights, reduction="sum")
    # log(1 + e^x) - t x for each class, without a (B, L) tensor of t, which is 0 but for one class
    is_labeled = targets != UNLABELED
    true = logits.gather(1, torch.where(is_labeled, targets, 0)[:, None])[:, 0]
    image_losses = F.softplus(logits).sum(dim=1) - (1 - smoothing) * true
    if smoothing:
        image_losses = image_losses - smoothing * logits.mean(dim=1)
    if class_weights is not None:  # log(1 + e^-x) more, w - 1 times as much as the class has of the image
        added = (class_weights - 1) * F.softplus(-logits)
        image_losses = (
            image_losses + (1 - smoothing) * added.gather(1, torch.where(is_labeled, targets, 0)[:, None])[:, 0]
        )
        image_losses = image_losses + smoothing * added.mean(dim=1)
    return torch.where(is_labeled, image_losses, 0.0).sum()


def compute_logit_adjustment(class_counts: Tensor, loss: str) -> Tensor:
    """(L,) float32: the logits that class sizes explain; added in training, they need not be learned.

    Logit adjustment (Menon et al. 2021): the trained model predicts best for classes of equal size.
    """
    share = class_counts / class_counts.sum()
    return (share.log() if loss == "softmax" else share.logit(eps=1e-6)).float()


def smooth_labels(targets: Tensor, smoothing: float) -> Tensor:
    """(B, L) float32: of each row's shares, `smoothing` spread evenly; its sum stays.

    Of a class with all of an image's share:

        from vitrail.training.losses import smooth_labels

        print(smooth_labels(torch.eye(4), 0.1))  # 0.925 on the diagonal, 0.025 elsewhere
    """
    targets = targets.float()
    return (1 - smoothing) * targets + smoothing * targets.mean(dim=-1, keepdim=True) if smoothing else targets


def warn_about_mean(loss_function: LossFunction, notify: Callable[[str], None]) -> LossFunction:
    """The loss function of a user, which says at its first batch whether it looks like a mean over the images.

    It is then called on the batch's halves too. PyTorch's losses are means by default.
    """
    is_checked = False

    @functools.wraps(loss_function)
    def compute_loss(logits: Tensor, targets: Tensor) -> Tensor:
        nonlocal is_checked
        loss = loss_function(logits, targets)  # first, so that a loss that draws random numbers draws the same
        if not is_checked and len(logits) > 1 and isinstance(loss, Tensor) and loss.ndim == 0:
            is_checked = True
            if _is_mean(loss_function, logits.detach(), targets):
                notify(
                    "warning: the loss function looks like a mean over the images. It must return their sum, such as"
                    ' reduction="sum" does; the step divides it by the batch size once more'
                )
        return loss

    return compute_loss


@torch.no_grad()
def _is_mean(loss_function: LossFunction, logits: Tensor, targets: Tensor) -> bool:
    """Whether the loss of two halves together is the mean of theirs, and not the sum."""
    half = len(logits) // 2
    parts = slice(0, 2 * half), slice(0, half), slice(half, 2 * half)
    whole, first, second = (float(loss_function(logits[part], targets[part])) for part in parts)
    return abs(2 * whole - (first + second)) < _MEAN_TOLERANCE * abs(first + second)
