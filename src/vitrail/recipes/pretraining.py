"""Training from random weights by name: the paper's tables, the authors' later recipes, and small ones for one machine.

`finetuning` has the recipes for trained models, which depend on the number of images.
"""

import dataclasses
import difflib
from typing import Any, get_args

from vitrail.config import AugmentConfig, DistillationConfig, MaskedConfig, OptimizerConfig, Recipe, ScheduleConfig
from vitrail.errors import UsageError
from vitrail.recipes.finetuning import FinetuneKind

TRAIN_IMAGE_COUNTS = {  # training images of the datasets that recipes are for
    "jft": 303_000_000,
    "imagenet21k": 14_197_122,
    "imagenet": 1_281_167,
    "tiny-imagenet": 100_000,
    "cifar10": 50_000,
    "digits": 1_439,
}
_PAPER_SOURCE = "Dosovitskiy et al. 2021, table 3"
_LONGER_SOURCE = "Dosovitskiy et al. 2021, table 6, which states no learning rate: that of R152x2 in table 3"
_WARMUP_STEPS = 10_000


def _build_paper_recipe(
    model: str,
    *,
    epochs: float,
    lr: float,
    weight_decay: float,
    dropout: float = 0.0,
    clip: float | None = None,
    **fields: Any,
) -> Recipe:
    """A row of the paper's table of pre-training: Adam, batch 4096, 224 pixels, 10,000 steps of warm-up.

    A ViT's head has a hidden layer here (section 3.1), which fine-tuning removes; a ResNet's has none.
    """
    return Recipe(
        model=model,
        settings={} if model.startswith("bit-") else {"hidden_head": True},
        epochs=epochs,
        optimizer=OptimizerConfig(lr=lr, weight_decay=weight_decay, clip=clip),
        schedule=ScheduleConfig(decay=fields.pop("decay", "linear"), warmup=_WARMUP_STEPS),
        dropout=dropout,
        **({"source": _PAPER_SOURCE} | fields),
    )


def _build_jft_recipe(model: str, epochs: float, lr: float, source: str = _PAPER_SOURCE) -> Recipe:
    return _build_paper_recipe(model, epochs=epochs, lr=lr, weight_decay=0.1, loss="sigmoid", data="jft", source=source)


def _build_i21k_recipe(model: str, epochs: float) -> Recipe:
    shared: dict[str, Any] = {"loss": "sigmoid", "head_bias": -10.0, "data": "imagenet21k"}
    return _build_paper_recipe(model, epochs=epochs, lr=1e-3, weight_decay=0.03, dropout=0.1, **shared)


def _build_imagenet_recipe(model: str) -> Recipe:
    shared: dict[str, Any] = {"clip": 1.0, "decay": "cosine", "data": "imagenet"}
    return _build_paper_recipe(model, epochs=300, lr=3e-3, weight_decay=0.3, dropout=0.1, **shared)


AUGREG_LEVELS = {  # of Steiner et al. 2022: mixup's alpha; RandAugment's operations and magnitude
    "none": AugmentConfig(),
    "light1": AugmentConfig(randaugment=(2, 0)),
    "light2": AugmentConfig(randaugment=(2, 10), mixup=0.2),
    "medium1": AugmentConfig(randaugment=(2, 15), mixup=0.2),
    "medium2": AugmentConfig(randaugment=(2, 15), mixup=0.5),
    "strong1": AugmentConfig(randaugment=(2, 20), mixup=0.5),
    "strong2": AugmentConfig(randaugment=(2, 20), mixup=0.8),
}


def _build_augreg_recipe(
    model: str, level: str, *, epochs: float, head_bias: float, data: str, result: float | None = None
) -> Recipe:
    accuracy = f"{result:.2f} % on ImageNet after fine-tuning at 224, of the authors' weights" if result else None
    return Recipe(
        model=model,
        epochs=epochs,
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, clip=1.0),
        schedule=ScheduleConfig(decay="cosine", warmup=_WARMUP_STEPS),
        augment=AUGREG_LEVELS[level],
        loss="sigmoid",
        head_bias=head_bias,
        data=data,
        source=f"Steiner et al. 2022, {level}",
        result=accuracy,
    )


