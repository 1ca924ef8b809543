"""Loader workers end with the process that started them, even where starting fails or one of them hangs."""

import subprocess
import sys

import pytest

FORK_FAILS = """
import multiprocessing.context, torch
from torch.utils.data import DataLoader
from vitrail.data.loader_workers import iterate_loader
started = []
class Process(multiprocessing.context.ForkProcess):
    def start(self):
        started.append(self)
        if len(started) == 3:
            raise ERROR
        super().start()
multiprocessing.context.ForkContext.Process = Process
next(iterate_loader(DataLoader(range(100), num_workers=4, multiprocessing_context="fork")))
"""
HANGS = """
import time, torch
from torch.utils.data import DataLoader, Dataset
from vitrail.data.loader_workers import iterate_loader
from vitrail.training.loop import _prefetch
class Slow(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        time.sleep(1000 if index else 0)
        return index
batches = _prefetch(iterate_loader(DataLoader(Slow(), num_workers=1)))
print(next(batches), flush=True)
raise KeyboardInterrupt
"""


@pytest.mark.attack
@pytest.mark.parametrize("error", ["BlockingIOError(11, 'no more processes')", "KeyboardInterrupt"])
def test_workers_that_cannot_all_be_started_leave_none(error: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", FORK_FAILS.replace("ERROR", error)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode != 0
    assert error.partition("(")[0] in process.stderr


@pytest.mark.attack
def test_a_hanging_worker_does_not_keep_the_thread_that_waits_for_it() -> None:
    """As on a GPU, where a thread takes the batches."""
    process = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False)
    assert "tensor([0])" in process.stdout, process.stderr
    assert process.returncode != 0


DIES_WHILE_OTHERS_START = """
import os, signal, time
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as Batches
from vitrail.data.loader_workers import iterate_loader
from vitrail.errors import DataError
put = Batches._try_put_index
def put_after_a_death(self):
    if self._workers[0].is_alive():
        os.kill(self._workers[0].pid, signal.SIGSEGV)
        while os.waitid(os.P_PID, self._workers[0].pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.01)
    put(self)
Batches._try_put_index = put_after_a_death
try:
    list(iterate_loader(DataLoader(range(100), num_workers=2, multiprocessing_context="fork")))
except DataError as error:
    print(error)
"""


@pytest.mark.attack
def test_a_worker_that_dies_before_its_loader_has_started_is_named() -> None:
    process = subprocess.run(
        [sys.executable, "-c", DIES_WHILE_OTHERS_START], capture_output=True, text=True, timeout=60, check=False
    )
    assert "was killed by SIGSEGV" in process.stdout, process.stderr
    assert "Traceback" not in process.stderr
