"""Train variants of a recipe from random weights over the same seeds, as in the paper's appendix D.

Variants are compared on val. Test is not read, so it stays unbiased for the chosen variant.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vitrail.config import Recipe
from vitrail.data.dataset import Dataset
from vitrail.errors import UsageError
from vitrail.recipes import ABLATION_RESERVED, override_settings
from vitrail.studies.grid import Cell, CellResult, check_positive, compute_mean_and_std

UNCHANGED_VARIANT = "unchanged"
_UNSAFE_CHARACTERS = re.compile(r"[^\w.+-]+")
VAL_SHARE = 0.1  # of train that becomes val if the dataset has none


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablation:
    """A recipe and its variants on one dataset."""

    study: str = "ablate"
    data: str
    dataset: str
    """The dataset's own name."""
    images: dict[str, int]
    recipe: str
    variants: dict[str, Recipe]
    runs: int
    seed: int
    micro_batches: int

    def __post_init__(self) -> None:
        check_positive(runs=self.runs, micro_batches=self.micro_batches)


def list_variants(recipe: Recipe, variants: Sequence[str]) -> dict[str, Recipe]:
    """The unchanged recipe, and the recipe of each variant; NAME=VALUE+NAME=VALUE changes several settings at once."""
    if recipe.masked is not None:
        raise UsageError("a recipe without labels has no accuracy to compare: choose a supervised one")
    if not variants or len(set(variants)) < len(variants):
        raise UsageError(f"--variants is {list(variants)}; give settings such as positions=none, each once")
    changed = {text: override_settings(recipe, text.split("+"), ABLATION_RESERVED) for text in variants}
    return {UNCHANGED_VARIANT: recipe} | changed


def plan_ablation(
    data: str, dataset: Dataset, name: str, variants: Mapping[str, Recipe], *, runs: int, seed: int, micro_batches: int
) -> Ablation:
    """The study of a recipe's variants on a dataset."""
    return Ablation(
        data=data,
        dataset=dataset.name,
        images={part: len(split) for part, split in dataset.splits.items()},
        recipe=name,
        variants=dict(variants),
        runs=runs,
        seed=seed,
        micro_batches=micro_batches,
    )


def list_ablation_cells(study: Ablation) -> list[Cell]:
    """A run of each variant with each seed, evaluated on val."""
    return [
        Cell(
            name=f"{number}-{_UNSAFE_CHARACTERS.sub('-', variant)[:80]}-seed-{seed}",
            result_fields={"variant": variant, "seed": seed},
            model=str(recipe.model),
            data={"name": study.data, "share": VAL_SHARE},
            recipe=recipe,
            seed=seed,
            eval_split="val",
            micro_batches=study.micro_batches,
            keep_weights=True,
        )
        for seed in range(study.seed, study.seed + study.runs)
        for number, (variant, recipe) in enumerate(study.variants.items())
    ]


def summarize_ablation(study: Mapping[str, Any], results: Sequence[CellResult]) -> dict[str, Any]:
    """Mean and standard deviation of each variant over its finished seeds."""
    done = [result for result in results if result["status"] == "done"]
    by_variant = {
        variant: compute_mean_and_std([result["top1"] for result in done if result["variant"] == variant])
        for variant in study["variants"]
    }
    return {
        "study": "ablate",
        "dataset": study["dataset"],
        "recipe": study["recipe"],
        "images": study["images"]["val"],
        "variants": by_variant,
    }
