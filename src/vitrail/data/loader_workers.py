"""The worker processes of torch's DataLoader: how they begin, how their death is told, and that they always end.

torch asks workers to end, then sends SIGTERM, then joins them for ever. Ours ignore SIGTERM, since a request to stop
often goes to the whole process group and only the main process can save. So they are ended here: asked, and after a
deadline killed.
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

from vitrail.errors import DataError, VitrailError

WORKER_EXIT_SECONDS = 5.0  # seconds in which workers end by themselves once they are asked to
_MEMORY_SIGNALS = {
    int(signal.SIGKILL): "as the system does when memory runs out: give fewer --workers, or a smaller --batch",
    int(signal.SIGBUS): "for want of shared memory (/dev/shm): enlarge it, or give --workers 0",
}
_live_workers: "weakref.WeakSet[BaseProcess]" = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_live_workers.clear)  # they are not its children


class WorkerKilledError(VitrailError):
    """A worker was killed, most likely for want of memory."""

    exit_code = 5


def iterate_loader(loader: "DataLoader[Any]") -> Generator[Any, None, None]:
    """The loader's batches. However this ends, the loader's processes have ended too."""
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
            except (RuntimeError, OSError, EOFError) as error:  # torch's word for it, and what a half-sent batch gives
                raise _explain_death(workers, error) from error
            yield batch
    finally:
        _shut_down_workers(batches, workers)


def _start_workers(loader: "DataLoader[Any]") -> Any:
    """The loader's iterator, its processes started; where not all of them can be, none is left.

    torch's handler of SIGCHLD would raise a worker's death anywhere in the main thread, in the middle of a checkpoint
    too. Without it the death is raised where the next batch is awaited, at most five seconds later.
    """
    others = set(multiprocessing.active_children())
    in_main = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCHLD")
    before = signal.getsignal(signal.SIGCHLD) if in_main else None
    try:
        return iter(loader)
    except BaseException:
        _kill_workers([worker for worker in multiprocessing.active_children() if worker not in others])
        raise
    finally:
        _live_workers.update(worker for worker in multiprocessing.active_children() if worker not in others)
        if before is not None:  # a handler that is not Python's can be neither named nor set
            signal.signal(signal.SIGCHLD, before)


def _init_worker(parent: int, _: int) -> None:
    """Leave requests to stop to the process that can save: they often go to a whole group, its workers too.

    A worker notices its parent's death, but not one from before it began to look, and would then live for ever.
    """
    if multiprocessing.get_start_method() == "fork" and os.getppid() != parent:
        os._exit(1)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _explain_death(workers: list[BaseProcess], error: Exception) -> Exception:
    """A worker's death in our words, or the error itself where all of them live."""
    wait([worker.sentinel for worker in workers], timeout=1.0)  # its socket may be closed before it has ended
    dead = next((worker for worker in workers if worker.exitcode), None)
    if dead is None or dead.exitcode is None:
        return error
    if dead.exitcode > 0:
        return DataError(f"the loader worker with process number {dead.pid} ended with exit code {dead.exitcode}")
    sentence = f"the loader worker with process number {dead.pid} was killed by {_name_signal(-dead.exitcode)}"
    if reason := _MEMORY_SIGNALS.get(-dead.exitcode):
        return WorkerKilledError(f"{sentence}, {reason}")
    return DataError(f"{sentence}, a crash while it decoded an image")


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has none
        return f"signal {number}"


def _shut_down_workers(batches: Any, workers: list[BaseProcess]) -> None:
    """Ask the processes to end, and kill those that have not after the deadline.

    By a thread, because a worker that was killed may hold a lock for which torch then waits for ever.
    """
    with contextlib.suppress(RuntimeError):  # no thread can be started any more where the interpreter ends
        asking = threading.Thread(target=batches._shutdown_workers, daemon=True, name="end loader workers")
        asking.start()
        asking.join(WORKER_EXIT_SECONDS)
    _kill_workers(workers)


@atexit.register  # runs before multiprocessing's own, which would join them for ever
def kill_all_workers() -> None:
    """Kill the workers of every loader, also of iterators that nobody closed: a traceback may hold them to the end."""
    _kill_workers(list(_live_workers))


def _kill_workers(workers: list[BaseProcess]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    for worker in workers:
        worker.join(WORKER_EXIT_SECONDS)  # not for ever: a read that the system cannot interrupt outlives SIGKILL
