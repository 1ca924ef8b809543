"""A disk that is full at any moment costs no state: what was saved is whole, and the run goes on when there is room."""

import contextlib
import dataclasses
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.faults.shim import How, Shim
from tests.faults.test_saves import Soaked, newest, prepared, save_checkpoints, snapshot
from tests.training.test_resume import build_run, digest_weights, read_events, run_training
from vitrail.config import ScheduleConfig
from vitrail.errors import DiskFullError
from vitrail.training import checkpoint
from vitrail.training.training_run import TrainingRun

NO_ROOM = re.compile(r"no room for a checkpoint in \S+: it takes ([\d,]+) bytes and [\d,]+ are free")
FULL = 5


@pytest.mark.parametrize("before", [[], [1, 2]], ids=["the first", "the third"])
def test_a_disk_full_at_any_call_of_a_save_costs_no_state(
    shim: Shim, memory: Path, soaked: Soaked, before: list[int]
) -> None:
    template, step = prepared(memory / "template", before, []), len(before) + 1
    failed = calls = 0
    while calls := calls + 1:
        folder = memory / "run"
        shutil.copytree(template, folder)
        ended = shim(partial(save_checkpoints, shim, folder, step), folder, stop=calls, how=How.FULL)
        found = NO_ROOM.search(ended.said)
        if ended.code:
            assert ended.code == FULL, ended.said
            assert found is not None
            assert found[1] == f"{snapshot(step).num_bytes:,}"
            whole, nothing = "What was saved before is intact" in ended.said, "Nothing was saved yet" in ended.said
            assert (whole, nothing) == (newest(folder) is not None, newest(folder) is None), ended.said
            failed += 1
        assert newest(folder) in (step - 1 or None, step)
        assert ended.code or newest(folder) == step
        assert not list(folder.glob("checkpoints/.*"))
        checkpoint.write_checkpoint(folder / "checkpoints", snapshot(step))
        assert newest(folder) == step
        shutil.rmtree(folder)
        if 0 < ended.calls < calls:
            break
    assert failed > 20
    soaked(3, "a full disk costs no state: a save", "full from every call on", f"{calls - 1} calls, {failed} exits 5")


def few_steps() -> TrainingRun:
    """Three steps of the run that draws and remembers everything, in small."""
    recipe = build_run().recipe
    settings = recipe.settings | {"width": 24, "mlp": 24, "depth": 1}
    few = dataclasses.replace(recipe, settings=settings, epochs=3 * 64 / 1439, schedule=ScheduleConfig(warmup=1))
    return build_run(recipe=few, workers=0)


def hurt(shim: Shim, memory: Path, how: How, choose: Callable[[int], list[int]]) -> int:
    """Kill a run or fill its disk at some of its calls, and let it go on to the end; at how many."""
    one, whole, folder = few_steps(), memory / "whole", memory / "run"
    total = shim(lambda: run_training(one, whole, resume=True) and None, whole).calls
    assert total > 100
    chosen = choose(total)
    for stop in chosen:
        ended = shim(lambda: run_training(one, folder, resume=True) and None, folder, stop=stop, how=how)
        assert ended.code == (FULL if how is How.FULL else 137), ended.said
        assert how is not How.FULL or NO_ROOM.search(ended.said) is not None, ended.said
        left = newest_step(folder)
        told: list[str] = []
        run_training(one, folder, resume=True, notify=told.append)
        assert not left or f"after step {left}." in told[0]
        assert digest_weights(folder) == digest_weights(whole)
        assert read_events(folder) == read_events(whole)
        assert not [path for path in folder.rglob(".*") if path.is_dir()], "what it left behind is still there"
        shutil.rmtree(folder)
    return len(chosen)


def newest_step(folder: Path) -> int:
    """Of the newest checkpoint that is whole, or 0."""
    found = checkpoint.read_newest_checkpoint(folder / "checkpoints", lambda _: None)
    return found.step if found else 0


@pytest.mark.parametrize("how", [How.FULL, How.HALF])
def test_a_run_that_is_hurt_at_some_calls_loses_no_state(shim: Shim, memory: Path, how: How) -> None:
    """Among them the first ones, when a run's folder is made and nothing is in it yet."""
    hurt(shim, memory, how, lambda total: [2, 5, *random.Random(0).sample(range(6, total - 8), 2)])


@pytest.mark.soak
@pytest.mark.parametrize("how", [How.FULL, How.HALF])
def test_a_run_that_is_hurt_at_every_call_loses_no_state(shim: Shim, memory: Path, soaked: Soaked, how: How) -> None:
    number = hurt(shim, memory, how, lambda total: list(range(1, total - 8)))  # the last may be of words alone
    if how is How.FULL:
        soaked(3, "a full disk costs no state: a run", "full from every call on", f"{number} calls, exit 5, same bits")
    else:
        soaked(1, "a killed run resumes to the same weights", "killed at every call", f"{number} calls, same bits")


@contextlib.contextmanager
def mounted(place: Path, size: str) -> Iterator[Path]:
    """A file system of that size."""
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("a small file system needs root")
    place.mkdir()
    ended = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place], capture_output=True)
    if ended.returncode:
        pytest.skip(f"a small file system cannot be mounted: {ended.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)  # files that were read may still be mapped


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with mounted(tmp_path / "disk", "1m") as place:
        yield place


def test_a_small_file_system_that_is_full_costs_no_state(small_disk: Path, tmp_path: Path, soaked: Soaked) -> None:
    """The kernel's own error, with no layer between: others take the room, step by step, as the run goes on."""
    one, run = few_steps(), small_disk / "run"
    run_training(one, tmp_path / "whole")

    def crowd(moment: object) -> None:
        with (small_disk / "others").open("ab") as file:
            file.write(bytes(250_000))

    with pytest.raises(DiskFullError, match=NO_ROOM) as caught:
        run_training(one, run, crowd)
    assert caught.value.exit_code == FULL
    kept = newest_step(run)
    assert kept > 0
    (small_disk / "others").unlink()
    told: list[str] = []
    run_training(one, run, resume=True, notify=told.append)
    assert f"after step {kept}." in told[0]
    assert digest_weights(run) == digest_weights(tmp_path / "whole")
    soaked(3, "a full disk costs no state: tmpfs", "resumes to the same weights", f"from step {kept}, same sha256")
