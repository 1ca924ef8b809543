"""Weights fitted to another task: what must stay equal stays equal, and every change is named."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import model_factory
from tests.model_factory import VARIANTS
from vitrail.config import PreprocessConfig
from vitrail.errors import UsageError
from vitrail.model.vit import Model, patchify
from vitrail.weights.adapt import adapt, reorder_head, resize_patch_kernels


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
def test_positions_stored_at_a_new_size_equal_those_resampled_on_the_fly(change: dict[str, Any]) -> None:
    before = model_factory.build_trained(model_factory.build_vit(**change))
    after = adapt(before, image_size=(40, 48))
    assert after.model.config.image_size == (40, 48)
    images = model_factory.draw_images(before.model.config, size=(40, 48))
    with torch.no_grad():
        torch.testing.assert_close(after.model(images), before.model(images), atol=1e-5, rtol=1e-5)
    named = [text.split()[0] for text in after.origin.changes if text.startswith(("pos_embed", "blocks"))]
    moved = [name for name, t in after.model.named_parameters() if t.shape != before.model.get_parameter(name).shape]
    assert sorted(named) == sorted(moved)


def test_a_new_head_is_zero_and_what_it_replaces_is_named() -> None:
    before = model_factory.build_trained(model_factory.build_vit(hidden_head=True))
    after = adapt(before, classes=3)
    assert not after.model(model_factory.draw_images(after.model.config)).any()
    assert after.labels is None
    assert after.origin.changes == (
        "pre_logits.fc.weight (32, 32): removed",
        "pre_logits.fc.bias (32,): removed",
        "head.weight (7, 32): removed",
        "head.bias (7,): removed",
        "head.weight (3, 32), head.bias (3): new, zeros",
        "labels: 7 names -> none",
    )
    images = model_factory.draw_images(before.model.config)
    with torch.no_grad():
        assert torch.equal(after.model.encode(images), before.model.encode(images))


def test_a_distilled_model_gets_two_new_heads_and_a_headless_one_none() -> None:
    before = model_factory.build_trained(model_factory.build_vit(distillation_token=True, distillation_head=True))
    assert not adapt(before, classes=3).model.head_dist.weight.any()
    bare = adapt(before, classes=0)
    images = model_factory.draw_images(before.model.config)
    with torch.no_grad():
        assert torch.equal(bare.model(images), before.model.compute_features(images))


def test_the_model_it_came_from_is_left_alone() -> None:
    before = model_factory.build_trained(model_factory.build_vit())
    kept = {name: tensor.clone() for name, tensor in before.model.state_dict().items()}
    after = adapt(before, image_size=48)
    with torch.no_grad():
        for parameter in after.model.parameters():
            parameter.fill_(1.0)
    assert all(torch.equal(tensor, before.model.state_dict()[name]) for name, tensor in kept.items())


@given(old=st.integers(2, 8), new=st.integers(2, 16), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_larger_patches_of_a_resized_image_give_equal_tokens(old: int, new: int, seed: int) -> None:
    """FlexiViT: a kernel for grown patches answers a bilinearly grown patch as the old one answered the old patch."""
    generator = torch.Generator().manual_seed(seed)
    kernels, patches = (
        torch.randn(5, 3, old, old, generator=generator),
        torch.randn(9, 3, old, old, generator=generator),
    )
    grown = F.interpolate(patches, (new, new), mode="bilinear", align_corners=False)
    answers = torch.einsum("bchw,dchw->bd", grown, resize_patch_kernels(kernels, new))
    expected = torch.einsum("bchw,dchw->bd", patches, kernels)
    if new >= old:
        torch.testing.assert_close(answers, expected, atol=1e-3, rtol=1e-3)
    else:  # the least-squares answer is no worse than kernels resized like images
        naive = F.interpolate(kernels, (new, new), mode="bilinear", align_corners=False) * (old / new) ** 2
        basis = torch.eye(3 * old * old).reshape(-1, 3, old, old)
        shrunk = F.interpolate(basis, (new, new), mode="bilinear", align_corners=False)

        def error(candidate: torch.Tensor) -> torch.Tensor:
            wanted = torch.einsum("bchw,dchw->bd", basis, kernels)
            return (torch.einsum("bchw,dchw->bd", shrunk, candidate) - wanted).square().sum()

        assert error(resize_patch_kernels(kernels, new)) <= error(naive) * (1 + 1e-4)


def test_a_new_patch_side_keeps_the_image_size_or_the_grid() -> None:
    before = model_factory.build_trained(model_factory.build_vit())
    finer = adapt(before, patch=4)
    assert finer.model.config.image_size == (32, 32)
    assert finer.model.config.grid == (8, 8)
    same_grid = adapt(before, patch=16, image_size=64)
    assert torch.equal(same_grid.model.pos_embed, before.model.pos_embed)
    small = model_factory.draw_images(before.model.config)
    panes = patchify(small, 8).reshape(-1, 3, 8, 8)
    grown = F.interpolate(panes, (16, 16), mode="bilinear", align_corners=False)  # each patch on its own
    large = grown.reshape(2, 4, 4, 3, 16, 16).permute(0, 3, 1, 4, 2, 5).reshape(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(same_grid.model(large), before.model(small), atol=1e-4, rtol=1e-4)


def test_one_channel_sees_what_three_equal_ones_did() -> None:
    before = model_factory.build_trained(model_factory.build_vit())
    grey = torch.randn(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    after = adapt(before, channels=1)
    with torch.no_grad():
        torch.testing.assert_close(after.model(grey), before.model(grey.expand(-1, 3, -1, -1)), atol=1e-5, rtol=1e-5)
    assert after.preprocess is not None
    assert after.preprocess.mean == pytest.approx((0.4,))


def test_six_channels_of_a_picture_twice_give_the_same_answer() -> None:
    before = model_factory.build_trained(model_factory.build_vit())
    images = model_factory.draw_images(before.model.config)
    after = adapt(before, channels=6)
    with torch.no_grad():
        twice = torch.cat([images, images], dim=1)
        torch.testing.assert_close(after.model(twice), before.model(images), atol=1e-5, rtol=1e-5)


def test_four_channels_take_kernels_mean_and_std_in_turn() -> None:
    preprocess = PreprocessConfig(size=(32, 32), resize=(32,), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    after = adapt(model_factory.build_trained(model_factory.build_vit(), preprocess=preprocess), channels=4)
    assert after.preprocess is not None
    assert after.preprocess.mean == (0.1, 0.2, 0.3, 0.1)
    assert after.preprocess.std == (0.4, 0.5, 0.6, 0.4)
    assert "3 -> 4 input channels, kernels of [0, 1, 2, 0] times 3/4" in after.origin.changes[0]


def test_without_a_new_size_the_preprocessing_is_left_as_it_is() -> None:
    """DINOv2's positions are for 518 pixels and its preprocessing crops 224."""
    preprocess = PreprocessConfig(size=(16, 16), resize=(20,))
    before = model_factory.build_trained(model_factory.build_vit(), preprocess=preprocess)
    assert adapt(before).preprocess == preprocess
    assert adapt(before, classes=3).preprocess == preprocess


