"""Work shared among processes, and what became of each part of it."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, resource_tracker
from typing import TypeVar

ProgressCallback = Callable[[int, int], None]
"""Called with how much is done, and of how much."""
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def ignore_progress(done: int, total: int) -> None:
    """Progress that nobody watches."""


def count_available_cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prefetch_batches(
    function: Callable[[ItemT], ResultT], batches: Iterable[Sequence[ItemT]], threads: int
) -> Iterator[list[tuple[ItemT, ResultT]]]:
    """Each batch's items with their results, in order; while one is used, threads work on the next, and no further."""
    pool = ThreadPoolExecutor(threads)
    before: list[tuple[ItemT, Future[ResultT]]] | None = None
    try:
        for batch in batches:
            coming = [(item, pool.submit(function, item)) for item in batch]
            if before is not None:
                yield [(item, future.result()) for item, future in before]
            before = coming
        if before is not None:
            yield [(item, future.result()) for item, future in before]
    finally:
        pool.shutdown(cancel_futures=True)


def map_in_processes(
    function: Callable[[ItemT], ResultT], items: Sequence[ItemT], workers: int | None = None
) -> Iterator[tuple[ItemT, ResultT | BrokenProcessPool]]:
    """Each item with its result, in the order in which they are done; an exception of the function is raised here.

    A process that dies, by a decoder's crash or for want of memory, takes the pool with it: what was not done then is
    done again, each item in a process of its own, and those whose process dies are returned with that error.
    """
    if not items:
        return
    alone: list[ItemT] = []
    with _create_process_pool(workers or count_available_cores()) as pool:
        with _defer_keyboard_interrupt():
            futures = {pool.submit(function, item): item for item in items}  # which starts the processes
        try:
            for future in as_completed(list(futures)):
                item, error = futures.pop(future), future.exception()
                if isinstance(error, BrokenProcessPool):
                    alone.append(item)
                elif error is not None:
                    raise error
                else:
                    yield item, future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    for item in alone:  # one of these is to blame: each gets a process of its own
        with _create_process_pool(1) as pool:
            future = pool.submit(function, item)
            error = future.exception()
            if error is not None and not isinstance(error, BrokenProcessPool):
                raise error
            yield item, error if isinstance(error, BrokenProcessPool) else future.result()


def _create_process_pool(workers: int) -> ProcessPoolExecutor:
    """Processes forked from a fresh one that has our modules: this one may have threads, which a fork does not survive.

    Ctrl-C is for this process to handle; the others begin deaf to it, and end with this one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vitrail.data.image_scan", "vitrail.data.pack"])
    resource_tracker.ensure_running()  # by itself: it would undo what follows
    with _defer_keyboard_interrupt():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return ProcessPoolExecutor(workers, mp_context=context)


@contextlib.contextmanager
def _defer_keyboard_interrupt() -> Iterator[None]:
    """What cannot be stopped in the middle: Ctrl-C takes effect at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt
