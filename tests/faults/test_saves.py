"""A save that is cut off at any system call, with or without its unsynced writes, leaves the old state or the new."""

import dataclasses
import functools
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from tests.faults import replay
from tests.faults.shim import How, Shim
from tests.model_factory import build_trained, build_vit
from vitrail import recipes
from vitrail.training import checkpoint, optimizer
from vitrail.training.checkpoint import Checkpoint
from vitrail.training.step import TrainState, build_train_state
from vitrail.weights.load import load, save
from vitrail.weights.trained import Trained

Soaked = Callable[[int, str, str, str], None]

BEFORE: dict[str, tuple[list[int], list[int], int, int | None]] = {
    # saved before, of these damaged, saved now, and the newest that is whole before that
    "the first": ([], [], 1, None),
    "the second": ([1], [], 2, 1),
    "the third, which removes the first": ([1, 2], [], 3, 2),
    "over a damaged one": ([1, 2], [2], 2, 1),
    "before a damaged one, which is removed": ([1, 9], [9], 2, 1),
}
IN_THE_SUITE = ("the first", "the third, which removes the first", "over a damaged one")
CASES = [
    pytest.param(
        *case, how, marks=() if how is How.HALF and name in IN_THE_SUITE else pytest.mark.soak, id=f"{name}, {how.name}"
    )
    for name, case in BEFORE.items()
    for how in (How.HALF, How.KILL)
]


def state(step: int) -> TrainState:
    """What training changes, after so many steps; every step has other numbers."""
    recipe = dataclasses.replace(recipes.get_recipe("digits"), ema=0.9)
    found = build_train_state(build_vit(seed=step, depth=1), recipe)
    for parameter in found.model.parameters():
        parameter.grad = parameter.detach() * 0.1
    found.optimizer.step()
    assert found.ema is not None
    found.ema.update(0.5)
    found.step = step
    return found


@functools.cache
def snapshot(step: int) -> Checkpoint:
    return checkpoint.copy_state(state(step), {"files": {}, "words": f"after step {step}"})


@functools.cache
def digest(step: int) -> str:
    """Of all numbers of a state."""
    return checkpoint.digest_weights(tensors(state(step)))


def tensors(state: TrainState) -> dict[str, Tensor]:
    assert state.ema is not None
    groups = (state.model.state_dict(), optimizer.get_optimizer_state(state.optimizer), state.ema.tensors)
    return {f"{number} {name}": tensor for number, group in enumerate(groups) for name, tensor in group.items()}


_spare = functools.cache(state)


def emptied() -> TrainState:
    """A state to restore into, all zeros."""
    fresh = _spare(0)
    for tensor in tensors(fresh).values():
        tensor.detach().zero_()
    return fresh


def save_checkpoints(shim: Shim, folder: Path, *steps: int) -> None:
    """Save the states after some steps, one after the other, and say after each that it is saved."""
    for step in steps:
        checkpoint.write_checkpoint(folder / "checkpoints", snapshot(step))
        shim.note(f"saved\t{step}")


def save_weights(shim: Shim, folder: Path, *numbers: int) -> None:
    """Save models under one name, as a run does after each evaluation."""
    for number in numbers:
        save(small(number), folder / "weights" / "last.safetensors", overwrite=True)
        shim.note(f"saved\t{number}")


def small(number: int) -> Trained:
    """A model, another for each number."""
    return build_trained(build_vit(seed=number, width=16, depth=1, mlp=32))


def save_by_others(shim: Shim, folder: Path, *numbers: int) -> None:
    """Save by the compiled writers of safetensors and of torch."""
    for number in numbers:
        tensors = build_vit(seed=number).state_dict()
        safetensors.torch.save_file(tensors, folder / "by_rust.safetensors")
        torch.save(tensors, folder / "by_cxx.pt")
        shim.note(f"saved\t{number}")


Saves = Callable[..., None]


def prepared(folder: Path, before: list[int], damaged: list[int]) -> Path:
    """A run's folder with checkpoints."""
    folder.mkdir(parents=True)
    for step in before:
        checkpoint.write_checkpoint(folder / "checkpoints", snapshot(step))
    for step in damaged:
        with (folder / "checkpoints" / checkpoint.format_checkpoint_name(step) / "model.safetensors").open(
            "r+b"
        ) as file:
            file.truncate(100)
    return folder


def newest(folder: Path) -> int | None:
    """The step of the newest checkpoint that is whole, when every number of it was compared with what was saved."""
    found = checkpoint.read_newest_checkpoint(folder / "checkpoints", lambda _: None)
    if found is None:
        return None
    assert found.facts == snapshot(found.step).facts
    fresh = emptied()
    checkpoint.restore_state(fresh, found)
    assert checkpoint.digest_weights(tensors(fresh)) == digest(found.step)
    assert fresh.step == found.step
    return found.step


@pytest.mark.parametrize(("before", "damaged", "step", "old", "how"), CASES)
def test_a_checkpoint_killed_at_any_call_is_whole_or_invisible(
    shim: Shim,
    memory: Path,
    soaked: Soaked,
    before: list[int],
    damaged: list[int],
    step: int,
    old: int | None,
    how: How,
) -> None:
    template = prepared(memory / "template", before, damaged)
    seen, calls = set(), 0
    while calls := calls + 1:
        folder = memory / "run"
        shutil.copytree(template, folder)
        ended = shim(partial(save_checkpoints, shim, folder, step), folder, stop=calls, how=how)
        assert ended.code in (0, 137)
        found = newest(folder)
        seen.add(found)
        assert found in (old, step)
        following = max(*before, step) + 1 if before else 2
        checkpoint.write_checkpoint(folder / "checkpoints", snapshot(following))  # no hand work is needed to go on
        assert newest(folder) == following
        kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert kept[-1] == checkpoint.format_checkpoint_name(following)
        assert len(kept) <= checkpoint.KEPT_CHECKPOINTS, "what the killed save left behind is still there"
        shutil.rmtree(folder)
        if ended.code == 0:
            break
    assert seen == {old, step}
    assert calls > 20
    soaked(2, "a checkpoint is whole or invisible", f"{how.name.lower()} at every call", f"{calls - 1} calls")


