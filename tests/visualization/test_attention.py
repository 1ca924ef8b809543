"""Attention planted in weights and in maps, measured against cases by hand and plain loops."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tests import model_factory
from vitrail.errors import DataError, ModelError, UsageError
from vitrail.model.vit import ViT, attention_maps
from vitrail.visualization import attention
from vitrail.visualization.attention import (
    compute_attention_distance,
    compute_attention_stats,
    compute_class_attention,
    compute_rollout,
    compute_token_colors,
)

VARIANTS = pytest.mark.parametrize("change", model_factory.VARIANTS.values(), ids=model_factory.VARIANTS.keys())
PLAIN: dict[str, Any] = {"class_token": False, "pool": "norm-mean"}


def attending(target: list[int], **changes: Any) -> ViT:
    """A model of one head and layer in which patch i attends to patch target[i] alone."""
    model = model_factory.build_vit(**(PLAIN | {"depth": 1, "heads": 1} | changes))
    with torch.no_grad():
        model.patch_embed.proj.weight.zero_()
        model.patch_embed.proj.bias.zero_()
        model.pos_embed.copy_(torch.eye(32)[None, : len(target)])  # each place has a direction of its own
        attend = model.blocks[0].attn
        model.blocks[0].norm1.weight.fill_(1)
        model.blocks[0].norm1.bias.zero_()
        attend.qkv.bias.zero_()
        query, key, _ = attend.qkv.weight.chunk(3)
        query.zero_()
        key.copy_(10 * torch.eye(32))
        for place, other in enumerate(target):
            query[other, place] = 10.0
    return model


def test_uniform_attention_has_the_known_distance_and_entropy_and_rolls_out_evenly() -> None:
    """2 x 2 patches of 8 pixels: from each, distances 0, 8, 8 and 8 sqrt(2)."""
    model = model_factory.build_vit(image_size=(16, 16), registers=3)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.zero_()
            block.attn.qkv.bias.zero_()
    images = model_factory.draw_images(model.config, 3)
    stats = compute_attention_distance(model, [images])
    mean = (8 + 8 + 8 * math.sqrt(2)) / 4
    np.testing.assert_allclose(stats.distance, np.full((3, 4), mean), rtol=1e-6)
    np.testing.assert_allclose(stats.entropy, np.full((3, 4), 2), rtol=1e-6)
    assert stats.uniform_distance == pytest.approx(mean)
    assert stats.uniform_entropy == pytest.approx(2)
    assert stats.images == 3
    np.testing.assert_allclose(compute_rollout(model, images), np.full((3, 2, 2), 0.25), rtol=1e-6)
    np.testing.assert_allclose(compute_class_attention(model, images), np.full((3, 4, 2, 2), 0.25), rtol=1e-6)


def test_identity_attention_is_at_distance_zero_and_rolls_out_to_the_identity() -> None:
    model = attending(list(range(16)))
    stats = compute_attention_distance(model, [model_factory.draw_images(model.config, 2)])
    np.testing.assert_allclose(stats.distance, 0, atol=1e-4)
    np.testing.assert_allclose(stats.entropy, 0, atol=1e-4)
    rolled = identity = torch.eye(5).expand(2, 5, 5)
    for _ in range(7):
        rolled = attention._multiply_rollout(rolled, identity[:, None].expand(2, 4, 5, 5))
    assert torch.equal(rolled, identity)


@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
def test_attention_to_the_neighbour_is_one_patch_away(size: tuple[int, int]) -> None:
    """To the right, and from the last column to the first: all but one of a row's patches look one patch far."""
    rows, columns = size[0] // 8, size[1] // 8
    target = [row * columns + (column + 1) % columns for row in range(rows) for column in range(columns)]
    model = attending(target, image_size=size)
    stats = compute_attention_distance(model, [model_factory.draw_images(model.config, 1)])
    expected = 8 * ((columns - 1) * 1 + (columns - 1)) / columns
    np.testing.assert_allclose(stats.distance, [[expected]], rtol=1e-4)
    np.testing.assert_allclose(stats.entropy, 0, atol=1e-3)


