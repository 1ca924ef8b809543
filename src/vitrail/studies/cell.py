"""`python -m vitrail.studies.cell CELL.json DEVICE WORKERS`: one cell of a study, computed in this process.

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
from vitrail.config import Preprocess
from vitrail.data.dataset import Dataset
from vitrail.data.sources import open_data
from vitrail.errors import VitrailError
from vitrail.studies import samples, sweep
from vitrail.studies.grid import LINE_EVERY, OUT_OF_MEMORY, Cell, cell_from_json
from vitrail.train import distributed
from vitrail.train.loop import Moment
from vitrail.train.run import Result, run
from vitrail.train.task import Task, fitted
from vitrail.weights.load import load
from vitrail.weights.trained import Trained

ROOM = 7 / 6  # the side that a window is cut of, in sides of the window: 448 pixels for 384


def main(arguments: Sequence[str]) -> int:
    """Compute a cell and return the exit code."""
    path, device, workers = Path(arguments[0]), arguments[1], int(arguments[2])
    warnings.filterwarnings("ignore", module="PIL")  # of damaged files, which are named by errors of our own
    try:
        cell = cell_from_json(json.loads(path.read_text()))
        print(json.dumps(computed(cell, path.with_name("run"), device, workers)))
    except VitrailError as error:
        print(f"vitrail: {error}", file=sys.stderr)
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("allocate memory|out of memory", str(error)):
            raise
        print("vitrail: out of memory: --micro-batches computes a step in parts", file=sys.stderr)
        return OUT_OF_MEMORY
    return 0


def computed(cell: Cell, folder: Path, device: str, workers: int) -> dict[str, Any]:
    """What a cell's run comes to, begun or gone on with in its folder."""
    with distributed.joined(device) as (group, found):
        dataset = opened(cell.data)
        start = prepared(cell, dataset) if cell.recipe.model is None else None
        task = Task(
            recipe=cell.recipe,
            dataset=dataset,
            start=start,
            seed=cell.seed,
            group=group,
            device=found,
            workers=workers,
            micro_batches=cell.micro_batches,
            everything=cell.everything,
            measured=cell.measured,
            view=roomy(start.preprocess) if cell.whole and start and start.preprocess else None,
            sparse=cell.sparse,
        )
        result = run(
            task, folder, after_step=_now_and_then(), after_epoch=lambda now: _say(str(now)), resume=True, tell=_say
        )
        assert isinstance(result, Result), "a cell is alone in its group, and has labels"
        return facts(task, result)


def opened(data: dict[str, Any]) -> Dataset:
    """The images of a cell."""
    if "task" in data:
        return samples.opened(data["task"], Path(data["root"]), data["seed"])
    if data.get("val_is_test"):
        return sweep.measure_on_val(open_data(data["name"]), data["share"])
    return open_data(data["name"], share=data["share"])


def prepared(cell: Cell, dataset: Dataset) -> Trained:
    """The cell's model, ready to learn the set."""
    start = load(cell.model)
    config = start.model.config
    if start.preprocess is None and cell.preprocess is not None:
        named = presets.preprocess(cell.preprocess, config.image_size, config.channels)
        start = dataclasses.replace(start, preprocess=named)
    fresh = fitted(start, dataset, cell.recipe)
    if cell.whole and fresh.preprocess is not None:
        fresh = dataclasses.replace(
            fresh, preprocess=dataclasses.replace(fresh.preprocess, resize=fresh.preprocess.size)
        )
    return fresh


def roomy(view: Preprocess) -> Preprocess:
    """The view with room for a window to be anywhere in: both sides resized to more than the window's."""
    return dataclasses.replace(view, resize=tuple(round(side * ROOM) for side in view.size))


def facts(task: Task, result: Result) -> dict[str, Any]:
    """What a run came to."""
    counts = result.counts
    return {
        "split": result.split,
        "images": counts.images,
        "right": counts.right,
        "top1": counts.top1,
        "loss": counts.mean_loss,
        "steps": task.plan.steps,
        "seconds": result.seconds,
        "device": str(task.device),
        "notes": list(task.dataset.notes),
    }


def _now_and_then() -> Callable[[Moment], None]:
    """What says how far a run is, from time to time."""
    last = time.monotonic()

    def stepped(moment: Moment) -> None:
        nonlocal last
        if time.monotonic() - last > LINE_EVERY:
            last = time.monotonic()
            _say(f"step {moment.step:,} of {moment.steps:,}, loss {moment.outcome.loss:.3f}")

    return stepped


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
