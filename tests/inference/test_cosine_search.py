"""Exact search, against plain loops in float64 whose sums are rounded once."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vitrail.errors import UsageError
from vitrail.inference import cosine_search
from vitrail.inference.cosine_search import find_nearest, find_similar_pairs, normalize_rows


def search_by_loops(rows: NDArray[Any], queries: NDArray[np.float32], top: int) -> list[list[tuple[int, float]]]:
    """The oracle: every similarity by itself, then the greatest, the smaller row first where they are equal."""
    found = []
    for query in normalize_rows(queries).tolist():
        scores = [math.fsum(a * b for a, b in zip(row, query, strict=True)) for row in rows.astype(float).tolist()]
        found.append(sorted(enumerate(scores), key=lambda pair: (-pair[1], pair[0]))[:top])
    return found


def make_rows(seed: int, count: int, width: int, dtype: str) -> NDArray[Any]:
    return normalize_rows(np.random.default_rng(seed).normal(size=(count, width))).astype(dtype)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 60),
    top=st.integers(1, 70),
    chunk=st.integers(1, 70),
    dtype=st.sampled_from(["float16", "float32"]),
    repeats=st.integers(1, 3),
)
def test_neighbors_are_those_of_plain_loops_whatever_the_chunks(
    seed: int, count: int, top: int, chunk: int, dtype: str, repeats: int
) -> None:
    """Rows that occur several times are ties: they come in the order of the rows."""
    rows = np.concatenate([make_rows(seed, count, 24, dtype)] * repeats)
    queries = np.random.default_rng(seed + 1).normal(size=(3, 24)).astype(np.float32)
    queries[1] = rows[0]
    found = find_nearest(rows, queries, top, chunk_rows=chunk)
    for numbers, similarities, expected in zip(
        found.rows, found.similarities, search_by_loops(rows, queries, top), strict=True
    ):
        assert numbers.tolist() == [number for number, _ in expected]
        assert similarities == pytest.approx([score for _, score in expected], abs=1e-14)


def test_chunks_queries_and_repeats_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(0, 5000, 48, "float16")
    rows[100:400] = rows[7]  # more equal rows than are asked for
    queries = np.concatenate([rows[[7, 450]].astype(np.float32), make_rows(1, 9, 48, "float32")])
    whole = find_nearest(rows, queries, 20, chunk_rows=5000)
    assert whole.rows[0].tolist() == [7, *range(100, 119)]
    monkeypatch.setattr(cosine_search, "_QUERY_BLOCK", 4)
    monkeypatch.setattr(cosine_search, "_RESCORED_ROWS", 13)
    for chunk in (1, 77, 1024, None):
        found = find_nearest(rows, queries, 20, chunk_rows=chunk)
        assert np.array_equal(found.rows, whole.rows)
        assert np.array_equal(found.similarities, whole.similarities)


def test_near_ties_that_float32_cannot_tell_apart_are_ordered_by_float64() -> None:
    """Cosines that differ in the 9th digit: each product in float32 may give any order."""
    width, count = 64, 40
    base = normalize_rows(np.random.default_rng(3).normal(size=(1, width)))[0]
    rows = np.repeat(base[None], count, axis=0)
    rows[:, 5] = np.nextafter(rows[:, 5], np.float32(9)) + np.arange(count, dtype=np.float32) * np.spacing(base[5])
    rows = np.random.default_rng(4).permutation(rows)
    assert find_nearest(rows, base[None], 10).rows[0].tolist() == [
        n for n, _ in search_by_loops(rows, base[None], 10)[0]
    ]


def test_rows_of_any_length_are_scaled_and_those_without_direction_are_nan() -> None:
    values = np.array([[3.0, 4.0], [3e38, 4e38], [3e-30, 4e-30], [0, 0], [np.nan, 1], [np.inf, 1]], dtype=np.float64)
    normalized = normalize_rows(values)
    assert normalized[:3] == pytest.approx(np.array([[0.6, 0.8]] * 3), abs=1e-7)
    assert np.isnan(normalized[3:]).any(axis=1).all()


@pytest.mark.parametrize("block", [1, 7, 64, 2048])
def test_pairs_are_those_of_plain_loops(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cosine_search, "_PAIR_BLOCK", block)
    rows = np.concatenate([make_rows(5, 60, 6, "float32")] * 2)
    found = find_similar_pairs(rows, 0.8)
    scores = rows.astype(np.float64) @ rows.T.astype(np.float64)
    expected = {(i, j) for i in range(120) for j in range(i + 1, 120) if scores[i, j] >= 0.8}
    assert len(expected) > 70
    assert {tuple(pair) for pair in found.rows.tolist()} == expected
    assert (np.diff(found.similarities) <= 0).all()
    assert found.similarities == pytest.approx([scores[i, j] for i, j in found.rows], abs=1e-6)


def test_what_cannot_be_searched_is_refused() -> None:
    rows = make_rows(0, 300, 8, "float32")
    with pytest.raises(UsageError, match="top is 0; it must be at least 1"):
        find_nearest(rows, rows[:1], 0)
    with pytest.raises(UsageError, match=r"shape \(1, 7\); the index has rows of 8"):
        find_nearest(rows, rows[:1, :7], 1)
    with pytest.raises(UsageError, match="no direction"):
        find_nearest(rows, np.zeros((1, 8), dtype=np.float32), 1)
    with pytest.raises(UsageError, match="above 0 and at most 1"):
        find_similar_pairs(rows, 1.5)
    with pytest.raises(UsageError, match=r"more than 50 pairs for each row reach the threshold of 0\.9: raise it"):
        find_similar_pairs(np.repeat(rows[:1], 200, axis=0), 0.9)


def test_nothing_to_search_for_finds_nothing() -> None:
    rows = make_rows(0, 5, 8, "float16")
    assert find_nearest(rows, np.empty((0, 8), dtype=np.float32), 3).rows.shape == (0, 3)
    assert len(find_similar_pairs(rows[:1], 0.5).rows) == 0


def test_the_search_reports_its_progress() -> None:
    calls: list[tuple[int, int]] = []
    rows = make_rows(0, 10, 8, "float16")
    find_nearest(rows, np.ones((1, 8), np.float32), 3, chunk_rows=4, progress=lambda *done: calls.append(done))
    assert calls == [(4, 10), (8, 10), (10, 10)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU: make cuda")
def test_cuda_finds_the_bits_of_the_cpu() -> None:
    rows = make_rows(0, 50_000, 192, "float16")
    rows[30_000:30_050] = rows[11]
    queries = np.concatenate([rows[[11, 5]].astype(np.float32), make_rows(1, 30, 192, "float32")])
    expected = find_nearest(rows, queries, 20)
    for chunk in (None, 4096, 49_999):
        found = find_nearest(rows, queries, 20, device="cuda", chunk_rows=chunk)
        assert np.array_equal(found.rows, expected.rows)
        assert np.array_equal(found.similarities, expected.similarities)
