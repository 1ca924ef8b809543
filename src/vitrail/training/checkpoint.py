"""Checkpoints: everything that a step changes, written whole or not at all.

    checkpoints/step-00001234/  model.safetensors  optimizer.safetensors  average.safetensors  state.json  manifest.json

Tensors are safetensors and everything else is JSON, so reading a checkpoint runs no code. Each rank of a sharded model
writes its own rows, as model-00003.safetensors, whose header says where in their tensors they start. Any number of
ranks can read what any number wrote, and each reads only the rows that it needs.

Frozen parameters are not stored: a run is resumed by the command that started it, which builds them again. state.json
has the digest of all weights, so other ones are refused.

The folder is written under another name, synced to the disk and then renamed; its manifest holds the size and sha256 of
every file. A checkpoint that does not match its manifest is refused by name, and the one before it is used. Two are
kept.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import errno
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import files
from vitrail.errors import DiskFullError, ModelError
from vitrail.training import fsdp, optimizer
from vitrail.training.step import TrainState
from vitrail.weights import tensor_files
from vitrail.weights.tensor_files import digest_tensors

FORMAT_VERSION = 1
KEPT_CHECKPOINTS = 2
MANIFEST_FILE = "manifest.json"
_CHECKPOINT_NAME_PATTERN = re.compile(r"step-\d{8,}")

TensorsByFile = dict[str, dict[str, Tensor]]
AllGather = Callable[[Any], list[Any]]
"""Takes one rank's value, and returns the values of all ranks."""


def all_gather_single(value: Any) -> list[Any]:
    """The all-gather of a single process."""
    return [value]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A training state on the CPU; of a sharded model, the part of one rank, or of all of them."""

    step: int
    tensors: TensorsByFile
    """By file and name: model, or a rank's rows of it, model-00003."""
    facts: dict[str, Any]
    """What is not a tensor: sizes of the run's files, counters, versions."""
    first_rows: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    """The first row in its tensor, by file and name, if it is not 0."""
    rank: int = 0
    """The rank that writes it; rank 0 also writes what is not a tensor."""

    @property
    def num_bytes(self) -> int:
        """Its approximate size on disk."""
        return sum(tensor.nbytes for group in self.tensors.values() for tensor in group.values())

    def get_pieces(self, kind: str) -> dict[str, list[tuple[int, Tensor]]]:
        """The tensors of a kind by name: each piece with its first row."""
        pieces: dict[str, list[tuple[int, Tensor]]] = {}
        for file, tensors in self.tensors.items():
            if file.partition("-")[0] == kind:
                for name, tensor in tensors.items():
                    pieces.setdefault(name, []).append((self.first_rows.get(file, {}).get(name, 0), tensor))
        return pieces


def copy_state(state: TrainState, facts: dict[str, Any], buffers: dict[str, Tensor] | None = None) -> Checkpoint:
    """Copy the current state to the CPU; of a sharded model, this rank's part.

    It reuses the memory of the previous copy, which must not be used any more: getting pages from the system takes
    longer than filling them.
    """
    buffers = {} if buffers is None else buffers
    is_sharded = fsdp.is_sharded(state.model)
    rank = torch.distributed.get_rank() if is_sharded else 0
    suffix = f"-{rank:05d}" if is_sharded else ""
    tensors: TensorsByFile = {}
    first_rows: dict[str, dict[str, int]] = {}
    for kind, group in _collect_tensors(state).items():
        local = {name: tensor.detach() for name, tensor in group.items() if rank == 0 or fsdp.is_dtensor(tensor)}
        tensors[kind + suffix] = {
            name: _copy_to_buffer(fsdp.to_local(tensor), buffers, f"{kind} {name}") for name, tensor in local.items()
        }
        first_rows[kind + suffix] = {name: fsdp.get_local_rows(tensor).start for name, tensor in local.items() if rank}
    return Checkpoint(state.step, tensors, facts, first_rows, rank)


def _copy_to_buffer(tensor: Tensor, buffers: dict[str, Tensor], key: str) -> Tensor:
    """Copy the tensor to the CPU buffer of that key, which is created if it is missing."""
    if key not in buffers:
        buffers[key] = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
    return buffers[key].copy_(tensor)


def compute_size(state: TrainState) -> int:
    """The approximate bytes of a checkpoint, or of this rank's part of it."""
    return sum(fsdp.to_local(tensor).nbytes for group in _collect_tensors(state).values() for tensor in group.values())


def _collect_tensors(state: TrainState) -> TensorsByFile:
    """All tensors that training changes, by kind and name."""
    kinds = {
        "model": collect_changing_tensors(state.model),
        "optimizer": optimizer.get_optimizer_state(state.optimizer),
    }
    if state.ema is not None:
        kinds["average"] = state.ema.tensors
    return kinds


def collect_changing_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model that training changes: all but the frozen parameters."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def digest_weights(tensors: Mapping[str, Tensor]) -> str:
    """The digest of a model's tensors; equal weights have equal digests, sharded or not."""
    return digest_tensors(tensors, gather=fsdp.to_full_tensor)


