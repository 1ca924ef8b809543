"""Attention from packed queries, keys and values: torch's, or on a Hopper GPU that of `triton_attention`.

    B images   H heads   N tokens   K channels of a head

The two differ by rounding. `attend_with_torch` defines the result.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.model.kernels.availability import find_obstacle, note_fallback

MAX_TOKENS = 320  # whose keys and values fit on chip
HEAD_SIZES = (64, 72, 80, 88)


def attend(qkv: Tensor, heads: int) -> Tensor:
    """(B, N, 3 H K), as one linear layer makes queries, keys and values -> (B, N, H K)."""
    if qkv.is_cuda and can_use_kernel(qkv, heads):
        return torch.ops.vitrail.attend(qkv.contiguous(), heads)[0]
    return attend_with_torch(qkv, heads)


def attend_with_torch(qkv: Tensor, heads: int) -> Tensor:
    """The same by torch's kernels, on any device."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, N, K)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def can_use_kernel(qkv: Tensor, heads: int) -> bool:
    """Whether our kernel computes these on their GPU; if not, the log says why, once."""
    reason = find_obstacle("triton_attention", qkv.get_device(), qkv.dtype)
    if reason is None and all(qkv.shape[2] != 3 * heads * size for size in HEAD_SIZES):
        reason = f"a head's channels are none of {HEAD_SIZES}"
    if reason is None and qkv.shape[1] > MAX_TOKENS:
        reason = f"there are more than {MAX_TOKENS} tokens"
    return reason is None or note_fallback("attention", reason)
