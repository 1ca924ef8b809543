"""Attention over at most 320 tokens from packed queries, keys and values, in Triton.

    B images   H heads   N tokens   K channels of a head   L rows of a tile

Import this only where triton is installed; `attention` decides whether to use it.

A long-sequence kernel streams keys past running softmax statistics. Here a tile of queries meets all N keys at once, so
the softmax needs one maximum. N is no power of two, as Triton's tiles are, so keys come in pieces: 197 is 128 + 64 + 16
and not 256. For the same reason K = 80 is 64 + 16 and not 128 (`triton_tiles`). Softmax runs in base 2, its scale
folded into the exponent.

The backward pass computes the logits twice, once for the gradient of queries and once for that of keys and values, so
that each program writes what no other one does: two runs give the same bits. It writes into one packed tensor.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.model.kernels.attention_config import (
    TILE_ROWS,
    ForwardConfig,
    KeyConfig,
    QueryConfig,
    choose_forward_config,
    choose_key_config,
    compute_exponent_scale,
    list_forward_arguments,
    list_key_arguments,
    list_query_arguments,
)
from vitrail.model.kernels.triton_tiles import (
    accumulate,
    load_pieces,
    load_tile,
    make_sums,
    multiply_transposed,
    store_tile,
)

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))
ROWS = tl.constexpr(TILE_ROWS)


# --- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def _write_outputs(
    q, keys, values, out, lse, first, scale, PIECES: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr,
    K: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a tile of queries and their logsumexp."""
    logits = ()
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    for i in tl.static_range(0, len(PIECES)):
        tile = multiply_transposed(q, keys[i], REST)
        if PIECES[i][0] + PIECES[i][1] > N:
            tile = tl.where((PIECES[i][0] + tl.arange(0, PIECES[i][1]) < N)[None, :], tile, float("-inf"))
        logits = logits + (tile,)
        largest = tl.maximum(largest, tl.max(tile, 1))
    shift = largest * scale
    total = tl.zeros((ROWS,), tl.float32)
    sums = make_sums(ROWS, REST)
    for j in tl.static_range(0, len(PIECES)):
        weights = tl.exp2(logits[j] * scale - shift[:, None])
        total += tl.sum(weights, 1)
        sums = accumulate(sums, weights, values[j], REST)
    store_tile(out, sums, (1.0 / total)[:, None], first, ROWS, N, STRIDE, K, REST)
    rows = first + tl.arange(0, ROWS)
    tl.store(lse + rows, (shift + tl.log2(total)) * LN_2, mask=rows < N)


