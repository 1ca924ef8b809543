"""What is hidden: the shares of the paper, every patch alike, none for itself, and the same however it is cut."""

import numpy as np
import pytest
from numpy.typing import NDArray

from vitrail.config import MASK_TOKEN, UNCHANGED_PATCH, MaskedConfig
from vitrail.data.counter_rng import CounterRNG
from vitrail.data.masking import draw_masked_patches
from vitrail.errors import UsageError

MPP = MaskedConfig(kind="mpp", mask_ratio=0.5, target="mean-color")
MAE = MaskedConfig(kind="mae", mask_ratio=0.75, target="normalized-pixels")
PATCHES = 196
IMAGES = 5103  # a million patches and more
POSITIONS = np.arange(IMAGES)


@pytest.fixture(scope="module")
def million() -> NDArray[np.int64]:
    return draw_masked_patches(CounterRNG(0, POSITIONS), MPP, PATCHES)


def within(found: int, share: float, count: int, sigmas: float = 3.0) -> bool:
    """Whether so many of `count` are as many as a share promises, up to chance."""
    return bool(abs(found - share * count) <= sigmas * np.sqrt(share * (1 - share) * count))


def test_half_are_hidden_and_of_these_eight_one_and_one_in_ten_are_masked_replaced_and_kept(
    million: NDArray[np.int64],
) -> None:
    order, stands = million[:, 0], million[:, 1]
    hidden = order[:, : PATCHES // 2]
    by = np.take_along_axis(stands, hidden, axis=1)
    assert by.size * 2 == stands.size >= 10**6
    assert within(int((by == MASK_TOKEN).sum()), 0.8, by.size)
    assert within(int((by >= 0).sum()), 0.1, by.size)
    assert within(int((by == UNCHANGED_PATCH).sum()), 0.1, by.size)
    assert (
        np.take_along_axis(stands, order[:, PATCHES // 2 :], axis=1) == UNCHANGED_PATCH
    ).all()  # what is not hidden is itself


def test_every_image_hides_as_many_patches_each_once_and_every_patch_as_often(million: NDArray[np.int64]) -> None:
    order = million[:, 0]
    assert (np.sort(order, axis=1) == np.arange(PATCHES)).all()
    often = np.bincount(order[:, : PATCHES // 2].ravel(), minlength=PATCHES)
    assert all(within(int(count), 0.5, IMAGES, sigmas=4.5) for count in often)  # of 196, one in 700 such tests fails
    together = sum(((order[:, : PATCHES // 2] == 0) | (order[:, : PATCHES // 2] == 1)).sum(axis=1) == 2)
    assert within(int(together), 0.5 * 97 / 195, IMAGES)  # neighbours are hidden independently of each other


def test_a_patch_never_replaces_one_of_its_own_place_and_all_others_do_alike(million: NDArray[np.int64]) -> None:
    stands = million[:, 1]
    _, places = np.nonzero(stands >= 0)
    away = (stands[stands >= 0] - places) % PATCHES
    counts = np.bincount(away, minlength=PATCHES)
    assert counts[0] == 0
    assert all(within(int(count), 1 / (PATCHES - 1), len(away), sigmas=4.5) for count in counts[1:])


def test_it_is_a_function_of_seed_and_position_however_they_are_cut(million: NDArray[np.int64]) -> None:
    parts = [
        draw_masked_patches(CounterRNG(0, some), MPP, PATCHES)
        for some in np.array_split(POSITIONS[:1000], [1, 400, 777])
    ]
    assert np.array_equal(np.concatenate(parts), million[:1000])
    assert not np.array_equal(draw_masked_patches(CounterRNG(1, POSITIONS[:9]), MPP, PATCHES), million[:9])


def test_a_masked_autoencoder_hides_the_same_patches_first_and_only_masks() -> None:
    found = draw_masked_patches(CounterRNG(0, POSITIONS[:50]), MAE, 64)
    assert np.array_equal(found[:, 0], draw_masked_patches(CounterRNG(0, POSITIONS[:50]), MPP, 64)[:, 0])
    for order, stands in found:
        assert set(order[:48]) == set(np.flatnonzero(stands == MASK_TOKEN))
        assert (stands[order[48:]] == UNCHANGED_PATCH).all()


def test_so_few_patches_that_all_or_none_would_be_hidden_are_refused() -> None:
    assert [
        MaskedConfig(kind="mpp", mask_ratio=share, target="pixels").count_masked(4) for share in (0.2, 0.5, 0.8)
    ] == [1, 2, 3]
    for share, patches in ((0.1, 4), (0.9, 4), (0.5, 1)):
        with pytest.raises(UsageError, match="at least one must be masked and one visible"):
            MaskedConfig(kind="mpp", mask_ratio=share, target="pixels").count_masked(patches)
