"""A run's state on disk: all that a step changes, whole or not there at all.

    checkpoints/step-00001234/  model.safetensors  optimizer.safetensors  average.safetensors  state.json  manifest.json

Tensors are safetensors and all else is JSON, so reading a checkpoint runs no code. Of a model that is sharded each rank
writes its own rows, as model-00003.safetensors, whose header says where in their tensors they begin: any number of
ranks can read what any number wrote, and each reads the rows that it needs.

The folder is written under another name, brought to the disk and then renamed; its manifest holds the size and sha256
of every file. A checkpoint that does not fit its manifest is refused by name, and the one before it is taken. Two are
kept.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import errno
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail import files
from vitrail.errors import ModelError, VitrailError
from vitrail.train import optimizer, sharding
from vitrail.train.step import State
from vitrail.weights import storage

VERSION = 1
KEPT = 2
MANIFEST = "manifest.json"
_HASHING = 8  # threads
_NAME = re.compile(r"step-(\d{8,})")

Tensors = dict[str, dict[str, Tensor]]
Exchange = Callable[[Any], list[Any]]
"""What every rank has to say, to each of them."""


def alone(mine: Any) -> list[Any]:
    """What every rank says where there is one."""
    return [mine]


class DiskFullError(VitrailError):
    """There is no room for a checkpoint; what was saved before is as it was."""

    exit_code = 5


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A state at one moment, on the CPU; of a model that is sharded, what one rank has of it, or all of them."""

    step: int
    tensors: Tensors
    """By file and name: model, or the rows that a rank has of it, model-00003."""
    facts: dict[str, Any]
    """What is no tensor: where the run's files stood, what was counted so far, versions."""
    first: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    """Where rows begin in their tensor, by file and name, if not at its beginning."""
    rank: int = 0
    """Who writes it; 0 writes what is no tensor, too."""

    @property
    def bytes(self) -> int:
        """What it takes on disk, about."""
        return sum(tensor.nbytes for group in self.tensors.values() for tensor in group.values())

    def pieces(self, kind: str) -> dict[str, list[tuple[int, Tensor]]]:
        """The tensors of a kind by name: all rows that are there, and where they begin."""
        found: dict[str, list[tuple[int, Tensor]]] = {}
        for file, tensors in self.tensors.items():
            if file.partition("-")[0] == kind:
                for name, tensor in tensors.items():
                    found.setdefault(name, []).append((self.first.get(file, {}).get(name, 0), tensor))
        return found


def taken(state: State, facts: dict[str, Any], memory: dict[str, Tensor] | None = None) -> Snapshot:
    """A copy of the state as it is now; of a sharded one, of what this rank has of it.

    It lies in the memory of the snapshot before, which must not be used any more: to ask the system for pages takes
    longer than to fill them.
    """
    kinds = _kinds(state)
    memory = {} if memory is None else memory
    rank, suffix = 0, ""
    if sharding.is_sharded(state.model):
        rank = torch.distributed.get_rank()
        suffix = f"-{rank:05d}"
    tensors: Tensors = {}
    first: dict[str, dict[str, int]] = {}
    for kind, group in kinds.items():
        mine = {name: tensor.detach() for name, tensor in group.items() if rank == 0 or sharding.is_divided(tensor)}
        tensors[kind + suffix] = {
            name: _copied(sharding.local(tensor), memory, f"{kind} {name}") for name, tensor in mine.items()
        }
        first[kind + suffix] = {name: sharding.rows(tensor).start for name, tensor in mine.items() if rank}
    return Snapshot(state.step, tensors, facts, first, rank)


def _copied(tensor: Tensor, memory: dict[str, Tensor], key: str) -> Tensor:
    """The tensor in the CPU memory of that key, which is made where it is missing."""
    if key not in memory:
        memory[key] = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
    return memory[key].copy_(tensor)


def size(state: State) -> int:
    """Bytes of a checkpoint, or of this rank's part of it, about."""
    return sum(sharding.local(tensor).nbytes for group in _kinds(state).values() for tensor in group.values())


def _kinds(state: State) -> Tensors:
    """All tensors of a state."""
    kinds = {"model": state.model.state_dict(), "optimizer": optimizer.state(state.optimizer)}
    if state.average is not None:
        kinds["average"] = state.average.tensors
    return kinds


