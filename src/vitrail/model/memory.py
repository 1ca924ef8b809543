"""How many bytes training holds on a device, by part and without allocating any of it.

Weights, gradients and what the optimizer keeps follow from the number of parameters. What the forward pass keeps for
the backward pass is counted operation by operation, as autograd saves it in eager mode with fused attention:

    LayerNorm      its input in float32, a mean and a deviation     linear, convolution   its input
    attention      queries, keys, values, output, one number a row  GELU                  its input
    group norm     its input, and the ReLU behind it its output     dropout               its mask

Under autocast the inputs of matrix products are bf16, and the residual stream stays float32. Not counted: gradients of
activations, of which a few exist at a time; the loss; what the device's libraries and allocator take for themselves.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import torch
from torch import nn

from vitrail.config import BiTConfig, ConvConfig, ViTConfig
from vitrail.errors import UsageError
from vitrail.model.build import ModelConfig, build_model
from vitrail.model.cost import count_parameters
from vitrail.model.resnet import StandardizedConv2d
from vitrail.model.vit import Block

FLOAT_BYTES = 4  # bytes of weights, gradients, averages and the residual stream
INDEX_BYTES = 8  # bytes of a place, which max pooling remembers


class ElementSizes(NamedTuple):
    """Bytes of a number by what needs it."""

    matmul: int
    """In a matrix product or convolution, and in GELU."""
    norm: int
    """In group norm and softmax."""
    mask: int
    """In dropout."""


AUTOCAST_SIZES = ElementSizes(matmul=2, norm=4, mask=1)  # bf16 training on a GPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes on one device."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    """Of the weights, where the recipe has one."""
    weight_copies: int
    """Of weights: in bf16 until the backward pass, and where they are sharded also two blocks put together."""
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(dataclasses.astuple(self))


def estimate_training_memory(
    config: ModelConfig,
    *,
    optimizer: Literal["adam", "sgd", "muon"],
    ema: bool,
    images: int,
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
    recompute: bool = False,
    shards: int = 1,
) -> TrainingMemory:
    """What training takes on a device that computes so many images at once, its state divided over `shards` devices."""
    weights = FLOAT_BYTES * count_parameters(config)
    moments = 2 if optimizer == "adam" else 1  # muon leaves little to adam
    each = count_activation_bytes(config, dropout=dropout, stochastic_depth=stochastic_depth, recompute=recompute)
    return TrainingMemory(
        weights=-(-weights // shards),
        gradients=-(-weights // shards),
        optimizer=-(-moments * weights // shards),
        ema=-(-weights // shards) if ema else 0,
        weight_copies=count_weight_copy_bytes(config) + (2 * _count_gathered_block_bytes(config) if shards > 1 else 0),
        activations=images * each,
    )


def count_weight_copy_bytes(config: ModelConfig, sizes: ElementSizes = AUTOCAST_SIZES) -> int:
    """Bytes of the weights' copies that the backward pass needs: in bf16, and of kernels also centred in float32."""
    total = 0
    with torch.device("meta"):
        model = build_model(config)
    for name, module in model.named_modules():
        if isinstance(module, StandardizedConv2d):
            total += module.weight.numel() * (FLOAT_BYTES + sizes.matmul)
        elif sizes.matmul == FLOAT_BYTES or not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        elif name != "patch_embed.proj" or (isinstance(config, ViTConfig) and config.stem):
            total += module.weight.numel() * sizes.matmul  # pixels need no gradient, so nor their embedding's weight
    return total


def _count_gathered_block_bytes(config: ModelConfig) -> int:
    """Bytes of the weights that are put together at a time where they are sharded; of a ResNet all."""
    if isinstance(config, BiTConfig):
        return FLOAT_BYTES * count_parameters(config)
    with torch.device("meta"):
        return FLOAT_BYTES * sum(parameter.numel() for parameter in Block(config).parameters())


