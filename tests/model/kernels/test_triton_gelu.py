"""The GELU kernel computes the gradient before GELU and its sum, here in Triton's interpreter."""

import pytest

from tests.model.kernels.interpreter import Errors, needs_triton, run_interpreted

pytestmark = needs_triton
TOLERANCES = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}  # relative, in the norm
SUM_TOLERANCE = 2e-6  # sums are float32 of values not yet rounded


@pytest.fixture(scope="module")
def errors() -> Errors:
    """Relative errors of every case."""
    return run_interpreted("interpret_gelu")


def test_gradients_are_those_of_float64(errors: Errors) -> None:
    for name, case in errors.items():
        assert case["gradient"] < TOLERANCES[name.split()[0]], name


def test_sums_are_those_of_float64_and_repeatable(errors: Errors) -> None:
    for name, case in errors.items():
        assert max(case["sums"], case["other"]) < SUM_TOLERANCE, name
        assert case["repeat"] == 0, name
