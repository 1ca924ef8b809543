"""Attention from packed queries, keys and values: torch's, or on a Hopper GPU that of `triton_attention`.

    B images   H heads   N tokens   K channels of a head

The two differ by rounding. `attend_with_torch` defines the result.
"""

import importlib
import importlib.util
import logging

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_TOKENS = 320  # whose keys and values fit on chip
HEAD_SIZES = (64, 72, 80, 88)
_CAPABILITY = (9, 0)  # where the kernels were tuned and measured
_logger = logging.getLogger("vitrail")
_noted: set[str] = set()


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
    reason = find_obstacle(qkv.get_device(), qkv.dtype)
    if reason is None and all(qkv.shape[2] != 3 * heads * size for size in HEAD_SIZES):
        reason = f"a head's channels are none of {HEAD_SIZES}"
    if reason is None and qkv.shape[1] > MAX_TOKENS:
        reason = f"there are more than {MAX_TOKENS} tokens"
    return reason is None or note_fallback(reason)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def find_obstacle(device: int, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot be used on this GPU in this precision; None if it can, and is loaded."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the precision is {dtype}"
    if torch.cuda.get_device_capability(device) != _CAPABILITY:
        return f"the GPU's compute capability is {torch.cuda.get_device_capability(device)}, not {_CAPABILITY}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    importlib.import_module("vitrail.model.kernels.triton_attention")  # defines the operator
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_fallback(reason: str) -> bool:
    """Log why torch's attention is used, the first time; returns False."""
    if reason not in _noted:
        _noted.add(reason)
        _logger.info("attention by torch's kernels: %s", reason)
    return False