def count_activation_bytes(
    config: ModelConfig,
    *,
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
    recompute: bool = False,
    sizes: ElementSizes = AUTOCAST_SIZES,
) -> int:
    """Bytes that one image's forward pass keeps for the backward pass, its pixels included."""
    pixels = FLOAT_BYTES * config.channels * config.image_size[0] * config.image_size[1]
    if isinstance(config, BiTConfig):
        if dropout or stochastic_depth or recompute:
            raise UsageError(
                "a ResNet has neither dropout nor stochastic depth, and keeps its activations: not with --recompute"
            )
        last = math.prod(-(-side // config.conv.stride) for side in config.image_size)
        top = config.num_features * (2 * last * sizes.norm + sizes.matmul)
        return (
            pixels + _count_convolution_bytes(config.conv, config.channels, config.image_size, sizes, stem=False) + top
        )
    blocks = _count_blocks_bytes(config, dropout > 0, stochastic_depth, recompute, sizes)
    return pixels + _count_embedding_bytes(config, dropout > 0, sizes) + blocks + _count_head_bytes(config, sizes)


def _count_tokens(config: ViTConfig) -> int:
    return config.num_prefix_tokens + config.grid[0] * config.grid[1]


def _count_norm_bytes(config: ViTConfig, tokens: int) -> int:
    return tokens * (FLOAT_BYTES * config.width + 2 * FLOAT_BYTES)


def _count_embedding_bytes(config: ViTConfig, dropout: bool, sizes: ElementSizes) -> int:
    """Stem, flattened patches, the mask of dropout."""
    channels, stem = config.channels, 0
    if config.stem is not None:
        channels = config.stem.out_channels
        stem = _count_convolution_bytes(config.stem, config.channels, config.image_size, sizes, stem=True)
    patches = config.grid[0] * config.grid[1] * config.patch**2 * channels * sizes.matmul
    return stem + patches + (_count_tokens(config) * config.width * sizes.mask if dropout else 0)


def _count_last_block_tokens(config: ViTConfig) -> int:
    """How many tokens the last block computes, as ViT.head_tokens has it."""
    class_alone = config.pool == "class" and config.positions != "relative"
    return 1 + config.distillation_token if class_alone else _count_tokens(config)


def _count_blocks_bytes(
    config: ViTConfig, dropout: bool, stochastic_depth: float, recompute: bool, sizes: ElementSizes
) -> int:
    """All blocks; where they are computed again, their inputs and what the one that is needs."""
    computed = [_count_tokens(config)] * (config.depth - 1) + [_count_last_block_tokens(config)]
    if recompute:
        inputs = config.depth * FLOAT_BYTES * _count_tokens(config) * config.width
        return inputs + max(_count_block_bytes(config, queries, dropout, sizes) for queries in computed)
    total = 0.0
    for index, queries in enumerate(computed):
        rate = stochastic_depth * index / max(config.depth - 1, 1)
        branches = (
            2 * FLOAT_BYTES * queries * config.width if rate else 0
        )  # kept where they are added to some images only
        total += (1 - rate) * (_count_block_bytes(config, queries, dropout, sizes) + branches)
    return round(total)


def _count_block_bytes(config: ViTConfig, queries: int, dropout: bool, sizes: ElementSizes) -> int:
    """A block that computes so many tokens: all, or those that the head reads."""
    width, tokens, patches = config.width, _count_tokens(config), config.grid[0] * config.grid[1]
    fused = queries == tokens and config.positions != "relative"
    numbers = tokens * width + (queries + 2 * tokens) * width + queries * width  # input; q, k and v; output
    if config.positions == "relative":
        offsets = 2 * patches - 1
        numbers += (patches + offsets) * width + config.heads * patches * offsets  # queries by offsets, the products
    numbers += queries * (width + 2 * config.mlp)  # the MLP's input, GELU's and the second layer's
    if config.layer_scale:
        numbers += 2 * queries * width
    # Softmax keeps its output; where that is not what products take, they keep a copy.
    row = FLOAT_BYTES if fused else tokens * sum({sizes.norm, sizes.matmul})
    masks = queries * (2 * width + config.mlp) * sizes.mask if dropout else 0
    norms = _count_norm_bytes(config, tokens) + _count_norm_bytes(config, queries)
    return numbers * sizes.matmul + config.heads * queries * row + masks + norms


def _count_head_bytes(config: ViTConfig, sizes: ElementSizes) -> int:
    """The last norm, the pool, the head."""
    width, patches = config.width, config.grid[0] * config.grid[1]
    norm = _count_norm_bytes(config, 1 if config.pool == "mean-norm" else _count_last_block_tokens(config))
    numbers = config.num_features * (1 + config.distillation_head) + (width if config.hidden_head else 0)
    if config.pool != "map":
        return norm + numbers * sizes.matmul
    numbers += 3 * patches * width + 2 * width + 2 * config.mlp  # input, k and v; output and the MLP of one token
    row = patches * sum({sizes.norm, sizes.matmul})
    return norm + numbers * sizes.matmul + config.heads * row + _count_norm_bytes(config, 1)


def _count_convolution_bytes(
    config: ConvConfig, channels: int, image_size: tuple[int, int], sizes: ElementSizes, *, stem: bool
) -> int:
    """What a BiT ResNet's convolutions keep, or those of a hybrid's stem; convolutions keep their padded input."""
    product, active = sizes.matmul, 2 * sizes.norm  # a norm's input and the ReLU's output
    inputs = config.width
    size = _halve(image_size)
    total = channels * _count_padded_area(image_size, 3) * product
    total += inputs * (
        _count_padded_area(size) * active + _count_padded_area(size, 1) * sizes.norm
        if stem
        else _count_padded_area(size, 1) * product
    )
    size = _halve(size)
    total += inputs * _count_padded_area(size) * INDEX_BYTES
    for stage, count in enumerate(config.units):
        width = config.width * 2**stage
        for unit in range(count):
            before, size = size, _halve(size) if stage and not unit else size
            total += inputs * _count_padded_area(before) * product * (1 if unit else 2)  # also the projection's
            total += width * (_count_padded_area(before) * active + _count_padded_area(before, 1) * product)
            total += width * _count_padded_area(size) * (active + product)
            if stem:  # the third norm, that of the projection, and the ReLU after the sum
                total += 4 * width * _count_padded_area(size) * sizes.norm * (2 if unit else 3)
            else:
                total += inputs * _count_padded_area(before) * active
            inputs = 4 * width
    return total


def _halve(size: tuple[int, int]) -> tuple[int, int]:
    """A map of odd side is halved upwards."""
    return -(-size[0] // 2), -(-size[1] // 2)


def _count_padded_area(size: tuple[int, int], padding: int = 0) -> int:
    return (size[0] + 2 * padding) * (size[1] + 2 * padding)
