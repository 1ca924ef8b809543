"""The folder of a run: which one may be used, its lock, its config.json, and how a run in it is resumed.

    runs/NAME/  config.json  results.csv  events.jsonl  run.log  weights/best.safetensors  weights/last.safetensors
                per_class.csv  predictions.csv  checkpoints/step-00001234/  weights/adapter/ (of LoRA)

Every decision whether a folder may be used is made here. A folder with a run in it is used again only to resume that
run (`resume`) or to replace it (`overwrite`).
"""

import contextlib
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from vitrail import files, locks, remote
from vitrail.config.serialization import upgrade_run_config
from vitrail.data.dataset_digest import DataDigest, check_unchanged
from vitrail.errors import StoppedError, UsageError
from vitrail.runtime import distributed
from vitrail.runtime.distributed import ProcessGroup
from vitrail.runtime.workers import Notify
from vitrail.training import checkpoint as checkpoints
from vitrail.training import upload
from vitrail.training.checkpoint import Checkpoint
from vitrail.training.step_verification import MISMATCH_FILES
from vitrail.training.training_run import TrainingRun, describe_machine, is_run_config, make_run_config

LOCK_FILE = ".lock"
STOPPED_FILE = "stopped"
"""Written when a signal stopped the run for good, so that processes restarted by torchrun exit at once."""
TORCHRUN_FILE = "torchrun"
"""The names of the torchrun agents that have worked on the run, one a line."""
FINISHED_EVENTS = ("end", "pretrained")
_TEMPORARY_FILES = (
    ".config.json.*",
    ".tracking.json.*",
    "weights/.*.safetensors.*",
    "weights/.adapter.*",
    "checkpoints/.step-*",
)
_RESUME_KEYS = (
    "recipe", "model", "teacher", "data", "images", "classes", "preprocess", "train_preprocess", "train_on_val",
    "eval_split", "seed", "steps", "micro_batches", "decisions", "loss_function", "relabel", "class_weights",
)  # fmt: skip
"""What must be equal in config.json for a run to be resumed."""


# --- which folder -----------------------------------------------------------------------------------------------------


def choose_run_folder(
    name: str,
    out: str | Path | None,
    group: ProcessGroup,
    *,
    resume: bool,
    overwrite: bool,
    must_resume: bool = False,
    notify: Notify,
) -> tuple[Path, bool]:
    """Choose the folder of a run, and whether the run is resumed; the same on all ranks.

    `out` is a folder, or the URL that the run is uploaded to. Without it the folder is runs/`name`, runs/`name`-2, ...
    With `must_resume`, a run to resume that does not exist is an error and not a new run.
    """
    if resume and overwrite:
        raise UsageError("--resume continues a run and --overwrite removes it; give one of them")
    local_folder = None if out is None else resolve_local_folder(str(out))

    def choose_on_rank0() -> tuple[Path, bool]:
        candidate = local_folder or _find_last_folder(name)
        if candidate is not None and is_torchrun_restart(candidate, group):
            return candidate, True
        if local_folder is not None and (resume or overwrite):
            locks.check_lock(local_folder / LOCK_FILE, str(local_folder))  # before anything is downloaded into it
        if local_folder is not None and isinstance(out, str) and remote.is_remote(out):
            _prepare_remote(out.rstrip("/"), local_folder, resume=resume, overwrite=overwrite, notify=notify)
        folder = local_folder or _choose_default_folder(name, resume=resume, overwrite=overwrite)
        if resume or overwrite:
            locks.check_lock(folder / LOCK_FILE, str(folder))
        if resume and not folder.exists():
            if must_resume:
                raise UsageError(
                    f"{folder} does not exist, so there is nothing to resume; without --resume it is a new run"
                )
            notify(f"warning: {folder} does not exist, so there is nothing to resume: this is a new run")
        check_folder_usable(folder, resume=resume, overwrite=overwrite)
        return folder, resume

    return distributed.run_on_rank0(choose_on_rank0)


