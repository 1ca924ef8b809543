"""The runner of all studies: each cell of a grid is a training run in its own process, with one line of results.

    FOLDER/  study.json  results.jsonl  cells/NAME/  cell.json  log  result.json  run/

A finished cell is not run again, and an interrupted one resumes from its checkpoint. If a cell diverges or runs out of
memory, that is its result, and the others continue. A device runs one cell at a time, or as many as it is listed.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import torch

from vitrail import files
from vitrail.config import Recipe, to_json
from vitrail.config.serialization import upgrade_keys, upgrade_result_keys
from vitrail.errors import OUT_OF_SPACE_EXIT_CODE, CellsError, DataError, DivergedError, StoppedError, UsageError
from vitrail.formatting import pluralize
from vitrail.locks import hold_inheritable_lock
from vitrail.runtime import child_processes
from vitrail.runtime.devices import resolve_device
from vitrail.runtime.signals import catch_stop_signals
from vitrail.runtime.workers import Notify
from vitrail.weights.trained import Origin

STUDY_FILE, RESULTS_FILE, CELLS_FOLDER, RESULT_FILE = "study.json", "results.jsonl", "cells", "result.json"
CellResult = dict[str, Any]
_POLL_SECONDS = 0.05
LINE_SECONDS = 15.0  # between two lines of progress of a cell
_STUDY_CLASSES = {"recipe": Recipe, "origin": Origin}  # parts of study.json
_PROSE_KEYS = ("source", "result", "assumptions")  # descriptions, which a later version may word differently


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a study: everything that decides its result, as JSON can hold it."""

    name: str
    """The name of its folder."""
    result_fields: dict[str, Any]
    """What distinguishes it from the other cells; copied into its result."""
    model: str
    """The model to fine-tune; for a recipe that names a preset, that preset."""
    preprocess: str | None = None
    """For weights that state none: imagenet, inception or torchvision."""
    data: dict[str, Any]
    """A dataset's `name`, `share` (held out of train), `fraction` of train if not all, and `val_is_test` if true; or a
    VTAB `task`, `root`, `seed`."""
    recipe: Recipe
    resize_whole_image: bool = False
    """Whether evaluation resizes the whole image, as VTAB does, and training crops from 7/6 of that size."""
    allow_empty_classes: bool = False
    seed: int = 0
    train_on_val: bool = False
    eval_split: Literal["test", "val"]
    micro_batches: int = 1
    keep_weights: bool = False
    """Whether its best weights are kept when it is done."""
    reset_positions: bool = False
    """Whether the model's position embeddings are random instead of its own."""
    few_shot: dict[str, Any] | None = None
    """The `data`, as above, and the `shots` per class on which ridge regression measures the best weights."""


# --- a study's folder ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_study(folder: Path, study: Mapping[str, Any]) -> Iterator[tuple[int, ...]]:
    """Lock the study's folder, which is new or holds the same study, and yield the lock's file descriptors.

    Cells inherit them, so the folder stays locked while any of them runs, even if the study was killed.
    """
    path = folder / STUDY_FILE
    if folder.is_dir() and any(folder.glob("[!.]*")) and not path.is_file():
        raise UsageError(f"{folder} is not a study; choose another name with --out")
    files.make_folder(folder)
    with hold_inheritable_lock(folder / ".lock", str(folder)) as lock:
        requested = json.loads(json.dumps(study))
        if not path.is_file():
            with files.write_atomically(path) as temporary:
                temporary.write_text(json.dumps(requested, indent=1) + "\n")
        elif difference := find_difference(read_study(folder), requested):
            raise UsageError(f"{folder} is another study, with {difference}. Choose another name with --out")
        yield lock


