"""Random numbers and samples by position: uniform, independent, once an epoch, and the same in every version."""

import hashlib
import itertools
import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data import randomness
from vitrail.data.randomness import CounterRNG, SampleOrder, permute_indices
from vitrail.errors import DataError


def list_samples(order: SampleOrder, start: int, stop: int) -> list[int]:
    return order.get_sample_indices(np.arange(start, stop)).tolist()


@given(count=st.integers(1, 400), key=st.integers(0, 2**64 - 1))
@settings(max_examples=500, deadline=None)
def test_permutation_is_one(count: int, key: int) -> None:
    assert sorted(permute_indices(np.arange(count), count, key).tolist()) == list(range(count))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_every_sample_comes_once_an_epoch_with_shards_of_any_sizes_too(data: st.DataObject) -> None:
    shards = tuple(data.draw(st.lists(st.integers(0, 40), max_size=12)))
    count = sum(shards) or data.draw(st.integers(1, 300))
    window = data.draw(st.integers(1, 5))
    order = SampleOrder(
        seed=data.draw(st.integers(0, 5)),
        num_samples=count,
        shard_sizes=shards if sum(shards) else (),
        shard_window=window,
    )
    epoch = data.draw(st.integers(0, 10**6))
    assert sorted(list_samples(order, epoch * count, (epoch + 1) * count)) == list(range(count))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_cut_of_the_line_gives_the_same_samples(data: st.DataObject) -> None:
    """Asking for positions one at a time, in blocks or backwards changes nothing."""
    shards = data.draw(st.sampled_from([(), (7, 3, 11, 2)]))
    order = SampleOrder(seed=1, num_samples=23, shard_sizes=shards, shard_window=2)
    start, length = data.draw(st.integers(0, 200)), data.draw(st.integers(1, 80))
    whole = list_samples(order, start, start + length)
    cut = data.draw(st.integers(0, length))
    assert list_samples(order, start, start + cut) + list_samples(order, start + cut, start + length) == whole
    again = SampleOrder(seed=1, num_samples=23, shard_sizes=shards, shard_window=2).get_sample_indices(
        np.arange(start + length - 1, start - 1, -1)
    )
    assert again.tolist() == whole[::-1]


def test_epochs_and_seeds_differ() -> None:
    order = SampleOrder(seed=0, num_samples=1000)
    first, second = list_samples(order, 0, 1000), list_samples(order, 1000, 2000)
    other = list_samples(SampleOrder(seed=1, num_samples=1000), 0, 1000)
    for one, two in itertools.combinations([first, second, other, list(range(1000))], 2):
        assert sum(a == b for a, b in zip(one, two, strict=True)) < 12  # one is expected


def test_each_sample_is_equally_likely_at_each_place() -> None:
    """Chi-square over 10 places x 10 samples and 3,000 keys; 81 degrees of freedom, 5 sigma."""
    table = np.zeros((10, 10))
    for key in range(3000):
        table[np.arange(10), permute_indices(np.arange(10), 10, randomness.derive_key(key, "test"))] += 1
    assert ((table - 300) ** 2 / 300).sum() < 81 + 5 * np.sqrt(2 * 81)


def test_all_orders_of_four_occur_equally_often() -> None:
    counts = Counter(
        tuple(permute_indices(np.arange(4), 4, randomness.derive_key(key, "four")).tolist()) for key in range(4800)
    )
    assert len(counts) == 24
    assert sum((n - 200) ** 2 / 200 for n in counts.values()) < 23 + 5 * np.sqrt(2 * 23)


@pytest.mark.parametrize("count", [1000, 4096, 100_003])
def test_neighbours_land_independently(count: int) -> None:
    """No correlation between a number and its place, nor between the places of neighbours; 5 sigma each."""
    out = permute_indices(np.arange(count), count, 99).astype(float)
    limit = 5 / np.sqrt(count)
    assert abs(np.corrcoef(np.arange(count), out)[0, 1]) < limit
    assert abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < limit
    rises = (np.diff(out) > 0).mean()
    assert abs(rises - 0.5) < limit


def test_shards_are_read_in_windows_and_mixed_inside_them() -> None:
    order = SampleOrder(seed=3, num_samples=1000, shard_sizes=(100,) * 10, shard_window=2)
    shards = [sample // 100 for sample in list_samples(order, 0, 1000)]
    for start in range(0, 1000, 200):
        inside = shards[start : start + 200]
        assert sorted(Counter(inside).values()) == [100, 100]
        assert sum(a != b for a, b in itertools.pairwise(inside)) > 60  # 100 expected, 1 if unmixed
    assert shards[:200] != sorted(shards[:200])


def test_a_billion_samples_cost_neither_memory_nor_time() -> None:
    shards = (100_000,) * 10_000
    tracemalloc.start()
    start = time.perf_counter()
    for order in (SampleOrder(seed=0, num_samples=10**9), SampleOrder(seed=0, num_samples=10**9, shard_sizes=shards)):
        batch = order.get_sample_indices(np.arange(7 * 10**9 - 2048, 7 * 10**9 + 2048))
        assert len(np.unique(batch)) > 4000  # two epochs meet here
        assert batch.max() < 10**9
    assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    tracemalloc.stop()
    assert time.perf_counter() - start < 10


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(DataError, match="no image"):
        SampleOrder(seed=0, num_samples=0)


def test_numbers_are_uniform_and_independent() -> None:
    values = CounterRNG(5, np.arange(20_000)).uniform("crop", 4)
    assert values.min() >= 0
    assert values.max() < 1
    assert np.abs(values.mean(axis=0) - 0.5).max() < 5 / np.sqrt(12 * 20_000)
    correlations = np.corrcoef(np.concatenate([values[:-1], values[1:]], axis=1).T)
    assert np.abs(correlations - np.eye(8)).max() < 5 / np.sqrt(20_000)
    other = CounterRNG(5, np.arange(20_000)).uniform("flip", 1)[:, 0]
    assert abs(np.corrcoef(values[:, 0], other)[0, 1]) < 5 / np.sqrt(20_000)


def test_numbers_depend_on_seed_purpose_and_position_alone() -> None:
    """Fixed values: these numbers are part of a run's identity and must not change with a version."""
    several = CounterRNG(0, np.arange(9)).bits("crop", 5)
    assert CounterRNG(0, np.array([3])).bits("crop", 2).tolist() == [several[3, :2].tolist()]
    assert several.tolist() == [[hash_by_hand(0, "crop", position, slot) for slot in range(5)] for position in range(9)]
    assert CounterRNG(0, np.array([0])).bits("crop", 1).tolist() == [[2185967382836963344]]


def hash_by_hand(seed: int, purpose: str, position: int, slot: int) -> int:
    """Compute the same hash in Python's unbounded integers."""
    state = int.from_bytes(hashlib.sha256(f"{seed}:{purpose}".encode()).digest()[:8], "little")
    for part in (position, slot):
        state = (state + (part + 1) * 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state