@pytest.mark.parametrize("how", [How.KILL, How.HALF])
def test_weights_killed_at_any_call_are_the_old_or_the_new(shim: Shim, memory: Path, soaked: Soaked, how: How) -> None:
    path = memory / "weights" / "last.safetensors"
    save_weights(shim, memory, 1)
    old = path.read_bytes()
    save_weights(shim, memory, 2)
    new = path.read_bytes()
    seen, calls = set(), 0
    while calls := calls + 1:
        path.write_bytes(old)
        ended = shim(partial(save_weights, shim, memory, 2), memory, stop=calls, how=how)
        seen.add(path.read_bytes())
        if ended.code == 0:
            break
        assert ended.code == 137
    assert seen == {old, new}
    assert calls > 5
    soaked(2, "weights are the old or the new", f"{how.name.lower()} at every call", f"{calls - 1} calls")


@pytest.mark.parametrize("saves", [save_checkpoints, save_weights, save_by_others])
def test_the_layer_sees_every_change_also_of_compiled_writers(shim: Shim, memory: Path, saves: Saves) -> None:
    """What it wrote down, done again, is the folder as it is, byte for byte."""
    root, log = memory / "root", memory / "log"
    root.mkdir()
    disk = replay.Disk(root)
    ended = shim(partial(saves, shim, root, 1, 2, 3), root, log=log)
    assert ended.code == 0, ended.said
    made = [call for call in replay.calls(log) if call.name != "saved"]
    assert ended.calls == len(made) > 10
    for call in made:
        disk.do(call)
    found = replay.remains(disk.top, replay.all_of_it, random.Random(0))
    assert found == replay.tree(root)
    assert sum(len(content or b"") for content in found.values()) > 10_000


def test_a_writer_that_the_layer_cannot_see_is_refused(shim: Shim, memory: Path) -> None:
    (memory / "mapped").write_bytes(bytes(40))
    assert shim(lambda: None, memory).code == 0
    assert shim(lambda: int(torch.from_file(str(memory / "mapped"), shared=True, size=10)[0]), memory).code == 99


def recorded(saves: Saves, shim: Shim, root: Path) -> None:
    """Save three times below `run` and write down the calls; `before` is as it was before them."""
    for name in ("before", "run"):
        (root / name).mkdir()
    run = root / "run"
    assert shim(partial(saves, shim, run, 1, 2, 3), run, log=root / "log").code == 0


def cut_off(root: Path, log: Path, check: Callable[[Path, int], None]) -> tuple[int, int]:
    """Cut the power before and after every call, with every loss, and check what remains.

    `check` gets the folder and the number of the save that was last reported to be done. How many calls and different
    remains there were.
    """
    disk, draws = replay.Disk(root / "before"), random.Random(0)
    made = list(replay.calls(log))
    seen: set[tuple[int, int]] = set()
    saved = 0
    for call in [None, *made]:
        if call is not None and call.name == "saved":
            saved = int(call.fields[0])
        elif call is not None:
            disk.do(call._replace(fields=tuple(moved(field, root) for field in call.fields)))
        for loss in replay.LOSSES:
            found = replay.remains(disk.top, loss, draws)
            known = (saved, hash(frozenset(found.items())))
            if known not in seen:
                seen.add(known)
                replay.lay_out(found, root / "after")
                check(root / "after", saved)
                shutil.rmtree(root / "after")
    assert saved == 3
    return len(made), len(seen)


def moved(field: str, root: Path) -> str:
    """A path below `run` as one below `before`."""
    return field.replace(str(root.resolve() / "run"), str(root.resolve() / "before"))


def test_a_checkpoint_outlives_the_loss_of_what_was_not_synced(shim: Shim, memory: Path, soaked: Soaked) -> None:
    recorded(save_checkpoints, shim, memory)

    def check(folder: Path, saved: int) -> None:
        assert newest(folder) in (saved or None, min(saved + 1, 3))

    calls, different = cut_off(memory, memory / "log", check)
    assert calls > 60
    assert different > calls
    soaked(2, "unsynced writes may be lost", "every call, 7 losses", f"{calls} calls, {different} remains")


def test_weights_outlive_the_loss_of_what_was_not_synced(shim: Shim, memory: Path, soaked: Soaked) -> None:
    recorded(save_weights, shim, memory)
    patterns = {number: next(small(number).model.parameters()) for number in (1, 2, 3)}

    def check(folder: Path, saved: int) -> None:
        path = folder / "weights" / "last.safetensors"
        if saved or path.exists():
            first = next(load(path).model.parameters())
            assert any(torch.equal(first, patterns[number]) for number in {max(saved, 1), min(saved + 1, 3)})

    calls, different = cut_off(memory, memory / "log", check)
    assert calls > 20
    soaked(2, "unsynced writes of weights may be lost", "every call, 7 losses", f"{calls} calls, {different} remains")
