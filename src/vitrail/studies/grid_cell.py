"""`python -m vitrail.studies.grid_cell CELL.json DEVICE WORKERS`: one cell of a study, computed in this process.

What it comes to is the last line of stdout, as JSON; the run is in the folder `run` beside CELL.json.
"""

import dataclasses
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vitrail import presets
from vitrail.config import PreprocessConfig
from vitrail.data.dataset import Dataset
from vitrail.data.sources import open_dataset
from vitrail.errors import VitrailError
from vitrail.runtime import distributed
from vitrail.studies import sweep, vtab_splits
from vitrail.studies.grid import LINE_SECONDS, OUT_OF_MEMORY_EXIT, Cell, cell_from_json
from vitrail.train.loop import StepEnd
from vitrail.train.run_results import RunResult
from vitrail.train.trainer import Trainer
from vitrail.train.training_run import TrainingRun, adapt_to_dataset
from vitrail.weights.load import load
from vitrail.weights.trained import Trained

CROP_MARGIN = 7 / 6  # the side that a window is cut of, in sides of the window: 448 pixels for 384


def main(arguments: Sequence[str]) -> int:
    """Compute a cell and return the exit code."""
    path, device, workers = Path(arguments[0]), arguments[1], int(arguments[2])
    warnings.filterwarnings("ignore", module="PIL")  # of damaged files, which are named by errors of our own
    try:
        cell = cell_from_json(json.loads(path.read_text()))
        print(json.dumps(run_cell(cell, path.with_name("run"), device, workers)))
    except VitrailError as error:
        print(f"vitrail: {error}", file=sys.stderr)
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("allocate memory|out of memory", str(error)):
            raise
        print("vitrail: out of memory: --micro-batches computes a step in parts", file=sys.stderr)
        return OUT_OF_MEMORY_EXIT
    return 0


def run_cell(cell: Cell, folder: Path, device: str, workers: int) -> dict[str, Any]:
    """What a cell's run comes to, begun or gone on with in its folder."""
    with distributed.join_process_group(device) as (group, found):
        dataset = open_cell_dataset(cell.data)
        start = prepare_model(cell, dataset) if cell.recipe.model is None else None
        task = TrainingRun(
            recipe=cell.recipe,
            dataset=dataset,
            initial_model=start,
            seed=cell.seed,
            group=group,
            device=found,
            workers=workers,
            micro_batches=cell.micro_batches,
            train_on_val=cell.train_on_val,
            eval_split=cell.eval_split,
            train_preprocess=add_crop_margin(start.preprocess)
            if cell.resize_whole_image and start and start.preprocess
            else None,
            allow_empty_classes=cell.allow_empty_classes,
        )
        result = Trainer(
            task,
            folder,
            after_step=_make_step_reporter(),
            after_evaluation=lambda now: _print_line(str(now)),
            resume=True,
            notify=_print_line,
        ).run()
        assert isinstance(result, RunResult), "a cell is alone in its group, and has labels"
        return collect_result(task, result)


def open_cell_dataset(data: dict[str, Any]) -> Dataset:
    """The images of a cell."""
    if "task" in data:
        return vtab_splits.open_vtab_dataset(data["task"], Path(data["root"]), data["seed"])
    if data.get("val_is_test"):
        return sweep.use_val_as_test(open_dataset(data["name"]), data["share"])
    return open_dataset(data["name"], holdout_fraction=data["share"])


def prepare_model(cell: Cell, dataset: Dataset) -> Trained:
    """The cell's model, ready to learn the set."""
    start = load(cell.model)
    config = start.model.config
    if start.preprocess is None and cell.preprocess is not None:
        named = presets.build_preprocess_config(cell.preprocess, config.image_size, config.channels)
        start = dataclasses.replace(start, preprocess=named)
    fresh = adapt_to_dataset(start, dataset, cell.recipe)
    if cell.resize_whole_image and fresh.preprocess is not None:
        fresh = dataclasses.replace(
            fresh, preprocess=dataclasses.replace(fresh.preprocess, resize=fresh.preprocess.size)
        )
    return fresh


def add_crop_margin(preprocess: PreprocessConfig) -> PreprocessConfig:
    """The view with room for a window to be anywhere in: both sides resized to more than the window's."""
    return dataclasses.replace(preprocess, resize=tuple(round(side * CROP_MARGIN) for side in preprocess.size))


def collect_result(run: TrainingRun, result: RunResult) -> dict[str, Any]:
    """What a run came to."""
    counts = result.counts
    return {
        "split": result.split,
        "images": counts.images,
        "right": counts.correct,
        "top1": counts.top1,
        "loss": counts.mean_loss,
        "steps": run.plan.total_steps,
        "seconds": result.seconds,
        "device": str(run.device),
        "notes": list(run.dataset.notes),
    }


def _make_step_reporter() -> Callable[[StepEnd], None]:
    """What says how far a run is, from time to time."""
    last = time.monotonic()

    def report_step(step_end: StepEnd) -> None:
        nonlocal last
        if time.monotonic() - last > LINE_SECONDS:
            last = time.monotonic()
            _print_line(f"step {step_end.step:,} of {step_end.steps:,}, loss {step_end.result.loss:.3f}")

    return report_step


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
