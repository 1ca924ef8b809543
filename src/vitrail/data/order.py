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

from vitrail.data import draws
from vitrail.errors import DataError

Integers = NDArray[np.int64]
_ROUNDS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """The samples of a set of `count`, in the order in which training sees them."""

    seed: int
    count: int
    shards: tuple[int, ...] = ()
    """Samples in each tar shard: `window` shards are shuffled together, so that disks read in long strokes. Empty: all
    samples are shuffled together."""
    window: int = 16

    def __post_init__(self) -> None:
        if self.count < 1:
            raise DataError("there is no image to train on")
        if self.shards and sum(self.shards) != self.count:
            raise DataError(f"the shards hold {sum(self.shards)} samples and the set {self.count}")

    def samples(self, positions: Integers) -> Integers:
        """For each position the number of its sample."""
        epochs, places = np.divmod(positions, self.count)
        out = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            out[here] = self._of_epoch(epoch, places[here])
        return out

    def _of_epoch(self, epoch: int, places: Integers) -> Integers:
        if not self.shards:
            return permuted(places, self.count, draws.key(self.seed, f"order {epoch}"))
        starts, order = _shard_starts(self, epoch)  # of the shards in this epoch's order, and which they are
        windows = starts[:: self.window]
        number = np.searchsorted(windows, places, side="right") - 1
        inside = np.empty_like(places)
        for window in np.unique(number).tolist():
            here, first = number == window, int(windows[window])
            last = int(windows[window + 1]) if window + 1 < len(windows) else self.count
            keyed = draws.key(self.seed, f"window {epoch} {window}")
            inside[here] = first + permuted(places[here] - first, last - first, keyed)
        shard = np.searchsorted(starts, inside, side="right") - 1
        return inside - starts[shard] + self._first[order[shard]]

    @cached_property
    def _first(self) -> Integers:
        """The number of each shard's first sample."""
        return np.concatenate([[0], np.cumsum(self.shards)])[:-1].astype(np.int64)


@lru_cache(maxsize=4)
def _shard_starts(order: Order, epoch: int) -> tuple[Integers, Integers]:
    sizes = np.array(order.shards, dtype=np.int64)
    count = len(sizes)
    shuffled = permuted(np.arange(count), count, draws.key(order.seed, f"shards {epoch}"))
    filled = shuffled[sizes[shuffled] > 0]  # an empty shard has no place
    return np.cumsum(sizes[filled]) - sizes[filled], filled


def permuted(numbers: Integers, count: int, key: int) -> Integers:
    """Where a keyed permutation of 0 .. count - 1 puts each of the numbers."""
    rows = int(np.ceil(np.sqrt(count)))
    columns = -(-count // rows)
    out = numbers.astype(np.int64, copy=True)
    walking = np.arange(len(out))
    while len(walking):  # rows * columns exceeds count by less than a row, so few walk twice
        out[walking] = _network(out[walking], rows, columns, key)
        walking = walking[out[walking] >= count]
    return out


def _network(numbers: Integers, rows: int, columns: int, key: int) -> Integers:
    """A permutation of 0 .. rows * columns - 1: each round moves a number along its row or its column by a hash."""
    row, column = np.divmod(numbers, columns)
    for turn in range(0, _ROUNDS, 2):
        row = (row + _hash(key, turn, column, rows)) % rows
        column = (column + _hash(key, turn + 1, row, columns)) % columns
    return row * columns + column


def _hash(key: int, turn: int, numbers: Integers, below: int) -> Integers:
    return (draws.hashed(key, turn, numbers) % np.uint64(below)).astype(np.int64)
