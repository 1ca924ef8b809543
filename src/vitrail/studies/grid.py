"""The one runner of all studies: cells, each a training run in a process of its own, and a line for what came of each.

    FOLDER/  study.json  results.jsonl  cells/NAME/  cell.json  log  result.json  run/

A cell that ended is not run again, and one that was interrupted goes on from its own checkpoint. What one cell runs out
of, or diverges by, is written down as its result, and the others go on. Every device has one cell at a time.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import torch

from vitrail import files
from vitrail.config import AugmentConfig, OptimizerConfig, Recipe, ScheduleConfig, from_json, to_json, upgrade_keys
from vitrail.errors import DataError, UsageError, VitrailError
from vitrail.formatting import pluralize
from vitrail.runtime.devices import resolve_device
from vitrail.runtime.signals import StoppedError, catch_stop_signals
from vitrail.train.step import DivergedError

STUDY_FILE, RESULTS_FILE, CELLS_FOLDER, RESULT_FILE = "study.json", "results.jsonl", "cells", "result.json"
OUT_OF_MEMORY_EXIT = 5
CellResult = dict[str, Any]
Notify = Callable[[str], None]
_POLL_SECONDS = 0.05  # seconds
LINE_SECONDS = 15.0  # seconds, from one line about a cell to the next


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a study: everything that decides its result, as JSON can hold it."""

    name: str
    """Its folder's name."""
    result_fields: dict[str, Any]
    """What tells it from the others; copied into its result."""
    model: str
    """The trained model to fine-tune; of a recipe that names a preset, that preset."""
    preprocess: str | None = None
    """Of weights that state none: imagenet, inception or torchvision."""
    data: dict[str, Any]
    """`name` and `share` of `open_data` (and `val_is_test`), or `task`, `root` and `seed` of a VTAB task."""
    recipe: Recipe
    resize_whole_image: bool = False
    """Whether evaluation resizes all of an image to the model's size, as VTAB has it, and a window is cut of 7/6."""
    allow_empty_classes: bool = False
    seed: int = 0
    train_on_val: bool = False
    eval_split: Literal["test", "val"]
    micro_batches: int = 1
    keep_weights: bool = False
    """Whether its best weights are kept when it has ended."""


def cell_from_json(value: Mapping[str, Any]) -> Cell:
    """The cell that `to_json` wrote."""
    parts: tuple[tuple[str, type[Any]], ...] = (
        ("optimizer", OptimizerConfig),
        ("schedule", ScheduleConfig),
        ("augment", AugmentConfig),
    )
    recipe = upgrade_keys(Recipe, value["recipe"])
    typed = {name: from_json(kind, recipe[name]) for name, kind in parts}
    return Cell(**{**value, "recipe": Recipe(**{**recipe, **typed})})


class CellsError(VitrailError):
    """Cells that failed, in a study whose others have ended."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


# --- a study's folder ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_study(folder: Path, study: Mapping[str, Any]) -> Iterator[int]:
    """The descriptor of a lock on the study's folder, which is new or holds the same study.

    Cells inherit it, so that the folder stays taken for as long as one of them lives, even where the study was killed.
    """
    path = folder / STUDY_FILE
    if folder.is_dir() and any(folder.glob("[!.]*")) and not path.is_file():
        raise UsageError(f"{folder} is no study; choose another name with --out")
    files.make_folder(folder)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{folder} is being worked on by another process; wait for it, or end it") from None
        wanted = json.loads(json.dumps(study))
        if not path.is_file():
            with files.write_atomically(path) as fresh:
                fresh.write_text(json.dumps(wanted, indent=1) + "\n")
        elif different := find_difference(read_study(folder), wanted):
            raise UsageError(f"{folder} is another study, with {different}. Choose another name with --out")
        yield lock.fileno()


def read_study(folder: Path) -> dict[str, Any]:
    """What a folder's study is."""
    try:
        found = json.loads((folder / STUDY_FILE).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is no study: {STUDY_FILE} cannot be read ({error})") from error
    if not isinstance(found, dict) or "study" not in found:
        raise DataError(f"{folder / STUDY_FILE} is of no study")
    return found


def find_difference(before: Any, now: Any, name: str = "") -> str:
    """The first innermost field that differs and both of its values, or nothing."""
    if before == now:
        return ""
    if isinstance(before, dict) and isinstance(now, dict):
        inner = (
            find_difference(before.get(key), now.get(key), f"{name}.{key}" if name else key) for key in (before | now)
        )
        return next(filter(None, inner), "")
    if before in (None, []) and now in (None, []):  # a field that was added since, and is left empty
        return ""
    return f"{name} {before!s:.80} and not {now!s:.80}"


def read_results(folder: Path) -> dict[str, CellResult]:
    """The last result of each cell, by name; a line that a crash cut short is left out."""
    path = folder / RESULTS_FILE
    found: dict[str, CellResult] = {}
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                record = json.loads(line)
                found[record["cell"]] = record
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):  # what stands after the last end of a line was being written
                raise DataError(
                    f"{path}, line {number} is damaged ({error}); remove it, and its cell is run"
                ) from error
    return found


