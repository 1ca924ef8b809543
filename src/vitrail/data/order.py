"""Which sample stands at which position of training: a function, not a list.

Training is a line of positions 0, 1, 2, ...; position p belongs to epoch p // n and shows the sample that a keyed
permutation of that epoch puts at p % n. So every sample comes once an epoch, a resume is an integer, and a billion
samples cost no memory. The permutation is a Feistel network over a rectangle that just holds n, walked until it lands
inside (Black and Rogaway 2002); libraries shuffle a list of n numbers instead.
"""

import dataclasses
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from vitrail.data import counter_rng
from vitrail.errors import DataError

IntArray = NDArray[np.int64]
_ROUNDS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The samples of a set of `count`, in the order in which training sees them."""

    seed: int
    num_samples: int
    shard_sizes: tuple[int, ...] = ()
    """Samples in each tar shard: `window` shards are shuffled together, so that disks read in long strokes. Empty: all
    samples are shuffled together."""
    shard_window: int = 16

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError("there is no image to train on")
        if self.shard_sizes and sum(self.shard_sizes) != self.num_samples:
            raise DataError(f"the shards hold {sum(self.shard_sizes)} samples and the set {self.num_samples}")

    def get_sample_indices(self, positions: IntArray) -> IntArray:
        """For each position the number of its sample."""
        epochs, places = np.divmod(positions, self.num_samples)
        out = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            out[here] = self._permute_epoch(epoch, places[here])
        return out

    def _permute_epoch(self, epoch: int, places: IntArray) -> IntArray:
        if not self.shard_sizes:
            return permute_indices(places, self.num_samples, counter_rng.derive_key(self.seed, f"order {epoch}"))
        starts, order = _shuffle_shards(self, epoch)  # of the shards in this epoch's order, and which they are
        windows = starts[:: self.shard_window]
        number = np.searchsorted(windows, places, side="right") - 1
        inside = np.empty_like(places)
        for window in np.unique(number).tolist():
            here, first = number == window, int(windows[window])
            last = int(windows[window + 1]) if window + 1 < len(windows) else self.num_samples
            keyed = counter_rng.derive_key(self.seed, f"window {epoch} {window}")
            inside[here] = first + permute_indices(places[here] - first, last - first, keyed)
        shard = np.searchsorted(starts, inside, side="right") - 1
        return inside - starts[shard] + self._shard_offsets[order[shard]]

    @cached_property
    def _shard_offsets(self) -> IntArray:
        """The number of each shard's first sample."""
        return np.concatenate([[0], np.cumsum(self.shard_sizes)])[:-1].astype(np.int64)


@lru_cache(maxsize=4)
def _shuffle_shards(order: SampleOrder, epoch: int) -> tuple[IntArray, IntArray]:
    sizes = np.array(order.shard_sizes, dtype=np.int64)
    count = len(sizes)
    shuffled = permute_indices(np.arange(count), count, counter_rng.derive_key(order.seed, f"shards {epoch}"))
    filled = shuffled[sizes[shuffled] > 0]  # an empty shard has no place
    return np.cumsum(sizes[filled]) - sizes[filled], filled


def permute_indices(indices: IntArray, count: int, key: int) -> IntArray:
    """Where a keyed permutation of 0 .. count - 1 puts each of the numbers."""
    rows = int(np.ceil(np.sqrt(count)))
    columns = -(-count // rows)
    out = indices.astype(np.int64, copy=True)
    walking = np.arange(len(out))
    while len(walking):  # rows * columns exceeds count by less than a row, so few walk twice
        out[walking] = _run_feistel_network(out[walking], rows, columns, key)
        walking = walking[out[walking] >= count]
    return out


def _run_feistel_network(indices: IntArray, rows: int, columns: int, key: int) -> IntArray:
    """A permutation of 0 .. rows * columns - 1: each round moves a number along its row or its column by a hash."""
    row, column = np.divmod(indices, columns)
    for turn in range(0, _ROUNDS, 2):
        row = (row + _hash_below(key, turn, column, rows)) % rows
        column = (column + _hash_below(key, turn + 1, row, columns)) % columns
    return row * columns + column


def _hash_below(key: int, round_index: int, numbers: IntArray, high: int) -> IntArray:
    return (counter_rng.hash_counters(key, round_index, numbers) % np.uint64(high)).astype(np.int64)
