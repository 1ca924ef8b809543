"""The loop: where a run stands after each step, that it may be left and entered, and what a thread makes ahead."""

import threading
from collections.abc import Generator, Iterator

import pytest
import torch

from tests.train.test_training_run import learning
from vitrail.train import loop
from vitrail.train.loop import StepEnd, _prefetch
from vitrail.train.run_batches import iterate_train_batches
from vitrail.train.step import build_train_state

NAME = "batches ahead"


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == NAME]


class Source:
    """Numbers from 0, which notes how many were asked for and whether it was closed."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error = count, error
        self.made, self.closed = 0, False

    def items(self) -> Generator[int, None, None]:
        try:
            for number in range(self.count):
                self.made += 1
                yield number
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


@pytest.mark.parametrize("count", [0, 1, 2, 3, 100])
def test_what_is_made_ahead_comes_in_order_and_the_thread_ends(count: int) -> None:
    source = Source(count)
    assert list(_prefetch(source.items())) == list(range(count))
    assert source.closed
    assert threads() == []


@pytest.mark.parametrize("count", [0, 5])
def test_an_error_is_raised_where_the_item_would_be_taken(count: int) -> None:
    source = Source(count, KeyError("bad image"))
    parts = _prefetch(source.items())
    assert [next(parts) for _ in range(count)] == list(range(count))
    with pytest.raises(KeyError, match="bad image"):
        next(parts)
    assert source.closed
    assert threads() == []


def test_who_leaves_early_stops_the_thread_and_closes_the_source() -> None:
    source = Source(1_000_000)
    items = source.items()  # held, so that it is not closed by being forgotten
    parts = _prefetch(items)
    assert [next(parts) for _ in range(3)] == [0, 1, 2]
    assert threads() == [NAME]
    parts.close()
    assert threads() == []
    assert source.closed
    assert source.made <= 3 + 2 + 2  # two wait, one is on its way to them, and one took its place


def test_an_error_of_the_taker_stops_the_thread_too() -> None:
    source = Source(1_000_000)

    def take(parts: Iterator[int]) -> None:
        for item in parts:
            if item == 4:
                raise ValueError(item)

    parts = _prefetch(source.items())
    with pytest.raises(ValueError, match="4"):
        take(parts)
    parts.close()
    assert threads() == []
    assert source.closed


def test_a_moment_says_where_the_run_stands() -> None:
    task, moments = learning({"epochs": 1.5}), list[StepEnd]()
    state = build_train_state(task.build_model(), task.recipe)
    loop.train_steps(
        state, iterate_train_batches(task), task.training_data, task.plan, task.recipe, after_step=moments.append
    )
    images = round(1.5 * 1439)
    assert [moment.step for moment in moments] == list(range(1, 35))
    assert {moment.steps for moment in moments} == {34}
    assert [moment.result.images for moment in moments] == [64] * 33 + [images - 33 * 64]
    assert [moment.epoch for moment in moments] == pytest.approx([min(n * 64, images) / 1439 for n in range(1, 35)])
    seconds = [moment.seconds for moment in moments]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_run_that_was_left_goes_on_as_if_it_had_not_been(micro_batches: int) -> None:
    """Left after step 5 by an error, entered again with the batches from there on: the same weights to the bit."""
    task = learning({"epochs": 0.5, "dropout": 0.1}, micro_batches=micro_batches)
    whole, halves = (build_train_state(task.build_model(), task.recipe) for _ in range(2))

    def leave(moment: StepEnd) -> None:
        if moment.step == 5:
            raise InterruptedError

    loop.train_steps(
        whole, iterate_train_batches(task), task.training_data, task.plan, task.recipe, after_step=lambda _: None
    )
    with pytest.raises(InterruptedError):
        loop.train_steps(
            halves, iterate_train_batches(task), task.training_data, task.plan, task.recipe, after_step=leave
        )
    assert halves.step == 5
    loop.train_steps(
        halves, iterate_train_batches(task, 5), task.training_data, task.plan, task.recipe, after_step=lambda _: None
    )
    assert halves.step == whole.step == task.plan.total_steps
    pairs = zip(whole.model.parameters(), halves.model.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