_AUGREG_I21K_LEVELS = {
    "ti16": "none",
    "s32": "none",
    "s16": "light1",
    "b32": "light2",
    "b16": "light2",
    "l16": "medium2",
}
_AUGREG_I21K_RESULTS = {"ti16": 75.45, "s16": 81.40, "b32": 80.73, "b16": 84.53, "l16": 85.86}  # timm's table
_AUGREG_IMAGENET_LEVELS = {
    "ti16": "light1",
    "s32": "medium1",
    "s16": "medium2",
    "b32": "medium2",
    "b16": "medium2",
    "l16": "medium2",
}


def _build_small_recipe(model: str, image_size: int, *, epochs: float, data: str) -> Recipe:
    """For small images in 64 patches, on one GPU: docs/experiments/cifar10.md."""
    steps = round(epochs * TRAIN_IMAGE_COUNTS[data] / 256)
    return Recipe(
        model=model,
        settings={"depth": 8, "pool": "norm-mean", "class_token": False, "positions": "sincos-2d"},
        image_size=image_size,
        batch=256,
        epochs=epochs,
        optimizer=OptimizerConfig(kind="muon", lr=2e-3, weight_decay=0.2, momentum=0.95, beta2=0.99, clip=1.0),
        schedule=ScheduleConfig(warmup=steps // 20),
        augment=AugmentConfig(crop="pad", randaugment=(2, 4), mixup=0.2, cutmix=1.0),
        label_smoothing=0.1,
        mimetic=True,
        ema=0.9995,
        data=data,
        source="vitrail",
    )


_SMALL_RECIPES = {
    "cifar10": dataclasses.replace(
        _build_small_recipe("s4", 32, epochs=160, data="cifar10"),
        result="96.50 ± 0.09 % of 10,000 test images at the last epoch, n = 3, with --train-on-val",
    ),
    "tiny-imagenet": _build_small_recipe("s8", 64, epochs=100, data="tiny-imagenet"),
}
_BUILTIN_RECIPE = Recipe(
    model="ti8",
    settings={"positions": "sincos-2d"},
    image_size=64,
    resize=1.0,
    batch=512,
    epochs=100,
    optimizer=OptimizerConfig(kind="muon", lr=2e-3, weight_decay=0.1, momentum=0.95, beta2=0.99, clip=1.0),
    schedule=ScheduleConfig(warmup=1_000),
    augment=AugmentConfig(area=(0.2, 1.0), randaugment=(2, 4), mixup=0.2, cutmix=1.0),
    label_smoothing=0.1,
    mimetic=True,
    ema=0.9995,
    distillation=DistillationConfig(kind="features", weight=0.9),
    data="tiny-imagenet",
    source="vitrail: docs/experiments/builtin.md; `vitrail distill` gives it the teacher",
    result="69.7 % of 10,000 validation images with DeiT-Tiny as teacher, n = 1",
)
_STUDY_RECIPE = Recipe(
    model="ti8",
    image_size=48,
    batch=512,
    epochs=30,
    optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, clip=1.0),
    schedule=ScheduleConfig(warmup=500),
    augment=AugmentConfig(area=(0.25, 1.0)),
    data="tiny-imagenet",
    source="vitrail: the paper's settings at a size that one GPU trains in a minute, for `vitrail study`",
)


MPP = MaskedConfig(kind="mpp", mask_ratio=0.5, target="mean-color")
MAE = MaskedConfig(kind="mae", mask_ratio=0.75, target="normalized-pixels")
_MASKED_AUGMENT = AugmentConfig(
    area=(0.2, 1.0)
)  # He et al. 2022: more augmentation only makes masked patches harder to predict


def _build_mpp_jft_recipe(steps: int, result: str) -> Recipe:
    """The paper's self-supervision; it states no weight decay for it, only that all models had 0.1."""
    return Recipe(
        model="b16",
        epochs=steps * 4096 / TRAIN_IMAGE_COUNTS["jft"],
        optimizer=OptimizerConfig(lr=2e-4, weight_decay=0.1),
        schedule=ScheduleConfig(decay="cosine", warmup=_WARMUP_STEPS),
        masked=MPP,
        data="jft",
        source="Dosovitskiy et al. 2021, B.1.2",
        result=result,
    )


