"""The recipes against the paper's tables, row by row."""

import pytest

from vitrail import presets
from vitrail.recipes import RECIPES, named

ROWS = {  # epochs, learning rate, decay, weight decay, dropout (Dosovitskiy et al. 2021, table 3)
    "vit-b16-jft": (7, 8e-4, "linear", 0.1, 0.0),
    "vit-b32-jft": (7, 8e-4, "linear", 0.1, 0.0),
    "vit-l32-jft": (7, 6e-4, "linear", 0.1, 0.0),
    "vit-l16-jft": (7, 4e-4, "linear", 0.1, 0.0),
    "vit-l16-jft-14": (14, 4e-4, "linear", 0.1, 0.0),
    "vit-h14-jft": (14, 3e-4, "linear", 0.1, 0.0),
    "bit-r50x1-jft": (7, 1e-3, "linear", 0.1, 0.0),
    "bit-r50x2-jft": (7, 1e-3, "linear", 0.1, 0.0),
    "bit-r101x1-jft": (7, 8e-4, "linear", 0.1, 0.0),
    "bit-r152x1-jft": (7, 6e-4, "linear", 0.1, 0.0),
    "bit-r152x2-jft": (7, 6e-4, "linear", 0.1, 0.0),
    "r50-b16-jft": (7, 8e-4, "linear", 0.1, 0.0),
    "r50-b32-jft": (7, 8e-4, "linear", 0.1, 0.0),
    "r50-l32-jft": (7, 2e-4, "linear", 0.1, 0.0),
    "r50-l16-jft": (7, 4e-4, "linear", 0.1, 0.0),
    "r50-l16-jft-14": (14, 4e-4, "linear", 0.1, 0.0),
    "vit-b16-i21k": (90, 1e-3, "linear", 0.03, 0.1),
    "vit-b32-i21k": (90, 1e-3, "linear", 0.03, 0.1),
    "vit-l16-i21k": (30, 1e-3, "linear", 0.03, 0.1),
    "vit-l16-i21k-90": (90, 1e-3, "linear", 0.03, 0.1),
    "vit-l32-i21k": (30, 1e-3, "linear", 0.03, 0.1),
    "vit-l32-i21k-90": (90, 1e-3, "linear", 0.03, 0.1),
    "vit-b16-imagenet": (300, 3e-3, "cosine", 0.3, 0.1),
    "vit-b32-imagenet": (300, 3e-3, "cosine", 0.3, 0.1),
    "vit-l16-imagenet": (300, 3e-3, "cosine", 0.3, 0.1),
    "vit-l32-imagenet": (300, 3e-3, "cosine", 0.3, 0.1),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_paper(name: str) -> None:
    recipe = named(name)
    row = (recipe.epochs, recipe.optimiser.lr, recipe.schedule.decay, recipe.optimiser.weight_decay, recipe.dropout)
    assert row == ROWS[name]
    assert (recipe.batch, recipe.image_size, recipe.schedule.warmup) == (4096, 224, 10_000)
    assert (recipe.optimiser.kind, recipe.optimiser.beta1, recipe.optimiser.beta2) == ("adam", 0.9, 0.999)
    assert recipe.optimiser.clip == (1.0 if name.endswith("imagenet") else None)


def test_the_table_holds_every_row_and_nothing_unnamed() -> None:
    assert set(ROWS) == {name for name, recipe in RECIPES.items() if recipe.source.startswith("Dosovitskiy")}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_names_a_model_that_can_be_built(name: str) -> None:
    recipe = RECIPES[name]
    presets.config(recipe.model, image_size=(recipe.image_size, recipe.image_size), **recipe.settings)