def test_distance_counts_pixels_of_the_image_in_a_hybrid() -> None:
    """The total stride is that of the stem times the patch: 4 x 2 pixels here."""
    model = model_factory.build_vit(**model_factory.VARIANTS["hybrid"])
    stats = compute_attention_distance(model, [model_factory.draw_images(model.config, 1)])
    plain = compute_attention_distance(
        model_factory.build_vit(), [model_factory.draw_images(model_factory.build_vit().config, 1)]
    )
    assert model.config.patch == 2
    assert stats.uniform_distance == plain.uniform_distance == pytest.approx(8 * mean_distance(4, 4))


def mean_distance(rows: int, columns: int) -> float:
    places = [(row, column) for row in range(rows) for column in range(columns)]
    return float(np.mean([math.dist(one, other) for one in places for other in places]))


def by_loops(model: ViT, images: Tensor) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Distance and entropy (B, layers, H), and rollout (B, N, N), from whole maps in float64."""
    config = model.config
    rows, columns = (side // config.stride for side in images.shape[2:])
    places = [(row, column) for row in range(rows) for column in range(columns)]
    apart = config.stride * np.array([[math.dist(one, other) for other in places] for one in places])
    maps = np.stack([layer.double().numpy() for layer in attention_maps(model, images)], axis=1)  # (B, layers, H, N, N)
    patches = maps[..., config.num_prefix_tokens :, config.num_prefix_tokens :]
    patches = patches / patches.sum(axis=-1, keepdims=True)
    distance = (patches * apart).sum(axis=-1).mean(axis=-1)
    entropy = -(patches * np.log2(patches)).sum(axis=-1).mean(axis=-1)
    joint = np.broadcast_to(np.eye(maps.shape[-1]), (len(images), *maps.shape[-2:]))
    for layer in range(maps.shape[1]):
        onward = maps[:, layer].mean(axis=1) + np.eye(maps.shape[-1])
        joint = (onward / onward.sum(axis=-1, keepdims=True)) @ joint
    return distance, entropy, joint


@VARIANTS
def test_every_model_agrees_with_plain_loops(change: dict[str, Any]) -> None:
    """The head's token is the class token, the mean of two, all patches, or what attention pooling weighs."""
    model = model_factory.build_vit(**change)
    images = model_factory.draw_images(model.config, 3)
    prefix, pool = model.config.num_prefix_tokens, model.config.pool
    stats = compute_attention_stats(model, images)
    distance, entropy, joint = by_loops(model, images)
    np.testing.assert_allclose(stats.distance, distance, rtol=1e-4)
    np.testing.assert_allclose(stats.entropy, entropy, rtol=1e-4)
    if pool == "map":
        weights = pooling(model, images).mean(dim=1)
        row = np.einsum("bn,bnm->bm", weights, joint[:, 0 if model.config.pool_prefix else prefix :])
    elif pool == "class":
        row = joint[:, :2].mean(axis=1) if model.config.distillation_head else joint[:, 0]
    else:
        row = joint[:, prefix:].mean(axis=1)
        row = (row + joint[:, 0]) / 2 if pool == "class-mean" else row
    row = row[:, prefix:] / row[:, prefix:].sum(axis=1, keepdims=True)
    np.testing.assert_allclose(stats.rollout.reshape(3, -1), row, rtol=1e-4)
    np.testing.assert_allclose(stats.heads.sum(axis=(2, 3)), 1, rtol=1e-5)


def pooling(model: ViT, images: Tensor) -> Tensor:
    """(B, H, n or N): what the query of attention pooling attends to, computed apart from the model's own pass."""
    pool = model.attn_pool
    with torch.no_grad():
        patches = model.encode(images)[:, 0 if model.config.pool_prefix else model.config.num_prefix_tokens :]
        query = pool.q(pool.latent).unflatten(-1, (pool.heads, -1)).transpose(1, 2)  # (1, H, 1, K)
        keys = pool.kv(patches).chunk(2, dim=-1)[0].unflatten(-1, (pool.heads, -1)).transpose(1, 2)  # (B, H, n, K)
        return (query @ keys.mT * query.shape[-1] ** -0.5).softmax(dim=-1)[:, :, 0]


