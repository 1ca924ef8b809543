"""Counts by hand, that batches of any sizes add up to the same, and what was said of each image."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests import making
from vitrail.config import PreprocessConfig
from vitrail.data.loader import Batch
from vitrail.data.transforms import normalize
from vitrail.errors import DataError
from vitrail.evaluate.predictions import Counts, count_batch, count_predictions, evaluate_batches, predict_batches
from vitrail.model.vit import ViT

VIEW = PreprocessConfig(size=(32, 32), resize=(32, 32))


def pictures(number: int) -> Tensor:
    return torch.randint(0, 256, (number, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_counts_by_hand() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    found = count_batch(logits, torch.tensor([2, 1, 0]))
    assert (found.images, found.correct_top5) == (3, 3)
    assert found.correct == 2  # of equal logits the first counts
    assert found.confusion.tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 1]]
    expected = -(logits.log_softmax(dim=1)[[0, 1, 2], [2, 1, 0]]).sum()
    assert found.loss == pytest.approx(float(expected))
    assert found.top1 == pytest.approx(2 / 3)


def test_five_likeliest() -> None:
    logits = torch.arange(8.0).repeat(3, 1)
    assert count_batch(logits, torch.tensor([7, 3, 2])).correct_top5 == 2


def test_the_average_over_classes_by_hand() -> None:
    """Nine tenths of one class, a quarter of another, and a third that has no image."""
    confusion = torch.tensor([[9, 1, 0], [0, 1, 3], [0, 0, 0]])
    counts = Counts(images=14, correct=10, correct_top5=14, loss=0.0, confusion=confusion)
    assert counts.macro_accuracy == pytest.approx((9 / 10 + 1 / 4) / 2)
    assert counts.top1 == pytest.approx(10 / 14)


def test_counts_of_several_labels_by_hand() -> None:
    """Right where all labels are predicted and no other. One label has 3/4, four classes 1/2, and two 1/4 each."""
    logits = torch.tensor([0.0, 0.0, 0.0, 0.0, -math.log(3), -math.log(3), math.log(3)]).repeat(3, 1)
    targets = torch.zeros(3, 7)
    targets[0, [6]] = 1  # right
    targets[1, [0, 6]] = 1  # one of them is missed
    targets[2, [4, 5]] = 1  # wrong
    found = count_batch(logits, targets)
    assert (found.images, found.correct, found.correct_top5) == (3, 1, 2)
    assert found.loss == pytest.approx(12 * math.log(2) + 6 * math.log(4 / 3) + 3 * math.log(4))
    assert not found.confusion.any()


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 5, 1), (2, 0, 5)])
def test_batches_of_any_sizes_add_up(sizes: tuple[int, ...]) -> None:
    model = making.vit()
    pixels, targets = pictures(7), torch.arange(7)
    whole = evaluate_batches(model, [Batch(pixels, targets, targets)], VIEW)
    cuts = zip(pixels.split(list(sizes)), targets.split(list(sizes)), strict=True)
    found = evaluate_batches(model, [Batch(images, labels, labels) for images, labels in cuts], VIEW)
    assert (found.images, found.correct, found.correct_top5) == (whole.images, whole.correct, whole.correct_top5)
    assert torch.equal(found.confusion, whole.confusion)
    assert found.loss == pytest.approx(whole.loss, rel=1e-5)


def test_of_several_labels_an_image_without_one_is_right_where_it_is_given_none() -> None:
    model, pixels = making.vit(), pictures(5)
    targets = torch.zeros(5, 7)
    targets[[0, 2, 3], [1, 2, 3]] = 1
    targets[3, 0] = 1
    batches = [Batch(pixels[cut], targets[cut], torch.arange(10, 15)[cut]) for cut in (slice(4), slice(4, 5))]
    model.head.bias.data[:] = torch.tensor([-9.0, 9, -9, -9, -9, -9, -9])  # it says 1 of every image
    with torch.no_grad():
        expected = count_batch(model(normalize(pixels, VIEW)), targets)
    assert expected.correct == 1
    said = predict_batches(model, batches, VIEW, temperature=1.0, num_classes=7)
    counts = count_predictions(said, model.config.classes)
    for found in (evaluate_batches(model, batches, VIEW), counts):
        assert (found.images, found.correct, found.correct_top5) == (5, 1, expected.correct_top5)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert said.images.tolist() == [10, 11, 12, 13, 14]
    model.head.bias.data[1] = -9
    said = predict_batches(model, batches, VIEW, temperature=1.0, num_classes=7)
    assert said.correct.tolist() == [False, True, False, False, True]


def test_images_without_a_label_are_refused_where_each_has_one_and_nothing_is_no_evaluation() -> None:
    pixels = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)

    def counted(model: ViT, batches: list[Batch], view: PreprocessConfig) -> Counts:
        return count_predictions(predict_batches(model, batches, view, temperature=1.0, num_classes=7), 7)

    for function in (evaluate_batches, counted):
        with pytest.raises(DataError, match="images with a label; some of these have none"):
            function(making.vit(), [Batch(pixels, torch.tensor([0, -1]), torch.arange(2))], VIEW)
        with pytest.raises(DataError, match="no image to evaluate on"):
            function(making.vit(), [], VIEW)


@pytest.mark.parametrize("several", [False, True], ids=["softmax", "several"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_what_was_said_of_each_image_by_formula(temperature: float, several: bool) -> None:
    model, pixels = making.vit(), pictures(6)
    with torch.no_grad():
        logits = model(normalize(pixels, VIEW)).double()
    classes = torch.tensor([0, 1, 2, 3, 4, 5])
    classes[0] = logits[0].argmax()  # one is right at least
    targets = F.one_hot(classes, 7).float() if several else classes
    if several:
        targets[0] = (logits[0] > 0).float()  # all labels of one image are right
    places = torch.tensor([9, 3, 4, 0, 7, 1])
    batches = [Batch(pixels[cut], targets[cut], places[cut]) for cut in (slice(4), slice(4, 6))]
    said = predict_batches(model, batches, VIEW, temperature=temperature, num_classes=7)
    counts = count_predictions(said, model.config.classes)
    plain = evaluate_batches(model, batches, VIEW)
    assert (counts.images, counts.correct, counts.correct_top5) == (6, plain.correct, plain.correct_top5)
    assert counts.loss == pytest.approx(float(said.losses.sum()))
    assert torch.equal(counts.confusion, plain.confusion)

    assert said.images.tolist() == places.tolist()
    assert said.correct.sum() == counts.correct > 0
    for index, row in enumerate((logits / temperature).tolist()):
        order = sorted(range(7), key=lambda each: -row[each])[:5]
        assert said.classes[index].tolist() == order
        if several:
            predicted = [each for each, value in enumerate(row) if value > 0]
            true = targets[index].nonzero()[:, 0].tolist()
            assert (said.get_predicted_classes(index), said.correct[index].item()) == (predicted, predicted == true)
            chances = [1 / (1 + math.exp(-row[each])) for each in order]
            loss = sum(math.log1p(math.exp(-value if each in true else value)) for each, value in enumerate(row))
            sure = math.prod(1 / (1 + math.exp(-abs(value))) for value in row)
        else:
            assert said.correct[index].item() == (order[0] == classes[index])
            assert said.get_predicted_classes(index) == order[:1]
            whole = sum(map(math.exp, row))
            chances = [math.exp(row[each]) / whole for each in order]
            loss = math.log(whole) - row[int(classes[index])]
            sure = chances[0]
        assert float(said.confidence[index]) == pytest.approx(sure, abs=1e-5)
        assert said.probabilities[index].tolist() == pytest.approx(chances, abs=1e-5)
        assert said.losses[index].item() == pytest.approx(loss, abs=1e-4)


def test_a_temperature_changes_how_sure_the_answers_are_and_no_answer() -> None:
    batches = [Batch(pictures(6), torch.arange(6), torch.arange(6))]
    cold, hot = (
        predict_batches(making.vit(), batches, VIEW, temperature=temperature, num_classes=7)
        for temperature in (1.0, 3.0)
    )
    for name in ("classes", "right", "images"):
        assert torch.equal(getattr(cold, name), getattr(hot, name)), name
    assert (hot.probabilities[:, 0] < cold.probabilities[:, 0]).all()  # the hotter, the less sure