def digest(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of names and of tensors' sha256: equal weights have equal digests, sharded or not.

    Several threads, since the steps wait for it; of what is sharded, no more is put together than they work on.
    """

    def hashed(name: str, tensor: Tensor) -> bytes:
        values = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return name.encode() + hashlib.sha256(values.data).digest()

    found, pending = hashlib.sha256(), collections.deque[concurrent.futures.Future[bytes]]()
    with concurrent.futures.ThreadPoolExecutor(_HASHING) as pool:
        for name in sorted(tensors):
            if len(pending) == _HASHING:
                found.update(pending.popleft().result())
            pending.append(pool.submit(hashed, name, sharding.whole(tensors[name].detach())))
        for last in pending:
            found.update(last.result())
    return found.hexdigest()


def write(folder: Path, snapshot: Snapshot, exchange: Exchange = alone) -> Path:
    """Write `folder`/step-N, and remove all but the newest two.

    Of a model that is sharded every rank does this with what it has: rank 0 makes the folder, each brings its files to
    the disk, and only then is the manifest written. What goes wrong on one rank is raised on all.
    """
    path, leads = folder / name(snapshot.step), snapshot.rank == 0
    stack = contextlib.ExitStack()

    def opened() -> Path | None:
        if not leads:
            return None
        for left in folder.glob(".step-*"):  # by a process that was killed as it saved: room that is needed now
            shutil.rmtree(left)
        if lengths := snapshot.facts.get("files"):  # of the run's own files: so much of them must outlive it too
            for each in (folder.parent, *(folder.parent / file for file in lengths)):
                if each.exists():
                    files.sync(each)
        fresh = stack.enter_context(files.replacing(path, overwrite=True))
        fresh.mkdir()
        return fresh

    def closed() -> None:
        if leads:
            _complete(fresh, snapshot, parts)
            stack.close()
            _prune(folder, path)

    with room(folder, lambda: snapshot.bytes), stack:
        fresh = _together(opened, exchange)[0]
        parts = _together(lambda: _written(fresh, snapshot), exchange)
        _together(closed, exchange)
    return path


@contextlib.contextmanager
def room(folder: Path, needed: Callable[[], int]) -> Iterator[None]:
    """Where the block ends because the disk is full, say how many bytes a checkpoint takes."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        saved = "Nothing was saved yet: make room, and give the same command again"
        if next(folder.rglob(MANIFEST), None) is not None:
            saved = "What was saved before is whole: make room, and give the same command with --resume"
        raise DiskFullError(
            f"no room for a checkpoint in {folder}: it takes {needed():,} bytes and {_free_bytes(folder):,} are free."
            f" {saved}"
        ) from error


def check_room(folder: Path, checkpoint: int, weights: int) -> None:
    """Refuse to begin what the disk has no room for: one checkpoint more than are kept, and the weights three times."""
    used = sum(path.lstat().st_size for name in ("checkpoints", "weights") for path in (folder / name).rglob("*.*"))
    needed, free = (KEPT + 1) * checkpoint + 3 * weights - used, _free_bytes(folder)
    if needed > free:
        raise DiskFullError(
            f"no room for this run in {folder}: it takes about {needed:,} bytes, for checkpoints of {checkpoint:,} each"
            f" and for its weights, and {free:,} are free. Make room, or name a folder on another disk with --out"
        )


def _free_bytes(folder: Path) -> int:
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    usage = shutil.disk_usage(there)
    return usage.free if usage.total else sys.maxsize  # some network file systems do not say


def estimate_size(state: State) -> tuple[int, int]:
    """Bytes of a checkpoint, about, and of the model alone: of this rank's part, before its first step too."""
    kinds = {
        kind: sum(sharding.local(tensor).nbytes for tensor in group.values()) for kind, group in _kinds(state).items()
    }
    learned = sum(sharding.local(each).nbytes for each in state.model.parameters() if each.requires_grad)
    moments = 1 if isinstance(state.optimizer, torch.optim.SGD) else 2
    kinds["optimizer"] = max(kinds["optimizer"], moments * learned)
    return sum(kinds.values()), kinds["model"]


def _together(work: Callable[[], Any], exchange: Exchange) -> list[Any]:
    """What the work gives on each rank, or the error that one of them had."""
    try:
        mine = work()
    except Exception as error:  # noqa: BLE001  # raised on all ranks, which would wait for this one
        mine = error
    found = exchange(mine)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


def _written(fresh: Path, snapshot: Snapshot) -> dict[str, Any]:
    """Bring this rank's tensors to the disk; size and digest of its files."""
    listed = {}
    for stem, tensors in snapshot.tensors.items():
        file, first = fresh / f"{stem}.safetensors", snapshot.first.get(stem)
        with files.replacing(file) as written:
            storage.write(written, tensors, {"first": json.dumps(first)} if first else {})
        listed[file.name] = _listed(file)
    return listed


def _complete(fresh: Path, snapshot: Snapshot, parts: list[dict[str, Any]]) -> None:
    """Add what is no tensor, and the manifest of all ranks' files."""
    storage.write_json(fresh / "state.json", {"version": VERSION, "step": snapshot.step, **snapshot.facts})
    listed = {"state.json": _listed(fresh / "state.json")}
    for part in parts:
        listed |= part
    (fresh / MANIFEST).write_bytes(_manifest(dict(sorted(listed.items()))))


def _listed(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": files.sha256(file)}


def _manifest(listed: dict[str, Any]) -> bytes:
    return (json.dumps({"version": VERSION, "files": listed}, indent=2) + "\n").encode()


def _prune(folder: Path, path: Path) -> None:
    """Remove all checkpoints but the newest two, and those after the newest."""
    later = [old for old in found(folder) if old.name > path.name]  # of a run that went on from before them
    for old in later + found(folder)[len(later) + KEPT :]:
        (old / MANIFEST).unlink(missing_ok=True)  # first: without it, half a folder is no checkpoint
        shutil.rmtree(old)


def is_configuration(text: str | bytes) -> bool:
    """Whether a config.json is that of a run."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and {"recipe", "steps", "preprocess"} <= found.keys()


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


def read(path: Path, *, checked: bool = True) -> Snapshot:
    """The snapshot of a checkpoint, every byte of it compared with its manifest unless another rank has done that.

    Tensors are mapped, so those rows that nobody asks for are not read.
    """
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise ModelError(f"checkpoint {path} is not whole: it has no {MANIFEST}")
    listed = storage.read_json(manifest).get("files")
    if not isinstance(listed, dict) or "state.json" not in listed:
        raise ModelError(f"checkpoint {path} is damaged: its {MANIFEST} lists no files")
    for name, facts in listed.items() if checked else ():
        file = path / Path(name).name
        if not file.is_file() or _listed(file) != facts:
            raise ModelError(f"checkpoint {path} is damaged: {name} is not what its {MANIFEST} says")
    if manifest.read_bytes() != _manifest(listed):  # it has no sum of its own: one bit of it changes this, or the above
        raise ModelError(f"checkpoint {path} is damaged: its {MANIFEST} is not as it was written")
    state = storage.read_json(path / "state.json")
    if state.pop("version", None) != VERSION:
        raise ModelError(f"checkpoint {path} is of another version of vitrail")
    tensors: Tensors = {}
    first: dict[str, dict[str, int]] = {}
    for name in listed:
        file = path / name
        if file.suffix == ".safetensors":
            tensors[file.stem], header = storage.read(file)
            first[file.stem] = storage.parse_json(header.get("first", "{}"), file)
    return Snapshot(state.pop("step"), tensors, state, first)


def restore(state: State, snapshot: Snapshot) -> None:
    """Bring a fresh state to where the snapshot was taken, by however many ranks."""
    own: dict[str, Tensor] = state.model.state_dict()
    state.model.load_state_dict(_placed(snapshot.pieces("model"), own))
    optimizer.load_state(state.optimizer, _placed(snapshot.pieces("optimizer"), own))
    if state.average is not None:
        state.average.load(_placed(snapshot.pieces("average"), own))
    state.step = snapshot.step


def _placed(stored: dict[str, list[tuple[int, Tensor]]], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The stored tensors, each divided as the parameter that it belongs to; a single number is whole everywhere."""
    placed = {}
    for key, pieces in stored.items():
        (_, tensor), like = pieces[0], own.get(key.partition("/")[0])  # the optimizer's: PARAMETER/exp_avg
        if tensor.ndim and like is not None:
            tensor = sharding.divided(assembled(pieces, sharding.rows(like)), like)
        placed[key] = tensor
    return placed


def assembled(pieces: list[tuple[int, Tensor]], rows: range) -> Tensor:
    """These rows of a tensor, out of whichever pieces hold them; no others are read."""
    parts = [
        tensor[max(rows.start - first, 0) : max(rows.stop - first, 0)]
        for first, tensor in sorted(pieces, key=lambda piece: piece[0])
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Writer:
    """Writes checkpoints in the background, one at a time; an error is raised where the next is given or waited for."""

    def __init__(
        self, folder: Path, exchange: Exchange = alone, *, written: Callable[[Path], None] = lambda _: None
    ) -> None:
        self.folder, self.exchange, self.written = folder, exchange, written
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: concurrent.futures.Future[None] | None = None
        self._memory: dict[str, Tensor] = {}

    def take(self, state: State) -> Snapshot:
        """A copy of the state, when the one before, whose memory it takes, is written."""
        self.wait()
        return taken(state, {}, self._memory)

    def give(self, snapshot: Snapshot) -> None:
        """Write it, when the one before is written."""
        self.wait()
        self._writing = self._thread.submit(lambda: self.written(write(self.folder, snapshot, self.exchange)))

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
