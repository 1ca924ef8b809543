"""`vitrail study ...`: the paper's experiments, and what these commands share."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.cli import show
from vitrail.errors import UsageError

if TYPE_CHECKING:
    from vitrail.studies.grid import Cell, Result


def place(out: Path | None, *words: str) -> Path:
    """The folder that was given, or the one that these words always lead to: the same command finds it again."""
    if out is not None:
        return out
    parts = (re.sub(r"[^\w.]+", "-", word.rstrip("/").rpartition("/")[2]).strip("-.") for word in words)
    return Path("runs") / "-".join(parts)


def runner(
    folder: Path, lock: int, device: str | None, workers: int | None
) -> Callable[[Sequence["Cell"]], list["Result"]]:
    """What computes cells of the study in a folder, on the devices that were named."""
    from vitrail.data.workers import available
    from vitrail.studies import grid

    if workers is not None and workers < 0:
        raise UsageError(f"--workers is {workers}; it must be 0 or more")
    devices = grid.devices(device)
    each = max(0, available() // len(devices) - 1) if workers is None else workers

    def run(cells: Sequence["Cell"]) -> list["Result"]:
        found = grid.run(cells, folder, lock=lock, devices=devices, workers=each, tell=show.note)
        return list(found.values())

    return run


def accuracy(found: Mapping[str, Any]) -> str:
    """Mean and, of several runs, standard deviation."""
    if found["std"] is None:
        return f"{found['mean']:.2%}"
    return f"{found['mean']:.2%} ± {found['std']:.2%} (n = {found['n']})"
