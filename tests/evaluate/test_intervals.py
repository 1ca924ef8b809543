"""Intervals against SciPy, and that they hold what they promise."""

import numpy as np
import pytest
from scipy import stats

from vitrail.evaluate import intervals


@pytest.mark.parametrize(("right", "images"), [(0, 10), (10, 10), (7, 10), (386, 500), (49_000, 50_000), (1, 1)])
def test_wilson_is_scipys(right: int, images: int) -> None:
    expected = stats.binomtest(right, images).proportion_ci(method="wilson")
    assert intervals.wilson_interval(right, images) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_a_means_interval_by_hand() -> None:
    half = 1.959963984540054 * np.sqrt(5 / 3) / 2
    assert intervals.mean_interval(np.array([1.0])) is None
    assert intervals.mean_interval(np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx((2.5 - half, 2.5 + half))


def test_the_bootstrap_of_a_share_is_near_wilsons() -> None:
    hits = np.arange(400) < 300
    low, high = intervals.bootstrap_interval(lambda places: float(hits[places].mean()), 400)
    assert (low, high) == pytest.approx(intervals.wilson_interval(300, 400), abs=0.01)
    assert (low, high) == intervals.bootstrap_interval(lambda places: float(hits[places].mean()), 400)
