"""The worker processes of torch's DataLoader: how they start, how their death is reported, and that they always end.

torch asks workers to end, then sends SIGTERM, then joins them without a limit. Ours ignore SIGTERM, since a request to
stop often goes to the whole process group and only the main process can save. So they are ended here: asked first, and
killed after a deadline.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Generator
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from vitrail.errors import DataError, WorkerKilledError
from vitrail.runtime.signals import STOP_SIGNALS

WORKER_EXIT_SECONDS = 5.0  # time for workers to end by themselves once they are asked to
_MEMORY_SIGNALS = {
    "SIGKILL": "as the system does when memory runs out: give fewer --workers, or a smaller --batch",
    "SIGBUS": "for lack of shared memory (/dev/shm): enlarge it, or give --workers 0",
}
_live_workers: "weakref.WeakSet[BaseProcess]" = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_live_workers.clear)  # they are not the child's children


def iterate_loader(loader: "DataLoader[Any]") -> Generator[Any, None, None]:
    """Yield the loader's batches. However this ends, the loader's processes have ended too."""
    if not loader.num_workers:
        yield from loader
        return
    loader.worker_init_fn = partial(_init_worker, os.getpid())
    batches: Any = _start_workers(loader)
    workers: list[BaseProcess] = batches._workers
    try:
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:  # torch's report, or the effect of a half-sent batch
                raise _explain_death(workers, error) from error
            yield batch
    finally:
        _shut_down_workers(batches, workers)


def _start_workers(loader: "DataLoader[Any]") -> Any:
    """Start the loader's processes and return its iterator; where not all of them can start, none is left."""
    _keep_sigchld_handler()
    other_children = set(multiprocessing.active_children())
    try:
        return iter(loader)
    except BaseException:
        _kill_workers([worker for worker in multiprocessing.active_children() if worker not in other_children])
        raise
    finally:
        _live_workers.update(worker for worker in multiprocessing.active_children() if worker not in other_children)


def _keep_sigchld_handler() -> None:
    """Keep torch from replacing the process's SIGCHLD handler, which it does once, when its first workers start.

    torch's handler would raise a worker's death anywhere in the main thread, even in the middle of a checkpoint or
    while the other workers start. Without it the death is raised where the next batch is awaited, at most five seconds
    later.
    """
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCHLD"):
        handler = signal.getsignal(signal.SIGCHLD)
        signal_handling._set_SIGCHLD_handler()  # torch takes its handler for installed from now on
        if handler is not None:  # None stands for a handler that Python did not install
            signal.signal(signal.SIGCHLD, handler)


def _init_worker(parent: int, _: int) -> None:
    """Ignore requests to stop: they often go to the whole group, and only the main process can save.

    A worker notices its parent's death, but not one from before it began to watch, and would then live forever.
    """
    if multiprocessing.get_start_method() == "fork" and os.getppid() != parent:
        os._exit(1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _explain_death(workers: list[BaseProcess], error: Exception) -> Exception:
    """Return an error that explains a worker's death, or the error itself where all workers live."""
    wait([worker.sentinel for worker in workers], timeout=1.0)  # its socket may be closed before it has ended
    dead = next((worker for worker in workers if worker.exitcode), None)
    if dead is None or dead.exitcode is None:
        return error
    if dead.exitcode > 0:
        return DataError(f"the loader worker with process ID {dead.pid} ended with exit code {dead.exitcode}")
    names = {int(each): each.name for each in signal.Signals}  # a real-time signal has no name
    signal_name = names.get(-dead.exitcode, f"signal {-dead.exitcode}")
    sentence = f"the loader worker with process ID {dead.pid} was killed by {signal_name}"
    if reason := _MEMORY_SIGNALS.get(signal_name):
        return WorkerKilledError(f"{sentence}, {reason}")
    return DataError(f"{sentence}, a crash while it decoded an image")


def _shut_down_workers(batches: Any, workers: list[BaseProcess]) -> None:
    """Ask the processes to end, and kill those that have not ended by the deadline.

    A thread asks, because a killed worker may hold a lock for which torch then waits forever.
    """
    with contextlib.suppress(RuntimeError):  # no thread can start while the interpreter shuts down
        shutdown = threading.Thread(target=batches._shutdown_workers, daemon=True, name="end loader workers")
        shutdown.start()
        shutdown.join(WORKER_EXIT_SECONDS)
    _kill_workers(workers)


@atexit.register  # runs before multiprocessing's own, which would join them without a limit
def kill_all_workers() -> None:
    """Kill the workers of every loader, even of unclosed iterators: a traceback may hold them to the end."""
    _kill_workers(list(_live_workers))


def _kill_workers(workers: list[BaseProcess]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    for worker in workers:
        worker.join(WORKER_EXIT_SECONDS)  # with a limit: a read that the system cannot interrupt outlives SIGKILL
