"""How many parameters a model has and how many multiply-adds one image costs, without building it.

One multiply-add is two FLOPs; a training step costs three forward passes. That is the paper's own counting: it gives
its exaFLOPs for every ViT of the scaling study.
"""

import torch

from vitrail.config import ViTConfig
from vitrail.model.vit import ViT


def parameters(config: ViTConfig) -> int:
    """The exact number of parameters; nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in ViT(config).parameters())


def multiply_adds(config: ViTConfig) -> int:
    """Multiply-adds of every matrix product in one forward pass, all tokens of the last block included."""
    width, patches = config.width, config.grid[0] * config.grid[1]
    tokens = config.prefix + patches
    embedding = patches * config.patch**2 * config.channels * width
    mlp = 2 * width * config.mlp
    block = tokens * (4 * width**2 + mlp) + 2 * tokens**2 * width
    if config.positions == "relative":
        block += patches * (2 * patches - 1) * width
    head = config.features * config.classes * (2 if config.distillation_head else 1)
    if config.hidden_head:
        head += width**2
    if config.pool == "map":
        head += 2 * patches * width**2 + 2 * patches * width + 2 * width**2 + mlp
    return embedding + config.depth * block + head


def training_flops(config: ViTConfig, images: int) -> int:
    """FLOPs of training on that many images: forward, and backward at twice its cost."""
    return 2 * 3 * multiply_adds(config) * images
