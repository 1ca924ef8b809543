"""The paper's experiments on pre-training, as values: what is varied, what is measured, and what the paper found.

A study trains every variant of a recipe from random weights, over the same seeds. `pretraining_study` runs it.
"""

import dataclasses
from collections.abc import Callable, Mapping

from vitrail import presets
from vitrail.config import BiTConfig, ViTConfig

ADAM_RATES = (3e-4, 1e-3, 3e-3)
"""Learning rates to choose from where variants may need different ones."""
_SGD_RATES = (0.03, 0.1, 0.3)
_FRACTIONS = (0.1, 0.3, 1.0)  # of the training images


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """What is trained: a model by a recipe with other settings, on a part of the images."""

    name: str
    curve: str = ""
    """The curve of the plot it is a point of; empty for a bar."""
    model: str
    """A preset."""
    settings: tuple[str, ...] = ()
    """NAME=VALUE, as --set takes them."""
    fraction: float = 1.0
    """Of each class's training images; the number of steps stays that of all images."""
    length: float = 1.0
    """Steps, as a multiple of the recipe's."""
    rates: tuple[float, ...] = ()
    """Learning rates of which the best on val is used; empty for the recipe's own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """How the pre-trained models are fine-tuned."""

    name: str
    image_size_factor: float = 1.0
    """The side of the images, as a multiple of that of pre-training."""
    reset_positions: bool = False
    """Whether position embeddings are random again instead of resampled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperStudy:
    """An experiment of the paper."""

    question: str
    paper: str
    """What the paper found, with its numbers."""
    expectation: str
    """What is expected of small models on small data; written before they were trained."""
    build_variants: Callable[[tuple[str, ...]], tuple[Variant, ...]]
    """The variants of these models; of the study's own if none are given."""
    models: tuple[str, ...]
    """The study's own models."""
    baseline: str = ""
    """The variant that the others are compared with, seed by seed."""
    equivalence: float | None = None
    """The difference in accuracy below which a variant counts as equal to the baseline."""
    x_name: str = ""
    """What the plot's axis shows: images, exaFLOPs, GFLOPs; empty for bars."""
    few_shot: bool = False
    """Whether 5-shot ridge regression on the transfer dataset is measured."""
    transfers: tuple[Transfer, ...] = ()

    def is_baseline(self, variant: Variant) -> bool:
        """Whether its model's other variants are compared with this one."""
        return bool(self.baseline) and variant.name in (self.baseline, f"{variant.model}: {self.baseline}")


_FINE_TUNING = (Transfer(name="fine-tuned"),)


def _vary_positions(models: tuple[str, ...]) -> tuple[Variant, ...]:
    """Each kind of positions, and where they are added (appendix D.4)."""
    kinds = {
        "none": ("positions=none",),
        "1-D": ("positions=learned-1d",),
        "2-D": ("positions=learned-2d",),
        "relative": ("positions=relative",),
        "1-D, every layer": ("positions=learned-1d", "positions_at=every-layer"),
        "1-D, every layer, shared": ("positions=learned-1d", "positions_at=every-layer-shared"),
        "2-D, every layer": ("positions=learned-2d", "positions_at=every-layer"),
        "2-D, every layer, shared": ("positions=learned-2d", "positions_at=every-layer-shared"),
    }
    return tuple(
        Variant(name=_name_variant(name, model, models), model=model, settings=settings)
        for model in models
        for name, settings in kinds.items()
    )


def _vary_head(models: tuple[str, ...]) -> tuple[Variant, ...]:
    """What the head reads, each with its own learning rate (appendix D.3)."""
    kinds = {
        "class token": ("pool=class",),
        "average pooling": ("pool=norm-mean", "class_token=false"),
        "attention pooling": ("pool=map", "class_token=false"),
    }
    return tuple(
        Variant(name=_name_variant(name, model, models), model=model, settings=settings, rates=ADAM_RATES)
        for model in models
        for name, settings in kinds.items()
    )


