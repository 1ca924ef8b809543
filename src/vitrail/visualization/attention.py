"""Attention of a model: distance and entropy, rollout, the attention of the head's token, tokens as colors.

    B images   H heads   N tokens   n = R C patches in R rows and C columns

Models run with fused attention. `attention_maps` computes the weights beside it, one layer of a few images at a time,
so memory does not grow with the number of images. One pass gives everything in `AttentionStats`. Class, distillation
and register tokens take part in the forward pass but are not shown: maps are of patches, and sum to 1 over them.

The token that the head reads is the class token. With two heads it is the mean of class and distillation token; with
average pooling, the mean of all patches; with attention pooling (MAP), the pooling query.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.errors import DataError, ModelError, UsageError
from vitrail.model.positions import Grid
from vitrail.model.vit import Model, ViT, attention_maps
from vitrail.visualization import Array
from vitrail.visualization.embeddings import fix_signs

_MAX_MAP_BYTES = 2**27  # of one layer's maps; computing on them takes a few times as much
_MAX_CHUNK_IMAGES = 32  # a hybrid's convolutions need more memory than its maps
_COLOR_STDS = 2.5  # standard deviations of a component, from gray to full color
_NO_IMAGES = "attention is measured on images, but there are none"


class AttentionStats(NamedTuple):
    """Attention measurements of each image, from one forward pass."""

    distance: Array  # (B, layers, H): in pixels of the model's input
    entropy: Array  # (B, layers, H): in bits
    rollout: Array  # (B, R, C)
    heads: Array  # (B, H, R, C): the last attention before the head


@dataclasses.dataclass(frozen=True)
class AttentionDistance:
    """Attention distance and entropy of every head, averaged over images and patches."""

    distance: Array
    """(layers, H): pixels of the model's input between a patch and the patches it attends to, weighted by attention."""
    entropy: Array  # (layers, H), in bits: 7 bits equal uniform attention to 128 patches
    uniform_distance: float  # the distance under uniform attention to all patches
    uniform_entropy: float
    images: int


def compute_attention_distance(model: Model, batches: Iterable[Tensor]) -> AttentionDistance:
    """Average attention distance and entropy over all images of normalized batches (B, C, S, S).

    Rows and columns of tokens other than patches are dropped, and rows are divided by their sums. The distance between
    two patches is that of their centers on the grid, times the total stride; a patch is at distance 0 from itself.
    """
    return average_attention_stats(model, (compute_attention_stats(model, batch) for batch in batches))


def average_attention_stats(model: Model, stats: Iterable[AttentionStats]) -> AttentionDistance:
    """Average the distances and entropies of images whose attention is already computed."""
    config = require_attention(model).config
    images, sums, uniform = 0, np.zeros((2, config.depth, config.heads)), np.zeros(2)
    for batch in stats:
        count, rows, columns = batch.rollout.shape
        images += count
        sums += np.stack([batch.distance, batch.entropy]).sum(axis=1, dtype=np.float64)
        uniform_distance = float(_compute_patch_distances((rows, columns), config.stride).mean())
        uniform += count * np.array([uniform_distance, math.log2(rows * columns)])
    if not images:
        raise DataError(_NO_IMAGES)
    (distance, entropy), (uniform_distance, uniform_entropy) = (sums / images).astype(np.float32), uniform / images
    return AttentionDistance(distance, entropy, float(uniform_distance), float(uniform_entropy), images)


def compute_rollout(model: Model, images: Tensor) -> Array:
    """(B, R, C): attention rollout, the flow from each patch to the head's token (Abnar and Zuidema, 2020).

    Heads are averaged, half of each token comes from itself (the residual), and the layers' matrices are multiplied.
    """
    return compute_attention_stats(model, images).rollout


def compute_class_attention(model: Model, images: Tensor) -> Array:
    """(B, H, R, C): the attention of the head's token in the last layer, or in attention pooling."""
    return compute_attention_stats(model, images).heads


def compute_attention_stats(model: Model, images: Tensor) -> AttentionStats:
    """Measure the attention on normalized images (B, C, S, S) in one pass. The model is left in eval mode."""
    chunks = [_compute_chunk_stats(chunk, vit) for vit, chunk in iterate_image_chunks(model, images)]
    stats = AttentionStats(*(np.concatenate(arrays) for arrays in zip(*chunks, strict=True)))
    if not all(np.isfinite(values).all() for values in stats):
        raise ModelError("attention is not finite: the weights, or the mean and std of the images, are wrong")
    return stats


@torch.no_grad()
def compute_token_colors(model: Model, images: Tensor) -> Array:
    """(B, R, C, 3) from 0 to 1: each image's patch tokens projected onto their first three principal components.

    The components are of the encoder's output for that image alone, so colors compare patches within one image only.
    The score of greatest magnitude is positive, and 2.5 standard deviations from gray is full color.
    """
    return np.concatenate([_compute_chunk_colors(chunk, vit) for vit, chunk in iterate_image_chunks(model, images)])


def require_attention(model: Model) -> ViT:
    """Return the model if it is a ViT or a hybrid, and refuse a ResNet."""
    if not isinstance(model, ViT):
        raise UsageError(f"a {type(model).__name__} ResNet has no attention; give a ViT or a hybrid")
    return model


