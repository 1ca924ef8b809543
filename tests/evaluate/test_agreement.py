"""Agreement by hand."""

import pytest
import torch

from vitrail.errors import DataError
from vitrail.evaluate.agreement import Agreement, measure_agreement


def test_four_images_by_hand() -> None:
    float32 = torch.tensor(
        [
            [0.7, 0.2, 0.1],  # sure
            [0.4, 0.35, 0.25],  # in doubt
            [0.1, 0.1, 0.8],  # sure
            [0.3, 0.5, 0.2],  # sure
        ]
    )
    other = torch.tensor([[0.6, 0.3, 0.1], [0.3, 0.4, 0.3], [0.6, 0.1, 0.3], [0.3, 0.5, 0.2]])
    found = measure_agreement(float32, other)
    assert (found.images, found.sure_images) == (4, 3)
    assert found.top1 == 2 / 4
    assert found.sure == 2 / 3
    assert found.change == pytest.approx((0.1 + 0.1 + 0.5 + 0.0) / 4)


def test_the_change_is_of_the_class_that_float32_chose() -> None:
    found = measure_agreement(torch.tensor([[0.9, 0.1]]), torch.tensor([[0.05, 0.95]]))
    assert found.change == pytest.approx(0.85)
    assert found.top1 == 0


def test_without_a_sure_image_there_is_no_share_of_them() -> None:
    doubtful = torch.tensor([[0.5, 0.45, 0.05], [0.34, 0.33, 0.33]])
    assert measure_agreement(doubtful, doubtful) == Agreement(images=2, top1=1.0, sure=None, sure_images=0, change=0.0)


def test_probabilities_that_need_not_sum_to_one_are_compared_alike() -> None:
    """Where several labels may be right; a class that stands alone is there, or it is not."""
    several = torch.tensor([[0.9, 0.85], [0.9, 0.1]])
    assert measure_agreement(several, several.flip(1)) == Agreement(
        images=2, top1=0.0, sure=0.0, sure_images=1, change=pytest.approx((0.05 + 0.8) / 2)
    )
    alone = torch.tensor([[0.05], [0.46], [0.58]])
    assert measure_agreement(alone, alone + 0.1) == Agreement(
        images=3, top1=2 / 3, sure=1.0, sure_images=2, change=pytest.approx(0.1)
    )


def test_no_images_are_refused() -> None:
    with pytest.raises(DataError, match="no image"):
        measure_agreement(torch.zeros(0, 3), torch.zeros(0, 3))
