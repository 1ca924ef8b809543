"""The paper's transfer to one set: the learning rate chosen on val, then all of train over several seeds, then test.

Test is not read before the rate is chosen.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitrail import recipes
from vitrail.config import Recipe, ViTConfig, to_json
from vitrail.data import holdout
from vitrail.data.dataset import Dataset, Split
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.plurals import pluralize
from vitrail.studies.grid import Cell, CellResult, CellsError
from vitrail.train.recipe_overrides import scale_warmup
from vitrail.train.step import DivergedError
from vitrail.weights.trained import Trained

# Dosovitskiy et al. 2021, table 4: from so many training images on, the rates tried and the share of train held out
_LARGE_DATASET = (500_000, (0.003, 0.01, 0.03, 0.06), 0.01)
_MEDIUM_DATASET = (20_000, (0.001, 0.003, 0.01, 0.03), 0.02)
_SMALL_DATASET = (0, (0.001, 0.003, 0.01, 0.03), 0.1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """A transfer of one model to one set."""

    study: str = "sweep"
    data: str
    dataset: str
    """The set's own name."""
    share: float
    """Of train that becomes val where the set has none."""
    images: dict[str, int]
    model: str
    origin: dict[str, Any]
    preprocess: str | None
    recipe: Recipe
    """Of all of train; its learning rate is not used."""
    steps: int
    rates: tuple[float, ...]
    runs: int
    seed: int
    micro_batches: int
    settings: tuple[str, ...] = ()
    """NAME=VALUE of the recipe that are not the paper's."""
    val_is_test: bool | None = None
    """Whether the set's val is measured on, and part of train is val."""

    def __post_init__(self) -> None:
        if not self.rates or len(set(self.rates)) < len(self.rates) or min(self.rates) <= 0:
            raise UsageError(f"--rates is {list(self.rates)}; give learning rates above 0, each once")
        if self.runs < 1 or self.steps < 1 or self.micro_batches < 1:
            raise UsageError(f"runs {self.runs}, steps {self.steps} and micro-batches {self.micro_batches}: 1 at least")


def open_sweep_dataset(data: str) -> tuple[Dataset, float]:
    """The set, and the share of train that becomes val where it has none: the paper's, by the set's size.

    Of a set with train and val alone, such as ImageNet, val is the test, and a share of train is held out to choose by.
    """
    share = _SMALL_DATASET[2]
    dataset = open_dataset(data, holdout_fraction=share)
    if {"train", "val"} <= dataset.splits.keys() and "test" not in dataset.splits and not dataset.generated_splits:
        share = _get_size_settings(len(dataset.splits["train"]))[2]
        return use_val_as_test(dataset, share), share
    missing = {"train", "val", "test"} - dataset.splits.keys()
    if missing:
        raise DataError(f"{dataset.name} has no {min(missing)}; a sweep chooses on val and measures on test")
    wanted = _get_size_settings(_count_train_and_val(dataset))[2]
    if "val" in dataset.generated_splits and wanted != share:
        share, dataset = wanted, open_dataset(data, holdout_fraction=wanted)
    return dataset, share


def use_val_as_test(dataset: Dataset, share: float) -> Dataset:
    """The set with its val as test, and a share of each class of train held out as val."""
    train = dataset.splits["train"]
    rows = np.asarray(train.rows)
    strata = np.zeros(len(rows)) if train.multi_label else train.store.table["label"][rows]
    found = holdout.complete_splits(
        np.zeros(len(rows), dtype=np.int8),
        strata,
        train.get_image_name,
        identity=f"{dataset.name} val is test",
        holdout_fraction=share,
    )
    splits = {name: Split(train.store, rows[found.column == place]) for place, name in enumerate(("train", "val"))}
    held = len(splits["val"])
    if not held:
        raise DataError(f"{dataset.name} has too few images in train to hold some out: of a class with three, one is")
    note = (
        f"val is the test, as there is no other; {share:.0%} of each class of train ({pluralize(held, 'image')}) is held"
        " out to choose by, and trained on again before test is measured"
    )
    splits["test"] = dataset.splits["val"]
    return dataclasses.replace(dataset, splits=splits, generated_splits=("val",), notes=(*dataset.notes, note))


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
    """The study of a model and a set: the paper's, but for what is given."""
    images = _count_train_and_val(dataset)
    config = trained.model.config
    recipe = recipes.build_finetune_recipe("paper", images, config.stride if isinstance(config, ViTConfig) else 1)
    if rate := next((text for text in settings if text.startswith("lr=")), None):
        raise UsageError(f"--set {rate}: a sweep chooses the rate; --rates gives those to try")
    recipe = recipes.override_settings(recipe, settings)
    usual = round(recipe.epochs * images / recipe.batch)
    return Sweep(
        data=data,
        dataset=dataset.name,
        share=share,
        images={name: len(split) for name, split in dataset.splits.items()},
        model=model,
        origin=to_json(trained.origin),
        preprocess=preprocess,
        recipe=dataclasses.replace(
            override_length(recipe, usual, steps=steps, batch=batch, image_size=image_size),
            loss="sigmoid" if dataset.multi_label else "softmax",
        ),
        steps=usual if steps is None else steps,
        rates=tuple(rates) or _get_size_settings(images)[1],
        runs=runs,
        seed=seed,
        micro_batches=micro_batches,
        settings=tuple(settings),
        val_is_test=True if any(note.startswith("val is the test") for note in dataset.notes) else None,
    )


