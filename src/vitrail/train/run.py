"""A whole run in its folder: what was to be done, how it went, and the weights.

    runs/NAME/  config.json  results.csv  events.jsonl  weights/best.safetensors  weights/last.safetensors

Columns of results.csv and names of files are those people's scripts already know.
"""

import copy
import csv
import dataclasses
import json
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vitrail.config import Preprocess, Recipe, sides, to_json
from vitrail.data.dataset import Dataset
from vitrail.data.decode import decoder
from vitrail.data.loader import Plan, Training, evaluation_batches
from vitrail.data.order import Order
from vitrail.errors import DataError, UsageError
from vitrail.evaluate.classify import Counts, classify
from vitrail.model.build import Model
from vitrail.model.vit import ViT
from vitrail.train import loop, schedule
from vitrail.train.loop import Moment
from vitrail.train.step import State, begin
from vitrail.weights.load import load, save
from vitrail.weights.trained import Origin, Trained, random

COLUMNS = (
    "epoch",
    "time",
    "train/loss",
    "metrics/accuracy_top1",
    "metrics/accuracy_top5",
    "val/loss",
    "lr/pg0",
)
_EVALUATION_BATCH = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a run is: with the same versions and threads it gives the same weights."""

    recipe: Recipe
    dataset: Dataset
    seed: int = 0
    device: torch.device
    workers: int = 0
    micro_batches: int = 1

    def __post_init__(self) -> None:
        if "train" not in self.dataset.splits or "val" not in self.dataset.splits:
            raise DataError(
                f"{self.dataset.name} has the splits {', '.join(self.dataset.splits)}; train and val are needed"
            )
        if self.dataset.several:
            raise UsageError("training with several labels an image is not there yet; give each image one")
        if not self.dataset.classes:
            raise DataError(f"{self.dataset.name} has no labels to learn")
        empty = [name for name, count in zip(self.dataset.classes, self.counts, strict=True) if not count]
        if empty:
            raise DataError(f"{len(empty)} classes have no training image, such as {empty[0]}: add some or remove them")
        schedule.share(self.recipe.schedule, 0, self.plan.steps)  # refuses a warm-up longer than the run

    @property
    def counts(self) -> list[int]:
        """Training images of each class."""
        return self.dataset.splits["train"].counts(len(self.dataset.classes)).tolist()

    @property
    def plan(self) -> Plan:
        """Which positions are computed when."""
        images = len(self.dataset.splits["train"])
        total = max(1, round(images * self.recipe.epochs))
        return Plan(batch=self.recipe.batch, total=total, micro_batches=self.micro_batches)

    @property
    def preprocess(self) -> Preprocess:
        """The view that training's evaluation, and every later command, takes of an image."""
        size = sides(self.recipe.image_size)
        channels = int(self.recipe.settings.get("channels", 3))
        whole = self.recipe.augment.crop in ("pad", "squash")  # training sees whole images, so evaluation does too
        resize = size if whole else (round(size[0] * 8 / 7),)
        return Preprocess(size=size, resize=resize, mean=(0.5,) * channels, std=(0.5,) * channels)

    @property
    def training(self) -> Training:
        """What training sees."""
        split = self.dataset.splits["train"]
        return Training(
            split=split,
            order=Order(seed=self.seed, count=len(split), shards=split.shards()),
            augment=self.recipe.augment,
            preprocess=self.preprocess,
            seed=self.seed,
            classes=len(self.dataset.classes),
        )

    def model(self) -> Model:
        """The network before its first step."""
        recipe = self.recipe
        made = random(
            recipe.model,
            image_size=recipe.image_size,
            num_classes=len(self.dataset.classes),
            seed=self.seed,
            head_bias=recipe.head_bias,
            **recipe.settings,
        ).model
        if isinstance(made, ViT):
            made.regularise(dropout=recipe.dropout, stochastic_depth=recipe.stochastic_depth)
        return made.to(self.device)


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The state of a run after an epoch."""

    moment: Moment
    train_loss: float
    val: Counts


def run(
    task: Task, folder: Path, *, after_step: Callable[[Moment], None], after_epoch: Callable[[Evaluated], None]
) -> Counts:
    """Train, keep the best and the last weights in a new folder, and count how the best do on test, or else on val."""
    if folder.exists():
        raise UsageError(f"{folder} exists already; choose another name with --out")
    state = begin(task.model(), task.recipe)
    (folder / "weights").mkdir(parents=True)
    _write_json(folder / "config.json", described(task))
    book = _Book(folder)
    best: float | None = None
    losses: list[tuple[float, int]] = []
    counted = 0

    def stepped(moment: Moment) -> None:
        nonlocal best, counted
        losses.append((moment.outcome.loss * moment.outcome.images, moment.outcome.images))
        after_step(moment)
        if int(moment.epoch) == counted and moment.step < moment.steps:
            return
        counted = int(moment.epoch)
        found = Evaluated(
            moment, sum(loss for loss, _ in losses) / sum(n for _, n in losses), _measured(task, state, "val")
        )
        losses.clear()
        trained = _trained(task, state, moment)
        save(trained, folder / "weights" / "last.safetensors", overwrite=True)
        if best is None or found.val.top1 > best:
            best = found.val.top1
            save(trained, folder / "weights" / "best.safetensors", overwrite=True)
        book.enter(found)
        after_epoch(found)

    try:
        loop.run(state, task.training, task.plan, task.recipe, workers=task.workers, after_step=stepped)
    except BaseException:
        if best is None:  # nothing was learned yet that could be lost, and the name is free again
            shutil.rmtree(folder)
        raise
    return _finish(task, folder, book)


def _finish(task: Task, folder: Path, book: "_Book") -> Counts:
    split = "test" if "test" in task.dataset.splits else "val"
    kept = load(folder / "weights" / "best.safetensors").model.to(task.device)
    counts = classify(kept, _batches(task, split), task.preprocess)
    book.note({"event": "end", "split": split, "images": counts.images, "right": counts.right, "top1": counts.top1})
    return counts


def described(task: Task) -> dict[str, Any]:
    """config.json: everything that decides the result."""
    plan = task.plan
    return {
        "recipe": to_json(task.recipe),
        "data": task.dataset.name,
        "images": {name: len(split) for name, split in task.dataset.splits.items()},
        "classes": list(task.dataset.classes),
        "notes": list(task.dataset.notes),
        "preprocess": to_json(task.preprocess),
        "seed": task.seed,
        "steps": plan.steps,
        "micro_batches": plan.micro_batches,
        "device": str(task.device),
        "threads": torch.get_num_threads(),
        "jpeg_decoder": decoder(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def _measured(task: Task, state: State, split: str) -> Counts:
    return classify(_evaluated_model(state), _batches(task, split), task.preprocess)


def _evaluated_model(state: State) -> Model:
    """The average's model where there is one, else the model itself."""
    if state.average is None:
        return state.model
    averaged = copy.deepcopy(state.model)
    averaged.load_state_dict(state.average.tensors)
    return averaged


