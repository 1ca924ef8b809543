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
from vitrail.train import fsdp, optimizer
from vitrail.train.step import TrainState
from vitrail.weights import json_files, tensor_files

FORMAT_VERSION = 1
KEPT_CHECKPOINTS = 2
MANIFEST_FILE = "manifest.json"
_HASH_THREADS = 8  # threads
_CHECKPOINT_NAME_PATTERN = re.compile(r"step-(\d{8,})")

TensorsByFile = dict[str, dict[str, Tensor]]
AllGather = Callable[[Any], list[Any]]
"""What every rank has to say, to each of them."""


def all_gather_single(value: Any) -> list[Any]:
    """What every rank says where there is one."""
    return [value]


class DiskFullError(VitrailError):
    """There is no room for a checkpoint; what was saved before is as it was."""

    exit_code = 5


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A state at one moment, on the CPU; of a model that is sharded, what one rank has of it, or all of them."""

    step: int
    tensors: TensorsByFile
    """By file and name: model, or the rows that a rank has of it, model-00003."""
    facts: dict[str, Any]
    """What is no tensor: where the run's files stood, what was counted so far, versions."""
    first_rows: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    """Where rows begin in their tensor, by file and name, if not at its beginning."""
    rank: int = 0
    """Who writes it; 0 writes what is no tensor, too."""

    @property
    def num_bytes(self) -> int:
        """What it takes on disk, about."""
        return sum(tensor.nbytes for group in self.tensors.values() for tensor in group.values())

    def get_pieces(self, kind: str) -> dict[str, list[tuple[int, Tensor]]]:
        """The tensors of a kind by name: all rows that are there, and where they begin."""
        found: dict[str, list[tuple[int, Tensor]]] = {}
        for file, tensors in self.tensors.items():
            if file.partition("-")[0] == kind:
                for name, tensor in tensors.items():
                    found.setdefault(name, []).append((self.first_rows.get(file, {}).get(name, 0), tensor))
        return found


def copy_state(state: TrainState, facts: dict[str, Any], buffers: dict[str, Tensor] | None = None) -> Checkpoint:
    """A copy of the state as it is now; of a sharded one, of what this rank has of it.

    It lies in the memory of the snapshot before, which must not be used any more: to ask the system for pages takes
    longer than to fill them.
    """
    kinds = _collect_tensors(state)
    buffers = {} if buffers is None else buffers
    rank, suffix = 0, ""
    if fsdp.is_sharded(state.model):
        rank = torch.distributed.get_rank()
        suffix = f"-{rank:05d}"
    tensors: TensorsByFile = {}
    first: dict[str, dict[str, int]] = {}
    for kind, group in kinds.items():
        mine = {name: tensor.detach() for name, tensor in group.items() if rank == 0 or fsdp.is_dtensor(tensor)}
        tensors[kind + suffix] = {
            name: _copy_to_buffer(fsdp.to_local(tensor), buffers, f"{kind} {name}") for name, tensor in mine.items()
        }
        first[kind + suffix] = {name: fsdp.get_local_rows(tensor).start for name, tensor in mine.items() if rank}
    return Checkpoint(state.step, tensors, facts, first, rank)


def _copy_to_buffer(tensor: Tensor, buffers: dict[str, Tensor], key: str) -> Tensor:
    """The tensor in the CPU memory of that key, which is made where it is missing."""
    if key not in buffers:
        buffers[key] = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
    return buffers[key].copy_(tensor)


def compute_size(state: TrainState) -> int:
    """Bytes of a checkpoint, or of this rank's part of it, about."""
    return sum(fsdp.to_local(tensor).nbytes for group in _collect_tensors(state).values() for tensor in group.values())