def _vary_shape(models: tuple[str, ...]) -> tuple[Variant, ...]:
    """Depth, width, MLP and patch, a half and twice of each model's own (appendix D.2)."""
    return tuple(
        Variant(
            name=_name_variant(f"{part} x {factor:g}", model, models),
            curve=_name_variant(part, model, models),
            model=model,
            settings=_scale_shape(_get_vit(model), part, factor),
        )
        for model in models
        for part in ("depth", "width", "MLP", "patch", "all")
        for factor in (0.5, 1, 2)
    )


def _scale_shape(config: ViTConfig, part: str, factor: float) -> tuple[str, ...]:
    """The settings that scale a part of a ViT; a patch is divided, so that there are more."""
    if factor == 1:
        return ()
    scaled = {name: round(getattr(config, name) * factor) for name in ("depth", "width", "mlp")}
    if part == "all":
        return tuple(f"{name}={value}" for name, value in scaled.items())
    name = part.lower()
    return (f"patch={round(config.patch / factor)}",) if name == "patch" else (f"{name}={scaled[name]}",)


def _vary_images(models: tuple[str, ...]) -> tuple[Variant, ...]:
    """Each model on 10 %, 30 % and all of the training images, for the same number of steps."""
    return tuple(
        Variant(name=f"{model}, {fraction:.0%}", curve=model, model=model, fraction=fraction)
        for model in models
        for fraction in _FRACTIONS
    )


def _vary_images_without_augmentation(models: tuple[str, ...]) -> tuple[Variant, ...]:
    """The same with images that are only resized."""
    plain = ("augment.crop=squash", "augment.flip=false")
    return tuple(dataclasses.replace(each, settings=(*each.settings, *plain)) for each in _vary_images(models))


def _vary_compute(models: tuple[str, ...]) -> tuple[Variant, ...]:
    """Each model for a third of the steps and for all."""
    return tuple(
        Variant(
            name=f"{model}, {length:.0%} of the steps",
            curve=describe_architecture(model),
            model=model,
            length=length,
        )
        for model in models
        for length in (0.33, 1.0)
    )


def _vary_optimizer(models: tuple[str, ...]) -> tuple[Variant, ...]:
    """Adam and SGD for pre-training, each with its own learning rate (appendix D.1)."""
    sgd = ("optimizer.kind=sgd", "optimizer.weight_decay=0.001")
    return tuple(
        Variant(name=_name_variant(name, model, models), model=model, settings=settings, rates=rates)
        for model in models
        for name, settings, rates in (("Adam", (), ADAM_RATES), ("SGD", sgd, _SGD_RATES))
    )


def _vary_nothing(models: tuple[str, ...]) -> tuple[Variant, ...]:
    return tuple(Variant(name=model, model=model) for model in models)


def _name_variant(name: str, model: str, models: tuple[str, ...]) -> str:
    return name if len(models) == 1 else f"{model}: {name}"


def _get_vit(model: str) -> ViTConfig:
    config = presets.get_preset_config(model)
    assert isinstance(config, ViTConfig)
    return config


def describe_architecture(model: str) -> str:
    """The kind of a preset: ViT, hybrid or ResNet."""
    config = presets.get_preset_config(model)
    if isinstance(config, BiTConfig):
        return "ResNet"
    return "ViT" if config.stem is None else "hybrid"