def override_length(
    recipe: Recipe, default_steps: int, *, steps: int | None, batch: int | None, image_size: int | None
) -> Recipe:
    """The recipe with what was given in its place; a shorter run has a shorter warm-up."""
    recipe = recipe if steps is None else scale_warmup(recipe, steps / default_steps)
    return dataclasses.replace(
        recipe,
        batch=recipe.batch if batch is None else batch,
        image_size=recipe.image_size if image_size is None else image_size,
    )


def set_length(recipe: Recipe, steps: int, images: int, lr: float) -> Recipe:
    """The recipe of so many steps over a set of so many images, at a learning rate."""
    optimizer = dataclasses.replace(recipe.optimizer, lr=lr)
    return dataclasses.replace(recipe, epochs=steps * recipe.batch / images, optimizer=optimizer)


def list_rate_cells(sweep: Sweep) -> list[Cell]:
    """A run at each rate, on train alone, measured on val."""
    images = sweep.images["train"]
    return [
        _make_cell(
            sweep,
            name=f"rate-{lr}",
            about={"stage": "rate", "lr": lr, "seed": sweep.seed},
            recipe=set_length(sweep.recipe, sweep.steps, images, lr),
            seed=sweep.seed,
            measured="val",
        )
        for lr in sweep.rates
    ]


def list_test_cells(sweep: Sweep, lr: float) -> list[Cell]:
    """A run with each seed at the chosen rate, on all of train, measured on test."""
    images = sweep.images["train"] + sweep.images["val"]
    return [
        _make_cell(
            sweep,
            name=f"test-{lr}-seed-{seed}",
            about={"stage": "test", "lr": lr, "seed": seed},
            recipe=set_length(sweep.recipe, sweep.steps, images, lr),
            seed=seed,
            everything=True,
            measured="test",
            keeps=True,
        )
        for seed in range(sweep.seed, sweep.seed + sweep.runs)
    ]


def _make_cell(sweep: Sweep, **fields: Any) -> Cell:
    return Cell(
        model=sweep.model,
        preprocess=sweep.preprocess,
        data={"name": sweep.data, "share": sweep.share} | ({"val_is_test": True} if sweep.val_is_test else {}),
        micro_batches=sweep.micro_batches,
        **fields,
    )


def choose_learning_rate(results: Sequence[CellResult]) -> float:
    """The rate with the most right answers on val; of equals that of the lowest loss."""
    done = [record for record in results if record["stage"] == "rate" and record["status"] == "done"]
    if not done:
        raise CellsError("the runs diverged at every rate: give lower ones with --rates", DivergedError.exit_code)
    best = max(done, key=lambda record: (record["right"], -record["loss"]))
    return float(best["lr"])


def summarize_sweep(study: Mapping[str, Any], results: Sequence[CellResult]) -> dict[str, Any]:
    """What a sweep came to, as far as it is."""
    rates = [record for record in results if record["stage"] == "rate"]
    by_rate = {str(record["lr"]): record.get("top1") for record in rates}
    whole = sum(record["status"] in ("done", "diverged") for record in rates) == len(study["rates"])
    lr = choose_learning_rate(rates) if whole and any(found is not None for found in by_rate.values()) else None
    done = [r for r in results if r["stage"] == "test" and r["status"] == "done" and r["lr"] == lr]
    return {
        "study": "sweep",
        "set": study["dataset"],
        "model": study["model"],
        "validation": by_rate,
        "lr": lr,
        "test": [record["top1"] for record in done],
        "images": done[0]["images"] if done else study["images"]["test"],
        **compute_mean_and_std([record["top1"] for record in done]),
    }


def compute_mean_and_std(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation (of two and more) and number."""
    return {
        "mean": statistics.mean(values) if values else None,
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "n": len(values),
    }


def _count_train_and_val(dataset: Dataset) -> int:
    """Training images, those held out of them for val included."""
    return len(dataset.splits["train"]) + len(dataset.splits["val"])


def _get_size_settings(images: int) -> tuple[int, tuple[float, ...], float]:
    return next(row for row in (_LARGE_DATASET, _MEDIUM_DATASET, _SMALL_DATASET) if images >= row[0])