def _collect_tensors(state: TrainState) -> TensorsByFile:
    """All tensors of a state."""
    kinds = {"model": state.model.state_dict(), "optimizer": optimizer.get_optimizer_state(state.optimizer)}
    if state.ema is not None:
        kinds["average"] = state.ema.tensors
    return kinds


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of names and of tensors' sha256: equal weights have equal digests, sharded or not.

    Several threads, since the steps wait for it; of what is sharded, no more is put together than they work on.
    """

    def hash_tensor(name: str, tensor: Tensor) -> bytes:
        values = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return name.encode() + hashlib.sha256(values.data).digest()

    found, pending = hashlib.sha256(), collections.deque[concurrent.futures.Future[bytes]]()
    with concurrent.futures.ThreadPoolExecutor(_HASH_THREADS) as pool:
        for name in sorted(tensors):
            if len(pending) == _HASH_THREADS:
                found.update(pending.popleft().result())
            pending.append(pool.submit(hash_tensor, name, fsdp.to_full_tensor(tensors[name].detach())))
        for last in pending:
            found.update(last.result())
    return found.hexdigest()


def write_checkpoint(folder: Path, checkpoint: Checkpoint, all_gather: AllGather = all_gather_single) -> Path:
    """Write `folder`/step-N, and remove all but the newest two.

    Of a model that is sharded every rank does this with what it has: rank 0 makes the folder, each brings its files to
    the disk, and only then is the manifest written. What goes wrong on one rank is raised on all.
    """
    path, leads = folder / format_checkpoint_name(checkpoint.step), checkpoint.rank == 0
    stack = contextlib.ExitStack()

    def open_folder() -> Path | None:
        if not leads:
            return None
        for left in folder.glob(".step-*"):  # by a process that was killed as it saved: room that is needed now
            shutil.rmtree(left)
        if lengths := checkpoint.facts.get("files"):  # of the run's own files: so much of them must outlive it too
            for each in (folder.parent, *(folder.parent / file for file in lengths)):
                if each.exists():
                    files.fsync_path(each)
        fresh = stack.enter_context(files.write_atomically(path, overwrite=True))
        fresh.mkdir()
        return fresh

    def close_folder() -> None:
        if leads:
            _write_manifest(fresh, checkpoint, parts)
            stack.close()
            _prune_checkpoints(folder, path)

    with explain_full_disk(folder, lambda: checkpoint.num_bytes), stack:
        fresh = _run_on_all_ranks(open_folder, all_gather)[0]
        parts = _run_on_all_ranks(lambda: _write_tensors(fresh, checkpoint), all_gather)
        _run_on_all_ranks(close_folder, all_gather)
    return path


@contextlib.contextmanager
def explain_full_disk(folder: Path, get_needed_bytes: Callable[[], int]) -> Iterator[None]:
    """Where the block ends because the disk is full, say how many bytes a checkpoint takes."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        saved = "Nothing was saved yet: make room, and give the same command again"
        if next(folder.rglob(MANIFEST_FILE), None) is not None:
            saved = "What was saved before is whole: make room, and give the same command with --resume"
        raise DiskFullError(
            f"no room for a checkpoint in {folder}: it takes {get_needed_bytes():,} bytes and {_get_free_bytes(folder):,} are free."
            f" {saved}"
        ) from error


def check_disk_space(folder: Path, checkpoint_bytes: int, weight_bytes: int) -> None:
    """Refuse to begin what the disk has no room for: one checkpoint more than are kept, and the weights three times."""
    used = sum(path.lstat().st_size for name in ("checkpoints", "weights") for path in (folder / name).rglob("*.*"))
    needed, free = (KEPT_CHECKPOINTS + 1) * checkpoint_bytes + 3 * weight_bytes - used, _get_free_bytes(folder)
    if needed > free:
        raise DiskFullError(
            f"no room for this run in {folder}: it takes about {needed:,} bytes, for checkpoints of {checkpoint_bytes:,} each"
            f" and for its weights, and {free:,} are free. Make room, or name a folder on another disk with --out"
        )


def _get_free_bytes(folder: Path) -> int:
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    usage = shutil.disk_usage(there)
    return usage.free if usage.total else sys.maxsize  # some network file systems do not say


