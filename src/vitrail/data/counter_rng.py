"""Random numbers as a function of (seed, purpose, position): there is no state to save, and none to leak.

The position in training alone decides a sample's augmentation, so workers, ranks and a resume do not change it. NumPy's
and torch's generators are streams: slow to seed for each sample, and free to change between versions. These numbers are
a hash (the finalizer of splitmix64, Steele et al. 2014, in Stafford's 13th variant) and stay what they are.
"""

import dataclasses
import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

SPLITMIX_GAMMA = np.uint64(0x9E3779B97F4A7C15)
SPLITMIX_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
SPLITMIX_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class CounterRNG:
    """The random numbers of B positions: `uniform("crop", 3)` is the same whenever and wherever it is called."""

    seed: int
    positions: IntArray  # (B,)

    @classmethod
    def from_positions(cls, seed: int, *positions: int) -> "CounterRNG":
        """Create the generator of these positions."""
        return cls(seed, np.array(positions, dtype=np.int64))

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
        state = _mix_bits(state + (np.atleast_1d(np.asarray(part)).astype(np.uint64) + np.uint64(1)) * SPLITMIX_GAMMA)
    return state


def _mix_bits(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * SPLITMIX_MULTIPLIER_1
    state = (state ^ (state >> np.uint64(27))) * SPLITMIX_MULTIPLIER_2
    return state ^ (state >> np.uint64(31))
