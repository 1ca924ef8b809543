"""A queue and its thread."""

import asyncio
import random
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from vitrail.serving.batching import BatchQueue
from vitrail.serving.limits import BusyError


class Recorder:
    """Work that doubles numbers, notes its batches, and waits where it is told to."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.started, self.go = threading.Event(), threading.Event()
        self.go.set()

    def __call__(self, views: Sequence[Tensor]) -> list[int]:
        self.started.set()
        assert self.go.wait(20)
        self.batches.append([int(view) for view in views])
        return [2 * int(view) for view in views]


@pytest.fixture
def work() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.go.set()


def views(*numbers: int) -> list[Tensor]:
    return [torch.tensor(number) for number in numbers]


async def asked(queue: BatchQueue, work: Recorder, *numbers: int, kind: str = "double") -> list[int]:
    with queue.acquire(len(numbers)) as place:
        return list(await place.compute(kind, work, views(*numbers)))


async def blocked(queue: BatchQueue, work: Recorder) -> "asyncio.Task[list[int]]":
    """A request that the thread is computing, until `work.go` is set."""
    work.go.clear()
    first = asyncio.create_task(asked(queue, work, 0))
    while not work.started.is_set():
        await asyncio.sleep(0.001)
    return first


def test_everyone_gets_his_own_results_in_his_own_order(work: Recorder) -> None:
    queue, generator = BatchQueue(max_batch=7, capacity=10_000, deadline=60), random.Random(0)
    requests = [[generator.randrange(1000) for _ in range(generator.randint(1, 5))] for _ in range(300)]

    async def every() -> list[list[int]]:
        return await asyncio.gather(*(asked(queue, work, *numbers) for numbers in requests))

    assert asyncio.run(every()) == [[2 * number for number in numbers] for numbers in requests]
    assert max(map(len, work.batches)) <= 7
    assert queue.accepted_images == 0
    queue.close()


def test_a_batch_is_what_waits_when_the_thread_is_free(work: Recorder) -> None:
    queue = BatchQueue(max_batch=4, capacity=100, deadline=60)

    async def every() -> None:
        first = await blocked(queue, work)
        others = [asyncio.create_task(asked(queue, work, number)) for number in range(1, 7)]
        await asyncio.sleep(0.01)
        assert queue.accepted_images == 7
        work.go.set()
        await asyncio.gather(first, *others)

    asyncio.run(every())
    assert work.batches == [[0], [1, 2, 3, 4], [5, 6]]
    queue.close()


def test_the_images_of_a_request_stay_together_and_kinds_apart(work: Recorder) -> None:
    queue = BatchQueue(max_batch=4, capacity=100, deadline=60)

    async def every() -> None:
        first = await blocked(queue, work)
        asking = [((1, 2, 3), "a"), ((4, 5), "a"), ((6,), "b"), ((7,), "a"), ((8,), "b")]
        others = [asyncio.create_task(asked(queue, work, *numbers, kind=kind)) for numbers, kind in asking]
        await asyncio.sleep(0.01)
        work.go.set()
        await asyncio.gather(first, *others)

    asyncio.run(every())
    assert work.batches == [[0], [1, 2, 3, 7], [4, 5], [6, 8]]
    queue.close()


def test_a_request_that_finds_no_room_is_refused_and_leaves_nothing(work: Recorder) -> None:
    queue = BatchQueue(max_batch=4, capacity=3, deadline=60)

    async def every() -> None:
        first = await blocked(queue, work)
        with pytest.raises(BusyError, match="all 3 slots are taken"):
            await asked(queue, work, 1, 2, 3)
        second = asyncio.create_task(asked(queue, work, 1, 2))
        await asyncio.sleep(0.01)
        with pytest.raises(BusyError) as refused:
            queue.check_capacity()
        assert refused.value.retry_seconds >= 1
        work.go.set()
        assert await first == [0]
        assert await second == [2, 4]
        assert await asked(queue, work, 5, 6, 7) == [10, 12, 14]

    asyncio.run(every())
    queue.close()


def test_a_request_that_would_wait_too_long_is_refused_by_the_measured_pace(work: Recorder) -> None:
    """Ten images at 0.2 s each are two seconds of work: not for one who may wait for one second."""
    queue = BatchQueue(max_batch=4, capacity=100, deadline=1.0)

    async def every() -> None:
        first = await blocked(queue, work)
        others = asyncio.create_task(asked(queue, work, *range(9)))
        await asyncio.sleep(0.01)
        queue.seconds_per_image = 0.2
        assert queue.expected_wait == pytest.approx(2.0)
        with pytest.raises(BusyError, match="queued takes longer than 1 s") as refused:
            queue.check_capacity()
        assert refused.value.retry_seconds == pytest.approx(2.0)
        work.go.set()
        await asyncio.gather(first, others)

    asyncio.run(every())
    assert queue.queued_images == queue.accepted_images == 0
    queue.close()


def test_images_that_are_not_decoded_are_no_work_for_the_model() -> None:
    """They may never be: one who waits for a model does not wait for those."""
    queue = BatchQueue(max_batch=4, capacity=100, deadline=1.0)
    queue.seconds_per_image = 0.2
    with queue.acquire(50), queue.acquire(50):
        assert (queue.accepted_images, queue.expected_wait) == (100, 0)
        with pytest.raises(BusyError, match="all 100 slots are taken"):
            queue.check_capacity()
    queue.close()


def test_the_pace_is_seconds_for_an_image(work: Recorder) -> None:
    queue = BatchQueue(max_batch=8, capacity=100, deadline=60)

    def slow(views: Sequence[Tensor]) -> list[int]:
        time.sleep(0.04 * len(views))
        return [0] * len(views)

    async def every() -> None:
        for _ in range(3):
            with queue.acquire(4) as place:
                await place.compute("slow", slow, views(1, 2, 3, 4))

    asyncio.run(every())
    assert 0.04 <= queue.seconds_per_image < 0.4
    queue.close()


def test_what_has_not_begun_by_its_deadline_is_refused_and_never_computed(work: Recorder) -> None:
    queue = BatchQueue(max_batch=4, capacity=100, deadline=0.05)

    async def every() -> None:
        first = await blocked(queue, work)
        with pytest.raises(BusyError, match=r"no answer within 0\.05 s"):
            await asked(queue, work, 1)
        work.go.set()
        assert await first == [0]  # begun in time, and answered late

    asyncio.run(every())
    queue.close()
    assert work.batches == [[0]]
    assert queue.accepted_images == 0


def test_a_failure_reaches_all_of_its_batch_and_no_other(work: Recorder) -> None:
    queue = BatchQueue(max_batch=4, capacity=100, deadline=60)

    def failing(views: Sequence[Tensor]) -> list[int]:
        raise RuntimeError("planted")

    async def fail() -> Sequence[object]:
        with queue.acquire(1) as slot:
            return await slot.compute("bad", failing, views(1))

    async def every() -> list[object]:
        first = await blocked(queue, work)
        bad = [asyncio.create_task(fail()) for _ in range(2)]
        good = asyncio.create_task(asked(queue, work, 3))
        await asyncio.sleep(0.01)
        work.go.set()
        return [await first, await good, *await asyncio.gather(*bad, return_exceptions=True)]

    zero, six, *errors = asyncio.run(every())
    assert (zero, six) == ([0], [6])
    assert [str(error) for error in errors] == ["planted", "planted"]
    queue.close()


def test_closing_computes_what_waits(work: Recorder) -> None:
    queue = BatchQueue(max_batch=2, capacity=100, deadline=60)

    async def every() -> list[list[int]]:
        first = await blocked(queue, work)
        others = [asyncio.create_task(asked(queue, work, number)) for number in range(1, 6)]
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(asyncio.to_thread(queue.close))
        work.go.set()
        await closing
        return await asyncio.gather(first, *others)

    assert asyncio.run(every()) == [[0], [2], [4], [6], [8], [10]]
