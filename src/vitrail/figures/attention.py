"""Where a model looks: attention distance and entropy, rollout, what the head's token attends to, tokens as colours.

    B images   H heads   N tokens   n = R C patches in R rows and C columns

Models run with their fused attention; the maps are computed beside it (`attention_maps`), one layer of a few images at
a time, so memory does not grow with the number of images. One pass gives all that `Attended` holds. Class,
distillation and register tokens take part in the model's work and are left out of what is shown: maps are of patches,
and sum to 1 over them.

The token that reads the image is the head's: the class token, or with two heads the mean of class and distillation
token; where patches are averaged the mean of all patches; under attention pooling (MAP) what its query attends to.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.config import ViTConfig, compute_grid
from vitrail.errors import DataError, ModelError, UsageError
from vitrail.figures.embeddings import fix_signs
from vitrail.model.build import Model
from vitrail.model.positions import Grid
from vitrail.model.vit import ViT, attention_maps

Array = NDArray[np.float32]

_MAX_MAP_BYTES = 2**27  # bytes of one layer's maps; a few times that is in use while they are measured
_MAX_CHUNK_IMAGES = 32  # images at most: a hybrid's convolutions need more than its maps do
_COLOR_STDS = 2.5  # of a component, from grey to full colour


class AttentionStats(NamedTuple):
    """What one pass over images shows, image by image."""

    distance: Array  # (B, layers, H): in pixels of the model's input
    entropy: Array  # (B, layers, H): in bits
    rollout: Array  # (B, R, C)
    heads: Array  # (B, H, R, C): the last attention before the head


@dataclasses.dataclass(frozen=True)
class AttentionDistance:
    """How far heads look, averaged over images and patches."""

    distance: Array
    """(layers, H): pixels of the model's input between a patch and what it attends to, weighted by attention."""
    entropy: Array
    """(layers, H), in bits: of 7, it is as if 128 patches were attended to alike."""
    uniform_distance: float
    """What attention to all patches alike would have."""
    uniform_entropy: float
    images: int


def compute_attention_distance(model: Model, batches: Iterable[Tensor]) -> AttentionDistance:
    """Distance and entropy over all images of normalised batches (B, C, S, S).

    Rows and columns of tokens that are no patches are dropped, and rows divided by their sums. The distance of two
    patches is that of their centres on the grid, times the total stride; a patch is at distance 0 from itself.
    """
    return average_attention_stats(model, (compute_attention_stats(model, batch) for batch in batches))


def average_attention_stats(model: Model, stats: Iterable[AttentionStats]) -> AttentionDistance:
    """The same of images that were attended to already."""
    config = require_attention(model).config
    images, sums, uniform = 0, np.zeros((2, config.depth, config.heads)), np.zeros(2)
    for part in stats:
        number, grid = len(part.rollout), (part.rollout.shape[1], part.rollout.shape[2])
        images += number
        sums += np.stack([part.distance, part.entropy]).sum(axis=1, dtype=np.float64)
        uniform += number * np.array(
            [float(_compute_patch_distances(grid, config.stride).mean()), math.log2(grid[0] * grid[1])]
        )
    if not images:
        raise DataError("attention is measured on images, and there is none")
    (distance, entropy), (far, even) = (sums / images).astype(np.float32), uniform / images
    return AttentionDistance(distance, entropy, float(far), float(even), images)


def compute_rollout(model: Model, images: Tensor) -> Array:
    """(B, R, C): what reaches the head's token from each patch over all layers (Abnar and Zuidema, 2020).

    Heads are averaged, half of each token is its own (the residual), and the layers' matrices are multiplied.
    """
    return compute_attention_stats(model, images).rollout


def compute_class_attention(model: Model, images: Tensor) -> Array:
    """(B, H, R, C): what the head's token attends to in the last layer, or in attention pooling."""
    return compute_attention_stats(model, images).heads


