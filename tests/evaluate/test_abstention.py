"""Coverage, accuracy and thresholds by hand."""

import pytest
import torch

from vitrail.errors import DataError
from vitrail.evaluate import abstention

PROBABILITIES = torch.tensor([0.9, 0.5, 0.8, 0.5, 0.6])
CORRECT = torch.tensor([True, False, True, True, False])


def test_the_curve_by_hand_with_equal_probabilities_together() -> None:
    curve = abstention.compute_risk_coverage(PROBABILITIES, CORRECT)
    assert curve.thresholds.tolist() == pytest.approx([0.9, 0.8, 0.6, 0.5])
    assert curve.coverage.tolist() == pytest.approx([0.2, 0.4, 0.6, 1.0])
    assert curve.accuracy.tolist() == pytest.approx([1, 1, 2 / 3, 3 / 5])
    assert abstention.compute_aurc(curve) == pytest.approx(0.2 * 0 + 0.2 * 0 + 0.2 / 3 + 0.4 * 2 / 5)


@pytest.mark.parametrize(("share", "expected"), [(0.95, 0.8), (0.6, 0.5), (0.65, 0.6)])
def test_the_threshold_covers_as_many_images_as_possible(share: float, expected: float) -> None:
    assert abstention.find_threshold(PROBABILITIES, CORRECT, share) == pytest.approx(expected)


def test_an_accuracy_out_of_reach_is_refused() -> None:
    with pytest.raises(DataError, match=r"no threshold reaches an accuracy of 99\.00%"):
        abstention.find_threshold(PROBABILITIES, torch.zeros(5, dtype=torch.bool), 0.99)