def write_checkpoint(folder: Path, checkpoint: Checkpoint, all_gather: AllGather = all_gather_single) -> Path:
    """Write `folder`/step-N, and remove all but the newest two checkpoints.

    Every rank of a sharded model calls this with its part: rank 0 makes the folder, each rank syncs its files to the
    disk, and only then is the manifest written. An error of one rank is raised on all.
    """
    path, is_rank0 = folder / format_checkpoint_name(checkpoint.step), checkpoint.rank == 0
    stack = contextlib.ExitStack()

    def open_folder() -> Path | None:
        if not is_rank0:
            return None
        for leftover in folder.glob(".step-*"):  # of a process killed while it saved: the room is needed now
            shutil.rmtree(leftover)
        if sizes := checkpoint.facts.get("files"):  # the run's log must be on disk up to here, too
            for log_path in (folder.parent, *(folder.parent / file for file in sizes)):
                if log_path.exists():
                    files.fsync_path(log_path)
        fresh = stack.enter_context(files.write_atomically(path, overwrite=True))
        fresh.mkdir()
        return fresh

    def close_folder() -> None:
        if is_rank0:
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
    """Turn the error of a full disk within the block into one that says how many bytes a checkpoint takes."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        saved = "Nothing was saved yet: free some space, and give the same command again"
        if next(folder.rglob(MANIFEST_FILE), None) is not None:
            saved = "What was saved before is intact: free some space, and give the same command with --resume"
        raise DiskFullError(
            f"no room for a checkpoint in {folder}: it takes {get_needed_bytes():,} bytes and"
            f" {_get_free_bytes(folder):,} are free. {saved}"
        ) from error


def check_disk_space(folder: Path, checkpoint_bytes: int, weight_bytes: int) -> None:
    """Refuse a run that the disk has no room for: one checkpoint more than are kept, and the weights three times."""
    used = sum(path.lstat().st_size for name in ("checkpoints", "weights") for path in (folder / name).rglob("*.*"))
    needed, free = (KEPT_CHECKPOINTS + 1) * checkpoint_bytes + 3 * weight_bytes - used, _get_free_bytes(folder)
    if needed > free:
        raise DiskFullError(
            f"no room for this run in {folder}: it takes about {needed:,} bytes, for checkpoints of"
            f" {checkpoint_bytes:,} each and for its weights, and {free:,} are free. Free some space, or name a folder"
            " on another disk with --out"
        )


def _get_free_bytes(folder: Path) -> int:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(existing)
    return usage.free if usage.total else sys.maxsize  # some network file systems do not say


def estimate_size(state: TrainState) -> tuple[int, int]:
    """The approximate bytes of this rank's part of a checkpoint, and of its model, even before the first step."""
    kinds = {
        kind: sum(fsdp.to_local(tensor).nbytes for tensor in group.values())
        for kind, group in _collect_tensors(state).items()
    }
    trained = sum(fsdp.to_local(weight).nbytes for weight in state.model.parameters() if weight.requires_grad)
    moments = 1 if isinstance(state.optimizer, torch.optim.SGD) else 2
    kinds["optimizer"] = max(kinds["optimizer"], moments * trained)
    weights = sum(fsdp.to_local(tensor).nbytes for tensor in state.model.state_dict().values())
    return sum(kinds.values()), weights