def choose_next_folder(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that does not exist."""
    for number in itertools.count(1):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        if not folder.exists():
            return folder
    raise AssertionError


def _choose_default_folder(name: str, *, resume: bool, overwrite: bool) -> Path:
    """The latest folder of this name to resume, the first to overwrite, or else the next free one."""
    last = _find_last_folder(name)
    if resume and last is not None:
        return last
    return Path("runs") / name if overwrite else choose_next_folder(name)


def _find_last_folder(name: str) -> Path | None:
    """The most recently changed of runs/NAME, runs/NAME-2, ..."""
    folders = [path for path in Path("runs").glob(f"{name}*") if re.fullmatch(rf"{name}(-\d+)?", path.name)]
    return max(folders, key=lambda path: path.stat().st_mtime, default=None)


def _prepare_remote(url: str, folder: Path, *, resume: bool, overwrite: bool, notify: Notify) -> None:
    """Download what a run resumes from, or refuse a URL that is in use."""
    if resume:
        upload.download_runs(url, folder, notify)
    else:
        upload.check_url_free(url, overwrite=overwrite)
    notify(f"the run works in {folder} and is copied to {url}")


def resolve_local_folder(out: str) -> Path:
    """The folder that a run works in: `out` itself, or for a URL the same path below runs."""
    if not remote.is_remote(out):
        return Path(out)
    parts = [part for part in out.partition("://")[2].split("/") if part]
    if not parts or {".", ".."} & set(parts):
        raise UsageError(f"{out!r:.200} names no folder: give a path below it, such as {out.rstrip('/')}/runs/NAME")
    return Path("runs", *parts)


def make_upload_url(folder: Path, out: str | None) -> str | None:
    """The URL that a run, or one of several seeds, is uploaded to; None where `out` is a local folder."""
    if out is None or not remote.is_remote(out):
        return None
    return "/".join([out.rstrip("/"), *folder.relative_to(resolve_local_folder(out)).parts])


# --- whether it may be used -------------------------------------------------------------------------------------------


def check_folder_usable(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse a folder in use, unless it holds a run to resume or to overwrite."""
    if overwrite and folder.is_dir() and not all(is_run_folder(run) for run in _list_runs(folder)):
        raise UsageError(f"{folder} is no run to overwrite: choose another name with --out")
    is_used = folder.is_dir() and bool(list_run_files(folder))
    if folder.is_file() or (is_used and not resume and not overwrite):
        raise UsageError(
            f"{folder} exists already; resume it (--resume), replace it (--overwrite) or choose another (--out)"
        )


def has_run_files(folder: Path) -> bool:
    """Whether the folder holds more than a run killed before it wrote its config.json leaves behind."""
    if not folder.is_dir():
        return folder.exists()
    return any(not path.name.startswith((".config.json.", TORCHRUN_FILE)) for path in list_run_files(folder))


def is_run_folder(folder: Path) -> bool:
    """Whether `train` or `finetune` wrote this folder."""
    try:
        return not folder.is_symlink() and is_run_config((folder / "config.json").read_bytes())
    except OSError:
        return False


def _list_runs(folder: Path) -> list[Path]:
    """The folder itself, or its subfolders where they are the runs of several seeds."""
    paths = list_run_files(folder)
    return paths if paths and all(path.name.startswith("seed-") for path in paths) else [folder] if paths else []


def is_torchrun_restart(folder: Path, group: ProcessGroup) -> bool:
    """Whether a torchrun agent of this group has worked on the folder's run, or its runs, before.

    Then it lost or gained a process or node, and has restarted all of them with the command that started the run.
    """
    agent_files = [*folder.glob(TORCHRUN_FILE), *folder.glob(f"*/{TORCHRUN_FILE}")]
    return any(agent in path.read_text().splitlines() for path in agent_files for agent in group.agents)


def list_run_files(folder: Path) -> list[Path]:
    """What a run's folder holds besides its lock."""
    return [path for path in folder.iterdir() if path.name != LOCK_FILE]


# --- lock, open, clear ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Lock a run's folder against other processes within the block; create it if it is missing.

    A folder that was created here and is empty in the end is removed.
    """
    is_new = not folder.exists()
    files.make_folder(folder)
    try:
        with locks.hold_lock(folder / LOCK_FILE, str(folder)):
            yield
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # it holds a run now
                folder.rmdir()


def clear_run_folder(folder: Path) -> None:
    """Remove everything in a run's folder except its lock."""
    for path in list_run_files(folder):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def discard_empty_run(folder: Path, error: type[BaseException] | None, *_: object) -> None:
    """Clear the folder of a new run that failed before there was anything to lose; an `__exit__` function."""
    has_checkpoint = bool(checkpoints.list_checkpoints(folder / "checkpoints"))
    has_weights = has_checkpoint or (folder / "weights" / "last.safetensors").exists()
    if error is not None and not has_weights and not any(folder.glob(MISMATCH_FILES)):
        with contextlib.suppress(OSError):
            clear_run_folder(folder)


def open_run_folder(
    run: TrainingRun, folder: Path, data_digest: DataDigest | None, *, resume: bool, notify: Notify
) -> Checkpoint | None:
    """Make the folder ready for the run; return the checkpoint to resume from, the same on every rank, or None.

    Only rank 0 needs the digest.
    """
    if run.group.restart_count and (folder / STOPPED_FILE).exists():
        raise StoppedError(
            f"{folder} was stopped and its checkpoint is saved; the same command with --resume resumes it"
        )
    checkpoint: Checkpoint | None = None

    def open_on_rank0() -> int | None:
        nonlocal checkpoint
        assert data_digest is not None, "rank 0 has it"
        checkpoint = _open_on_rank0(run, folder, data_digest, resume=resume, notify=notify)
        return None if checkpoint is None else checkpoint.step

    step = distributed.run_on_rank0(open_on_rank0)
    if step is None or checkpoint is not None:
        return checkpoint
    path = folder / "checkpoints" / checkpoints.format_checkpoint_name(step)
    return checkpoints.read_checkpoint(path, verify=False)  # rank 0 has compared it with its manifest


def _open_on_rank0(
    run: TrainingRun, folder: Path, data_digest: DataDigest, *, resume: bool, notify: Notify
) -> Checkpoint | None:
    config_path, config = folder / "config.json", json.loads(json.dumps(make_run_config(run)))
    is_restart = is_torchrun_restart(folder, run.group)
    check_folder_usable(folder, resume=resume or is_restart, overwrite=False)
    if has_run_files(folder) and not (is_restart or config_path.is_file()):
        raise UsageError(f"{folder} is no run: it has no config.json. Choose another name with --out")
    if config_path.is_file():
        _check_same_config(config_path, config)
    files.make_folder(folder)
    for pattern in _TEMPORARY_FILES:
        for path in folder.glob(pattern):  # left by a process that was killed while it wrote
            shutil.rmtree(path)
    if run.group.agents:  # before anything else: a group lost here is restarted
        with (folder / TORCHRUN_FILE).open("a") as file:
            file.write("".join(f"{agent}\n" for agent in run.group.agents))
    if config_path.is_file():
        checkpoint = _find_checkpoint(run, folder, data_digest, notify)
        if checkpoint is not None:
            return checkpoint
    with files.write_atomically(config_path, overwrite=True) as fresh:
        fresh.write_text(json.dumps(config, indent=1) + "\n")
    return None


def _find_checkpoint(run: TrainingRun, folder: Path, data_digest: DataDigest, notify: Notify) -> Checkpoint | None:
    """The newest intact checkpoint; None, and a log without entries, where the run has not written one."""
    checkpoint = checkpoints.read_newest_checkpoint(
        folder / "checkpoints", on_damaged=lambda reason: notify(f"warning: {reason}")
    )
    if checkpoint is not None:
        notify(f"resuming {folder} after step {checkpoint.step:,}. {_describe_resume(run, checkpoint, data_digest)}")
        if _is_finished_run(folder):
            notify(
                f"warning: {folder} has finished already, so only what follows its last checkpoint is repeated; for an"
                " interrupted run in another folder give --out"
            )
        (folder / STOPPED_FILE).unlink(missing_ok=True)
        return checkpoint
    if _is_finished_run(folder):
        raise UsageError(
            f"{folder} is a finished run whose checkpoints were removed, so there is nothing to resume. --overwrite"
            " starts over, --out names another folder"
        )
    notify(f"{folder} has no checkpoint yet, so the run starts over")
    for name in (STOPPED_FILE, "results.csv", "events.jsonl"):
        (folder / name).unlink(missing_ok=True)
    return None


def _is_finished_run(folder: Path) -> bool:
    """Whether the run's events say that it finished: then its weights are worth keeping."""
    events = folder / "events.jsonl"
    with contextlib.suppress(ValueError):  # a line that was being written
        lines = map(json.loads, events.read_text().splitlines() if events.is_file() else ())
        return any(isinstance(line, dict) and line.get("event") in FINISHED_EVENTS for line in lines)
    return False


# --- whether it is the same run ---------------------------------------------------------------------------------------


def read_run_config(path: Path) -> dict[str, Any]:
    """A run's config.json, under the keys of this version."""
    try:
        config = json.loads(path.read_text())
    except ValueError:
        config = None
    if not isinstance(config, dict) or "recipe" not in config:
        raise UsageError(f"{path} is damaged or not of a run; --overwrite starts over, --out names another folder")
    return upgrade_run_config(config)


def _check_same_config(path: Path, config: dict[str, Any]) -> None:
    """Refuse to resume a run with another configuration than it was started with."""
    recorded, current = _drop_unset(read_run_config(path)), _drop_unset(config)
    for values in (recorded, current):
        values["recipe"].pop("head_init", None)  # what the head started from no longer matters
        values["recipe"].pop("resize_whole_image", None)  # an earlier version did not record it; the preprocessing does
        for sentences in ("assumptions", "changes"):  # which another version may word differently
            values.get("model", {}).pop(sentences, None)
    for key in _RESUME_KEYS:
        if recorded.get(key) != current.get(key):
            difference = _describe_difference(key, recorded.get(key), current.get(key))
            raise UsageError(f"{path.parent} was started with another {difference}")


def _drop_unset(value: Any) -> Any:
    """The configuration without fields that are None: a version that does not know a field omits it."""
    if not isinstance(value, dict):
        return value
    return {name: _drop_unset(field) for name, field in value.items() if field is not None}


def _describe_difference(key: str, recorded: Any, current: Any) -> str:
    """The innermost field that differs, and both of its values."""
    while isinstance(recorded, dict) and isinstance(current, dict):
        inner = next(name for name in (recorded | current) if recorded.get(name) != current.get(name))
        key, recorded, current = f"{key}.{inner}", recorded.get(inner), current.get(inner)
    return (
        f"{key}: {recorded!s:.60}, not {current!s:.60}. Give the same command again, --minutes included, with --resume"
    )


def _describe_resume(run: TrainingRun, checkpoint: Checkpoint, data_digest: DataDigest) -> str:
    """Say whether the resumed run will be bit-identical; refuse images that have changed."""
    recorded, current = checkpoint.facts["machine"], describe_machine(run)
    differences = [
        f"{name} {recorded[name]} -> {current[name]}"
        for name in current
        if recorded.get(name, current[name]) != current[name]
    ]
    if recorded_data := checkpoint.facts.get("data"):  # an older version recorded none
        recorded_digest = DataDigest(*(recorded_data.get(field, "") for field in DataDigest._fields))
        if change := check_unchanged(recorded_digest, data_digest, run.dataset.name):
            differences.append(change)
    if differences:
        return f"Not bit-identical to an uninterrupted run: {', '.join(differences)}"
    if "elapsed" in checkpoint.facts:
        return "The number of steps left depends on the time left; the report will have the command that repeats it"
    if run.device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        return "Its weights will be bit-identical to those of an uninterrupted run"
    return "Not bit-identical: a GPU adds in any order (--deterministic)"
