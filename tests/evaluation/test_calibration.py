"""The temperature against another optimizer's, and the calibration error, coverage and thresholds by hand."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evaluation.calibration import (
    PRIOR_STD,
    TEMPERATURE_RANGE,
    compute_aurc,
    compute_risk_coverage,
    count_bins,
    expected_calibration_error,
    find_threshold,
    fit_temperature,
)

n, L = 400, 5


def draw_targets(true: float, multi_label: bool, images: int = n, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits, and targets drawn with the probabilities that the logits over `true` give."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(images, L, generator=generator)
    if multi_label:
        return logits, ((logits / true).sigmoid() > torch.rand(images, L, generator=generator)).float()
    return logits, torch.multinomial((logits / true).softmax(dim=1), 1, generator=generator)[:, 0]


def fit_by_brent(logits: Tensor, targets: Tensor, prior_std: float = math.inf) -> float:
    """The temperature of the least negative log-likelihood and prior, by Brent's method on its values."""
    x, y = logits.double().numpy(), targets.numpy()

    def loss(logarithm: float) -> float:
        z = x / math.exp(logarithm)
        prior = (logarithm / prior_std) ** 2 / 2
        if y.ndim == 1:
            return prior + float((logsumexp(z, axis=1) - z[np.arange(len(z)), y]).sum())
        return prior + float((np.logaddexp(0, z) - y * z).sum())

    bounds = tuple(map(math.log, TEMPERATURE_RANGE))
    return math.exp(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-10}).x)


