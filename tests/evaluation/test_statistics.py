"""Intervals and McNemar's test against SciPy; agreement of two precisions by hand."""

import numpy as np
import pytest
import torch
from scipy import stats

from vitrail.errors import DataError
from vitrail.evaluation.statistics import (
    Agreement,
    bootstrap_interval,
    compare_models,
    mcnemar_p_value,
    mean_interval,
    measure_agreement,
    wilson_interval,
)


@pytest.mark.parametrize(("correct", "images"), [(0, 10), (10, 10), (7, 10), (386, 500), (49_000, 50_000), (1, 1)])
def test_wilson_is_scipys(correct: int, images: int) -> None:
    expected = stats.binomtest(correct, images).proportion_ci(method="wilson")
    low, high = wilson_interval(correct, images)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert ((low == 0), (high == 1)) == ((correct == 0), (correct == images))


def test_a_means_interval_by_hand() -> None:
    half = 1.959963984540054 * np.sqrt(5 / 3) / 2
    assert mean_interval(np.array([1.0])) is None
    assert mean_interval(np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx((2.5 - half, 2.5 + half))


def test_the_bootstrap_of_a_share_is_near_wilsons() -> None:
    hits = np.arange(400) < 300
    low, high = bootstrap_interval(lambda indices: float(hits[indices].mean()), 400)
    assert (low, high) == pytest.approx(wilson_interval(300, 400), abs=0.01)
    assert (low, high) == bootstrap_interval(lambda indices: float(hits[indices].mean()), 400)


@pytest.mark.parametrize(
    ("only_first", "only_second"), [(0, 0), (0, 1), (0, 6), (3, 9), (9, 3), (12, 12), (150, 210), (4000, 4200)]
)
def test_mcnemar_is_the_exact_binomial_test(only_first: int, only_second: int) -> None:
    expected = stats.binomtest(only_first, only_first + only_second).pvalue if only_first + only_second else 1.0
    assert mcnemar_p_value(only_first, only_second) == pytest.approx(expected, rel=1e-6)


def test_images_are_counted_by_which_model_is_correct() -> None:
    first = torch.tensor([True, True, True, False, False, True])
    second = torch.tensor([True, False, False, True, False, False])
    comparison = compare_models(first, second)
    assert comparison[:4] == (1, 3, 1, 1)
    assert comparison.p_value == pytest.approx(2 * (1 + 4) / 16)


def test_agreement_on_four_images_by_hand() -> None:
    float32 = torch.tensor(
        [
            [0.7, 0.2, 0.1],  # confident
            [0.4, 0.35, 0.25],  # not confident
            [0.1, 0.1, 0.8],  # confident
            [0.3, 0.5, 0.2],  # confident
        ]
    )
    candidate = torch.tensor([[0.6, 0.3, 0.1], [0.3, 0.4, 0.3], [0.6, 0.1, 0.3], [0.3, 0.5, 0.2]])
    agreement = measure_agreement(float32, candidate)
    assert (agreement.images, agreement.confident_images) == (4, 3)
    assert agreement.top1_agreement == 2 / 4
    assert agreement.confident_agreement == 2 / 3
    assert agreement.mean_probability_change == pytest.approx((0.1 + 0.1 + 0.5 + 0.0) / 4)


def test_the_change_is_of_the_class_that_float32_chose() -> None:
    agreement = measure_agreement(torch.tensor([[0.9, 0.1]]), torch.tensor([[0.05, 0.95]]))
    assert agreement.mean_probability_change == pytest.approx(0.85)
    assert agreement.top1_agreement == 0


def test_without_a_confident_image_there_is_no_confident_agreement() -> None:
    doubtful = torch.tensor([[0.5, 0.45, 0.05], [0.34, 0.33, 0.33]])
    assert measure_agreement(doubtful, doubtful) == Agreement(
        images=2, top1_agreement=1.0, confident_agreement=None, confident_images=0, mean_probability_change=0.0
    )


def test_probabilities_that_need_not_sum_to_one_are_compared_alike() -> None:
    """A multi-label model's need not; a single class is either present or absent."""
    multi_label = torch.tensor([[0.9, 0.85], [0.9, 0.1]])
    assert measure_agreement(multi_label, multi_label.flip(1)) == Agreement(
        images=2,
        top1_agreement=0.0,
        confident_agreement=0.0,
        confident_images=1,
        mean_probability_change=pytest.approx((0.05 + 0.8) / 2),
    )
    single_class = torch.tensor([[0.05], [0.46], [0.58]])
    assert measure_agreement(single_class, single_class + 0.1) == Agreement(
        images=3,
        top1_agreement=2 / 3,
        confident_agreement=1.0,
        confident_images=2,
        mean_probability_change=pytest.approx(0.1),
    )


def test_no_images_are_refused() -> None:
    with pytest.raises(DataError, match="no image"):
        measure_agreement(torch.zeros(0, 3), torch.zeros(0, 3))
