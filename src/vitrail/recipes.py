"""Training runs by name: the paper's tables, the same authors' later recipes, and small ones for a single machine.

`finetuning` makes the recipes for a model that has learned before, which depend on how many images there are.

Weight decay is PyTorch's, which the learning rate multiplies: the authors' 1e-4 at a rate of 1e-3 is 0.1 here.
"""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, Literal

from vitrail import presets
from vitrail.config import (
    AugmentConfig,
    BiTConfig,
    MaskedConfig,
    OptimizerConfig,
    Recipe,
    ScheduleConfig,
    ViTConfig,
    expand_image_size,
    parse_field,
)
from vitrail.errors import UsageError

TRAIN_IMAGE_COUNTS = {  # for training, in the sets that recipes are for
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
    **more: Any,
) -> Recipe:
    """A row of the paper's table of pre-training: Adam, batch 4096, 224 pixels, 10,000 steps of warm-up.

    A ViT's head has a hidden layer here (3.1 of the paper), which fine-tuning removes; a ResNet's has none.
    """
    return Recipe(
        model=model,
        settings={} if model.startswith("bit-") else {"hidden_head": True},
        epochs=epochs,
        optimizer=OptimizerConfig(lr=lr, weight_decay=weight_decay, clip=clip),
        schedule=ScheduleConfig(decay=more.pop("decay", "linear"), warmup=_WARMUP_STEPS),
        dropout=dropout,
        **({"source": _PAPER_SOURCE} | more),
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
        result=None
        if result is None
        else f"{result:.2f} % on ImageNet after fine-tuning at 224, of the authors' weights",
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
    """For small pictures and one GPU, of 64 patches: docs/experiments/cifar10.md."""
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
        result="96.50 ± 0.09 % of 10,000 test images at the last epoch, n = 3, with --everything",
    ),
    "tiny-imagenet": _build_small_recipe("s8", 64, epochs=100, data="tiny-imagenet"),
}


MPP = MaskedConfig(kind="mpp", mask_ratio=0.5, target="mean-colour")
MAE = MaskedConfig(kind="mae", mask_ratio=0.75, target="normalised-pixels")
_MASKED_AUGMENT = AugmentConfig(area=(0.2, 1.0))  # He et al. 2022: more would only make the hidden harder to tell


def _build_mpp_jft_recipe(steps: int, result: str) -> Recipe:
    """The paper's self-supervision; of its weight decay it says nothing but that all models had 0.1."""
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
    """A recipe for the same model that learns so many small images without labels; evaluation sees them whole."""
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
        result="97.8 % of 179 test digits, seed 0, as many as the nearest neighbour",
    ),
    **_SMALL_RECIPES,
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
        # lr 0.1 and decay 1e-4 for each 256 images of a batch; their decay is not multiplied by the rate
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
        # 1.5e-4 for each 256 images of a batch
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


_FEW_IMAGES = 500  # training images below which the network must move little
_PROBE_HEAD_EPOCHS = 4  # epochs below which a head does better to start from a probe than from zeros
_FULL_SIZE_EPOCHS = 12  # epochs from which the model's own resolution is the best
_SMALL_SIZE_EPOCHS = 2  # epochs below which photos are taken at about their own size
_MEDIUM_SIZE_RATIO, _MIN_SIZE_RATIO = 11 / 14, 9 / 14  # of the model's: 176 and 144 of 224 pixels
FinetuneKind = Literal["default", "paper", "bit"]


def build_finetune_recipe(
    kind: FinetuneKind, images: int, patch: int, *, epochs: float | None = None, pixels: int = 224 * 224
) -> Recipe:
    """The recipe to fine-tune a model with so many training images; `patch` is the stride of its patches.

    `pixels` are those of a usual image of the dataset, by which BiT's rule chooses the resolution.
    """
    if kind == "bit":
        made = _build_bit_finetune_recipe(images, patch, pixels)
    else:
        made = (
            _build_paper_finetune_recipe(images, patch)
            if kind == "paper"
            else _build_default_finetune_recipe(images, epochs)
        )
    if epochs is None:
        return made
    warmup = round(made.schedule.warmup * min(1.0, epochs / made.epochs))
    return dataclasses.replace(made, epochs=epochs, schedule=dataclasses.replace(made.schedule, warmup=warmup))


