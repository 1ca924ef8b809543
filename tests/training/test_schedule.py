"""The learning rate by hand, and what holds for every schedule."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.config import ScheduleConfig
from vitrail.errors import UsageError
from vitrail.training.schedule import lr_scale

BY_HAND: dict[str, tuple[dict[str, Any], list[float]]] = {
    "constant": ({"decay": "constant"}, [1.0, 1.0, 1.0]),
    "linear": ({"decay": "linear"}, [1.0, 0.75, 0.5, 0.25]),
    "linear-to-a-fifth": ({"decay": "linear", "final_lr_scale": 0.2}, [1.0, 0.8, 0.6, 0.4]),
    "linear-warm": ({"decay": "linear", "warmup": 2}, [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
    "cosine": ({}, [1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]),  # cos 45° is 0.5^0.5
    "cosine-to-a-half": ({"final_lr_scale": 0.5}, [1.0, 0.875, 0.625]),  # cos 60° is 0.5
    "cosine-warm": ({"warmup": 4}, [0.0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.25]),
    "rsqrt": ({"decay": "rsqrt", "warmup": 1, "timescale": 1}, [0.0, 1.0, 2**-0.5, 3**-0.5, 0.5]),
    "rsqrt-slow": ({"decay": "rsqrt", "timescale": 3}, [1.0, 0.75**0.5, 0.6**0.5, 0.5**0.5]),
    "rsqrt-cooled": (
        {"decay": "rsqrt", "timescale": 1, "cooldown": 2},
        [1.0, 2**-0.5, 3**-0.5, 0.5 * 1.0, 5**-0.5 * 0.5],
    ),
    "constant-cooled": (
        {"decay": "constant", "warmup": 2, "cooldown": 4},
        [0.0, 0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25],
    ),
    "step": ({"decay": "step", "milestones": (0.25, 0.5)}, [1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01, 0.01]),
    "step-warm": ({"decay": "step", "milestones": (0.5,), "warmup": 2}, [0.0, 0.5, 1.0, 0.1]),
    "warm-up-alone": ({"decay": "cosine", "warmup": 4}, [0.0, 0.25, 0.5, 0.75]),
    "up-and-down": ({"decay": "constant", "warmup": 2, "cooldown": 2}, [0.0, 0.5, 1.0, 0.5]),
}


@pytest.mark.parametrize(("fields", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_the_shares_are_those_computed_by_hand(fields: dict[str, Any], expected: list[float]) -> None:
    found = [lr_scale(ScheduleConfig(**fields), step, len(expected)) for step in range(len(expected))]
    assert found == pytest.approx(expected, abs=1e-12)


@st.composite
def runs(draw: st.DrawFn) -> tuple[ScheduleConfig, int]:
    steps = draw(st.integers(2, 500))
    warmup = draw(st.integers(0, steps - 1))
    decay = draw(st.sampled_from(["cosine", "linear", "rsqrt", "constant"]))
    if decay in ("cosine", "linear"):
        return ScheduleConfig(decay=decay, warmup=warmup, final_lr_scale=draw(st.floats(0, 1))), steps
    cooldown = draw(st.integers(0, steps - warmup))
    return ScheduleConfig(decay=decay, warmup=warmup, cooldown=cooldown, timescale=draw(st.integers(1, 1000))), steps


@given(runs())
def test_it_rises_to_exactly_one_and_never_rises_again(run: tuple[ScheduleConfig, int]) -> None:
    schedule, steps = run
    shares = [lr_scale(schedule, step, steps) for step in range(steps)]
    top = schedule.warmup
    assert shares[top] == 1.0
    assert shares[: top + 1] == sorted(shares[: top + 1])
    assert all(later <= earlier + 1e-15 for earlier, later in zip(shares[top:], shares[top + 1 :], strict=False))
    assert all(0 <= value <= 1 for value in shares)
    assert shares[-1] >= schedule.final_lr_scale - 1e-12


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_last_step_is_one_short_of_the_end(decay: Any) -> None:
    """At 1,000 steps a straight line has a thousandth left, a cosine a fourth of (pi / 1000)^2."""
    left = {"linear": 0.9e-3, "cosine": 0.9 * (3.14159265 / 1000) ** 2 / 4}[decay]
    assert lr_scale(ScheduleConfig(decay=decay, final_lr_scale=0.1), 999, 1000) == pytest.approx(0.1 + left, rel=1e-6)


def test_what_does_not_fit_into_the_run_is_refused_with_its_numbers() -> None:
    schedule = ScheduleConfig(decay="constant", warmup=60, cooldown=41)
    with pytest.raises(UsageError, match="a warm-up of 60 steps and a cooldown of 41 do not fit into 100 steps"):
        lr_scale(schedule, 0, 100)
    assert lr_scale(schedule, 60, 101) == 1.0


@pytest.mark.parametrize(
    "fields",
    [
        {"decay": "cosine", "cooldown": 5},
        {"decay": "linear", "cooldown": 5},
        {"decay": "constant", "final_lr_scale": 0.1},
        {"decay": "rsqrt", "final_lr_scale": 0.1},
        {"decay": "step"},
        {"decay": "step", "milestones": (1.0,)},
        {"decay": "step", "milestones": (0.5,), "final_lr_scale": 0.1},
        {"decay": "cosine", "milestones": (0.5,)},
        {"warmup": -1},
        {"final_lr_scale": float("nan")},
    ],
)
def test_a_field_that_would_do_nothing_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"is for the decay|are for the decay|needs milestones|must be|must lie"):
        ScheduleConfig(**fields)
