"""Trace one image through equations 1 to 4 of the paper, with the model's own numbers.

    N tokens   n = R C patches   D width   H heads   K = D/H   L layers

The model makes one forward pass, which hooks on its modules observe; nothing is computed twice or simplified.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.data.transforms import normalize
from vitrail.errors import UsageError
from vitrail.model.positions import Grid
from vitrail.model.vit import Block, ViT, crop_remainder, patchify
from vitrail.weights.trained import Trained, logits_to_probabilities, require_preprocess

SHOWN_VALUES = 6  # how many values of a vector are shown
_MAX_CLASSES = 5

TensorShape = tuple[int, ...]
Numbers = tuple[float, ...]


class EmbeddingTrace(NamedTuple):
    """Equation 1 for the followed patch."""

    patch: Numbers  # its first pixel values, normalized
    embedded: Numbers
    position: Numbers | None  # the position embedding added to it; None if the model has none, or adds it in the layers
    token: Numbers


class AttentionTrace(NamedTuple):
    """Equation 2 in one layer, for the class token, or for the followed patch if there is no class token."""

    layer: int  # from 1
    heads: NDArray[np.float32]  # (H, R, C): the attention weights over the patches
    prefix_share: float  # the share of attention on the tokens before the patches, itself included, averaged over heads
    score: float  # in the first head, its query times the key of the followed patch, over the square root of K
    weight: float  # the softmax of that score: the followed patch's share of the head's attention


class BlockTrace(NamedTuple):
    """Equations 2 and 3 in the first layer, for the followed patch: its token and what each branch adds."""

    before: Numbers
    attention: Numbers
    after_attention: Numbers
    mlp: Numbers
    after: Numbers


class TopClass(NamedTuple):
    """One of the most probable classes, the result of equation 4."""

    label: str
    logit: float
    probability: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardTrace:
    """One image's forward pass."""

    config: ViTConfig
    temperature: float
    multi_label: bool
    grid: tuple[int, int]
    followed_patch: tuple[int, int]  # row and column of the followed patch, from 0: the middle one
    shapes: dict[str, TensorShape]
    """x, features, patches, E, positions, z, qkv, attention, hidden, y, head: those that the model has."""
    embedding: EmbeddingTrace
    attention: tuple[AttentionTrace, ...]  # in the first and in the last layer
    first_block: BlockTrace
    attention_ratio: Numbers
    """By layer: the norm of what attention adds over the norm of its input, averaged over all tokens."""
    mlp_ratio: Numbers  # the same for the MLP, equation 3
    active_share: Numbers  # by layer: the share of the MLP's hidden units above zero
    y: Numbers  # the first values of the features that the head reads
    top_classes: tuple[TopClass, ...]  # the five most probable; none for a model without a head


