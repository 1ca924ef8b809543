"""Tiles of a head's rows, in Triton: how kernels load, multiply and store them.

    N tokens   K channels of a head   L, M rows of a tile

Triton's tiles have powers of two as sides. A head has 64 channels or some more, so a tile is a tuple of its first 64
channels and, if there are more, of the REST: 16 for K = 80, where one side of 128 would cost 1.6 times the arithmetic.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(
    pointer, first, ROWS: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr, REST: tl.constexpr
):
    """Rows of a head from `first`, (L, 64) and (L, REST); zeros after N and K."""
    rows = first + tl.arange(0, ROWS)
    inside = (rows < N)[:, None]
    main = tl.load(pointer + rows[:, None] * STRIDE + tl.arange(0, 64)[None, :], mask=inside, other=0.0)
    tile = (main,)
    if REST:
        channels = 64 + tl.arange(0, REST)
        mask = inside & (channels < K)[None, :]
        tile = tile + (tl.load(pointer + rows[:, None] * STRIDE + channels[None, :], mask=mask, other=0.0),)
    return tile


@triton.jit
def load_pieces(
    pointer, PIECES: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr, REST: tl.constexpr
):
    """All rows of a head, a tile for each of PIECES, (first row, rows)."""
    tiles = ()
    for i in tl.static_range(0, len(PIECES)):
        tiles = tiles + (load_tile(pointer, PIECES[i][0], PIECES[i][1], N, STRIDE, K, REST),)
    return tiles


@triton.jit
def store_tile(
    pointer, tile, factor, first, ROWS: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    rows = first + tl.arange(0, ROWS)
    inside = (rows < N)[:, None]
    kind = pointer.dtype.element_ty
    main = (tile[0] * factor).to(kind)
    tl.store(pointer + rows[:, None] * STRIDE + tl.arange(0, 64)[None, :], main, mask=inside)
    if REST:
        channels = 64 + tl.arange(0, REST)
        mask = inside & (channels < K)[None, :]
        rest = (tile[1] * factor).to(kind)
        tl.store(pointer + rows[:, None] * STRIDE + channels[None, :], rest, mask=mask)


@triton.jit
def multiply_transposed(tile, other, REST: tl.constexpr):
    """(L, K) times (M, K) transposed: (L, M)."""
    product = tl.dot(tile[0], tl.trans(other[0]))
    if REST:
        product = tl.dot(tile[1], tl.trans(other[1]), product)
    return product


@triton.jit
def accumulate(sums, weights, tile, REST: tl.constexpr):
    """Add (L, M) times (M, K) to (L, K)."""
    weights = weights.to(tile[0].dtype)
    new = (tl.dot(weights, tile[0], sums[0]),)
    if REST:
        new = new + (tl.dot(weights, tile[1], sums[1]),)
    return new


@triton.jit
def make_sums(ROWS: tl.constexpr, REST: tl.constexpr):
    sums = (tl.zeros((ROWS, 64), tl.float32),)
    if REST:
        sums = sums + (tl.zeros((ROWS, REST), tl.float32),)
    return sums
