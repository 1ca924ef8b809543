"""What a model's weights compute: Vision Transformers, hybrids and BiT ResNets."""

import dataclasses
from typing import Any, Literal

from vitrail.config.checks import check_choices
from vitrail.errors import UsageError

Pool = Literal["class", "norm-mean", "mean-norm", "map", "class-mean"]
Positions = Literal["none", "learned-1d", "learned-2d", "sincos-2d", "relative", "relative-bias"]
PositionsAt = Literal["stem", "every-layer", "every-layer-shared"]
Resample = Literal[
    "bilinear-corners",
    "bilinear",
    "bilinear-antialias",
    "bicubic-antialias",
    "bicubic",
    "bicubic-corners",
    "bicubic-offset",
]
Precision = Literal["float32", "bfloat16", "int8", "openvino-int8"]

SIZE_LIMITS = {  # far above any published model; a hostile file is refused before anything is built from it
    "width": 65_536,
    "depth": 1_024,
    "mlp": 1_048_576,
    "heads": 1_024,
    "patch": 1_024,
    "channels": 1_024,
    "classes": 10_000_000,
    "registers": 4_096,
    "projection": 65_536,
    "pool_heads": 1_024,
    "pool_mlp": 1_048_576,
    "image_size": 16_384,
    "units": 1_024,
}
MAX_PATCHES = 65_536  # 4096 x 4096 pixels in patches of 16; each one costs memory even where it has no weights
_ZERO_ALLOWED = ("classes", "registers", "projection", "pool_heads", "pool_mlp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvConfig:
    """The convolutions of a BiT ResNet or of a hybrid's stem: bottlenecks, standardized kernels, group norm."""

    units: tuple[int, ...]
    """Bottleneck units of each stage; a hybrid's stem may have none and end after its first convolution."""
    width_factor: float = 1
    """The first convolution's channels in 64s; a multiple of 0.5, as group norm has 32 groups."""
    norm_eps: float
    standardization: Literal["std + eps", "sqrt(var + eps)"]
    """The divisor of a kernel's centered weights."""
    standardization_eps: float

    def __post_init__(self) -> None:
        _check_sizes(self)
        check_choices(self)
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
        """Pixels from one position of the feature map to the next."""
        return 4 * 2 ** max(len(self.units) - 1, 0)

    @property
    def out_channels(self) -> int:
        """Channels of the feature map."""
        return self.width * (2 ** (len(self.units) + 1) if self.units else 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiTConfig:
    """The function that a BiT ResNet's weights compute: pre-activation units, fixed padding."""

    kind: Literal["bit"] = "bit"
    conv: ConvConfig
    image_size: tuple[int, int] = (224, 224)
    """The size it was trained at; it accepts any."""
    channels: int = 3
    classes: int = 1000
    """Outputs of the head; 0 for a model without one, which returns its features."""

    def __post_init__(self) -> None:
        _check_sizes(self)
        if not self.conv.units:
            raise UsageError("a BiT ResNet has at least one stage")

    @property
    def num_features(self) -> int:
        """Width of the features that the head reads."""
        return self.conv.out_channels


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary positions (RoPE): queries and keys of patches are turned by angles that grow with row and column."""

    places: Literal["normalized", "index"]
    """Where a patch is. normalized: its center, each side of the image from -1 to 1 (DINOv3). index: its row and column
    (EVA-02, PE)."""
    base: float = 100.0
    """What the periods grow to, from 1 by equal factors; each axis has as many as a quarter of a head's channels."""
    reference: tuple[int, int] | None = None
    """The grid to which rows and columns of `index` are stretched; None for as they are."""
    offset: int = 0
    """What is added to each row and column of `index`."""
    order: Literal["yx", "xy"] = "yx"
    """Which half of the angles comes first: those of the row or those of the column."""
    bfloat16_periods: bool = False
    """Whether periods are rounded to bfloat16, as Meta's own files of DINOv3 store them."""

    def __post_init__(self) -> None:
        check_choices(self)
        if not 1 < self.base <= 1e9:
            raise UsageError(f"rotary base is {self.base:g}; it must be above 1 and at most 1e9")
        if self.places == "normalized" and (self.reference or self.offset):
            raise UsageError("normalized rotary positions have no reference grid and no offset")
        if self.reference and not all(1 <= side <= SIZE_LIMITS["image_size"] for side in self.reference):
            raise UsageError(f"rotary reference is {self.reference}; both sides must be from 1 to 16384")
        if not 0 <= self.offset <= SIZE_LIMITS["image_size"]:
            raise UsageError(f"rotary offset is {self.offset}; it must be from 0 to 16384")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The function that a Vision Transformer's weights compute."""

    kind: Literal["vit"] = "vit"
    width: int
    depth: int
    mlp: int
    heads: int
    patch: int
    """Side of a patch: in pixels, or in positions of the stem's feature map."""
    stem: ConvConfig | None = None
    """A hybrid's convolutions, whose feature map is cut into patches instead of the image."""
    image_size: tuple[int, int] = (224, 224)
    """Height and width of the images that the stored positions are for; other sizes resample them."""
    drop_remainder: bool = False
    """Whether pixels at the bottom and right that do not fill a patch are left unread; otherwise such images are
    refused."""
    channels: int = 3
    classes: int = 1000
    """Outputs of the head; 0 for a model without one, which returns its features."""

    class_token: bool = True
    distillation_token: bool = False
    distillation_head: bool = False
    """A second head on the distillation token; the logits are the mean of both."""
    registers: int = 0

    pool: Pool = "class"
    """class: LN, then the class token. norm-mean: LN, then the mean of the patches (Google). mean-norm: the mean, then
    LN (timm). map: LN, then attention pooling. class-mean: the class token beside the mean of the patches (DINOv2)."""
    pool_heads: int = 0
    """Heads of attention pooling; 0 for as many as a block has."""
    pool_mlp: int = 0
    """Hidden width of attention pooling's MLP; 0 for that of a block."""
    pool_prefix: bool = False
    """Whether attention pooling reads class token and registers too, beside the patches."""
    hidden_head: bool = False
    """The hidden layer (width D, tanh) of the pre-training head, before the last linear layer."""
    projection: int = 0
    """Width of the linear map of the pooled features into the space of texts (CLIP); 0 for none."""
    normalize_features: bool = False
    """Whether the head reads features of length 1, as one made from texts does."""

    positions: Positions = "learned-1d"
    """relative: embeddings of the offsets between patches, times queries. relative-bias: a table of offsets that is
    added to the logits of each layer (BEiT). The others are added to tokens."""
    positions_at: PositionsAt = "stem"
    prefix_positions: bool = True
    """Whether class, distillation and register tokens also have learned positions."""
    resample: Resample = "bilinear-corners"
    """How positions are resampled to another grid: the operator of the weights' origin."""
    rotary: RotaryConfig | None = None
    """Rotary positions in every layer, beside or instead of `positions`."""

    qkv_bias: bool = True
    layer_scale: bool = False
    gelu: Literal["erf", "tanh", "quick"] = "tanh"
    """quick: x * sigmoid(1.702 x), as OpenAI's CLIP has it."""
    gated_mlp: bool = False
    """Whether the MLP is SwiGLU: SiLU of one linear layer times another, `mlp` wide each."""
    mlp_norm: bool = False
    """A LayerNorm before the last linear layer of a gated MLP (EVA-02)."""
    attention_norm: bool = False
    """A LayerNorm before the last linear layer of attention (EVA-02 of CLIP)."""
    norm_pre: bool = False
    """A LayerNorm before the first block (CLIP)."""
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _check_sizes(self)
        check_choices(self)
        if self.width % self.heads:
            raise UsageError(f"width {self.width} is not a multiple of heads {self.heads}")
        check_patches(self.image_size, self.stride, drop_remainder=self.drop_remainder)
        self._check_tokens()
        self._check_positions()
        if self.mlp_norm and not self.gated_mlp:
            raise UsageError("mlp_norm is part of a gated MLP; set gated_mlp=True")

    def _check_tokens(self) -> None:
        if self.pool in ("class", "class-mean") and not self.class_token:
            raise UsageError(f"pool {self.pool!r} reads the class token; set class_token=True or choose norm-mean")
        if self.distillation_token and not self.class_token:
            raise UsageError("a distillation token needs a class token; set class_token=True")
        if self.distillation_head and not (self.distillation_token and self.pool == "class" and self.classes):
            raise UsageError("distillation_head needs distillation_token=True, pool='class' and classes > 0")
        if (self.hidden_head or self.projection) and self.pool == "class-mean":
            name = "hidden_head" if self.hidden_head else "projection"
            raise UsageError(f"{name} reads one token's width; pool 'class-mean' concatenates two")
        if self.hidden_head and self.projection:
            raise UsageError("a model has hidden_head or projection, not both")
        if (self.pool_heads or self.pool_mlp or self.pool_prefix) and self.pool != "map":
            raise UsageError(f"pool_heads, pool_mlp and pool_prefix are of pool 'map', not {self.pool!r}")
        if self.pool_heads and self.width % self.pool_heads:
            raise UsageError(f"width {self.width} is not a multiple of pool_heads {self.pool_heads}")

    def _check_positions(self) -> None:
        if self.positions in ("none", "relative", "relative-bias") and self.positions_at != "stem":
            raise UsageError(f"positions {self.positions!r} are not added to tokens; positions_at must be 'stem'")
        if self.positions == "learned-2d" and self.width % 2:
            raise UsageError(f"learned-2d positions need an even width, not {self.width}")
        if self.positions == "sincos-2d" and (self.width % 4 or self.width < 8):
            raise UsageError(f"sincos-2d positions need a width that is a multiple of 4, at least 8, not {self.width}")
        if self.positions == "relative-bias" and self.num_prefix_tokens > self.class_token:
            raise UsageError("a table of relative biases has no entries for registers or a distillation token")
        if self.rotary and self.width // self.heads % 4:
            raise UsageError(
                f"rotary positions need heads whose width is a multiple of 4, not {self.width // self.heads}"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches at `image_size`."""
        return self.compute_grid(self.image_size)

    def compute_grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches in an image of this size."""
        return compute_grid(image_size, self.stride, drop_remainder=self.drop_remainder)

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
    def has_attention_bias(self) -> bool:
        """Whether positions are added to attention's logits, which fused kernels do not compute."""
        return self.positions in ("relative", "relative-bias")

    @property
    def num_features(self) -> int:
        """Width of the features that the head reads."""
        return self.projection or self.width * (2 if self.pool == "class-mean" else 1)


ModelConfig = ViTConfig | BiTConfig


def compute_grid(image_size: tuple[int, int], patch: int, *, drop_remainder: bool = False) -> tuple[int, int]:
    """Rows and columns of patches in an image; other sizes are refused, and the error names the nearest that fits."""
    height, width = image_size
    if drop_remainder and min(image_size) >= patch:
        return height // patch, width // patch
    if height % patch or width % patch or not height or not width:
        nearest = " x ".join(str(max(1, round(side / patch)) * patch) for side in image_size)
        raise UsageError(
            f"{height} x {width} does not divide into patches of {patch} x {patch} pixels; the nearest is {nearest}"
        )
    return height // patch, width // patch


def check_patches(image_size: tuple[int, int], patch: int, *, drop_remainder: bool = False) -> None:
    """Refuse an image size that does not divide into patches, or makes more than MAX_PATCHES."""
    rows, columns = compute_grid(image_size, patch, drop_remainder=drop_remainder)
    if rows * columns > MAX_PATCHES:
        raise UsageError(
            f"{image_size[0]} x {image_size[1]} in patches of {patch} x {patch} pixels are {rows * columns:,} patches;"
            f" at most {MAX_PATCHES:,} are allowed"
        )


def expand_image_size(size: int | tuple[int, ...]) -> tuple[int, int]:
    """Height and width; a single number is the side of a square."""
    sides = (size, size) if isinstance(size, int) else size * 2 if len(size) == 1 else size
    if len(sides) != 2:
        raise UsageError(f"an image size is one side or height and width, not {len(sides)} numbers")
    return sides[0], sides[1]


def _check_sizes(config: Any) -> None:
    """Refuse sizes outside SIZE_LIMITS and epsilons outside (0, 1)."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name.endswith("_eps") and not 0 < value < 1:
            raise UsageError(f"{field.name} is {value}; it must lie between 0 and 1")
        if field.name in SIZE_LIMITS:
            least, limit = 0 if field.name in _ZERO_ALLOWED else 1, SIZE_LIMITS[field.name]
            for number in value if isinstance(value, tuple) else (value,):
                if not least <= number <= limit:
                    raise UsageError(f"{field.name} is {number}; it must be from {least} to {limit}")