def _run_on_all_ranks(work: Callable[[], Any], all_gather: AllGather) -> list[Any]:
    """The results of all ranks; an error of one rank is raised on all."""
    try:
        own_result = work()
    except Exception as error:  # noqa: BLE001  # raised on all ranks, which would wait for this one
        own_result = error
    results = all_gather(own_result)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _write_tensors(fresh: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Write this rank's tensors; return size and digest of its files."""
    listed = {}
    for stem, tensors in checkpoint.tensors.items():
        file, first = fresh / f"{stem}.safetensors", checkpoint.first_rows.get(stem)
        with files.write_atomically(file) as written:
            tensor_files.write_tensors(written, tensors, {"first": json.dumps(first)} if first else {})
        listed[file.name] = _describe_file(file)
    return listed


def _write_manifest(fresh: Path, checkpoint: Checkpoint, parts: list[dict[str, Any]]) -> None:
    """Write what is not a tensor, and the manifest of all ranks' files."""
    tensor_files.write_json(
        fresh / "state.json", {"version": FORMAT_VERSION, "step": checkpoint.step, **checkpoint.facts}
    )
    listed = dict(collections.ChainMap({"state.json": _describe_file(fresh / "state.json")}, *parts))
    (fresh / MANIFEST_FILE).write_bytes(_format_manifest(dict(sorted(listed.items()))))


def _describe_file(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": files.compute_sha256(file)}


def _format_manifest(listed: dict[str, Any]) -> bytes:
    return (json.dumps({"version": FORMAT_VERSION, "files": listed}, indent=2) + "\n").encode()


def _prune_checkpoints(folder: Path, path: Path) -> None:
    """Remove all checkpoints but the newest two, and those after the newest."""
    later = [old for old in list_checkpoints(folder) if old.name > path.name]  # of a run resumed from before them
    for old in later + list_checkpoints(folder)[len(later) + KEPT_CHECKPOINTS :]:
        (old / MANIFEST_FILE).unlink(missing_ok=True)  # first: without it the folder is no checkpoint
        shutil.rmtree(old)


def format_checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """The folders of checkpoints, the newest first, intact or not."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _CHECKPOINT_NAME_PATTERN.fullmatch(path.name)]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def read_newest_checkpoint(folder: Path, on_damaged: Callable[[str], None]) -> Checkpoint | None:
    """The newest intact checkpoint, or None if there is no checkpoint; `on_damaged` is called for each damaged one."""
    paths = list_checkpoints(folder)
    for path in paths:
        try:
            return read_checkpoint(path)
        except ModelError as error:
            on_damaged(str(error))
    if paths:
        raise ModelError(f"none of the {len(paths)} checkpoints in {folder} is intact; --overwrite starts over")
    return None


def read_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """Read a checkpoint; `verify` compares every byte with the manifest, unless another rank has done that.

    Tensors are memory-mapped, so rows that are not needed are not read.
    """
    manifest = path / MANIFEST_FILE
    if not manifest.is_file():
        raise ModelError(f"checkpoint {path} is incomplete: it has no {MANIFEST_FILE}")
    listed = tensor_files.read_json(manifest).get("files")
    if not isinstance(listed, dict) or "state.json" not in listed:
        raise ModelError(f"checkpoint {path} is damaged: its {MANIFEST_FILE} lists no files")
    for name, facts in listed.items() if verify else ():
        file = path / Path(name).name
        if not file.is_file() or _describe_file(file) != facts:
            raise ModelError(f"checkpoint {path} is damaged: {name} does not match its {MANIFEST_FILE}")
    # it has no sum of its own: one bit of it changes this, or the above
    if manifest.read_bytes() != _format_manifest(listed):
        raise ModelError(f"checkpoint {path} is damaged: its {MANIFEST_FILE} is not as it was written")
    state = tensor_files.read_json(path / "state.json")
    if state.pop("version", None) != FORMAT_VERSION:
        raise ModelError(f"checkpoint {path} is of another version of vitrail")
    tensors: TensorsByFile = {}
    first: dict[str, dict[str, int]] = {}
    for name in listed:
        file = path / name
        if file.suffix == ".safetensors":
            tensors[file.stem], header = tensor_files.read_tensors(file)
            first[file.stem] = tensor_files.parse_json(header.get("first", "{}"), file)
    return Checkpoint(state.pop("step"), tensors, state, first)


def restore_state(state: TrainState, checkpoint: Checkpoint) -> None:
    """Load a checkpoint, written by any number of ranks, into a fresh state."""
    own: dict[str, Tensor] = state.model.state_dict()
    stored = _shard_tensors(checkpoint.get_pieces("model"), own)
    if missing := sorted(collect_changing_tensors(state.model).keys() - stored.keys()):
        raise ModelError(f"the checkpoint lacks {missing[0]!r}, which is trained here")
    state.model.load_state_dict(own | stored)
    if own.keys() - stored.keys() and digest_weights(state.model.state_dict()) != checkpoint.facts.get("weights"):
        raise ModelError(
            "the model to start from is not the one that this run was started with: its frozen weights differ from"
            " those of the checkpoint. Give that model again, or start over with --overwrite"
        )
    optimizer.load_optimizer_state(state.optimizer, _shard_tensors(checkpoint.get_pieces("optimizer"), own))
    if state.ema is not None:
        state.ema.load(_shard_tensors(checkpoint.get_pieces("average"), own))
    state.step = checkpoint.step


def _shard_tensors(stored: dict[str, list[tuple[int, Tensor]]], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The stored tensors, each sharded like the parameter that it belongs to; scalars are whole on every rank."""
    placed = {}
    for key, pieces in stored.items():
        (_, tensor), like = pieces[0], own.get(key.partition("/")[0])  # the optimizer's: PARAMETER/exp_avg
        if tensor.ndim and like is not None:
            tensor = fsdp.shard_like(assemble_rows(pieces, fsdp.get_local_rows(like)), like)
        placed[key] = tensor
    return placed


def assemble_rows(pieces: list[tuple[int, Tensor]], rows: range) -> Tensor:
    """These rows of a tensor, from the pieces that hold them; no others are read."""
    parts = [
        tensor[max(rows.start - first, 0) : max(rows.stop - first, 0)]
        for first, tensor in sorted(pieces, key=lambda piece: piece[0])
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class CheckpointWriter:
    """Writes checkpoints in the background, one at a time; an error is raised at the next `submit` or `wait`."""

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
        """Copy the state, once the checkpoint before, whose memory is reused, is written."""
        self.wait()
        return copy_state(state, {}, self._buffers)

    def submit(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, once the one before is written."""
        self.wait()
        self._writing = self._thread.submit(
            lambda: self.after_write(write_checkpoint(self.folder, checkpoint, self.all_gather))
        )

    def wait(self) -> None:
        """Return when every submitted checkpoint is on the disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def raise_errors(self) -> None:
        """Raise the error of the current write, if it has failed already."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)