def _batches(task: Task, split: str) -> Any:
    return evaluation_batches(
        task.dataset.splits[split],
        task.preprocess,
        batch=_EVALUATION_BATCH,
        classes=len(task.dataset.classes),
        workers=task.workers,
    )


def _trained(task: Task, state: State, moment: Moment) -> Trained:
    origin = Origin(format="vitrail", name=f"trained on {task.dataset.name}, step {moment.step} of {moment.steps}")
    model = copy.deepcopy(_evaluated_model(state)).cpu().eval()
    return Trained(model, task.preprocess, task.dataset.classes, origin)


class _Book:
    """results.csv and events.jsonl."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with (folder / "results.csv").open("w", newline="") as file:
            csv.writer(file).writerow(COLUMNS)

    def enter(self, found: Evaluated) -> None:
        """A row for an epoch."""
        moment, val = found.moment, found.val
        row = (moment.epoch, moment.seconds, found.train_loss, val.top1, val.top5, val.mean_loss, moment.outcome.lr)
        with (self.folder / "results.csv").open("a", newline="") as file:
            csv.writer(file).writerow(f"{value:.6g}" for value in row)
        self.note({"event": "epoch", "step": moment.step, **dict(zip(COLUMNS, row, strict=True))})

    def note(self, event: dict[str, Any]) -> None:
        """A line for anything."""
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"at": time.time(), **event}) + "\n")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
