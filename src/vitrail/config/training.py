"""What a training run is: augmentation, optimizer, schedule, masking, and the recipe that joins them."""

import dataclasses
import math
from typing import Any, Literal

from vitrail.config.checks import check_choices, check_fractions
from vitrail.errors import UsageError

MaskedTarget = Literal["mean-color", "4x4-colors", "pixels", "normalized-pixels"]

# What replaces a patch: the [mask] token, or nothing. A number from 0 on is a patch of the next image.
MASK_TOKEN, UNCHANGED_PATCH = -1, -2


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """What happens to a training image between decoding and normalization; `PreprocessConfig` gives its size."""

    crop: Literal["inception", "window", "pad", "squash"] = "inception"
    """inception: a crop of random area and aspect ratio, resized. window: resized as for evaluation, then a random crop
    of the final size. pad: resized to the final size, padded by an eighth of it, then a random crop. squash: resized
    only."""
    area: tuple[float, float] = (0.05, 1.0)
    """Smallest and largest fraction of the image's area in an inception crop."""
    flip: bool = True
    """Mirror left and right, half of the time."""
    randaugment: tuple[int, int] | None = None
    """Operations per image and their magnitude on the authors' scale of 10; they too use magnitudes above it."""
    jitter: float = 0.0
    """Brightness, contrast and saturation are multiplied by a factor from 1 - jitter to 1 + jitter."""
    erase: float = 0.0
    """Probability that a random rectangle becomes noise."""
    mixup: float = 0.0
    """Alpha of the Beta distribution of how much of the next image is mixed in; 0 for never."""
    cutmix: float = 0.0
    """Alpha of the area of the next image pasted in; with mixup set too, each takes half of the batches."""

    def __post_init__(self) -> None:
        check_choices(self)
        smallest, largest = self.area
        if not 0 < smallest <= largest <= 1:
            raise UsageError(f"area is {self.area}; it must be two fractions with 0 < smallest <= largest <= 1")
        for name, limit in (("jitter", 1), ("erase", 1), ("mixup", 2), ("cutmix", 2)):
            if not 0 <= getattr(self, name) <= limit:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be from 0 to {limit}")
        if self.randaugment is not None and not (1 <= self.randaugment[0] <= 16 and 0 <= self.randaugment[1] <= 30):
            raise UsageError(f"randaugment is {self.randaugment}; give 1 to 16 operations and a magnitude from 0 to 30")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients become steps."""

    kind: Literal["adam", "sgd", "muon"] = "adam"
    """adam: decoupled decay (AdamW). muon: orthogonalized momentum for the blocks' matrices, adam for the rest."""
    lr: float
    """The peak learning rate."""
    weight_decay: float = 0.0
    """Applied to weight matrices only, scaled by the learning rate, as in PyTorch's AdamW: the authors' 1e-4 at lr 1e-3
    is 0.1. With every optimizer it is decoupled: it never enters the gradient."""
    momentum: float = 0.9
    """Of sgd and of muon's matrices, where 0.95 is usual."""
    beta1: float = 0.9
    """Of adam: the decay of the average of gradients."""
    beta2: float = 0.999
    """Of adam: the decay of the average of squared gradients."""
    eps: float = 1e-8
    """Of adam: added to the denominator of its step."""
    head_lr: float | None = None
    """The learning rate of a head that starts from zeros; None for `lr`."""
    adam_lr: float | None = None
    """Of muon: the learning rate of the parameters adam trains; None for `lr`."""
    clip: float | None = None
    """Maximum global gradient norm."""
    layer_decay: float = 1.0
    """Each block's learning rate divided by that of the block above; the head has the full rate, the embedding the
    lowest."""

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("eps", "layer_decay"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be above 0 and at most 1")
        if not 0 < self.lr < math.inf:
            raise UsageError(f"lr is {self.lr}; it must be above 0")
        check_fractions(self, "momentum", "beta1", "beta2")
        if not 0 <= self.weight_decay < math.inf:
            raise UsageError(f"weight_decay is {self.weight_decay}; it must be 0 or more")
        for name in ("clip", "adam_lr", "head_lr"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be above 0, or None")
        if self.adam_lr is not None and self.kind != "muon":
            raise UsageError(f"adam_lr is for muon, which trains some parameters with adam; {self.kind} takes only lr")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the steps, as a fraction of its peak."""

    decay: Literal["cosine", "linear", "rsqrt", "constant", "step"] = "cosine"
    """How it falls after warm-up."""
    warmup: int = 0
    """Steps of a linear rise from 0 to the peak."""
    final_lr_scale: float = 0.0
    """Of cosine and linear: the fraction at the end."""
    timescale: int = 10_000
    """Of rsqrt: steps after warm-up in which it falls by a factor of sqrt(2)."""
    cooldown: int = 0
    """Of rsqrt and constant: last steps, in which the learning rate also falls linearly to 0."""
    milestones: tuple[float, ...] | None = None
    """Of step: fractions of the run after which the learning rate is divided by 10."""

    def __post_init__(self) -> None:
        check_choices(self)
        for name, least in (("warmup", 0), ("cooldown", 0), ("timescale", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be {least} or more")
        if not 0 <= self.final_lr_scale <= 1:
            raise UsageError(f"final_lr_scale is {self.final_lr_scale}; it must be from 0 to 1")
        if self.final_lr_scale and self.decay not in ("cosine", "linear"):
            raise UsageError(f"final_lr_scale is for the decays cosine and linear, and the decay is {self.decay}")
        if self.cooldown and self.decay not in ("rsqrt", "constant"):
            raise UsageError(f"cooldown is for the decays rsqrt and constant, and the decay is {self.decay}")
        if self.milestones and self.decay != "step":
            raise UsageError(f"milestones are for the decay step, and the decay is {self.decay}")
        if self.decay == "step" and not self.milestones:
            raise UsageError("the decay step needs milestones, such as [0.5, 0.75]")
        if any(not 0 < part < 1 for part in self.milestones or ()):
            raise UsageError(f"milestones are {list(self.milestones or ())}; each must lie between 0 and 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedConfig:
    """Pre-training without labels: some patches of an image are masked, and the model predicts them."""

    kind: Literal["mpp", "mae"]
    """mpp: mask tokens replace the patches' embeddings, and their own output tokens predict (Dosovitskiy et al. 2021).
    mae: the encoder reads only the visible patches, and a light decoder predicts (He et al. 2022)."""
    mask_ratio: float
    """Fraction of an image's patches that are masked."""
    target: MaskedTarget
    """mean-color: at 3 bits a channel, one of 512. 4x4-colors: the same for each cell of the patch, downsized to 4 x 4.
    pixels: by squared error. normalized-pixels: the same, minus the patch's mean and divided by its deviation."""

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0 < self.mask_ratio < 1:
            raise UsageError(f"mask_ratio is {self.mask_ratio}; it must lie between 0 and 1")

    def count_masked(self, num_patches: int) -> int:
        """The number of masked patches among `num_patches`, the same for every image: shapes never change."""
        count = round(self.mask_ratio * num_patches)
        if not 1 <= count < num_patches:
            raise UsageError(
                f"a mask_ratio of {self.mask_ratio:.0%} masks {count} of {num_patches} patches;"
                " at least one must be masked and one visible"
            )
        return count


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Fine-tuning of low-rank updates of frozen linear layers, W + scale B A (Hu et al. 2022), and of the head."""

    rank: int
    """Rows of A and columns of B."""
    alpha: float | None = None
    """B A is multiplied by alpha / rank; None for an alpha of the rank, and so a factor of 1."""
    layers: Literal["qkv", "attention", "mlp", "all"] = "qkv"
    """qkv: queries, keys and values of every block. attention: the output projection too. mlp: both layers of the MLP.
    all: attention and mlp."""
    rank_stabilized: bool = False
    """Divide alpha by the square root of the rank instead (rsLoRA, Kalajdzievski 2023)."""
    dora: bool = False
    """Also train the norm of each row of the sum (DoRA, Liu et al. 2024)."""

    def __post_init__(self) -> None:
        check_choices(self)
        if self.rank < 1:
            raise UsageError(f"the rank of LoRA is {self.rank}; it must be 1 or more")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise UsageError(f"the alpha of LoRA is {self.alpha}; it must be above 0, or None")

    @property
    def used_alpha(self) -> float:
        """The alpha: that of the configuration, or the rank."""
        return self.rank if self.alpha is None else self.alpha

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return compute_lora_scale(self.used_alpha, self.rank, rank_stabilized=self.rank_stabilized)

    @property
    def summary(self) -> str:
        """The method in a few words."""
        method = ("rs" if self.rank_stabilized else "") + ("DoRA" if self.dora else "LoRA")
        return f"{method} of rank {self.rank}, alpha {self.used_alpha:g}, in {self.layers}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Learning from a teacher's predictions besides the labels: (1 - weight) x the labels' loss + weight x its own."""

    kind: Literal["soft", "hard", "token", "features"] = "soft"
    """soft: the teacher's probabilities at a temperature (Hinton et al. 2015). hard: its likeliest class. token: the
    same, learned by the head of a distillation token, while the class token's learns the labels (Touvron et al. 2021).
    features: the direction of its features, by a linear map of the student's that is not kept."""
    temperature: float = 3.0
    """Of soft: both models' logits are divided by it, and the loss is multiplied by its square."""
    weight: float = 0.5
    """The share of the teacher in the loss; at 1, for soft and hard, no label is learned from."""

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0 < self.temperature < math.inf:
            raise UsageError(f"the temperature of distillation is {self.temperature}; it must be above 0")
        if not 0 < self.weight <= 1:
            raise UsageError(f"the weight of distillation is {self.weight}; it must be above 0 and at most 1")
        if self.weight == 1 and self.kind in ("token", "features"):
            raise UsageError(
                f"at a weight of 1, distillation of the kind {self.kind} never trains the head that learns the labels:"
                " set a weight below 1, or the kind soft or hard"
            )

    @property
    def summary(self) -> str:
        """The method in a few words."""
        temperature = f", temperature {self.temperature:g}" if self.kind == "soft" else ""
        return f"distillation of the kind {self.kind}{temperature}, weight {self.weight:g}"


def compute_lora_scale(alpha: float, rank: int, *, rank_stabilized: bool) -> float:
    """The factor of B A."""
    return alpha / math.sqrt(rank) if rank_stabilized else alpha / rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run without its data, seed and machine.

    `vitrail.load_recipe` returns one; `dataclasses.replace` changes it.

        recipe = dataclasses.replace(vitrail.load_recipe("digits"), epochs=0.2, batch=32)
        vitrail.train(recipe, "digits")
    """

    model: str | None
    """A preset, with random weights; None for fine-tuning, which is given a model."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields that differ from the preset's configuration, such as pool."""
    image_size: int | None = 224
    """None for that of the model to fine-tune."""
    resize: float | None = None
    """The short side before the crop, as a multiple of the crop's side; None for that of the model to fine-tune."""
    resize_whole_image: bool = False
    """Of fine-tuning: resize both sides, whatever the image's shape: to the model's input for evaluation, and to
    `resize` times that before training's crops."""
    batch: int = 4096
    """Global batch size."""
    epochs: float
    """Passes over the training images."""
    optimizer: OptimizerConfig
    """How gradients become steps."""
    schedule: ScheduleConfig
    """The learning rate over the steps."""
    augment: AugmentConfig = dataclasses.field(default_factory=AugmentConfig)
    """What happens to a training image."""
    masked: MaskedConfig | None = None
    """Masking and prediction targets for pre-training without labels; None to learn from labels."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """softmax: cross-entropy of one class per image. sigmoid: a yes or no for each class."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over the classes."""
    head_bias: float = 0.0
    """Initial bias of the head: log(1 / classes) and the like for sigmoid."""
    head_init: Literal["probe"] | None = None
    """What the new head of fine-tuning starts from: a linear probe of the features; None for zeros, as in the paper."""
    mimetic: bool = False
    """Whether attention is initialized to resemble that of trained models (Trockman and Kolter 2023)."""
    dropout: float = 0.0
    """Probability that an activation becomes zero."""
    stochastic_depth: float = 0.0
    """Probability that an image skips a branch of the last block; towards the first it falls linearly to 0."""
    ema: float = 0.0
    """Decay of the average of the weights that is evaluated and saved; 0 for the weights themselves."""
    ema_warmup: bool = True
    """Warm up the EMA decay; the paper does not."""
    trainable_layers: int | None = None
    """How many layers below the head are trained; 0 for the head alone, None for all."""
    lora: LoRAConfig | None = None
    """Low-rank updates, which are trained instead of the layers; None to train the layers themselves."""
    distillation: DistillationConfig | None = None
    """How a teacher is learned from, which `vitrail distill` is given; None to learn from labels alone."""
    logit_adjustment: bool = False
    """Whether every class counts the same, however many images it has."""
    data: str | None = None
    """The dataset it is for."""
    source: str
    """Where the numbers come from."""
    result: str | None = None
    """The result that was published or measured with it."""

    def __post_init__(self) -> None:
        check_choices(self)
        if self.resize is not None and not 1 <= self.resize <= 4:
            raise UsageError(f"resize is {self.resize}; it must be from 1 to 4 sides of the crop")
        if self.resize_whole_image and (self.resize is None or self.model is not None):
            raise UsageError("resize_whole_image is for fine-tuning with a `resize`: set that, or omit both")
        if self.trainable_layers is not None and self.trainable_layers < 0:
            raise UsageError(f"trainable_layers is {self.trainable_layers}; it must be 0 (the head alone) or more")
        if self.batch < 1:
            raise UsageError(f"batch is {self.batch}; it must be at least 1")
        if not 0 < self.epochs < math.inf:
            raise UsageError(f"epochs is {self.epochs:g}; it must be above 0")
        check_fractions(self, "label_smoothing", "dropout", "stochastic_depth", "ema")
        if self.lora is not None and self.model is not None:
            raise UsageError("lora adds to the layers of a trained model, and this recipe starts from random weights")
        if self.lora is not None and self.optimizer.kind == "muon":
            raise UsageError("muon moves whole matrices, and lora adds small ones to them: choose adam or sgd")
        if self.lora is not None and self.trainable_layers is not None:
            raise UsageError("lora trains low-rank updates and the head alone, trainable_layers whole layers: give one")
        if self.distillation is not None and (self.masked is not None or self.loss != "softmax"):
            raise UsageError("distillation is for the loss softmax, of images with one label each: omit it")
        if self.distillation is not None and self.logit_adjustment:
            raise UsageError("a teacher's predictions have no adjusted logits: omit logit_adjustment (--balanced)")
        if self.masked is not None:
            self._check_masked()

    def _check_masked(self) -> None:
        """Refuse what needs labels or a trained model."""
        needs_labels = {
            "mixup": self.augment.mixup,
            "cutmix": self.augment.cutmix,
            "layer_decay": self.optimizer.layer_decay != 1,
            "logit_adjustment": self.logit_adjustment,
            "label_smoothing": self.label_smoothing,
            "head_bias": self.head_bias,
            "trainable_layers": self.trainable_layers is not None,
        }
        if used := [name for name, value in needs_labels.items() if value]:
            raise UsageError(f"{used[0]} is for learning from labels, and this recipe is masked: omit it")
        if self.model is None:
            raise UsageError("a masked recipe starts from random weights, so it must name a preset")
