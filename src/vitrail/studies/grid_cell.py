"""`python -m vitrail.studies.grid_cell CELL.json DEVICE WORKERS`: run one cell of a study in this process.

The result is the last line of stdout, as JSON; the run folder is `run` beside CELL.json.
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

import numpy as np
import torch

from vitrail import presets
from vitrail.config import PreprocessConfig, from_json
from vitrail.data.dataset import Dataset, Split
from vitrail.data.randomness import derive_key, sample_indices
from vitrail.data.sources import open_dataset
from vitrail.errors import OUT_OF_SPACE_EXIT_CODE, UsageError, VitrailError
from vitrail.evaluation.probe_run import ProbeSettings, run_probe
from vitrail.runtime import distributed
from vitrail.studies import sweep, vtab_tasks
from vitrail.studies.grid import LINE_SECONDS, Cell
from vitrail.training.loop import StepEnd
from vitrail.training.run_results import RunResult
from vitrail.training.trainer import Trainer
from vitrail.training.training_run import TrainingRun, adapt_to_dataset
from vitrail.weights.load import load
from vitrail.weights.trained import Trained

POSITION_STD = 0.02  # of random position embeddings, as the paper's are
CROP_MARGIN = 7 / 6  # the resized side over the crop's: 448 pixels for a crop of 384


def main(arguments: Sequence[str]) -> int:
    """Run a cell and return the exit code."""
    path, device, workers = Path(arguments[0]), arguments[1], int(arguments[2])
    warnings.filterwarnings("ignore", module="PIL")  # about damaged files, which our own errors name
    try:
        cell = from_json(Cell, json.loads(path.read_text()))
        print(json.dumps(run_cell(cell, path.with_name("run"), device, workers)))
    except VitrailError as error:
        print(f"vitrail: {error}", file=sys.stderr)
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("allocate memory|out of memory", str(error)):
            raise
        print("vitrail: out of memory: --micro-batches splits a step into parts", file=sys.stderr)
        return OUT_OF_SPACE_EXIT_CODE
    return 0


def run_cell(cell: Cell, folder: Path, device: str, workers: int) -> dict[str, Any]:
    """Run or resume a cell in its folder, and return the result."""
    with distributed.join_process_group(device) as (group, torch_device):
        dataset = open_cell_dataset(cell.data)
        trained = prepare_model(cell, dataset) if cell.recipe.model is None else None
        run = TrainingRun(
            recipe=cell.recipe,
            dataset=dataset,
            initial_model=trained,
            seed=cell.seed,
            group=group,
            device=torch_device,
            workers=workers,
            micro_batches=cell.micro_batches,
            train_on_val=cell.train_on_val,
            eval_split=cell.eval_split,
            train_preprocess=add_crop_margin(trained.preprocess)
            if cell.resize_whole_image and trained and trained.preprocess
            else None,
            allow_empty_classes=cell.allow_empty_classes,
        )
        result = Trainer(
            run,
            folder,
            after_step=_make_step_reporter(),
            after_evaluation=lambda now: _print_line(str(now)),
            resume=True,
            notify=_print_line,
        ).run()
        assert isinstance(result, RunResult), "a cell is alone in its group, and has labels"
        few_shot = {} if cell.few_shot is None else {"few_shot": measure_few_shot(cell.few_shot, folder, run)}
        return collect_result(run, result) | few_shot


def open_cell_dataset(data: dict[str, Any]) -> Dataset:
    """Open the dataset of a cell."""
    if "task" in data:
        return vtab_tasks.open_vtab_dataset(data["task"], Path(data["root"]), data["seed"])
    if data.get("val_is_test"):
        return sweep.use_val_as_test(open_dataset(data["name"]), data["share"])
    dataset = open_dataset(data["name"], holdout_fraction=data["share"])
    return take_fraction_of_train(dataset, data["fraction"]) if "fraction" in data else dataset


def take_fraction_of_train(dataset: Dataset, fraction: float) -> Dataset:
    """The dataset with this fraction of each class's training images, at least one; a larger fraction includes them."""
    train = dataset.splits["train"]
    if train.multi_label:
        raise UsageError(f"{dataset.name} has several labels per image; a study on part of the images needs one")
    labels = np.array([train.get_labels(index)[0] for index in range(len(train))])
    drawn = [
        rows[sample_indices(max(1, round(fraction * len(rows))), len(rows), f"fraction {label}")]
        for label in np.unique(labels).tolist()
        for rows in (np.flatnonzero(labels == label),)
    ]
    part = Split(train.store, np.asarray(train.rows)[np.sort(np.concatenate(drawn))])
    return dataclasses.replace(dataset, splits={**dataset.splits, "train": part})


