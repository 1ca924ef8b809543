"""How alike layers are, of one model or of two: linear CKA (Kornblith et al., 2019), estimated without bias.

The estimate is that of Nguyen, Raghu and Kornblith (2021): the unbiased HSIC of each batch, averaged over batches.

    B images   N tokens   D width   E = depth + 1: the embedding and the output of each block

A layer's representation of an image is all its tokens in one row, (N D). Only the inner products between the images of
a batch are kept, so memory does not grow with the number of images.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.errors import DataError
from vitrail.figures.attention import Array, require_attention
from vitrail.model.build import Model

MIN_BATCH = 4
"""Images of a batch: the estimate divides by B (B - 3)."""

GramMatrices = NDArray[np.float64]


@torch.no_grad()
def compute_gram_matrices(model: Model, images: Tensor) -> GramMatrices:
    """(E, B, B): in each layer the inner products of normalized images (B, C, S, S). The model is left in eval mode."""
    vit = require_attention(model).eval()
    products = []

    def record(_module: nn.Module, _arguments: tuple[Any, ...], output: Tensor) -> None:
        products.append(_compute_gram_matrix(output))

    with contextlib.ExitStack() as hooks:
        for module in (vit.pos_drop, *vit.blocks):  # pos_drop's output is the embedding
            hooks.enter_context(module.register_forward_hook(record))
        vit.encode(images.to(next(vit.parameters()).device))
    return torch.stack(products).cpu().numpy()


def _compute_gram_matrix(x: Tensor) -> Tensor:
    rows = x.flatten(1).cpu().double()  # a GPU's float64 may be slow or, on mps, absent
    return rows @ rows.mT


def compute_cka(first: Sequence[GramMatrices], second: Sequence[GramMatrices]) -> Array:
    """(E, F): the CKA of each layer of one model with each of another, or of the same.

    Both are batch by batch the `compute_products` of the same images; batches of fewer than four do not count. Where
    a layer is zero it is NaN.
    """
    batches = [(one, other) for one, other in zip(first, second, strict=True) if one.shape[1] >= MIN_BATCH]
    if not batches:
        raise DataError(f"CKA compares layers on {MIN_BATCH} images or more")
    across = sum(estimate_hsic(one[:, None], other[None]) for one, other in batches)
    own = sum(estimate_hsic(one, one) for one, _ in batches)
    others = sum(estimate_hsic(other, other) for _, other in batches)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = across / np.sqrt(np.multiply.outer(own, others))
    return np.where(np.isfinite(found), found, np.nan).astype(np.float32)


def estimate_hsic(one: GramMatrices, other: GramMatrices) -> NDArray[np.float64]:
    """The unbiased estimate of HSIC (Song et al., 2012) from inner products (..., B, B), B of at least 4.

    It is the inner product of the two without their diagonals, once rows, columns and all of it are centered.
    """
    number = one.shape[-1]
    return (_center(one) * _center(other)).sum(axis=(-2, -1)) / (number * (number - 3))


def _center(products: GramMatrices) -> GramMatrices:
    number = products.shape[-1]
    apart = products * (1 - np.eye(number))  # an image's product with itself is what makes the plain estimate biased
    rows = apart.sum(axis=-1, keepdims=True) / (number - 2)
    total = apart.sum(axis=(-2, -1), keepdims=True) / ((number - 1) * (number - 2))
    return (apart - rows - rows.swapaxes(-2, -1) + total) * (1 - np.eye(number))
