"""What the weights alone show: the filters that see the image first, and how alike the positions of patches are.

    D filters   P patch side   C channels   n components   R, C rows and columns of patches

Both are figures of the paper (section 4.5), as plain arrays.
"""

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.config import compute_grid
from vitrail.errors import ModelError, UsageError
from vitrail.model.build import Model, build_model
from vitrail.model.initialize import initialize_weights
from vitrail.model.resnet import BiT

DEFAULT_COMPONENTS = 28  # the paper's
_SEED = 0

Array = NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Filters:
    """The principal components of the filters that see the pixels, the one of most variance first."""

    tiles: Array
    """(n, P, P, C) from 0 to 1. Zero is 0.5, and each tile's entry of greatest magnitude is 1."""
    explained_variance_ratio: Array
    """(n,): the share of the filters' variance that lies along each."""
    layer: str
    """What the filters belong to: "patch embedding", or "first convolution" of a hybrid or a ResNet."""


@dataclasses.dataclass(frozen=True)
class PositionSimilarity:
    """Cosines between the position embeddings of patches, the other tokens' left out."""

    maps: Array
    """(R, C, R, C): of the patch at (row, column) with each patch."""
    by_row: Array
    """(R,): the mean over pairs of one column that lie 0, 1, ... rows apart."""
    by_column: Array
    """(C,): the mean over pairs of one row that lie 0, 1, ... columns apart."""


@torch.no_grad()
def compute_filters(model: Model, count: int = DEFAULT_COMPONENTS) -> Filters:
    """The first `count` principal components of the D filters, or as many as there are.

    The filters are the weights as they multiply normalised pixels, centred on their mean, in float64. A component has
    no sign or scale of its own: its entry of greatest magnitude is made positive, and becomes 1.
    """
    kernels, layer = _get_first_kernels(model)
    if not kernels.isfinite().all():
        raise ModelError(f"the {layer} holds weights that are not finite numbers")
    rows = kernels.cpu().double().flatten(1)  # (D, C P P)
    _, values, axes = torch.linalg.svd(rows - rows.mean(dim=0), full_matrices=False)
    variances = values.square()
    axes = fix_signs(axes[: min(count, len(rows) - 1)])  # centred rows span one dimension less
    tiles = 0.5 + 0.5 * axes / axes.abs().amax(dim=1, keepdim=True)
    explained = variances[: len(tiles)] / variances.sum().clamp(min=torch.finfo(variances.dtype).tiny)
    tiles = tiles.unflatten(1, kernels.shape[1:]).permute(0, 2, 3, 1)  # (n, P, P, C)
    return Filters(tiles.float().numpy(), explained.float().numpy(), layer)


def _get_first_kernels(model: Model) -> tuple[Tensor, str]:
    """(D, C, P, P) as the network applies them to pixels, and of which layer."""
    if isinstance(model, BiT):
        return model.stem.conv.standardize_weight(), "first convolution"
    if model.patch_embed.backbone is not None:  # the patch embedding itself sees features, not colours
        return model.patch_embed.backbone.stem.conv.standardize_weight(), "first convolution"
    return model.patch_embed.proj.weight, "patch embedding"


def fix_signs(rows: Tensor) -> Tensor:
    """The rows of (..., n, D), each times -1 where its entry of greatest magnitude is negative."""
    largest = rows.gather(-1, rows.abs().argmax(dim=-1, keepdim=True))
    return rows * torch.where(largest < 0, -1.0, 1.0).to(rows)


@torch.no_grad()
def compute_position_similarity(model: Model, image_size: tuple[int, int] | None = None) -> PositionSimilarity:
    """The cosines of the positions that the model adds to patches, at its own image size or another one.

    Where every layer adds positions of its own, these are the first layer's.
    """
    if isinstance(model, BiT):
        raise UsageError("a BiT ResNet has no position embeddings; give a ViT or a hybrid")
    config = model.config
    grid = config.grid if image_size is None else compute_grid(image_size, config.stride)
    table = model.compute_positions(grid)
    if table is None:
        kind = "relative positions, none that stands for one place" if config.positions == "relative" else "none"
        raise UsageError(f"there is no position embedding to compare: the model has {kind}")
    places = F.normalize(table[0, config.num_prefix_tokens :].cpu().double(), dim=1)  # (R C, D)
    maps = (places @ places.mT).float().numpy().reshape(*grid, *grid)
    return PositionSimilarity(maps, _average_by_distance(maps), _average_by_distance(maps.transpose(1, 0, 3, 2)))


def _average_by_distance(maps: Array) -> Array:
    """(R, C, R, C) -> (R,): the mean cosine of places in one column that lie so many rows apart."""
    by_rows = np.einsum("rcsc->rs", maps, dtype=np.float64) / maps.shape[1]  # (R, R)
    return np.array([by_rows.diagonal(apart).mean() for apart in range(len(by_rows))], dtype=np.float32)


def build_untrained(model: Model) -> Model:
    """A network of the same configuration with the paper's initial weights, where the model's own are."""
    with torch.device("meta"):  # torch's own initialisation would be thrown away
        network = build_model(model.config)
    network = initialize_weights(network.to_empty(device="cpu"), torch.Generator().manual_seed(_SEED))
    return network.to(next(model.parameters()).device).eval()
