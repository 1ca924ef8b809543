"""What a model costs, without building it: parameters, multiply-adds of an image, and bytes of training.

One multiply-add is two FLOPs; a training step costs three forward passes. The paper counts the same way: this gives its
exaFLOPs for every ViT of the scaling study. With `masked`, the counts are of what a masked recipe trains.

In training, weights, gradients and optimizer state follow from the number of parameters. The activations that the
forward pass saves for the backward pass are counted operation by operation, as autograd saves them in eager mode with
fused attention:

    LayerNorm      its input in float32, a mean and a deviation     linear, convolution   its input
    attention      queries, keys, values, output, one number a row  GELU                  its input
    group norm     its input, and the ReLU behind it its output     dropout               its mask
    quick GELU     its input and the sigmoid                        gated MLP             both factors, SiLU's input

Under autocast the inputs of matrix products are bf16, and the residual stream stays float32. Not counted: gradients of
activations, of which a few exist at a time; the loss; memory that the device's libraries and allocator use themselves.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import nn

from vitrail.config import BiTConfig, ConvConfig, MaskedConfig, ModelConfig, ViTConfig
from vitrail.errors import UsageError
from vitrail.model.masked import MaskedViT, build_decoder_config, count_outputs_per_patch
from vitrail.model.resnet import StandardizedConv2d
from vitrail.model.vit import Block, ViT, build_model
from vitrail.presets import build_preprocess_config

FLOAT_BYTES = 4  # of weights, gradients, averages and the residual stream
INDEX_BYTES = 8  # of an index, which max pooling saves


def count_parameters(config: ModelConfig, masked: MaskedConfig | None = None) -> int:
    """The exact number of parameters; nothing is allocated."""
    with torch.device("meta"):
        model: nn.Module = build_model(config)
        if masked is not None:
            assert isinstance(model, ViT)
            model = MaskedViT(model, masked, build_preprocess_config("inception", config.image_size, config.channels))
        return sum(parameter.numel() for parameter in model.parameters())


def count_training_flops(config: ModelConfig, images: int, masked: MaskedConfig | None = None) -> int:
    """FLOPs of training on `images` images: a forward pass, and a backward pass at twice its cost."""
    return 2 * 3 * count_multiply_adds(config, masked) * images


def count_multiply_adds(config: ModelConfig, masked: MaskedConfig | None = None) -> int:
    """Multiply-adds of all matrix products and convolutions for an image; all tokens of the last block are counted."""
    if isinstance(config, BiTConfig):
        assert masked is None
        head = config.num_features * config.classes
        return _count_convolutions(config.conv, config.channels, config.image_size) + head
    tokens = _count_tokens(config)
    if masked is None:
        return _count_embedding(config) + _count_blocks(config, tokens) + _count_head(config)
    num_masked, outputs = masked.count_masked(math.prod(config.grid)), count_outputs_per_patch(config, masked)
    if masked.kind == "mpp":
        return _count_embedding(config) + _count_blocks(config, tokens) + num_masked * config.width * outputs
    decoder, visible = build_decoder_config(config), tokens - num_masked
    blocks = _count_blocks(config, visible) + _count_blocks(decoder, tokens)
    heads = visible * config.width * decoder.width + num_masked * decoder.width * outputs
    return _count_embedding(config) + blocks + heads


def _count_tokens(config: ViTConfig) -> int:
    return config.num_prefix_tokens + math.prod(config.grid)


def _count_embedding(config: ViTConfig) -> int:
    """A hybrid's stem and the projection of patches."""
    channels, stem = config.channels, 0
    if config.stem is not None:
        channels, stem = config.stem.out_channels, _count_convolutions(config.stem, config.channels, config.image_size)
    return stem + math.prod(config.grid) * config.patch**2 * channels * config.width


def _count_blocks(config: ViTConfig, tokens: int) -> int:
    """Attention and MLP of `tokens` tokens in every layer."""
    mlp = (3 if config.gated_mlp else 2) * config.width * config.mlp
    block = tokens * (4 * config.width**2 + mlp) + 2 * tokens**2 * config.width
    if config.positions == "relative":
        patches = math.prod(config.grid)
        block += patches * (2 * patches - 1) * config.width
    return config.depth * block


def _count_head(config: ViTConfig) -> int:
    """Pooling, hidden layer, head."""
    width, tokens = config.width, _count_pooled_tokens(config)
    head = config.num_features * config.classes * (1 + config.distillation_head) + width**2 * config.hidden_head
    head += width * config.projection
    if config.pool == "map":
        mlp = config.pool_mlp or config.mlp
        head += 2 * tokens * width**2 + 2 * tokens * width + 2 * width**2 + 2 * width * mlp
    return head


