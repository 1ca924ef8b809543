"""Recipes for fine-tuning by the number and size of images."""

import dataclasses
from typing import Any

import pytest

from vitrail.config import LoRAConfig, Recipe
from vitrail.recipes import build_finetune_recipe, choose_finetune_size, set_lora
from vitrail.training import schedule


def count_steps(recipe: Recipe, images: int) -> int:
    """Whole batches in all epochs; a part of a batch would be a mistake of rounding."""
    count = recipe.epochs * images / recipe.batch
    assert count == pytest.approx(round(count), abs=1e-6)
    return round(count)


@pytest.mark.parametrize(
    ("images", "length", "warmup"),
    [
        (1, 500, 100),
        (1_000, 500, 100),  # VTAB
        (6_149, 500, 100),  # Flowers
        (19_999, 500, 100),
        (20_000, 10_000, 500),
        (50_000, 10_000, 500),  # CIFAR: Dosovitskiy et al. 2021, table 4
        (499_999, 10_000, 500),
        (500_000, 20_000, 500),
        (1_281_167, 20_000, 500),  # ImageNet
    ],
)
def test_the_papers_fine_tuning(images: int, length: int, warmup: int) -> None:
    recipe = build_finetune_recipe("paper", images, 16)
    optimizer = recipe.optimizer
    assert count_steps(recipe, images) == length
    assert (optimizer.kind, optimizer.momentum, optimizer.weight_decay, optimizer.clip) == ("sgd", 0.9, 0, 1)
    assert (optimizer.head_lr, optimizer.layer_decay) == (None, 1)
    assert (recipe.batch, recipe.image_size, recipe.schedule.decay) == (512, 384, "cosine")
    assert (recipe.schedule.warmup, recipe.schedule.final_lr_scale) == (warmup, 0)
    assert (recipe.dropout, recipe.stochastic_depth, recipe.label_smoothing, recipe.loss) == (0, 0, 0, "softmax")
    assert (recipe.augment.mixup, recipe.augment.cutmix, recipe.augment.randaugment) == (0, 0, None)
    assert recipe.ema == (0.9999 if images >= 500_000 else 0)
    assert not recipe.ema_warmup


