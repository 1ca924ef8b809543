"""`vitrail train RECIPE --data DATA`: a model from nothing."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitrail import recipes
from vitrail.cli import show
from vitrail.config import Recipe
from vitrail.errors import DataError, UsageError

if TYPE_CHECKING:
    from vitrail.evaluate.classify import Counts
    from vitrail.train.run import Evaluated, Task


def main(
    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")],
    data: Annotated[str, tyro.conf.arg(metavar="DATA")],
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    epochs: Annotated[float | None, tyro.conf.arg(metavar="N")] = None,
    batch: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    lr: Annotated[float | None, tyro.conf.arg(metavar="RATE")] = None,
    warmup: Annotated[int | None, tyro.conf.arg(metavar="STEPS")] = None,
    seed: int = 0,
    device: str | None = None,
    workers: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    micro_batches: Annotated[int, tyro.conf.arg(metavar="N")] = 1,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Train a model from random weights by a named recipe, and keep the best weights by validation accuracy.

    Args:
        recipe: One of those that `vitrail list recipes` shows.
        data: A folder, a .csv or .jsonl, shards, a set that was got, digits, or hf:ORG/NAME.
        out: The run's folder; runs/train, runs/train-2, ... unless told otherwise.
        epochs: Passes over the training images, in place of the recipe's.
        batch: Images in a step, in place of the recipe's.
        lr: Learning rate at its top, in place of the recipe's.
        warmup: Steps until it is there, in place of the recipe's; a run made shorter has a shorter one of its own.
        seed: Of weights, order, augmentation and dropout.
        device: cpu, cuda or mps; the best there is unless told otherwise.
        workers: Processes that prepare images; one for each core but one unless told otherwise.
        micro_batches: Parts in which a step is computed, where all of it does not fit in memory.
        dry_run: Show what would be done, and train nothing.
        json: Print the result as JSON.
    """
    from vitrail.data.sources import open_data
    from vitrail.data.workers import available
    from vitrail.model import device as devices
    from vitrail.train.run import Task, described

    chosen = changed(recipes.named(recipe), epochs=epochs, batch=batch, lr=lr, warmup=warmup)
    dataset = open_data(data)
    task = Task(
        recipe=chosen,
        dataset=dataset,
        seed=seed,
        device=devices.named(device),
        workers=max(0, available() - 1) if workers is None else workers,
        micro_batches=micro_batches,
    )
    for note in dataset.notes:
        show.note(f"note: {note}")
    if dry_run:
        show.as_json(described(task))
        return
    folder = out or next_folder("train")
    try:
        result = trained(task, folder)
    except DataError as error:
        raise DataError(
            f"{error}. `vitrail data check {data}` names every bad image, and how to leave them out"
        ) from error
    if json:
        show.as_json({"folder": str(folder), "images": result.images, "right": result.right, "top1": result.top1})
        return
    split = "test" if "test" in dataset.splits else "val"
    print(f"{split}: {result.top1:.1%} of {result.images:,} images right ({folder / 'weights' / 'best.safetensors'})")


def changed(recipe: Recipe, *, epochs: float | None, batch: int | None, lr: float | None, warmup: int | None) -> Recipe:
    """The recipe with what was given in its place; a shorter run has a shorter warm-up."""
    given: dict[str, Any] = {name: value for name, value in (("epochs", epochs), ("batch", batch)) if value is not None}
    if lr is not None:
        given["optimiser"] = dataclasses.replace(recipe.optimiser, lr=lr)
    new = dataclasses.replace(recipe, **given)
    length = min(1.0, new.epochs / new.batch * recipe.batch / recipe.epochs)
    if warmup is None:
        warmup = round(recipe.schedule.warmup * length)
    return dataclasses.replace(new, schedule=dataclasses.replace(recipe.schedule, warmup=warmup))


def next_folder(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that is free."""
    for number in range(1, 100_000):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        if not folder.exists():
            return folder
    raise UsageError(f"runs/{name} to runs/{name}-99999 exist; name a folder with --out")


def trained(task: "Task", folder: Path) -> "Counts":
    """Train and show how far it is: a bar on a terminal, a line an epoch everywhere."""
    from vitrail.train.run import run

    with show.progress("training") as progress:
        return run(
            task,
            folder,
            after_step=lambda moment: progress(moment.step, moment.steps),
            after_epoch=lambda found: show.note(_line(found)),
        )


def _line(found: "Evaluated") -> str:
    moment = found.moment
    left = moment.seconds / moment.step * (moment.steps - moment.step)
    return f"epoch {moment.epoch:.0f}: loss {found.train_loss:.3f}, validation {found.val.top1:.1%}, {left:.0f} s left"
