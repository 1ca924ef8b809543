"""Folds, and the probabilities of images that a classifier has not seen."""

import numpy as np
import torch

from tests.conftest import peer
from vitrail.evaluation.cross_validation import assign_folds, compute_out_of_fold_probabilities
from vitrail.evaluation.linear_classifiers import Features, Standardizer


def draw_clusters(images: int, classes: int, seed: int = 0, spread: float = 1.0) -> Features:
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, 8, generator=generator) * 2
    targets = torch.arange(images) % classes
    return Features(centers[targets] + spread * torch.randn(images, 8, generator=generator), targets)


def test_every_fold_has_its_share_of_every_class() -> None:
    labels = np.repeat([0, 1, 2], [23, 10, 4])
    fold_index = assign_folds(labels, np.arange(len(labels)), 5)
    for label, sizes in ((0, {4, 5}), (1, {2}), (2, {0, 1})):
        assert set(np.bincount(fold_index[labels == label], minlength=5).tolist()) == sizes
    assert set(np.bincount(fold_index).tolist()) == {7, 8}  # 37 images
    assert not np.array_equal(fold_index, assign_folds(labels, np.arange(len(labels)), 5, seed=1))


def test_duplicates_are_in_one_fold_whatever_their_labels() -> None:
    generator = np.random.default_rng(0)
    labels, groups = generator.integers(4, size=200), generator.integers(60, size=200)
    fold_index = assign_folds(labels, groups, 5)
    assert all(len(set(fold_index[groups == group].tolist())) == 1 for group in range(60))
    assert len(set(fold_index.tolist())) == 5


def test_probabilities_are_those_of_a_regression_that_has_not_seen_the_image() -> None:
    """Equal to scikit-learn's, with the penalty that was chosen; the label of the image itself changes nothing."""
    linear_model = peer("sklearn.linear_model")
    features = draw_clusters(120, 3, spread=3.0)  # they overlap, so a large penalty is best
    fold_index = assign_folds(features.targets.numpy(), np.arange(120), 4)
    probabilities = compute_out_of_fold_probabilities(features, 3, fold_index)
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(120, dtype=torch.float64))
    train, held_out = torch.from_numpy(fold_index != 3), torch.from_numpy(fold_index == 3)
    standardize = Standardizer.fit(features.select(train))
    x, y = standardize(features.values).numpy(), features.targets.numpy()
    differences = []
    for half in range(11):
        strength = 10.0 ** (half / 2) / int(train.sum())  # scikit-learn sums the losses
        regression = linear_model.LogisticRegression(C=strength, tol=1e-8, max_iter=5000).fit(x[train], y[train])
        differences.append(np.abs(regression.predict_proba(x[held_out]) - probabilities[held_out].numpy()).max())
    assert min(differences) < 5e-3
    changed = features.targets.clone()
    changed[held_out.nonzero()[0]] = (changed[held_out.nonzero()[0]] + 1) % 3
    same = compute_out_of_fold_probabilities(Features(features.values, changed), 3, fold_index)
    torch.testing.assert_close(same[held_out], probabilities[held_out])


def test_progress_counts_the_folds_and_the_choice_of_the_penalty() -> None:
    features, calls = draw_clusters(40, 2), list[tuple[int, int]]()
    fold_index = assign_folds(features.targets.numpy(), np.arange(40), 2)
    compute_out_of_fold_probabilities(features, 2, fold_index, progress=lambda *call: calls.append(call))
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]
