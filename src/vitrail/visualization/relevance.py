"""Relevance of patches to a class (Chefer, Gur and Wolf, "Generic Attention-model Explainability", 2021).

    B images   H heads   N tokens   T tokens that a layer computes   n = R C patches in R rows and C columns   L classes

Each layer's relevance matrix is the positive part of attention times the gradient of the class's logit, averaged over
heads. It propagates the relevance of the layers below to the tokens that the head reads.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.errors import ModelError, UsageError
from vitrail.model.vit import Attention, AttentionPool, Model, ViT
from vitrail.visualization import Array
from vitrail.visualization.attention import (
    compute_pooling_weights,
    iterate_image_chunks,
    normalize_rows,
    require_attention,
)


class Relevance(NamedTuple):
    """The relevance of each image's patches to one class."""

    maps: Array  # (B, R, C): of sum 1, or all zeros if nothing in the image supports the class
    classes: NDArray[np.int64]  # (B,)
    logits: Array  # (B, L)


def compute_relevance(model: Model, images: Tensor, classes: Tensor | None = None) -> Relevance:
    """Compute the relevance of patches in normalized images (B, C, S, S) to `classes` (B,), or to those predicted.

    R starts as the identity and becomes R + A R in each layer, where A is the mean over heads of the positive part of
    attention times gradient. The relevance is in the rows of the tokens that the head reads. Attention pooling (MAP)
    is one more layer with a single row. If the head reads patches, the identity is omitted: it is equal for all.
    """
    config = require_attention(model).config
    if not config.classes:
        raise UsageError("the model has no head, but relevance is that of a patch to a class")
    chunks, start = [], 0
    for vit, chunk in iterate_image_chunks(model, images, layers=2 * config.depth):  # all maps, and as many gradients
        chunk_classes = None if classes is None else classes[start : start + len(chunk)].to(chunk.device)
        chunks.append(_compute_chunk_relevance(vit, chunk, chunk_classes))
        start += len(chunk)
    relevance = Relevance(*(np.concatenate(arrays) for arrays in zip(*chunks, strict=True)))
    if not (np.isfinite(relevance.maps).all() and np.isfinite(relevance.logits).all()):
        raise ModelError("relevance is not finite: the weights, or the mean and std of the images, are wrong")
    return relevance


@torch.enable_grad()
def _compute_chunk_relevance(model: ViT, images: Tensor, classes: Tensor | None) -> tuple[NDArray[Any], ...]:
    with _record_attention(model) as maps:
        logits = model(images)
    classes = logits.argmax(dim=1) if classes is None else classes
    gradients = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), maps)
    layers = [(weights * grad).detach().relu().mean(dim=1) for weights, grad in zip(maps, gradients, strict=True)]
    grid = model.config.compute_grid((images.shape[2], images.shape[3]))
    relevance = normalize_rows(_propagate_relevance(layers, model.config)).unflatten(1, grid)
    return relevance.float().cpu().numpy(), classes.cpu().numpy(), logits.detach().float().cpu().numpy()


def _propagate_relevance(layers: list[Tensor], config: ViTConfig) -> Tensor:
    """(B, n): the relevance that reaches the head, from the layers' A (B, T, N) and attention pooling's (B, 1, n)."""
    pooling = layers.pop() if config.pool == "map" else None
    tokens = layers[0].shape[2]
    identity = torch.eye(tokens).to(layers[0])
    relevance = identity.expand(len(layers[0]), -1, -1)
    for layer in layers:  # if the last one computes only the head's tokens, the other rows stay as they are
        relevance = relevance + F.pad(layer @ relevance, (0, 0, 0, tokens - layer.shape[1]))
    if pooling is None:
        head_relevance = compute_pooling_weights(config, tokens).to(relevance) @ (relevance - identity)  # (B, N)
    else:
        head_relevance = (F.pad(pooling, (tokens - pooling.shape[2], 0)) @ relevance)[:, 0]
    return head_relevance[:, config.num_prefix_tokens :]


@contextlib.contextmanager
def _record_attention(model: ViT) -> Iterator[list[Tensor]]:
    """Record the attention weights of all layers, (B, H, T, N), in every forward pass until the block ends.

    They are part of the autograd graph. The fused kernel never materializes them, so the passes do without it.
    """
    maps: list[Tensor] = []

    def record(_module: nn.Module, _arguments: tuple[Any, ...], weights: Tensor) -> None:
        maps.append(weights if weights.requires_grad else weights.requires_grad_())  # a leaf if parameters are frozen

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, Attention | AttentionPool):
                stack.enter_context(module.softmax.register_forward_hook(record))
            if isinstance(module, Attention):
                stack.callback(setattr, module, "fused", module.fused)
                module.fused = False
        yield maps