@pytest.mark.parametrize(
    ("images", "length", "milestones", "warmup", "mixup"),
    [
        (1_000, 500, (200, 300, 400), 100, 0.0),
        (19_999, 500, (200, 300, 400), 100, 0.0),
        (20_000, 10_000, (3_000, 6_000, 9_000), 500, 0.1),
        (499_999, 10_000, (3_000, 6_000, 9_000), 500, 0.1),
        (500_000, 20_000, (6_000, 12_000, 18_000), 500, 0.1),
    ],
)
def test_bits_own_rule(images: int, length: int, milestones: tuple[int, ...], warmup: int, mixup: float) -> None:
    """The steps of the authors' code: up to a milestone's own step the rate is as before, after it a tenth."""
    recipe = build_finetune_recipe("bit", images, 1)
    optimizer = recipe.optimizer
    assert (count_steps(recipe, images), recipe.batch, recipe.schedule.warmup) == (length, 512, warmup)
    assert (optimizer.kind, optimizer.lr, optimizer.momentum, optimizer.weight_decay) == ("sgd", 0.003, 0.9, 0)
    assert (recipe.augment.crop, recipe.augment.flip, recipe.augment.mixup) == ("window", True, mixup)
    assert optimizer.clip is None
    for drops, milestone in enumerate(milestones):
        assert schedule.lr_scale(recipe.schedule, milestone, length) == pytest.approx(10.0**-drops)
        assert schedule.lr_scale(recipe.schedule, milestone + 1, length) == pytest.approx(10.0 ** -(drops + 1))
    assert schedule.lr_scale(recipe.schedule, length - 1, length) == pytest.approx(1e-3)
    assert schedule.lr_scale(recipe.schedule, warmup // 2, length) == 0.5


@pytest.mark.parametrize(
    ("pixels", "crop", "room"), [(32 * 32, 128, 160), (96 * 96 - 1, 128, 160), (96 * 96, 480, 512)]
)
def test_bits_rule_chooses_the_resolution_by_the_area_of_images(pixels: int, crop: int, room: int) -> None:
    recipe = build_finetune_recipe("bit", 1000, 1, pixels=pixels)
    assert recipe.resize is not None
    assert recipe.image_size == crop
    assert round(crop * recipe.resize) == room


@pytest.mark.parametrize(("patch", "side"), [(8, 384), (14, 378), (16, 384), (32, 384), (1, 384)])
def test_the_papers_resolution_is_the_nearest_that_the_patch_divides(patch: int, side: int) -> None:
    assert build_finetune_recipe("paper", 1000, patch).image_size == side


@pytest.mark.parametrize(
    ("images", "batch", "length", "warmup"),
    [
        (1, 64, 500, 50),
        (499, 64, 500, 50),
        (1_000, 64, 500, 50),
        (1_600, 64, 500, 50),  # twenty epochs are 500 steps here
        (3_200, 64, 1_000, 100),
        (19_999, 64, 6_249, 624),
        (20_000, 256, 1_562, 156),
        (100_000, 256, 7_812, 781),
    ],
)
def test_the_default_takes_500_steps_or_20_epochs(images: int, batch: int, length: int, warmup: int) -> None:
    recipe = build_finetune_recipe("default", images, 16)
    assert (recipe.batch, count_steps(recipe, images), recipe.schedule.warmup) == (batch, length, warmup)
    assert (recipe.model, recipe.image_size, recipe.optimizer.kind) == (None, None, "adam")


def test_few_images_or_epochs_are_varied_little() -> None:
    def mixes(images: int, epochs: float | None = None) -> bool:
        augment = build_finetune_recipe("default", images, 16, epochs=epochs).augment
        assert bool(augment.mixup) == bool(augment.cutmix) == bool(augment.randaugment)
        return bool(augment.mixup)

    assert [mixes(images) for images in (10, 499, 500, 50_000)] == [False, False, True, True]
    assert [mixes(5_000, epochs) for epochs in (1, 14.9, 15, 100)] == [False, False, True, True]
    assert not mixes(100, 100)


@pytest.mark.parametrize("kind", ["default", "paper"])
def test_a_shorter_fine_tuning_has_a_shorter_warm_up(kind: Any) -> None:
    whole = build_finetune_recipe(kind, 6_400, 16)
    for share, rest in ((0.5, 0.5), (0.1, 0.1), (1, 1), (3, 1)):
        recipe = build_finetune_recipe(kind, 6_400, 16, epochs=share * whole.epochs)
        assert recipe.epochs == share * whole.epochs
        assert recipe.schedule.warmup == round(rest * whole.schedule.warmup)


@pytest.mark.parametrize(
    ("photo", "epochs", "side"),
    [
        (500, 12, 224),  # time enough: the model's own
        (128, 12, 224),
        (500, 11.9, 176),
        (500, 0.1, 176),  # a large photo loses by less
        (150, 1.9, 144),  # its own size, in whole patches
        (150, 2, 176),
        (128, 1, 144),
        (32, 1, 176),  # enlarged anyway
        (215, 1, 176),
    ],
)
def test_a_short_run_takes_smaller_images(photo: int, epochs: float, side: int) -> None:
    assert choose_finetune_size(224, 16, images=500, photo_size=photo, epochs=epochs) == side
    assert choose_finetune_size(224, 16, images=499, photo_size=photo, epochs=epochs) == 224


def test_the_side_is_one_that_patches_divide() -> None:
    for own, stride in ((384, 16), (224, 32), (518, 14), (32, 8), (16, 16)):
        for photo in (10, 100, 300, 1000):
            for epochs in (0.1, 5, 50):
                side = choose_finetune_size(own, stride, images=1000, photo_size=photo, epochs=epochs)
                assert 0 < side <= own
                assert side % stride == 0


def test_a_head_starts_from_a_probe_in_a_short_run_of_the_default_alone() -> None:
    assert build_finetune_recipe("default", 1000, 16, epochs=3.9).head_init == "probe"
    assert build_finetune_recipe("default", 1000, 16, epochs=4).head_init is None
    assert build_finetune_recipe("default", 1000, 16).head_init is None
    assert build_finetune_recipe("paper", 1000, 16, epochs=1).head_init is None


def test_a_rank_adds_lora_and_keeps_its_other_settings() -> None:
    recipe = build_finetune_recipe("paper", 1000, 16)
    assert set_lora(recipe, None) is recipe
    added = set_lora(recipe, 8)
    assert added.lora == LoRAConfig(rank=8)
    own = dataclasses.replace(recipe, lora=LoRAConfig(rank=2, dora=True))
    assert set_lora(own, 8).lora == LoRAConfig(rank=8, dora=True)
    assert set_lora(own, None).lora == LoRAConfig(rank=2, dora=True)


@pytest.mark.parametrize(("images", "lr"), [(100, 2e-4), (1_000, 4e-4)])
def test_lora_has_ten_times_the_default_learning_rate_in_all_blocks(images: int, lr: float) -> None:
    plain, added = (build_finetune_recipe("default", images, 16, lora=rank).optimizer for rank in (None, 8))
    assert (plain.lr, plain.layer_decay) == (lr, 0.75)
    assert added.lr == pytest.approx(10 * lr)
    assert (added.layer_decay, added.head_lr) == (1, plain.head_lr)
    assert (
        build_finetune_recipe("paper", images, 16, lora=8).optimizer
        == build_finetune_recipe("paper", images, 16).optimizer
    )