def _count_pooled_tokens(config: ViTConfig) -> int:
    """Tokens that attention pooling reads."""
    return _count_tokens(config) if config.pool_prefix else math.prod(config.grid)


def _count_convolutions(config: ConvConfig, channels: int, image_size: tuple[int, int]) -> int:
    """Multiply-adds of stem and stages."""
    total = math.prod(_halve_size(image_size)) * 7 * 7 * channels * config.width
    for unit in _iterate_units(config, image_size):
        in_area, out_area = math.prod(unit.in_size), math.prod(unit.out_size)
        total += in_area * unit.in_channels * unit.width  # 1 x 1, before the stride
        total += out_area * (9 * unit.width**2 + 4 * unit.width**2)
        if unit.is_first:
            total += out_area * unit.in_channels * 4 * unit.width  # the projection
    return total


class _UnitShape(NamedTuple):
    """The shapes of one bottleneck unit, whose output has 4 * width channels."""

    in_channels: int
    width: int
    in_size: tuple[int, int]
    out_size: tuple[int, int]
    is_first: bool  # of its stage, so that its shortcut has a projection


def _iterate_units(config: ConvConfig, image_size: tuple[int, int]) -> Iterator[_UnitShape]:
    """The bottleneck units of a ResNet or of a hybrid's stem, in order."""
    in_channels, size = config.width, _halve_size(_halve_size(image_size))
    for stage, count in enumerate(config.units):
        width = config.width * 2**stage
        for unit in range(count):
            in_size, size = size, _halve_size(size) if stage and not unit else size
            yield _UnitShape(in_channels, width, in_size, size, is_first=not unit)
            in_channels = 4 * width


