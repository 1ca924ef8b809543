"""What a model computes and how its pixels are prepared: frozen values that need no torch.

A configuration says everything that is not a weight, down to the GELU form, so that a file that carries it computes
what its authors' code computes. What only training uses (dropout, stochastic depth) is not part of it.
"""

import contextlib
import dataclasses
import math
import types
import typing
from typing import Any, Literal, TypeVar, cast

from vitrail.errors import UsageError

Pool = Literal["class", "norm-mean", "mean-norm", "map", "class-mean"]
Positions = Literal["none", "learned-1d", "learned-2d", "sincos-2d", "relative"]
PositionsAt = Literal["stem", "every-layer", "every-layer-shared"]
Resample = Literal["bilinear-corners", "bilinear", "bicubic-antialias", "bicubic", "bicubic-corners", "bicubic-offset"]
Interpolation = Literal["bilinear", "bicubic", "area", "lanczos"]
CropRounding = Literal["nearest", "down"]
Precision = Literal["float32", "bfloat16", "int8", "openvino-int8"]
MaskedTarget = Literal["mean-colour", "4x4-colours", "pixels", "normalised-pixels"]

SIZE_LIMITS = {  # far above any published model; a hostile file is refused before anything is built from it
    "width": 65_536,
    "depth": 1_024,
    "mlp": 1_048_576,
    "heads": 1_024,
    "patch": 1_024,
    "channels": 1_024,
    "classes": 10_000_000,
    "registers": 4_096,
    "image_size": 16_384,
    "units": 1_024,
}
MAX_PATCHES = 65_536  # 4096 x 4096 pixels in patches of 16; what has no weights of its own is allocated for each
NORMALIZATION_RANGE = (
    1e-6,
    1e6,
)  # of std, and at most so far from 0 the mean: beyond it normalized pixels leave float32
_ZERO_ALLOWED = ("classes", "registers")
_LITERAL_WORDS = {"true": True, "false": False, "none": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvConfig:
    """The convolutions of a BiT ResNet or of a hybrid's stem: bottlenecks of standardised kernels and group norm."""

    units: tuple[int, ...]
    """Bottleneck units of each stage; a hybrid's stem may have none and end with its first convolution."""
    width_factor: float = 1
    """The first convolution's channels in 64s; a multiple of 0.5, as group norm has 32 groups."""
    norm_eps: float
    standardization: Literal["std + eps", "sqrt(var + eps)"]
    """What a kernel's centred weights are divided by."""
    standardization_eps: float

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_choices(self)
        if not 0.5 <= self.width_factor <= 64 or self.width_factor % 0.5:
            raise UsageError(f"width_factor is {self.width_factor:g}; it must be from 0.5 to 64, in steps of 0.5")
        if len(self.units) > 4:
            raise UsageError(f"units is {list(self.units)}; a ResNet has at most 4 stages")

    @property
    def width(self) -> int:
        """Channels of the first convolution."""
        return int(64 * self.width_factor)

    @property
    def stride(self) -> int:
        """Pixels from one place of the feature map to the next."""
        return 4 * 2 ** max(len(self.units) - 1, 0)

    @property
    def out_channels(self) -> int:
        """Channels of the feature map."""
        return self.width * (2 ** (len(self.units) + 1) if self.units else 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiTConfig:
    """The function a BiT ResNet's weights compute: pre-activation units, fixed padding."""

    kind: Literal["bit"] = "bit"
    conv: ConvConfig
    image_size: tuple[int, int] = (224, 224)
    """The size it was trained at; it takes any."""
    channels: int = 3
    classes: int = 1000
    """Outputs of the head; 0 means the model ends with its features."""

    def __post_init__(self) -> None:
        _check_numbers(self)
        if not self.conv.units:
            raise UsageError("a BiT ResNet has at least one stage")

    @property
    def num_features(self) -> int:
        """Width of what the head reads."""
        return self.conv.out_channels


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The function a Vision Transformer's weights compute."""

    kind: Literal["vit"] = "vit"
    width: int
    depth: int
    mlp: int
    heads: int
    patch: int
    """Side of a patch: in pixels, or in places of the stem's feature map."""
    stem: ConvConfig | None = None
    """A hybrid's convolutions, whose feature map is cut into patches in place of the image."""
    image_size: tuple[int, int] = (224, 224)
    """Height and width the stored positions belong to; other sizes resample them."""
    channels: int = 3
    classes: int = 1000
    """Outputs of the head; 0 means the model ends with its features."""

    class_token: bool = True
    distillation_token: bool = False
    distillation_head: bool = False
    """A second head on the distillation token; the logits are the mean of both."""
    registers: int = 0

    pool: Pool = "class"
    """class: LN, then the class token. norm-mean: LN, then the mean of the patches (Google). mean-norm: the mean, then
    LN (timm). map: LN, then attention pooling. class-mean: class token and mean of the patches, joined (DINOv2)."""
    hidden_head: bool = False
    """The pre-training head's hidden layer (width D, tanh) before the last linear layer."""

    positions: Positions = "learned-1d"
    positions_at: PositionsAt = "stem"
    prefix_positions: bool = True
    """Whether class, distillation and register tokens have learned positions too."""
    resample: Resample = "bilinear-corners"
    """How positions are brought to another grid; the operator of the weights' origin."""

    qkv_bias: bool = True
    layer_scale: bool = False
    gelu: Literal["erf", "tanh"] = "tanh"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_choices(self)
        if self.width % self.heads:
            raise UsageError(f"width {self.width} is not a multiple of heads {self.heads}")
        check_patches(self.image_size, self.stride)
        self._check_tokens()
        self._check_positions()

    def _check_tokens(self) -> None:
        if self.pool in ("class", "class-mean") and not self.class_token:
            raise UsageError(f"pool {self.pool!r} reads the class token; set class_token=True or choose norm-mean")
        if self.distillation_token and not self.class_token:
            raise UsageError("a distillation token stands beside a class token; set class_token=True")
        if self.distillation_head and not (self.distillation_token and self.pool == "class" and self.classes):
            raise UsageError("distillation_head needs distillation_token=True, pool='class' and classes > 0")
        if self.hidden_head and self.pool == "class-mean":
            raise UsageError("hidden_head reads one token's width; pool 'class-mean' joins two")

    def _check_positions(self) -> None:
        if self.positions in ("none", "relative") and self.positions_at != "stem":
            raise UsageError(f"positions {self.positions!r} are added nowhere; leave positions_at at 'stem'")
        if self.positions == "learned-2d" and self.width % 2:
            raise UsageError(f"learned-2d positions halve the width, and {self.width} is odd")
        if self.positions == "sincos-2d" and (self.width % 4 or self.width < 8):
            raise UsageError(f"sincos-2d positions need a width of 8 or more that 4 divides, not {self.width}")

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across at `image_size`."""
        return compute_grid(self.image_size, self.stride)

    @property
    def stride(self) -> int:
        """Pixels from one patch to the next."""
        return self.patch * (self.stem.stride if self.stem else 1)

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the first patch: class, distillation, registers."""
        return int(self.class_token) + int(self.distillation_token) + self.registers

    @property
    def num_positioned_prefix_tokens(self) -> int:
        """Prefix tokens that have a learned position of their own."""
        return self.num_prefix_tokens if self.positions == "learned-1d" and self.prefix_positions else 0

    @property
    def num_features(self) -> int:
        """Width of what the head reads."""
        return self.width * (2 if self.pool == "class-mean" else 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """How an image becomes a model's input, in every command alike: resize, centre crop, normalise."""

    size: tuple[int, int]
    """Height and width of the crop, which is what the model sees."""
    resize: tuple[int, ...]
    """One number: the short side before the crop. Two: exact height and width, whatever the shape was."""
    interpolation: Interpolation = "bicubic"
    crop_rounding: CropRounding = "nearest"
    """Of the crop's corner: torchvision and timm round to the nearest pixel (half to even), transformers down."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        limit = SIZE_LIMITS["image_size"]
        if len(self.resize) not in (1, 2) or not all(0 < side <= limit for side in (*self.size, *self.resize)):
            raise UsageError(f"resize is {self.resize} for a crop of {self.size}; give one or two sides up to {limit}")
        across = self.resize if len(self.resize) == 2 else self.resize * 2
        if any(crop > side for crop, side in zip(self.size, across, strict=True)):
            raise UsageError(f"resize {self.resize} is smaller than the crop {self.size} taken from it")
        _check_choices(self)
        if len(self.mean) != len(self.std) or not self.mean:
            raise UsageError(f"mean {self.mean} and std {self.std} must name the same channels")
        least, most = NORMALIZATION_RANGE
        if not all(-most <= value <= most for value in self.mean) or not all(
            least <= value <= most for value in self.std
        ):
            raise UsageError(
                f"mean is {self.mean} and std {self.std}; std must be from {least:g} to {most:g}, mean at most {most:g}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """What happens to a training image between decoding and normalisation; `Preprocess` gives its size."""

    crop: Literal["inception", "window", "pad", "squash"] = "inception"
    """inception: a part of random area and shape, resized. window: resized as for evaluation, then a random crop of the
    final size. pad: resized to the final size, padded by an eighth of it, then a random crop. squash: resized alone."""
    area: tuple[float, float] = (0.05, 1.0)
    """Least and greatest share of the image in an inception crop."""
    flip: bool = True
    """Mirror left and right, half of the time."""
    randaugment: tuple[int, int] | None = None
    """Operations an image and their magnitude, on the authors' scale of 10; magnitudes above it are theirs too."""
    jitter: float = 0.0
    """Brightness, contrast and saturation times a factor from 1 - jitter to 1 + jitter."""
    erase: float = 0.0
    """How often a random rectangle becomes noise."""
    mixup: float = 0.0
    """Alpha of the Beta distribution that says how much of the next image is mixed in; 0 for never."""
    cutmix: float = 0.0
    """Alpha of the share of the next image pasted in; where mixup is set too, each takes half of the batches."""

    def __post_init__(self) -> None:
        _check_choices(self)
        least, most = self.area
        if not 0 < least <= most <= 1:
            raise UsageError(f"area is {self.area}; it must be two shares with 0 < least <= most <= 1")
        for name, top in (("jitter", 1), ("erase", 1), ("mixup", 2), ("cutmix", 2)):
            if not 0 <= getattr(self, name) <= top:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be from 0 to {top}")
        if self.randaugment is not None and not (1 <= self.randaugment[0] <= 16 and 0 <= self.randaugment[1] <= 30):
            raise UsageError(f"randaugment is {self.randaugment}; give 1 to 16 operations and a magnitude from 0 to 30")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients become steps."""

    kind: Literal["adam", "sgd", "muon"] = "adam"
    """adam: decoupled decay (AdamW). muon: orthogonalised momentum for the blocks' matrices, adam for the rest."""
    lr: float
    """At the top of the schedule."""
    weight_decay: float = 0.0
    """Of kernels alone, times the learning rate, as PyTorch's AdamW has it; the authors' 1e-4 at lr 1e-3 is 0.1.
    Under every kind: it never enters the gradient."""
    momentum: float = 0.9
    """Of sgd; of muon's matrices 0.95 is usual."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    head_lr: float | None = None
    """Of a head that begins with zeros; None for `lr`."""
    adam_lr: float | None = None
    """Of muon: the learning rate of what adam trains; None for `lr`."""
    clip: float | None = None
    """Greatest norm of all gradients together."""
    layer_decay: float = 1.0
    """Each block's learning rate over that of the block above it; the head has the whole, the embedding the least."""

    def __post_init__(self) -> None:
        _check_choices(self)
        for name, least, most in (("lr", 0, math.inf), ("eps", 0, 1), ("layer_decay", 0, 1)):
            if not least < getattr(self, name) <= most or math.isinf(getattr(self, name)):
                raise UsageError(f"{name} is {getattr(self, name)}; it must be above {least} and at most {most}")
        for name in ("momentum", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be from 0 to below 1")
        if not 0 <= self.weight_decay < math.inf:
            raise UsageError(f"weight_decay is {self.weight_decay}; it must be 0 or more")
        for name in ("clip", "adam_lr", "head_lr"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be above 0, or None")
        if self.adam_lr is not None and self.kind != "muon":
            raise UsageError(f"adam_lr is for muon, which leaves some parameters to adam; {self.kind} takes lr alone")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the steps, as a share of its top."""

    decay: Literal["cosine", "linear", "rsqrt", "constant", "stairs"] = "cosine"
    warmup: int = 0
    """Steps of a straight line from nothing to the top."""
    final_lr_scale: float = 0.0
    """Of cosine and linear: the share at the end."""
    timescale: int = 10_000
    """Of rsqrt: steps after warm-up in which it falls by a factor of sqrt(2)."""
    cooldown: int = 0
    """Of rsqrt and constant: last steps, in which the learning rate also falls to nothing in a straight line."""
    milestones: tuple[float, ...] | None = None
    """Of stairs: shares of the run after which the learning rate is a tenth of what it was."""

    def __post_init__(self) -> None:
        _check_choices(self)
        if self.warmup < 0 or self.cooldown < 0 or self.timescale < 1 or not 0 <= self.final_lr_scale <= 1:
            raise UsageError(f"{self} cannot be: steps are 0 or more, the timescale 1 or more, final from 0 to 1")
        falls = self.decay in ("cosine", "linear")
        if (self.final_lr_scale and not falls) or (self.cooldown and self.decay not in ("rsqrt", "constant")):
            raise UsageError(f"{self} cannot be: cosine and linear fall to `final`, rsqrt and constant by a cooldown")
        if (self.decay == "stairs") != bool(self.milestones) or any(not 0 < part < 1 for part in self.milestones or ()):
            raise UsageError(f"{self} cannot be: decay stairs, and no other, has shares of the run between 0 and 1")


MASK_TOKEN, UNCHANGED_PATCH = (
    -1,
    -2,
)  # what stands in a patch's place: the [mask], or itself; from 0 on, a patch of the next image


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedConfig:
    """Learning without labels: some patches of an image are hidden, and what they show is to be told."""

    kind: Literal["mpp", "mae"]
    """mpp: their embeddings are replaced, and their own output tokens tell (Dosovitskiy et al. 2021). mae: the encoder
    gets the other patches alone, and a light decoder tells (He et al. 2022)."""
    mask_ratio: float
    """Of an image's patches that are hidden."""
    target: MaskedTarget
    """mean-colour: at 3 bits a channel, of 512. 4x4-colours: the patch downsized, each place likewise. pixels: by the
    squared error. normalised-pixels: likewise, less the patch's mean and over its deviation."""

    def __post_init__(self) -> None:
        _check_choices(self)
        if not 0 < self.mask_ratio < 1:
            raise UsageError(f"share is {self.mask_ratio}; it must lie between 0 and 1")

    def count_masked(self, num_patches: int) -> int:
        """How many of so many patches are hidden; every image has as many, so that shapes never change."""
        count = round(self.mask_ratio * num_patches)
        if not 1 <= count < num_patches:
            raise UsageError(
                f"{self.mask_ratio:.0%} of {num_patches} patches hide {count}; of each image some must, not all"
            )
        return count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run, but for its data, seed and machine."""

    model: str | None
    """A preset, its weights random; None for fine-tuning, which is given a model."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the preset's configuration that are otherwise, such as pool."""
    image_size: int | None = 224
    """None for that of the model to fine-tune."""
    resize: float | None = None
    """The short side before the crop, in sides of the crop; None for that of the model to fine-tune."""
    batch: int = 4096
    """Images in a step, whatever the number of GPUs."""
    epochs: float
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    augment: AugmentConfig = dataclasses.field(default_factory=AugmentConfig)
    masked: MaskedConfig | None = None
    """What is hidden and to be told, where there is nothing else to learn; None for labels."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    label_smoothing: float = 0.0
    head_bias: float = 0.0
    """What the head's bias begins with: log(1 / classes) and the like for sigmoid."""
    head_init: Literal["probe"] | None = None
    """What the new head of fine-tuning starts from: a probe of the features; None for zeros, which are the paper's."""
    mimetic: bool = False
    """Whether attention begins as trained models have it (Trockman and Kolter 2023)."""
    dropout: float = 0.0
    stochastic_depth: float = 0.0
    ema: float = 0.0
    """Decay of the average of the weights that is evaluated and kept; 0 for the weights themselves."""
    ema_warmup: bool = True
    """Whether the average follows closely at first, as it must from random weights; the paper's does not."""
    trainable_layers: int | None = None
    """How many layers below the head learn; 0 for the head alone, None for all."""
    logit_adjustment: bool = False
    """Whether every class counts alike, however many images it has."""
    data: str | None = None
    """The set it is for."""
    source: str
    """Where the numbers come from."""
    result: str | None = None
    """What was published or measured with it."""

    def __post_init__(self) -> None:
        _check_choices(self)
        if self.resize is not None and not 1 <= self.resize <= 4:
            raise UsageError(f"resize is {self.resize}; it must be from 1 to 4 sides of the crop")
        if self.trainable_layers is not None and self.trainable_layers < 0:
            raise UsageError(f"layers is {self.trainable_layers}; it must be 0 (the head alone) or more")
        if self.batch < 1 or not 0 < self.epochs < math.inf:
            raise UsageError(f"batch is {self.batch} and epochs {self.epochs}; both must be above 0")
        for name in ("label_smoothing", "dropout", "stochastic_depth", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be from 0 to below 1")
        if self.masked is not None:
            self._check_masked()

    def _check_masked(self) -> None:
        """Refuse what needs labels, or a model that has learned before."""
        of = {
            "mixup": self.augment.mixup,
            "cutmix": self.augment.cutmix,
            "layer_decay": self.optimizer.layer_decay != 1,
        }
        of |= {name: getattr(self, name) for name in ("logit_adjustment", "label_smoothing", "head_bias")}
        of["layers"] = self.trainable_layers is not None
        if unfit := [name for name, value in of.items() if value]:
            raise UsageError(f"{unfit[0]} is for learning from labels, and this recipe is masked: leave it away")
        if self.model is None:
            raise UsageError("a masked recipe begins with random weights and names its preset")


def compute_grid(image_size: tuple[int, int], patch: int) -> tuple[int, int]:
    """Patches down and across an image, or an error that names the sizes that fit."""
    height, width = image_size
    if height % patch or width % patch or not height or not width:
        near = " x ".join(str(max(1, round(side / patch)) * patch) for side in image_size)
        raise UsageError(
            f"{height} x {width} does not divide into patches of {patch} x {patch} pixels; the nearest is {near}"
        )
    return height // patch, width // patch


def check_patches(image_size: tuple[int, int], patch: int) -> None:
    """Refuse an image size that does not divide into patches, or into more than any model takes."""
    rows, columns = compute_grid(image_size, patch)
    if rows * columns > MAX_PATCHES:
        raise UsageError(
            f"{image_size[0]} x {image_size[1]} in patches of {patch} x {patch} pixels are {rows * columns:,} patches;"
            f" at most {MAX_PATCHES:,} are computed"
        )


def expand_image_size(size: int | tuple[int, ...]) -> tuple[int, int]:
    """Height and width: of a square where one number is given."""
    both = (size, size) if isinstance(size, int) else size * 2 if len(size) == 1 else size
    if len(both) != 2:
        raise UsageError(f"an image size is one side or height and width, not {len(both)} numbers")
    return both[0], both[1]


T = TypeVar("T")


def to_json(value: Any) -> dict[str, Any]:
    """The fields of a configuration as JSON values."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(value).items()}


_OLD_KEYS: dict[str, dict[str, str]] = {  # class -> key in files of earlier versions -> its field now
    "ConvConfig": {"standardise": "standardization", "standardise_eps": "standardization_eps"},
    "MaskedConfig": {"share": "mask_ratio"},
    "NativeHeader": {"several": "multi_label", "tried": "precision_measurements", "ranges": "activation_ranges"},
    "Origin": {"licence": "license"},
    "PrecisionMeasurement": {
        "speed": "speedup",
        "top1": "top1_agreement",
        "sure": "confident_agreement",
        "sure_images": "confident_images",
        "change": "mean_probability_change",
    },
    "Recipe": {
        "optimiser": "optimizer",
        "balanced": "logit_adjustment",
        "layers": "trainable_layers",
        "head": "head_init",
    },
    "ScheduleConfig": {"final": "final_lr_scale", "stairs": "milestones"},
}
_OLD_RUN_KEYS = {
    "several": "multi_label",
    "everything": "train_on_val",
    "measured": "eval_split",
    "view": "train_preprocess",
    "world": "world_size",
}


def upgrade_keys(kind: Any, value: Any) -> Any:
    """JSON fields of the dataclass `kind`, at any depth, under the names that they have now."""
    if typing.get_origin(kind) is types.UnionType:
        kind = _choose_class_by_kind(typing.get_args(kind), value)
    if not dataclasses.is_dataclass(kind) or not isinstance(value, dict):
        return value
    hints, new_names = typing.get_type_hints(kind), _OLD_KEYS.get(cast(type, kind).__name__, {})
    renamed = {new_names.get(str(name), str(name)): field for name, field in value.items()}
    return {name: upgrade_keys(hints.get(name), field) for name, field in renamed.items()}


def upgrade_run_config(config: dict[str, Any]) -> dict[str, Any]:
    """A run's config.json under the names that its keys have now."""
    renamed = {_OLD_RUN_KEYS.get(name, name): value for name, value in config.items()}
    return renamed | {"recipe": upgrade_keys(Recipe, renamed.get("recipe"))}


def from_json(kind: type[T], value: object) -> T:
    """The dataclass written by `to_json`; an unknown, missing or mistyped field is an error."""
    if not isinstance(value, dict):
        raise UsageError(f"{kind.__name__} must be an object of fields, not {value!r:.80}")
    new_names = _OLD_KEYS.get(kind.__name__, {})
    value = {new_names.get(str(name), str(name)): field for name, field in value.items()}
    hints = typing.get_type_hints(kind)
    required = {field.name for field in dataclasses.fields(cast(Any, kind)) if field.default is dataclasses.MISSING}
    if unknown := sorted(value.keys() - hints.keys()):
        raise UsageError(f"{kind.__name__} has no field {unknown[0]!r:.80}")
    if missing := sorted(required - value.keys()):
        raise UsageError(f"{kind.__name__} lacks the field {missing[0]!r}")
    return kind(**{name: _convert_value(name, hints[name], field) for name, field in value.items()})


def parse_field(kind: type, field: str, text: str, name: str) -> Any:
    """The value of a field that a command line calls `name`: true, 8, 0.1, none, cosine, or 2,10."""
    hint = typing.get_type_hints(kind)[field]
    if typing.get_origin(hint) is Literal:  # where none may be a choice
        return _convert_value(name, hint, text.strip())
    return _convert_value(
        name, hint, [_parse_word(word) for word in text.split(",")] if "," in text else _parse_word(text)
    )


def _parse_word(word: str) -> object:
    word = word.strip()
    if word.lower() in _LITERAL_WORDS:
        return _LITERAL_WORDS[word.lower()]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(word)
    return word


def _describe_type(hint: Any) -> str:
    """What a value may be, in words."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if typing.get_origin(hint) is types.UnionType:
        return " or ".join("none" if part is type(None) else _describe_type(part) for part in arguments)
    if typing.get_origin(hint) is tuple and Ellipsis not in arguments:
        return f"{len(arguments)} of {getattr(arguments[0], '__name__', arguments[0])}"
    return str(getattr(hint, "__name__", hint))


def _convert_value(name: str, hint: Any, value: object) -> Any:
    """`value` if it is what `hint` says; lists become tuples, objects dataclasses, whole numbers floats where asked."""
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case types.UnionType:
            if value is None and type(None) in arguments:
                return None
            return _convert_value(name, _choose_class_by_kind(arguments, value), value)
        case origin if origin is tuple and isinstance(value, list | tuple):
            kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
            if len(kinds) == len(value):
                return tuple(_convert_value(name, kind, item) for kind, item in zip(kinds, value, strict=True))
        case origin if origin is Literal:
            if isinstance(value, str) and value in arguments:
                return value
        case None if dataclasses.is_dataclass(hint):
            return from_json(cast(type, hint), value)
        case None if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
            if abs(value) < 2**53 or value != value:
                return float(value)
        case None if type(value) is hint:
            return value
    raise UsageError(f"{name} is {value!r:.80}; it must be {_describe_type(hint)}")


def _choose_class_by_kind(options: tuple[Any, ...], value: object) -> Any:
    """Which of several classes a JSON object is of, by its `kind`; the first where they have none."""
    kind = value.get("kind") if isinstance(value, dict) else None
    classes = [option for option in options if option is not type(None)]
    return next((option for option in classes if getattr(option, "kind", None) == kind is not None), classes[0])


def _check_numbers(config: Any) -> None:
    """Refuse sizes outside of LIMITS and epsilons that are none."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name.endswith("_eps") and not 0 < value < 1:
            raise UsageError(f"{field.name} is {value}; it must lie between 0 and 1")
        if field.name in SIZE_LIMITS:
            least, limit = 0 if field.name in _ZERO_ALLOWED else 1, SIZE_LIMITS[field.name]
            for number in value if isinstance(value, tuple) else (value,):
                if not least <= number <= limit:
                    raise UsageError(f"{field.name} is {number}; it must be from {least} to {limit}")


def _check_choices(config: object) -> None:
    """Refuse a value outside the closed list of its field."""
    for name, hint in typing.get_type_hints(type(config)).items():
        choices = typing.get_args(hint)
        if typing.get_origin(hint) is Literal and getattr(config, name) not in choices:
            raise UsageError(f"{name} is {getattr(config, name)!r}; choose one of {', '.join(map(str, choices))}")
