"""CKA: what must not change it, the formula as it is published, and a case by hand."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests import model_factory
from vitrail.errors import DataError, UsageError
from vitrail.visualization.cka import compute_cka, compute_gram_matrices, estimate_hsic

Products = NDArray[np.float64]


def products(rows: NDArray[np.float64]) -> Products:
    return (rows @ rows.T)[None]


def drawn(seed: int, images: int = 12, width: int = 5) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(size=(images, width))


def published(one: Products, other: Products) -> float:
    """Equation 3 of Nguyen et al. (2021), word for word."""
    n, ones = len(one), np.ones(len(one))
    k, l = one - np.diag(np.diag(one)), other - np.diag(np.diag(other))  # noqa: E741
    middle = (ones @ k @ ones) * (ones @ l @ ones) / ((n - 1) * (n - 2))
    return float((np.trace(k @ l) + middle - 2 / (n - 2) * ones @ k @ l @ ones) / (n * (n - 3)))


def test_a_layer_is_like_itself_and_turned_scaled_or_moved_still_is() -> None:
    rows = drawn(0)
    turn = np.linalg.qr(drawn(1, 5, 5))[0]
    for changed in (rows, rows @ turn, -3.5 * rows, rows + drawn(2, 1, 5), np.pad(rows, ((0, 0), (0, 4)))):
        assert compute_cka([products(rows)], [products(changed)])[0, 0] == pytest.approx(1, abs=1e-6)
    stretched = compute_cka([products(rows)], [products(rows * [9, 1, 1, 1, 1])])[0, 0]
    assert stretched < 0.9  # of linear maps, not every one is ignored


def test_turning_and_scaling_change_nothing_between_different_layers() -> None:
    one, other = drawn(0), drawn(1) + drawn(0)
    turn = np.linalg.qr(drawn(2, 5, 5))[0]
    plain = compute_cka([products(one)], [products(other)])
    np.testing.assert_allclose(compute_cka([products(one @ turn)], [products(7 * other)]), plain, rtol=1e-5)
    assert 0.2 < plain[0, 0] < 0.9


def test_a_case_by_hand() -> None:
    """Four images in one dimension, 0 0 1 1, and in another, 0 1 0 1.

    Without the diagonal the products are 1 for images 3 and 4 alone. Rows sum to 0, 0, 1, 1 and all to 2. Centered:
    1/3 for pairs (1, 2) and (3, 4), and -1/6 for the others. The other layer has 1/3 at (1, 3) and (2, 4).
    """
    one, other = (products(np.array([row], dtype=float).T) for row in ([0, 0, 1, 1], [0, 1, 0, 1]))
    own = 2 * (2 / 9 + 4 / 36) / 4
    assert estimate_hsic(one, one) == pytest.approx(own)
    assert estimate_hsic(one, other) == pytest.approx(2 * (4 * (1 / 3) * (-1 / 6) + 2 / 36) / 4)
    assert compute_cka([one], [other])[0, 0] == pytest.approx(-0.5)


def test_the_estimate_is_the_published_formula_averaged_over_batches() -> None:
    ones, others = [drawn(seed, 6 + seed) for seed in range(3)], [drawn(9 + seed, 6 + seed) for seed in range(3)]
    pairs = [(products(one)[0], products(other)[0]) for one, other in zip(ones, others, strict=True)]
    for one, other in pairs:
        assert estimate_hsic(one, other) == pytest.approx(published(one, other), rel=1e-9)
    across, own, theirs = (
        sum(published(pair[left], pair[right]) for pair in pairs) for left, right in ((0, 1), (0, 0), (1, 1))
    )
    similarity = compute_cka([products(rows) for rows in ones], [products(rows) for rows in others])
    assert similarity[0, 0] == pytest.approx(across / math.sqrt(own * theirs), rel=1e-5)


def test_layers_that_have_nothing_in_common_come_out_near_zero_where_the_plain_estimate_does_not() -> None:
    """Sixteen images in 400 dimensions: biased, CKA is about 0.97."""
    one, other = zip(*[(drawn(2 * seed, 16, 400), drawn(2 * seed + 1, 16, 400)) for seed in range(8)], strict=True)
    similarity = compute_cka([products(rows) for rows in one], [products(rows) for rows in other])
    assert abs(similarity[0, 0]) < 0.1
    center = np.eye(16) - 1 / 16
    plain = [center @ products(rows)[0] @ center for rows in (one[0], other[0])]
    assert (plain[0] * plain[1]).sum() / np.linalg.norm(plain[0]) / np.linalg.norm(plain[1]) > 0.9


@pytest.mark.parametrize("name", ["plain", "hybrid", "map", "norm-mean", "2d-every-layer", "registers", "clip"])
def test_layers_are_the_embedding_and_the_output_of_each_block(name: str) -> None:
    model = model_factory.build_vit(**model_factory.VARIANTS[name])
    images = model_factory.draw_images(model.config, 5)
    outputs: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: outputs.append(output))
    matrices = compute_gram_matrices(model, images)
    assert matrices.shape == (4, 5, 5)
    rows = [model.embed(images)[0], *outputs]
    for layer, tokens in zip(matrices, rows, strict=True):
        flat = tokens.detach().double().flatten(1)
        np.testing.assert_allclose(layer, flat @ flat.T, rtol=1e-9)
    whole = compute_cka([matrices], [matrices])
    np.testing.assert_allclose(whole.diagonal(), 1, rtol=1e-6)
    np.testing.assert_allclose(whole, whole.T, rtol=1e-6)
    assert np.abs(whole).max() <= 1 + 1e-6


def test_what_cannot_be_compared_says_so() -> None:
    with pytest.raises(DataError, match="CKA compares layers on 4 images or more"):
        compute_cka([products(drawn(0, 3))], [products(drawn(1, 3))])
    few, enough = products(drawn(0, 3)), products(drawn(1))
    assert compute_cka([few, enough], [few, enough])[0, 0] == pytest.approx(1)
    assert np.isnan(compute_cka([products(np.zeros((5, 2)))], [products(drawn(0, 5))])).all()
    with pytest.raises(UsageError, match="ResNet has no attention"):
        compute_gram_matrices(model_factory.build_bit(), model_factory.draw_images(model_factory.build_config(), 4))
