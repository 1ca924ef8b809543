"""Poolings of a model's tokens, and its patch tokens, against the encoder's output and the head's own pooling."""

import pytest
import torch

from tests import model_factory
from vitrail.config.features import KIND_BY_POOL, count_features, list_feature_kinds
from vitrail.model.features import compute_dense_features, compute_features

NORMED_BEFORE = ["plain", "map", "class-mean", "norm-mean", "registers", "distilled", "hidden-head", "hybrid", "wide"]


@pytest.mark.parametrize("variant", ["plain", "map", "class-mean", "norm-mean", "mean-norm", "registers", "distilled"])
@torch.no_grad()
def test_the_kind_of_the_models_own_pooling_is_its_default(variant: str) -> None:
    model = model_factory.build_vit(**model_factory.VARIANTS[variant])
    images = model_factory.draw_images(model.config)
    own = compute_features(model, images, KIND_BY_POOL[model.config.pool])
    torch.testing.assert_close(own, model.compute_features(images), rtol=1e-5, atol=1e-6)
    assert torch.equal(compute_features(model, images), model.compute_features(images))


@pytest.mark.parametrize("variant", NORMED_BEFORE)
@torch.no_grad()
def test_poolings_are_of_the_normed_tokens(variant: str) -> None:
    model = model_factory.build_vit(**model_factory.VARIANTS[variant])
    images = model_factory.draw_images(model.config)
    tokens = model.encode(images)
    patches = tokens[:, model.config.num_prefix_tokens :]
    expected = {"class": tokens[:, 0], "mean": patches.mean(dim=1)}
    expected["class-mean"] = torch.cat([expected["class"], expected["mean"]], dim=1)
    for kind in list_feature_kinds(model.config):
        values = compute_features(model, images, kind)
        assert values.shape == (2, count_features(model.config, kind))
        if kind in expected:
            torch.testing.assert_close(values, expected[kind], rtol=1e-5, atol=1e-6)
    dense = compute_dense_features(model, images)
    assert dense.shape == (2, *model.config.grid, model.config.width)
    assert torch.equal(dense.flatten(1, 2), patches)


@torch.no_grad()
def test_a_norm_after_the_mean_is_applied_to_each_token_that_stands_alone() -> None:
    model = model_factory.build_vit(pool="mean-norm")
    images = model_factory.draw_images(model.config)
    tokens = model.run_blocks(*model.embed(images))
    assert torch.equal(compute_features(model, images, "mean"), model.fc_norm(tokens[:, 1:].mean(dim=1)))
    assert torch.equal(compute_dense_features(model, images).flatten(1, 2), model.fc_norm(tokens[:, 1:]))
    assert torch.equal(compute_features(model, images, "class"), model.fc_norm(tokens[:, 0]))


@torch.no_grad()
def test_features_without_the_hidden_layer_of_a_head_are_not_the_default() -> None:
    model = model_factory.build_vit(hidden_head=True)
    images = model_factory.draw_images(model.config)
    class_token = compute_features(model, images, "class")
    assert torch.equal(model.pre_logits(class_token), compute_features(model, images))


@torch.no_grad()
def test_a_resnet_has_its_last_feature_map_and_the_mean_of_it() -> None:
    model = model_factory.build_bit()
    images = model_factory.draw_images(model.config)
    dense = compute_dense_features(model, images)
    assert dense.shape[-1] == model.config.num_features
    torch.testing.assert_close(dense.mean(dim=(1, 2)), compute_features(model, images, "mean"))


@torch.no_grad()
def test_dense_features_have_the_grid_of_the_images_given() -> None:
    model = model_factory.build_vit()
    images = model_factory.draw_images(model.config, size=(16, 40))
    assert compute_dense_features(model, images).shape == (2, 2, 5, 32)


@torch.no_grad()
def test_normalized_features_have_length_one_and_the_same_direction() -> None:
    model = model_factory.build_vit()
    images = model_factory.draw_images(model.config)
    values, unit = (compute_features(model, images, "mean", normalize=normalize) for normalize in (False, True))
    torch.testing.assert_close(unit.norm(dim=1), torch.ones(2))
    torch.testing.assert_close(unit * values.norm(dim=1, keepdim=True), values)
