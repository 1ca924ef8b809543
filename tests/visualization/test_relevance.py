"""Relevance against a second implementation of plain loops, on models of every kind."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tests import model_factory
from vitrail.errors import ModelError, UsageError
from vitrail.model.positions import compute_offset_logits, compute_relative_bias, rotate
from vitrail.model.vit import ViT
from vitrail.visualization import attention, relevance
from vitrail.visualization.relevance import compute_relevance

WITH_HEAD = {name: change for name, change in model_factory.VARIANTS.items() if "headless" not in name}
VARIANTS = pytest.mark.parametrize("change", WITH_HEAD.values(), ids=WITH_HEAD.keys())


def run_plainly(model: ViT, image: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
    """The logits (L,) of one image, and the attention of each layer and head, (N, N), as leaves of nothing."""
    x, positions, grid = model.embed(image[None])
    x, maps, rotary = x[0], list[list[Tensor]](), model.compute_rotary(grid, image.device)
    for block, position in zip(model.blocks, positions, strict=False):
        x = x if position is None else x + position[0] if position.ndim == 3 else x + position
        tokens = block.norm1(x)
        q, k, v = (part.unflatten(-1, (model.config.heads, -1)) for part in block.attn.qkv(tokens).chunk(3, dim=-1))
        heads, outputs = [], []
        for head in range(model.config.heads):
            query, key = (rotate(part[:, head], rotary, model.config) for part in (q, k))
            logits = query @ key.T
            if model.config.positions == "relative":
                queries = q.transpose(0, 1)[None]
                logits = logits + compute_offset_logits(queries, block.attn.offsets, grid, model.config)[0, head]
            logits = logits / q.shape[-1] ** 0.5
            if model.config.positions == "relative-bias":
                logits = (
                    logits + compute_relative_bias(block.attn.relative_position_bias_table, grid, model.config)[head]
                )
            heads.append(torch.softmax(logits, dim=-1))
            outputs.append(heads[-1] @ v[:, head])
        x = x + block.ls1(block.attn.proj(block.attn.norm(torch.cat(outputs, dim=-1))))
        x = x + block.ls2(block.mlp(block.norm2(x)))
        maps.append(heads)
    x = model.norm(x)
    if model.config.pool == "map":
        pool, patches = model.attn_pool, x if model.config.pool_prefix else x[model.config.num_prefix_tokens :]
        q = pool.q(pool.latent[0, 0]).unflatten(-1, (pool.heads, -1))
        k, v = (part.unflatten(-1, (pool.heads, -1)) for part in pool.kv(patches).chunk(2, dim=-1))
        maps.append([torch.softmax(k[:, head] @ q[head] / q.shape[-1] ** 0.5, dim=0) for head in range(pool.heads)])
        pooled = pool.proj(torch.cat([weights @ v[:, head] for head, weights in enumerate(maps[-1])]))
        features = model.pre_logits(pooled + pool.mlp(pool.norm(pooled)))
    else:
        features = model.pool(x[None])[0]
    logits = model.head(features)
    return (logits + model.head_dist(x[1])) / 2 if model.config.distillation_head else logits, maps


def relevance_by_loops(model: ViT, image: Tensor, label: int) -> NDArray[Any]:
    """(n,), of sum 1: token by token, head by head and layer by layer."""
    logits, maps = run_plainly(model, image)
    gradients = torch.autograd.grad(logits[label], [head for layer in maps for head in layer])
    layers, config, remaining = [], model.config, iter(gradients)
    for layer in maps:
        mean = torch.zeros_like(layer[0])
        for weights in layer:
            mean = mean + (weights * next(remaining)).clamp(min=0) / len(layer)
        layers.append(mean.detach().numpy())
    tokens = layers[0].shape[0]
    propagated = np.eye(tokens)
    for carried in layers[: config.depth]:
        propagated = propagated + carried @ propagated
    match config.pool:
        case "class":
            row = propagated[: 1 + config.distillation_head].mean(axis=0)
        case "class-mean":
            row = (propagated[0] + (propagated - np.eye(tokens))[config.num_prefix_tokens :].mean(axis=0)) / 2
        case "map":
            row = layers[-1] @ propagated[0 if config.pool_prefix else config.num_prefix_tokens :]
        case _:
            row = (propagated - np.eye(tokens))[config.num_prefix_tokens :].mean(axis=0)
    patches = row[config.num_prefix_tokens :]
    return patches / patches.sum()


@VARIANTS
def test_every_model_agrees_with_plain_loops(change: dict[str, Any]) -> None:
    model = model_factory.build_vit(**change).double()
    images = model_factory.draw_images(model.config, 2).double()
    result = compute_relevance(model, images)
    assert result.classes.tolist() == model(images).argmax(dim=1).tolist()
    np.testing.assert_allclose(result.logits, model(images).detach(), rtol=1e-5, atol=1e-6)  # unfused, the same model
    for image, label, shown in zip(images, result.classes, result.maps, strict=True):
        expected = relevance_by_loops(model, image, label)
        np.testing.assert_allclose(shown.ravel(), expected, rtol=1e-5, atol=1e-9)
        assert np.ptp(expected) > 1e-3 / len(expected)


def test_relevance_is_that_of_the_class_asked_for() -> None:
    model = model_factory.build_vit().double()
    images = model_factory.draw_images(model.config, 3).double()
    result = compute_relevance(model, images, torch.tensor([5, 0, 2]))
    assert result.classes.tolist() == [5, 0, 2]
    for image, label, shown in zip(images, (5, 0, 2), result.maps, strict=True):
        np.testing.assert_allclose(shown.ravel(), relevance_by_loops(model, image, label), rtol=1e-5)


def test_what_only_another_patch_feeds_the_class_token_is_what_is_relevant() -> None:
    """A single layer in which the class token attends to all alike, and one patch's value alone raises the logit."""
    model = model_factory.build_vit(depth=1, heads=1, classes=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for norm in (model.blocks[0].norm1, model.norm):
            norm.weight.fill_(1)
        model.pos_embed[0, 1 + 6, 3] = 5  # patch 6 has a direction of its own
        model.blocks[0].attn.qkv.weight[2 * 32 :] = torch.eye(32)
        model.blocks[0].attn.proj.weight.copy_(torch.eye(32))
        model.head.weight[1, 3] = 1
    images = model_factory.draw_images(model.config, 1)
    maps = compute_relevance(model, images, torch.tensor([1])).maps
    assert maps.shape == (1, 4, 4)
    assert maps[0].ravel().argmax() == 6
    assert maps[0, 1, 2] > 0.99
    assert attention.compute_rollout(model, images).ravel()[6] == pytest.approx(1 / 16)  # rollout cannot know it


def test_chunks_change_nothing_and_the_model_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_factory.build_vit(heads=4)
    images, classes = model_factory.draw_images(model.config, 5), torch.tensor([0, 1, 2, 3, 4])
    whole = compute_relevance(model, images, classes)
    model.requires_grad_(requires_grad=False)
    monkeypatch.setattr(attention, "_MAX_MAP_BYTES", 2 * 2 * 3 * 4 * 4 * 17 * 17)  # two images' maps and gradients
    with torch.no_grad():
        parts = compute_relevance(model, images, classes)
    np.testing.assert_allclose(parts.maps, whole.maps, rtol=1e-4, atol=1e-7)
    assert not any(module._forward_hooks for module in model.modules())
    assert all(block.attn.fused for block in model.blocks)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_has_no_relevance_says_so() -> None:
    images = model_factory.draw_images(model_factory.build_config(), 1)
    with pytest.raises(UsageError, match="has no head, but relevance is that of a patch to a class"):
        compute_relevance(model_factory.build_vit(classes=0), images)
    with pytest.raises(UsageError, match="ResNet has no attention"):
        compute_relevance(model_factory.build_bit(), images)
    broken = model_factory.build_vit()
    with torch.no_grad():
        broken.head.bias.fill_(torch.nan)
    with pytest.raises(ModelError, match="relevance is not finite"):
        compute_relevance(broken, images)


def test_a_class_that_nothing_speaks_for_has_a_map_of_zeros() -> None:
    model = model_factory.build_vit()
    torch.nn.init.zeros_(model.head.weight)
    result = compute_relevance(model, model_factory.draw_images(model.config, 1))
    assert not result.maps.any()
    assert F.softmax(torch.from_numpy(result.logits), dim=1).isfinite().all()
    assert relevance.Relevance._fields == ("maps", "classes", "logits")