def test_poolings_maps_times_values_are_its_output() -> None:
    model = model_factory.build_vit(**model_factory.VARIANTS["map"])
    images = model_factory.draw_images(model.config, 3)
    pool = model.attn_pool
    with torch.no_grad():
        patches = model.encode(images)
        values = pool.kv(patches).chunk(2, dim=-1)[1].unflatten(-1, (pool.heads, -1))  # (B, n, H, K)
        mixed = torch.einsum("bhn,bnhk->bhk", pooling(model, images), values).flatten(1)
        pooled = pool.proj(mixed)
        torch.testing.assert_close(pooled + pool.mlp(pool.norm(pooled)), pool(patches), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(
        compute_class_attention(model, images).reshape(3, 4, -1), pooling(model, images), rtol=1e-5
    )


@VARIANTS
def test_maps_times_values_are_the_layers_output(change: dict[str, Any]) -> None:
    """What is measured is what the fused kernel did, in every layer."""
    model = model_factory.build_vit(**change)
    images = model_factory.draw_images(model.config, 2)
    calls: list[tuple[Tensor, Tensor]] = []
    rotary = model.compute_rotary(model.config.grid, images.device)
    for block in model.blocks:
        block.attn.register_forward_hook(lambda _, arguments, output: calls.append((arguments[0], output)))
    with torch.no_grad():
        model.encode(images)
        for block, weights, (x, output) in zip(model.blocks, attention_maps(model, images), list(calls), strict=True):
            _, _, values = block.attn.project_qkv(x, rotary=rotary)
            attended = block.attn.proj(block.attn.norm((weights @ values).transpose(1, 2).flatten(2)))
            torch.testing.assert_close(attended, output, atol=1e-5, rtol=1e-5)


def test_the_class_tokens_attention_is_its_row_of_the_last_layer() -> None:
    model = model_factory.build_vit(**model_factory.VARIANTS["registers"])
    images = model_factory.draw_images(model.config, 2)
    *_, last = attention_maps(model, images)
    row = last[:, :, 0, 5:]
    torch.testing.assert_close(
        torch.from_numpy(compute_class_attention(model, images)).flatten(2), row / row.sum(dim=-1, keepdim=True)
    )


def test_what_prefix_tokens_take_is_left_out_of_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers that take nearly all attention change nothing, and neither do they as queries."""
    model = model_factory.build_vit(registers=2, depth=1)
    generator = torch.Generator().manual_seed(0)
    patches = torch.rand(1, 4, 16, 16, generator=generator).softmax(dim=-1)

    def measure(taken: float) -> attention.AttentionDistance:
        maps = torch.zeros(1, 4, 19, 19)
        maps[..., 3:, 3:] = (1 - taken) * patches
        maps[..., 3:, 1], maps[..., :3, 2] = taken, 1.0
        monkeypatch.setattr(attention, "attention_maps", lambda *_: iter([maps]))
        return compute_attention_distance(model, [model_factory.draw_images(model.config, 1)])

    np.testing.assert_allclose(measure(0.999).distance, measure(0.0).distance, rtol=1e-4)
    np.testing.assert_allclose(measure(0.999).entropy, measure(0.0).entropy, rtol=1e-4)


def test_rollout_counts_what_passes_through_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The register reads patch 1, then the class token reads the register: patch 1 has all, by way of it."""
    model = model_factory.build_vit(image_size=(8, 16), registers=1, depth=2)
    first, second = torch.eye(4).expand(1, 4, 4, 4).clone(), torch.eye(4).expand(1, 4, 4, 4).clone()
    first[..., 1, :] = torch.tensor([0.0, 0.0, 0.0, 1.0])  # tokens: class, register, two patches
    second[..., 0, :] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    monkeypatch.setattr(attention, "attention_maps", lambda *_: iter([first, second]))
    np.testing.assert_allclose(compute_rollout(model, model_factory.draw_images(model.config, 1)), [[[0.0, 1.0]]])


def test_memory_is_bounded_by_chunks_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_factory.build_vit()
    images = model_factory.draw_images(model.config, 5)
    whole, colours = compute_attention_stats(model, images), compute_token_colors(model, images)
    sizes: list[int] = []

    def counted(network: ViT, chunk: Tensor) -> Iterator[Tensor]:
        sizes.append(len(chunk))
        return attention_maps(network, chunk)

    monkeypatch.setattr(attention, "attention_maps", counted)
    monkeypatch.setattr(attention, "_MAX_MAP_BYTES", 2 * 4 * 4 * 17 * 17)  # two images' maps
    for one, two in zip(compute_attention_stats(model, images), whole, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4)
    assert sizes == [2, 2, 1]
    np.testing.assert_allclose(compute_token_colors(model, images), colours, atol=1e-3)
    split = compute_attention_distance(model, images.split([1, 4]))
    np.testing.assert_allclose(split.distance, whole.distance.mean(axis=0), rtol=1e-5)
    assert split.images == 5


def test_attention_stays_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes = model_factory.build_vit(), list[torch.Size]()
    fused = F.scaled_dot_product_attention

    def counted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shapes.append(query.shape)
        return fused(query, key, value)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    compute_attention_stats(model, model_factory.draw_images(model.config))
    assert shapes == [(2, 4, 17, 8)] * 3


def test_another_image_size_has_another_grid() -> None:
    model = model_factory.build_vit(**model_factory.VARIANTS["hybrid"])
    stats = compute_attention_stats(model, model_factory.draw_images(model.config, 2, size=(16, 48)))
    assert stats.rollout.shape == (2, 2, 6)
    assert stats.heads.shape == (2, 4, 2, 6)
    both = compute_attention_distance(
        model, [model_factory.draw_images(model.config, 1), model_factory.draw_images(model.config, 3, size=(16, 48))]
    )
    assert both.uniform_distance == pytest.approx(8 * (mean_distance(4, 4) + 3 * mean_distance(2, 6)) / 4)


def test_colours_follow_patches_and_groups_have_one_each() -> None:
    """Without positions a patch's token is its own: moved patches move their colours, equal patches share them."""
    model = model_factory.build_vit(positions="none")
    image = model_factory.draw_images(model.config, 1)
    image[..., :16, :] = image[..., :8, :8].repeat(1, 1, 2, 4)  # the upper half is one patch eight times
    colours = compute_token_colors(model, image)
    assert colours.shape == (1, 4, 4, 3)
    assert (colours >= 0).all()
    assert (colours <= 1).all()
    np.testing.assert_allclose(colours[:, :2], np.broadcast_to(colours[:, :1, :1], (1, 2, 4, 3)), atol=1e-4)
    turned = compute_token_colors(model, image.unflatten(2, (4, 8)).flip(2).flatten(2, 3))
    np.testing.assert_allclose(turned[:, ::-1], colours, atol=1e-3)
    assert np.ptp(colours[0, 2:], axis=(0, 1)).min() > 0.2


def test_a_single_patch_is_grey() -> None:
    model = model_factory.build_vit(image_size=(8, 8))
    np.testing.assert_allclose(compute_token_colors(model, model_factory.draw_images(model.config, 2)), 0.5)


def test_what_cannot_be_measured_is_said_in_a_sentence() -> None:
    model = model_factory.build_vit()
    for function in (
        compute_rollout,
        compute_class_attention,
        compute_token_colors,
        lambda *given: compute_attention_distance(given[0], [given[1]]),
    ):
        with pytest.raises(UsageError, match="BiT ResNet has no attention"):
            function(model_factory.build_bit(), model_factory.draw_images(model_factory.build_bit().config))
        with pytest.raises(DataError, match="there are none"):
            function(model, model_factory.draw_images(model.config, 0))
    with pytest.raises(DataError, match="there are none"):
        compute_attention_distance(model, [])
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight.fill_(torch.nan)
    with pytest.raises(ModelError, match="attention is not finite"):
        compute_rollout(model, model_factory.draw_images(model.config))


def test_dropout_is_off_while_attention_is_measured() -> None:
    model = model_factory.build_vit().set_regularization(dropout=0.5, stochastic_depth=0.5).train()
    images = model_factory.draw_images(model.config)
    assert np.array_equal(compute_rollout(model, images), compute_rollout(model, images))
