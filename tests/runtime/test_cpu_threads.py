"""Batches split over single-threaded workers, and their priority."""

import contextlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from vitrail.runtime.cpu_threads import split_over_threads, use_one_thread


def make_batch(count: int) -> Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 20])
def test_images_split_over_threads_keep_their_order(threads: int, count: int) -> None:
    """Each image gets its own row from whichever thread; chunks are no larger than asked, threads single-threaded."""
    calls: list[tuple[str, int, int]] = []

    def compute_means(chunk: Tensor) -> Tensor:
        calls.append((threading.current_thread().name, len(chunk), torch.get_num_threads()))
        return chunk.flatten(1).float().mean(dim=1, keepdim=True)

    pixels, before = make_batch(count), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        means = split_over_threads(compute_means, 4)(pixels)
        assert torch.get_num_threads() == threads, "other threads keep their number"
        later = ThreadPoolExecutor(1).submit(torch.get_num_threads).result()
        assert later == threads, "and so do threads that start later"
    finally:
        torch.set_num_threads(before)
    assert torch.equal(means, pixels.flatten(1).float().mean(dim=1, keepdim=True))
    assert sum(size for _, size, _ in calls) == count
    if count >= max(threads, 2):
        assert max(size for _, size, _ in calls) <= min(4, -(-count // threads))
        assert {alone for _, _, alone in calls} == {1}
        assert all(name.startswith("compute") for name, _, _ in calls) == (threads > 1)


@pytest.mark.parametrize(
    ("count", "chunks"), [(2, [1, 1]), (9, [5, 4]), (16, [8, 8]), (20, [5, 5, 5, 5]), (33, [6] * 5 + [3])]
)
def test_threads_get_chunks_as_equal_as_possible(count: int, chunks: list[int]) -> None:
    sizes: list[int] = []

    def record_size(chunk: Tensor) -> Tensor:
        sizes.append(len(chunk))
        return chunk

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        split_over_threads(record_size, 8)(make_batch(count))
    finally:
        torch.set_num_threads(before)
    assert sorted(sizes, reverse=True) == chunks


def test_one_thread_is_used_and_the_number_restored_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with contextlib.suppress(ArithmeticError), use_one_thread() as threads:
            assert (threads, torch.get_num_threads()) == (3, 1)
            assert ThreadPoolExecutor(1).submit(torch.get_num_threads).result() == 1
            raise ArithmeticError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_only_computing_threads_get_a_lower_priority() -> None:
    script = (
        "import os, torch; from vitrail.runtime import cpu_threads as c; torch.set_num_threads(3);"
        "c.lower_thread_priority(); pool = c.get_thread_pool(); values = [];"
        "c.run_in_each_thread(pool, 3, lambda: values.append(os.nice(0))); print(os.nice(0), values)"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == f"{os.nice(0)} {[min(19, os.nice(0) + 5)] * 3}"
