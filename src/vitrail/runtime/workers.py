"""Work in parallel processes and threads, and how it reports its progress."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

_MAX_WINDOWS_WORKERS = 61  # of a ProcessPoolExecutor
ProgressCallback = Callable[[int, int], None]
"""Called with the amount done and the total."""
ShowProgress = Callable[[str], contextlib.AbstractContextManager[Callable[..., None]]]
"""Entered with a title for as long as work takes; yields a function of (done, total) or (done, total, text)."""
Notify = Callable[[str], None]
"""Called with a sentence for the user."""
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def ignore_progress(done: int, total: int, text: str = "") -> None:
    """Ignore progress: the default callback."""


def ignore_note(sentence: str) -> None:
    """Print nothing: the default of `Notify`."""


@contextlib.contextmanager
def hide_progress(title: str) -> Iterator[Callable[..., None]]:  # noqa: ARG001, the signature of ShowProgress
    """Show nothing: the default of `ShowProgress`."""
    yield ignore_progress


def count_available_cores() -> int:
    """Count the CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_loader_workers(requested: int | None) -> int:
    """The processes that load images: those requested, or one per core, less one."""
    return max(0, count_available_cores() - 1) if requested is None else requested


def prefetch_batches(
    function: Callable[[ItemT], ResultT], batches: Iterable[Sequence[ItemT]], threads: int
) -> Iterator[list[tuple[ItemT, ResultT]]]:
    """Yield each batch's items with their results, in order; threads compute one batch ahead, and no further."""
    pool = ThreadPoolExecutor(threads)
    pending: list[tuple[ItemT, Future[ResultT]]] | None = None
    try:
        for batch in batches:
            submitted = [(item, pool.submit(function, item)) for item in batch]
            if pending is not None:
                yield [(item, future.result()) for item, future in pending]
            pending = submitted
        if pending is not None:
            yield [(item, future.result()) for item, future in pending]
    finally:
        pool.shutdown(cancel_futures=True)


def map_in_processes(
    function: Callable[[ItemT], ResultT],
    items: Sequence[ItemT],
    workers: int | None = None,
    *,
    preload: Sequence[str] = (),
) -> Iterator[tuple[ItemT, ResultT | BrokenProcessPool]]:
    """Yield each item with its result, in the order of completion; an exception of the function is raised here.

    A process that dies, by a decoder's crash or for lack of memory, breaks the whole pool. Unfinished items then run
    again, each in its own process, and those whose process dies are returned with that error. `preload` names the
    modules that the processes share, so that each does not import them again.
    """
    if not items:
        return
    unfinished: list[ItemT] = []
    with _create_process_pool(workers or count_available_cores(), preload) as pool:
        with _defer_keyboard_interrupt(), hide_main_module():
            futures = {pool.submit(function, item): item for item in items}  # which starts the processes
        try:
            for future in as_completed(list(futures)):
                item, error = futures.pop(future), future.exception()
                if isinstance(error, BrokenProcessPool):
                    unfinished.append(item)
                elif error is not None:
                    raise error
                else:
                    yield item, future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    for item in unfinished:  # one of these killed its process: each gets its own
        with _create_process_pool(1, preload) as pool:
            with hide_main_module():
                future = pool.submit(function, item)
            error = future.exception()
            if error is not None and not isinstance(error, BrokenProcessPool):
                raise error
            yield item, error if isinstance(error, BrokenProcessPool) else future.result()


def _create_process_pool(workers: int, preload: Sequence[str]) -> ProcessPoolExecutor:
    """Create processes that ignore Ctrl-C, which this process handles, and end with this one."""
    with _defer_keyboard_interrupt():
        context = get_process_context(preload, [signal.SIGINT])
    count = min(workers, _MAX_WINDOWS_WORKERS) if os.name == "nt" else workers
    return ProcessPoolExecutor(count, mp_context=context, initializer=_ignore_keyboard_interrupt)


def get_process_context(preload: Sequence[str], blocked_signals: Sequence[signal.Signals]) -> BaseContext:
    """Return a context whose processes are forked from a fresh one, which has imported the modules of `preload`.

    This process may have threads, which no fork survives. All of them start with the signals blocked. Where processes
    cannot be forked, as on Windows, each starts anew, and no signal is blocked.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver, resource_tracker

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    resource_tracker.ensure_running()  # started separately: it would undo what follows
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked_signals)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    return context


def _ignore_keyboard_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def hide_main_module() -> Iterator[None]:
    """Start processes that do not run the user's script again: what they call is in our modules.

    multiprocessing imports the main module in each of them, which starts a script without `if __name__ ==
    "__main__"` anew.
    """
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {name: vars(main)[name] for name in ("__spec__", "__file__") if name in vars(main)}
    main.__spec__ = None
    vars(main).pop("__file__", None)
    try:
        yield
    finally:
        vars(main).update(hidden)


@contextlib.contextmanager
def _defer_keyboard_interrupt() -> Iterator[None]:
    """Run a block that must not be interrupted: Ctrl-C takes effect at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    previous_handler = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    if pressed:
        raise KeyboardInterrupt
