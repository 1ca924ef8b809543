"""Figures of the weights alone: the filters of the first layer, and the similarity of position embeddings.

    D filters   P patch side   C channels   n components   R, C rows and columns of patches

Both are figures of the paper (section 4.5), here as plain arrays.
"""

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ModelError, UsageError
from vitrail.model.initialize import initialize_weights
from vitrail.model.resnet import BiT
from vitrail.model.vit import Model, build_model
from vitrail.visualization import Array

DEFAULT_COMPONENTS = 28  # the paper's
_SEED = 0


@dataclasses.dataclass(frozen=True)
class Filters:
    """The principal components of the filters that read the pixels, by decreasing variance."""

    tiles: Array  # (n, P, P, C) from 0 to 1: zero becomes 0.5, and each tile's entry of greatest magnitude becomes 1
    explained_variance_ratio: Array  # (n,): each component's share of the filters' variance
    layer: str  # the layer of the filters: "patch embedding", or "first convolution" of a hybrid or a ResNet


@dataclasses.dataclass(frozen=True)
class PositionSimilarity:
    """Cosine similarities of the position embeddings of patches; other tokens are not included."""

    maps: Array  # (R, C, R, C): of the patch at (row, column) with every patch
    by_row: Array  # (R,): the mean over pairs in one column that are 0, 1, ... rows apart
    by_column: Array  # (C,): the mean over pairs in one row that are 0, 1, ... columns apart


@torch.no_grad()
def compute_filters(model: Model, count: int = DEFAULT_COMPONENTS) -> Filters:
    """Compute the first `count` principal components of the D filters, or as many as there are.

    The filters are the weights that multiply normalized pixels, centered on their mean, in float64. The sign and scale
    of a component are arbitrary: its entry of greatest magnitude is made positive, and becomes 1.
    """
    kernels, layer = _get_first_kernels(model)
    if not kernels.isfinite().all():
        raise ModelError(f"the {layer} has weights that are not finite")
    rows = kernels.cpu().double().flatten(1)  # (D, C P P)
    _, values, components = torch.linalg.svd(rows - rows.mean(dim=0), full_matrices=False)
    variances = values.square()
    components = fix_signs(components[: min(count, len(rows) - 1)])  # centered rows span one dimension less
    tiles = 0.5 + 0.5 * components / components.abs().amax(dim=1, keepdim=True)
    explained = variances[: len(tiles)] / variances.sum().clamp(min=torch.finfo(variances.dtype).tiny)
    tiles = tiles.unflatten(1, kernels.shape[1:]).permute(0, 2, 3, 1)  # (n, P, P, C)
    return Filters(tiles.float().numpy(), explained.float().numpy(), layer)


def _get_first_kernels(model: Model) -> tuple[Tensor, str]:
    """The kernels (D, C, P, P) that the network applies to pixels, and the name of their layer."""
    if isinstance(model, BiT):
        return model.stem.conv.standardize_weight(), "first convolution"
    if model.patch_embed.backbone is not None:  # the patch embedding itself reads features, not pixels
        return model.patch_embed.backbone.stem.conv.standardize_weight(), "first convolution"
    return model.patch_embed.proj.weight, "patch embedding"


def fix_signs(rows: Tensor) -> Tensor:
    """Negate those rows of (..., n, D) whose entry of greatest magnitude is negative."""
    largest = rows.gather(-1, rows.abs().argmax(dim=-1, keepdim=True))
    return rows * torch.where(largest < 0, -1.0, 1.0).to(rows)


@torch.no_grad()
def compute_position_similarity(model: Model, image_size: tuple[int, int] | None = None) -> PositionSimilarity:
    """Compute the cosines of the position embeddings of patches, at the model's own image size or another one.

    If every layer adds its own positions, these are the first layer's.
    """
    if isinstance(model, BiT):
        raise UsageError("a BiT ResNet has no position embeddings; give a ViT or a hybrid")
    config = model.config
    grid = config.grid if image_size is None else config.compute_grid(image_size)
    table = model.compute_positions(grid)
    if table is None:
        relative = config.has_attention_bias or config.rotary is not None
        kind = "only relative positions" if relative else "no positions"
        raise UsageError(f"there is no position embedding to compare: the model has {kind}")
    positions = F.normalize(table[0, config.num_prefix_tokens :].cpu().double(), dim=1)  # (R C, D)
    maps = (positions @ positions.mT).float().numpy().reshape(*grid, *grid)
    return PositionSimilarity(maps, _average_by_distance(maps), _average_by_distance(maps.transpose(1, 0, 3, 2)))


def _average_by_distance(maps: Array) -> Array:
    """(R, C, R, C) -> (R,): the mean cosine of patches in one column that are 0, 1, ... rows apart."""
    by_rows = np.einsum("rcsc->rs", maps, dtype=np.float64) / maps.shape[1]  # (R, R)
    return np.array([by_rows.diagonal(distance).mean() for distance in range(len(by_rows))], dtype=np.float32)


def build_untrained(model: Model) -> Model:
    """Build a network of the same configuration and device with the paper's initial weights."""
    with torch.device("meta"):  # torch's own initialization would be discarded
        network = build_model(model.config)
    network = initialize_weights(network.to_empty(device="cpu"), torch.Generator().manual_seed(_SEED))
    return network.to(next(model.parameters()).device).eval()
