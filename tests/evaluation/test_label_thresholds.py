"""Thresholds of labels: the best F1 by trying every one, and what classes with few images get."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.evaluation.label_thresholds import ThresholdCounts, choose_common_threshold, choose_label_thresholds

ROWS = st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=30)


@settings(deadline=None)
@given(ROWS.filter(lambda rows: any(truth for _, truth in rows)))
def test_no_other_threshold_has_a_greater_f1(rows: list[tuple[int, bool]]) -> None:
    scores, truths = np.array([score / 20 for score, _ in rows], np.float32), np.array([truth for _, truth in rows])

    def compute_f1(threshold: float) -> float:
        hits = sum(bool(score > threshold and truth) for score, truth in zip(scores, truths, strict=True))
        return 2 * hits / int((scores > threshold).sum() + truths.sum())

    best = max(map(compute_f1, [0, *scores.tolist()]))
    assert compute_f1(choose_common_threshold(scores, truths)) == best
    (alone,) = choose_label_thresholds(scores[:, None], truths[:, None], common_images=0)
    assert compute_f1(alone) == best


def test_candidates_lie_halfway_between_scores_and_divide_neighbors() -> None:
    counts = ThresholdCounts.sort(np.array([0.25, 0.75, 0.25, 1], np.float32), np.array([False, True, True, False]))
    assert counts.list_candidates().tolist() == [0.875, 0.5, 0.125]
    predicted, hits = counts.count_above(counts.list_candidates())
    assert (predicted.tolist(), hits.tolist()) == ([1, 2, 4], [0, 1, 2])
    neighbors = np.array([0.5, np.nextafter(np.float32(0.5), np.float32(0))], np.float32)
    first = ThresholdCounts.sort(neighbors, np.array([True, False])).list_candidates()[0]
    assert (neighbors > first).tolist() == [True, False]


def test_a_threshold_is_that_of_the_class_and_of_all_labels_together() -> None:
    """The F1 of a class's own images and of all labels, scaled to 40 images, by plain loops over the candidates."""
    draws = np.random.default_rng(0)
    truths = draws.random((60, 5)) < [0.5, 0.4, 0.3, 0.2, 0.03]
    scores = (0.5 * draws.random((60, 5)) + 0.3 * truths).astype(np.float32)
    chosen, common = choose_label_thresholds(scores, truths, common_images=40), choose_common_threshold(scores, truths)
    for label in range(5):

        def compute_f1(threshold: float, label: int = label) -> float:
            above, weight = scores > threshold, 40 / truths.sum()
            hits = (above & truths)[:, label].sum() + weight * (above & truths).sum()
            return float(2 * hits / (above[:, label].sum() + weight * above.sum() + truths[:, label].sum() + 40))

        ordered = np.sort(scores[:, label])
        candidates = [common, *((ordered[1:] + ordered[:-1]) / 2)]
        assert compute_f1(chosen[label]) == pytest.approx(max(map(compute_f1, candidates)), abs=1e-9)


def test_one_lucky_image_moves_a_threshold_little_and_hundreds_move_it_fully() -> None:
    """Images of the first class lie from 0.4 to 0.6, of the second from 0.7 to 0.9, and one of the third at 0.95."""
    draws = np.random.default_rng(1)
    truths = np.zeros((2000, 3), dtype=bool)
    truths[:900, 0], truths[:900, 1], truths[0, 2] = True, True, True
    scores = 0.1 + 0.2 * draws.random((2000, 3)) + truths * [0.3, 0.6, 0.6]
    scores[900:, 1] += 0.35  # which the common threshold does not divide
    scores[0, 2] = 0.95
    scores = scores.astype(np.float32)
    common = choose_common_threshold(scores, truths)
    first, second, lucky = choose_label_thresholds(scores, truths)
    assert 0.29 < first < 0.41
    assert 0.64 < second < 0.71
    assert lucky == common
    assert choose_label_thresholds(scores, truths, common_images=0)[2] > 0.6
    assert choose_label_thresholds(scores, np.zeros_like(truths)) == (0.5, 0.5, 0.5)
    assert choose_common_threshold(scores, np.zeros_like(truths)) == 0.5
