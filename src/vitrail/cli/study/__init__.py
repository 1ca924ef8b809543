"""`vitrail study ...`: the paper's experiments, and what these commands share."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.cli import output
from vitrail.errors import UsageError

if TYPE_CHECKING:
    from vitrail.studies.grid import Cell, CellResult


def choose_study_folder(out: Path | None, *words: str) -> Path:
    """The folder that was given, or the one that these words always lead to: the same command finds it again."""
    if out is not None:
        return out
    parts = (re.sub(r"[^\w.]+", "-", word.rstrip("/").rpartition("/")[2]).strip("-.") for word in words)
    return Path("runs") / "-".join(parts)


def make_runner(
    folder: Path, lock: int, device: str | None, workers: int | None
) -> Callable[[Sequence["Cell"]], list["CellResult"]]:
    """What computes cells of the study in a folder, on the devices that were named."""
    from vitrail.runtime.workers import count_available_cores
    from vitrail.studies import grid

    if workers is not None and workers < 0:
        raise UsageError(f"--workers is {workers}; it must be 0 or more")
    devices = grid.list_devices(device)
    each = max(0, count_available_cores() // len(devices) - 1) if workers is None else workers

    def run_cells(cells: Sequence["Cell"]) -> list["CellResult"]:
        found = grid.run_cells(cells, folder, lock=lock, devices=devices, workers=each, notify=output.print_note)
        return list(found.values())

    return run_cells


def format_accuracy(summary: Mapping[str, Any]) -> str:
    """Mean and, of several runs, standard deviation."""
    if summary["std"] is None:
        return f"{summary['mean']:.2%}"
    return f"{summary['mean']:.2%} ± {summary['std']:.2%} (n = {summary['n']})"
