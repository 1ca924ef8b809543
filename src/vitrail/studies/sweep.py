"""The paper's transfer to one dataset: choose the learning rate on val, train on all of train, evaluate on test.

Test is not read before the learning rate is chosen.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from vitrail import recipes
from vitrail.config import Recipe, ViTConfig, to_json
from vitrail.data import holdout
from vitrail.data.dataset import Dataset, Split
from vitrail.data.sources import open_dataset
from vitrail.errors import CellsError, DataError, DivergedError, UsageError
from vitrail.formatting import pluralize
from vitrail.studies.grid import Cell, CellResult, check_positive, compute_mean_and_std, is_ended
from vitrail.training.recipe_overrides import scale_warmup
from vitrail.weights.trained import Trained

# Dosovitskiy et al. 2021, table 4: the fewest training images, the rates to try, the share of train held out
_LARGE_DATASET = (500_000, (0.003, 0.01, 0.03, 0.06), 0.01)
_MEDIUM_DATASET = (20_000, (0.001, 0.003, 0.01, 0.03), 0.02)
_SMALL_DATASET = (0, (0.001, 0.003, 0.01, 0.03), 0.1)

_RESERVED = recipes.TRANSFER_RESERVED | {
    "optimizer.lr": "a sweep chooses the learning rate; --rates gives those to try",
    "recipe.loss": "the labels of the data decide the loss",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """The transfer of one model to one dataset."""

    study: str = "sweep"
    data: str
    dataset: str
    """The dataset's own name."""
    share: float
    """The share of train that becomes val if the dataset has none."""
    images: dict[str, int]
    model: str
    origin: dict[str, Any]
    preprocess: str | None
    recipe: Recipe
    """For all of train; its learning rate is not used."""
    steps: int
    rates: tuple[float, ...]
    runs: int
    seed: int
    micro_batches: int
    settings: tuple[str, ...] = ()
    """NAME=VALUE settings of the recipe that differ from the paper's."""
    val_is_test: bool | None = None
    """Whether the dataset's val is the test split, and part of train is val."""

    def __post_init__(self) -> None:
        if not self.rates or len(set(self.rates)) < len(self.rates) or min(self.rates) <= 0:
            raise UsageError(f"--rates is {list(self.rates)}; give learning rates above 0, each once")
        check_positive(runs=self.runs, steps=self.steps, micro_batches=self.micro_batches)


def open_sweep_dataset(data: str) -> tuple[Dataset, float]:
    """The dataset, and the share of train that becomes val if it has none: the paper's, by the dataset's size.

    If a dataset has train and val only, as ImageNet has, val is the test split, and a share of train is held out as
    val.
    """
    share = _SMALL_DATASET[2]
    dataset = open_dataset(data, holdout_fraction=share)
    if {"train", "val"} <= dataset.splits.keys() and "test" not in dataset.splits and not dataset.generated_splits:
        share = _get_size_settings(len(dataset.splits["train"]))[2]
        return use_val_as_test(dataset, share), share
    missing = {"train", "val", "test"} - dataset.splits.keys()
    if missing:
        raise DataError(f"{dataset.name} has no {min(missing)}; a sweep chooses on val and evaluates on test")
    paper_share = _get_size_settings(_count_train_and_val(dataset))[2]
    if "val" in dataset.generated_splits and paper_share != share:
        share, dataset = paper_share, open_dataset(data, holdout_fraction=paper_share)
    return dataset, share


def use_val_as_test(dataset: Dataset, share: float) -> Dataset:
    """The dataset with its val as test, and a share of each class of train held out as val."""
    train = dataset.splits["train"]
    rows = np.asarray(train.rows)
    strata = np.zeros(len(rows)) if train.multi_label else train.store.table["label"][rows]
    completed = holdout.complete_splits(
        np.zeros(len(rows), dtype=np.int8),
        {"label": strata},
        train.get_image_name,
        identity=f"{dataset.name} val is test",
        holdout_fraction=share,
    )
    splits = {name: Split(train.store, rows[completed.column == index]) for index, name in enumerate(("train", "val"))}
    if not len(splits["val"]):
        raise DataError(f"{dataset.name} has too few images in train to hold any out: a class needs three for one")
    note = (
        f"val is the test split, as there is no other; {share:.0%} of each class of train"
        f" ({pluralize(len(splits['val']), 'image')}) is held out as val, and trained on too before test is evaluated"
    )
    splits["test"] = dataset.splits["val"]
    return dataclasses.replace(dataset, splits=splits, generated_splits=("val",), notes=(*dataset.notes, note))


def is_val_test(dataset: Dataset) -> bool:
    """Whether `use_val_as_test` made it."""
    return any(note.startswith("val is the test") for note in dataset.notes)


