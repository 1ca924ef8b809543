"""The temperature against another optimiser's, and the calibration error by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp
from torch import Tensor

from vitrail.evaluate.calibrate import RANGE, expected_calibration_error, temperature

n, L = 400, 5


def told(true: float, several: bool) -> tuple[Tensor, Tensor]:
    """Logits, and targets drawn with the probabilities that the logits over `true` give."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(n, L, generator=generator)
    if several:
        return logits, ((logits / true).sigmoid() > torch.rand(n, L, generator=generator)).float()
    return logits, torch.multinomial((logits / true).softmax(dim=1), 1, generator=generator)[:, 0]


def optimum(logits: Tensor, targets: Tensor) -> float:
    """The temperature of the least negative log-likelihood, by Brent's method on its values."""
    x, y = logits.double().numpy(), targets.numpy()

    def loss(logarithm: float) -> float:
        z = x / math.exp(logarithm)
        if y.ndim == 1:
            return float((logsumexp(z, axis=1) - z[np.arange(len(z)), y]).sum())
        return float((np.logaddexp(0, z) - y * z).sum())

    bounds = tuple(map(math.log, RANGE))
    return math.exp(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-10}).x)


@pytest.mark.parametrize("several", [False, True], ids=["softmax", "several"])
@pytest.mark.parametrize("true", [0.5, 1.0, 2.5])
def test_the_temperature_is_the_likeliest(true: float, several: bool) -> None:
    logits, targets = told(true, several)
    found = temperature(logits, targets)
    assert found == pytest.approx(optimum(logits, targets), rel=1e-5)
    assert found == pytest.approx(true, rel=0.2)  # and near the one that the targets were drawn with


@pytest.mark.parametrize("several", [False, True], ids=["softmax", "several"])
def test_logits_c_times_as_large_have_a_temperature_c_times_as_high(several: bool) -> None:
    logits, targets = told(1.5, several)
    for factor in (0.25, 4.0):
        assert temperature(factor * logits, targets) == pytest.approx(factor * temperature(logits, targets), rel=1e-6)


def test_where_every_answer_is_right_it_stays_one() -> None:
    logits, targets = told(1.0, several=False)
    right = logits.argmax(dim=1)
    assert temperature(logits, right) == 1.0
    one_wrong = torch.cat([right[:-1], (right[-1:] + 1) % L])
    assert temperature(logits, one_wrong) != 1.0
    shares = torch.nn.functional.one_hot(right, L).float()
    shares[:, 0] = 1  # more labels than the answer found do not make it wrong
    assert temperature(logits, shares) == 1.0
    assert temperature(logits[:0], targets[:0]) == 1.0


def test_logits_that_say_less_than_nothing_get_the_highest_temperature() -> None:
    logits, _ = told(1.0, several=False)
    assert temperature(logits, logits.argmin(dim=1)) == pytest.approx(RANGE[1])


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
