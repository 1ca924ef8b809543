"""A run whose machine loses power at any moment, with what was not synced, goes on to the same weights."""

import random
import shutil
from pathlib import Path

import pytest

from tests.faults import replay
from tests.faults.shim import Shim
from tests.faults.test_full import few_steps
from tests.faults.test_saves import Soaked
from tests.training.test_resume import digest_weights, read_events, run_training
from vitrail.training import checkpoint


def remains_of_a_run(shim: Shim, memory: Path) -> list[replay.Tree]:
    """All that a disk may hold when the power goes while a run goes on."""
    one, root, log = few_steps(), memory / "root", memory / "log"
    root.mkdir()
    disk, draws = replay.Disk(root), random.Random(0)
    assert shim(lambda: run_training(one, root / "run", resume=True) and None, root, log=log).code == 0
    found: dict[int, replay.Tree] = {}
    for call in replay.calls(log):
        disk.do(call)
        for loss in replay.LOSSES:
            tree = replay.remains(disk.top, loss, draws)
            found.setdefault(hash(frozenset(tree.items())), tree)
    return list(found.values())


def check_whole(folder: Path) -> None:
    """The newest checkpoint loads, and speaks of no line of the run's own files that is not on the disk."""
    newest = checkpoint.read_newest_checkpoint(folder / "checkpoints", lambda _: None)
    for name, size in newest.facts["files"].items() if newest else ():
        assert not size or (folder / name).stat().st_size >= size, f"{name} is shorter than step {newest.step} says"


def cut_off(shim: Shim, memory: Path, *, checked: int, resumed: int) -> int:
    """Check some of the remains, and let a run go on from some of these; how many were checked."""
    trees, folder = remains_of_a_run(shim, memory), memory / "after"
    one, whole = few_steps(), memory / "root" / "run"
    assert len(trees) > 200
    chosen = random.Random(1).sample(trees, min(checked, len(trees)))
    for number, tree in enumerate(chosen):
        replay.lay_out(tree, folder)
        check_whole(folder / "run")
        if number < resumed:
            run_training(one, folder / "run", resume=True)
            assert digest_weights(folder / "run") == digest_weights(whole)
            assert read_events(folder / "run") == read_events(whole)
        shutil.rmtree(folder)
    return len(chosen)


def test_a_run_that_loses_power_goes_on_to_the_same_weights(shim: Shim, memory: Path) -> None:
    cut_off(shim, memory, checked=100, resumed=3)


@pytest.mark.soak
def test_a_run_that_loses_power_a_hundred_times_goes_on_to_the_same_weights(
    shim: Shim, memory: Path, soaked: Soaked
) -> None:
    number = cut_off(shim, memory, checked=100_000, resumed=100)
    soaked(2, "a run outlives the loss of unsynced writes", "every call", f"{number} remains, 100 resumed")
