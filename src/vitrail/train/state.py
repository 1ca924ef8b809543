"""A run's state on disk: all that a step changes, whole or not there at all.

    checkpoints/step-00001234/  model.safetensors  optimizer.safetensors  average.safetensors  state.json  manifest.json

Tensors are safetensors and all else is JSON, so reading a checkpoint runs no code. The folder is written under another
name, brought to the disk and then renamed; its manifest holds the size and sha256 of every file. A checkpoint that does
not fit its manifest is refused by name, and the one before it is taken. Two are kept.
"""

import concurrent.futures
import dataclasses
import errno
import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail import files
from vitrail.errors import ModelError, VitrailError
from vitrail.train import optimizer
from vitrail.train.step import State
from vitrail.weights import storage

VERSION = 1
KEPT = 2
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")

Tensors = dict[str, dict[str, Tensor]]


class DiskFullError(VitrailError):
    """There is no room for a checkpoint; what was saved before is as it was."""

    exit_code = 5


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A state at one moment, on the CPU."""

    step: int
    tensors: Tensors
    facts: dict[str, Any]
    """What is no tensor: where the run's files stood, what was counted so far, versions."""

    @property
    def bytes(self) -> int:
        """What it takes on disk, about."""
        return sum(tensor.nbytes for group in self.tensors.values() for tensor in group.values())


def taken(state: State, facts: dict[str, Any]) -> Snapshot:
    """A copy of the state as it is now."""
    tensors = {"model": state.model.state_dict(), "optimizer": optimizer.state(state.optimizer)}
    if state.average is not None:
        tensors["average"] = state.average.tensors
    copies = {
        kind: {name: tensor.detach().to("cpu", copy=True) for name, tensor in group.items()}
        for kind, group in tensors.items()
    }
    return Snapshot(state.step, copies, facts)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of tensors' bytes in the order of their names: equal weights have equal digests."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write `folder`/step-N, and remove all but the newest two."""
    path = folder / name(snapshot.step)
    try:
        with files.replacing(path, overwrite=True) as fresh:
            fresh.mkdir()
            for kind, tensors in snapshot.tensors.items():
                storage.write(fresh / f"{kind}.safetensors", tensors, {})
            state = {"version": VERSION, "step": snapshot.step, **snapshot.facts}
            storage.write_json(fresh / "state.json", state)
            listed = {
                file.name: {"bytes": file.stat().st_size, "sha256": files.sha256(file)}
                for file in sorted(fresh.iterdir())
            }
            storage.write_json(fresh / MANIFEST, {"version": VERSION, "files": listed})
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder).free
        raise DiskFullError(
            f"no room for a checkpoint in {folder}: it takes {snapshot.bytes:,} bytes and {free:,} are free."
            " The one before is whole: make room, and give the same command with --resume"
        ) from error
    later = [old for old in found(folder) if old.name > path.name]  # of a run that went on from before them
    for old in later + found(folder)[len(later) + KEPT :]:
        (old / MANIFEST).unlink(missing_ok=True)  # first: without it, half a folder is no checkpoint
        shutil.rmtree(old)
    return path


def name(step: int) -> str:
    """What the checkpoint after so many steps is called."""
    return f"step-{step:08d}"


def found(folder: Path) -> list[Path]:
    """The folders of checkpoints, the newest first, whole or not."""
    if not folder.is_dir():
        return []
    named = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named, reverse=True)]


def newest(folder: Path, refused: Callable[[str], None]) -> Snapshot | None:
    """The newest checkpoint that is whole; `refused` is told of each that is not. None where there was never one."""
    every = found(folder)
    for path in every:
        try:
            return read(path)
        except ModelError as error:
            refused(str(error))
    if every:
        raise ModelError(f"none of the {len(every)} checkpoints in {folder} is whole; --overwrite begins anew")
    return None


def read(path: Path) -> Snapshot:
    """The snapshot of a checkpoint, every byte of it compared with its manifest."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise ModelError(f"checkpoint {path} is not whole: it has no {MANIFEST}")
    listed = storage.read_json(manifest).get("files")
    if not isinstance(listed, dict) or "state.json" not in listed:
        raise ModelError(f"checkpoint {path} is damaged: its {MANIFEST} lists no files")
    for name, facts in listed.items():
        file = path / Path(name).name
        if not file.is_file() or file.stat().st_size != facts["bytes"] or files.sha256(file) != facts["sha256"]:
            raise ModelError(f"checkpoint {path} is damaged: {name} is not what its {MANIFEST} says")
    state = storage.read_json(path / "state.json")
    if state.pop("version", None) != VERSION:
        raise ModelError(f"checkpoint {path} is of another version of vitrail")
    tensors = {Path(name).stem: storage.read(path / name).tensors for name in listed if name.endswith(".safetensors")}
    return Snapshot(state.pop("step"), tensors, state)


def restore(state: State, snapshot: Snapshot) -> None:
    """Bring a fresh state to where the snapshot was taken."""
    state.model.load_state_dict(snapshot.tensors["model"])
    optimizer.load_state(state.optimizer, snapshot.tensors["optimizer"])
    if state.average is not None:
        state.average.load(snapshot.tensors["average"])
    state.step = snapshot.step


class Writer:
    """Writes checkpoints in the background, one at a time; an error is raised where the next is given or waited for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: concurrent.futures.Future[Path] | None = None

    def give(self, snapshot: Snapshot) -> None:
        """Write it, when the one before is written."""
        self.wait()
        self._writing = self._thread.submit(write, self.folder, snapshot)

    def wait(self) -> None:
        """Return when all that was given is on the disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def check(self) -> None:
        """Raise what went wrong, if it is known already."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)