def _append_result(folder: Path, result: CellResult) -> None:
    """Add a line, which is on the disk when this returns."""
    path = folder / RESULTS_FILE
    whole = path.read_bytes().rpartition(b"\n")[0] if path.is_file() else b""
    with path.open("r+b" if path.is_file() else "wb") as file:
        file.truncate(len(whole) + 1 if whole else 0)
        file.seek(0, os.SEEK_END)
        file.write(json.dumps(result).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def is_ended(result: CellResult | None) -> bool:
    """Whether a cell need not be run again: it has numbers, or would diverge once more."""
    return result is not None and result["status"] in ("done", "diverged")


def check_failures(results: Sequence[CellResult], folder: Path) -> None:
    """Name the cells that failed, if some did."""
    failed = [record for record in results if record["status"] == "failed"]
    if failed:
        first = failed[0]
        raise CellsError(
            f"{len(failed)} of {len(results)} cells failed; {first['cell']}: {first['error']}"
            f" ({folder / CELLS_FOLDER / first['cell'] / 'log'}). The same command tries them again",
            first["exit_code"],
        )


def list_devices(name: str | None) -> tuple[str, ...]:
    """Where cells are computed: on all GPUs there are, unless one or another device is named."""
    count = torch.cuda.device_count()  # asks the driver, and takes no memory of a GPU as asking for the best one would
    if name in (None, "cuda") and count:
        return tuple(f"cuda:{number}" for number in range(count))
    return (str(resolve_device(name)),)


# --- running ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class CellProcess:
    """A process that computes a cell."""

    cell: Cell
    folder: Path
    process: "subprocess.Popen[bytes]"
    log: IO[str]
    """What it has written there and was not looked at yet."""
    started_at: float
    notified_at: float
    last_line: str = ""
    """The last one that was looked at."""

    def notify_progress(self, notify: Notify) -> None:
        """Tell its newest line now and then."""
        before = self.last_line
        if time.monotonic() - self.notified_at > LINE_SECONDS:
            self.notified_at = time.monotonic()
            if self.read_last_line() != before:
                notify(f"{self.cell.name}: {self.last_line}")

    def read_last_line(self) -> str:
        """Its newest line."""
        lines = [line for line in self.log.read().splitlines() if line.strip()]
        self.last_line = lines[-1] if lines else self.last_line
        return self.last_line


def run_cells(
    cells: Sequence[Cell], folder: Path, *, lock: int, devices: Sequence[str], workers: int, notify: Notify
) -> dict[str, CellResult]:
    """The results of the cells, those of before included, when all have ended one way or another.

    Asked by a signal to stop, it lets the running cells save what they have learned, and raises StoppedError.
    """
    known = read_results(folder)
    waiting = [cell for cell in cells if not is_ended(known.get(cell.name))]
    if waiting and len(waiting) < len(cells):
        notify(f"{len(cells) - len(waiting)} of {len(cells)} cells have ended before")
    running: dict[str, CellProcess] = {}
    with catch_stop_signals() as asked, contextlib.ExitStack() as stack:
        stack.callback(_kill_cells, running)
        stopping = False
        while running or (waiting and not asked.signal):
            for device in devices:
                if waiting and device not in running and not asked.signal:
                    notify(f"{waiting[0].name}: begun on {device}, {len(cells) - len(waiting) + 1} of {len(cells)}")
                    running[device] = _start_cell(waiting.pop(0), folder, device, workers, lock)
            if asked.signal and not stopping:
                stopping = True
                _request_stop(running)
            for device, child in list(running.items()):
                child.notify_progress(notify)
                if child.process.poll() is not None:
                    del running[device]
                    _record_result(child, folder, notify, stopping=stopping)
            time.sleep(_POLL_SECONDS)
    known = read_results(folder)
    left = [cell.name for cell in cells if cell.name not in known]
    if asked.signal or left:
        why = asked.signal.name if asked.signal else f"{left[0]} was stopped"
        raise StoppedError(f"{why}: {folder} is saved as far as it is; the same command goes on", asked.signal or 0)
    return {cell.name: known[cell.name] for cell in cells}


def _start_cell(cell: Cell, folder: Path, device: str, workers: int, lock: int) -> CellProcess:
    place = folder / CELLS_FOLDER / cell.name
    place.mkdir(parents=True, exist_ok=True)
    with files.write_atomically(place / "cell.json", overwrite=True) as fresh:
        fresh.write_text(json.dumps(to_json(cell), indent=1) + "\n")
    with (place / "log").open("a") as log, (place / RESULT_FILE).open("w") as printed:  # no pipe: who would empty it
        process = subprocess.Popen(  # noqa: S603, our own module
            [sys.executable, "-m", "vitrail.studies.grid_cell", str(place / "cell.json"), device, str(workers)],
            stdout=printed,
            stderr=log,
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C is for the study, which passes on what it asks
        )
    reading = (place / "log").open(errors="replace")
    reading.seek(0, os.SEEK_END)
    now = time.monotonic()
    return CellProcess(cell, place, process, reading, now, now)


def _request_stop(running: Mapping[str, CellProcess]) -> None:
    """Ask cells to save and end."""
    for child in running.values():
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(signal.SIGTERM)


def _kill_cells(running: Mapping[str, CellProcess]) -> None:
    """End what still runs: only an error or a second Ctrl-C leaves any."""
    for child in running.values():
        _kill_process_group(child)
        child.process.wait()
        child.log.close()


def _kill_process_group(child: CellProcess) -> None:
    """End a cell's process and all that it started, which outlive one that was killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.process.pid, signal.SIGKILL)


def _record_result(cell_process: CellProcess, folder: Path, notify: Notify, *, stopping: bool) -> None:
    """Put down what became of a cell, unless it was asked to stop."""
    cell, code = cell_process.cell, cell_process.process.returncode
    said = cell_process.read_last_line().removeprefix("vitrail: ")
    cell_process.log.close()
    if code:
        _kill_process_group(cell_process)
    if code == StoppedError.exit_code or (stopping and code == -signal.SIGTERM):
        notify(f"{cell.name}: {said.partition(';')[0] or 'stopped'}")
        return
    record: CellResult = {"cell": cell.name, **cell.result_fields}
    if code == 0:
        record |= {"status": "done", **json.loads((cell_process.folder / RESULT_FILE).read_text().splitlines()[-1])}
        notify(f"{cell.name}: {record['split']} {record['top1']:.2%} of {pluralize(record['images'], 'image')}")
    else:
        record |= _describe_failure(code, said) | {"seconds": time.monotonic() - cell_process.started_at}
        notify(f"{cell.name}: {record['status']}: {record['error']}")
    _append_result(folder, record)
    if code == 0:
        _remove_run_files(
            cell, cell_process.folder / "run"
        )  # last: without its checkpoints the run could not be resumed


def _describe_failure(code: int, last_line: str) -> CellResult:
    """What a cell's exit code and last words say."""
    if code == -signal.SIGKILL:
        return {"status": "failed", "error": "killed: out of memory, most likely", "exit_code": OUT_OF_MEMORY_EXIT}
    if code < 0:
        return {"status": "failed", "error": f"ended by {signal.Signals(-code).name}. {last_line}", "exit_code": 1}
    status = "diverged" if code == DivergedError.exit_code else "failed"
    return {"status": status, "error": last_line, "exit_code": code}


def _remove_run_files(cell: Cell, folder: Path) -> None:
    """Remove what only a run that goes on needs; a grid of large models would fill a disk."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / "weights" / "last.safetensors").unlink(missing_ok=True)
    if not cell.keep_weights:
        shutil.rmtree(folder / "weights", ignore_errors=True)
