"""How many parameters a model has and how many multiply-adds one image costs, without building it.

One multiply-add is two FLOPs; a training step costs three forward passes. That is the paper's own counting: it gives
its exaFLOPs for every ViT of the scaling study.
"""

import torch

from vitrail.config import BiTConfig, ConvConfig
from vitrail.model.build import ModelConfig, build_model


def count_parameters(config: ModelConfig) -> int:
    """The exact number of parameters; nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(config).parameters())


def count_multiply_adds(config: ModelConfig) -> int:
    """Multiply-adds of every matrix product and convolution in one forward pass.

    All tokens of the last block are counted.
    """
    if isinstance(config, BiTConfig):
        return (
            _count_convolutions(config.conv, config.channels, config.image_size) + config.num_features * config.classes
        )
    width, patches = config.width, config.grid[0] * config.grid[1]
    tokens = config.num_prefix_tokens + patches
    embedding = patches * config.patch**2 * config.channels * width
    if config.stem is not None:
        embedding = patches * config.patch**2 * config.stem.out_channels * width
        embedding += _count_convolutions(config.stem, config.channels, config.image_size)
    mlp = 2 * width * config.mlp
    block = tokens * (4 * width**2 + mlp) + 2 * tokens**2 * width
    if config.positions == "relative":
        block += patches * (2 * patches - 1) * width
    head = config.num_features * config.classes * (2 if config.distillation_head else 1)
    if config.hidden_head:
        head += width**2
    if config.pool == "map":
        head += 2 * patches * width**2 + 2 * patches * width + 2 * width**2 + mlp
    return embedding + config.depth * block + head


def _count_convolutions(config: ConvConfig, channels: int, image_size: tuple[int, int]) -> int:
    """Multiply-adds of stem and stages; a map of odd side is halved upwards."""

    def halve(size: tuple[int, int]) -> tuple[int, int]:
        return -(-size[0] // 2), -(-size[1] // 2)

    size = halve(image_size)
    inputs = config.width
    total = size[0] * size[1] * 7 * 7 * channels * inputs
    size = halve(size)
    for stage, count in enumerate(config.units):
        width = config.width * 2**stage
        for unit in range(count):
            before, size = size, halve(size) if stage and not unit else size
            total += before[0] * before[1] * inputs * width  # 1 x 1, before the stride
            total += size[0] * size[1] * (9 * width * width + width * 4 * width)
            if not unit:
                total += size[0] * size[1] * inputs * 4 * width  # the projection
            inputs = 4 * width
    return total


def count_training_flops(config: ModelConfig, images: int) -> int:
    """FLOPs of training on that many images: forward, and backward at twice its cost."""
    return 2 * 3 * count_multiply_adds(config) * images
