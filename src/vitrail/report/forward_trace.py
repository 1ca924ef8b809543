"""One image through equations 1 to 4 of the paper, in the model's own numbers.

    N tokens   n = R C patches   D width   H heads   K = D/H   L layers

The model's own modules compute everything here, one after the other; nothing is simplified.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.data.transforms import normalize
from vitrail.errors import UsageError
from vitrail.model.positions import Grid
from vitrail.model.vit import Block, ViT, patchify
from vitrail.weights.trained import Trained, logits_to_probabilities

SHOWN_VALUES = 6  # numbers of a vector that are shown

TensorShape = tuple[int, ...]
Numbers = tuple[float, ...]


class EmbeddingTrace(NamedTuple):
    """Equation 1, of the patch that is followed."""

    patch: Numbers
    """Its first values, normalised."""
    embedded: Numbers
    position: Numbers | None
    """What is added for its place; None where that is nothing, or not here."""
    token: Numbers


class AttentionTrace(NamedTuple):
    """Equation 2 in one layer, for the class token, or the patch that is followed where there is none."""

    layer: int
    """From 1."""
    heads: NDArray[np.float32]  # (H, R, C): what it attends to among the patches
    prefix_share: float
    """How much of its attention goes to the tokens before the patches, itself among them, averaged over heads."""
    score: float
    """In the first head, its query times the key of the patch that is followed, over the root of K."""
    weight: float
    """What the softmax makes of it: the share of that head's attention."""


class BlockTrace(NamedTuple):
    """Equations 2 and 3 in the first layer, of the patch that is followed: its token, what is added, and the sum."""

    before: Numbers
    attention: Numbers
    after_attention: Numbers
    mlp: Numbers
    after: Numbers


class TopClass(NamedTuple):
    """A class at the end of equation 4."""

    label: str
    logit: float
    probability: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardTrace:
    """The way of one image."""

    config: ViTConfig
    temperature: float
    multi_label: bool
    grid: tuple[int, int]
    followed_patch: tuple[int, int]
    """Row and column of the patch that is followed, from 0: the one in the middle."""
    shapes: dict[str, TensorShape]
    """x, features, patches, E, positions, z, qkv, attention, hidden, y, head: those that the model has."""
    embedding: EmbeddingTrace
    attention: tuple[AttentionTrace, ...]
    """In the first and in the last layer."""
    first_block: BlockTrace
    attention_ratio: Numbers
    """By layer: the length of what attention adds over the length of what it is added to, over all tokens."""
    mlp_ratio: Numbers
    """The same of the MLP, equation 3."""
    active_share: Numbers
    """By layer: the share of the MLP's hidden units above zero."""
    y: Numbers
    """The first values of what the head reads."""
    top_classes: tuple[TopClass, ...]
    """The likeliest five; none of a model without a head."""


