"""The log of a run: text files in its folder, and other loggers.

    results.csv   a row for each evaluation, with columns that existing scripts know
    events.jsonl  a line for each event
    run.log       the same for people to read

Any other destination is a `Logger` of two methods. TensorBoard is one; Weights & Biases or MLflow are as short.
"""

import csv
import importlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from vitrail.errors import UsageError

RESULT_COLUMNS = (
    "epoch",
    "time",
    "train/loss",
    "metrics/accuracy_top1",
    "metrics/accuracy_top5",
    "val/loss",
    "lr/pg0",
)


_TRUNCATED_FILES = ("results.csv", "events.jsonl")


class Logger(Protocol):
    """A destination for a run's numbers, besides its folder."""

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers by name, after so many steps."""
        ...

    def close(self) -> None:
        """Write what is left; called when the run ends, also by an error."""
        ...


class TensorBoardLogger:
    """A logger that writes TensorBoard's event files (extra `track`)."""

    def __init__(self, folder: Path) -> None:
        try:
            tensorboard = importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            raise UsageError("TensorBoard is not installed: pip install 'vitrail[track]'") from None
        self.writer = tensorboard.SummaryWriter(str(folder))

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers by name, after so many steps."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()


class RunLog:
    """Writes the text files of a run's folder and calls the loggers; without a folder it writes no files."""

    def __init__(self, folder: Path | None, loggers: Sequence[Logger] = ()) -> None:
        self.folder = folder
        self.loggers = loggers
        if folder is not None and not (folder / "results.csv").exists():
            with (folder / "results.csv").open("w", newline="") as file:
                csv.writer(file).writerow(RESULT_COLUMNS)

    def get_file_sizes(self) -> dict[str, int]:
        """The sizes of the files that a resumed run truncates."""
        if self.folder is None:
            return {}
        return {name: path.stat().st_size if (path := self.folder / name).exists() else 0 for name in _TRUNCATED_FILES}

    def truncate(self, sizes: Mapping[str, int]) -> None:
        """Remove what was written after a checkpoint: it will be written again."""
        if self.folder is None:
            return
        for name in _TRUNCATED_FILES:
            with (self.folder / name).open("ab") as file:
                file.truncate(sizes[name])

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step to the loggers; they are too many for the text files."""
        for logger in self.loggers:
            logger.log_scalars(step, values)

    def log_evaluation(self, step: int, values: Sequence[float | None]) -> None:
        """Write a row of results.csv; None is an empty cell."""
        if self.folder is None:
            return
        with (self.folder / "results.csv").open("a", newline="") as file:
            csv.writer(file).writerow("" if value is None else f"{value:.6g}" for value in values)
        named = dict(zip(RESULT_COLUMNS, values, strict=True))
        self.log_event("epoch", step=step, **named)
        known = {name: value for name, value in named.items() if value is not None}
        self.log_step(step, {name: value for name, value in known.items() if name not in ("epoch", "time")})

    def log_event(self, event: str, **facts: Any) -> None:
        """Write a line of events.jsonl."""
        if self.folder is None:
            return
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"at": time.time(), "event": event, **facts}) + "\n")

    def write_line(self, sentence: str) -> None:
        """Write a line of run.log."""
        if self.folder is None:
            return
        with (self.folder / "run.log").open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}\n")

    def close(self) -> None:
        """Close the loggers."""
        for logger in self.loggers:
            logger.close()
