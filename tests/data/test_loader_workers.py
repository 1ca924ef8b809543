"""Loader workers end with whoever started them, also where starting them fails or one of them never answers."""

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
from vitrail.train.loop import _ahead
class Slow(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        time.sleep(1000 if index else 0)
        return index
batches = _ahead(iterate_loader(DataLoader(Slow(), num_workers=1)))
print(next(batches), flush=True)
raise KeyboardInterrupt
"""


@pytest.mark.attack
@pytest.mark.parametrize("error", ["BlockingIOError(11, 'no more processes')", "KeyboardInterrupt"])
def test_workers_that_cannot_all_be_started_leave_none(error: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORK_FAILS.replace("ERROR", error)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode != 0
    assert error.partition("(")[0] in ended.stderr


@pytest.mark.attack
def test_a_worker_that_never_answers_does_not_keep_the_thread_that_waits_for_it() -> None:
    """As on a GPU, where a thread takes the batches."""
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False)
    assert "tensor([0])" in ended.stdout, ended.stderr
    assert ended.returncode != 0
