"""Randomness as a function of (seed, purpose, position): there is no state to save, and none to leak.

The position in training alone decides a sample's augmentation, so workers, ranks and a resume do not change it. NumPy's
and torch's generators are streams: slow to seed for each sample, and free to change between versions. These numbers are
a hash (the finalizer of splitmix64, Steele et al. 2014, in Stafford's 13th variant) and stay what they are.

Which sample stands at a position is a function too. Training is a line of positions 0, 1, 2, ... Position p belongs to
epoch p // n, and a keyed permutation of that epoch maps p % n to its sample. So every sample comes once an epoch, a
resume is an integer, and a billion samples cost no memory. The permutation is a Feistel network over a rectangle that
just holds n, repeated until the result is below n (Black and Rogaway 2002); libraries shuffle a list of n numbers.
"""

import dataclasses
import hashlib
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrail.errors import DataError

__all__ = ["SampleOrder"]

SPLITMIX_CONSTANTS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)
"""The increment (gamma) and the two multipliers of the hash."""
_GAMMA, _MULTIPLIER_1, _MULTIPLIER_2 = SPLITMIX_CONSTANTS
_FEISTEL_ROUNDS = 8
SHARD_WINDOW = 16
"""Tar shards that are shuffled together."""

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class CounterRNG:
    """The random numbers of B positions: `uniform("crop", 3)` is the same whenever and wherever it is called."""

    seed: int
    positions: IntArray  # (B,)

    def uniform(self, purpose: str, count: int) -> FloatArray:
        """Draw (B, count) numbers of [0, 1), independent between purposes, positions and columns."""
        return (self.bits(purpose, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, purpose: str, count: int, high: int) -> IntArray:
        """Draw (B, count) integers from 0 to `high` - 1."""
        return (self.uniform(purpose, count) * high).astype(np.int64)

    def bits(self, purpose: str, count: int) -> NDArray[np.uint64]:
        """Draw (B, count) numbers of 64 random bits."""
        return hash_counters(derive_key(self.seed, purpose), self.positions[:, None], np.arange(count))


@lru_cache(maxsize=4096)
def derive_key(seed: int, purpose: str) -> int:
    """Derive a key of 64 bits from a seed and a purpose."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{purpose}".encode()).digest()[:8], "little")


def hash_counters(seed_key: int, *parts: ArrayLike) -> NDArray[np.uint64]:
    """Hash a key and the parts, which broadcast, to 64 bits that depend on every bit of each of them."""
    state = np.full(1, seed_key, dtype=np.uint64)
    for part in parts:
        state = state + (np.atleast_1d(np.asarray(part)).astype(np.uint64) + np.uint64(1)) * _GAMMA
        state = (state ^ (state >> np.uint64(30))) * _MULTIPLIER_1
        state = (state ^ (state >> np.uint64(27))) * _MULTIPLIER_2
        state = state ^ (state >> np.uint64(31))
    return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The order in which training sees the samples of a dataset."""

    seed: int
    num_samples: int
    shard_sizes: tuple[int, ...] = ()
    """Samples in each tar shard or row group. `shard_window` of them are shuffled together, so that reads are long and
    sequential. Empty: all samples are shuffled together."""
    shard_window: int = SHARD_WINDOW

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError("there is no image to train on")
        if self.shard_sizes and sum(self.shard_sizes) != self.num_samples:
            raise DataError(f"the shards hold {sum(self.shard_sizes)} samples and the dataset {self.num_samples}")

    def get_sample_indices(self, positions: IntArray) -> IntArray:
        """Return the sample of each position."""
        epochs, offsets = np.divmod(positions, self.num_samples)
        samples = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            samples[in_epoch] = self._permute_epoch(epoch, offsets[in_epoch])
        return samples

    def _permute_epoch(self, epoch: int, offsets: IntArray) -> IntArray:
        if not self.shard_sizes:
            return permute_indices(offsets, self.num_samples, derive_key(self.seed, f"order {epoch}"))
        starts, shards = _shuffle_shards(self, epoch)
        window_bounds = np.append(starts[:: self.shard_window], self.num_samples)
        windows = np.searchsorted(window_bounds, offsets, side="right") - 1
        shuffled = np.empty_like(offsets)
        for window in np.unique(windows).tolist():
            in_window, (first, last) = windows == window, window_bounds[window : window + 2].tolist()
            key = derive_key(self.seed, f"window {epoch} {window}")
            shuffled[in_window] = first + permute_indices(offsets[in_window] - first, last - first, key)
        place = np.searchsorted(starts, shuffled, side="right") - 1
        return shuffled - starts[place] + self._shard_offsets[shards[place]]

    @cached_property
    def _shard_offsets(self) -> IntArray:
        """The index of each shard's first sample."""
        return np.cumsum([0, *self.shard_sizes], dtype=np.int64)


@lru_cache(maxsize=4)
def _shuffle_shards(order: SampleOrder, epoch: int) -> tuple[IntArray, IntArray]:
    """Return the shards in this epoch's order, as the offset at which each begins and its index."""
    sizes = np.array(order.shard_sizes, dtype=np.int64)
    shuffled = sample_indices(len(sizes), len(sizes), f"shards {epoch}", order.seed)
    filled = shuffled[sizes[shuffled] > 0]  # an empty shard has no place
    return np.cumsum(sizes[filled]) - sizes[filled], filled


def sample_sorted_indices(count: int, total: int, purpose: str) -> IntArray:
    """Return 0 .. total - 1 where these are at most `count`, else a random sample of that many, in ascending order."""
    return np.arange(total) if total <= count else np.sort(sample_indices(count, total, purpose))


def sample_indices(count: int, total: int, purpose: str, seed: int = 0) -> IntArray:
    """Draw up to `count` of 0 .. total - 1 without replacement, in random order."""
    return permute_indices(np.arange(min(count, total)), total, derive_key(seed, purpose))


def permute_indices(indices: IntArray, count: int, key: int) -> IntArray:
    """Map each index through a keyed permutation of 0 .. count - 1."""
    rows = int(np.ceil(np.sqrt(count)))
    columns = -(-count // rows)
    permuted = indices.astype(np.int64, copy=True)
    pending = np.arange(len(permuted))
    while len(pending):  # rows * columns exceeds count by less than a row, so few are permuted twice
        permuted[pending] = _run_feistel_network(permuted[pending], rows, columns, key)
        pending = pending[permuted[pending] >= count]
    return permuted


def _run_feistel_network(indices: IntArray, rows: int, columns: int, key: int) -> IntArray:
    """Permute 0 .. rows * columns - 1: each round moves a number along its row or its column by a hash."""
    row, column = np.divmod(indices, columns)
    for round_index in range(0, _FEISTEL_ROUNDS, 2):
        row = (row + _hash_below(key, round_index, column, rows)) % rows
        column = (column + _hash_below(key, round_index + 1, row, columns)) % columns
    return row * columns + column


def _hash_below(key: int, round_index: int, numbers: IntArray, high: int) -> IntArray:
    return (hash_counters(key, round_index, numbers) % np.uint64(high)).astype(np.int64)
