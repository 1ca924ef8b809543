"""Checkpoints: damaged ones are refused, older ones removed, and ranks write theirs together or not at all."""

import dataclasses
import errno
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.test_resume import Soaked, write_stopped_run
from vitrail.errors import DiskFullError, ModelError
from vitrail.training import checkpoint
from vitrail.weights import tensor_files


def make_checkpoint(step: int) -> checkpoint.Checkpoint:
    tensors = {"model": {"weight": torch.full((2, 3), float(step))}}
    return checkpoint.Checkpoint(step, tensors, {"seed": 3})


def test_what_is_written_is_read_and_the_newest_two_are_kept(tmp_path: Path) -> None:
    for step in (5, 20, 100):
        checkpoint.write_checkpoint(tmp_path, make_checkpoint(step))
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-00000100", "step-00000020"]
    newest = checkpoint.read_newest_checkpoint(tmp_path, pytest.fail)
    assert newest is not None
    assert (newest.step, newest.facts) == (100, {"seed": 3})
    assert torch.equal(newest.tensors["model"]["weight"], torch.full((2, 3), 100.0))
    assert checkpoint.read_newest_checkpoint(tmp_path / "none", pytest.fail) is None


def test_an_error_of_the_background_is_raised_at_the_next_call(tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise ValueError("no upload")

    writer = checkpoint.CheckpointWriter(tmp_path, after_write=fail)
    writer.submit(make_checkpoint(1))
    with pytest.raises(ValueError, match="no upload"):
        writer.submit(make_checkpoint(2))
    writer.wait()  # an error is raised once
    writer.close()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-00000001"]


def test_a_run_that_the_disk_has_no_room_for_is_refused_with_its_bytes(tmp_path: Path) -> None:
    checkpoint.check_disk_space(tmp_path / "run", 1000, 100)
    with pytest.raises(DiskFullError, match=r"takes about 3,000,000,000,000,000,300 bytes, .* --out"):
        checkpoint.check_disk_space(tmp_path / "run", 10**18, 100)


# --- damage ----------------------------------------------------------------------------------------------------------


def test_every_flip_and_cut_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    mutated(tmp_path, 60)


@pytest.mark.soak
def test_a_thousand_flips_and_cuts_of_a_checkpoint_are_refused(tmp_path: Path, soaked: Soaked) -> None:
    mutated(tmp_path, 1000)
    soaked(4, "a damaged checkpoint is refused, the one before it used", "1,000 damages", "1,000 refused")


def mutated(root: Path, count: int) -> None:
    """Flip a bit of a checkpoint or cut a file of it, so many times: it is named, and the one before it taken."""
    checkpoints = write_stopped_run(root / "run")
    newest = checkpoints / "step-00000009"
    kept = {path.name: path.read_bytes() for path in newest.iterdir()}
    draws = random.Random(0)
    for _ in range(count):
        name = draws.choice(sorted(kept))
        content = bytearray(kept[name])
        place = draws.randrange(len(content))
        if draws.random() < 0.5:
            content[place] ^= 1 << draws.randrange(8)
        else:
            del content[place:]
        (newest / name).write_bytes(content)
        told: list[str] = []
        taken = checkpoint.read_newest_checkpoint(checkpoints, told.append)
        assert taken is not None
        assert taken.step == 8, f"{name} with a change at byte {place} was taken"
        assert str(newest) in told[0]
        (newest / name).write_bytes(kept[name])
    with pytest.raises(ModelError) as caught:
        checkpoint.read_checkpoint(newest.with_name("step-00000010"))
    assert caught.value.exit_code == 4
    assert checkpoint.read_checkpoint(newest).step == 9


def test_a_half_removed_checkpoint_does_not_stop_later_ones(tmp_path: Path) -> None:
    checkpoints = write_stopped_run(tmp_path / "run")
    (checkpoints / "step-00000008" / checkpoint.MANIFEST_FILE).unlink()
    shutil.copytree(checkpoints / "step-00000008", checkpoints / "step-00000099")
    snapshot = checkpoint.read_checkpoint(checkpoints / "step-00000009")
    for step in (10, 11):
        checkpoint.write_checkpoint(checkpoints, dataclasses.replace(snapshot, step=step))
    assert [path.name for path in checkpoint.list_checkpoints(checkpoints)] == ["step-00000011", "step-00000010"]


# --- several ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [range(5), range(2, 4), range(3, 5), range(5, 5), range(0)])
def test_rows_are_found_in_whatever_pieces_hold_them(rows: range) -> None:
    whole = torch.arange(10.0).reshape(5, 2)
    pieces = [(4, whole[4:]), (0, whole[:3]), (5, whole[5:]), (3, whole[3:4])]
    assert torch.equal(checkpoint.assemble_rows(pieces, rows), whole[rows.start : rows.stop])
    assert torch.equal(checkpoint.assemble_rows([(0, whole)], rows), whole[rows.start : rows.stop])


def in_threads(world: int) -> Callable[[int], checkpoint.AllGather]:
    """The exchange of so many ranks that are threads."""
    barrier, said = threading.Barrier(world), [None] * world

    def of(rank: int) -> checkpoint.AllGather:
        def exchange(mine: Any) -> list[Any]:
            said[rank] = mine
            barrier.wait(10)
            found = list(said)
            barrier.wait(10)
            return found

        return exchange

    return of


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_a_checkpoint_appears_when_all_ranks_have_written_and_not_if_one_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int | None
) -> None:
    exchange, raised, write = in_threads(2), [], tensor_files.write_tensors

    def limited(path: Path, *arguments: Any) -> None:
        assert not list(tmp_path.glob("step-*"))
        if path.name == f"model-0000{failing}.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *arguments)

    def work(rank: int) -> None:
        tensors = {f"model-0000{rank}": {"weight": torch.full((2, 3), float(rank))}}
        first = {f"model-0000{rank}": {"weight": 2}} if rank else {}
        try:
            checkpoint.write_checkpoint(tmp_path, checkpoint.Checkpoint(7, tensors, {}, first, rank), exchange(rank))
        except DiskFullError as error:
            raised.append(error)

    monkeypatch.setattr(tensor_files, "write_tensors", limited)
    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failing is None:
        ((_, top), (start, bottom)) = checkpoint.read_checkpoint(
            tmp_path / checkpoint.format_checkpoint_name(7)
        ).get_pieces("model")["weight"]
        assert (start, top.tolist(), bottom.tolist()) == (2, [[0.0] * 3] * 2, [[1.0] * 3] * 2)
        assert not raised
    else:
        assert len(raised) == 2
        assert list(tmp_path.iterdir()) == []
