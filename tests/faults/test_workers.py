"""Loader workers that die, or outlive an error: every command ends, and says why."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.data.image_files import write_image_folder
from tests.faults.test_full import mounted

Attacked = Callable[[str, str], None]
PATIENCE = 60  # seconds; a command that hangs would take for ever
TRAIN = ("train", "digits", "--data", "digits", "--workers", "2", "--device", "cpu")


def start(*arguments: object, **options: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "vitrail", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def end(process: "subprocess.Popen[str]") -> str:
    """What the process said on its way to its end; one that does not end is killed, and fails the test."""
    try:
        return process.communicate(timeout=PATIENCE)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def loader_workers(process: "subprocess.Popen[str]") -> Iterator[int]:
    """Process numbers of a command's children, as they appear."""
    for _ in range(10 * PATIENCE):
        for task in Path(f"/proc/{process.pid}/task").glob("*/children"):
            yield from map(int, task.read_text().split())
        time.sleep(0.1)


def is_worker(number: int) -> bool:
    """Whether a child is a loader worker: it has begun to ignore SIGTERM, as Python's resource tracker does too."""
    try:
        if b"resource_tracker" in Path(f"/proc/{number}/cmdline").read_bytes():
            return False
        status = Path(f"/proc/{number}/status").read_text()
    except OSError:
        return False
    ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
    return bool(ignored >> (signal.SIGTERM - 1) & 1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB."""
    with mounted(tmp_path / "disk", "32m") as place:
        yield place


@pytest.mark.attack
def test_a_disk_that_fills_up_ends_a_run_that_has_workers(disk: Path, attacked: Attacked) -> None:
    process = start(*TRAIN, "--epochs", 100, "--save-every", 0, "--out", disk / "run")
    for _ in range(10 * PATIENCE):
        if (disk / "run" / "checkpoints").exists():
            break
        time.sleep(0.1)
    with contextlib.suppress(OSError), (disk / "others").open("wb") as others:
        while True:
            others.write(bytes(2**16))
    said = end(process)
    assert process.returncode == 5, said
    assert "no room for a checkpoint" in said
    assert "What was saved before is intact" in said or "Nothing was saved yet" in said
    assert "Traceback" not in said
    attacked("a disk that fills up while 2 loader workers run", "exit 5 at once, no process left")


@pytest.mark.attack
def test_a_disk_without_room_is_refused_before_anything_is_trained(disk: Path, attacked: Attacked) -> None:
    (disk / "others").write_bytes(bytes(2**25 - 2**20))
    process = start(*TRAIN, "--epochs", 1, "--out", disk / "run")
    said = end(process)
    assert process.returncode == 5, said
    assert "no room for this run in" in said
    assert not (disk / "run").exists()
    attacked("a disk without room for the run's checkpoints", "exit 5 before the first step, nothing left behind")


@pytest.mark.attack
@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGKILL, 5, "was killed by SIGKILL, as the system does when memory runs out"),
        (signal.SIGSEGV, 3, "was killed by SIGSEGV, a crash while it decoded an image"),
    ],
)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found through /proc")
def test_a_worker_that_dies_is_named_with_its_signal(
    tmp_path: Path, attacked: Attacked, number: signal.Signals, code: int, words: str
) -> None:
    photos = write_image_folder(tmp_path / "photos", "train", "val", each=40)
    process = start(
        *TRAIN[:3], photos, *TRAIN[4:], "--epochs", 1000, "--batch", 8, "--warmup", 1, "--out", tmp_path / "run"
    )
    worker = next(filter(is_worker, loader_workers(process)))
    os.kill(worker, number)
    said = end(process)
    assert process.returncode == code, said
    assert f"the loader worker with process ID {worker} {words}" in said
    assert "Traceback" not in said
    attacked(f"{number.name} to a loader worker", f"named with its signal, exit {code}")
