"""Exact nearest neighbors by cosine similarity, of rows that need not fit in memory.

The rows have length 1, so a similarity is a dot product. Rows pass in chunks through a product in float32, which is
within `D * 2**-23` of the exact similarity (a bound for sums in any order; Higham 2002, section 3.1). Whatever this
bound does not rule out is computed again in float64, row by row. So neither the size of the chunks nor the device
changes a neighbor, and equal similarities are in the order of their rows.

faiss and usearch, which users may prefer for hundreds of millions of rows, read the same Parquet (docs/search.md).

    n rows   Q queries   D features   R rows of a chunk   K neighbors
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.runtime.workers import ProgressCallback, ignore_progress

_CPU_CHUNK_BYTES, _GPU_CHUNK_BYTES = 2**22, 2**28  # of a chunk in float32: what a core's cache holds; a 500th of a GPU
_QUERY_BLOCK = 256  # queries compared at once, which bounds the similarities in memory
_RESCORED_ROWS = 4096  # rows computed again at once
_PAIR_BLOCK = 2048  # rows compared with as many others when all pairs are searched
_MAX_PAIRS_PER_ROW = 50

Rows = NDArray[Any]
"""(n, D) float16 or float32, perhaps mapped from a file; each row of length 1."""


class Neighbors(NamedTuple):
    """The nearest rows of each query, the most similar first; K is the number of rows where more are asked for."""

    rows: NDArray[np.int64]  # (Q, K)
    similarities: NDArray[np.float64]  # (Q, K)


class SimilarPairs(NamedTuple):
    """Pairs of rows, the more similar ones first."""

    rows: NDArray[np.int64]  # (p, 2), the smaller row first
    similarities: NDArray[np.float32]  # (p,)


def normalize_rows(features: NDArray[Any]) -> NDArray[np.float32]:
    """Scale each row to length 1; rows without a direction (zero, or not finite) become NaN."""
    values = features.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        largest = np.abs(values).max(axis=1, keepdims=True)
        scaled = values / largest  # squares of huge values would overflow
        return (scaled / np.sqrt((scaled**2).sum(axis=1, keepdims=True))).astype(np.float32)


def find_nearest(
    rows: Rows,
    queries: NDArray[np.float32],
    top: int,
    *,
    device: str | torch.device = "cpu",
    chunk_rows: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> Neighbors:
    """The `top` rows of greatest cosine similarity with each query (Q, D), of any length; ties in the rows' order."""
    if top < 1:
        raise UsageError(f"top is {top}; it must be at least 1")
    if queries.ndim != 2 or queries.shape[1] != rows.shape[1]:
        raise UsageError(f"queries have the shape {queries.shape}; the index has rows of {rows.shape[1]} features")
    device, normalized = torch.device(device), normalize_rows(queries)
    if not np.isfinite(normalized).all():
        raise UsageError("a query has no direction: its features are zero or not finite")
    starts = range(0, len(queries), _QUERY_BLOCK)
    found = [
        _search_block(rows, normalized[start : start + _QUERY_BLOCK], min(top, len(rows)), device, chunk_rows, progress)
        for start in starts
    ]
    if not found:
        return Neighbors(np.empty((0, top), dtype=np.int64), np.empty((0, top)))
    return Neighbors(np.concatenate([each.rows for each in found]), np.concatenate([e.similarities for e in found]))


def _search_block(
    rows: Rows,
    queries: NDArray[np.float32],
    top: int,
    device: torch.device,
    chunk_rows: int | None,
    progress: ProgressCallback,
) -> Neighbors:
    best_rows = np.full((len(queries), top), len(rows), dtype=np.int64)
    best = np.full((len(queries), top), -np.inf)
    tolerance = rows.shape[1] * 2.0**-23
    on_device = torch.from_numpy(queries).to(device)
    for start, chunk in _iterate_chunks(rows, device, chunk_rows):
        scores = on_device @ chunk.T  # (Q, R)
        highest = scores.amax(dim=1).cpu().numpy()
        for query in np.flatnonzero(highest >= best[:, -1] - tolerance):
            within = scores[query]
            least = best[query, -1] - tolerance
            if len(within) > top:  # whatever is further below than twice the error cannot be among the chunk's first
                least = max(least, float(within.topk(top).values[-1]) - 2 * tolerance)
            candidates = start + (within >= least).nonzero().flatten().cpu().numpy()  # in the order of the rows
            _merge_candidates(rows, queries[query], candidates, best_rows[query], best[query])
        progress(start + len(chunk), len(rows))
    return Neighbors(best_rows, best)