def build_masked_recipe(supervised: Recipe, masked: MaskedConfig, *, images: int, epochs: float) -> Recipe:
    """A recipe to pre-train the same model without labels on `images` small images; evaluation sees them uncropped."""
    return dataclasses.replace(
        supervised,
        masked=masked,
        epochs=epochs,
        optimizer=dataclasses.replace(supervised.optimizer, weight_decay=0.05),
        schedule=ScheduleConfig(warmup=round(epochs * images / supervised.batch / 20)),
        augment=dataclasses.replace(_MASKED_AUGMENT, flip=supervised.augment.flip),
        resize=1.0,
        label_smoothing=0.0,
        ema=0.0,
        result=None,
    )


RECIPES: dict[str, Recipe] = {
    "digits": Recipe(
        model="ti2",
        settings={"width": 96, "depth": 4, "mlp": 192, "heads": 3, "channels": 1},
        image_size=8,
        batch=64,
        epochs=60,
        optimizer=OptimizerConfig(kind="muon", lr=1e-2, weight_decay=0.05, momentum=0.95, clip=1.0),
        schedule=ScheduleConfig(warmup=50),
        augment=AugmentConfig(crop="pad", flip=False, mixup=0.2),
        label_smoothing=0.1,
        data="digits",
        source="vitrail, chosen among 12 on the validation digits",
        result="174 of 179 test digits (97.2 %) on an EPYC, 175 on a Xeon; nearest neighbor 175; n = 1, seed 0",
    ),
    **_SMALL_RECIPES,
    "builtin": _BUILTIN_RECIPE,
    "tiny-imagenet-study": _STUDY_RECIPE,
    "vit-b16-jft": _build_jft_recipe("b16", 7, 8e-4),
    "vit-b32-jft": _build_jft_recipe("b32", 7, 8e-4),
    "vit-l32-jft": _build_jft_recipe("l32", 7, 6e-4),
    "vit-l16-jft": _build_jft_recipe("l16", 7, 4e-4),
    "vit-l16-jft-14": _build_jft_recipe("l16", 14, 4e-4),
    "vit-h14-jft": dataclasses.replace(
        _build_jft_recipe("h14", 14, 3e-4), result="88.55 % on ImageNet after fine-tuning at 518 pixels, published"
    ),
    "bit-r50x1-jft": _build_jft_recipe("bit-r50x1", 7, 1e-3),
    "bit-r50x2-jft": _build_jft_recipe("bit-r50x2", 7, 1e-3),
    "bit-r101x1-jft": _build_jft_recipe("bit-r101x1", 7, 8e-4),
    "bit-r152x1-jft": _build_jft_recipe("bit-r152x1", 7, 6e-4),
    "bit-r152x2-jft": _build_jft_recipe("bit-r152x2", 7, 6e-4),
    "bit-r152x2-jft-14": _build_jft_recipe("bit-r152x2", 14, 6e-4, _LONGER_SOURCE),
    "bit-r200x3-jft": _build_jft_recipe("bit-r200x3", 14, 6e-4, _LONGER_SOURCE),
    "r50-b16-jft": _build_jft_recipe("r50-b16", 7, 8e-4),
    "r50-b32-jft": _build_jft_recipe("r50-b32", 7, 8e-4),
    "r50-l32-jft": _build_jft_recipe("r50-l32", 7, 2e-4),
    "r50-l16-jft": _build_jft_recipe("r50-l16", 7, 4e-4),
    "r50-l16-jft-14": _build_jft_recipe("r50-l16", 14, 4e-4),
    "vit-b16-i21k": _build_i21k_recipe("b16", 90),
    "vit-b32-i21k": _build_i21k_recipe("b32", 90),
    "vit-l16-i21k": _build_i21k_recipe("l16", 30),
    "vit-l16-i21k-90": _build_i21k_recipe("l16", 90),
    "vit-l32-i21k": _build_i21k_recipe("l32", 30),
    "vit-l32-i21k-90": _build_i21k_recipe("l32", 90),
    "vit-b16-imagenet": _build_imagenet_recipe("b16"),
    "vit-b32-imagenet": _build_imagenet_recipe("b32"),
    "vit-l16-imagenet": _build_imagenet_recipe("l16"),
    "vit-l32-imagenet": _build_imagenet_recipe("l32"),
    **{
        f"augreg-{model}-i21k": _build_augreg_recipe(
            model,
            level,
            epochs=300,
            head_bias=-10.0,
            data="imagenet21k",
            result=_AUGREG_I21K_RESULTS.get(model),
        )
        for model, level in _AUGREG_I21K_LEVELS.items()
    },
    **{
        f"augreg-{model}-imagenet": _build_augreg_recipe(model, level, epochs=300, head_bias=-6.9, data="imagenet")
        for model, level in _AUGREG_IMAGENET_LEVELS.items()
    },
    "plain-s16-imagenet": Recipe(
        model="s16",
        settings={
            "pool": "norm-mean",
            "class_token": False,
            "positions": "sincos-2d",
            "hidden_head": True,
        },
        batch=1024,
        epochs=90,
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, clip=1.0),
        schedule=ScheduleConfig(decay="cosine", warmup=_WARMUP_STEPS),
        augment=AugmentConfig(randaugment=(2, 10), mixup=0.2),
        data="imagenet",
        source="Beyer et al. 2022",
        result="76.5 % on ImageNet, published",
    ),
    "bit-r50x1-imagenet": Recipe(
        model="bit-r50x1",
        epochs=90,
        # lr 0.1 and decay 1e-4 per 256 images of a batch; their decay is not multiplied by the learning rate
        optimizer=OptimizerConfig(kind="sgd", lr=1.6, weight_decay=1e-3, momentum=0.9, clip=1.0),
        schedule=ScheduleConfig(decay="cosine", warmup=1_000),
        data="imagenet",
        source="big_vision's configuration of BiT",
    ),
    "mpp-b16-jft": _build_mpp_jft_recipe(1_000_000, "79.9 % on ImageNet after fine-tuning, published"),
    "mpp-b16-jft-100k": _build_mpp_jft_recipe(100_000, "most of the gain of 1,000,000 steps, published"),
    "mae-b16-imagenet": Recipe(
        model="b16",
        settings={"positions": "sincos-2d"},
        epochs=800,
        # 1.5e-4 per 256 images of a batch
        optimizer=OptimizerConfig(lr=2.4e-3, weight_decay=0.05, beta2=0.95),
        schedule=ScheduleConfig(decay="cosine", warmup=round(40 * TRAIN_IMAGE_COUNTS["imagenet"] / 4096)),
        augment=_MASKED_AUGMENT,
        masked=MAE,
        data="imagenet",
        source="He et al. 2022, table 8",
        result="83.6 % on ImageNet after fine-tuning, with 1,600 epochs, published",
    ),
    **{
        f"{masked.kind}-{name}": build_masked_recipe(supervised, masked, images=TRAIN_IMAGE_COUNTS[name], epochs=400)
        for masked in (MPP, MAE)
        for name, supervised in _SMALL_RECIPES.items()
    },
}


def get_recipe(name: str) -> Recipe:
    """The recipe called `name`; an unknown name is refused with the nearest."""
    if name in RECIPES:
        return RECIPES[name]
    kinds = get_args(FinetuneKind)
    if name in kinds:
        raise UsageError(f"the recipe {name} is for fine-tuning: vitrail finetune DATA --model MODEL --recipe {name}")
    close = difflib.get_close_matches(name, [*RECIPES, *kinds], n=1)
    purpose = ", which fine-tunes" if close and close[0] in kinds else ""
    suggestion = f"did you mean {close[0]}{purpose}? " if close else ""
    raise UsageError(f"there is no recipe {name!r:.80}: {suggestion}`vitrail list recipes` shows them")
