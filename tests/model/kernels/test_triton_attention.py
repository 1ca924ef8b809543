"""The attention kernels compute attention and its gradient: here in Triton's interpreter, in a process of its own."""

import pytest

from tests.model.kernels.interpreter import Errors, needs_triton, run_interpreted

pytestmark = [needs_triton, pytest.mark.slow]
TOLERANCES = {"float32": 2e-6, "float16": 1e-3}  # relative, in the norm; logits of 500 cost float32 a factor of 100
LOGSUMEXP_TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def errors() -> Errors:
    """Relative errors of every case."""
    return run_interpreted("interpret_attention")


def select_cases(errors: Errors, part: str, *, large_logits: bool = False) -> Errors:
    cases = {name: case for name, case in errors.items() if part in name and ("logits" in name) == large_logits}
    assert cases
    return cases


@pytest.mark.parametrize("kind", TOLERANCES)
def test_outputs_and_gradients_are_those_of_float64(errors: Errors, kind: str) -> None:
    for name, case in select_cases(errors, kind).items():
        assert case["out"] < TOLERANCES[kind], name
        assert case["gradient"] < TOLERANCES[kind], name


def test_the_logsumexp_is_that_of_float64(errors: Errors) -> None:
    for name, case in select_cases(errors, "N=").items():
        assert case["lse"] < LOGSUMEXP_TOLERANCE, name


@pytest.mark.parametrize("kind", TOLERANCES)
def test_large_logits_leave_finite_gradients(errors: Errors, kind: str) -> None:
    for name, case in select_cases(errors, kind, large_logits=True).items():
        assert case["out"] < 2 * max(TOLERANCES[kind], 1e-4), name
        assert case["gradient"] < 5 * max(TOLERANCES[kind], 2e-4), name


def test_two_passes_give_the_same_bits(errors: Errors) -> None:
    assert all(case["repeat"] == 0 for case in select_cases(errors, "N=").values())