def prepare_model(cell: Cell, dataset: Dataset) -> Trained:
    """The cell's model, adapted to its dataset."""
    trained = load(cell.model)
    config = trained.model.config
    if trained.preprocess is None and cell.preprocess is not None:
        preprocess = presets.build_preprocess_config(cell.preprocess, config.image_size, config.channels)
        trained = dataclasses.replace(trained, preprocess=preprocess)
    adapted = adapt_to_dataset(trained, dataset, cell.recipe)
    if cell.reset_positions:
        reset_positions(adapted, cell.seed)
    if not cell.resize_whole_image or adapted.preprocess is None:
        return adapted
    preprocess = dataclasses.replace(adapted.preprocess, resize=adapted.preprocess.size)
    return dataclasses.replace(adapted, preprocess=preprocess)


def reset_positions(trained: Trained, seed: int) -> None:
    """Draw the model's position embeddings anew, as for random weights."""
    positions = getattr(trained.model, "pos_embed", None)
    if positions is None:
        raise UsageError("the model has no learned positions to reset")
    generator = torch.Generator().manual_seed(derive_key(seed, "positions") >> 1)
    torch.nn.init.normal_(positions, std=POSITION_STD, generator=generator)


def measure_few_shot(few_shot: dict[str, Any], folder: Path, run: TrainingRun) -> float:
    """The accuracy of ridge regression from a few images per class of another dataset, on the run's best weights."""
    dataset = open_cell_dataset(few_shot["data"])
    settings = ProbeSettings(methods=("few-shot",), shots=(few_shot["shots"],), device=run.device, workers=run.workers)
    facts = run_probe(load(str(folder / "weights" / "best.safetensors")), dataset, few_shot["data"]["name"], settings)
    assert facts is not None, "a cell is alone in its group"
    return float(facts["scores"][0]["top1"])


def add_crop_margin(preprocess: PreprocessConfig) -> PreprocessConfig:
    """The preprocessing with both sides resized beyond the crop, so that training can place the crop anywhere."""
    return dataclasses.replace(preprocess, resize=tuple(round(side * CROP_MARGIN) for side in preprocess.size))


def collect_result(run: TrainingRun, result: RunResult) -> dict[str, Any]:
    """The result of a run, for results.jsonl."""
    counts = result.counts
    return {
        "split": result.split,
        "images": counts.images,
        "correct": counts.correct,
        "top1": counts.top1,
        "loss": counts.mean_loss,
        "steps": run.plan.total_steps,
        "seconds": result.seconds,
        "device": str(run.device),
        "notes": list(run.dataset.notes),
    }


def _make_step_reporter() -> Callable[[StepEnd], None]:
    """A callback that prints a run's progress from time to time."""
    last_time = time.monotonic()

    def report_step(step_end: StepEnd) -> None:
        nonlocal last_time
        if time.monotonic() - last_time > LINE_SECONDS:
            last_time = time.monotonic()
            _print_line(f"step {step_end.step:,} of {step_end.steps:,}, loss {step_end.result.loss:.3f}")

    return report_step


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
