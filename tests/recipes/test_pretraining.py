"""The recipes by name against the papers' tables, row by row."""

import pytest

from vitrail import presets
from vitrail.config import MaskedConfig
from vitrail.errors import UsageError
from vitrail.recipes import RECIPES, TRAIN_IMAGE_COUNTS, get_recipe

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
    recipe = get_recipe(name)
    row = (recipe.epochs, recipe.optimizer.lr, recipe.schedule.decay, recipe.optimizer.weight_decay, recipe.dropout)
    assert row == ROWS[name]
    assert (recipe.batch, recipe.image_size, recipe.schedule.warmup) == (4096, 224, 10_000)
    assert (recipe.optimizer.kind, recipe.optimizer.beta1, recipe.optimizer.beta2) == ("adam", 0.9, 0.999)
    assert recipe.optimizer.clip == (1.0 if name.endswith("imagenet") else None)
    config = presets.get_preset_config(recipe.model, **recipe.settings)
    assert getattr(config, "hidden_head", False) == (not name.startswith("bit-"))  # 3.1: at pre-training, of ViTs


def test_the_table_holds_every_row_and_nothing_unnamed() -> None:
    assert set(ROWS) == {name for name, recipe in RECIPES.items() if recipe.source.endswith("2021, table 3")}


@pytest.mark.parametrize(("name", "model"), [("bit-r152x2-jft-14", "bit-r152x2"), ("bit-r200x3-jft", "bit-r200x3")])
def test_the_long_resnets_of_the_scaling_plot(name: str, model: str) -> None:
    """Table 6 has them with 14 epochs, and no table has their learning rate, which `source` says."""
    recipe = get_recipe(name)
    assert (recipe.model, recipe.epochs, recipe.batch, recipe.optimizer.weight_decay) == (model, 14, 4096, 0.1)
    assert (recipe.schedule.decay, recipe.data, recipe.settings) == ("linear", "jft", {})
    assert "states no learning rate" in recipe.source


@pytest.mark.parametrize(("name", "steps"), [("mpp-b16-jft", 1_000_000), ("mpp-b16-jft-100k", 100_000)])
def test_the_papers_self_supervision(name: str, steps: int) -> None:
    """Dosovitskiy et al. 2021, B.1.2."""
    recipe = get_recipe(name)
    assert recipe.masked == MaskedConfig(kind="mpp", mask_ratio=0.5, target="mean-color")
    assert recipe.epochs * TRAIN_IMAGE_COUNTS["jft"] / recipe.batch == pytest.approx(steps)
    optimizer, schedule = recipe.optimizer, recipe.schedule
    assert (recipe.model, recipe.batch, recipe.image_size) == ("b16", 4096, 224)
    assert (optimizer.kind, optimizer.lr, optimizer.beta1, optimizer.beta2) == ("adam", 2e-4, 0.9, 0.999)
    assert (schedule.decay, schedule.warmup) == ("cosine", 10_000)


def test_the_masked_autoencoders_pre_training() -> None:
    """He et al. 2022, table 8."""
    recipe = get_recipe("mae-b16-imagenet")
    assert recipe.masked == MaskedConfig(kind="mae", mask_ratio=0.75, target="normalized-pixels")
    optimizer, schedule = recipe.optimizer, recipe.schedule
    assert (optimizer.kind, optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == ("adam", 0.9, 0.95, 0.05)
    assert optimizer.lr == pytest.approx(1.5e-4 * recipe.batch / 256)
    assert (recipe.batch, recipe.epochs, schedule.decay) == (4096, 800, "cosine")
    assert schedule.warmup * recipe.batch / TRAIN_IMAGE_COUNTS["imagenet"] == pytest.approx(40, abs=0.01)
    assert (recipe.augment.crop, recipe.augment.area, recipe.augment.flip) == ("inception", (0.2, 1.0), True)
    assert recipe.augment.randaugment is None


@pytest.mark.parametrize("name", ["cifar10", "tiny-imagenet"])
def test_small_recipes_without_labels_train_the_model_of_the_one_with_labels(name: str) -> None:
    supervised = get_recipe(name)
    for kind in ("mpp", "mae"):
        recipe = get_recipe(f"{kind}-{name}")
        assert recipe.masked is not None
        assert recipe.masked.kind == kind
        for field in ("model", "settings", "image_size", "batch", "data", "mimetic"):
            assert getattr(recipe, field) == getattr(supervised, field)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_names_a_model_that_can_be_built(name: str) -> None:
    recipe = RECIPES[name]
    presets.get_preset_config(recipe.model, image_size=(recipe.image_size, recipe.image_size), **recipe.settings)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no recipe 'vit-b16-jtf': did you mean vit-b16-jft\?"):
        get_recipe("vit-b16-jtf")
