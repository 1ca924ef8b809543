"""Attention over at most 320 tokens from packed queries, keys and values, in Triton.

    B images   H heads   N tokens   K channels of a head   L rows of a tile

Import this only where triton is installed; `attention` decides whether to use it.

A long-sequence kernel streams keys past running softmax statistics. Here a tile of queries meets all N keys at once, so
the softmax needs one maximum. N is no power of two, as Triton's tiles are, so keys come in pieces: 197 is 128 + 64 + 16
and not 256. For the same reason K = 80 is 64 + 16 and not 128
(`triton_tiles`). Softmax runs in base 2, its scale folded into the exponent.

The backward pass computes the logits twice, once for the gradient of queries and once for that of keys and values, so
that each program writes what no other one does: two runs give the same bits. It writes into one packed tensor.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.model.kernels.attention_config import (
    BACKWARD_CONFIGS,
    DEFAULT_BACKWARD,
    DEFAULT_FORWARD,
    FORWARD_CONFIGS,
    BackwardConfig,
    ForwardConfig,
    compute_exponent_scale,
    list_backward_arguments,
    list_forward_arguments,
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


# --- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def _write_outputs(
    q, keys, values, out, lse, first, scale, ROWS: tl.constexpr, PIECES: tl.constexpr, N: tl.constexpr,
    STRIDE: tl.constexpr, K: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Write the outputs of ROWS queries and their logsumexp."""
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
    PIECES: tl.constexpr, ROWS: tl.constexpr, LAST_ROWS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One head, or every PARTS-th tile of its queries."""
    STRIDE: tl.constexpr = 3 * H * K
    head = tl.program_id(0) // PARTS
    image = (head // H).to(tl.int64)
    q_head = qkv + image * (N * STRIDE) + head % H * K
    out_head = out + image * (N * H * K) + head % H * K
    keys = load_pieces(q_head + H * K, PIECES, N, STRIDE, K, REST)
    values = load_pieces(q_head + 2 * H * K, PIECES, N, STRIDE, K, REST)
    part = tl.program_id(0) % PARTS
    END: tl.constexpr = N // ROWS * ROWS if LAST_ROWS else N
    for first in tl.range(part * ROWS, END, PARTS * ROWS, num_stages=STAGES):
        q = load_tile(q_head, first, ROWS, N, STRIDE, K, REST)
        _write_outputs(q, keys, values, out_head, lse + head * N, first, scale, ROWS, PIECES, N, H * K, K, REST)
    if LAST_ROWS:
        if part == PARTS - 1:
            # Other instructions multiply few rows, and want keys elsewhere: load them again, from the cache.
            keys = load_pieces(q_head + H * K, PIECES, N, STRIDE, K, REST)
            values = load_pieces(q_head + 2 * H * K, PIECES, N, STRIDE, K, REST)
            q = load_tile(q_head, END, LAST_ROWS, N, STRIDE, K, REST)
            _write_outputs(q, keys, values, out_head, lse + head * N, END, scale, LAST_ROWS, PIECES, N, H * K, K, REST)


# --- backward --------------------------------------------------------------------------------------------------------


@triton.jit
def _add_query_gradient(
    sums, q, dout, lse, delta, k, v, first, scale, SIZE: tl.constexpr, LAST: tl.constexpr, N: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Add what SIZE keys contribute to the gradient of queries, (L, K) before the scale."""
    weights = tl.exp2(multiply_transposed(q, k, REST) * scale - lse[:, None])
    if LAST:  # keys after N have logits of 0, whose exponential may be infinite
        weights = tl.where((first + tl.arange(0, SIZE) < N)[None, :], weights, 0.0)
    dlogits = weights * (multiply_transposed(dout, v, REST) - delta[:, None])
    return accumulate(sums, dlogits, k, REST)


