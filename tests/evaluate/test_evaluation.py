"""Evaluation from Python, without the command line (the command: tests/cli/test_evaluate.py)."""

from pathlib import Path

import pytest
import torch

from tests import making
from tests.data.pictures import folder
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError
from vitrail.evaluate import evaluation
from vitrail.evaluate.evaluation import EvaluationSettings
from vitrail.evaluate.evaluator import make_evaluated_model

CPU = torch.device("cpu")


def test_models_are_evaluated_on_test_and_compared(tmp_path: Path) -> None:
    dataset = open_dataset(str(folder(tmp_path / "images", "train", "val", "test", each=4)))
    notes: list[str] = []
    models = [
        make_evaluated_model(making.trained(making.vit(seed=seed, classes=2), labels=dataset.classes), f"model {seed}")
        for seed in (0, 1)
    ]
    evaluation.check_evaluable(dataset, None)
    images = evaluation.select_images(dataset, None, models, notes.append)
    assert notes == ["measuring on test: 8 images"]
    settings = EvaluationSettings(device=CPU, batch=3)
    results = evaluation.evaluate_models(models, dataset, images, settings)
    facts = evaluation.collect_facts(dataset, results, settings)
    assert [model["images"] for model in facts["models"]] == [8, 8]
    (pair,) = facts["comparisons"]
    assert pair["both"] + pair["only_first"] == facts["models"][0]["right"]
    assert evaluation.list_unreadable(images, results) == []
    with pytest.raises(DataError, match="has no train2"):
        evaluation.check_evaluable(dataset, "train2")  # type: ignore[arg-type]