def read_study(folder: Path) -> dict[str, Any]:
    """The study of a folder, under the names that its keys have now."""
    try:
        study = json.loads((folder / STUDY_FILE).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is not a study: {STUDY_FILE} cannot be read ({error})") from error
    if not isinstance(study, dict) or "study" not in study:
        raise DataError(f"{folder / STUDY_FILE} does not describe a study")
    upgraded = {name: upgrade_keys(kind, study[name]) for name, kind in _STUDY_CLASSES.items() if name in study}
    if isinstance(study.get("variants"), dict):  # of an ablation: a recipe each
        upgraded["variants"] = {name: upgrade_keys(Recipe, recipe) for name, recipe in study["variants"].items()}
    return study | upgraded


def find_difference(before: Any, now: Any, name: str = "") -> str:
    """The first innermost field that differs, with both values, or an empty text."""
    if before == now or name.rpartition(".")[2] in _PROSE_KEYS:
        return ""
    if isinstance(before, dict) and isinstance(now, dict):
        paths = {key: f"{name}.{key}" if name else key for key in before | now}
        differences = (find_difference(before.get(key), now.get(key), path) for key, path in paths.items())
        return next(filter(None, differences), "")
    if before in (None, []) and now in (None, [], False):  # a field of a later version, left empty
        return ""
    return f"{name} {before!s:.80} and not {now!s:.80}"


def read_results(folder: Path) -> dict[str, CellResult]:
    """The last result of each cell, by name; a line that a crash cut short is skipped."""
    path = folder / RESULTS_FILE
    results: dict[str, CellResult] = {}
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                result = upgrade_result_keys(json.loads(line))
                results[result["cell"]] = result
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number < len(lines):  # only the text after the last newline may be incomplete
                raise DataError(
                    f"{path}, line {number} is damaged ({error}); remove it, and its cell runs again"
                ) from error
    return results


def _append_result(folder: Path, result: CellResult) -> None:
    """Append a line, which is on disk when this returns; a line that a crash cut short is dropped."""
    path = folder / RESULTS_FILE
    complete = b"".join(path.read_bytes().rpartition(b"\n")[:2]) if path.is_file() else b""
    with files.write_atomically(path, overwrite=True) as temporary:
        temporary.write_bytes(complete + json.dumps(result).encode() + b"\n")


def is_ended(result: CellResult | None) -> bool:
    """Whether a cell need not run again: it is done, or would diverge again."""
    return result is not None and result["status"] in ("done", "diverged")


def check_failures(results: Sequence[CellResult], folder: Path) -> None:
    """Raise an error that names the failed cells, if any."""
    if failed := [result for result in results if result["status"] == "failed"]:
        first = failed[0]
        raise CellsError(
            f"{len(failed)} of {len(results)} cells failed; {first['cell']}: {first['error']}"
            f" ({folder / CELLS_FOLDER / first['cell'] / 'log'}). The same command tries them again",
            first["exit_code"],
        )


def check_positive(**counts: int) -> None:
    """Raise an error unless every count is at least 1; names are those of the options, with underscores."""
    for name, count in counts.items():
        if count < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {count}; it must be at least 1")


def compute_mean_and_std(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation (of two or more) and number of values."""
    return {
        "mean": statistics.mean(values) if values else None,
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "n": len(values),
    }


def list_devices(name: str | None, parallel: int = 1) -> tuple[str, ...]:
    """The devices that run cells: all GPUs, unless a single one is named, each `parallel` times."""
    count = torch.cuda.device_count()  # asks the driver, and unlike resolve_device takes no GPU memory
    if name in (None, "cuda") and count:
        return tuple(f"cuda:{number}" for number in range(count)) * parallel
    return (str(resolve_device(name)),) * parallel


# --- running ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class CellProcess:
    """A process that runs a cell."""

    cell: Cell
    folder: Path
    process: "subprocess.Popen[bytes]"
    log: IO[str]
    """Positioned after the last line that was read."""
    started_at: float = dataclasses.field(default_factory=time.monotonic)
    notified_at: float = dataclasses.field(default_factory=time.monotonic)
    last_line: str = ""

    def notify_progress(self, notify: Notify) -> None:
        """Report its newest line from time to time."""
        previous = self.last_line
        if time.monotonic() - self.notified_at > LINE_SECONDS:
            self.notified_at = time.monotonic()
            if self.read_last_line() != previous:
                notify(f"{self.cell.name}: {self.last_line}")

    def read_last_line(self) -> str:
        """The newest line of its log."""
        lines = [line for line in self.log.read().splitlines() if line.strip()]
        self.last_line = lines[-1] if lines else self.last_line
        return self.last_line


def run_cells(
    cells: Sequence[Cell], folder: Path, *, lock: tuple[int, ...], devices: Sequence[str], workers: int, notify: Notify
) -> dict[str, CellResult]:
    """Run the cells that have not ended yet, and return the results of all.

    On a stop signal the running cells save checkpoints, and StoppedError is raised.
    """
    results = read_results(folder)
    waiting = [cell for cell in cells if not is_ended(results.get(cell.name))]
    if waiting and len(waiting) < len(cells):
        notify(f"{len(cells) - len(waiting)} of {len(cells)} cells are done already")
    running: dict[int, CellProcess] = {}  # by the index of the device
    with catch_stop_signals() as stop_request, contextlib.ExitStack() as stack:
        stack.callback(_kill_cells, running)
        stopping = False
        while running or (waiting and not stop_request.signal):
            for index, device in enumerate(devices):
                if waiting and index not in running and not stop_request.signal:
                    notify(f"{waiting[0].name}: started on {device}, {len(cells) - len(waiting) + 1} of {len(cells)}")
                    running[index] = _start_cell(waiting.pop(0), folder, device, workers, lock)
            if stop_request.signal and not stopping:
                stopping = True
                for cell_process in running.values():
                    child_processes.request_stop(cell_process.process)  # it saves a checkpoint and ends
            for index, cell_process in list(running.items()):
                cell_process.notify_progress(notify)
                if cell_process.process.poll() is not None:
                    del running[index]
                    _record_result(cell_process, folder, notify, stopping=stopping)
            time.sleep(_POLL_SECONDS)
    results = read_results(folder)
    missing = [cell.name for cell in cells if cell.name not in results]
    if stop_request.signal or missing:
        reason = stop_request.signal.name if stop_request.signal else f"{missing[0]} was stopped"
        message = f"{reason}: {folder} is saved so far; the same command continues it"
        raise StoppedError(message, stop_request.signal or 0)
    return {cell.name: results[cell.name] for cell in cells}


def _start_cell(cell: Cell, folder: Path, device: str, workers: int, lock: tuple[int, ...]) -> CellProcess:
    cell_folder = folder / CELLS_FOLDER / cell.name
    cell_folder.mkdir(parents=True, exist_ok=True)
    cell_file, log_path = cell_folder / "cell.json", cell_folder / "log"
    with files.write_atomically(cell_file, overwrite=True) as temporary:
        temporary.write_text(json.dumps(to_json(cell), indent=1) + "\n")
    with log_path.open("a") as stderr, (cell_folder / RESULT_FILE).open("w") as stdout:  # a pipe would fill up
        process = child_processes.start_process_group(  # Ctrl-C is for the study, which forwards it
            [sys.executable, "-m", "vitrail.studies.grid_cell", str(cell_file), device, str(workers)],
            stdout=stdout,
            stderr=stderr,
            descriptors=lock,
        )
    log = log_path.open(errors="replace")
    log.seek(0, os.SEEK_END)
    return CellProcess(cell, cell_folder, process, log)


def _kill_cells(running: Mapping[int, CellProcess]) -> None:
    """Kill the cells that still run, which only an error or a second Ctrl-C leaves."""
    for cell_process in running.values():
        child_processes.kill_process_group(cell_process.process)
        cell_process.process.wait()
        cell_process.log.close()


def _record_result(cell_process: CellProcess, folder: Path, notify: Notify, *, stopping: bool) -> None:
    """Append the result of an ended cell, unless it was asked to stop."""
    cell, code = cell_process.cell, cell_process.process.returncode
    last_line = cell_process.read_last_line().removeprefix("vitrail: ")
    cell_process.log.close()
    if code:
        child_processes.kill_process_group(cell_process.process)
    if code == StoppedError.exit_code or (stopping and child_processes.was_stopped_by_request(code)):
        notify(f"{cell.name}: {last_line.partition(';')[0] or 'stopped'}")
        return
    result: CellResult = {"cell": cell.name, **cell.result_fields}
    if code == 0:
        result |= {"status": "done", **json.loads((cell_process.folder / RESULT_FILE).read_text().splitlines()[-1])}
        notify(f"{cell.name}: {result['split']} {result['top1']:.2%} of {pluralize(result['images'], 'image')}")
    else:
        result |= _describe_failure(code, last_line) | {"seconds": time.monotonic() - cell_process.started_at}
        notify(f"{cell.name}: {result['status']}: {result['error']}")
    _append_result(folder, result)
    if code == 0:
        _remove_run_files(cell, cell_process.folder / "run")  # last: without checkpoints the run could not resume


def _describe_failure(code: int, last_line: str) -> CellResult:
    """The status, error and exit code of a failed cell, from its process's exit code and last line."""
    if code == child_processes.KILLED_CODE:
        return {"status": "failed", "error": "killed: out of memory, most likely", "exit_code": OUT_OF_SPACE_EXIT_CODE}
    if code < 0:
        return {"status": "failed", "error": f"ended by {signal.Signals(-code).name}. {last_line}", "exit_code": 1}
    status = "diverged" if code == DivergedError.exit_code else "failed"
    return {"status": status, "error": last_line, "exit_code": code}


def _remove_run_files(cell: Cell, folder: Path) -> None:
    """Remove what only resuming needs; a grid of large models would fill a disk."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / "weights" / "last.safetensors").unlink(missing_ok=True)
    if not cell.keep_weights:
        shutil.rmtree(folder / "weights", ignore_errors=True)
