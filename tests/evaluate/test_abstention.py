"""What abstaining leaves, by hand."""

import pytest
import torch

from vitrail.errors import DataError
from vitrail.evaluate import abstention

SURE = torch.tensor([0.9, 0.5, 0.8, 0.5, 0.6])
RIGHT = torch.tensor([True, False, True, True, False])


def test_the_curve_by_hand_with_equal_probabilities_together() -> None:
    found = abstention.compute_risk_coverage(SURE, RIGHT)
    assert found.thresholds.tolist() == pytest.approx([0.9, 0.8, 0.6, 0.5])
    assert found.coverage.tolist() == pytest.approx([0.2, 0.4, 0.6, 1.0])
    assert found.accuracy.tolist() == pytest.approx([1, 1, 2 / 3, 3 / 5])
    assert abstention.compute_aurc(found) == pytest.approx(0.2 * 0 + 0.2 * 0 + 0.2 / 3 + 0.4 * 2 / 5)


@pytest.mark.parametrize(("share", "expected"), [(0.95, 0.8), (0.6, 0.5), (0.65, 0.6)])
def test_the_threshold_answers_as_many_as_it_may(share: float, expected: float) -> None:
    assert abstention.find_threshold(SURE, RIGHT, share) == pytest.approx(expected)


def test_an_accuracy_out_of_reach_is_refused() -> None:
    with pytest.raises(DataError, match=r"no threshold makes 99\.00% of the answers right"):
        abstention.find_threshold(SURE, torch.zeros(5, dtype=torch.bool), 0.99)
