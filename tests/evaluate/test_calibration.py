"""The temperature against another optimiser's, and the calibration error by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp
from torch import Tensor

from vitrail.evaluate.calibration import PRIOR_STD, TEMPERATURE_RANGE, expected_calibration_error, fit_temperature

n, L = 400, 5


def told(true: float, several: bool, images: int = n, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits, and targets drawn with the probabilities that the logits over `true` give."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(images, L, generator=generator)
    if several:
        return logits, ((logits / true).sigmoid() > torch.rand(images, L, generator=generator)).float()
    return logits, torch.multinomial((logits / true).softmax(dim=1), 1, generator=generator)[:, 0]


def optimum(logits: Tensor, targets: Tensor, deviation: float = math.inf) -> float:
    """The temperature of the least negative log-likelihood and prior, by Brent's method on its values."""
    x, y = logits.double().numpy(), targets.numpy()

    def loss(logarithm: float) -> float:
        z = x / math.exp(logarithm)
        prior = (logarithm / deviation) ** 2 / 2
        if y.ndim == 1:
            return prior + float((logsumexp(z, axis=1) - z[np.arange(len(z)), y]).sum())
        return prior + float((np.logaddexp(0, z) - y * z).sum())

    bounds = tuple(map(math.log, TEMPERATURE_RANGE))
    return math.exp(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-10}).x)


@pytest.mark.parametrize("several", [False, True], ids=["softmax", "several"])
@pytest.mark.parametrize("true", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("deviation", [0.1, PRIOR_STD, math.inf])
def test_the_temperature_is_the_likeliest(true: float, several: bool, deviation: float) -> None:
    logits, targets = told(true, several)
    found = fit_temperature(logits, targets, prior_std=deviation)
    assert found == pytest.approx(optimum(logits, targets, deviation), rel=1e-5)
    if deviation == math.inf:
        assert found == pytest.approx(true, rel=0.2)  # and near the one that the targets were drawn with


@given(st.floats(0.3, 4.0), st.integers(2, 60), st.integers(0, 10_000), st.booleans())
def test_the_prior_moves_a_temperature_towards_1_and_never_beyond(
    true: float, images: int, seed: int, several: bool
) -> None:
    logits, targets = told(true, several, images, seed)
    likeliest, found = (math.log(fit_temperature(logits, targets, prior_std=each)) for each in (math.inf, PRIOR_STD))
    assert abs(found) <= abs(likeliest) + 1e-9
    assert found * likeliest >= -1e-9


@pytest.mark.parametrize("several", [False, True], ids=["softmax", "several"])
@pytest.mark.parametrize("true", [0.4, 3.0])
def test_few_images_stay_near_1_and_many_reach_the_likeliest(true: float, several: bool) -> None:
    assert abs(math.log(fit_temperature(*told(true, several, 4)))) < 0.6 * abs(math.log(true))
    logits, targets = told(true, several, 200)
    distances = []
    for times in (1, 10, 100):
        many = logits.repeat(times, 1), targets.repeat(times, *[1] * (targets.ndim - 1))
        distances.append(abs(math.log(fit_temperature(*many) / fit_temperature(*many, prior_std=math.inf))))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.01


def test_one_wrong_answer_among_few_does_not_make_a_network_certain() -> None:
    """Of 30 clear answers one is hardly wrong: its likelihood alone would have them nearly certain."""
    logits = torch.tensor([[2.0, 0.0, 0.0]]).repeat(30, 1)
    targets = torch.zeros(30, dtype=torch.int64)
    logits[0] = torch.tensor([1.0, 1.01, 0.0])
    assert fit_temperature(logits, targets, prior_std=math.inf) < 0.4
    assert fit_temperature(logits, targets) > 0.5


@pytest.mark.parametrize("several", [False, True], ids=["softmax", "several"])
def test_logits_c_times_as_large_have_a_temperature_c_times_as_high(several: bool) -> None:
    logits, targets = told(1.5, several)
    plain = fit_temperature(logits, targets, prior_std=math.inf)
    for factor in (0.25, 4.0):
        assert fit_temperature(factor * logits, targets, prior_std=math.inf) == pytest.approx(factor * plain, rel=1e-6)


def test_where_every_answer_is_right_it_stays_one() -> None:
    logits, targets = told(1.0, several=False)
    right = logits.argmax(dim=1)
    assert fit_temperature(logits, right) == 1.0
    one_wrong = torch.cat([right[:-1], (right[-1:] + 1) % L])
    assert fit_temperature(logits, one_wrong) != 1.0
    shares = (logits > 0).float()
    assert fit_temperature(logits, shares) == 1.0
    shares[0, 0] = 1 - shares[0, 0]  # one label of one image
    assert fit_temperature(logits, shares) != 1.0
    assert fit_temperature(logits[:0], targets[:0]) == 1.0


def test_logits_that_say_less_than_nothing_get_the_highest_temperature() -> None:
    logits, _ = told(1.0, several=False)
    assert fit_temperature(logits, logits.argmin(dim=1), prior_std=math.inf) == pytest.approx(TEMPERATURE_RANGE[1])


def test_the_calibration_error_by_hand() -> None:
    """Bins of 1/15: two answers near 0.95, one right; one sure and right; one at 0.3 and right."""
    confidences = torch.tensor([0.94, 0.96, 1.0, 0.3], dtype=torch.float64)
    right = torch.tensor([True, False, True, True])
    first_two_and_third = abs(0.94 + 0.96 + 1.0 - 2)  # all three above 14/15
    assert expected_calibration_error(confidences, right) == pytest.approx((first_two_and_third + 0.7) / 4)
    assert expected_calibration_error(confidences, right, bins=1) == pytest.approx(abs(3.2 - 3) / 4)


def test_a_bin_holds_its_upper_edge_and_the_first_holds_zero() -> None:
    """In one bin what two answers miss cancels, in two it adds up."""
    right = torch.tensor([True, False])

    def together(one: float, other: float) -> bool:
        found = expected_calibration_error(torch.tensor([one, other], dtype=torch.float64), right)
        apart = (1 - one + other) / 2
        joined = abs(one + other - 1) / 2
        assert found == pytest.approx(apart) or found == pytest.approx(joined)
        return found == pytest.approx(joined)

    for bin_number in range(15):
        edge = (bin_number + 1) / 15
        assert together(edge, edge - 0.01)
        assert bin_number == 14 or not together(edge, edge + 0.01)
    assert together(0.05, 0.0)
