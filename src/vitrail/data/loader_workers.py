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
from collections.abc import Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from vitrail.errors import DataError, VitrailError

DEADLINE = 5.0  # seconds in which workers end by themselves once they are asked to
_NO_MEMORY = {
    signal.SIGKILL: "as the system does when memory runs out: give fewer --workers, or a smaller --batch",
    signal.SIGBUS: "for want of shared memory (/dev/shm): enlarge it, or give --workers 0",
}
_workers: "weakref.WeakSet[BaseProcess]" = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.clear)  # they are not its children


class WorkerKilledError(VitrailError):
    """A worker was killed, most likely for want of memory."""

    exit_code = 5


def iterate_loader(loader: "DataLoader[Any]") -> Iterator[Any]:
    """The loader's batches. However this ends, the loader's processes have ended too."""
    if not loader.num_workers:
        yield from loader
        return
    loader.worker_init_fn = partial(_begin_work, os.getpid())
    batches: Any = _start(loader)
    workers: list[BaseProcess] = batches._workers
    _workers.update(workers)
    try:
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:  # torch's word for it
                raise _explain(workers, error) from error
            yield batch
    finally:
        _end_workers(batches, workers)


def _start(loader: "DataLoader[Any]") -> Any:
    """The loader's iterator, its processes started.

    torch's handler of SIGCHLD would raise a worker's death anywhere in the main thread, in the middle of a checkpoint
    too. Without it the death is raised where the next batch is awaited, at most five seconds later.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        return iter(loader)
    before = signal.getsignal(signal.SIGCHLD)
    try:
        return iter(loader)
    finally:
        if before is not None:  # a handler that is not Python's can be neither named nor set
            signal.signal(signal.SIGCHLD, before)


def _begin_work(parent: int, _: int) -> None:
    """Leave requests to stop to the process that can save: they often go to a whole group, its workers too.

    A worker notices its parent's death, but not one from before it began to look, and would then live for ever.
    """
    if multiprocessing.get_start_method() == "fork" and os.getppid() != parent:
        os._exit(1)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _explain(workers: list[BaseProcess], error: RuntimeError) -> Exception:
    """A worker's death in our words, or the error itself where all of them live."""
    dead = next((worker for worker in workers if worker.exitcode), None)
    if dead is None or dead.exitcode is None:
        return error
    if dead.exitcode > 0:
        return DataError(f"the loader worker with process number {dead.pid} ended with exit code {dead.exitcode}")
    name = signal.Signals(-dead.exitcode).name
    sentence = f"the loader worker with process number {dead.pid} was killed by {name}"
    if reason := _NO_MEMORY.get(signal.Signals(-dead.exitcode)):
        return WorkerKilledError(f"{sentence}, {reason}")
    return DataError(f"{sentence}, a crash while it decoded an image")


def _end_workers(batches: Any, workers: list[BaseProcess]) -> None:
    """Ask the processes to end, and kill those that have not after the deadline.

    By a thread, because a worker that was killed may hold a lock for which torch then waits for ever.
    """
    with contextlib.suppress(RuntimeError):  # no thread can be started any more where the interpreter ends
        asking = threading.Thread(target=batches._shutdown_workers, daemon=True, name="end loader workers")
        asking.start()
        asking.join(DEADLINE)
    _kill(workers)


@atexit.register  # runs before multiprocessing's own, which would join them for ever
def _kill_all() -> None:
    """Kill the workers of iterators that nobody closed: an error's traceback may hold them until the very end."""
    _kill(list(_workers))


def _kill(workers: list[BaseProcess]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    for worker in workers:
        worker.join()
