"""Similarity of layers, of one model or of two: linear CKA (Kornblith et al., 2019), estimated without bias.

The estimate is that of Nguyen, Raghu and Kornblith (2021): the unbiased HSIC of each batch, averaged over batches.

    B images   N tokens   D width   E = depth + 1: the embedding and the output of each block

A layer represents an image by all its tokens in one row, (N D). Only the inner products between the images of a batch
are kept, so memory does not grow with the number of images.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.errors import DataError
from vitrail.model.vit import Model
from vitrail.visualization import Array
from vitrail.visualization.attention import require_attention

MIN_BATCH = 4  # the fewest images of a batch: the estimate divides by B (B - 3)

GramMatrices = NDArray[np.float64]


@torch.no_grad()
def compute_gram_matrices(model: Model, images: Tensor) -> GramMatrices:
    """(E, B, B): the inner products of normalized images (B, C, S, S) in each layer. The model is left in eval mode."""
    vit = require_attention(model).eval()
    products = []

    def record(_module: nn.Module, _arguments: tuple[Any, ...], output: Tensor) -> None:
        products.append(_compute_gram_matrix(output))

    with contextlib.ExitStack() as hooks:
        for module in (vit.norm_pre, *vit.blocks):  # the first's output is the embedding
            hooks.enter_context(module.register_forward_hook(record))
        vit.encode(images.to(next(vit.parameters()).device))
    return torch.stack(products).cpu().numpy()


def _compute_gram_matrix(x: Tensor) -> Tensor:
    rows = x.flatten(1).cpu().double()  # a GPU's float64 may be slow or, on mps, absent
    return rows @ rows.mT


def compute_cka(first: Sequence[GramMatrices], second: Sequence[GramMatrices]) -> Array:
    """(E, F): the CKA of each layer of one model with each layer of another, or of the same.

    Both hold, batch by batch, the `compute_gram_matrices` of the same images; batches of fewer than four are ignored.
    The CKA of a layer of zeros is NaN.
    """
    batches = [(one, other) for one, other in zip(first, second, strict=True) if one.shape[1] >= MIN_BATCH]
    if not batches:
        raise DataError(f"CKA compares layers on {MIN_BATCH} images or more")
    cross_hsic = sum(estimate_hsic(one[:, None], other[None]) for one, other in batches)
    first_hsic = sum(estimate_hsic(one, one) for one, _ in batches)
    second_hsic = sum(estimate_hsic(other, other) for _, other in batches)
    with np.errstate(divide="ignore", invalid="ignore"):
        cka = cross_hsic / np.sqrt(np.multiply.outer(first_hsic, second_hsic))
    return np.where(np.isfinite(cka), cka, np.nan).astype(np.float32)


def estimate_hsic(one: GramMatrices, other: GramMatrices) -> NDArray[np.float64]:
    """Estimate HSIC without bias (Song et al., 2012) from inner products (..., B, B), B of at least 4.

    It is the inner product of both matrices, centered and without their diagonals.
    """
    size = one.shape[-1]
    return (_center(one) * _center(other)).sum(axis=(-2, -1)) / (size * (size - 3))


def _center(products: GramMatrices) -> GramMatrices:
    size = products.shape[-1]
    off_diagonal = products * (1 - np.eye(size))  # the products of images with themselves would bias the estimate
    rows = off_diagonal.sum(axis=-1, keepdims=True) / (size - 2)
    total = off_diagonal.sum(axis=(-2, -1), keepdims=True) / ((size - 1) * (size - 2))
    return (off_diagonal - rows - rows.swapaxes(-2, -1) + total) * (1 - np.eye(size))
