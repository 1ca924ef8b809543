"""SIGTERM at any time, to one process of two or to both, ends the run after its step and loses nothing."""

import dataclasses
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_saves import Soaked
from tests.runtime.test_distributed import build_run, run_training, start_ranks, wait_for_ranks
from vitrail.files import compute_sha256
from vitrail.runtime.distributed import ProcessGroup
from vitrail.training import checkpoint
from vitrail.training.loop import StepEnd

EPOCHS, STEPS = 2, 28


def ranks(folder: Path, **options: Any) -> list[int]:
    """Start two processes that train as one; each writes down when it has made a step."""
    recipe = dataclasses.replace(build_run().recipe, epochs=EPOCHS)

    def work(group: ProcessGroup) -> None:
        with notes(folder, group.rank).open("a", buffering=1) as file:

            def note(moment: StepEnd) -> None:
                file.write(f"{moment.step} {time.monotonic()}\n")

            run_training(build_run(group, recipe=recipe), folder, note, **options)

    return start_ranks(2, work)


def notes(folder: Path, rank: int) -> Path:
    return folder.with_name(f"{folder.name}-{rank}")


def made(folder: Path, rank: int) -> list[tuple[int, float]]:
    """The steps that a rank has made, and when."""
    path = notes(folder, rank)
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(int(step), float(at)) for step, at in map(str.split, lines)]


def terminated(folder: Path, draws: random.Random) -> None:
    """Start two processes, end them by a signal to one of them or both at a random time, and let them go on."""
    children, asked = ranks(folder), draws.choice([[0], [1], [0, 1]])
    after, deadline = draws.randint(1, STEPS - 5), time.monotonic() + 60
    while not made(folder, asked[0]) or made(folder, asked[0])[-1][0] < after:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(draws.uniform(0, 0.03))
    at = time.monotonic()
    for rank in asked:
        os.kill(children[rank], signal.SIGTERM)
    assert wait_for_ranks(children) == [75, 75]
    stopped = made(folder, asked[0])[-1][0]
    assert made(folder, 1 - asked[0])[-1][0] == stopped
    assert sum(when > at for _, when in made(folder, asked[0])) <= 1  # the step in which it came
    assert (
        f"SIGTERM: stopped after step {stopped} of {STEPS}, the checkpoint is saved" in (folder / "run.log").read_text()
    )
    assert (
        checkpoint.read_checkpoint(folder / "checkpoints" / checkpoint.format_checkpoint_name(stopped)).step == stopped
    )
    assert wait_for_ranks(ranks(folder, resume=True)) == [0, 0]
    assert made(folder, 0)[-1][0] == STEPS
    assert [step for step, _ in made(folder, 0)] == list(range(1, STEPS + 1))


def many(root: Path, count: int, seed: int) -> None:
    assert wait_for_ranks(ranks(root / "whole")) == [0, 0]
    whole, draws = compute_sha256(root / "whole" / "weights" / "last.safetensors"), random.Random(seed)
    for number in range(count):
        folder = root / f"run{number}"
        terminated(folder, draws)
        assert compute_sha256(folder / "weights" / "last.safetensors") == whole
        shutil.rmtree(folder)


def test_two_processes_that_get_sigterm_at_random_times_lose_nothing(tmp_path: Path) -> None:
    many(tmp_path, 1, seed=0)


@pytest.mark.soak
def test_two_processes_that_get_sigterm_thirty_times_lose_nothing(tmp_path: Path, soaked: Soaked) -> None:
    many(tmp_path, 30, seed=1)
    soaked(5, "SIGTERM is not a loss: 2 processes, one or both asked", "30 random times", "30, the same weights")
