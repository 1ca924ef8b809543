"""How `triton_attention` divides its work: what measured best on an H200 (docs/performance.md).

    N tokens   H heads   K channels of a head

Tiles have powers of two as sides, and the tensor cores take 64 rows at a time, so the last tiles decide much.
"""

import math
from typing import Any, NamedTuple

TILE_ROWS = 64


class ForwardConfig(NamedTuple):
    """How the forward pass is divided: a program for each head."""

    stages: int = 1
    """Tiles of queries in flight."""
    registers: int | None = None
    """The most of a thread."""


class QueryConfig(NamedTuple):
    """How the gradient of queries is divided: a program for each tile of them."""

    columns: int = 32
    """Keys of the tiles it meets one by one."""
    stages: int = 3
    """Of those, in flight."""


class KeyConfig(NamedTuple):
    """How the gradients of keys and values are divided: a program for each tile of them."""

    columns: int = 32
    """Queries of the tiles it meets one by one."""
    stages: int = 3
    """Of those, in flight."""
    small_last: bool = False
    """Whether the last keys are a tile of their own size; else it is filled up."""


def choose_forward_config(size: int) -> ForwardConfig:
    """The fastest for heads of these channels."""
    return ForwardConfig(registers=168) if size == 64 else ForwardConfig(stages=2)


def choose_key_config(size: int) -> KeyConfig:
    """The fastest for heads of these channels."""
    return KeyConfig(small_last=True) if size == 64 else KeyConfig(64, 1)


def divide_tokens(tokens: int) -> tuple[tuple[int, int], ...]:
    """(first row, rows) of pieces that cover the tokens: powers of two from 16 to 128, the last filled up."""
    pieces, first = [], 0
    while first < tokens:
        left = 16 * -(-(tokens - first) // 16)
        pieces.append((first, min(128, 1 << (left.bit_length() - 1))))
        first += pieces[-1][1]
    return tuple(pieces)


def list_forward_arguments(tokens: int, heads: int, size: int, config: ForwardConfig) -> dict[str, Any]:
    """The constants of the forward kernel and its launch options."""
    return _list_constants(tokens, heads, size) | {
        "PIECES": divide_tokens(tokens), "STAGES": config.stages, "maxnreg": config.registers,
    }  # fmt: skip


def list_query_arguments(tokens: int, heads: int, size: int, config: QueryConfig) -> dict[str, Any]:
    """The constants of the kernel for the gradient of queries."""
    return _list_constants(tokens, heads, size) | {
        "COLUMNS": config.columns, "TAIL": _compute_last_size(tokens, config.columns), "STAGES": config.stages,
    }  # fmt: skip


def list_key_arguments(tokens: int, heads: int, size: int, config: KeyConfig) -> dict[str, Any]:
    """The constants of the kernel for the gradients of keys and values."""
    last_rows = _compute_last_size(tokens, TILE_ROWS) if config.small_last else 0
    return list_query_arguments(tokens, heads, size, QueryConfig(*config[:2])) | {"LAST_ROWS": last_rows}


def compute_exponent_scale(size: int) -> float:
    """What turns a product of a query and a key into an exponent of 2."""
    return size**-0.5 * math.log2(math.e)


def _list_constants(tokens: int, heads: int, size: int) -> dict[str, Any]:
    rest = max(16, _round_up_to_power(size - 64)) if size > 64 else 0  # tensor cores sum over 16 channels at a time
    return {"N": tokens, "H": heads, "K": size, "REST": rest}


def _compute_last_size(tokens: int, size: int) -> int:
    """The size of the last tile: a power of two from 16 on, or 0 if the others cover the tokens."""
    left = tokens % size
    return max(16, _round_up_to_power(left)) if left else 0


def _round_up_to_power(number: int) -> int:
    return 1 << (number - 1).bit_length()
