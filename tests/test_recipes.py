"""The recipes against the paper's tables, row by row, and what fine-tuning makes of the number of images."""

from typing import Any

import pytest

from vitrail import presets
from vitrail.config import MaskedConfig, Recipe
from vitrail.errors import UsageError
from vitrail.recipes import (
    RECIPES,
    TRAIN_IMAGE_COUNTS,
    build_finetune_recipe,
    choose_finetune_size,
    get_recipe,
    override_settings,
)
from vitrail.train import schedule

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
    assert recipe.masked == MaskedConfig(kind="mpp", mask_ratio=0.5, target="mean-colour")
    assert recipe.epochs * TRAIN_IMAGE_COUNTS["jft"] / recipe.batch == pytest.approx(steps)
    optimiser, schedule = recipe.optimizer, recipe.schedule
    assert (recipe.model, recipe.batch, recipe.image_size) == ("b16", 4096, 224)
    assert (optimiser.kind, optimiser.lr, optimiser.beta1, optimiser.beta2) == ("adam", 2e-4, 0.9, 0.999)
    assert (schedule.decay, schedule.warmup) == ("cosine", 10_000)


def test_the_masked_autoencoders_pre_training() -> None:
    """He et al. 2022, table 8."""
    recipe = get_recipe("mae-b16-imagenet")
    assert recipe.masked == MaskedConfig(kind="mae", mask_ratio=0.75, target="normalised-pixels")
    optimiser, schedule = recipe.optimizer, recipe.schedule
    assert (optimiser.kind, optimiser.beta1, optimiser.beta2, optimiser.weight_decay) == ("adam", 0.9, 0.95, 0.05)
    assert optimiser.lr == pytest.approx(1.5e-4 * recipe.batch / 256)
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


# --- other settings --------------------------------------------------------------------------------------------------


def test_every_part_of_a_recipe_can_be_set_otherwise() -> None:
    changed = override_settings(
        get_recipe("vit-b16-imagenet"),
        ["positions=none", "pool=norm-mean", "class_token=false", "hidden_head=false", "depth=6", "width=384",
         "mlp=768", "optimizer=sgd", "lr=.1", "weight_decay=0.03", "clip=none", "decay=linear",
         "randaugment=2,10", "dropout=0"],
    )  # fmt: skip
    settings = {"pool": "norm-mean", "class_token": False, "hidden_head": False, "positions": "none"}
    assert changed.settings == settings | {"depth": 6, "width": 384, "mlp": 768}
    optimiser = changed.optimizer
    assert (optimiser.kind, optimiser.lr, optimiser.weight_decay, optimiser.clip) == ("sgd", 0.1, 0.03, None)
    assert (changed.schedule.decay, changed.augment.randaugment, changed.dropout) == ("linear", (2, 10), 0)
    assert override_settings(get_recipe("vit-h14-jft"), ["depth=31"]).result is None  # which was that of another model
    assert override_settings(get_recipe("vit-h14-jft"), []) == get_recipe("vit-h14-jft")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("depht=8", r"no setting 'depht': did you mean depth\? --set takes adam_lr, "),
        ("depth", "'depth' says no value; give NAME=VALUE"),
        ("depth=deep", "depth is 'deep'; it must be int"),
        ("depth=0", "depth is 0; it must be from 1 to"),
        ("width=100", "width 100 is not a multiple of heads 12"),
        ("positions=3d", "positions is '3d'; it must be one of none, learned-1d"),
        ("optimizer=lamb", "optimizer is 'lamb'; it must be one of adam, sgd, muon"),
        ("decay=0.1", "decay is '0.1'; it must be one of cosine, linear"),
        ("weight_decay=-1", "weight_decay is -1.0; it must be 0 or more"),
        ("hidden_head=2", "hidden_head is 2; it must be bool"),
        ("randaugment=2", "randaugment is 2; it must be 2 of int"),
        ("warmup=5", "warmup has an option of its own: --warmup"),
        ("classes=5", "no setting 'classes'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_name_and_rule(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        override_settings(get_recipe("vit-b16-imagenet"), [text])


def test_the_shape_of_a_resnet_or_of_a_trained_model_is_its_own() -> None:
    with pytest.raises(UsageError, match="depth is for recipes of ViTs with random weights: bit-r50x1 is a ResNet"):
        override_settings(get_recipe("bit-r50x1-jft"), ["depth=3"])
    with pytest.raises(UsageError, match=r"positions is for recipes of ViTs .*: a trained model keeps its own"):
        override_settings(build_finetune_recipe("paper", 1000, 16), ["positions=none"])
    with pytest.raises(UsageError, match="--set gives depth twice"):
        override_settings(get_recipe("vit-b16-imagenet"), ["depth=3", "depth=4"])


# --- fine-tuning -----------------------------------------------------------------------------------------------------


def steps(recipe: Recipe, images: int) -> int:
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
    optimiser = recipe.optimizer
    assert steps(recipe, images) == length
    assert (optimiser.kind, optimiser.momentum, optimiser.weight_decay, optimiser.clip) == ("sgd", 0.9, 0, 1)
    assert (optimiser.head_lr, optimiser.layer_decay) == (None, 1)
    assert (recipe.batch, recipe.image_size, recipe.schedule.decay) == (512, 384, "cosine")
    assert (recipe.schedule.warmup, recipe.schedule.final_lr_scale) == (warmup, 0)
    assert (recipe.dropout, recipe.stochastic_depth, recipe.label_smoothing, recipe.loss) == (0, 0, 0, "softmax")
    assert (recipe.augment.mixup, recipe.augment.cutmix, recipe.augment.randaugment) == (0, 0, None)
    assert recipe.ema == (0.9999 if images >= 500_000 else 0)
    assert not recipe.ema_warmup


@pytest.mark.parametrize(
    ("images", "length", "stairs", "warmup", "mixup"),
    [
        (1_000, 500, (200, 300, 400), 100, 0.0),
        (19_999, 500, (200, 300, 400), 100, 0.0),
        (20_000, 10_000, (3_000, 6_000, 9_000), 500, 0.1),
        (499_999, 10_000, (3_000, 6_000, 9_000), 500, 0.1),
        (500_000, 20_000, (6_000, 12_000, 18_000), 500, 0.1),
    ],
)
def test_bits_own_rule(images: int, length: int, stairs: tuple[int, ...], warmup: int, mixup: float) -> None:
    """The steps of the authors' code: up to a stair's own step the rate is as before, behind it a tenth."""
    recipe = build_finetune_recipe("bit", images, 1)
    optimiser = recipe.optimizer
    assert (steps(recipe, images), recipe.batch, recipe.schedule.warmup) == (length, 512, warmup)
    assert (optimiser.kind, optimiser.lr, optimiser.momentum, optimiser.weight_decay) == ("sgd", 0.003, 0.9, 0)
    assert (recipe.augment.crop, recipe.augment.flip, recipe.augment.mixup) == ("window", True, mixup)
    assert optimiser.clip is None
    for fallen, stair in enumerate(stairs):
        assert schedule.lr_scale(recipe.schedule, stair, length) == pytest.approx(10.0**-fallen)
        assert schedule.lr_scale(recipe.schedule, stair + 1, length) == pytest.approx(10.0 ** -(fallen + 1))
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
    assert (recipe.batch, steps(recipe, images), recipe.schedule.warmup) == (batch, length, warmup)
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


# --- a short run of fine-tuning --------------------------------------------------------------------------------------


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
