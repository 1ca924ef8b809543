"""How many bytes training takes on a device, by part and without allocating any of it.

Weights, gradients and optimizer state follow from the number of parameters. The activations that the forward pass saves
for the backward pass are counted operation by operation, as autograd saves them in eager mode with fused attention:

    LayerNorm      its input in float32, a mean and a deviation     linear, convolution   its input
    attention      queries, keys, values, output, one number a row  GELU                  its input
    group norm     its input, and the ReLU behind it its output     dropout               its mask

Under autocast the inputs of matrix products are bf16, and the residual stream stays float32. Not counted: gradients of
activations, of which a few exist at a time; the loss; memory that the device's libraries and allocator use themselves.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import torch
from torch import nn

from vitrail.config import BiTConfig, ConvConfig, MaskedConfig, ModelConfig, ViTConfig
from vitrail.errors import UsageError
from vitrail.model.build import build_model
from vitrail.model.cost import count_parameters, halve_size, iterate_units
from vitrail.model.masked import build_decoder_config, count_outputs_per_patch
from vitrail.model.resnet import StandardizedConv2d
from vitrail.model.vit import Block

FLOAT_BYTES = 4  # of weights, gradients, averages and the residual stream
INDEX_BYTES = 8  # of an index, which max pooling saves


class ElementSizes(NamedTuple):
    """Bytes of one number, by the operation that saves it."""

    matmul: int
    """Matrix products, convolutions and GELU."""
    norm: int
    """Group norm and softmax."""
    mask: int
    """Dropout."""


AUTOCAST_SIZES = ElementSizes(matmul=2, norm=4, mask=1)  # bf16 training on a GPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes that training takes on one device, by part."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    """The moving average of the weights, if the recipe has one."""
    weight_copies: int
    """Copies of weights: in bf16 until the backward pass, and with sharding two gathered blocks."""
    activations: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
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
    """What training takes on a device that computes `images` at once, with its state divided over `shards` devices."""
    weights = FLOAT_BYTES * count_parameters(config)
    moments = 2 if optimizer == "adam" else 1  # muon trains few parameters with adam
    per_image = count_activation_bytes(config, dropout=dropout, stochastic_depth=stochastic_depth, recompute=recompute)
    return TrainingMemory(
        weights=-(-weights // shards),
        gradients=-(-weights // shards),
        optimizer=-(-moments * weights // shards),
        ema=-(-weights // shards) if ema else 0,
        weight_copies=count_weight_copy_bytes(config) + (2 * _count_gathered_block_bytes(config) if shards > 1 else 0),
        activations=images * per_image,
    )


def list_memory_equivalents(config: ModelConfig, masked: MaskedConfig | None) -> tuple[ModelConfig, ...]:
    """Models that together take about the memory of training `config`: itself, or with `masked` encoder and decoder."""
    if masked is None:
        return (config,)
    assert isinstance(config, ViTConfig)
    outputs = count_outputs_per_patch(config, masked)
    bare = dataclasses.replace(config, hidden_head=False, distillation_head=False, pool="norm-mean")
    if masked.kind == "mpp":
        return (dataclasses.replace(bare, classes=outputs),)
    patches = config.grid[0] * config.grid[1]
    visible = patches - masked.count_masked(patches)
    encoder = dataclasses.replace(bare, classes=0, image_size=(visible * config.stride, config.stride))
    return encoder, dataclasses.replace(build_decoder_config(config), classes=outputs)


def count_weight_copy_bytes(config: ModelConfig, sizes: ElementSizes = AUTOCAST_SIZES) -> int:
    """Bytes of the copies of weights that the backward pass needs: bf16, and for kernels also centered float32."""
    total = 0
    with torch.device("meta"):
        model = build_model(config)
    for name, module in model.named_modules():
        if isinstance(module, StandardizedConv2d):
            total += module.weight.numel() * (FLOAT_BYTES + sizes.matmul)
        elif sizes.matmul == FLOAT_BYTES or not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        elif name != "patch_embed.proj" or (isinstance(config, ViTConfig) and config.stem):
            total += (
                module.weight.numel() * sizes.matmul
            )  # pixels need no gradient, so their embedding's weight is not saved
    return total


def _count_gathered_block_bytes(config: ModelConfig) -> int:
    """Bytes of the weights that sharding gathers at a time: a block, or a whole ResNet."""
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
    """Bytes that one image's forward pass saves for the backward pass, its pixels included."""
    pixels = FLOAT_BYTES * config.channels * config.image_size[0] * config.image_size[1]
    if isinstance(config, BiTConfig):
        if dropout or stochastic_depth or recompute:
            raise UsageError("a ResNet has no dropout or stochastic depth, and keeps its activations: omit --recompute")
        last_area = math.prod(-(-side // config.conv.stride) for side in config.image_size)
        top = config.num_features * (2 * last_area * sizes.norm + sizes.matmul)
        convolutions = _count_convolution_bytes(config.conv, config.channels, config.image_size, sizes, stem=False)
        return pixels + convolutions + top
    blocks = _count_blocks_bytes(config, dropout > 0, stochastic_depth, recompute, sizes)
    return pixels + _count_embedding_bytes(config, dropout > 0, sizes) + blocks + _count_head_bytes(config, sizes)


def _count_tokens(config: ViTConfig) -> int:
    return config.num_prefix_tokens + config.grid[0] * config.grid[1]


def _count_norm_bytes(config: ViTConfig, tokens: int) -> int:
    return tokens * (FLOAT_BYTES * config.width + 2 * FLOAT_BYTES)


def _count_embedding_bytes(config: ViTConfig, dropout: bool, sizes: ElementSizes) -> int:
    """Stem, flattened patches, dropout's mask."""
    channels, stem = config.channels, 0
    if config.stem is not None:
        channels = config.stem.out_channels
        stem = _count_convolution_bytes(config.stem, config.channels, config.image_size, sizes, stem=True)
    patches = config.grid[0] * config.grid[1] * config.patch**2 * channels * sizes.matmul
    return stem + patches + (_count_tokens(config) * config.width * sizes.mask if dropout else 0)


def _count_last_block_tokens(config: ViTConfig) -> int:
    """How many tokens the last block computes, as `ViT.num_head_tokens` has it."""
    only_class = config.pool == "class" and config.positions != "relative"
    return 1 + config.distillation_token if only_class else _count_tokens(config)


def _count_blocks_bytes(
    config: ViTConfig, dropout: bool, stochastic_depth: float, recompute: bool, sizes: ElementSizes
) -> int:
    """All blocks; with recomputation their inputs and the activations of one block."""
    tokens_by_block = [_count_tokens(config)] * (config.depth - 1) + [_count_last_block_tokens(config)]
    if recompute:
        inputs = config.depth * FLOAT_BYTES * _count_tokens(config) * config.width
        return inputs + max(_count_block_bytes(config, queries, dropout, sizes) for queries in tokens_by_block)
    total = 0.0
    for index, queries in enumerate(tokens_by_block):
        rate = stochastic_depth * index / max(config.depth - 1, 1)
        # a branch that is added to some images only is saved
        branches = 2 * FLOAT_BYTES * queries * config.width if rate else 0
        total += (1 - rate) * (_count_block_bytes(config, queries, dropout, sizes) + branches)
    return round(total)


def _count_block_bytes(config: ViTConfig, queries: int, dropout: bool, sizes: ElementSizes) -> int:
    """A block that computes `queries` tokens: all, or those that the head reads."""
    width, tokens, patches = config.width, _count_tokens(config), config.grid[0] * config.grid[1]
    fused = queries == tokens and config.positions != "relative"
    numbers = tokens * width + (queries + 2 * tokens) * width + queries * width  # input; q, k and v; output
    if config.positions == "relative":
        offsets = 2 * patches - 1
        numbers += (patches + offsets) * width + config.heads * patches * offsets  # queries by offsets, the products
    numbers += queries * (width + 2 * config.mlp)  # the MLP's input, GELU's and the second layer's
    if config.layer_scale:
        numbers += 2 * queries * width
    # Softmax saves its output; where products take another dtype, they save a copy.
    row = FLOAT_BYTES if fused else tokens * sum({sizes.norm, sizes.matmul})
    masks = queries * (2 * width + config.mlp) * sizes.mask if dropout else 0
    norms = _count_norm_bytes(config, tokens) + _count_norm_bytes(config, queries)
    return numbers * sizes.matmul + config.heads * queries * row + masks + norms


def _count_head_bytes(config: ViTConfig, sizes: ElementSizes) -> int:
    """The last norm, the pooling, the head."""
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
    """The convolutions of a BiT ResNet, or of a hybrid's stem; a convolution saves its padded input."""
    product, active = sizes.matmul, 2 * sizes.norm  # a norm's input and the ReLU's output
    width, size = config.width, halve_size(image_size)
    total = channels * _count_padded_area(image_size, 3) * product
    if stem:
        total += width * (_count_padded_area(size) * active + _count_padded_area(size, 1) * sizes.norm)
    else:
        total += width * _count_padded_area(size, 1) * product
    total += width * _count_padded_area(halve_size(size)) * INDEX_BYTES
    for unit in iterate_units(config, image_size):
        in_area, out_area = _count_padded_area(unit.in_size), _count_padded_area(unit.out_size)
        total += unit.in_channels * in_area * product * (2 if unit.is_first else 1)  # also the projection's
        total += unit.width * (in_area * active + _count_padded_area(unit.in_size, 1) * product)
        total += unit.width * out_area * (active + product)
        if stem:  # the third norm, that of the projection, and the ReLU after the sum
            total += 4 * unit.width * out_area * sizes.norm * (3 if unit.is_first else 2)
        else:
            total += unit.in_channels * in_area * active
    return total


def _count_padded_area(size: tuple[int, int], padding: int = 0) -> int:
    return (size[0] + 2 * padding) * (size[1] + 2 * padding)
