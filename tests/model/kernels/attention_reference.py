"""Attention in float64, and inputs for it."""

import torch
from torch import Tensor


def attend_exactly(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Outputs and logsumexp in float64."""
    q, k, v = qkv.double().unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    logits = q @ k.mT * q.shape[-1] ** -0.5
    return (logits.softmax(-1) @ v).transpose(1, 2).flatten(2), logits.logsumexp(-1)


def draw_qkv(batch: int, tokens: int, heads: int, size: int, largest_logit: float | None = None) -> Tensor:
    """Random queries, keys and values, with the largest logit given."""
    generator = torch.Generator().manual_seed(tokens * 100 + size)
    qkv = torch.randn(batch, tokens, 3 * heads * size, generator=generator)
    if largest_logit is not None:
        q, k, _ = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        factor = (largest_logit / (q @ k.mT * size**-0.5).abs().max()).sqrt()
        qkv.unflatten(-1, (3, heads, -1))[:, :, :2].mul_(factor)
    return qkv
