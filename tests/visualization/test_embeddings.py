"""Filters and positions planted in the weights, found again."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import model_factory
from vitrail.errors import ModelError, UsageError
from vitrail.visualization.embeddings import build_untrained, compute_filters, compute_position_similarity
from vitrail.weights.adapt import adapt
from vitrail.weights.load import load

VARIANTS = pytest.mark.parametrize("change", model_factory.VARIANTS.values(), ids=model_factory.VARIANTS.keys())


def test_planted_components_are_found_in_order_with_their_share_and_sign() -> None:
    """Filters that lie along two patterns, four times the variance along the first, around a mean that does not count.

    Each pattern's entry of greatest magnitude is negative, and is shown as 1.
    """
    model = model_factory.build_vit()
    first, second = torch.zeros(3, 8, 8), torch.zeros(3, 8, 8)
    first[0, 2, 5], first[1, 2, 5] = -1.0, 0.5
    second[2, 0, 0], second[2, 7, 7] = -2.0, -1.0
    turns = torch.arange(32) * 2 * torch.pi / 32
    unit = (first / first.norm(), second / second.norm())
    planted = 2 * turns.cos()[:, None, None, None] * unit[0] + turns.sin()[:, None, None, None] * unit[1]
    with torch.no_grad():
        model.patch_embed.proj.weight.copy_(planted + torch.randn(3, 8, 8))
    filters = compute_filters(model, count=2)
    np.testing.assert_allclose(filters.explained_variance_ratio, [0.8, 0.2], atol=1e-6)
    for tile, pattern in zip(filters.tiles, (first, second), strict=True):
        expected = 0.5 - 0.5 * pattern / pattern.abs().max()  # its negative has the greatest entry above zero
        np.testing.assert_allclose(tile, expected.permute(1, 2, 0).numpy(), atol=1e-6)


def test_tiles_do_not_depend_on_the_sign_or_scale_of_the_filters() -> None:
    model = model_factory.build_vit()
    before = compute_filters(model)
    with torch.no_grad():
        model.patch_embed.proj.weight.mul_(-3)
    after = compute_filters(model)
    np.testing.assert_allclose(before.tiles, after.tiles, atol=1e-5)
    np.testing.assert_allclose(before.explained_variance_ratio, after.explained_variance_ratio, atol=1e-6)
    assert (before.tiles.reshape(28, -1).max(axis=1) == 1).all()
    assert (np.diff(before.explained_variance_ratio) <= 0).all()


def test_components_are_scikit_learns() -> None:
    decomposition = pytest.importorskip("sklearn.decomposition")
    model = model_factory.build_vit(3)
    rows = model.patch_embed.proj.weight.detach().double().flatten(1).numpy()
    theirs = decomposition.PCA(28, svd_solver="full").fit(rows)
    filters = compute_filters(model)
    axes = (filters.tiles.transpose(0, 3, 1, 2).reshape(28, -1) - 0.5).astype(np.float64)
    axes /= np.linalg.norm(axes, axis=1, keepdims=True)
    np.testing.assert_allclose(abs((axes * theirs.components_).sum(axis=1)), 1, atol=1e-6)
    np.testing.assert_allclose(filters.explained_variance_ratio, theirs.explained_variance_ratio_, atol=1e-6)


def test_a_hybrids_and_a_resnets_filters_are_their_first_convolutions() -> None:
    """The kernels as they are applied: standardised, so their scale before that is nothing."""
    for model, stem in (
        (hybrid := model_factory.build_vit(**model_factory.VARIANTS["hybrid"]), hybrid.patch_embed.backbone.stem),
        (resnet := model_factory.build_bit(), resnet.stem),
    ):
        before = compute_filters(model)
        assert before.layer == "first convolution"
        assert before.tiles.shape == (28, 7, 7, 3)
        with torch.no_grad():
            stem.conv.weight.mul_(torch.rand(len(stem.conv.weight), 1, 1, 1) + 1).add_(1)
        np.testing.assert_allclose(compute_filters(model).tiles, before.tiles, atol=1e-3)


def test_there_are_no_more_components_than_filters_span() -> None:
    model = model_factory.build_vit(width=8, heads=2, channels=1)
    filters = compute_filters(model)
    assert filters.tiles.shape == (7, 8, 8, 1)
    assert filters.explained_variance_ratio.sum() == pytest.approx(1)


def test_weights_that_are_no_numbers_are_named() -> None:
    model = model_factory.build_vit()
    with torch.no_grad():
        model.patch_embed.proj.weight[0, 0, 0, 0] = torch.nan
    with pytest.raises(ModelError, match="patch embedding has weights that are not finite"):
        compute_filters(model)


def test_a_planted_position_pattern_is_found() -> None:
    """One-hot rows and columns: half for the same row, half for the same column; the class token's is left out."""
    model = model_factory.build_vit(image_size=(24, 40))
    rows, columns = 3, 5
    table = torch.zeros(rows, columns, 32)
    for row, column in itertools.product(range(rows), range(columns)):
        table[row, column, row] = table[row, column, 10 + column] = 1 + row + column  # the length does not count
    with torch.no_grad():
        model.pos_embed[0, 1:] = table.flatten(0, 1)
        model.pos_embed[0, 0] = 7
    similarity = compute_position_similarity(model)
    same_row = np.eye(rows)[:, None, :, None]
    same_column = np.eye(columns)[None, :, None, :]
    np.testing.assert_allclose(similarity.maps, (same_row + same_column) / 2, atol=1e-6)
    np.testing.assert_allclose(similarity.by_row, [1, 0.5, 0.5], atol=1e-6)
    np.testing.assert_allclose(similarity.by_column, [1, 0.5, 0.5, 0.5, 0.5], atol=1e-6)


