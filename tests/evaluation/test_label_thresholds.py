"""Thresholds of labels: the best F1 by trying every one, and what classes with few images get."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.evaluation.label_thresholds import choose_common_threshold, choose_label_thresholds, find_best_threshold

ROWS = st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=30)


@settings(deadline=None)
@given(ROWS.filter(lambda rows: any(truth for _, truth in rows)))
def test_no_other_threshold_has_a_greater_f1(rows: list[tuple[int, bool]]) -> None:
    scores, truths = np.array([score / 20 for score, _ in rows], np.float32), np.array([truth for _, truth in rows])

    def compute_f1(threshold: float) -> float:
        hits = sum(bool(score > threshold and truth) for score, truth in zip(scores, truths, strict=True))
        return 2 * hits / int((scores > threshold).sum() + truths.sum())

    assert compute_f1(find_best_threshold(scores, truths)) == max(map(compute_f1, [0, *scores.tolist()]))


def test_a_threshold_lies_halfway_between_the_scores_that_it_divides() -> None:
    scores, truths = np.array([0.9, 0.75, 0.25, 0.1], np.float32), np.array([True, True, False, False])
    assert find_best_threshold(scores, truths) == 0.5
    assert find_best_threshold(scores, np.array([True] * 4)) == pytest.approx(0.05)
    adjacent = np.array([0.5, np.nextafter(np.float32(0.5), np.float32(0))], np.float32)
    assert (adjacent > np.float32(find_best_threshold(adjacent, np.array([True, False])))).tolist() == [True, False]


def test_a_class_with_few_images_gets_the_common_threshold() -> None:
    """The first class is best divided at 0.3, the second has one image, of the greatest score by luck."""
    scores = np.array([[0.35, 0.9], [0.4, 0.2], [0.45, 0.1], [0.25, 0.1], [0.1, 0.1]], np.float32)
    truths = np.array([[1, 1], [1, 0], [1, 0], [0, 0], [0, 0]], dtype=bool)
    common = choose_common_threshold(scores, truths)
    assert common == pytest.approx(0.3)
    assert choose_label_thresholds(scores, truths, min_positives=3) == pytest.approx((0.3, common))
    assert choose_label_thresholds(scores, truths, min_positives=1) == pytest.approx((0.3, 0.55))
    assert choose_common_threshold(scores, np.zeros_like(truths)) == 0.5
    assert choose_label_thresholds(scores, np.zeros_like(truths), min_positives=1) == (0.5, 0.5)