@torch.inference_mode()
def trace_forward(trained: Trained, pixels: Tensor) -> ForwardTrace:
    """Trace the forward pass of one model input, uint8 (C, S, S), through a ViT."""
    model = trained.model
    if not isinstance(model, ViT):
        raise UsageError(f"equations 1 to 4 are those of a Vision Transformer; a {type(model).__name__} has no tokens")
    model.eval()
    images = normalize(pixels[None].to(next(model.parameters()).device), require_preprocess(trained))
    grid = model.config.compute_grid((images.shape[2], images.shape[3]))
    followed = (grid[0] // 2, grid[1] // 2)
    patch_index = followed[0] * grid[1] + followed[1]
    with _observe(model, grid, patch_index) as (outputs, layers):
        logits = model(images)
    embedding, shapes = _trace_embedding(model, images, outputs, patch_index)
    features = outputs["features"]
    return ForwardTrace(
        config=model.config,
        temperature=trained.temperature,
        multi_label=trained.multi_label,
        grid=grid,
        followed_patch=followed,
        shapes=shapes | _list_shapes(model, outputs["pos_drop"], features),
        embedding=embedding,
        attention=tuple(layer.attention for layer in layers if layer.attention is not None),
        first_block=layers[0].block,
        attention_ratio=tuple(layer.attention_ratio for layer in layers),
        mlp_ratio=tuple(layer.mlp_ratio for layer in layers),
        active_share=tuple(layer.active_share for layer in layers),
        y=_take_first(features[0]),
        top_classes=_rank_classes(trained, logits[0].float()) if model.config.classes else (),
    )


class _LayerTrace(NamedTuple):
    """What is kept of one layer: small, so that memory does not grow with the depth."""

    attention: AttentionTrace | None
    block: BlockTrace
    attention_ratio: float
    mlp_ratio: float
    active_share: float


_Hook = Callable[[nn.Module, tuple[Any, ...], Tensor], None]


@contextlib.contextmanager
def _observe(model: ViT, grid: Grid, patch_index: int) -> Iterator[tuple[dict[str, Tensor], list[_LayerTrace]]]:
    """Record outputs by module name, and a trace of every layer, from the forward pass made meanwhile."""
    outputs: dict[str, Tensor] = {}
    layers: list[_LayerTrace] = []

    def keep(name: str, *, argument: bool = False) -> _Hook:
        def hook(_module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            outputs[name] = arguments[0] if argument else output

        return hook

    def trace_block(block: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        assert isinstance(block, Block)
        outputs["before"], outputs["after"] = arguments[0], output
        rotary = model.compute_rotary(grid, output.device)
        layers.append(_trace_layer(block, outputs, grid, rotary, patch_index, len(layers) + 1))

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if name in ("patch_embed", "patch_embed.backbone", "pos_drop"):
                hooks.enter_context(module.register_forward_hook(keep(name)))
        hooks.enter_context(model.head.register_forward_hook(keep("features", argument=True)))
        for block in model.blocks:
            assert isinstance(block, Block)
            parts = {"normed": block.norm1, "attention": block.ls1, "hidden": block.mlp.act, "mlp": block.ls2}
            for name, part in parts.items():
                hooks.enter_context(part.register_forward_hook(keep(name)))
            hooks.enter_context(block.norm2.register_forward_hook(keep("after_attention", argument=True)))
            hooks.enter_context(block.register_forward_hook(trace_block))
        # without its `queries`, the last block computes all tokens, not only those that the head reads
        hooks.enter_context(model.blocks[-1].register_forward_pre_hook(_compute_all_tokens))
        yield outputs, layers


def _compute_all_tokens(_block: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a block without its `queries`."""
    x, grid, _, rotary = arguments
    return x, grid, None, rotary


def _trace_layer(
    block: Block, outputs: dict[str, Tensor], grid: Grid, rotary: Tensor | None, patch_index: int, layer: int
) -> _LayerTrace:
    config = block.attn.config
    token = config.num_prefix_tokens + patch_index
    shown = layer in (1, config.depth)
    return _LayerTrace(
        _trace_attention(block, outputs["normed"], grid, rotary, layer, patch_index) if shown else None,
        BlockTrace(**{name: _take_first(outputs[name][0, token]) for name in BlockTrace._fields}),
        _compute_norm_ratio(outputs["attention"], outputs["before"]),
        _compute_norm_ratio(outputs["mlp"], outputs["after_attention"]),
        float((outputs["hidden"] > 0).float().mean()),
    )


def _trace_embedding(
    model: ViT, images: Tensor, outputs: dict[str, Tensor], patch_index: int
) -> tuple[EmbeddingTrace, dict[str, TensorShape]]:
    config = model.config
    token = config.num_prefix_tokens + patch_index
    features = outputs.get("patch_embed.backbone")
    patches = patchify(crop_remainder(images, config) if features is None else features, config.patch)[0]  # (n, C P P)
    table = model.compute_positions(config.compute_grid((images.shape[2], images.shape[3])))
    position = _take_first(table[0, token]) if table is not None and config.positions_at == "stem" else None
    shapes: dict[str, TensorShape] = {"x": tuple(images.shape[1:]), "patches": tuple(patches.shape)}
    if features is not None:
        shapes["features"] = tuple(features.shape[1:])
    shapes["E"] = (patches.shape[1], config.width)
    if table is not None:
        shapes["positions"] = tuple(table.shape[1:])
    patch, embedded = _take_first(patches[patch_index]), _take_first(outputs["patch_embed"][0, patch_index])
    return EmbeddingTrace(patch, embedded, position, _take_first(outputs["pos_drop"][0, token])), shapes


def _trace_attention(
    block: Block, normed: Tensor, grid: Grid, rotary: Tensor | None, layer: int, patch_index: int
) -> AttentionTrace:
    """The attention of one token, computed beside the fused kernel, which never materializes it."""
    prefix = block.attn.config.num_prefix_tokens
    reader = 0 if block.attn.config.class_token else prefix + patch_index
    queries, keys, _ = block.attn.project_qkv(normed, rotary=rotary)
    logits = block.attn.compute_logits(queries, keys, grid)[0, :, reader]  # (H, N)
    weights = logits.softmax(dim=-1)
    return AttentionTrace(
        layer,
        heads=weights[:, prefix:].unflatten(-1, grid).float().cpu().numpy(),
        prefix_share=float(weights[:, :prefix].sum(dim=1).mean()),
        score=float(logits[0, prefix + patch_index]),
        weight=float(weights[0, prefix + patch_index]),
    )


def _list_shapes(model: ViT, tokens: Tensor, features: Tensor) -> dict[str, TensorShape]:
    config, count = model.config, tokens.shape[1]
    shapes: dict[str, TensorShape] = {
        "z": (count, config.width),
        "qkv": (config.heads, count, config.width // config.heads),
        "attention": (config.heads, count, count),
        "hidden": (count, config.mlp),
        "y": tuple(features.shape[1:]),
    }
    return shapes | ({"head": (config.num_features, config.classes)} if config.classes else {})


def _rank_classes(trained: Trained, logits: Tensor) -> tuple[TopClass, ...]:
    probabilities = logits_to_probabilities(logits, temperature=trained.temperature, multi_label=trained.multi_label)
    labels = trained.labels or tuple(f"class {index}" for index in range(len(logits)))
    best = logits.topk(min(_MAX_CLASSES, len(logits))).indices.tolist()
    return tuple(TopClass(labels[index], float(logits[index]), float(probabilities[index])) for index in best)


def _take_first(values: Tensor) -> Numbers:
    return tuple(values[:SHOWN_VALUES].float().tolist())


def _compute_norm_ratio(added: Tensor, trunk: Tensor) -> float:
    """The mean over tokens of one norm over the other."""
    return float((added.norm(dim=-1) / trunk.norm(dim=-1).clamp(min=torch.finfo(trunk.dtype).tiny)).mean())