def test_profiles_by_hand() -> None:
    """Of one column of three patches: neighbours have 0.6 and -0.8, the ends 0."""
    model = model_factory.build_vit(image_size=(24, 8), class_token=False, pool="norm-mean")
    with torch.no_grad():
        model.pos_embed.zero_()
        model.pos_embed[0, 0, 0], model.pos_embed[0, 2, 1] = 2.0, -1.0
        model.pos_embed[0, 1, :2] = torch.tensor([0.6, 0.8])
    similarity = compute_position_similarity(model)
    np.testing.assert_allclose(similarity.by_row, [1, (0.6 - 0.8) / 2, 0], atol=1e-6)
    np.testing.assert_allclose(similarity.by_column, [1], atol=1e-6)


@VARIANTS
def test_at_another_size_positions_are_those_the_adapted_model_has(change: dict[str, object]) -> None:
    model = model_factory.build_vit(**change)
    if model.config.positions in ("none", "relative", "relative-bias"):
        with pytest.raises(UsageError, match="no position embedding to compare"):
            compute_position_similarity(model)
        return
    similarity = compute_position_similarity(model, (48, 64))
    assert similarity.maps.shape == (6, 8, 6, 8)
    adapted = adapt(model_factory.build_trained(model), image_size=(48, 64)).model
    np.testing.assert_allclose(similarity.maps, compute_position_similarity(adapted).maps, atol=1e-5)
    np.testing.assert_allclose(np.einsum("rcrc->rc", similarity.maps), 1, atol=1e-6)
    assert np.array_equal(similarity.maps, similarity.maps.transpose(2, 3, 0, 1))


def test_models_without_positions_and_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="BiT ResNet has no position"):
        compute_position_similarity(model_factory.build_bit())
    with pytest.raises(UsageError, match="does not divide into patches"):
        compute_position_similarity(model_factory.build_vit(), (30, 32))


def test_before_training_the_network_is_the_same_and_its_weights_are_the_papers() -> None:
    model = model_factory.build_vit()
    before = [parameter.clone() for parameter in model.parameters()]
    network = build_untrained(model)
    assert network.config == model.config
    assert not network.training
    assert network.cls_token.abs().max() == 0  # Google's code starts with zeros
    assert 0.01 < float(network.pos_embed.detach().std()) < 0.03
    again = build_untrained(model)
    assert all(torch.equal(one, two) for one, two in zip(network.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))


def test_a_real_models_positions_are_most_like_their_neighbours(deit_tiny: Path) -> None:
    """What the paper found: closer patches are more alike, and those of one row or column alike too."""
    similarity = compute_position_similarity(load(deit_tiny).model)
    others = similarity.maps.reshape(196, 196) - 2 * np.eye(196)
    rows, columns = np.divmod(np.arange(196), 14)
    nearest = others.argmax(axis=1)
    steps = abs(rows - rows[nearest]) + abs(columns - columns[nearest])
    assert (steps == 1).all()
    assert similarity.by_row[1] > 0.9
    assert similarity.by_column[1] > 0.9
    aligned = np.concatenate([similarity.by_row[4:], similarity.by_column[4:]]).mean()
    apart = (abs(rows[:, None] - rows) >= 4) & (abs(columns[:, None] - columns) >= 4)
    assert aligned > float(similarity.maps.reshape(196, 196)[apart].mean()) + 0.2
