"""Counts by hand, that batches of any sizes add up to the same, the predictions for each image, a wrapped model."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests import model_factory
from vitrail.config import PreprocessConfig
from vitrail.data.loader import Batch
from vitrail.data.transforms import normalize
from vitrail.errors import DataError
from vitrail.evaluation.predictions import (
    Counts,
    EvalWrapper,
    count_batch,
    count_predictions,
    evaluate_batches,
    predict_batches,
    relabel_batches,
)
from vitrail.model.vit import ViT

PREPROCESS = PreprocessConfig(size=(32, 32), resize=(32, 32))


def make_pixels(number: int) -> Tensor:
    return torch.randint(0, 256, (number, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_counts_by_hand() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    counts = count_batch(logits, torch.tensor([2, 1, 0]))
    assert (counts.images, counts.correct_top5) == (3, 3)
    assert counts.correct == 2  # of equal logits the first counts
    assert counts.confusion.tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 1]]
    expected = -(logits.log_softmax(dim=1)[[0, 1, 2], [2, 1, 0]]).sum()
    assert counts.loss == pytest.approx(float(expected))
    assert counts.top1 == pytest.approx(2 / 3)


def test_five_likeliest() -> None:
    logits = torch.arange(8.0).repeat(3, 1)
    assert count_batch(logits, torch.tensor([7, 3, 2])).correct_top5 == 2


def test_the_average_over_classes_by_hand() -> None:
    """Nine tenths of one class, a quarter of another, and a third that has no image."""
    confusion = torch.tensor([[9, 1, 0], [0, 1, 3], [0, 0, 0]])
    counts = Counts(images=14, correct=10, correct_top5=14, loss=0.0, confusion=confusion)
    assert counts.macro_accuracy == pytest.approx((9 / 10 + 1 / 4) / 2)
    assert counts.top1 == pytest.approx(10 / 14)


def test_counts_of_multi_label_images_by_hand() -> None:
    """Right where all labels are predicted and no other. One label has 3/4, four classes 1/2, and two 1/4 each."""
    logits = torch.tensor([0.0, 0.0, 0.0, 0.0, -math.log(3), -math.log(3), math.log(3)]).repeat(3, 1)
    targets = torch.zeros(3, 7)
    targets[0, [6]] = 1  # right
    targets[1, [0, 6]] = 1  # one of them is missed
    targets[2, [4, 5]] = 1  # wrong
    counts = count_batch(logits, targets)
    assert (counts.images, counts.correct, counts.correct_top5) == (3, 1, 2)
    assert counts.loss == pytest.approx(12 * math.log(2) + 6 * math.log(4 / 3) + 3 * math.log(4))
    assert not counts.confusion.any()


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 5, 1), (2, 0, 5)])
def test_batches_of_any_sizes_add_up(sizes: tuple[int, ...]) -> None:
    model = model_factory.build_vit()
    pixels, targets = make_pixels(7), torch.arange(7)
    expected = evaluate_batches(model, [Batch(pixels, targets, targets)], PREPROCESS)
    cuts = zip(pixels.split(list(sizes)), targets.split(list(sizes)), strict=True)
    counts = evaluate_batches(model, [Batch(images, labels, labels) for images, labels in cuts], PREPROCESS)
    assert (counts.images, counts.correct, counts.correct_top5) == (
        expected.images,
        expected.correct,
        expected.correct_top5,
    )
    assert torch.equal(counts.confusion, expected.confusion)
    assert counts.loss == pytest.approx(expected.loss, rel=1e-5)


def test_a_multi_label_image_without_a_label_is_correct_where_none_is_predicted() -> None:
    model, pixels = model_factory.build_vit(), make_pixels(5)
    targets = torch.zeros(5, 7)
    targets[[0, 2, 3], [1, 2, 3]] = 1
    targets[3, 0] = 1
    batches = [Batch(pixels[cut], targets[cut], torch.arange(10, 15)[cut]) for cut in (slice(4), slice(4, 5))]
    model.head.bias.data[:] = torch.tensor([-9.0, 9, -9, -9, -9, -9, -9])  # it says 1 of every image
    with torch.no_grad():
        expected = count_batch(model(normalize(pixels, PREPROCESS)), targets)
    assert expected.correct == 1
    predictions = predict_batches(model, batches, PREPROCESS, temperature=1.0, num_classes=7)
    counts = count_predictions(predictions, model.config.classes)
    for summed in (evaluate_batches(model, batches, PREPROCESS), counts):
        assert (summed.images, summed.correct, summed.correct_top5) == (5, 1, expected.correct_top5)
        assert summed.loss == pytest.approx(expected.loss, rel=1e-5)
    assert predictions.images.tolist() == [10, 11, 12, 13, 14]
    model.head.bias.data[1] = -9
    predictions = predict_batches(model, batches, PREPROCESS, temperature=1.0, num_classes=7)
    assert predictions.correct.tolist() == [False, True, False, False, True]


def test_images_without_a_label_are_refused_where_each_has_one_and_nothing_is_no_evaluation() -> None:
    pixels = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)

    def predict_and_count(model: ViT, batches: list[Batch], preprocess: PreprocessConfig) -> Counts:
        return count_predictions(predict_batches(model, batches, preprocess, temperature=1.0, num_classes=7), 7)

    for function in (evaluate_batches, predict_and_count):
        with pytest.raises(DataError, match="images with a label, and some of these have none"):
            function(model_factory.build_vit(), [Batch(pixels, torch.tensor([0, -1]), torch.arange(2))], PREPROCESS)
        with pytest.raises(DataError, match="no image to evaluate on"):
            function(model_factory.build_vit(), [], PREPROCESS)


@pytest.mark.parametrize("multi_label", [False, True], ids=["softmax", "multi_label"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_predictions_of_each_image_by_formula(temperature: float, multi_label: bool) -> None:
    model, pixels = model_factory.build_vit(), make_pixels(6)
    with torch.no_grad():
        logits = model(normalize(pixels, PREPROCESS)).double()
    classes = torch.tensor([0, 1, 2, 3, 4, 5])
    classes[0] = logits[0].argmax()  # one is right at least
    targets = F.one_hot(classes, 7).float() if multi_label else classes
    if multi_label:
        targets[0] = (logits[0] > 0).float()  # all labels of one image are right
    positions = torch.tensor([9, 3, 4, 0, 7, 1])
    batches = [Batch(pixels[cut], targets[cut], positions[cut]) for cut in (slice(4), slice(4, 6))]
    predictions = predict_batches(model, batches, PREPROCESS, temperature=temperature, num_classes=7)
    counts = count_predictions(predictions, model.config.classes)
    plain = evaluate_batches(model, batches, PREPROCESS)
    assert (counts.images, counts.correct, counts.correct_top5) == (6, plain.correct, plain.correct_top5)
    assert counts.loss == pytest.approx(float(predictions.losses.sum()))
    assert torch.equal(counts.confusion, plain.confusion)

    assert predictions.images.tolist() == positions.tolist()
    assert predictions.correct.sum() == counts.correct > 0
    for index, row in enumerate((logits / temperature).tolist()):
        order = sorted(range(7), key=lambda output: -row[output])[:5]
        assert predictions.classes[index].tolist() == order
        if multi_label:
            predicted = [output for output, value in enumerate(row) if value > 0]
            labels = targets[index].nonzero()[:, 0].tolist()
            assert (predictions.get_predicted_classes(index), predictions.correct[index].item()) == (
                predicted,
                predicted == labels,
            )
            chances = [1 / (1 + math.exp(-row[output])) for output in order]
            loss = sum(math.log1p(math.exp(-value if output in labels else value)) for output, value in enumerate(row))
            confidence = math.prod(1 / (1 + math.exp(-abs(value))) for value in row)
        else:
            assert predictions.correct[index].item() == (order[0] == classes[index])
            assert predictions.get_predicted_classes(index) == order[:1]
            total = sum(map(math.exp, row))
            chances = [math.exp(row[output]) / total for output in order]
            loss = math.log(total) - row[int(classes[index])]
            confidence = chances[0]
        assert float(predictions.confidence[index]) == pytest.approx(confidence, abs=1e-5)
        assert predictions.probabilities[index].tolist() == pytest.approx(chances, abs=1e-5)
        assert predictions.losses[index].item() == pytest.approx(loss, abs=1e-4)


def test_a_temperature_changes_probabilities_and_no_prediction() -> None:
    batches = [Batch(make_pixels(6), torch.arange(6), torch.arange(6))]
    cold, hot = (
        predict_batches(model_factory.build_vit(), batches, PREPROCESS, temperature=temperature, num_classes=7)
        for temperature in (1.0, 3.0)
    )
    for name in ("classes", "correct", "images"):
        assert torch.equal(getattr(cold, name), getattr(hot, name)), name
    assert (hot.probabilities[:, 0] < cold.probabilities[:, 0]).all()  # the hotter, the less sure


class Left(nn.Module):
    """Logits that tell an image from its mirror image."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([images[:, 0, 0, 0], images[:, 0, 0, -1], images.sum((1, 2, 3))], dim=1)


def test_flipped_evaluation_is_the_mean_of_both_and_a_subset_its_columns() -> None:
    images = torch.rand(4, 3, 2, 5, generator=torch.Generator().manual_seed(0))
    plain, mirrored = EvalWrapper(Left())(images), EvalWrapper(Left(), flip_tta=True)(images)
    torch.testing.assert_close(mirrored[:, 0], (plain[:, 0] + plain[:, 1]) / 2)
    torch.testing.assert_close(mirrored[:, 2], plain[:, 2])
    torch.testing.assert_close(EvalWrapper(Left(), outputs=[2, 0])(images), plain[:, [2, 0]])


def test_targets_become_the_models_outputs() -> None:
    pixels, positions = torch.zeros(3, 1, 1, 1, dtype=torch.uint8), torch.arange(3)
    (batch,) = relabel_batches([Batch(pixels, torch.tensor([1, 0, 1]), positions)], [4, 2], 6)
    assert batch.targets.tolist() == [2, 4, 2]
    (multi_label,) = relabel_batches([Batch(pixels, torch.tensor([[1.0, 0], [0, 1], [1, 1]]), positions)], [2, 0], 3)
    assert multi_label.targets.tolist() == [[0, 0, 1], [1, 0, 0], [1, 0, 1]]
