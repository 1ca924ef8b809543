"""Recipes for fine-tuning, chosen by the number of training images: vitrail's own, the paper's, and BiT-HyperRule."""

import dataclasses
from typing import Literal

from vitrail.config import AugmentConfig, LoRAConfig, OptimizerConfig, Recipe, ScheduleConfig

FinetuneKind = Literal["default", "paper", "bit"]

_FEW_IMAGES = 500  # training images below which the weights must change little
_PROBE_HEAD_EPOCHS = 4  # below this many epochs a head does better to start from a probe than from zeros
_STRONG_AUGMENT_EPOCHS = 15  # from this many epochs strong augmentation helps
_FULL_SIZE_EPOCHS = 12  # from this many epochs the model's own resolution is best
_SMALL_SIZE_EPOCHS = 2  # below this many epochs photos are trained on at about their own size
_MEDIUM_SIZE_RATIO, _MIN_SIZE_RATIO = 11 / 14, 9 / 14  # of the model's size: 176 and 144 of 224 pixels


def build_finetune_recipe(
    kind: FinetuneKind,
    images: int,
    patch: int,
    *,
    epochs: float | None = None,
    pixels: int = 224 * 224,
    lora: int | None = None,
) -> Recipe:
    """The recipe to fine-tune a model on `images` training images; `patch` is the stride of its patches.

    `pixels` is the area of a typical image of the dataset, by which BiT's rule chooses the resolution. `lora` is the
    rank of LoRA's updates, if they are trained instead of the layers.
    """
    if kind == "bit":
        recipe = _build_bit_recipe(images, patch, pixels)
    elif kind == "paper":
        recipe = _build_paper_recipe(images, patch)
    else:
        recipe = _build_default_recipe(images, epochs, with_lora=lora is not None)
    recipe = set_lora(recipe, lora)
    if epochs is None:
        return recipe
    warmup = round(recipe.schedule.warmup * min(1.0, epochs / recipe.epochs))
    return dataclasses.replace(recipe, epochs=epochs, schedule=dataclasses.replace(recipe.schedule, warmup=warmup))


def set_lora(recipe: Recipe, rank: int | None) -> Recipe:
    """The recipe with LoRA of that rank, unless it is None; its other settings, if it has LoRA already, stay."""
    if rank is None:
        return recipe
    if recipe.lora is not None:
        return dataclasses.replace(recipe, lora=dataclasses.replace(recipe.lora, rank=rank))
    return dataclasses.replace(recipe, lora=LoRAConfig(rank=rank))


def _build_default_recipe(images: int, epochs: float | None, *, with_lora: bool) -> Recipe:
    """The settings that did best on splits of training images: docs/experiments/finetuning.md.

    With few images the weights must change little. Strong augmentation harms there, as it does in a short run. LoRA's
    updates start from zero and want ten times the learning rate, in all blocks.
    """
    few = images < _FEW_IMAGES
    batch = 64 if images < 20_000 else 256
    steps = max(500, 20 * images // batch)
    augment = AugmentConfig(area=(0.25, 1.0))
    if not few and (epochs is None or epochs >= _STRONG_AUGMENT_EPOCHS):
        augment = dataclasses.replace(augment, randaugment=(2, 10), mixup=0.8, cutmix=1.0)
    lr, layer_decay = 2e-4 if few else 4e-4, 0.75
    if with_lora:
        lr, layer_decay = 10 * lr, 1.0
    return Recipe(
        model=None,
        image_size=None,
        batch=batch,
        epochs=steps * batch / images,
        optimizer=OptimizerConfig(lr=lr, head_lr=2e-3, weight_decay=0.05, clip=1.0, layer_decay=layer_decay),
        schedule=ScheduleConfig(warmup=steps // 10),
        augment=augment,
        label_smoothing=0.1,
        head_init="probe" if epochs is not None and epochs < _PROBE_HEAD_EPOCHS else None,
        source="vitrail",
    )


def choose_finetune_size(model_size: int, stride: int, *, images: int, photo_size: int, epochs: float) -> int:
    """The image side for a short run that did best on splits of training images: docs/experiments/finetuning.md.

    `photo_size` is the short side of the images; `epochs` is how many there is time for at `model_size`. Smaller images
    allow more epochs, which a small dataset does not need. Photos smaller than the model's input lose little by it.
    """
    if epochs >= _FULL_SIZE_EPOCHS or images < _FEW_IMAGES:
        return model_size
    ratio = _MEDIUM_SIZE_RATIO
    if epochs < _SMALL_SIZE_EPOCHS and model_size / 2 <= photo_size < model_size:
        ratio = min(ratio, max(_MIN_SIZE_RATIO, photo_size / model_size))
    return max(1, round(ratio * model_size / stride)) * stride


def _choose_length(images: int) -> tuple[int, int]:
    """Steps and warm-up steps by the size of the dataset, which the paper and BiT-HyperRule share."""
    if images < 20_000:
        return 500, 100
    return (20_000, 500) if images >= 500_000 else (10_000, 500)


def _build_paper_recipe(images: int, patch: int) -> Recipe:
    """SGD, batch 512, 384 pixels; the number of steps by the size of the dataset, as for the paper's datasets.

    The paper chose the learning rate from a grid for each dataset. These are the authors' later choices by size.
    """
    large = images >= 500_000
    steps, warmup = _choose_length(images)
    return Recipe(
        model=None,
        image_size=round(384 / patch) * patch,
        resize=None if large else 7 / 6,
        batch=512,
        epochs=steps * 512 / images,
        optimizer=OptimizerConfig(kind="sgd", lr=0.03 if large else 0.003, momentum=0.9, clip=1.0),
        schedule=ScheduleConfig(warmup=warmup),
        augment=AugmentConfig(crop="inception" if large else "window"),
        ema=0.9999 if large else 0.0,
        ema_warmup=False,
        source="Dosovitskiy et al. 2021, table 4",
    )


def _build_bit_recipe(images: int, patch: int, pixels: int) -> Recipe:
    """BiT-HyperRule (Kolesnikov et al. 2020): resolution by the area of images, length and mixup by their number.

    The numbers are those of the authors' code: below 20,000 images the learning rate falls after 40, 60 and 80 % of the
    run, after 100 steps of warm-up. Images are resized to a square, `resize` times the crop, whatever their shape.
    """
    small = images < 20_000
    steps, warmup = _choose_length(images)
    crop, side = (128, 160) if pixels < 96 * 96 else (480, 512)
    milestones = (0.4, 0.6, 0.8) if small else (0.3, 0.6, 0.9)
    return Recipe(
        model=None,
        image_size=round(crop / patch) * patch,
        resize=side / crop,
        resize_whole_image=True,
        batch=512,
        epochs=steps * 512 / images,
        optimizer=OptimizerConfig(kind="sgd", lr=0.003, momentum=0.9),
        schedule=ScheduleConfig(decay="step", warmup=warmup, milestones=milestones),
        augment=AugmentConfig(crop="window", mixup=0.0 if small else 0.1),
        source="Kolesnikov et al. 2020, BiT-HyperRule",
    )
