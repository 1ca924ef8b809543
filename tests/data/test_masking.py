"""Masked patches: the paper's fractions, every patch alike, none replaced by itself, the same however split."""

import numpy as np
import pytest
from numpy.typing import NDArray

from vitrail.config import MaskedConfig
from vitrail.config.training import MASK_TOKEN, UNCHANGED_PATCH
from vitrail.data.batch_augment import draw_masked_patches
from vitrail.data.randomness import CounterRNG
from vitrail.errors import UsageError

MPP = MaskedConfig(kind="mpp", mask_ratio=0.5, target="mean-color")
MAE = MaskedConfig(kind="mae", mask_ratio=0.75, target="normalized-pixels")
PATCHES = 196
IMAGES = 5103  # a million patches and more
POSITIONS = np.arange(IMAGES)


@pytest.fixture(scope="module")
def million() -> NDArray[np.int64]:
    return draw_masked_patches(CounterRNG(0, POSITIONS), MPP, PATCHES)


def is_within(observed: int, fraction: float, count: int, sigmas: float = 3.0) -> bool:
    """Tell whether a number of `count` is as large as a fraction promises, up to chance."""
    return bool(abs(observed - fraction * count) <= sigmas * np.sqrt(fraction * (1 - fraction) * count))


def test_half_are_masked_and_of_these_eight_one_and_one_in_ten_get_the_token_another_patch_or_stay(
    million: NDArray[np.int64],
) -> None:
    order, replacements = million[:, 0], million[:, 1]
    masked = order[:, : PATCHES // 2]
    masked_replacements = np.take_along_axis(replacements, masked, axis=1)
    assert masked_replacements.size * 2 == replacements.size >= 10**6
    assert is_within(int((masked_replacements == MASK_TOKEN).sum()), 0.8, masked_replacements.size)
    assert is_within(int((masked_replacements >= 0).sum()), 0.1, masked_replacements.size)
    assert is_within(int((masked_replacements == UNCHANGED_PATCH).sum()), 0.1, masked_replacements.size)
    assert (
        np.take_along_axis(replacements, order[:, PATCHES // 2 :], axis=1) == UNCHANGED_PATCH
    ).all()  # what is not masked is itself


def test_every_image_masks_equally_many_patches_and_every_patch_is_masked_equally_often(
    million: NDArray[np.int64],
) -> None:
    order = million[:, 0]
    assert (np.sort(order, axis=1) == np.arange(PATCHES)).all()
    often = np.bincount(order[:, : PATCHES // 2].ravel(), minlength=PATCHES)
    assert all(is_within(int(count), 0.5, IMAGES, sigmas=4.5) for count in often)  # of 196, one in 700 such tests fails
    together = sum(((order[:, : PATCHES // 2] == 0) | (order[:, : PATCHES // 2] == 1)).sum(axis=1) == 2)
    assert is_within(int(together), 0.5 * 97 / 195, IMAGES)  # neighbors are masked independently of each other


def test_a_patch_never_replaces_one_of_its_own_place_and_all_others_do_alike(million: NDArray[np.int64]) -> None:
    replacements = million[:, 1]
    _, places = np.nonzero(replacements >= 0)
    away = (replacements[replacements >= 0] - places) % PATCHES
    counts = np.bincount(away, minlength=PATCHES)
    assert counts[0] == 0
    assert all(is_within(int(count), 1 / (PATCHES - 1), len(away), sigmas=4.5) for count in counts[1:])


def test_it_is_a_function_of_seed_and_position_however_they_are_cut(million: NDArray[np.int64]) -> None:
    parts = [
        draw_masked_patches(CounterRNG(0, part), MPP, PATCHES)
        for part in np.array_split(POSITIONS[:1000], [1, 400, 777])
    ]
    assert np.array_equal(np.concatenate(parts), million[:1000])
    assert not np.array_equal(draw_masked_patches(CounterRNG(1, POSITIONS[:9]), MPP, PATCHES), million[:9])


def test_a_masked_autoencoder_masks_the_same_patches_and_uses_only_the_token() -> None:
    masks = draw_masked_patches(CounterRNG(0, POSITIONS[:50]), MAE, 64)
    assert np.array_equal(masks[:, 0], draw_masked_patches(CounterRNG(0, POSITIONS[:50]), MPP, 64)[:, 0])
    for order, replacements in masks:
        assert set(order[:48]) == set(np.flatnonzero(replacements == MASK_TOKEN))
        assert (replacements[order[48:]] == UNCHANGED_PATCH).all()


def test_so_few_patches_that_all_or_none_would_be_masked_are_refused() -> None:
    assert [
        MaskedConfig(kind="mpp", mask_ratio=fraction, target="pixels").count_masked(4) for fraction in (0.2, 0.5, 0.8)
    ] == [1, 2, 3]
    for fraction, patches in ((0.1, 4), (0.9, 4), (0.5, 1)):
        with pytest.raises(UsageError, match="at least one must be masked and one visible"):
            MaskedConfig(kind="mpp", mask_ratio=fraction, target="pixels").count_masked(patches)
