"""The evaluation of a model on a split: ranks add up, outputs are restricted, unusable models are refused."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests import making
from tests.data.pictures import folder
from vitrail.data.dataset import Split
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.evaluate.evaluator import EvaluatedModel, evaluate_split, make_evaluated_model

CPU = torch.device("cpu")


@pytest.fixture
def split(tmp_path: Path) -> Split:
    return open_dataset(str(folder(tmp_path, "test", each=3))).splits["test"]


@pytest.fixture
def model() -> EvaluatedModel:
    return make_evaluated_model(making.trained(making.vit()), "model")


def test_ranks_evaluate_a_share_each_and_add_up(split: Split, model: EvaluatedModel) -> None:
    expected = evaluate_split(model, split, [3, 5], device=CPU, batch=4)
    assert expected.predictions.labels.tolist() == [3, 3, 3, 5, 5, 5]
    first, second = (evaluate_split(model, split, [3, 5], device=CPU, batch=4, rank=r, world=2) for r in (0, 1))
    assert (first.counts + second.counts).correct == expected.counts.correct
    probabilities = torch.cat([first.predictions.probabilities, second.predictions.probabilities])
    torch.testing.assert_close(probabilities, expected.predictions.probabilities)


def test_only_allowed_outputs_are_predicted(split: Split, model: EvaluatedModel) -> None:
    evaluation = evaluate_split(model, split, [3, 5], device=CPU, batch=4, allowed_outputs=[5, 1, 3])
    assert evaluation.predictions.classes.shape == (6, 3)
    assert evaluation.predictions.labels.tolist() == [2, 2, 2, 0, 0, 0]  # columns of the allowed outputs
    torch.testing.assert_close(evaluation.predictions.probabilities.sum(dim=1), torch.ones(6))


def test_unreadable_images_are_skipped_if_asked_and_all_of_them_are_an_error(
    split: Split, model: EvaluatedModel, tmp_path: Path
) -> None:
    paths = sorted(tmp_path.rglob("*.jpg"))
    paths[1].write_bytes(b"text")
    evaluation = evaluate_split(model, split, [0, 1], device=CPU, batch=4, skip_bad=True)
    assert (evaluation.unreadable, evaluation.counts.images) == ([1], 5)
    with pytest.raises(DataError):
        evaluate_split(model, split, [0, 1], device=CPU, batch=4)
    for path in paths:
        path.write_bytes(b"text")
    with pytest.raises(DataError, match="none of 6 images can be read"):
        evaluate_split(model, split, [0, 1], device=CPU, batch=4, skip_bad=True)


def test_a_model_without_a_head_or_preprocessing_is_refused() -> None:
    with pytest.raises(UsageError, match="has no head"):
        make_evaluated_model(making.trained(making.vit(classes=0)), "model")
    with pytest.raises(UsageError, match="--preprocess imagenet"):
        make_evaluated_model(dataclasses.replace(making.trained(making.vit()), preprocess=None), "model")