@pytest.mark.parametrize("multi_label", [False, True], ids=["softmax", "multi_label"])
@pytest.mark.parametrize("true", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("prior_std", [0.1, PRIOR_STD, math.inf])
def test_the_temperature_is_the_likeliest(true: float, multi_label: bool, prior_std: float) -> None:
    logits, targets = draw_targets(true, multi_label)
    temperature = fit_temperature(logits, targets, prior_std=prior_std)
    assert temperature == pytest.approx(fit_by_brent(logits, targets, prior_std), rel=1e-5)
    if prior_std == math.inf:
        assert temperature == pytest.approx(true, rel=0.2)  # and near the one that the targets were drawn with


@given(st.floats(0.3, 4.0), st.integers(2, 60), st.integers(0, 10_000), st.booleans())
def test_the_prior_moves_a_temperature_towards_1_and_never_beyond(
    true: float, images: int, seed: int, multi_label: bool
) -> None:
    logits, targets = draw_targets(true, multi_label, images, seed)
    correct = (logits > 0) == (targets > 0) if multi_label else logits.argmax(dim=1) == targets
    assume(not correct.all())  # nothing is likeliest then
    likeliest, damped = (math.log(fit_temperature(logits, targets, prior_std=std)) for std in (math.inf, PRIOR_STD))
    assert abs(damped) <= abs(likeliest) + 1e-9
    assert damped * likeliest >= -1e-9


@pytest.mark.parametrize("multi_label", [False, True], ids=["softmax", "multi_label"])
@pytest.mark.parametrize("true", [0.4, 3.0])
def test_few_images_stay_near_1_and_many_reach_the_likeliest(true: float, multi_label: bool) -> None:
    assert abs(math.log(fit_temperature(*draw_targets(true, multi_label, 4)))) < 0.6 * abs(math.log(true))
    logits, targets = draw_targets(true, multi_label, 200)
    distances = []
    for times in (1, 10, 100):
        many = logits.repeat(times, 1), targets.repeat(times, *[1] * (targets.ndim - 1))
        distances.append(abs(math.log(fit_temperature(*many) / fit_temperature(*many, prior_std=math.inf))))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.01


def test_one_wrong_prediction_among_few_does_not_make_a_network_certain() -> None:
    """Of 30 clear answers one is hardly wrong: its likelihood alone would have them nearly certain."""
    logits = torch.tensor([[2.0, 0.0, 0.0]]).repeat(30, 1)
    targets = torch.zeros(30, dtype=torch.int64)
    logits[0] = torch.tensor([1.0, 1.01, 0.0])
    assert fit_temperature(logits, targets, prior_std=math.inf) < 0.4
    assert fit_temperature(logits, targets) > 0.5


@pytest.mark.parametrize("multi_label", [False, True], ids=["softmax", "multi_label"])
def test_logits_c_times_as_large_have_a_temperature_c_times_as_high(multi_label: bool) -> None:
    logits, targets = draw_targets(1.5, multi_label)
    plain = fit_temperature(logits, targets, prior_std=math.inf)
    for factor in (0.25, 4.0):
        assert fit_temperature(factor * logits, targets, prior_std=math.inf) == pytest.approx(factor * plain, rel=1e-6)


def test_where_every_prediction_is_correct_it_is_one_without_a_prior() -> None:
    logits, targets = draw_targets(1.0, multi_label=False)
    fit = partial(fit_temperature, prior_std=math.inf)
    correct = logits.argmax(dim=1)
    assert fit(logits, correct) == 1.0
    one_wrong = torch.cat([correct[:-1], (correct[-1:] + 1) % L])
    assert fit(logits, one_wrong) != 1.0
    shares = (logits > 0).float()
    assert fit(logits, shares) == 1.0
    shares[0, 0] = 1 - shares[0, 0]  # one label of one image
    assert fit(logits, shares) != 1.0
    assert fit(logits[:0], targets[:0]) == 1.0


def test_where_every_prediction_is_correct_the_prior_bounds_it() -> None:
    """Unsure predictions move T down, the more the more there are; sure ones have little slope and move it less."""
    logits, _ = draw_targets(1.0, multi_label=False)
    few, many = (fit_temperature(logits[:n], logits[:n].argmax(dim=1)) for n in (6, 60))
    assert 0.1 < many < few < 1.0
    assert many < fit_temperature(50 * logits[:60], logits[:60].argmax(dim=1)) <= 1.0


def test_logits_that_say_less_than_nothing_get_the_highest_temperature() -> None:
    logits, _ = draw_targets(1.0, multi_label=False)
    assert fit_temperature(logits, logits.argmin(dim=1), prior_std=math.inf) == pytest.approx(TEMPERATURE_RANGE[1])


def test_the_calibration_error_by_hand() -> None:
    """Bins of 1/15: two answers near 0.95, one right; one sure and right; one at 0.3 and right."""
    confidences = torch.tensor([0.94, 0.96, 1.0, 0.3], dtype=torch.float64)
    correct = torch.tensor([True, False, True, True])
    first_two_and_third = abs(0.94 + 0.96 + 1.0 - 2)  # all three above 14/15
    assert expected_calibration_error(confidences, correct) == pytest.approx((first_two_and_third + 0.7) / 4)


def test_bins_count_predictions_and_correct_ones_by_hand() -> None:
    probabilities = [1.0, 0.97, 0.95, 0.94, 1 / 15, 0.0, 0.5]
    binned = count_bins(probabilities, [True, True, True, False, False, True, False])
    assert binned.counts.tolist() == [2, *[0] * 6, 1, *[0] * 6, 4]
    assert binned.correct.tolist() == [1, *[0] * 13, 3]
    assert binned.probability_sums[[0, 7, 14]].tolist() == pytest.approx([1 / 15, 0.5, 3.86])


def test_a_bin_holds_its_upper_edge_and_the_first_holds_zero() -> None:
    """In one bin what two answers miss cancels, in two it adds up."""
    correct = torch.tensor([True, False])

    def share_a_bin(one: float, other: float) -> bool:
        error = expected_calibration_error(torch.tensor([one, other], dtype=torch.float64), correct)
        apart = (1 - one + other) / 2
        joined = abs(one + other - 1) / 2
        assert error == pytest.approx(apart) or error == pytest.approx(joined)
        return error == pytest.approx(joined)

    for bin_number in range(15):
        edge = (bin_number + 1) / 15
        assert share_a_bin(edge, edge - 0.01)
        assert bin_number == 14 or not share_a_bin(edge, edge + 0.01)
    assert share_a_bin(0.05, 0.0)


PROBABILITIES = torch.tensor([0.9, 0.5, 0.8, 0.5, 0.6])
CORRECT = torch.tensor([True, False, True, True, False])


def test_the_curve_by_hand_with_equal_probabilities_together() -> None:
    curve = compute_risk_coverage(PROBABILITIES, CORRECT)
    assert curve.thresholds.tolist() == pytest.approx([0.9, 0.8, 0.6, 0.5])
    assert curve.coverage.tolist() == pytest.approx([0.2, 0.4, 0.6, 1.0])
    assert curve.accuracy.tolist() == pytest.approx([1, 1, 2 / 3, 3 / 5])
    assert compute_aurc(curve) == pytest.approx(0.2 * 0 + 0.2 * 0 + 0.2 / 3 + 0.4 * 2 / 5)


@pytest.mark.parametrize(("share", "expected"), [(0.95, 0.8), (0.6, 0.5), (0.65, 0.6)])
def test_the_threshold_covers_as_many_images_as_possible(share: float, expected: float) -> None:
    assert find_threshold(PROBABILITIES, CORRECT, share) == pytest.approx(expected)


def test_an_accuracy_out_of_reach_is_refused() -> None:
    with pytest.raises(DataError, match=r"no threshold reaches an accuracy of 99\.00%"):
        find_threshold(PROBABILITIES, torch.zeros(5, dtype=torch.bool), 0.99)