def _build_default_finetune_recipe(images: int, epochs: float | None) -> Recipe:
    """What did best on splits of training images: docs/experiments/finetuning.md.

    With few images the network must move little, and what varies them much does harm, as it does in a short run.
    """
    few = images < _FEW_IMAGES
    batch = 64 if images < 20_000 else 256
    steps = max(500, 20 * images // batch)
    augment = AugmentConfig(area=(0.25, 1.0))
    if not few and (epochs is None or epochs >= 15):
        augment = dataclasses.replace(augment, randaugment=(2, 10), mixup=0.8, cutmix=1.0)
    return Recipe(
        model=None,
        image_size=None,
        batch=batch,
        epochs=steps * batch / images,
        optimizer=OptimizerConfig(
            lr=2e-4 if few else 4e-4, head_lr=2e-3, weight_decay=0.05, clip=1.0, layer_decay=0.75
        ),
        schedule=ScheduleConfig(warmup=steps // 10),
        augment=augment,
        label_smoothing=0.1,
        head_init="probe" if epochs is not None and epochs < _PROBE_HEAD_EPOCHS else None,
        source="vitrail",
    )


def choose_finetune_size(model_size: int, stride: int, *, images: int, photo_size: int, epochs: float) -> int:
    """The image side for a short run, by what did best on splits of training images: docs/experiments/finetuning.md.

    `own` is the model's, `photo` the short side of the images; there is time for so many epochs at the model's own.
    Smaller images make more epochs, of which few images have enough. Photos that are smaller than the model's input
    lose little by it.
    """
    if epochs >= _FULL_SIZE_EPOCHS or images < _FEW_IMAGES:
        return model_size
    share = _MEDIUM_SIZE_RATIO
    if epochs < _SMALL_SIZE_EPOCHS and model_size / 2 <= photo_size < model_size:
        share = min(share, max(_MIN_SIZE_RATIO, photo_size / model_size))
    return max(1, round(share * model_size / stride)) * stride


def _build_paper_finetune_recipe(images: int, patch: int) -> Recipe:
    """SGD, batch 512, 384 pixels; steps by the size of the set, as for the paper's own sets.

    The paper chose the rate from a grid for each set; these are the authors' later choices for sets of such sizes.
    """
    small, large = images < 20_000, images >= 500_000
    steps, warmup = (500, 100) if small else (20_000, 500) if large else (10_000, 500)
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


def _build_bit_finetune_recipe(images: int, patch: int, pixels: int) -> Recipe:
    """BiT-HyperRule (Kolesnikov et al. 2020): resolution by the size of images, length and mixup by their number.

    The numbers are those of the authors' code: below 20,000 images the rate falls after 40, 60 and 80 % of the run, and
    warms up for 100 steps. Images are resized whole, whatever their shape: `resize` times the crop in both directions.
    """
    small, large = images < 20_000, images >= 500_000
    steps, warmup = (500, 100) if small else (20_000, 500) if large else (10_000, 500)
    side, room = (128, 160) if pixels < 96 * 96 else (480, 512)
    return Recipe(
        model=None,
        image_size=round(side / patch) * patch,
        resize=room / side,
        batch=512,
        epochs=steps * 512 / images,
        optimizer=OptimizerConfig(kind="sgd", lr=0.003, momentum=0.9),
        schedule=ScheduleConfig(
            decay="stairs", warmup=warmup, milestones=(0.4, 0.6, 0.8) if small else (0.3, 0.6, 0.9)
        ),
        augment=AugmentConfig(crop="window", mixup=0.0 if small else 0.1),
        source="Kolesnikov et al. 2020, BiT-HyperRule",
    )


def get_recipe(name: str) -> Recipe:
    """The recipe of a name, or an error that gives the nearest."""
    if name in RECIPES:
        return RECIPES[name]
    close = difflib.get_close_matches(name, RECIPES, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    raise UsageError(f"there is no recipe {name!r:.80}: {meant}`vitrail list recipes` shows them")


# --- a recipe with other settings ------------------------------------------------------------------------------------

_RECIPE_FIELDS = ("image_size", "resize", "loss", "label_smoothing", "head_bias", "mimetic", "dropout", "stochastic_depth", "ema",
        "ema_warmup")  # fmt: skip
_OPTION_FIELDS = ("warmup", "epochs", "batch", "target", "logit_adjustment")  # which have an option of their own
_FIXED_MODEL_FIELDS = (
    "kind",
    "stem",
    "conv",
    "image_size",
    "classes",
)  # of a model: what the preset, the recipe or the data decide


def override_settings(recipe: Recipe, assignments: Iterable[str]) -> Recipe:
    """The recipe with each NAME=VALUE instead of its own: of its model, optimizer, schedule, augmentation or itself."""
    changes: dict[str, dict[str, Any]] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text!r:.80} says no value; give NAME=VALUE, such as depth=8")
        section, kind, field = _find_field(recipe, name)
        if field in changes.setdefault(section, {}):
            raise UsageError(f"--set gives {name} twice; give it once")
        changes[section][field] = parse_field(kind, field, value, name)
    if not changes:
        return recipe
    fields = {"settings": recipe.settings | changes.pop("model", {}), "result": None} | changes.pop("recipe", {})
    parts = {name: dataclasses.replace(getattr(recipe, name), **values) for name, values in changes.items()}
    changed = dataclasses.replace(recipe, **fields, **parts)
    if changed.model is not None:
        size = {} if changed.image_size is None else {"image_size": expand_image_size(changed.image_size)}
        presets.get_preset_config(changed.model, **size, **changed.settings)  # refuses what no model can be
    return changed


def _find_field(recipe: Recipe, name: str) -> tuple[str, type, str]:
    """The part of a recipe that has a setting of that name, its class, and the setting's own name there."""
    parts: dict[str, tuple[type, Iterable[str]]] = {
        "recipe": (Recipe, _RECIPE_FIELDS),
        "optimizer": (
            OptimizerConfig,
            [field.name for field in dataclasses.fields(OptimizerConfig) if field.name != "kind"],
        ),
        "schedule": (ScheduleConfig, [field.name for field in dataclasses.fields(ScheduleConfig)]),
        "augment": (AugmentConfig, [field.name for field in dataclasses.fields(AugmentConfig)]),
    }
    if recipe.model is not None:
        kind = BiTConfig if isinstance(presets.get_preset_config(recipe.model), BiTConfig) else ViTConfig
        parts["model"] = (
            kind,
            [field.name for field in dataclasses.fields(kind) if field.name not in _FIXED_MODEL_FIELDS],
        )
    if name in _OPTION_FIELDS:
        raise UsageError(f"{name} has an option of its own: --{name} instead of --set {name}=...")
    if name == "optimizer":
        return "optimizer", OptimizerConfig, "kind"
    known = {field: (section, kind) for section, (kind, fields) in parts.items() for field in fields}
    if name in known:
        return *known[name], name
    model = {field.name for field in dataclasses.fields(ViTConfig)} - set(_FIXED_MODEL_FIELDS)
    if name in model:
        why = "a trained model keeps its own" if recipe.model is None else f"{recipe.model} is a ResNet"
        raise UsageError(f"--set {name} is for recipes of ViTs with random weights: {why}")
    close = difflib.get_close_matches(name, ["optimizer", *known], n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    names = ", ".join(sorted({"optimizer", *known} - set(_OPTION_FIELDS)))
    raise UsageError(f"a recipe has no setting {name!r:.80}: {meant}--set takes {names}")
