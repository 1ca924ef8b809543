"""Work in other processes and threads: results, errors, and a process that dies takes only its own item with it."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool

import pytest

from vitrail.errors import DataError
from vitrail.runtime.workers import map_in_processes, prefetch_batches


def square_or_fail(item: int) -> int:
    if item == 3:
        os.abort()
    if item == 100:
        raise DataError("item 100 is bad")
    return item * item


def test_results_come_with_their_items() -> None:
    assert sorted(map_in_processes(square_or_fail, [1, 2, 4], workers=2)) == [(1, 1), (2, 4), (4, 16)]
    assert list(map_in_processes(square_or_fail, [])) == []


def test_an_error_of_the_function_is_raised_here() -> None:
    with pytest.raises(DataError, match="item 100 is bad"):
        list(map_in_processes(square_or_fail, [1, 100, 2], workers=1))


def test_a_process_that_dies_is_named_and_the_other_items_finish() -> None:
    results = dict(map_in_processes(square_or_fail, list(range(6)), workers=2))
    assert isinstance(results.pop(3), BrokenProcessPool)
    assert results == {0: 0, 1: 1, 2: 4, 4: 16, 5: 25}


def test_threads_work_one_batch_ahead_and_no_further() -> None:
    """While a batch is used, the next is computed already, and the one after it has not been asked for."""
    begun, listed = [threading.Event() for _ in range(5)], list[int]()

    def work(item: int) -> int:
        begun[item].set()
        return -item

    def batches() -> Iterator[list[int]]:
        for batch in ([0, 1], [2], [], [3, 4]):
            listed.extend(batch)
            yield batch

    results = prefetch_batches(work, batches(), threads=2)
    assert next(results) == [(0, 0), (1, -1)]
    assert begun[2].wait(10)
    assert listed == [0, 1, 2]
    assert list(results) == [[(2, -2)], [], [(3, -3), (4, -4)]]


def test_an_error_in_a_thread_is_raised_in_its_batchs_turn() -> None:
    results = prefetch_batches(lambda item: 1 // item, [[1], [0], [1]], threads=1)
    assert next(results) == [(1, 1)]
    with pytest.raises(ZeroDivisionError):
        next(results)