def compute_attention_stats(model: Model, images: Tensor) -> AttentionStats:
    """All of it of normalised images (B, C, S, S), in one pass. The model is left in eval mode."""
    parts = [_compute_chunk_stats(chunk, vit) for vit, chunk in iterate_image_chunks(model, images)]
    found = AttentionStats(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    if not all(np.isfinite(values).all() for values in found):
        raise ModelError("the attention is not all finite: the weights, or the mean and std of the images, are wrong")
    return found


@torch.no_grad()
def compute_token_colors(model: Model, images: Tensor) -> Array:
    """(B, R, C, 3) from 0 to 1: each image's patch tokens along their first three principal components.

    The components are the image's own, of the encoder's output, so colours compare places of one image and nothing
    else. The score of greatest magnitude is positive, and 2.5 standard deviations from grey is full colour.
    """
    return np.concatenate([_compute_chunk_colors(chunk, vit) for vit, chunk in iterate_image_chunks(model, images)])


def require_attention(model: Model) -> ViT:
    """The model, if it is a ViT or a hybrid."""
    if not isinstance(model, ViT):
        raise UsageError(f"a {type(model).__name__} ResNet has no attention; give a ViT or a hybrid")
    return model


def iterate_image_chunks(model: Model, images: Tensor, layers: int = 1) -> Iterator[tuple[ViT, Tensor]]:
    """The model, in eval mode, and as many images at a time as the maps of so many layers may take memory."""
    vit = require_attention(model).eval()
    if not len(images):
        raise DataError("attention is measured on images, and there is none")
    rows, columns = compute_grid((images.shape[2], images.shape[3]), vit.config.stride)
    each = layers * 4 * vit.config.heads * (vit.config.num_prefix_tokens + rows * columns) ** 2
    device = next(vit.parameters()).device
    for chunk in images.split(max(1, min(_MAX_CHUNK_IMAGES, _MAX_MAP_BYTES // each))):
        yield vit, chunk.to(device)


@torch.no_grad()
def _compute_chunk_stats(images: Tensor, model: ViT) -> tuple[Array, ...]:
    grid, prefix = compute_grid((images.shape[2], images.shape[3]), model.config.stride), model.config.num_prefix_tokens
    number = grid[0] * grid[1]
    pixels = _compute_patch_distances(grid, model.config.stride).to(images).flatten()  # (n n)
    distances, entropies = [], []
    rolled = torch.eye(prefix + number, device=images.device)  # (N, N), with the first layer (B, N, N)
    for maps in attention_maps(model, images):  # (B, H, N, N)
        patches = normalize_rows(maps[..., prefix:, prefix:])  # (B, H, n, n)
        distances.append(patches.flatten(2) @ pixels / number)  # (B, H)
        entropies.append(torch.special.entr(patches).sum(dim=(2, 3)) / (number * math.log(2)))
        rolled = _multiply_rollout(rolled, maps)
    reader, heads = _weigh_head_inputs(model, images, maps)
    rollout = torch.einsum("bn,bnm->bm", reader, rolled)[:, prefix:]
    by_layer = (torch.stack(values, dim=1) for values in (distances, entropies))
    by_place = (normalize_rows(values).unflatten(-1, grid) for values in (rollout, heads))
    return tuple(values.float().cpu().numpy() for values in (*by_layer, *by_place))


def _multiply_rollout(rollout: Tensor, maps: Tensor) -> Tensor:
    """(B, N, N): (A + I) / 2 of a layer's maps (B, H, N, N), heads averaged, times that of the layers before."""
    return rollout.lerp(maps.mean(dim=1) @ rollout, 0.5)


def _compute_patch_distances(grid: Grid, stride: int) -> Tensor:
    """(n, n): pixels between the centres of two patches."""
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], dim=1).float()  # (n, 2)
    return stride * (places[:, None] - places[None]).norm(dim=2)


def normalize_rows(values: Tensor) -> Tensor:
    """Each row divided by its sum; one of zeros, all of whose attention is elsewhere, stays so."""
    return values / values.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)


def _weigh_head_inputs(model: ViT, images: Tensor, last_maps: Tensor) -> tuple[Tensor, Tensor]:
    """How much of each token the head reads, (B, N), and the last attention by which it got it, (B, H, n)."""
    config = model.config
    tokens, prefix = last_maps.shape[-1], config.num_prefix_tokens
    if config.pool == "map":
        pooling = _compute_pool_attention(model, images)
        return F.pad(pooling.mean(dim=1), (prefix, 0)), pooling
    reader = compute_pooling_weights(config, tokens).to(last_maps)
    return reader.expand(len(images), -1), torch.einsum("n,bhnm->bhm", reader, last_maps)[..., prefix:]


def compute_pooling_weights(config: ViTConfig, tokens: int) -> Tensor:
    """(N,), of sum 1: how much of each token the head reads, unless it pools by attention (MAP)."""
    reader = torch.zeros(tokens)
    if config.pool in ("class", "class-mean"):
        reader[: 1 + config.distillation_head] = 1 / (1 + config.distillation_head)
    if config.pool != "class":
        patches = F.pad(torch.ones(tokens - config.num_prefix_tokens), (config.num_prefix_tokens, 0)) / (
            tokens - config.num_prefix_tokens
        )
        reader = (reader + patches) / (reader + patches).sum()
    return reader


def _compute_pool_attention(model: ViT, images: Tensor) -> Tensor:
    """(B, H, n): the attention weights of the query in attention pooling (MAP)."""
    weights: list[Tensor] = []
    with model.attn_pool.softmax.register_forward_hook(lambda _module, _arguments, output: weights.append(output)):
        model.compute_features(images)
    return weights[0][:, :, 0]


def _compute_chunk_colors(images: Tensor, model: ViT) -> Array:
    grid = compute_grid((images.shape[2], images.shape[3]), model.config.stride)
    patches = model.encode(images)[:, model.config.num_prefix_tokens :].cpu().double()  # (B, n, D)
    left, values, _ = torch.linalg.svd(patches - patches.mean(dim=1, keepdim=True), full_matrices=False)
    scores = fix_signs((left * values[:, None])[..., :3].mT)  # (B, 3, n); their mean is 0
    scores = F.pad(scores, (0, 0, 0, 3 - scores.shape[1]))  # fewer than three patches have fewer components
    deviations = scores.square().mean(dim=2, keepdim=True).sqrt().clamp(min=torch.finfo(scores.dtype).tiny)
    colours = (0.5 + scores / (2 * _COLOR_STDS * deviations)).clamp(0, 1)
    return colours.mT.unflatten(1, grid).float().numpy()
