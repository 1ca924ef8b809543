"""Weights at the start of training, as the paper's own code draws them.

Kernels are Xavier-uniform (query, key and value each on its own), the patch embedding LeCun-normal, MLP biases normal
with deviation 1e-6, positions normal with deviation 0.02, the class token and every head zero. Registers are not in
that code: they get a small noise, so that they differ (Darcet et al. 2024).
"""

import math
from typing import TypeVar, cast

import torch
from torch import Generator, Tensor, nn

from vitrail.model.resnet import HybridUnit, PooledHead, StandardizedConv2d
from vitrail.model.vit import Attention, AttentionPool, Block, GatedMlp, HiddenHead, LayerScale, Mlp, Model, ViT
from vitrail.runtime.cpu_threads import use_one_thread

LAYER_SCALE_INIT = 1e-5  # Touvron et al. 2021b for models of this depth; DINOv2

M = TypeVar("M", bound=Model)


@torch.no_grad()
def initialize_weights(model: M, generator: Generator, *, head_bias: float = 0.0, mimetic: bool = False) -> M:
    """Draw every parameter from `generator`, on the CPU, and return the model; the I21k recipes' head bias is -10.

    `mimetic` (Trockman and Kolter 2023) makes attention resemble that of trained models, which small datasets alone
    teach late.
    """
    _initialize_convolutions(model, generator)
    if isinstance(model, ViT):
        _initialize_vit(model, generator)
        if mimetic:
            _initialize_mimetic(model, generator)
    for head in (getattr(model, name, None) for name in ("head", "head_dist")):
        head = head.fc if isinstance(head, PooledHead) else head
        if isinstance(head, nn.Linear | nn.Conv2d):
            nn.init.zeros_(head.weight)
            nn.init.constant_(cast(Tensor, head.bias), head_bias)
    return model


def _initialize_convolutions(model: nn.Module, generator: Generator) -> None:
    """Initialize standardized kernels LeCun-normal (their scale does not matter), norms with one and zero.

    The last norm of a post-activation unit starts at zero, so each unit starts as its shortcut.
    """
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            module.reset_parameters()
        elif isinstance(module, StandardizedConv2d):
            _fill_lecun_normal(module.weight, generator)
    for module in model.modules():
        if isinstance(module, HybridUnit):
            nn.init.zeros_(module.norm3.weight)


def _initialize_vit(model: ViT, generator: Generator) -> None:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, LayerScale):
            module.gamma.fill_(LAYER_SCALE_INIT)
        elif isinstance(module, Block):
            _fill_xavier_uniform(module.attn.qkv, generator, parts=3)
            _fill_xavier_uniform(module.attn.proj, generator)
            if model.config.positions == "relative":
                nn.init.normal_(module.attn.offsets, std=0.02, generator=generator)
            elif model.config.positions == "relative-bias":
                nn.init.zeros_(module.attn.relative_position_bias_table)
        elif isinstance(module, Mlp | GatedMlp):
            for layer, parts in ((module.fc1, 2 if isinstance(module, GatedMlp) else 1), (module.fc2, 1)):
                _fill_xavier_uniform(layer, generator, parts)
                nn.init.normal_(layer.bias, std=1e-6, generator=generator)
        elif isinstance(module, AttentionPool):
            _fill_xavier_uniform(module.q, generator)
            _fill_xavier_uniform(module.kv, generator, parts=2)
            _fill_xavier_uniform(module.proj, generator)
            bound = math.sqrt(6 / (1 + model.config.width))
            nn.init.uniform_(module.latent, -bound, bound, generator=generator)
        elif isinstance(module, HiddenHead):
            _fill_lecun_normal(module.fc.weight, generator)
            nn.init.zeros_(module.fc.bias)
    if isinstance(model.projection, nn.Linear):
        _fill_lecun_normal(model.projection.weight, generator)
        nn.init.zeros_(model.projection.bias)
    projection = model.patch_embed.proj
    _fill_lecun_normal(projection.weight, generator)
    for name, parameter in model.named_parameters(recurse=False):
        deviation = {"cls_token": 0.0, "reg_token": 1e-6}.get(name, 0.02)
        nn.init.normal_(parameter, std=deviation, generator=generator)
    if projection.bias is not None:
        nn.init.zeros_(projection.bias)


def _initialize_mimetic(model: ViT, generator: Generator) -> None:
    with use_one_thread():  # threads of a decomposition wait for each other: forever on a busy machine
        for block in model.blocks:
            _mimic_attention(cast(Block, block).attn, generator)


def _mimic_attention(attention: Attention, generator: Generator) -> None:
    """Make tokens attend to similar tokens, and subtract a token's own value from it.

    With Z normal of variance 1/D, each head's W_q W_k^T approximates 0.7 Z + 0.7 I, and W_v W_proj is 0.4 Z - 0.4 I.
    """
    width, heads = attention.config.width, attention.config.heads

    def factorize(scale: float, sign: float) -> tuple[Tensor, Tensor]:
        noise = torch.empty(width, width).normal_(0.0, width**-0.5, generator=generator)
        left, values, right = torch.linalg.svd(scale * (noise + sign * torch.eye(width)))
        return left * values.sqrt(), right.mT * values.sqrt()

    query, key, value = attention.qkv.weight.chunk(3)
    for head_query, head_key in zip(query.chunk(heads), key.chunk(heads), strict=True):
        left, right = factorize(0.7, 1.0)
        head_query.copy_(left[:, : width // heads].mT)
        head_key.copy_(right[:, : width // heads].mT)
    left, right = factorize(0.4, -1.0)
    value.copy_(left.mT)
    attention.proj.weight.copy_(right)


def _fill_xavier_uniform(layer: nn.Linear, generator: Generator, parts: int = 1) -> None:
    """Xavier-uniform for each of `parts` stacked output blocks; the bias becomes zero."""
    for part in layer.weight.chunk(parts):
        bound = math.sqrt(6 / sum(part.shape))
        nn.init.uniform_(part, -bound, bound, generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _fill_lecun_normal(weight: Tensor, generator: Generator) -> None:
    """Normal, truncated at two deviations and rescaled to a variance of 1 / (inputs of an output)."""
    deviation = math.sqrt(1 / weight[0].numel()) / 0.87962566103423978
    nn.init.normal_(weight, std=deviation, generator=generator)
    flat = weight.view(-1)
    beyond = (flat.abs() > 2 * deviation).nonzero()[:, 0]
    while len(beyond):  # drawn again, which is faster than torch's way over the error function
        redrawn = torch.empty(len(beyond)).normal_(0.0, deviation, generator=generator)
        flat[beyond] = redrawn
        beyond = beyond[redrawn.abs() > 2 * deviation]
