"""Evaluation from Python, without the command line (the command: tests/cli/test_evaluate.py)."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import model_factory
from tests.data.image_files import write_image_folder
from tests.model.test_quantized import needs_int8
from vitrail.config import Precision
from vitrail.data.dataset import Split
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.evaluation import dataset_evaluation
from vitrail.evaluation.dataset_evaluation import (
    EvaluatedModel,
    EvaluationSettings,
    evaluate_model,
    make_evaluated_model,
)
from vitrail.inference.classifier import Classifier
from vitrail.runtime.distributed import ProcessGroup

CPU = torch.device("cpu")


def test_models_are_evaluated_on_test_and_compared(tmp_path: Path) -> None:
    dataset = open_dataset(str(write_image_folder(tmp_path / "images", "train", "val", "test", each=4)))
    notes: list[str] = []
    models = [
        make_evaluated_model(
            model_factory.build_trained(model_factory.build_vit(seed=seed, classes=2), labels=dataset.classes),
            f"model {seed}",
        )
        for seed in (0, 1)
    ]
    dataset_evaluation.check_evaluable(dataset, None)
    images = dataset_evaluation.select_images(dataset, None, models, notes.append)
    assert notes == ["measuring on test: 8 images"]
    settings = EvaluationSettings(device=CPU, batch=3)
    results = dataset_evaluation.evaluate_models(models, dataset, images, settings)
    facts = dataset_evaluation.collect_facts(dataset, results, settings)
    assert [model["images"] for model in facts["models"]] == [8, 8]
    (pair,) = facts["comparisons"]
    assert pair["both"] + pair["only_first"] == facts["models"][0]["correct"]
    assert dataset_evaluation.list_unreadable(images, results) == []
    with pytest.raises(DataError, match="has no train2"):
        dataset_evaluation.check_evaluable(dataset, "train2")


# --- one model on a split: ranks add up, outputs are restricted, unusable models are refused -------------------------


@pytest.fixture
def split(tmp_path: Path) -> Split:
    return open_dataset(str(write_image_folder(tmp_path, "test", each=3))).splits["test"]


@pytest.fixture
def model() -> EvaluatedModel:
    return make_evaluated_model(model_factory.build_trained(model_factory.build_vit()), "model")


def test_ranks_evaluate_a_share_each_and_add_up(split: Split, model: EvaluatedModel) -> None:
    settings = EvaluationSettings(device=CPU, batch=4)
    expected = evaluate_model(model, split, [3, 5], settings)
    assert expected.predictions.labels.tolist() == [3, 3, 3, 5, 5, 5]
    first, second = (
        evaluate_model(model, split, [3, 5], dataclasses.replace(settings, group=ProcessGroup(rank, 2)))
        for rank in (0, 1)
    )
    assert (first.counts + second.counts).correct == expected.counts.correct
    probabilities = torch.cat([first.predictions.probabilities, second.predictions.probabilities])
    torch.testing.assert_close(probabilities, expected.predictions.probabilities)


def test_only_allowed_outputs_are_predicted(split: Split, model: EvaluatedModel) -> None:
    evaluation = evaluate_model(model, split, [3, 5], EvaluationSettings(device=CPU, batch=4), [5, 1, 3])
    assert evaluation.predictions.classes.shape == (6, 3)
    assert evaluation.predictions.labels.tolist() == [2, 2, 2, 0, 0, 0]  # columns of the allowed outputs
    torch.testing.assert_close(evaluation.predictions.probabilities.sum(dim=1), torch.ones(6))


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("int8", marks=needs_int8)])
def test_what_is_measured_in_a_precision_is_what_is_predicted_in_it(split: Split, precision: Precision) -> None:
    trained = model_factory.build_trained(model_factory.build_vit())
    model = make_evaluated_model(trained, "model")
    settings = EvaluationSettings(device=CPU, batch=4)
    exact = evaluate_model(model, split, [3, 5], settings).predictions
    lower = evaluate_model(model, split, [3, 5], dataclasses.replace(settings, precision=precision)).predictions
    images = [source for _, source in split.read_images(range(len(split)))]
    expected = Classifier(trained, device="cpu", precision=precision).predict_proba(images)
    assert not torch.equal(lower.probabilities, exact.probabilities)
    torch.testing.assert_close(lower.probabilities[:, 0], expected.amax(dim=1), rtol=0, atol=1e-6)


def test_timms_own_network_is_measured_in_float32(split: Split, model: EvaluatedModel) -> None:
    other = dataclasses.replace(model, network=nn.Identity())
    with pytest.raises(UsageError, match="timm's own network, which is evaluated in float32 only"):
        evaluate_model(other, split, [0], EvaluationSettings(device=CPU, precision="bfloat16"))


def test_unreadable_images_are_skipped_if_asked_and_all_of_them_are_an_error(
    split: Split, model: EvaluatedModel, tmp_path: Path
) -> None:
    settings = EvaluationSettings(device=CPU, batch=4)
    paths = sorted(tmp_path.rglob("*.jpg"))
    paths[1].write_bytes(b"text")
    evaluation = evaluate_model(model, split, [0, 1], settings)
    assert (evaluation.unreadable, evaluation.counts.images) == ([1], 5)
    with pytest.raises(DataError):
        evaluate_model(model, split, [0, 1], dataclasses.replace(settings, strict=True))
    for path in paths:
        path.write_bytes(b"text")
    with pytest.raises(DataError, match="none of 6 images can be read"):
        evaluate_model(model, split, [0, 1], settings)


def test_a_model_without_a_head_or_preprocessing_is_refused() -> None:
    with pytest.raises(UsageError, match="has no head"):
        make_evaluated_model(model_factory.build_trained(model_factory.build_vit(classes=0)), "model")
    with pytest.raises(UsageError, match="--preprocess imagenet"):
        make_evaluated_model(
            dataclasses.replace(model_factory.build_trained(model_factory.build_vit()), preprocess=None), "model"
        )
