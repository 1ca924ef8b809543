"""GELU's backward pass with the sum of its gradient over rows, which is a bias's gradient, in Triton.

    M rows   C channels

Each program walks down one strip of channels and writes a partial sum. Their sum, in torch, has a fixed order, so two
runs give the same bits.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SQRT_2 = tl.constexpr(math.sqrt(2))
DENSITY_AT_0 = tl.constexpr(1 / math.sqrt(2 * math.pi))
NORMAL_EXPONENT = tl.constexpr(-math.log2(math.e) / 2)  # exponents are of 2
SIGMOID_SCALE = tl.constexpr(2 * math.sqrt(2 / math.pi))  # (1 + tanh u) / 2 is the sigmoid of 2 u
SIGMOID_EXPONENT = tl.constexpr(-math.log2(math.e) * 2 * math.sqrt(2 / math.pi))
TANH_CUBE = tl.constexpr(0.044715)


class GeluConfig(NamedTuple):
    """How the pass is divided."""

    rows: int = 16
    """Of a tile."""
    columns: int = 256
    tiles: int = 16
    """That a program computes, one below the other."""
    warps: int = 4
    stages: int = 3


@triton.jit
def _differentiate_gelu(x, TANH: tl.constexpr):
    if TANH:  # x * sigmoid(2 u), where u is the argument of tanh
        square = x * x
        sigmoid = 1.0 / (1.0 + tl.exp2(x * SIGMOID_EXPONENT * (1.0 + square * TANH_CUBE)))
        slope = (1.0 + square * (3.0 * TANH_CUBE)) * SIGMOID_SCALE
        derivative = sigmoid + x * slope * sigmoid * (1.0 - sigmoid)
    else:
        derivative = 0.5 * (1.0 + tl.erf(x / SQRT_2)) + x * DENSITY_AT_0 * tl.exp2(x * x * NORMAL_EXPONENT)
    return derivative


@triton.jit
def gelu_backward_kernel(
    dout, hidden, dhidden, partial, M, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILES: tl.constexpr, TANH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """TILES tiles of ROWS x COLUMNS, and their sum over rows."""
    STRIPS: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    block = tl.program_id(0) // STRIPS
    columns = tl.program_id(0) % STRIPS * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        rows = (block * TILES + tile) * ROWS + tl.arange(0, ROWS)
        mask = (rows < M)[:, None] & (columns < C)[None, :]
        offsets = rows[:, None].to(tl.int64) * C + columns[None, :]
        gradient = tl.load(dout + offsets, mask=mask, other=0.0).to(tl.float32)
        gradient *= _differentiate_gelu(tl.load(hidden + offsets, mask=mask, other=0.0).to(tl.float32), TANH)
        tl.store(dhidden + offsets, gradient.to(dhidden.dtype.element_ty), mask=mask)
        sums += gradient
    tl.store(partial + block * C + columns, tl.sum(sums, 0), mask=columns < C)


def launch_backward(dout: Tensor, hidden: Tensor, approximate: str, config: GeluConfig) -> tuple[Tensor, Tensor]:
    """The gradient before GELU, as `hidden`, and its sum over rows, float32 (C,)."""
    channels = hidden.shape[-1]
    rows = hidden.numel() // channels
    blocks = triton.cdiv(rows, config.rows * config.tiles)
    dhidden = torch.empty_like(hidden)
    partial = hidden.new_empty(blocks, channels, dtype=torch.float32)
    gelu_backward_kernel[(blocks * triton.cdiv(channels, config.columns),)](
        dout, hidden, dhidden, partial, rows, channels, config.rows, config.columns, config.tiles,
        approximate == "tanh", config.stages, num_warps=config.warps,
    )  # fmt: skip
    return dhidden, partial.sum(0)


@torch.library.custom_op("vitrail::gelu_backward", mutates_args=())
def gelu_backward(dout: Tensor, hidden: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """The gradient before GELU and its sum over all rows, float32."""
    return launch_backward(dout.contiguous(), hidden.contiguous(), approximate, GeluConfig())


@gelu_backward.register_fake
def _(dout: Tensor, hidden: Tensor, approximate: str) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape[-1:], dtype=torch.float32)
