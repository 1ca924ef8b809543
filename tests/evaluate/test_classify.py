"""Counts by hand, and that batches of any sizes add up to the same."""

import pytest
import torch

from tests import making
from vitrail.config import Preprocess
from vitrail.data.loader import Batch
from vitrail.errors import DataError
from vitrail.evaluate.classify import classify, count


def test_counts_by_hand() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    found = count(logits, torch.tensor([2, 1, 0]))
    assert (found.images, found.right_in_five) == (3, 3)
    assert found.right == 2  # of equal logits the first counts
    assert found.confusion.tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 1]]
    expected = -(logits.log_softmax(dim=1)[[0, 1, 2], [2, 1, 0]]).sum()
    assert found.loss == pytest.approx(float(expected))
    assert found.top1 == pytest.approx(2 / 3)


def test_five_likeliest() -> None:
    logits = torch.arange(8.0).repeat(3, 1)
    assert count(logits, torch.tensor([7, 3, 2])).right_in_five == 2


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 5, 1), (2, 0, 5)])
def test_batches_of_any_sizes_add_up(sizes: tuple[int, ...]) -> None:
    model = making.vit()
    view = Preprocess(size=(32, 32), resize=(32, 32))
    pixels = torch.randint(0, 256, (7, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(7)
    whole = classify(model, [Batch(pixels, targets, targets)], view)
    cuts = zip(pixels.split(list(sizes)), targets.split(list(sizes)), strict=True)
    found = classify(model, [Batch(images, labels, labels) for images, labels in cuts], view)
    assert (found.images, found.right, found.right_in_five) == (whole.images, whole.right, whole.right_in_five)
    assert torch.equal(found.confusion, whole.confusion)
    assert found.loss == pytest.approx(whole.loss, rel=1e-5)


def test_images_without_one_label_each_are_refused() -> None:
    view = Preprocess(size=(32, 32), resize=(32, 32))
    pixels = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    for targets in (torch.tensor([0, -1]), torch.zeros(2, 7)):
        with pytest.raises(DataError, match="one label each"):
            classify(making.vit(), [Batch(pixels, targets, torch.arange(2))], view)
    with pytest.raises(DataError, match="no image"):
        classify(making.vit(), [], view)
