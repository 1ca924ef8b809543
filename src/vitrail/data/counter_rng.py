"""Random numbers as a function of (seed, purpose, position): there is no state to save, and none to leak.

A sample's augmentation is decided by its position in training alone, so neither workers nor ranks nor a resume change
it. NumPy's and torch's generators are streams, slow to seed once a sample, and free to change between versions; these
numbers are a hash (the finaliser of splitmix64, Steele et al. 2014, by Stafford's 13th variant) and stay what they are.
"""

import dataclasses
import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

SPLITMIX_GAMMA = np.uint64(0x9E3779B97F4A7C15)
SPLITMIX_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
SPLITMIX_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


@dataclasses.dataclass(frozen=True)
class CounterRNG:
    """The random numbers of B positions: `uniform("crop", 3)` is the same whenever and wherever it is asked for."""

    seed: int
    positions: NDArray[np.int64]  # (B,)

    @classmethod
    def from_positions(cls, seed: int, *positions: int) -> "CounterRNG":
        """The random numbers of the positions given."""
        return cls(seed, np.array(positions, dtype=np.int64))

    def uniform(self, purpose: str, count: int) -> NDArray[np.float64]:
        """(B, count) numbers of [0, 1), independent between purposes, positions and columns."""
        return (self.bits(purpose, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, purpose: str, count: int, high: int) -> NDArray[np.int64]:
        """(B, count) whole numbers from 0 to `below` - 1."""
        return (self.uniform(purpose, count) * high).astype(np.int64)

    def bits(self, purpose: str, count: int) -> NDArray[np.uint64]:
        """(B, count) numbers of 64 random bits."""
        return hash_counters(derive_key(self.seed, purpose), self.positions[:, None], np.arange(count))


@lru_cache(maxsize=4096)
def derive_key(seed: int, purpose: str) -> int:
    """64 bits that stand for a seed and a purpose."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{purpose}".encode()).digest()[:8], "little")


def hash_counters(seed_key: int, *parts: ArrayLike) -> NDArray[np.uint64]:
    """64 bits that depend on every bit of `start` and of each of the parts, which broadcast."""
    state = np.full(1, seed_key, dtype=np.uint64)
    for part in parts:
        state = _mix_bits(state + (np.atleast_1d(np.asarray(part)).astype(np.uint64) + np.uint64(1)) * SPLITMIX_GAMMA)
    return state


def _mix_bits(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * SPLITMIX_MULTIPLIER_1
    state = (state ^ (state >> np.uint64(27))) * SPLITMIX_MULTIPLIER_2
    return state ^ (state >> np.uint64(31))