def iterate_image_chunks(model: Model, images: Tensor, layers: int = 1) -> Iterator[tuple[ViT, Tensor]]:
    """Yield the model in eval mode and a chunk of images, whose maps of so many layers fit into the memory limit."""
    vit = require_attention(model).eval()
    if not len(images):
        raise DataError(_NO_IMAGES)
    rows, columns = vit.config.compute_grid((images.shape[2], images.shape[3]))
    image_bytes = layers * 4 * vit.config.heads * (vit.config.num_prefix_tokens + rows * columns) ** 2
    device = next(vit.parameters()).device
    for chunk in images.split(max(1, min(_MAX_CHUNK_IMAGES, _MAX_MAP_BYTES // image_bytes))):
        yield vit, chunk.to(device)


@torch.no_grad()
def _compute_chunk_stats(images: Tensor, model: ViT) -> tuple[Array, ...]:
    grid, prefix = model.config.compute_grid((images.shape[2], images.shape[3])), model.config.num_prefix_tokens
    num_patches = grid[0] * grid[1]
    patch_distances = _compute_patch_distances(grid, model.config.stride).to(images).flatten()  # (n n)
    distances, entropies = [], []
    rollout = torch.eye(prefix + num_patches, device=images.device)  # (N, N), with the first layer (B, N, N)
    for maps in attention_maps(model, images):  # (B, H, N, N)
        patches = normalize_rows(maps[..., prefix:, prefix:])  # (B, H, n, n)
        distances.append(patches.flatten(2) @ patch_distances / num_patches)  # (B, H)
        entropies.append(torch.special.entr(patches).sum(dim=(2, 3)) / (num_patches * math.log(2)))
        rollout = _multiply_rollout(rollout, maps)
    pooling_weights, heads = _weigh_head_inputs(model, images, maps)
    head_rollout = torch.einsum("bn,bnm->bm", pooling_weights, rollout)[:, prefix:]
    by_layer = (torch.stack(values, dim=1) for values in (distances, entropies))
    by_patch = (normalize_rows(values).unflatten(-1, grid) for values in (head_rollout, heads))
    return tuple(values.float().cpu().numpy() for values in (*by_layer, *by_patch))


def _multiply_rollout(rollout: Tensor, maps: Tensor) -> Tensor:
    """(B, N, N): (A + I) / 2 for the head mean A of a layer's maps (B, H, N, N), times the rollout so far."""
    return rollout.lerp(maps.mean(dim=1) @ rollout, 0.5)


def _compute_patch_distances(grid: Grid, stride: int) -> Tensor:
    """(n, n): pixels between the centers of two patches."""
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    centers = torch.stack([rows.flatten(), columns.flatten()], dim=1).float()  # (n, 2)
    return stride * (centers[:, None] - centers[None]).norm(dim=2)


def normalize_rows(values: Tensor) -> Tensor:
    """Divide each row by its sum; a row of zeros, whose attention is all on other tokens, stays zero."""
    return values / values.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)


def _weigh_head_inputs(model: ViT, images: Tensor, last_maps: Tensor) -> tuple[Tensor, Tensor]:
    """The weight of each token in what the head reads, (B, N), and the last attention before it, (B, H, n)."""
    config = model.config
    tokens, prefix = last_maps.shape[-1], config.num_prefix_tokens
    if config.pool == "map":
        pool_attention = _compute_pool_attention(model, images)
        read_weights = F.pad(pool_attention.mean(dim=1), (tokens - pool_attention.shape[2], 0))
        return read_weights, pool_attention[..., -(tokens - prefix) :]
    weights = compute_pooling_weights(config, tokens).to(last_maps)
    return weights.expand(len(images), -1), torch.einsum("n,bhnm->bhm", weights, last_maps)[..., prefix:]


def compute_pooling_weights(config: ViTConfig, tokens: int) -> Tensor:
    """(N,), of sum 1: the weight of each token in what the head reads, without attention pooling (MAP)."""
    weights = torch.zeros(tokens)
    if config.pool in ("class", "class-mean"):
        weights[: 1 + config.distillation_head] = 1 / (1 + config.distillation_head)
    if config.pool != "class":
        num_patches = tokens - config.num_prefix_tokens
        weights = weights + F.pad(torch.ones(num_patches), (config.num_prefix_tokens, 0)) / num_patches
        weights = weights / weights.sum()
    return weights


def _compute_pool_attention(model: ViT, images: Tensor) -> Tensor:
    """(B, H, n or N): the attention weights of the query in attention pooling (MAP)."""
    weights: list[Tensor] = []
    with model.attn_pool.softmax.register_forward_hook(lambda _module, _arguments, output: weights.append(output)):
        model.compute_features(images)
    return weights[0][:, :, 0]


def _compute_chunk_colors(images: Tensor, model: ViT) -> Array:
    grid = model.config.compute_grid((images.shape[2], images.shape[3]))
    patches = model.encode(images)[:, model.config.num_prefix_tokens :].cpu().double()  # (B, n, D)
    left, values, _ = torch.linalg.svd(patches - patches.mean(dim=1, keepdim=True), full_matrices=False)
    scores = fix_signs((left * values[:, None])[..., :3].mT)  # (B, 3, n); their mean is 0
    scores = F.pad(scores, (0, 0, 0, 3 - scores.shape[1]))  # fewer than three patches have fewer components
    deviations = scores.square().mean(dim=2, keepdim=True).sqrt().clamp(min=torch.finfo(scores.dtype).tiny)
    colors = (0.5 + scores / (2 * _COLOR_STDS * deviations)).clamp(0, 1)
    return colors.mT.unflatten(1, grid).float().numpy()
