"""A model as it is measured, and its numbers by hand and against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import Tensor, nn

from vitrail.data.loader import Batch
from vitrail.evaluate.metrics import EvalWrapper, _bootstrap_calibration_error, compute_metrics, relabel_batches
from vitrail.evaluate.predictions import Predictions, count_predictions


class Left(nn.Module):
    """Logits that tell an image from its mirror image."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([images[:, 0, 0, 0], images[:, 0, 0, -1], images.sum((1, 2, 3))], dim=1)


def test_a_mirrored_view_is_the_mean_of_both_and_a_subset_its_columns() -> None:
    images = torch.rand(4, 3, 2, 5, generator=torch.Generator().manual_seed(0))
    plain, mirrored = EvalWrapper(Left())(images), EvalWrapper(Left(), flip_tta=True)(images)
    torch.testing.assert_close(mirrored[:, 0], (plain[:, 0] + plain[:, 1]) / 2)
    torch.testing.assert_close(mirrored[:, 2], plain[:, 2])
    torch.testing.assert_close(EvalWrapper(Left(), outputs=[2, 0])(images), plain[:, [2, 0]])


def test_targets_become_the_models_outputs() -> None:
    pixels, positions = torch.zeros(3, 1, 1, 1, dtype=torch.uint8), torch.arange(3)
    (one,) = relabel_batches([Batch(pixels, torch.tensor([1, 0, 1]), positions)], [4, 2], 6)
    assert one.targets.tolist() == [2, 4, 2]
    (shares,) = relabel_batches([Batch(pixels, torch.tensor([[1.0, 0], [0, 1], [1, 1]]), positions)], [2, 0], 3)
    assert shares.targets.tolist() == [[0, 0, 1], [1, 0, 0], [1, 0, 1]]


def said(images: int = 500, classes: int = 7) -> tuple[Predictions, np.ndarray, np.ndarray]:
    draws = np.random.default_rng(0)
    logits = draws.normal(size=(images, classes)) * 2
    labels = draws.integers(0, classes, images)
    logits[np.arange(images), labels] += 2
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    order = np.argsort(-probabilities, axis=1)[:, :5]
    given = torch.from_numpy(labels)
    best = torch.from_numpy(order)
    return (
        Predictions(
            classes=best,
            probabilities=torch.from_numpy(np.take_along_axis(probabilities, order, 1)).float(),
            losses=torch.from_numpy(-np.log(probabilities[np.arange(images), labels])).float(),
            correct=best[:, 0] == given,
            images=torch.arange(images),
            labels=given,
            in_top5=(best == given[:, None]).any(dim=1),
        ),
        probabilities,
        labels,
    )


def test_the_numbers_are_scikit_learns() -> None:
    answers, probabilities, labels = said()
    found = compute_metrics(count_predictions(answers, 7), answers)
    predicted = probabilities.argmax(axis=1)
    assert found.top1 == pytest.approx(metrics.accuracy_score(labels, predicted))
    assert found.top5 == pytest.approx(metrics.top_k_accuracy_score(labels, probabilities, k=5))
    assert found.macro == pytest.approx(metrics.balanced_accuracy_score(labels, predicted))
    assert found.loss == pytest.approx(metrics.log_loss(labels, probabilities), rel=1e-5)
    assert count_predictions(answers, 7).confusion.tolist() == metrics.confusion_matrix(labels, predicted).tolist()
    for name in ("top1", "top5", "macro", "loss"):
        low, high = getattr(found, f"{name}_interval")
        assert low <= getattr(found, name) <= high


def test_the_interval_of_a_calibration_error_holds_the_true_one() -> None:
    """Answers that are right a tenth less often than they say."""
    held = 0
    for seed in range(40):
        draws = np.random.default_rng(seed)
        sure = draws.uniform(0.3, 1, 1000)
        low, high = _bootstrap_calibration_error(sure, draws.random(1000) < sure - 0.1)
        held += low <= 0.1 <= high
    assert held >= 32


def test_real_counts_images_that_have_a_label() -> None:
    answers, probabilities, _ = said(images=4)
    first = probabilities.argmax(axis=1).tolist()
    sets = [frozenset({first[0], 99}), frozenset({98}), frozenset[int](), frozenset({first[3]})]
    found = compute_metrics(count_predictions(answers, 7), answers, sets)
    assert (found.real, found.real_images) == (2 / 3, 3)