def _merge_candidates(
    rows: Rows,
    query: NDArray[np.float32],
    candidates: NDArray[np.int64],
    best_rows: NDArray[np.int64],
    best: NDArray[np.float64],
) -> None:
    """Compute the candidates' similarities in float64, and put the greatest into `best` and `best_rows`."""
    for first in range(0, len(candidates), _RESCORED_ROWS):
        block = candidates[first : first + _RESCORED_ROWS]
        exact = (rows[block].astype(np.float64) * query.astype(np.float64)).sum(axis=1)  # each row by itself
        similarities, numbers = np.concatenate([best, exact]), np.concatenate([best_rows, block])
        order = np.lexsort((numbers, -similarities))[: len(best)]
        best[:], best_rows[:] = similarities[order], numbers[order]


def _iterate_chunks(rows: Rows, device: torch.device, chunk_rows: int | None) -> Iterator[tuple[int, Tensor]]:
    """Chunks of the rows in float32 on the device, each with the number of its first row."""
    chunk_bytes = _CPU_CHUNK_BYTES if device.type == "cpu" else _GPU_CHUNK_BYTES
    size = chunk_rows or max(1, chunk_bytes // (4 * rows.shape[1]))
    load = _make_pinned_loader(rows, device, size) if device.type == "cuda" else _make_loader(rows, device)
    for start in range(0, len(rows), size):
        yield start, load(start, min(start + size, len(rows)))


def _make_loader(rows: Rows, device: torch.device) -> Callable[[int, int], Tensor]:
    def load(start: int, end: int) -> Tensor:
        return torch.from_numpy(np.array(rows[start:end])).to(device).float()  # a copy: torch takes no read-only array

    return load


def _make_pinned_loader(rows: Rows, device: torch.device, size: int) -> Callable[[int, int], Tensor]:
    """Copy chunks through two pinned buffers: the GPU computes one chunk while the next is read and copied."""
    dtype = torch.float16 if rows.dtype == np.float16 else torch.float32
    shape = (min(size, len(rows)), rows.shape[1])
    buffers = [torch.empty(shape, dtype=dtype, pin_memory=True) for _ in range(2)]
    copied: list[torch.cuda.Event | None] = [None, None]
    count = 0

    def load(start: int, end: int) -> Tensor:
        nonlocal count
        turn, count = count % 2, count + 1
        event = copied[turn]
        if event is not None:
            event.synchronize()
        buffer = buffers[turn][: end - start]
        buffer.numpy()[:] = rows[start:end]
        chunk = buffer.to(device, non_blocking=True)
        copied[turn] = event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return chunk.float()

    return load


# --- all pairs -------------------------------------------------------------------------------------------------------


def check_threshold(threshold: float) -> None:
    """Refuse a threshold that no similarity has, or that all may have."""
    if not 0 < threshold <= 1:
        raise UsageError(f"the threshold is {threshold}; it must be above 0 and at most 1")


def find_similar_pairs(
    rows: Rows,
    threshold: float,
    *,
    offsets: NDArray[np.float32] | None = None,
    device: str | torch.device = "cpu",
    progress: ProgressCallback = ignore_progress,
) -> SimilarPairs:
    """All pairs of rows whose cosine similarity is at least `threshold`, compared block by block.

    `offsets` (n,) of both rows are subtracted from a similarity before it is compared and returned.
    """
    check_threshold(threshold)
    pairs, similarities, count = list[NDArray[np.int64]](), list[NDArray[np.float32]](), 0
    blocks = range(0, len(rows), _PAIR_BLOCK)
    load = _make_loader(rows, torch.device(device))
    offset = torch.from_numpy(np.zeros(len(rows), np.float32) if offsets is None else offsets).to(device)
    for first in blocks:
        block = load(first, first + _PAIR_BLOCK)
        for second in range(first, len(rows), _PAIR_BLOCK):
            scores = block @ (block if second == first else load(second, second + _PAIR_BLOCK)).T
            scores -= offset[first : first + _PAIR_BLOCK, None] + offset[None, second : second + _PAIR_BLOCK]
            is_pair = scores >= threshold
            found = (is_pair.triu(diagonal=1) if second == first else is_pair).nonzero()
            count += len(found)
            if count > _MAX_PAIRS_PER_ROW * len(rows):
                most = _MAX_PAIRS_PER_ROW
                raise UsageError(f"more than {most} pairs for each row reach the threshold of {threshold}: raise it")
            similarities.append(scores[found[:, 0], found[:, 1]].cpu().numpy())
            pairs.append(found.cpu().numpy() + np.array((first, second)))
        progress(min(first + _PAIR_BLOCK, len(rows)), len(rows))
    if not pairs:
        return SimilarPairs(np.empty((0, 2), dtype=np.int64), np.empty(0, dtype=np.float32))
    all_pairs, all_similarities = np.concatenate(pairs), np.concatenate(similarities)
    order = np.lexsort((all_pairs[:, 1], all_pairs[:, 0], -all_similarities))
    return SimilarPairs(all_pairs[order], all_similarities[order])
