"""Overrides of a recipe for one run, and the notes on what does not fit its dataset."""

import dataclasses

import pytest

from vitrail import recipes
from vitrail.training.recipe_overrides import (
    RecipeOverrides,
    override_recipe,
    shorten_warmup,
    warn_about_large_batch,
)

DIGITS = recipes.get_recipe("digits")


def test_no_override_changes_nothing() -> None:
    assert override_recipe(DIGITS, RecipeOverrides()) == DIGITS


def test_a_learning_rate_scales_the_others_and_a_shorter_run_its_warm_up() -> None:
    recipe = dataclasses.replace(
        DIGITS,
        epochs=10,
        optimizer=dataclasses.replace(DIGITS.optimizer, kind="muon", lr=0.02, adam_lr=0.001, head_lr=None),
        schedule=dataclasses.replace(DIGITS.schedule, warmup=100),
    )
    changed = override_recipe(recipe, RecipeOverrides(lr=0.01, epochs=5))
    assert (changed.optimizer.lr, changed.optimizer.adam_lr, changed.optimizer.head_lr) == (0.01, 0.0005, None)
    assert changed.schedule.warmup == 50
    assert override_recipe(recipe, RecipeOverrides(epochs=20)).schedule.warmup == 100
    assert override_recipe(recipe, RecipeOverrides(epochs=5, warmup=7)).schedule.warmup == 7


def test_a_warm_up_for_a_larger_dataset_becomes_a_tenth_of_the_run() -> None:
    notes: list[str] = []
    recipe = dataclasses.replace(DIGITS, epochs=10, schedule=dataclasses.replace(DIGITS.schedule, warmup=500))
    images = 5 * recipe.batch  # 50 steps
    assert shorten_warmup(recipe, images, notes.append).schedule.warmup == 5
    assert "this run of 50 steps takes 5 (--warmup changes it)" in notes[0]


@pytest.mark.parametrize(
    ("images", "steps"), [(1439, None), (64, None), (63, "60 steps"), (6, "6 steps"), (1, "1 step")]
)
def test_only_a_batch_larger_than_the_training_set_is_noted(images: int, steps: str | None) -> None:
    assert (DIGITS.batch, DIGITS.epochs) == (64, 60)
    notes: list[str] = []
    warn_about_large_batch(DIGITS, images, notes.append)
    assert len(notes) == (steps is not None)
    assert not notes or f"so the run has only {steps}; --batch N sets a smaller one" in notes[0]