PAPER_STUDIES: Mapping[str, PaperStudy] = {
    "data-size": PaperStudy(
        question="How many images does a ViT need to catch up with a ResNet?",
        paper="figures 3 and 4: on ImageNet BiT is ahead of every ViT, on ImageNet-21k they are equal, on JFT ViT-L and"
        " ViT-H are ahead; of random parts of JFT, BiT leads at 9 million images and ViT-B/32 at 90 million and more",
        expectation="at 100,000 images and fewer the ResNet leads everywhere, the hybrid is between, and the gap"
        " shrinks as the images grow",
        build_variants=_vary_images,
        models=("ti8", "s8", "r-ti16", "bit-r26x1"),
        x_name="training images",
        few_shot=True,
        transfers=_FINE_TUNING,
    ),
    "compute": PaperStudy(
        question="Which architecture is the most accurate for its pre-training compute?",
        paper="figure 5: a ViT needs 2 to 4 times less compute than a ResNet for the same accuracy; hybrids lead at"
        " small budgets, and the difference vanishes for larger models",
        expectation="with so few images compute is not what limits a ViT: hybrid and ResNet lead at every budget",
        build_variants=_vary_compute,
        models=("ti8", "s8", "r-ti16", "bit-r26x1", "bit-r50x1"),
        x_name="exaFLOPs",
        few_shot=True,
        transfers=_FINE_TUNING,
    ),
    "size": PaperStudy(
        question="Does a larger ViT lose on little data without augmentation?",
        paper="figure 3: pre-trained on ImageNet, ViT-L is behind ViT-B in spite of regularization; on ImageNet-21k"
        " they are equal, on JFT ViT-L is ahead",
        expectation="the larger one is not better on 10 %, and gains on the smaller one as the images grow",
        build_variants=_vary_images_without_augmentation,
        models=("ti8", "s8", "b8"),
        x_name="training images",
    ),
    "resolution": PaperStudy(
        question="What does fine-tuning at a higher resolution gain, and what do resampled positions?",
        paper="section 3.2: fine-tuning at a higher resolution helps; pre-trained positions are resampled in 2-D",
        expectation="the higher resolution gains several points, resampled positions beat random ones",
        build_variants=_vary_nothing,
        models=("ti8",),
        transfers=(
            Transfer(name="same size"),
            Transfer(name="4/3 of the size, resampled", image_size_factor=4 / 3),
            Transfer(name="4/3 of the size, random positions", image_size_factor=4 / 3, reset_positions=True),
        ),
    ),
    "positions": PaperStudy(
        question="Do positions matter, and which kind?",
        paper="table 8 (ViT-B/16 on JFT, 5-shot ImageNet): none 0.614; 1-D 0.642, 2-D 0.640, relative 0.640 at the stem"
        "; at every layer 0.640 to 0.643",
        expectation="none loses by several points; the others are within a point of each other",
        build_variants=_vary_positions,
        models=("ti8",),
        baseline="1-D",
        equivalence=0.01,
        few_shot=True,
    ),
    "head": PaperStudy(
        question="Is a class token better than pooling?",
        paper="figure 9: average pooling is equal to the class token with its own learning rate (3e-4, not 8e-4)",
        expectation="pooling is equal or better, each at its own learning rate",
        build_variants=_vary_head,
        models=("ti8",),
        baseline="class token",
        equivalence=0.01,
        few_shot=True,
    ),
    "shape": PaperStudy(
        question="What should grow: depth, width, MLP, or the number of patches?",
        paper="figure 8: depth gains most, with diminishing returns after 16 layers; width gains least; smaller patches"
        " gain without more parameters; growing all together is robust",
        expectation="smaller patches gain most on small images, then depth",
        build_variants=_vary_shape,
        models=("ti8",),
        x_name="GFLOPs of an image",
        few_shot=True,
    ),
    "optimizer": PaperStudy(
        question="Adam or SGD to pre-train a ResNet?",
        paper="table 7: fine-tuned from Adam, ResNet50 gets 77.54 on ImageNet (SGD 78.24) and 97.67 on CIFAR-10 (97.46)"
        "; ResNet152x2 84.97 (84.37) and 99.06 (99.07). Adam is better on average",
        expectation="within a point of each other, each at its own learning rate",
        build_variants=_vary_optimizer,
        models=("bit-r26x1",),
        baseline="SGD",
        equivalence=0.01,
        transfers=_FINE_TUNING,
    ),
}