def _halve_size(size: tuple[int, int]) -> tuple[int, int]:
    """The size of a map after a stride of 2: an odd side is rounded up."""
    return -(-size[0] // 2), -(-size[1] // 2)


# --- memory of training ----------------------------------------------------------------------------------------------


class ElementSizes(NamedTuple):
    """Bytes of one number, by the operation that saves it."""

    matmul: int  # and convolutions, GELU
    norm: int  # group norm and softmax
    mask: int  # dropout


AUTOCAST_SIZES = ElementSizes(matmul=2, norm=4, mask=1)  # bf16 training on a GPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes that training takes on one device, by part."""

    weights: int
    gradients: int
    optimizer: int
    ema: int  # the moving average of the weights, if the recipe has one
    weight_copies: int  # in bf16 until the backward pass, and with sharding two gathered blocks
    activations: int

    @property
    def total(self) -> int:
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
    bare = dataclasses.replace(config, hidden_head=False, distillation_head=False, projection=0, pool_heads=0)
    bare = dataclasses.replace(bare, pool_prefix=False, normalize_features=False, pool="norm-mean", classes=outputs)
    if masked.kind == "mpp":
        return (bare,)
    patches = math.prod(config.grid)
    visible = patches - masked.count_masked(patches)
    encoder = dataclasses.replace(bare, classes=0, image_size=(visible * config.stride, config.stride))
    return encoder, dataclasses.replace(build_decoder_config(config), classes=outputs)


def count_weight_copy_bytes(config: ModelConfig, sizes: ElementSizes = AUTOCAST_SIZES) -> int:
    """Bytes of the copies of weights that the backward pass needs: bf16, and for kernels also centered float32."""
    total = 0
    # pixels need no gradient, so the weight of their embedding is not saved
    omitted = "patch_embed.proj" if isinstance(config, ViTConfig) and config.stem is None else ""
    with torch.device("meta"):
        model = build_model(config)
    for name, module in model.named_modules():
        if isinstance(module, StandardizedConv2d):
            total += module.weight.numel() * (FLOAT_BYTES + sizes.matmul)
        elif isinstance(module, nn.Linear | nn.Conv2d) and sizes.matmul < FLOAT_BYTES and name != omitted:
            total += module.weight.numel() * sizes.matmul
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
    pixels = FLOAT_BYTES * config.channels * math.prod(config.image_size)
    if isinstance(config, BiTConfig):
        if dropout or stochastic_depth or recompute:
            raise UsageError("a ResNet has no dropout or stochastic depth, and keeps its activations: omit --recompute")
        last_area = math.prod(-(-side // config.conv.stride) for side in config.image_size)
        top = config.num_features * (2 * last_area * sizes.norm + sizes.matmul)
        convolutions = _count_convolution_bytes(config.conv, config.channels, config.image_size, sizes, stem=False)
        return pixels + convolutions + top
    blocks = _count_blocks_bytes(config, dropout > 0, stochastic_depth, recompute, sizes)
    return pixels + _count_embedding_bytes(config, dropout > 0, sizes) + blocks + _count_head_bytes(config, sizes)


def _count_norm_bytes(config: ViTConfig, tokens: int) -> int:
    return tokens * (FLOAT_BYTES * config.width + 2 * FLOAT_BYTES)


def _count_embedding_bytes(config: ViTConfig, dropout: bool, sizes: ElementSizes) -> int:
    """Stem, flattened patches, the norm before the blocks, dropout's mask."""
    channels, stem = config.channels, 0
    if config.stem is not None:
        channels = config.stem.out_channels
        stem = _count_convolution_bytes(config.stem, config.channels, config.image_size, sizes, stem=True)
    patches = math.prod(config.grid) * config.patch**2 * channels * sizes.matmul
    norm = _count_norm_bytes(config, _count_tokens(config)) if config.norm_pre else 0
    return stem + patches + norm + (_count_tokens(config) * config.width * sizes.mask if dropout else 0)


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
    width, tokens, patches = config.width, _count_tokens(config), math.prod(config.grid)
    fused = queries == tokens and not config.has_attention_bias
    numbers = tokens * width + (queries + 2 * tokens) * width + queries * width  # input; q, k and v; output
    if config.positions == "relative":
        offsets = 2 * patches - 1
        numbers += (patches + offsets) * width + config.heads * patches * offsets  # queries by offsets, the products
    numbers += queries * (width + _count_mlp_numbers(config) * config.mlp)  # the MLP's input, and what is inside
    if config.layer_scale:
        numbers += 2 * queries * width
    # Softmax saves its output; where products take another dtype, they save a copy.
    row = FLOAT_BYTES if fused else tokens * sum({sizes.norm, sizes.matmul})
    masks = queries * (2 * width + config.mlp) * sizes.mask if dropout else 0
    norms = _count_norm_bytes(config, tokens) + _count_norm_bytes(config, queries)
    if config.attention_norm:  # its input is attention's output, of another dtype a copy; its output is proj's input
        norms += queries * (width * sum({sizes.norm, sizes.matmul}) + 2 * FLOAT_BYTES)
    if config.mlp_norm:
        norms += queries * (config.mlp * sizes.norm + 2 * FLOAT_BYTES)
    return numbers * sizes.matmul + config.heads * queries * row + masks + norms


def _count_mlp_numbers(config: ViTConfig) -> int:
    """Tensors as wide as the hidden layer: the last layer's input, and what the activation saves."""
    if config.gated_mlp:
        return 4  # gate and value, and both factors of their product
    return 3 if config.gelu == "quick" else 2  # a product with a sigmoid saves both


def _count_head_bytes(config: ViTConfig, sizes: ElementSizes) -> int:
    """The last norm, the pooling, the head."""
    width, patches = config.width, _count_pooled_tokens(config)
    norm = _count_norm_bytes(config, 1 if config.pool == "mean-norm" else _count_last_block_tokens(config))
    numbers = config.num_features * (1 + config.distillation_head + config.normalize_features)
    numbers += width * (config.hidden_head or config.projection > 0)
    if config.pool != "map":
        return norm + numbers * sizes.matmul
    pool_mlp = config.pool_mlp or config.mlp
    numbers += 3 * patches * width + 2 * width + 2 * pool_mlp  # input, k and v; output and the MLP of one token
    row = patches * sum({sizes.norm, sizes.matmul})
    return norm + numbers * sizes.matmul + (config.pool_heads or config.heads) * row + _count_norm_bytes(config, 1)


def _count_convolution_bytes(
    config: ConvConfig, channels: int, image_size: tuple[int, int], sizes: ElementSizes, *, stem: bool
) -> int:
    """The convolutions of a BiT ResNet, or of a hybrid's stem; a convolution saves its padded input."""
    product, active = sizes.matmul, 2 * sizes.norm  # a norm's input and the ReLU's output
    width, size = config.width, _halve_size(image_size)
    total = channels * _count_padded_area(image_size, 3) * product
    if stem:
        total += width * (_count_padded_area(size) * active + _count_padded_area(size, 1) * sizes.norm)
    else:
        total += width * _count_padded_area(size, 1) * product
    total += width * _count_padded_area(_halve_size(size)) * INDEX_BYTES
    for unit in _iterate_units(config, image_size):
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
