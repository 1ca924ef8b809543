"""Deletion and insertion on models whose answer hangs on one known patch."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.visualization.faithfulness import join_faithfulness, measure_faithfulness

ROW, COLUMN = 1, 3  # of 4 rows and 5 columns of patches, each 8 x 8 pixels
IMAGES = torch.ones(2, 3, 32, 40)
CLASSES = np.array([1, 1])


def see_patch(images: Tensor) -> Tensor:
    """(B, 2): class 1 for certain where every pixel of the patch is there, else class 0."""
    patch = images[:, :, 8 * ROW : 8 * ROW + 8, 8 * COLUMN : 8 * COLUMN + 8]
    there = patch.flatten(1).all(dim=1).float()
    return torch.stack([1 - there, there], dim=1)


def maps_with(value: float) -> NDArray[np.float32]:
    """Random maps of two images in which that patch has `value`."""
    maps = np.random.default_rng(0).uniform(0.1, 0.9, size=(2, 4, 5)).astype(np.float32)
    maps[:, ROW, COLUMN] = value
    return maps


def test_the_patch_that_counts_named_first_is_gone_after_the_first_step() -> None:
    """Two of 20 patches a step: 1 at the start and 0 from a tenth on leaves half of the first tenth."""
    curves = measure_faithfulness(see_patch, IMAGES, maps_with(1), CLASSES)
    np.testing.assert_allclose(curves.fractions, np.linspace(0, 1, 11))
    assert curves.deletion.tolist() == [[1] + [0] * 10] * 2
    assert curves.insertion.tolist() == [[0] + [1] * 10] * 2
    assert [curves.deletion_area, curves.insertion_area] == pytest.approx([0.05, 0.95])


def test_named_last_it_stays_to_the_end() -> None:
    curves = measure_faithfulness(see_patch, IMAGES, maps_with(0), CLASSES)
    assert curves.deletion.tolist() == [[1] * 10 + [0]] * 2
    assert [curves.deletion_area, curves.insertion_area] == pytest.approx([0.95, 0.05])


def test_it_is_the_class_of_each_image_that_is_followed_and_the_patches_of_its_own_map() -> None:
    maps = maps_with(1)
    maps[1, ROW, COLUMN] = 0
    curves = measure_faithfulness(see_patch, IMAGES, maps, np.array([0, 1]))
    assert curves.deletion.tolist() == [[0] + [1] * 10, [1] * 10 + [0]]


def test_every_patch_goes_and_comes_once_and_the_rest_of_the_image_stays() -> None:
    """The share of pixels that are there, as a probability, falls and rises by a tenth."""

    def count(images: Tensor) -> Tensor:
        return (images != 0).float().mean(dim=(1, 2, 3))[:, None]

    curves = measure_faithfulness(count, IMAGES, maps_with(0.5), np.array([0, 0]))
    np.testing.assert_allclose(curves.deletion, [np.linspace(1, 0, 11)] * 2, atol=1e-6)
    np.testing.assert_allclose(curves.insertion, [np.linspace(0, 1, 11)] * 2, atol=1e-6)


def test_fewer_patches_than_steps_make_fewer_steps_and_batches_are_joined() -> None:
    maps = np.array([[[0.1, 0.9], [0.2, 0.3]]], dtype=np.float32)
    parts = [measure_faithfulness(see_patch, IMAGES[:1], maps, CLASSES[:1]) for _ in range(3)]
    assert join_faithfulness(parts).fractions.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert join_faithfulness(parts).deletion.tolist() == [[1, 0, 0, 0, 0]] * 3
    with pytest.raises(UsageError, match="images of 32 x 40 do not divide into 3 x 4 patches"):
        measure_faithfulness(see_patch, IMAGES[:1], np.ones((1, 3, 4), dtype=np.float32), CLASSES[:1])