@torch.inference_mode()
def trace_forward(trained: Trained, pixels: Tensor) -> ForwardTrace:
    """The way of an image, uint8 (C, S, S) as the model sees it, through a ViT."""
    model, preprocess = trained.model, trained.preprocess
    if not isinstance(model, ViT):
        raise UsageError(f"equations 1 to 4 are those of a Vision Transformer; a {type(model).__name__} has no tokens")
    assert preprocess is not None, "a run's weights know their preprocessing"
    model.eval()
    images = normalize(pixels[None].to(next(model.parameters()).device), preprocess)
    x, positions, grid = model.embed(images)  # (1, N, D)
    followed = (grid[0] // 2, grid[1] // 2)
    place = followed[0] * grid[1] + followed[1]
    embedding, shapes = _trace_embedding(model, images, x, place)
    attending, attention_added, mlp_added, active = [], [], [], []
    passing: list[Numbers] = []
    for layer, (block, position) in enumerate(zip(model.blocks, positions, strict=False)):
        assert isinstance(block, Block)
        x = x if position is None else x + position
        normed = block.norm1(x)
        if layer in (0, len(model.blocks) - 1):
            attending.append(_trace_attention(block, normed, grid, layer + 1, place))
        attended = block.ls1(block.attn(normed, grid))
        between = x + attended  # equation 2
        hidden = block.mlp.act(block.mlp.fc1(block.norm2(between)))  # (1, N, mlp)
        thought = block.ls2(block.mlp.fc2(hidden))
        after = between + thought  # equation 3
        if layer == 0:
            passing = [
                _take_first(each[0, model.config.num_prefix_tokens + place])
                for each in (x, attended, between, thought, after)
            ]
        attention_added.append(_compute_norm_ratio(attended, x))
        mlp_added.append(_compute_norm_ratio(thought, between))
        active.append(float((hidden > 0).float().mean()))
        x = after
    tokens = model.norm(x)
    features = model.pool(tokens)  # equation 4
    return ForwardTrace(
        config=model.config,
        temperature=trained.temperature,
        multi_label=trained.multi_label,
        grid=grid,
        followed_patch=followed,
        shapes=shapes | _list_shapes(model, x, features),
        embedding=embedding,
        attention=tuple(attending),
        first_block=BlockTrace(*passing),
        attention_ratio=tuple(attention_added),
        mlp_ratio=tuple(mlp_added),
        active_share=tuple(active),
        y=_take_first(features[0]),
        top_classes=_rank_classes(trained, model, tokens, features),
    )


def _trace_embedding(
    model: ViT, images: Tensor, x: Tensor, patch_index: int
) -> tuple[EmbeddingTrace, dict[str, TensorShape]]:
    config, embed = model.config, model.patch_embed
    source = images if embed.backbone is None else embed.backbone(images)
    patches = patchify(source, config.patch)[0]  # (n, C P P)
    embedded = embed(images)[0]  # (n, D)
    token = x[0, config.num_prefix_tokens + patch_index]
    table = model.compute_positions((images.shape[2] // config.stride, images.shape[3] // config.stride))
    here = table is not None and config.positions_at == "stem"
    position = _take_first(table[0, config.num_prefix_tokens + patch_index]) if table is not None and here else None
    shapes: dict[str, TensorShape] = {"x": tuple(images.shape[1:]), "patches": tuple(patches.shape)}
    if embed.backbone is not None:
        shapes["features"] = tuple(source.shape[1:])
    shapes["E"] = (patches.shape[1], config.width)
    if table is not None:
        shapes["positions"] = tuple(table.shape[1:])
    return EmbeddingTrace(
        _take_first(patches[patch_index]), _take_first(embedded[patch_index]), position, _take_first(token)
    ), shapes


def _trace_attention(block: Block, normed: Tensor, grid: Grid, layer: int, patch_index: int) -> AttentionTrace:
    prefix = block.attn.config.num_prefix_tokens
    reader = 0 if block.attn.config.class_token else prefix + patch_index
    queries, keys, _ = block.attn.project_qkv(normed)
    logits = block.attn.compute_logits(queries, keys, grid)[0, :, reader]  # (H, N)
    weights = logits.softmax(dim=-1)
    heads = weights[:, prefix:].unflatten(-1, grid).float().cpu().numpy()
    elsewhere = float(weights[:, :prefix].sum(dim=1).mean())
    return AttentionTrace(
        layer, heads, elsewhere, float(logits[0, prefix + patch_index]), float(weights[0, prefix + patch_index])
    )


def _list_shapes(model: ViT, x: Tensor, features: Tensor) -> dict[str, TensorShape]:
    config = model.config
    tokens = x.shape[1]
    shapes: dict[str, TensorShape] = {
        "z": (tokens, config.width),
        "qkv": (config.heads, tokens, config.width // config.heads),
        "attention": (config.heads, tokens, tokens),
        "hidden": (tokens, config.mlp),
        "y": tuple(features.shape[1:]),
    }
    return shapes | ({"head": (config.num_features, config.classes)} if config.classes else {})


def _rank_classes(trained: Trained, model: ViT, tokens: Tensor, features: Tensor) -> tuple[TopClass, ...]:
    if not model.config.classes:
        return ()
    logits = model.head(features)
    if model.config.distillation_head:
        logits = (logits + model.head_dist(tokens[:, 1])) / 2
    logits = logits[0].float()
    probabilities = logits_to_probabilities(logits, temperature=trained.temperature, multi_label=trained.multi_label)
    labels = trained.labels or tuple(f"class {index}" for index in range(len(logits)))
    best = logits.topk(min(5, len(logits))).indices.tolist()
    return tuple(TopClass(labels[index], float(logits[index]), float(probabilities[index])) for index in best)


def _take_first(values: Tensor) -> Numbers:
    return tuple(values[:SHOWN_VALUES].float().tolist())


def _compute_norm_ratio(added: Tensor, trunk: Tensor) -> float:
    """The mean over tokens of one length over another."""
    return float((added.norm(dim=-1) / trunk.norm(dim=-1).clamp(min=torch.finfo(trunk.dtype).tiny)).mean())
