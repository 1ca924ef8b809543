"""Work in other processes: results, errors, and a process that dies takes only its own item with it."""

import os
from concurrent.futures.process import BrokenProcessPool

import pytest

from vitrail.data.workers import finished
from vitrail.errors import DataError


def worked(item: int) -> int:
    if item == 3:
        os.abort()
    if item == 100:
        raise DataError("item 100 is bad")
    return item * item


def test_results_come_with_their_items() -> None:
    assert sorted(finished(worked, [1, 2, 4], workers=2)) == [(1, 1), (2, 4), (4, 16)]
    assert list(finished(worked, [])) == []


def test_an_error_of_the_function_is_raised_here() -> None:
    with pytest.raises(DataError, match="item 100 is bad"):
        list(finished(worked, [1, 100, 2], workers=1))


def test_a_process_that_dies_is_named_and_the_rest_goes_on() -> None:
    found = dict(finished(worked, list(range(6)), workers=2))
    assert isinstance(found.pop(3), BrokenProcessPool)
    assert found == {0: 0, 1: 1, 2: 4, 4: 16, 5: 25}
