"""Metrics by hand and against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn import metrics

from vitrail.evaluation.metrics import _bootstrap_calibration_error, compute_metrics
from vitrail.evaluation.predictions import Predictions, count_predictions


def make_predictions(images: int = 500, classes: int = 7) -> tuple[Predictions, np.ndarray, np.ndarray]:
    draws = np.random.default_rng(0)
    logits = draws.normal(size=(images, classes)) * 2
    labels = draws.integers(0, classes, images)
    logits[np.arange(images), labels] += 2
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    order = np.argsort(-probabilities, axis=1)[:, :5]
    targets = torch.from_numpy(labels)
    best = torch.from_numpy(order)
    return (
        Predictions(
            classes=best,
            probabilities=torch.from_numpy(np.take_along_axis(probabilities, order, 1)).float(),
            losses=torch.from_numpy(-np.log(probabilities[np.arange(images), labels])).float(),
            correct=best[:, 0] == targets,
            images=torch.arange(images),
            labels=targets,
            in_top5=(best == targets[:, None]).any(dim=1),
        ),
        probabilities,
        labels,
    )


def test_metrics_are_scikit_learns() -> None:
    predictions, probabilities, labels = make_predictions()
    result = compute_metrics(count_predictions(predictions, 7), predictions)
    predicted = probabilities.argmax(axis=1)
    assert result.top1 == pytest.approx(metrics.accuracy_score(labels, predicted))
    assert result.top5 == pytest.approx(metrics.top_k_accuracy_score(labels, probabilities, k=5))
    assert result.macro == pytest.approx(metrics.balanced_accuracy_score(labels, predicted))
    assert result.loss == pytest.approx(metrics.log_loss(labels, probabilities), rel=1e-5)
    assert count_predictions(predictions, 7).confusion.tolist() == metrics.confusion_matrix(labels, predicted).tolist()
    for name in ("top1", "top5", "macro", "loss"):
        low, high = getattr(result, f"{name}_interval")
        assert low <= getattr(result, name) <= high


def test_the_interval_of_a_calibration_error_holds_the_true_one() -> None:
    """Predictions that are correct a tenth less often than their probabilities say."""
    hits = 0
    for seed in range(40):
        draws = np.random.default_rng(seed)
        probabilities = draws.uniform(0.3, 1, 1000)
        low, high = _bootstrap_calibration_error(probabilities, draws.random(1000) < probabilities - 0.1)
        hits += low <= 0.1 <= high
    assert hits >= 32


def test_real_counts_images_that_have_a_label() -> None:
    predictions, probabilities, _ = make_predictions(images=4)
    predicted = probabilities.argmax(axis=1).tolist()
    real_labels = [frozenset({predicted[0], 99}), frozenset({98}), frozenset[int](), frozenset({predicted[3]})]
    result = compute_metrics(count_predictions(predictions, 7), predictions, real_labels)
    assert (result.real, result.real_images) == (2 / 3, 3)
