"""Random numbers by position: uniform, independent, and the same in every version."""

import hashlib

import numpy as np

from vitrail.data.counter_rng import CounterRNG


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
    assert CounterRNG.from_positions(0, 3).bits("crop", 2).tolist() == [several[3, :2].tolist()]
    assert several.tolist() == [[hash_by_hand(0, "crop", position, slot) for slot in range(5)] for position in range(9)]
    assert CounterRNG.from_positions(0, 0).bits("crop", 1).tolist() == [[2185967382836963344]]


def hash_by_hand(seed: int, purpose: str, position: int, slot: int) -> int:
    """Compute the same hash in Python's unbounded integers."""
    state = int.from_bytes(hashlib.sha256(f"{seed}:{purpose}".encode()).digest()[:8], "little")
    for part in (position, slot):
        state = (state + (part + 1) * 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state