@triton.jit
def attend_forward_kernel(
    qkv, out, lse, scale, N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, REST: tl.constexpr,
    PIECES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One head."""
    STRIDE: tl.constexpr = 3 * H * K
    head = tl.program_id(0)
    image = (head // H).to(tl.int64)
    q_head = qkv + image * (N * STRIDE) + head % H * K
    out_head = out + image * (N * H * K) + head % H * K
    keys = load_pieces(q_head + H * K, PIECES, N, STRIDE, K, REST)
    values = load_pieces(q_head + 2 * H * K, PIECES, N, STRIDE, K, REST)
    for first in tl.range(0, N, ROWS, num_stages=STAGES):
        q = load_tile(q_head, first, ROWS, N, STRIDE, K, REST)
        _write_outputs(q, keys, values, out_head, lse + head * N, first, scale, PIECES, N, H * K, K, REST)


# --- backward --------------------------------------------------------------------------------------------------------


@triton.jit
def _load_query_statistics(
    dout, out_head, lse, delta, first, N: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr, REST: tl.constexpr
):
    """The logsumexp, in base 2, and rowsum(dout * out), (L,) each; the latter is stored for the keys."""
    rows = first + tl.arange(0, ROWS)
    out = load_tile(out_head, first, ROWS, N, STRIDE, K, REST)
    row_delta = tl.sum(dout[0].to(tl.float32) * out[0].to(tl.float32), 1)
    if REST:
        row_delta += tl.sum(dout[1].to(tl.float32) * out[1].to(tl.float32), 1)
    tl.store(delta + rows, row_delta, mask=rows < N)
    return tl.load(lse + rows, mask=rows < N, other=0.0) * LOG2_E, row_delta


@triton.jit
def _add_query_gradient(
    sums, q, dout, lse, delta, k_head, v_head, first, scale, SIZE: tl.constexpr, LAST: tl.constexpr, N: tl.constexpr,
    STRIDE: tl.constexpr, K: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Add what SIZE keys contribute to the gradient of queries, (L, K) before the scale."""
    k = load_tile(k_head, first, SIZE, N, STRIDE, K, REST)
    v = load_tile(v_head, first, SIZE, N, STRIDE, K, REST)
    weights = tl.exp2(multiply_transposed(q, k, REST) * scale - lse[:, None])
    if LAST:  # keys after N have logits of 0, whose exponential may be infinite
        weights = tl.where((first + tl.arange(0, SIZE) < N)[None, :], weights, 0.0)
    dlogits = weights * (multiply_transposed(dout, v, REST) - delta[:, None])
    return accumulate(sums, dlogits, k, REST)


@triton.jit
def differentiate_queries_kernel(
    qkv, out, lse, dout, dqkv, delta, scale, N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, REST: tl.constexpr,
    COLUMNS: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries, and delta."""
    STRIDE: tl.constexpr = 3 * H * K
    TILES: tl.constexpr = (N + ROWS - 1) // ROWS
    LAST: tl.constexpr = N // COLUMNS * COLUMNS
    head, first = tl.program_id(0) // TILES, tl.program_id(0) % TILES * ROWS
    image = (head // H).to(tl.int64)
    offset, out_offset = image * (N * STRIDE) + head % H * K, image * (N * H * K) + head % H * K
    k, v = qkv + offset + H * K, qkv + offset + 2 * H * K
    q = load_tile(qkv + offset, first, ROWS, N, STRIDE, K, REST)
    dout_tile = load_tile(dout + out_offset, first, ROWS, N, H * K, K, REST)
    row_lse, row_delta = _load_query_statistics(
        dout_tile, out + out_offset, lse + head * N, delta + head * N, first, N, H * K, K, REST
    )
    sums = make_sums(ROWS, REST)
    for start in tl.range(0, LAST, COLUMNS, num_stages=STAGES):
        sums = _add_query_gradient(
            sums, q, dout_tile, row_lse, row_delta, k, v, start, scale, COLUMNS, False, N, STRIDE, K, REST
        )
    if TAIL:
        sums = _add_query_gradient(
            sums, q, dout_tile, row_lse, row_delta, k, v, LAST, scale, TAIL, True, N, STRIDE, K, REST
        )
    store_tile(dqkv + offset, sums, scale * LN_2, first, ROWS, N, STRIDE, K, REST)


@triton.jit
def _add_key_value_gradients(
    dk, dv, k, v, q_head, dout_head, lse, delta, first, scale, SIZE: tl.constexpr, N: tl.constexpr, H: tl.constexpr,
    K: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Add what SIZE queries contribute to the gradients of keys, before the scale, and values.

    Queries after N add nothing: their logits, lse, delta and gradient are 0.
    """
    q = load_tile(q_head, first, SIZE, N, 3 * H * K, K, REST)
    dout = load_tile(dout_head, first, SIZE, N, H * K, K, REST)
    rows = first + tl.arange(0, SIZE)
    row_lse = tl.load(lse + rows, mask=rows < N, other=0.0) * LOG2_E
    row_delta = tl.load(delta + rows, mask=rows < N, other=0.0)
    weights = tl.exp2(multiply_transposed(k, q, REST) * scale - row_lse[None, :])  # (L, SIZE): transposed
    dlogits = weights * (multiply_transposed(v, dout, REST) - row_delta[None, :])
    dv = accumulate(dv, weights, dout, REST)
    dk = accumulate(dk, dlogits, q, REST)
    return dk, dv


@triton.jit
def _write_key_value_gradients(
    q, dout, dq, lse, delta, first, scale, SIZE: tl.constexpr, N: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    REST: tl.constexpr, COLUMNS: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of SIZE keys and values of a head, whose pointers these are."""
    STRIDE: tl.constexpr = 3 * H * K
    LAST: tl.constexpr = N // COLUMNS * COLUMNS
    k = load_tile(q + H * K, first, SIZE, N, STRIDE, K, REST)
    v = load_tile(q + 2 * H * K, first, SIZE, N, STRIDE, K, REST)
    dk, dv = make_sums(SIZE, REST), make_sums(SIZE, REST)
    for start in tl.range(0, LAST, COLUMNS, num_stages=STAGES):
        dk, dv = _add_key_value_gradients(dk, dv, k, v, q, dout, lse, delta, start, scale, COLUMNS, N, H, K, REST)
    if TAIL:
        dk, dv = _add_key_value_gradients(dk, dv, k, v, q, dout, lse, delta, LAST, scale, TAIL, N, H, K, REST)
    store_tile(dq + H * K, dk, scale * LN_2, first, SIZE, N, STRIDE, K, REST)
    store_tile(dq + 2 * H * K, dv, 1.0, first, SIZE, N, STRIDE, K, REST)


@triton.jit
def differentiate_keys_kernel(
    qkv, lse, dout, dqkv, delta, scale, N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, REST: tl.constexpr,
    COLUMNS: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr, LAST_ROWS: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values; the last tile may be of LAST_ROWS."""
    TILES: tl.constexpr = (N + ROWS - 1) // ROWS
    head, first = tl.program_id(0) // TILES, tl.program_id(0) % TILES * ROWS
    image = (head // H).to(tl.int64)
    offset = image * (3 * N * H * K) + head % H * K
    q, dq = qkv + offset, dqkv + offset
    dout += image * (N * H * K) + head % H * K
    lse += head * N
    delta += head * N
    if LAST_ROWS:
        if first + ROWS <= N:
            _write_key_value_gradients(
                q, dout, dq, lse, delta, first, scale, ROWS, N, H, K, REST, COLUMNS, TAIL, STAGES
            )
        else:
            _write_key_value_gradients(
                q, dout, dq, lse, delta, first, scale, LAST_ROWS, N, H, K, REST, COLUMNS, TAIL, STAGES
            )
    else:
        _write_key_value_gradients(q, dout, dq, lse, delta, first, scale, ROWS, N, H, K, REST, COLUMNS, TAIL, STAGES)


# --- launches --------------------------------------------------------------------------------------------------------


def launch_forward(qkv: Tensor, heads: int, config: ForwardConfig) -> tuple[Tensor, Tensor]:
    """(B, N, H K) and the logsumexp of the scaled logits, float32 (B, H, N)."""
    batch, tokens, size = qkv.shape[0], qkv.shape[1], qkv.shape[2] // (3 * heads)
    out = qkv.new_empty(batch, tokens, heads * size)
    lse = qkv.new_empty(batch, heads, tokens, dtype=torch.float32)
    arguments = list_forward_arguments(tokens, heads, size, config)
    attend_forward_kernel[(batch * heads,)](qkv, out, lse, compute_exponent_scale(size), **arguments)
    return out, lse


def launch_backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, queries: QueryConfig, keys: KeyConfig
) -> Tensor:
    """The gradient of the packed queries, keys and values, (B, N, 3 H K)."""
    dqkv, delta = torch.empty_like(qkv), torch.empty_like(lse)
    launch_queries(dout, qkv, out, lse, dqkv, delta, queries)
    launch_keys(dout, qkv, lse, dqkv, delta, keys)
    return dqkv


def launch_queries(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, dqkv: Tensor, delta: Tensor, config: QueryConfig
) -> None:
    """Write the gradient of queries into `dqkv`, and `delta`, (B, H, N)."""
    batch, heads, tokens = lse.shape
    size = qkv.shape[2] // (3 * heads)
    arguments = list_query_arguments(tokens, heads, size, config)
    grid = (batch * heads * triton.cdiv(tokens, TILE_ROWS),)
    differentiate_queries_kernel[grid](qkv, out, lse, dout, dqkv, delta, compute_exponent_scale(size), **arguments)


def launch_keys(dout: Tensor, qkv: Tensor, lse: Tensor, dqkv: Tensor, delta: Tensor, config: KeyConfig) -> None:
    """Write the gradients of keys and values into `dqkv`, from the `delta` of all queries."""
    batch, heads, tokens = lse.shape
    size = qkv.shape[2] // (3 * heads)
    arguments = list_key_arguments(tokens, heads, size, config)
    grid = (batch * heads * triton.cdiv(tokens, TILE_ROWS),)
    differentiate_keys_kernel[grid](qkv, lse, dout, dqkv, delta, compute_exponent_scale(size), **arguments)


@torch.library.custom_op("vitrail::attend", mutates_args=())
def attend(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """(B, N, 3 H K), as a linear layer makes queries, keys and values -> (B, N, H K) and the logsumexp."""
    return launch_forward(qkv.contiguous(), heads, choose_forward_config(qkv.shape[2] // (3 * heads)))


@attend.register_fake
def _(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    batch, tokens, width = qkv.shape
    return qkv.new_empty(batch, tokens, width // 3), qkv.new_empty(batch, heads, tokens, dtype=torch.float32)


@torch.library.custom_op("vitrail::attend_backward", mutates_args=())
def attend_backward(dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int) -> Tensor:
    """The gradient of `qkv`, packed as it is."""
    keys = choose_key_config(qkv.shape[2] // (3 * heads))
    return launch_backward(dout.contiguous(), qkv.contiguous(), out, lse, QueryConfig(), keys)


@attend_backward.register_fake
def _(dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int) -> Tensor:  # noqa: ARG001
    return qkv.new_empty(qkv.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], *output)
    ctx.heads = inputs[1]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, None]:  # noqa: ARG001
    return attend_backward(dout, *ctx.saved_tensors, ctx.heads), None


attend.register_autograd(_differentiate, setup_context=_save_for_backward)
