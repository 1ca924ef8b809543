"""Which sample stands at which position of training: a function, not a list.

Training is a line of positions 0, 1, 2, ... Position p belongs to epoch p // n, and a keyed permutation of that epoch
maps p % n to its sample. So every sample comes once an epoch, a resume is an integer, and a billion samples cost no
memory. The permutation is a Feistel network over a rectangle that just holds n, repeated until the result is below n
(Black and Rogaway 2002); libraries shuffle a list of n numbers instead.
"""

import dataclasses
from functools import cached_property, lru_cache

import numpy as np

from vitrail.data import counter_rng
from vitrail.data.counter_rng import IntArray
from vitrail.errors import DataError

_ROUNDS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The order in which training sees the samples of a dataset."""

    seed: int
    num_samples: int
    shard_sizes: tuple[int, ...] = ()
    """Samples in each tar shard. `shard_window` shards are shuffled together, so that reads are long and sequential.
    Empty: all samples are shuffled together."""
    shard_window: int = 16

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
            return permute_indices(offsets, self.num_samples, counter_rng.derive_key(self.seed, f"order {epoch}"))
        starts, shards = _shuffle_shards(self, epoch)
        window_starts = starts[:: self.shard_window]
        windows = np.searchsorted(window_starts, offsets, side="right") - 1
        shuffled = np.empty_like(offsets)
        for window in np.unique(windows).tolist():
            in_window, first = windows == window, int(window_starts[window])
            last = int(window_starts[window + 1]) if window + 1 < len(window_starts) else self.num_samples
            key = counter_rng.derive_key(self.seed, f"window {epoch} {window}")
            shuffled[in_window] = first + permute_indices(offsets[in_window] - first, last - first, key)
        place = np.searchsorted(starts, shuffled, side="right") - 1
        return shuffled - starts[place] + self._shard_offsets[shards[place]]

    @cached_property
    def _shard_offsets(self) -> IntArray:
        """The index of each shard's first sample."""
        return np.concatenate([[0], np.cumsum(self.shard_sizes)])[:-1].astype(np.int64)


@lru_cache(maxsize=4)
def _shuffle_shards(order: SampleOrder, epoch: int) -> tuple[IntArray, IntArray]:
    """Return the shards in this epoch's order, as the offset at which each begins and its index."""
    sizes = np.array(order.shard_sizes, dtype=np.int64)
    count = len(sizes)
    shuffled = permute_indices(np.arange(count), count, counter_rng.derive_key(order.seed, f"shards {epoch}"))
    filled = shuffled[sizes[shuffled] > 0]  # an empty shard has no place
    return np.cumsum(sizes[filled]) - sizes[filled], filled


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
    for round_index in range(0, _ROUNDS, 2):
        row = (row + _hash_below(key, round_index, column, rows)) % rows
        column = (column + _hash_below(key, round_index + 1, row, columns)) % columns
    return row * columns + column


def _hash_below(key: int, round_index: int, numbers: IntArray, high: int) -> IntArray:
    return (counter_rng.hash_counters(key, round_index, numbers) % np.uint64(high)).astype(np.int64)
