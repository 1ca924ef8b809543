"""How a process computes on a CPU: a pool of single-threaded workers, freed memory, thread priority.

Threads that share one matrix product wait for each other hundreds of times a pass. Each wait also includes whatever
else the machine does, such as decoding the next images. Here each thread computes images of its own, so few that one
layer's output is still in the core's cache when the next layer reads it. Only batches smaller than the number of
threads are shared.
"""

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

BatchFunction = Callable[[Tensor], Tensor]
"""A function from a batch to one row for each of its items."""

_NICENESS = 5  # such a thread gets a third of the time that another gets
_POOL_LOCK = threading.Lock()
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # parameters of mallopt, from glibc's malloc.h


@contextlib.contextmanager
def use_one_thread() -> Iterator[int]:
    """Let torch compute with one thread, as threads started meanwhile do; gives the number that is restored after."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def split_over_threads(function: BatchFunction, chunk_size: int) -> BatchFunction:
    """The same function; on the CPU it computes at most `chunk_size` items at a time, on torch's number of threads."""

    def compute_in_chunks(batch: Tensor) -> Tensor:
        threads = torch.get_num_threads()
        if batch.device.type != "cpu" or len(batch) < max(2, threads):
            return function(batch)
        rounds = -(-len(batch) // (chunk_size * threads))
        chunks = batch.split(-(-len(batch) // (rounds * threads)))  # as equal as possible
        if threads == 1:
            return torch.cat([function(chunk) for chunk in chunks])
        return torch.cat(list(get_thread_pool().map(function, chunks)))

    return compute_in_chunks


def get_thread_pool() -> ThreadPoolExecutor:
    """This process's pool of as many threads as torch may use, each of which computes single-threaded.

    Create it before other threads compute: that sets and restores torch's number of threads.
    """
    with _POOL_LOCK:
        return _create_thread_pool(torch.get_num_threads(), os.getpid())  # a fork has none of its parent's threads


@functools.cache
def _create_thread_pool(count: int, _process: int) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(count, thread_name_prefix="compute")

    def set_one_thread() -> None:
        torch.get_num_threads()  # a thread's first call sets its number to the global one
        torch.set_num_threads(1)  # for this thread, and for any that starts later

    run_in_each_thread(pool, count, set_one_thread)
    torch.set_num_threads(count)
    return pool


def run_in_each_thread(pool: ThreadPoolExecutor, count: int, work: Callable[[], object]) -> None:
    """Run `work` once in each of a pool's threads."""
    barrier = threading.Barrier(count)

    def run_once() -> None:
        work()
        barrier.wait()

    for future in [pool.submit(run_once) for _ in range(count)]:
        future.result()


def lower_thread_priority() -> None:
    """Lower the priority of the computing threads, so that a server refuses and reports its health without delay.

    Only on Linux, where each thread has a priority of its own.
    """
    if sys.platform == "linux":
        run_in_each_thread(get_thread_pool(), torch.get_num_threads(), lambda: os.nice(_NICENESS))


def keep_freed_memory() -> None:
    """Let this process keep freed memory, up to a few hundred megabytes; for commands, since it affects all threads.

    By default glibc returns a layer's memory to the system and requests it again for the next layer. The system then
    clears it page by page, which costs int8 a tenth of its time or more. Threads other than the first allocate from
    arenas of 64 MB, which glibc returns when empty whatever the settings, so all threads share the first arena. Other
    systems have other allocators, and there this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**25)  # the largest that glibc accepts
        mallopt(_TRIM_THRESHOLD, 2**28)
        mallopt(_ARENA_MAX, 1)