@triton.jit
def _load_query_statistics(dout, out_head, lse, delta, first, ROWS: tl.constexpr, N: tl.constexpr,
    STRIDE: tl.constexpr, K: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """The logsumexp, in base 2, and rowsum(dout * out), (L,) each; the latter is stored for the other pass."""
    rows = first + tl.arange(0, ROWS)
    out = load_tile(out_head, first, ROWS, N, STRIDE, K, REST)
    row_delta = tl.sum(dout[0].to(tl.float32) * out[0].to(tl.float32), 1)
    if REST:
        row_delta += tl.sum(dout[1].to(tl.float32) * out[1].to(tl.float32), 1)
    tl.store(delta + rows, row_delta, mask=rows < N)
    return tl.load(lse + rows, mask=rows < N, other=0.0) * LOG2_E, row_delta


@triton.jit
def _write_query_gradient(
    q_head, k_head, v_head, out_head, dout_head, dq_head, lse, delta, keys, values, first, scale, ROWS: tl.constexpr,
    N: tl.constexpr, STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, K: tl.constexpr, REST: tl.constexpr,
    COLUMNS: tl.constexpr, TAIL: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of ROWS queries, and delta. Keys and values are PIECES on chip, or streamed."""
    q = load_tile(q_head, first, ROWS, N, STRIDE, K, REST)
    dout = load_tile(dout_head, first, ROWS, N, OUT_STRIDE, K, REST)
    row_lse, row_delta = _load_query_statistics(dout, out_head, lse, delta, first, ROWS, N, OUT_STRIDE, K, REST)
    sums = make_sums(ROWS, REST)
    for i in tl.static_range(0, len(PIECES)):
        sums = _add_query_gradient(
            sums, q, dout, row_lse, row_delta, keys[i], values[i], PIECES[i][0], scale, PIECES[i][1],
            PIECES[i][0] + PIECES[i][1] > N, N, REST,
        )  # fmt: skip
    if len(PIECES) == 0:
        for start in tl.range(0, N // COLUMNS * COLUMNS, COLUMNS, num_stages=STAGES):
            k = load_tile(k_head, start, COLUMNS, N, STRIDE, K, REST)
            v = load_tile(v_head, start, COLUMNS, N, STRIDE, K, REST)
            sums = _add_query_gradient(sums, q, dout, row_lse, row_delta, k, v, start, scale, COLUMNS, False, N, REST)
        if TAIL:
            LAST: tl.constexpr = N // COLUMNS * COLUMNS
            k = load_tile(k_head, LAST, TAIL, N, STRIDE, K, REST)
            v = load_tile(v_head, LAST, TAIL, N, STRIDE, K, REST)
            sums = _add_query_gradient(sums, q, dout, row_lse, row_delta, k, v, LAST, scale, TAIL, True, N, REST)
    store_tile(dq_head, sums, scale * LN_2, first, ROWS, N, STRIDE, K, REST)


@triton.jit
def _write_query_gradients(
    q, k, v, out, dout, dq, lse, delta, part, scale, N: tl.constexpr, STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,
    K: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, LAST_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TAIL: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of every PARTS-th tile of queries."""
    keys = load_pieces(k, PIECES, N, STRIDE, K, REST)
    values = load_pieces(v, PIECES, N, STRIDE, K, REST)
    END: tl.constexpr = N // ROWS * ROWS if LAST_ROWS else N
    for first in tl.range(part * ROWS, END, PARTS * ROWS, num_stages=1):
        _write_query_gradient(
            q, k, v, out, dout, dq, lse, delta, keys, values, first, scale, ROWS,
            N, STRIDE, OUT_STRIDE, K, REST, COLUMNS, TAIL, PIECES, STAGES,
        )  # fmt: skip
    if LAST_ROWS:
        if part == PARTS - 1:
            _write_query_gradient(
                q, k, v, out, dout, dq, lse, delta, (), (), END, scale, LAST_ROWS,
                N, STRIDE, OUT_STRIDE, K, REST, COLUMNS, TAIL, (), STAGES,
            )  # fmt: skip


@triton.jit
def _add_key_value_gradients(
    dk, dv, k, v, q, dout, lse, delta, first, scale, SIZE: tl.constexpr, N: tl.constexpr, REST: tl.constexpr
):
    """Add what SIZE queries contribute to the gradients of keys, before the scale, and values; and their own.

    Queries after N add nothing: their logits, lse, delta and gradient are 0.
    """
    rows = first + tl.arange(0, SIZE)
    row_lse = tl.load(lse + rows, mask=rows < N, other=0.0) * LOG2_E
    row_delta = tl.load(delta + rows, mask=rows < N, other=0.0)
    weights = tl.exp2(multiply_transposed(k, q, REST) * scale - row_lse[None, :])  # (L, SIZE): transposed
    dlogits = weights * (multiply_transposed(v, dout, REST) - row_delta[None, :])
    dv = accumulate(dv, weights, dout, REST)
    dk = accumulate(dk, dlogits, q, REST)
    return dk, dv, dlogits


@triton.jit
def _write_key_value_gradient(
    q_head, k_head, v_head, dout_head, dk_head, dv_head, lse, delta, queries, douts, first, scale, ROWS: tl.constexpr,
    N: tl.constexpr, STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, K: tl.constexpr, REST: tl.constexpr,
    COLUMNS: tl.constexpr, TAIL: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of ROWS keys and values. Queries are PIECES on chip, or streamed."""
    k = load_tile(k_head, first, ROWS, N, STRIDE, K, REST)
    v = load_tile(v_head, first, ROWS, N, STRIDE, K, REST)
    dk, dv = make_sums(ROWS, REST), make_sums(ROWS, REST)
    for i in tl.static_range(0, len(PIECES)):
        dk, dv, _ = _add_key_value_gradients(
            dk, dv, k, v, queries[i], douts[i], lse, delta, PIECES[i][0], scale, PIECES[i][1], N, REST
        )
    if len(PIECES) == 0:
        for start in tl.range(0, N // COLUMNS * COLUMNS, COLUMNS, num_stages=STAGES):
            q = load_tile(q_head, start, COLUMNS, N, STRIDE, K, REST)
            dout = load_tile(dout_head, start, COLUMNS, N, OUT_STRIDE, K, REST)
            dk, dv, _ = _add_key_value_gradients(dk, dv, k, v, q, dout, lse, delta, start, scale, COLUMNS, N, REST)
        if TAIL:
            LAST: tl.constexpr = N // COLUMNS * COLUMNS
            q = load_tile(q_head, LAST, TAIL, N, STRIDE, K, REST)
            dout = load_tile(dout_head, LAST, TAIL, N, OUT_STRIDE, K, REST)
            dk, dv, _ = _add_key_value_gradients(dk, dv, k, v, q, dout, lse, delta, LAST, scale, TAIL, N, REST)
    store_tile(dk_head, dk, scale * LN_2, first, ROWS, N, STRIDE, K, REST)
    store_tile(dv_head, dv, 1.0, first, ROWS, N, STRIDE, K, REST)


@triton.jit
def _write_key_value_gradients(
    q, k, v, dout, dk, dv, lse, delta, part, scale, N: tl.constexpr, STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,
    K: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, LAST_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TAIL: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of every PARTS-th tile of keys and values."""
    queries = load_pieces(q, PIECES, N, STRIDE, K, REST)
    douts = load_pieces(dout, PIECES, N, OUT_STRIDE, K, REST)
    END: tl.constexpr = N // ROWS * ROWS if LAST_ROWS else N
    for first in tl.range(part * ROWS, END, PARTS * ROWS, num_stages=1):
        _write_key_value_gradient(
            q, k, v, dout, dk, dv, lse, delta, queries, douts, first, scale, ROWS,
            N, STRIDE, OUT_STRIDE, K, REST, COLUMNS, TAIL, PIECES, STAGES,
        )  # fmt: skip
    if LAST_ROWS:
        if part == PARTS - 1:
            _write_key_value_gradient(
                q, k, v, dout, dk, dv, lse, delta, (), (), END, scale, LAST_ROWS,
                N, STRIDE, OUT_STRIDE, K, REST, COLUMNS, TAIL, (), STAGES,
            )  # fmt: skip


@triton.jit
def _write_all_gradients(
    q_head, k_head, v_head, out_head, dout_head, dq_head, dk_head, dv_head, lse, delta, scale, N: tl.constexpr,
    STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, K: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Write all gradients of a head, computing its logits once: those of all queries are summed in registers."""
    queries = load_pieces(q_head, PIECES, N, STRIDE, K, REST)
    douts = load_pieces(dout_head, PIECES, N, OUT_STRIDE, K, REST)
    sums = ()
    for i in tl.static_range(0, len(PIECES)):
        _load_query_statistics(douts[i], out_head, lse, delta, PIECES[i][0], PIECES[i][1], N, OUT_STRIDE, K, REST)
        sums = sums + (make_sums(PIECES[i][1], REST),)
    tl.debug_barrier()  # all of delta is written
    for first in tl.range(0, N, ROWS, num_stages=1):
        k = load_tile(k_head, first, ROWS, N, STRIDE, K, REST)
        v = load_tile(v_head, first, ROWS, N, STRIDE, K, REST)
        dk, dv = make_sums(ROWS, REST), make_sums(ROWS, REST)
        new = ()
        for j in tl.static_range(0, len(PIECES)):
            dk, dv, dlogits = _add_key_value_gradients(
                dk, dv, k, v, queries[j], douts[j], lse, delta, PIECES[j][0], scale, PIECES[j][1], N, REST
            )
            inside = (first + tl.arange(0, ROWS) < N)[:, None]
            new = new + (accumulate(sums[j], tl.trans(tl.where(inside, dlogits, 0.0)), k, REST),)
        sums = new
        store_tile(dk_head, dk, scale * LN_2, first, ROWS, N, STRIDE, K, REST)
        store_tile(dv_head, dv, 1.0, first, ROWS, N, STRIDE, K, REST)
    for m in tl.static_range(0, len(PIECES)):
        store_tile(dq_head, sums[m], scale * LN_2, PIECES[m][0], PIECES[m][1], N, STRIDE, K, REST)


@triton.jit
def attend_backward_kernel(
    qkv, out, lse, dout, dqkv, delta, scale, N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr, LAST_ROWS: tl.constexpr, COLUMNS: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr, PIECES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One head, or every PARTS-th tile of it: "queries", "keys" and values, "both" in turn, or both "fused"."""
    STRIDE: tl.constexpr = 3 * H * K
    V: tl.constexpr = 2 * H * K
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    image = (head // H).to(tl.int64)
    offset, out_offset = image * (N * STRIDE) + head % H * K, image * (N * H * K) + head % H * K
    q, dq, out_head, dout_head = qkv + offset, dqkv + offset, out + out_offset, dout + out_offset
    lse_head, delta_head = lse + head * N, delta + head * N
    if KIND == "fused":
        _write_all_gradients(
            q, q + H * K, q + V, out_head, dout_head, dq, dq + H * K, dq + V, lse_head, delta_head, scale,
            N, STRIDE, H * K, K, REST, ROWS, PIECES,
        )  # fmt: skip
    if KIND == "queries" or KIND == "both":
        _write_query_gradients(
            q, q + H * K, q + V, out_head, dout_head, dq, lse_head, delta_head, part, scale,
            N, STRIDE, H * K, K, REST, ROWS, LAST_ROWS, COLUMNS, TAIL, PARTS, PIECES, STAGES,
        )  # fmt: skip
    if KIND == "both":
        tl.debug_barrier()  # all of delta is written
    if KIND == "keys" or KIND == "both":
        _write_key_value_gradients(
            q, q + H * K, q + V, dout_head, dq + H * K, dq + V, lse_head, delta_head, part, scale,
            N, STRIDE, H * K, K, REST, ROWS, LAST_ROWS, COLUMNS, TAIL, PARTS, PIECES, STAGES,
        )  # fmt: skip


# --- launches --------------------------------------------------------------------------------------------------------


def launch_forward(qkv: Tensor, heads: int, config: ForwardConfig) -> tuple[Tensor, Tensor]:
    """(B, N, H K) and the logsumexp of the scaled logits, float32 (B, H, N)."""
    batch, tokens, size = qkv.shape[0], qkv.shape[1], qkv.shape[2] // (3 * heads)
    out = qkv.new_empty(batch, tokens, heads * size)
    lse = qkv.new_empty(batch, heads, tokens, dtype=torch.float32)
    arguments = list_forward_arguments(tokens, heads, size, config)
    attend_forward_kernel[(batch * heads * arguments["PARTS"],)](
        qkv, out, lse, compute_exponent_scale(size), **arguments
    )
    return out, lse


def launch_backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, configs: Sequence[BackwardConfig]
) -> Tensor:
    """The gradient of the packed queries, keys and values, (B, N, 3 H K), in a launch for each config."""
    dqkv, delta = torch.empty_like(qkv), torch.empty_like(lse)
    for config in configs:
        launch_backward_part(dout, qkv, out, lse, dqkv, delta, heads, config)
    return dqkv


def launch_backward_part(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, dqkv: Tensor, delta: Tensor, heads: int, config: BackwardConfig
) -> None:
    """Write a part of the gradient. That of keys reads `delta`, (B, H, N), which that of queries writes."""
    batch, tokens, size = qkv.shape[0], qkv.shape[1], qkv.shape[2] // (3 * heads)
    arguments = list_backward_arguments(tokens, heads, size, config)
    grid = (batch * heads * arguments["PARTS"],)
    attend_backward_kernel[grid](qkv, out, lse, dout, dqkv, delta, compute_exponent_scale(size), **arguments)


@torch.library.custom_op("vitrail::attend", mutates_args=())
def attend(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """(B, N, 3 H K), as a linear layer makes queries, keys and values -> (B, N, H K) and the logsumexp."""
    return launch_forward(qkv.contiguous(), heads, FORWARD_CONFIGS.get(qkv.shape[2] // (3 * heads), DEFAULT_FORWARD))


@attend.register_fake
def _(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    batch, tokens, width = qkv.shape
    return qkv.new_empty(batch, tokens, width // 3), qkv.new_empty(batch, heads, tokens, dtype=torch.float32)


@torch.library.custom_op("vitrail::attend_backward", mutates_args=())
def attend_backward(dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int) -> Tensor:
    """The gradient of `qkv`, packed as it is."""
    configs = BACKWARD_CONFIGS.get(qkv.shape[2] // (3 * heads), DEFAULT_BACKWARD)
    return launch_backward(dout.contiguous(), qkv.contiguous(), out, lse, heads, configs)


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
