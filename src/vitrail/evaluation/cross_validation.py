"""Probabilities of images by classifiers that were not trained on them: logistic regression in K-fold cross-validation.

    n images   D features   L classes   K folds

Folds are stratified: the images of a class are dealt to all of them. Duplicates are dealt together, since a classifier
trained on an image knows the label of its copy.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.randomness import IntArray, sample_indices
from vitrail.evaluation.linear_classifiers import Features, LinearHead, solve_logistic

PENALTIES = tuple(10.0 ** (-half / 2) for half in range(11))
"""Penalties on half the squared weights, relative to the mean loss; the greatest first."""
_GRADIENT_TOLERANCE = (
    1e-4  # probabilities need no more, and 1e-5 takes twice as long (docs/experiments/label-errors.md)
)


def assign_folds(labels: IntArray, groups: IntArray, folds: int, seed: int = 0) -> IntArray:
    """(n,): the fold of each image. Images with the same number in `groups` are in one fold, dealt with the first."""
    _, firsts, members = np.unique(groups, return_index=True, return_inverse=True)
    fold_of_group = np.empty(len(firsts), dtype=np.int64)
    dealt = 0
    for label in np.unique(labels[firsts]).tolist():
        of_class = np.flatnonzero(labels[firsts] == label)
        order = of_class[sample_indices(len(of_class), len(of_class), f"folds {label}", seed)]
        fold_of_group[order] = (dealt + np.arange(len(order))) % folds
        dealt += len(order)  # the next class goes on where this one ended, so that folds are of equal size
    return fold_of_group[members]


def compute_out_of_fold_probabilities(
    features: Features,
    num_classes: int,
    fold_index: IntArray,
    *,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Tensor:
    """float64 (n, L): each image's probabilities by a logistic regression on the images of the other folds.

    One penalty serves all folds: the one with the least cross-entropy on the first.
    """
    folds = list(_iterate_folds(fold_index))
    progress(0, len(folds) + 1)
    penalty = _choose_penalty(features, num_classes, *folds[0])
    progress(1, len(folds) + 1)
    probabilities = features.values.new_empty(len(features.targets), num_classes, dtype=torch.float64)
    for done, (train, held_out) in enumerate(folds, 2):
        head = _solve(features.select(train), num_classes, penalty)
        probabilities[held_out] = head.compute_logits(features.values[held_out]).double().softmax(dim=1)
        progress(done, len(folds) + 1)
    return probabilities


def _iterate_folds(fold_index: IntArray) -> Iterator[tuple[Tensor, Tensor]]:
    """The indices to train on and those to predict, for each fold."""
    for fold in np.unique(fold_index).tolist():
        yield torch.from_numpy(np.flatnonzero(fold_index != fold)), torch.from_numpy(np.flatnonzero(fold_index == fold))


def _choose_penalty(features: Features, num_classes: int, train: Tensor, held_out: Tensor) -> float:
    """The best penalty by cross-entropy, so that the probabilities are calibrated; small ones take long to solve."""
    best, least_loss = PENALTIES[0], float("inf")
    for penalty in PENALTIES:
        head = _solve(features.select(train), num_classes, penalty)
        loss = float(F.cross_entropy(head.compute_logits(features.values[held_out]), features.targets[held_out]))
        if loss > least_loss:
            break
        best, least_loss = penalty, loss
    return best


def _solve(features: Features, num_classes: int, penalty: float) -> LinearHead:
    return solve_logistic(features, num_classes, [penalty], gradient_tolerance=_GRADIENT_TOLERANCE)[0]