def test_the_preprocessing_follows_the_size() -> None:
    preprocess = PreprocessConfig(size=(32, 32), resize=(36,), mean=(0.4,) * 3, std=(0.3,) * 3)
    before = model_factory.build_trained(model_factory.build_vit(), preprocess=preprocess)
    square, wide = adapt(before, image_size=64), adapt(before, image_size=(64, 32))
    assert square.preprocess is not None
    assert wide.preprocess is not None
    assert (square.preprocess.size, square.preprocess.resize) == ((64, 64), (72,))
    assert (wide.preprocess.size, wide.preprocess.resize) == ((64, 32), (64, 32))
    assert square.origin.changes[-2:] == ("preprocess.size: [32, 32] -> [64, 64]", "preprocess.resize: [36] -> [72]")


def test_the_operator_can_be_chosen_and_is_named() -> None:
    before = model_factory.build_trained(model_factory.build_vit())
    chosen = adapt(before, image_size=48, operator="bicubic")
    assert chosen.origin.changes[0] == "resample: bilinear-corners -> bicubic"
    assert not torch.equal(chosen.model.pos_embed, adapt(before, image_size=48).model.pos_embed)


def test_labels_are_kept_given_or_refused() -> None:
    before = model_factory.build_trained(model_factory.build_vit())
    assert adapt(before, image_size=48).labels == before.labels
    assert adapt(before, classes=2, labels=("cat", "dog")).labels == ("cat", "dog")
    with pytest.raises(UsageError, match="3 labels given for a head of 7"):
        adapt(before, labels=("a", "b", "c"))
    with pytest.raises(UsageError, match="does not divide into patches of 8 x 8 pixels; the nearest is 48 x 48"):
        adapt(before, image_size=50)
    with pytest.raises(UsageError, match="patch is 0"):
        adapt(before, patch=0)
    with pytest.raises(UsageError, match="one side or height and width, not 3 numbers"):
        adapt(before, image_size=(32, 32, 32))


