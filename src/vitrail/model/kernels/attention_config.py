"""How `triton_attention` divides its work, and which of the ways measured is used.

    N tokens   H heads   K channels of a head

Tiles have powers of two as sides, and the tensor cores take 64 rows at a time, so the last tiles decide much.
"""

import math
from typing import Any, Literal, NamedTuple


class ForwardConfig(NamedTuple):
    """How the forward pass is divided."""

    rows: int = 64
    """Queries of a tile."""
    parts: int = 1
    """Programs of a head."""
    small_last: bool = False
    """Whether the last queries are a tile of their own size; else it is filled up."""
    warps: int = 4
    stages: int = 1
    registers: int | None = None
    """The most of a thread."""


class BackwardConfig(NamedTuple):
    """How a launch of the backward pass is divided; the pass is one launch or two, of queries and then of keys."""

    kind: Literal["queries", "keys", "both", "fused"] = "both"
    """What gets its gradient: queries, keys and values, or all, with the logits computed twice or, fused, once."""
    parts: int = 1
    """Programs of a head; 1 if all get their gradient."""
    rows: int = 64
    """Of the tile whose gradient is computed: queries, then keys."""
    columns: int = 64
    """Of the tiles it meets one by one: keys, then queries."""
    on_chip: bool = False
    """Whether all of those are held in shared memory, or streamed."""
    small_last: bool = False
    """Whether the last rows are a tile of their own size; else it is filled up."""
    warps: int = 4
    stages: int = 2
    registers: int | None = None
    """The most of a thread."""


EACH_TILE = 20  # as `parts`: more than any head has tiles
FORWARD_CONFIGS: dict[int, ForwardConfig] = {}  # by channels of a head
DEFAULT_FORWARD = ForwardConfig(parts=EACH_TILE)
DEFAULT_BACKWARD = (
    BackwardConfig("queries", EACH_TILE, 64, 32, stages=3),
    BackwardConfig("keys", EACH_TILE, 64, 32, stages=3),
)
BACKWARD_CONFIGS = {64: tuple(config._replace(small_last=True) for config in DEFAULT_BACKWARD)}


def divide_tokens(tokens: int, largest: int, smallest: int = 16) -> tuple[tuple[int, int], ...]:
    """(first row, rows) of pieces that cover the tokens: powers of two, the last filled up."""
    pieces, first = [], 0
    while first < tokens:
        left = smallest * -(-(tokens - first) // smallest)
        pieces.append((first, min(largest, 1 << (left.bit_length() - 1))))
        first += pieces[-1][1]
    return tuple(pieces)


def _compute_last_size(tokens: int, size: int) -> int:
    """The size of the last tile: a power of two from 16 on, or 0 if the others cover the tokens."""
    left = tokens % size
    return max(16, _round_up_to_power(left)) if left else 0


def _round_up_to_power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _list_constants(tokens: int, heads: int, size: int) -> dict[str, int]:
    rest = max(16, _round_up_to_power(size - 64)) if size > 64 else 0  # tensor cores sum over 16 channels at a time
    return {"N": tokens, "H": heads, "K": size, "REST": rest}


def list_forward_arguments(tokens: int, heads: int, size: int, config: ForwardConfig) -> dict[str, Any]:
    """The constants of the forward kernel and its launch options."""
    parts = min(config.parts, -(-tokens // config.rows))
    return _list_constants(tokens, heads, size) | {
        "PIECES": divide_tokens(tokens, 128), "ROWS": config.rows, "PARTS": parts, "STAGES": config.stages,
        "LAST_ROWS": _compute_last_size(tokens, config.rows) if config.small_last else 0,
        "num_warps": config.warps, "maxnreg": config.registers,
    }  # fmt: skip


def list_backward_arguments(tokens: int, heads: int, size: int, config: BackwardConfig) -> dict[str, Any]:
    """The constants of the backward kernel and its launch options."""
    pieces = divide_tokens(tokens, config.columns) if config.on_chip else ()
    if config.kind == "fused":
        pieces = divide_tokens(tokens, config.columns, 64)  # rows of a product, of which the tensor cores take 64
    return _list_constants(tokens, heads, size) | {
        "KIND": config.kind, "ROWS": config.rows, "COLUMNS": config.columns, "STAGES": config.stages, "PIECES": pieces,
        "LAST_ROWS": _compute_last_size(tokens, config.rows) if config.small_last else 0,
        "TAIL": _compute_last_size(tokens, config.columns),
        "PARTS": min(config.parts, -(-tokens // config.rows)),
        "num_warps": config.warps, "maxnreg": config.registers,
    }  # fmt: skip


def compute_exponent_scale(size: int) -> float:
    """What turns a product of a query and a key into an exponent of 2."""
    return size**-0.5 * math.log2(math.e)
