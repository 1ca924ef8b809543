"""The loop: its batches, unreadable images, where a run stands after each step, and what a thread makes ahead."""

import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from tests.training.test_training_run import build_digits_run
from vitrail.data.loader import Batch
from vitrail.errors import DataError
from vitrail.runtime.distributed import ProcessGroup
from vitrail.training import loop
from vitrail.training.loop import StepEnd, UnreadableImages, _prefetch, iterate_split_batches, iterate_train_batches
from vitrail.training.step import build_train_state

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
    task, moments = build_digits_run({"epochs": 1.5}), list[StepEnd]()
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
    task = build_digits_run({"epochs": 0.5, "dropout": 0.1}, micro_batches=micro_batches)
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


def test_training_starts_at_any_step_with_the_same_batches() -> None:
    run = build_digits_run({})
    whole = list(iterate_train_batches(run))
    assert sum(len(batch.targets) for batch in whole) == 1439
    later = list(iterate_train_batches(run, 20))
    assert len(later) == len(whole) - 20
    for one, other in zip(whole[20:], later, strict=True):
        assert torch.equal(one.pixels, other.pixels)
        assert torch.equal(one.targets, other.targets)


def test_ranks_share_the_images_of_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_EVAL_BATCH_SIZE", 50)
    run = build_digits_run({})
    alone = torch.cat([batch.positions for batch in iterate_split_batches(run, "val")])
    assert alone.tolist() == list(range(179))
    parts = [
        torch.cat([batch.positions for batch in iterate_split_batches(run, "val", ProcessGroup(rank, 2))])
        for rank in (0, 1)
    ]
    assert sorted(torch.cat(parts).tolist()) == alone.tolist()


def make_batches(*skipped: tuple[str, ...]) -> Generator[Batch, None, None]:
    for names in skipped:
        yield Batch(torch.zeros(1, 1, 8, 8), torch.zeros(1), torch.zeros(1), names)


def test_images_left_out_are_listed_once_also_after_an_interruption(tmp_path: Path) -> None:
    unreadable = UnreadableImages(tmp_path, 100)
    assert len(list(unreadable.watch(make_batches(("a.jpg",), (), ("b.jpg", "a.jpg"))))) == 3
    resumed = UnreadableImages(tmp_path, 100)
    resumed.load()
    list(resumed.watch(make_batches(("b.jpg", "two\nlines.jpg"))))
    assert (tmp_path / loop.UNREADABLE_FILE).read_text() == "a.jpg\nb.jpg\ntwo\\nlines.jpg\n"
    assert list(resumed.names) == ["a.jpg", "b.jpg", "two\\nlines.jpg"]


def test_too_many_that_cannot_be_read_end_the_run_and_close_the_batches(tmp_path: Path) -> None:
    batches = make_batches(("1.jpg",), ("2.jpg",), ("3.jpg",), ())
    watched = UnreadableImages(tmp_path / "elsewhere", 20).watch(batches)
    with pytest.raises(DataError, match=r"3 images of 20 cannot be read, such as 1\.jpg: more than 10% are too many"):
        list(watched)
    assert next(batches, None) is None  # one was left
    assert not (tmp_path / "elsewhere").exists()
