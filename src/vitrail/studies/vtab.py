"""VTAB-1k: one model, fine-tuned on 1,000 images of each of 19 tasks, and the mean over the tasks."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.config import Augment, Optimiser, Recipe, Schedule, ViTConfig, to_json
from vitrail.errors import DataError, UsageError
from vitrail.recipes import override_settings
from vitrail.studies import samples, tasks
from vitrail.studies.grid import Cell, Result
from vitrail.studies.sweep import lasting, mean_and_deviation, shortened
from vitrail.weights.trained import Trained

LR, STEPS, WARMUP = 0.01, 2_500, 200
PAPER = {"ViT-H/14 (JFT)": 77.63, "ViT-L/16 (JFT)": 76.28, "ViT-L/16 (I21k)": 72.72, "BiT-L (R152x4)": 76.29}  # table 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vtab:
    """The benchmark of one model."""

    study: str = "vtab"
    root: str
    tasks: dict[str, dict[str, Any]]
    """Of each task that is run, in what form its images are, and how many there are."""
    model: str
    origin: dict[str, Any]
    preprocess: str | None
    recipe: Recipe
    """But for crop and flip, which are the tasks' own."""
    steps: int
    runs: int
    seed: int
    micro_batches: int
    settings: tuple[str, ...] = ()
    """NAME=VALUE of the recipe that are not the paper's."""

    def __post_init__(self) -> None:
        if self.runs < 1 or self.steps < 1 or self.micro_batches < 1:
            raise UsageError(f"runs {self.runs}, steps {self.steps} and micro-batches {self.micro_batches}: 1 at least")


def there(root: Path, wanted: Sequence[str], seed: int) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The tasks whose images are here, with their forms and counts, and those that are missing."""
    found: dict[str, dict[str, Any]] = {}
    missing = []
    for name in wanted or tuple(tasks.TASKS):
        tasks.named(name)
        kind = samples.kind(name, root)
        if kind is None:
            missing.append(name)
            continue
        dataset = samples.opened(name, root, seed)
        found[name] = {"kind": kind, "images": {part: len(split) for part, split in dataset.splits.items()}}
    if not found:
        raise DataError(
            f"{root} has none of {len(missing)} tasks; {missing[0]} would be {root / missing[0]}/train800.txt"
        )
    return found, missing


def planned(
    root: Path,
    found: dict[str, dict[str, Any]],
    model: str,
    start: Trained,
    *,
    steps: int | None,
    batch: int | None,
    image_size: int | None,
    settings: Sequence[str] = (),
    runs: int,
    seed: int,
    micro_batches: int,
    preprocess: str | None,
) -> Vtab:
    """The study of a model: the paper's, but for what is given."""
    if own := next((text for text in settings if text.startswith(("crop=", "flip="))), None):
        raise UsageError(f"--set {own}: crop and flip are each task's own in VTAB")
    config = start.model.config
    stride = config.stride if isinstance(config, ViTConfig) else 1
    recipe = override_settings(usual(stride), settings)
    return Vtab(
        root=str(root),
        tasks=found,
        model=model,
        origin=to_json(start.origin),
        preprocess=preprocess,
        recipe=shortened(recipe, STEPS, steps=steps, batch=batch, image_size=image_size),
        steps=STEPS if steps is None else steps,
        runs=runs,
        seed=seed,
        micro_batches=micro_batches,
        settings=tuple(settings),
    )


def usual(stride: int) -> Recipe:
    """SGD, batch 512, 384 pixels, 2,500 steps."""
    return Recipe(
        model=None,
        image_size=round(384 / stride) * stride,
        batch=512,
        epochs=STEPS * 512 / 1000,
        optimiser=Optimiser(kind="sgd", lr=LR, momentum=0.9, clip=1.0),
        schedule=Schedule(warmup=WARMUP),
        augment=Augment(crop="window"),
        source="Dosovitskiy et al. 2021, table 4; views of the authors' later code",
    )


def cells(study: Vtab) -> list[Cell]:
    """A run of each task with each seed, on all 1,000 images, measured on test."""
    return [
        Cell(
            name=f"{name}-seed-{seed}",
            about={"task": name, "draw": "VTAB" if found["kind"] == "lists" else "own", "seed": seed},
            model=study.model,
            preprocess=study.preprocess,
            data={"task": name, "root": study.root, "seed": study.seed},
            recipe=_recipe(study, name, found["images"]),
            whole=True,
            sparse=True,
            seed=seed,
            everything=True,
            measured="test",
            micro_batches=study.micro_batches,
        )
        for seed in range(study.seed, study.seed + study.runs)
        for name, found in study.tasks.items()
    ]


def _recipe(study: Vtab, name: str, images: Mapping[str, int]) -> Recipe:
    task = tasks.named(name)
    made = lasting(study.recipe, study.steps, images["train"] + images["val"], study.recipe.optimiser.lr)
    augment = dataclasses.replace(made.augment, crop="window" if task.crop else "squash", flip=task.flip)
    return dataclasses.replace(made, augment=augment)


def summary(study: Mapping[str, Any], records: Sequence[Result]) -> dict[str, Any]:
    """Means by task, by group and over all tasks that have ended, of each seed and over the seeds."""
    done = [record for record in records if record["status"] == "done"]
    by_task = {
        name: [record["top1"] for record in done if record["task"] == name]
        for name in study["tasks"]
        if any(record["task"] == name for record in done)
    }
    draws = {record["task"]: record["draw"] for record in done}
    seeds = sorted({record["seed"] for record in done})
    whole = [[r["top1"] for r in done if r["seed"] == seed] for seed in seeds]
    whole = [values for values in whole if len(values) == len(by_task)]  # a seed that lacks a task has another mean
    groups = {
        group: [statistics.mean(by_task[name]) for name in by_task if tasks.named(name).group == group]
        for group in tasks.GROUPS
    }
    return {
        "study": "vtab",
        "model": study["model"],
        "tasks": {name: mean_and_deviation(found) | {"draw": draws[name]} for name, found in by_task.items()},
        "groups": {group: statistics.mean(found) for group, found in groups.items() if found},
        "of": len(tasks.TASKS),
        **mean_and_deviation([statistics.mean(values) for values in whole]),
    }


def groups(found: Mapping[str, Any]) -> dict[str, dict[str, tuple[float, float | None]]]:
    """The tasks of a summary by group and its mean, each with mean and deviation, for a plot."""
    return {
        f"{group}, mean {mean:.1%}": {
            tasks.named(name).title: (values["mean"], values["std"])
            for name, values in found["tasks"].items()
            if tasks.named(name).group == group
        }
        for group, mean in found["groups"].items()
    }
