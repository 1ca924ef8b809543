"""Confident learning (Northcutt, Jiang and Chuang 2021): which labels are probably wrong, by predicted probabilities.

    n images   L classes   p: float64 (n, L), probabilities of each image by a model that was not trained on it

An image is confidently of a class if its probability of that class reaches the class's threshold: the mean over the
images that have the class as their label. Classes that the model is less sure of so have lower thresholds. If several
are reached, the most probable of them counts. The confident joint counts images by their label and this class.

cleanlab is the authors' package; it needs pandas and scikit-learn, and the three computations are short. The tests
compare. It differs where several thresholds are reached and the most probable class of all reaches its own not: there
it counts that class, and this module those of the paper.
"""

import torch
from torch import Tensor

NOT_CONFIDENT = -1
_TOLERANCE = 1e-6  # below a threshold: a class of one image, whose probability is the threshold, reaches it


def compute_thresholds(probabilities: Tensor, labels: Tensor) -> Tensor:
    """(L,): the mean probability of each class over the images with that label; infinite for a class without any."""
    own = probabilities.gather(1, labels[:, None])[:, 0]
    counts = labels.bincount(minlength=probabilities.shape[1])
    sums = own.new_zeros(len(counts)).index_add_(0, labels, own)
    return torch.where(counts > 0, sums / counts.clamp(min=1), torch.inf)


def choose_confident_classes(probabilities: Tensor, thresholds: Tensor) -> Tensor:
    """int64 (n,): the most probable class among those whose threshold is reached, or NOT_CONFIDENT."""
    reached = probabilities >= thresholds - _TOLERANCE
    best = probabilities.masked_fill(~reached, -torch.inf).argmax(dim=1)
    return torch.where(reached.any(dim=1), best, NOT_CONFIDENT)


def count_confident_joint(confident_classes: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """int64 (L, L): confident images by their label (rows) and their confident class (columns)."""
    confident = confident_classes != NOT_CONFIDENT
    cells = labels[confident] * num_classes + confident_classes[confident]
    return cells.bincount(minlength=num_classes**2).view(num_classes, num_classes)


def flag_label_errors(probabilities: Tensor, labels: Tensor) -> Tensor:
    """bool (n,): the images off the diagonal of the confident joint, unless their label is the most probable class."""
    classes = choose_confident_classes(probabilities, compute_thresholds(probabilities, labels))
    is_elsewhere = (classes != NOT_CONFIDENT) & (classes != labels)
    return is_elsewhere & (probabilities.argmax(dim=1) != labels)


def find_likely_labels(probabilities: Tensor, labels: Tensor) -> Tensor:
    """int64 (n,): the most probable class besides the label."""
    return probabilities.scatter(1, labels[:, None], -torch.inf).argmax(dim=1)


def compute_self_confidence(probabilities: Tensor, labels: Tensor) -> Tensor:
    """(n,): the probability of the label."""
    return probabilities.gather(1, labels[:, None])[:, 0]


def compute_normalized_margin(probabilities: Tensor, labels: Tensor) -> Tensor:
    """(n,): from 0 to 1, how far the probability of the label lies above that of the most probable other class."""
    others = probabilities.scatter(1, labels[:, None], -torch.inf).amax(dim=1)
    return (compute_self_confidence(probabilities, labels) - others + 1) / 2