def test_a_temperature_is_kept_until_something_changes_and_then_it_is_one_and_named() -> None:
    before = model_factory.build_trained(model_factory.build_vit(), temperature=1.75)
    assert adapt(before).temperature == 1.75
    assert adapt(before).origin.changes == ()
    for change in ({"classes": 3}, {"image_size": 48}, {"channels": 1}, {"operator": "bicubic"}):
        after = adapt(before, **change)
        assert after.temperature == 1.0
        assert after.origin.changes[-1] == "temperature: 1.75 -> 1"
    cold = adapt(model_factory.build_trained(model_factory.build_vit()), image_size=48)
    assert not any(text.startswith("temperature") for text in cold.origin.changes)


REORDERED = {
    "plain": model_factory.build_vit(),
    "hidden-head": model_factory.build_vit(hidden_head=True),
    "distilled": model_factory.build_vit(**VARIANTS["distilled"]),
    "bit": model_factory.build_bit(),
}


@pytest.mark.parametrize("model", REORDERED.values(), ids=REORDERED)
def test_a_head_in_another_order_gives_the_same_logits_in_that_order(model: Model) -> None:
    order = [3, 0, 6, 1, 5, 2, 4]
    before = model_factory.build_trained(model, temperature=1.75)
    assert before.labels is not None
    labels = tuple(before.labels[index] for index in order)
    after = reorder_head(before, labels)
    assert (after.labels, after.preprocess, after.temperature) == (labels, before.preprocess, 1.75)
    assert after.origin.changes == ("head: rows reordered, the same classes",)
    images = model_factory.draw_images(model.config)
    with torch.no_grad():
        torch.testing.assert_close(after.model(images), model(images)[:, order], atol=1e-6, rtol=1e-6)
        again = reorder_head(after, before.labels)
    assert all(map(torch.equal, again.model.parameters(), model.parameters()))
    assert reorder_head(before, before.labels) is before
    thresholds = tuple(index / 8 for index in range(7))
    multi_label = dataclasses.replace(before, multi_label=True, label_thresholds=thresholds)
    assert reorder_head(multi_label, labels).label_thresholds == tuple(index / 8 for index in order)
    assert adapt(multi_label, image_size=64).label_thresholds == ()


def test_a_head_of_other_classes_cannot_be_put_in_order() -> None:
    before = model_factory.build_trained(model_factory.build_vit())
    assert before.labels is not None
    with pytest.raises(
        UsageError, match=r"2 classes only in the model or only in the data, such as 'kind 6' in the model"
    ):
        reorder_head(before, (*before.labels[:6], "new kind"))
    with pytest.raises(UsageError, match=r"1 class .* such as 'a kind' in the data"):
        reorder_head(before, (*before.labels, "a kind"))
    with pytest.raises(UsageError, match=r"1 class .* such as 'kind 6' in the model"):
        reorder_head(before, before.labels[:6])
    with pytest.raises(UsageError, match="no names, so its head cannot be kept"):
        reorder_head(model_factory.build_trained(model_factory.build_vit(), labels=None), before.labels)
    twins = model_factory.build_trained(model_factory.build_vit(classes=3), labels=("crane", "crane", "dog"))
    with pytest.raises(UsageError, match="several of its classes are called 'crane'"):
        reorder_head(twins, ("dog", "crane"))
