"""Metrics of multi-label predictions by hand and against scikit-learn."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics
from torch.nn import functional as F

from vitrail.evaluation.label_metrics import (
    average_precision,
    list_label_confusions,
    list_threshold_scores,
    measure_labels,
)
from vitrail.evaluation.metrics import compute_metrics
from vitrail.evaluation.predictions import Predictions, _make_predictions, count_predictions


def make_multi_label_predictions(images: int = 300, classes: int = 6) -> tuple[Predictions, np.ndarray, np.ndarray]:
    """Multi-label predictions that know something; the last class is one that no image has."""
    draws = torch.Generator().manual_seed(0)
    truths = torch.rand(images, classes, generator=draws) < torch.linspace(0.6, 0.1, classes)
    truths[:, -1], truths[:, 0] = False, truths[:, 0] | ~truths.any(dim=1)
    logits = torch.randn(images, classes, generator=draws) + 2 * (truths.float() - 0.5)
    return _make_predictions(logits, truths.float(), 1.0, multi_label=True), logits.sigmoid().numpy(), truths.numpy()


def test_f1_exact_match_and_average_precision_are_scikit_learns() -> None:
    predictions, scores, truths = make_multi_label_predictions()
    result, predicted = measure_labels(predictions), scores > 0.5
    assert count_predictions(predictions, 6).top1 == pytest.approx(metrics.accuracy_score(truths, predicted))
    assert result.micro_f1 == pytest.approx(metrics.f1_score(truths, predicted, average="micro"))
    has_images = truths.any(axis=0)
    assert result.macro_f1 == pytest.approx(
        metrics.f1_score(truths[:, has_images], predicted[:, has_images], average="macro")
    )
    expected = metrics.average_precision_score(truths[:, has_images], scores[:, has_images], average="macro")
    assert result.mean_average_precision == pytest.approx(expected)
    assert result.classes[-1].average_precision is None
    assert [row.images for row in result.classes] == truths.sum(axis=0).tolist()


ROWS = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=30)


@given(ROWS.filter(lambda rows: any(truth for _, truth in rows)))
def test_average_precision_with_ties_is_scikit_learns(rows: list[tuple[int, bool]]) -> None:
    scores, truths = np.array([score / 4 for score, _ in rows]), np.array([truth for _, truth in rows])
    assert average_precision(scores, truths) == pytest.approx(metrics.average_precision_score(truths, scores))


def test_calibration_is_of_every_label_and_not_of_the_likeliest() -> None:
    """Ten images with one of two labels; each probability comes true as often as it says."""
    truths = torch.tensor([[1.0, 0.0]] * 8 + [[0.0, 1.0]] * 2)
    logits = torch.tensor([0.8, 0.2]).logit().repeat(10, 1)
    result = measure_labels(_make_predictions(logits, truths, 1.0, multi_label=True))
    assert result.calibration_error == pytest.approx(0, abs=1e-6)
    assert sum(count for count, _, _ in result.bins) == 20
    assert sum(correct for _, _, correct in result.bins) == 10


def test_multi_label_metrics_have_exact_match_and_no_top_1() -> None:
    predictions, _, _ = make_multi_label_predictions()
    facts = compute_metrics(count_predictions(predictions, 6), predictions).to_dict()
    assert not {"top1", "top5", "macro"} & set(facts)
    for name in ("exact_match", "micro_f1", "macro_f1", "mean_average_precision", "calibration_error"):
        low, high = facts[f"{name}_interval"]
        assert 0 <= low <= facts[name] <= high <= 1, name


def test_single_label_metrics_have_no_exact_match() -> None:
    logits = F.one_hot(torch.tensor([0, 1, 1]), 3).float()
    predictions = _make_predictions(logits, torch.tensor([0, 1, 2]), 1.0, multi_label=False)
    facts = compute_metrics(count_predictions(predictions, 3), predictions).to_dict()
    assert "top1" in facts
    assert "exact_match" not in facts


def test_the_interval_of_a_calibration_error_is_over_images_whose_labels_go_together() -> None:
    """Labels that duplicate one another say no more than one of them."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(200, 1, generator=generator)
    truths = torch.rand(200, 1, generator=generator) < scores
    widths = []
    for duplicates in (1, 20):
        logits = scores.logit().repeat(1, duplicates)
        predictions = _make_predictions(logits, truths.float().repeat(1, duplicates), 1.0, multi_label=True)
        low, high = compute_metrics(count_predictions(predictions, duplicates), predictions).calibration_error_interval
        widths.append(high - low)
    assert widths[1] == pytest.approx(widths[0], rel=0.05)


def test_thresholds_of_the_classes_decide_what_is_predicted() -> None:
    draws = torch.Generator().manual_seed(1)
    truths = (torch.rand(200, 3, generator=draws) < 0.4).float()
    logits, thresholds = torch.randn(200, 3, generator=draws), (0.2, 0.5, 0.8)
    predictions = _make_predictions(logits, truths, 1.0, multi_label=True, label_thresholds=thresholds)
    predicted = logits.sigmoid().numpy() > np.array(thresholds, np.float32)
    result = measure_labels(predictions)
    assert result.precision == pytest.approx(metrics.precision_score(truths, predicted, average="micro"))
    assert result.recall == pytest.approx(metrics.recall_score(truths, predicted, average="micro"))
    scores = logits.sigmoid().numpy()
    assert result.micro_average_precision == pytest.approx(
        metrics.average_precision_score(truths, scores, average="micro")
    )
    assert count_predictions(predictions, 3).top1 == pytest.approx(metrics.accuracy_score(truths, predicted))
    assert predictions.get_predicted_classes(7) == np.flatnonzero(predicted[7]).tolist()
    chance = torch.where(torch.from_numpy(predicted), logits.sigmoid(), 1 - logits.sigmoid()).prod(dim=1)
    torch.testing.assert_close(predictions.confidence, chance)
    for threshold, micro, macro in list_threshold_scores(predictions, (0.25, 0.75)):
        assert micro == pytest.approx(metrics.f1_score(truths, scores > threshold, average="micro"))
        assert macro == pytest.approx(metrics.f1_score(truths, scores > threshold, average="macro"))


def test_label_confusions_by_hand() -> None:
    """Labels 0 and 1 are missed and 2 is extra in the first image; 0 is missed for 2 in the second."""
    truths = torch.tensor([[1.0, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]])
    logits = torch.tensor([[-9.0, -9, 9], [-9, -9, 9], [-9, -9, -9], [-9, 9, -9]])
    predictions = _make_predictions(logits, truths, 1.0, multi_label=True)
    assert list_label_confusions(predictions) == [(0, 2, 2), (1, 2, 1)]
