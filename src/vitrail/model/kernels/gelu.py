"""A linear layer and GELU, whose backward pass on a Hopper GPU sums the bias's gradient while it computes GELU's.

    M rows (tokens of all images)   C channels

Torch reads the gradient before GELU, as large as the MLP's hidden layer, once more for that sum.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.kernels.availability import find_obstacle, note_fallback


def apply_linear_gelu(x: Tensor, linear: nn.Module, gelu: nn.Module) -> Tensor:
    """gelu(linear(x)); in training on a GPU with another backward pass."""
    if not (isinstance(linear, nn.Linear) and isinstance(gelu, nn.GELU) and linear.bias is not None):
        return gelu(linear(x))
    if not (x.is_cuda and torch.is_grad_enabled() and can_use_kernel(x)):
        return gelu(linear(x))
    hidden = F.linear(x, linear.weight, linear.bias.detach())
    return GeluWithBiasGradient.apply(hidden, linear.bias, gelu.approximate)  # type: ignore[no-untyped-call]


def can_use_kernel(x: Tensor) -> bool:
    """Whether our kernel computes this on its GPU, in autocast's precision; if not, the log says why, once."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    reason = find_obstacle("triton_gelu", x.get_device(), dtype)
    return reason is None or note_fallback("GELU", reason)


class GeluWithBiasGradient(torch.autograd.Function):
    """GELU of hidden values that a bias was added to; the gradients of both are computed in one pass over memory."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, bias: Tensor, approximate: str) -> Tensor:
        """(..., C) and (C,) -> (..., C)."""
        ctx.save_for_backward(hidden)
        ctx.approximate, ctx.bias_dtype = approximate, bias.dtype
        return F.gelu(hidden, approximate=approximate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradients of `hidden` and of the bias, whose sums are float32."""
        (hidden,) = ctx.saved_tensors
        dhidden, dbias = torch.ops.vitrail.gelu_backward(gradients[0], hidden, ctx.approximate)
        return dhidden, dbias.to(ctx.bias_dtype), None
