"""Two models on the same images, against SciPy and by hand."""

import pytest
import torch
from scipy import stats

from vitrail.evaluate.compare import compare_models, mcnemar_p_value


@pytest.mark.parametrize(("one", "other"), [(0, 0), (0, 1), (0, 6), (3, 9), (9, 3), (12, 12), (150, 210), (4000, 4200)])
def test_mcnemar_is_the_exact_binomial_test(one: int, other: int) -> None:
    expected = stats.binomtest(one, one + other).pvalue if one + other else 1.0
    assert mcnemar_p_value(one, other) == pytest.approx(expected, rel=1e-6)


def test_images_are_counted_by_who_knows_them() -> None:
    first = torch.tensor([True, True, True, False, False, True])
    second = torch.tensor([True, False, False, True, False, False])
    found = compare_models(first, second)
    assert found[:4] == (1, 3, 1, 1)
    assert found.p_value == pytest.approx(2 * (1 + 4) / 16)
