"""How many parameters a model has and how many multiply-adds one image costs, without building it.

One multiply-add is two FLOPs; a training step costs three forward passes. The paper counts the same way: this gives its
exaFLOPs for every ViT of the scaling study. With `masked`, the counts are of what a masked recipe trains.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

from vitrail.config import BiTConfig, ConvConfig, MaskedConfig, ModelConfig, ViTConfig
from vitrail.model.build import build_model
from vitrail.model.masked import MaskedViT, build_decoder_config, count_outputs_per_patch
from vitrail.model.vit import ViT
from vitrail.presets import build_preprocess_config


def count_parameters(config: ModelConfig, masked: MaskedConfig | None = None) -> int:
    """The exact number of parameters; nothing is allocated."""
    with torch.device("meta"):
        model: torch.nn.Module = build_model(config)
        if masked is not None:
            assert isinstance(model, ViT)
            model = MaskedViT(model, masked, build_preprocess_config("inception", config.image_size, config.channels))
        return sum(parameter.numel() for parameter in model.parameters())


def count_training_flops(config: ModelConfig, images: int, masked: MaskedConfig | None = None) -> int:
    """FLOPs of training on `images` images: a forward pass, and a backward pass at twice its cost."""
    return 2 * 3 * count_multiply_adds(config, masked) * images


def count_multiply_adds(config: ModelConfig, masked: MaskedConfig | None = None) -> int:
    """Multiply-adds of every matrix product and convolution in one image's forward pass.

    All tokens of the last block are counted.
    """
    if masked is not None:
        assert isinstance(config, ViTConfig)
        return _count_masked_multiply_adds(config, masked)
    if isinstance(config, BiTConfig):
        head = config.num_features * config.classes
        return _count_convolutions(config.conv, config.channels, config.image_size) + head
    patches = config.grid[0] * config.grid[1]
    block = _count_block(config, config.num_prefix_tokens + patches)
    if config.positions == "relative":
        block += patches * (2 * patches - 1) * config.width
    return _count_embedding(config) + config.depth * block + _count_head(config)


def _count_masked_multiply_adds(config: ViTConfig, masked: MaskedConfig) -> int:
    """Encoder, decoder and prediction head."""
    patches = config.grid[0] * config.grid[1]
    num_masked = masked.count_masked(patches)
    outputs = count_outputs_per_patch(config, masked)
    if masked.kind == "mpp":
        bare = dataclasses.replace(config, classes=0, hidden_head=False, distillation_head=False, pool="norm-mean")
        return count_multiply_adds(bare) + num_masked * config.width * outputs
    decoder, visible = build_decoder_config(config), config.num_prefix_tokens + patches - num_masked
    blocks = config.depth * _count_block(config, visible)
    blocks += decoder.depth * _count_block(decoder, config.num_prefix_tokens + patches)
    return (
        _count_embedding(config)
        + visible * config.width * decoder.width
        + blocks
        + num_masked * decoder.width * outputs
    )


def _count_embedding(config: ViTConfig) -> int:
    """A hybrid's stem and the projection of patches."""
    channels, stem = config.channels, 0
    if config.stem is not None:
        channels, stem = config.stem.out_channels, _count_convolutions(config.stem, config.channels, config.image_size)
    return stem + config.grid[0] * config.grid[1] * config.patch**2 * channels * config.width


def _count_block(config: ViTConfig, tokens: int) -> int:
    """Attention and MLP of `tokens` tokens, without relative positions."""
    return tokens * (4 * config.width**2 + 2 * config.width * config.mlp) + 2 * tokens**2 * config.width


def _count_head(config: ViTConfig) -> int:
    """Pooling, hidden layer, head."""
    width, patches = config.width, config.grid[0] * config.grid[1]
    head = config.num_features * config.classes * (2 if config.distillation_head else 1)
    if config.hidden_head:
        head += width**2
    if config.pool == "map":
        head += 2 * patches * width**2 + 2 * patches * width + 2 * width**2 + 2 * width * config.mlp
    return head


def _count_convolutions(config: ConvConfig, channels: int, image_size: tuple[int, int]) -> int:
    """Multiply-adds of stem and stages."""
    rows, columns = halve_size(image_size)
    total = rows * columns * 7 * 7 * channels * config.width
    for unit in iterate_units(config, image_size):
        in_area, out_area = unit.in_size[0] * unit.in_size[1], unit.out_size[0] * unit.out_size[1]
        total += in_area * unit.in_channels * unit.width  # 1 x 1, before the stride
        total += out_area * (9 * unit.width**2 + 4 * unit.width**2)
        if unit.is_first:
            total += out_area * unit.in_channels * 4 * unit.width  # the projection
    return total


class UnitShape(NamedTuple):
    """The shapes of one bottleneck unit, whose output has 4 * width channels."""

    in_channels: int
    width: int
    in_size: tuple[int, int]
    out_size: tuple[int, int]
    is_first: bool
    """Whether it opens a stage, so that its shortcut has a projection."""


def iterate_units(config: ConvConfig, image_size: tuple[int, int]) -> Iterator[UnitShape]:
    """The bottleneck units of a ResNet or of a hybrid's stem, in order."""
    in_channels, size = config.width, halve_size(halve_size(image_size))
    for stage, count in enumerate(config.units):
        width = config.width * 2**stage
        for unit in range(count):
            in_size, size = size, halve_size(size) if stage and not unit else size
            yield UnitShape(in_channels, width, in_size, size, is_first=not unit)
            in_channels = 4 * width


def halve_size(size: tuple[int, int]) -> tuple[int, int]:
    """The size of a map after a stride of 2: an odd side is rounded up."""
    return -(-size[0] // 2), -(-size[1] // 2)
