"""VTAB-1k: fine-tune one model on 1,000 images of each of 19 tasks, and average over the tasks."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.config import AugmentConfig, OptimizerConfig, Recipe, ScheduleConfig, ViTConfig, to_json
from vitrail.errors import DataError
from vitrail.recipes import TRANSFER_RESERVED, override_settings
from vitrail.studies import vtab_tasks
from vitrail.studies.grid import Cell, CellResult, check_positive, compute_mean_and_std
from vitrail.studies.sweep import override_length, set_length
from vitrail.weights.trained import Trained

DEFAULT_LR, DEFAULT_STEPS, DEFAULT_WARMUP = 0.01, 2_500, 200
_CROP_AND_FLIP = "each VTAB task sets crop and flip itself"
_RESERVED = TRANSFER_RESERVED | {"augment.crop": _CROP_AND_FLIP, "augment.flip": _CROP_AND_FLIP}
PAPER_ACCURACIES = {
    "ViT-H/14 (JFT)": 77.63,
    "ViT-L/16 (JFT)": 76.28,
    "ViT-L/16 (I21k)": 72.72,
    "BiT-L (R152x4)": 76.29,
}  # Dosovitskiy et al. 2021, table 2, in percent


@dataclasses.dataclass(frozen=True, kw_only=True)
class VtabStudy:
    """The benchmark of one model."""

    study: str = "vtab"
    root: str
    tasks: dict[str, dict[str, Any]]
    """For each task to run, the kind of its images' source, and how many images there are."""
    model: str
    origin: dict[str, Any]
    preprocess: str | None
    recipe: Recipe
    """Without crop and flip, which each task sets."""
    steps: int
    runs: int
    seed: int
    micro_batches: int
    settings: tuple[str, ...] = ()
    """NAME=VALUE settings of the recipe that differ from the paper's."""

    def __post_init__(self) -> None:
        check_positive(runs=self.runs, steps=self.steps, micro_batches=self.micro_batches)


def find_tasks(root: Path, names: Sequence[str], seed: int) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The tasks whose images are on this machine, with source and counts, and the tasks that are missing."""
    available: dict[str, dict[str, Any]] = {}
    missing = []
    for name in names or tuple(vtab_tasks.TASKS):
        vtab_tasks.get_task(name)
        kind = vtab_tasks.find_source_kind(name, root)
        if kind is None:
            missing.append(name)
            continue
        dataset = vtab_tasks.open_vtab_dataset(name, root, seed)
        available[name] = {"kind": kind, "images": {part: len(split) for part, split in dataset.splits.items()}}
    if not available:
        raise DataError(
            f"{root} has none of {len(missing)} tasks; {missing[0]} would be {root / missing[0]}/train800.txt"
        )
    return available, missing


def plan_vtab(
    root: Path,
    tasks: dict[str, dict[str, Any]],
    model: str,
    trained: Trained,
    *,
    steps: int | None,
    batch: int | None,
    image_size: int | None,
    settings: Sequence[str] = (),
    runs: int,
    seed: int,
    micro_batches: int,
    preprocess: str | None,
) -> VtabStudy:
    """The paper's benchmark of a model, but for the settings given."""
    config = trained.model.config
    stride = config.stride if isinstance(config, ViTConfig) else 1
    recipe = make_default_recipe(stride)
    recipe = override_length(recipe, DEFAULT_STEPS, steps=steps, batch=batch, image_size=image_size)
    return VtabStudy(
        root=str(root),
        tasks=tasks,
        model=model,
        origin=to_json(trained.origin),
        preprocess=preprocess,
        recipe=override_settings(recipe, settings, _RESERVED),
        steps=DEFAULT_STEPS if steps is None else steps,
        runs=runs,
        seed=seed,
        micro_batches=micro_batches,
        settings=tuple(settings),
    )


def make_default_recipe(stride: int) -> Recipe:
    """The paper's recipe: SGD, batch size 512, 384 pixels, 2,500 steps."""
    return Recipe(
        model=None,
        image_size=round(384 / stride) * stride,
        batch=512,
        epochs=DEFAULT_STEPS * 512 / 1000,
        optimizer=OptimizerConfig(kind="sgd", lr=DEFAULT_LR, momentum=0.9, clip=1.0),
        schedule=ScheduleConfig(warmup=DEFAULT_WARMUP),
        augment=AugmentConfig(crop="window"),
        source="Dosovitskiy et al. 2021, table 4; crops of the authors' later code",
    )


def list_vtab_cells(study: VtabStudy) -> list[Cell]:
    """A run of each task with each seed, on all 1,000 images, evaluated on test."""
    return [
        Cell(
            name=f"{name}-seed-{seed}",
            result_fields={"task": name, "draw": "VTAB" if task["kind"] == "lists" else "own", "seed": seed},
            model=study.model,
            preprocess=study.preprocess,
            data={"task": name, "root": study.root, "seed": study.seed},
            recipe=_make_task_recipe(study, name, task["images"]),
            resize_whole_image=True,
            allow_empty_classes=True,
            seed=seed,
            train_on_val=True,
            eval_split="test",
            micro_batches=study.micro_batches,
        )
        for seed in range(study.seed, study.seed + study.runs)
        for name, task in study.tasks.items()
    ]


def _make_task_recipe(study: VtabStudy, name: str, images: Mapping[str, int]) -> Recipe:
    task = vtab_tasks.get_task(name)
    recipe = set_length(study.recipe, study.steps, images["train"] + images["val"], study.recipe.optimizer.lr)
    augment = dataclasses.replace(recipe.augment, crop="window" if task.random_crop else "squash", flip=task.flip)
    return dataclasses.replace(recipe, augment=augment)


def summarize_vtab(study: Mapping[str, Any], results: Sequence[CellResult]) -> dict[str, Any]:
    """Means by task, by group and over all finished tasks; the total is of each seed, then over seeds."""
    done = [result for result in results if result["status"] == "done"]
    by_task = {
        name: [result["top1"] for result in done if result["task"] == name]
        for name in study["tasks"]
        if any(result["task"] == name for result in done)
    }
    draws = {result["task"]: result["draw"] for result in done}
    seeds = sorted({result["seed"] for result in done})
    by_seed = [[result["top1"] for result in done if result["seed"] == seed] for seed in seeds]
    complete = [values for values in by_seed if len(values) == len(by_task)]  # others have another mean
    groups = {
        group: [statistics.mean(by_task[name]) for name in by_task if vtab_tasks.get_task(name).group == group]
        for group in vtab_tasks.TASK_GROUPS
    }
    return {
        "study": "vtab",
        "model": study["model"],
        "tasks": {name: compute_mean_and_std(values) | {"draw": draws[name]} for name, values in by_task.items()},
        "groups": {group: statistics.mean(means) for group, means in groups.items() if means},
        "of": len(vtab_tasks.TASKS),
        **compute_mean_and_std([statistics.mean(values) for values in complete]),
    }


def group_by_task_group(summary: Mapping[str, Any]) -> dict[str, dict[str, tuple[float, float | None]]]:
    """Mean and standard deviation of each task, under its group and the group's mean, for a plot."""
    return {
        f"{group}, mean {mean:.1%}": {
            vtab_tasks.get_task(name).title: (values["mean"], values["std"])
            for name, values in summary["tasks"].items()
            if vtab_tasks.get_task(name).group == group
        }
        for group, mean in summary["groups"].items()
    }