def estimate_size(state: TrainState) -> tuple[int, int]:
    """Bytes of a checkpoint, about, and of the model alone: of this rank's part, before its first step too."""
    kinds = {
        kind: sum(fsdp.to_local(tensor).nbytes for tensor in group.values())
        for kind, group in _collect_tensors(state).items()
    }
    learned = sum(fsdp.to_local(each).nbytes for each in state.model.parameters() if each.requires_grad)
    moments = 1 if isinstance(state.optimizer, torch.optim.SGD) else 2
    kinds["optimizer"] = max(kinds["optimizer"], moments * learned)
    return sum(kinds.values()), kinds["model"]


def _run_on_all_ranks(work: Callable[[], Any], all_gather: AllGather) -> list[Any]:
    """What the work gives on each rank, or the error that one of them had."""
    try:
        mine = work()
    except Exception as error:  # noqa: BLE001  # raised on all ranks, which would wait for this one
        mine = error
    found = all_gather(mine)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


def _write_tensors(fresh: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Bring this rank's tensors to the disk; size and digest of its files."""
    listed = {}
    for stem, tensors in checkpoint.tensors.items():
        file, first = fresh / f"{stem}.safetensors", checkpoint.first_rows.get(stem)
        with files.write_atomically(file) as written:
            tensor_files.write_tensors(written, tensors, {"first": json.dumps(first)} if first else {})
        listed[file.name] = _describe_file(file)
    return listed


def _write_manifest(fresh: Path, checkpoint: Checkpoint, parts: list[dict[str, Any]]) -> None:
    """Add what is no tensor, and the manifest of all ranks' files."""
    json_files.write_json(
        fresh / "state.json", {"version": FORMAT_VERSION, "step": checkpoint.step, **checkpoint.facts}
    )
    listed = {"state.json": _describe_file(fresh / "state.json")}
    for part in parts:
        listed |= part
    (fresh / MANIFEST_FILE).write_bytes(_format_manifest(dict(sorted(listed.items()))))


def _describe_file(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": files.compute_sha256(file)}


def _format_manifest(listed: dict[str, Any]) -> bytes:
    return (json.dumps({"version": FORMAT_VERSION, "files": listed}, indent=2) + "\n").encode()


def _prune_checkpoints(folder: Path, path: Path) -> None:
    """Remove all checkpoints but the newest two, and those after the newest."""
    later = [old for old in list_checkpoints(folder) if old.name > path.name]  # of a run that went on from before them
    for old in later + list_checkpoints(folder)[len(later) + KEPT_CHECKPOINTS :]:
        (old / MANIFEST_FILE).unlink(missing_ok=True)  # first: without it, half a folder is no checkpoint
        shutil.rmtree(old)


def is_run_config(text: str | bytes) -> bool:
    """Whether a config.json is that of a run."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and {"recipe", "steps", "preprocess"} <= found.keys()


def format_checkpoint_name(step: int) -> str:
    """What the checkpoint after so many steps is called."""
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """The folders of checkpoints, the newest first, whole or not."""
    if not folder.is_dir():
        return []
    named = [
        (int(match[1]), path) for path in folder.iterdir() if (match := _CHECKPOINT_NAME_PATTERN.fullmatch(path.name))
    ]
    return [path for _, path in sorted(named, reverse=True)]


def read_newest_checkpoint(folder: Path, on_damaged: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole; `refused` is told of each that is not. None where there was never one."""
    every = list_checkpoints(folder)
    for path in every:
        try:
            return read_checkpoint(path)
        except ModelError as error:
            on_damaged(str(error))
    if every:
        raise ModelError(f"none of the {len(every)} checkpoints in {folder} is whole; --overwrite begins anew")
    return None


def read_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """The snapshot of a checkpoint, every byte of it compared with its manifest unless another rank has done that.

    Tensors are mapped, so those rows that nobody asks for are not read.
    """
    manifest = path / MANIFEST_FILE
    if not manifest.is_file():
        raise ModelError(f"checkpoint {path} is not whole: it has no {MANIFEST_FILE}")
    listed = json_files.read_json(manifest).get("files")
    if not isinstance(listed, dict) or "state.json" not in listed:
        raise ModelError(f"checkpoint {path} is damaged: its {MANIFEST_FILE} lists no files")
    for name, facts in listed.items() if verify else ():
        file = path / Path(name).name
        if not file.is_file() or _describe_file(file) != facts:
            raise ModelError(f"checkpoint {path} is damaged: {name} is not what its {MANIFEST_FILE} says")
    if manifest.read_bytes() != _format_manifest(
        listed
    ):  # it has no sum of its own: one bit of it changes this, or the above
        raise ModelError(f"checkpoint {path} is damaged: its {MANIFEST_FILE} is not as it was written")
    state = json_files.read_json(path / "state.json")
    if state.pop("version", None) != FORMAT_VERSION:
        raise ModelError(f"checkpoint {path} is of another version of vitrail")
    tensors: TensorsByFile = {}
    first: dict[str, dict[str, int]] = {}
    for name in listed:
        file = path / name
        if file.suffix == ".safetensors":
            tensors[file.stem], header = tensor_files.read_tensors(file)
            first[file.stem] = json_files.parse_json(header.get("first", "{}"), file)
    return Checkpoint(state.pop("step"), tensors, state, first)


def restore_state(state: TrainState, checkpoint: Checkpoint) -> None:
    """Bring a fresh state to where the snapshot was taken, by however many ranks."""
    own: dict[str, Tensor] = state.model.state_dict()
    state.model.load_state_dict(_shard_tensors(checkpoint.get_pieces("model"), own))
    optimizer.load_optimizer_state(state.optimizer, _shard_tensors(checkpoint.get_pieces("optimizer"), own))
    if state.ema is not None:
        state.ema.load(_shard_tensors(checkpoint.get_pieces("average"), own))
    state.step = checkpoint.step


def _shard_tensors(stored: dict[str, list[tuple[int, Tensor]]], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The stored tensors, each divided as the parameter that it belongs to; a single number is whole everywhere."""
    placed = {}
    for key, pieces in stored.items():
        (_, tensor), like = pieces[0], own.get(key.partition("/")[0])  # the optimizer's: PARAMETER/exp_avg
        if tensor.ndim and like is not None:
            tensor = fsdp.shard_like(assemble_rows(pieces, fsdp.get_local_rows(like)), like)
        placed[key] = tensor
    return placed


def assemble_rows(pieces: list[tuple[int, Tensor]], rows: range) -> Tensor:
    """These rows of a tensor, out of whichever pieces hold them; no others are read."""
    parts = [
        tensor[max(rows.start - first, 0) : max(rows.stop - first, 0)]
        for first, tensor in sorted(pieces, key=lambda piece: piece[0])
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class CheckpointWriter:
    """Writes checkpoints in the background, one at a time; an error is raised where the next is given or waited for."""

    def __init__(
        self,
        folder: Path,
        all_gather: AllGather = all_gather_single,
        *,
        after_write: Callable[[Path], None] = lambda _: None,
    ) -> None:
        self.folder, self.all_gather, self.after_write = folder, all_gather, after_write
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: concurrent.futures.Future[None] | None = None
        self._buffers: dict[str, Tensor] = {}

    def capture(self, state: TrainState) -> Checkpoint:
        """A copy of the state, when the one before, whose memory it takes, is written."""
        self.wait()
        return copy_state(state, {}, self._buffers)

    def submit(self, checkpoint: Checkpoint) -> None:
        """Write it, when the one before is written."""
        self.wait()
        self._writing = self._thread.submit(
            lambda: self.after_write(write_checkpoint(self.folder, checkpoint, self.all_gather))
        )

    def wait(self) -> None:
        """Return when all that was given is on the disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def raise_errors(self) -> None:
        """Raise what went wrong, if it is known already."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)