def plan_sweep(
    data: str,
    dataset: Dataset,
    share: float,
    model: str,
    trained: Trained,
    *,
    rates: Sequence[float],
    steps: int | None,
    batch: int | None,
    image_size: int | None,
    settings: Sequence[str] = (),
    runs: int,
    seed: int,
    micro_batches: int,
    preprocess: str | None,
) -> Sweep:
    """The paper's sweep of a model on a dataset, but for the settings given."""
    images = _count_train_and_val(dataset)
    config = trained.model.config
    recipe = recipes.build_finetune_recipe("paper", images, config.stride if isinstance(config, ViTConfig) else 1)
    default_steps = round(recipe.epochs * images / recipe.batch)
    recipe = override_length(recipe, default_steps, steps=steps, batch=batch, image_size=image_size)
    recipe = recipes.override_settings(recipe, settings, _RESERVED)
    return Sweep(
        data=data,
        dataset=dataset.name,
        share=share,
        images={name: len(split) for name, split in dataset.splits.items()},
        model=model,
        origin=to_json(trained.origin),
        preprocess=preprocess,
        recipe=dataclasses.replace(recipe, loss="sigmoid" if dataset.multi_label else "softmax"),
        steps=default_steps if steps is None else steps,
        rates=tuple(rates) or _get_size_settings(images)[1],
        runs=runs,
        seed=seed,
        micro_batches=micro_batches,
        settings=tuple(settings),
        val_is_test=is_val_test(dataset) or None,
    )


def override_length(
    recipe: Recipe, default_steps: int, *, steps: int | None, batch: int | None, image_size: int | None
) -> Recipe:
    """The recipe with the given values instead of its own; a shorter run has a shorter warm-up."""
    recipe = recipe if steps is None else scale_warmup(recipe, steps / default_steps)
    batch = recipe.batch if batch is None else batch
    image_size = recipe.image_size if image_size is None else image_size
    return dataclasses.replace(recipe, batch=batch, image_size=image_size)


def set_length(recipe: Recipe, steps: int, images: int, lr: float) -> Recipe:
    """The recipe with a number of steps over a number of images, at a learning rate."""
    optimizer = dataclasses.replace(recipe.optimizer, lr=lr)
    return dataclasses.replace(recipe, epochs=steps * recipe.batch / images, optimizer=optimizer)


def list_rate_cells(sweep: Sweep) -> list[Cell]:
    """A run at each learning rate, on train only, evaluated on val."""
    return [_make_cell(sweep, "rate", lr, sweep.seed) for lr in sweep.rates]


def list_test_cells(sweep: Sweep, lr: float) -> list[Cell]:
    """A run with each seed at the chosen learning rate, on train and val, evaluated on test."""
    return [_make_cell(sweep, "test", lr, seed) for seed in range(sweep.seed, sweep.seed + sweep.runs)]


def _make_cell(sweep: Sweep, stage: Literal["rate", "test"], lr: float, seed: int) -> Cell:
    is_test = stage == "test"
    images = sweep.images["train"] + (sweep.images["val"] if is_test else 0)
    return Cell(
        name=f"test-{lr}-seed-{seed}" if is_test else f"rate-{lr}",
        result_fields={"stage": stage, "lr": lr, "seed": seed},
        model=sweep.model,
        preprocess=sweep.preprocess,
        data={"name": sweep.data, "share": sweep.share} | ({"val_is_test": True} if sweep.val_is_test else {}),
        recipe=set_length(sweep.recipe, sweep.steps, images, lr),
        seed=seed,
        train_on_val=is_test,
        eval_split="test" if is_test else "val",
        micro_batches=sweep.micro_batches,
        keep_weights=is_test,
    )


def choose_learning_rate(results: Sequence[CellResult]) -> float:
    """The learning rate with the most correct images on val; of equals the one with the lowest loss."""
    done = [result for result in results if result["stage"] == "rate" and result["status"] == "done"]
    if not done:
        message = "the runs diverged at every learning rate: give lower ones with --rates"
        raise CellsError(message, DivergedError.exit_code)
    return float(max(done, key=lambda result: (result["correct"], -result["loss"]))["lr"])


def summarize_sweep(study: Mapping[str, Any], results: Sequence[CellResult]) -> dict[str, Any]:
    """The result of a sweep, as far as it is done."""
    rates = [result for result in results if result["stage"] == "rate"]
    by_rate = {str(result["lr"]): result.get("top1") for result in rates}
    is_complete = sum(is_ended(result) for result in rates) == len(study["rates"])
    lr = choose_learning_rate(rates) if is_complete and any(top1 is not None for top1 in by_rate.values()) else None
    done = [r for r in results if r["stage"] == "test" and r["status"] == "done" and r["lr"] == lr]
    accuracies = [result["top1"] for result in done]
    return {
        "study": "sweep",
        "dataset": study["dataset"],
        "model": study["model"],
        "validation": by_rate,
        "lr": lr,
        "test": accuracies,
        "images": done[0]["images"] if done else study["images"]["test"],
        **compute_mean_and_std(accuracies),
    }


def _count_train_and_val(dataset: Dataset) -> int:
    """The number of training images, with those held out as val."""
    return len(dataset.splits["train"]) + len(dataset.splits["val"])


def _get_size_settings(images: int) -> tuple[int, tuple[float, ...], float]:
    return next(row for row in (_LARGE_DATASET, _MEDIUM_DATASET, _SMALL_DATASET) if images >= row[0])
