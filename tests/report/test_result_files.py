"""The files of a run's results and of an evaluation (the commands: tests/cli/test_finetune.py, test_evaluate.py)."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests import model_factory
from tests.report.run_folders import isolate_home
from vitrail.cli import main
from vitrail.evaluation.predictions import _make_predictions
from vitrail.report.result_files import _format_label_mistakes
from vitrail.weights.load import save

GRIDS = ("train_batch0.jpg", "val_batch0_pred.jpg", "val_batch0_labels.jpg", "top_losses.jpg")
PLOTS = ("results.png", "confusion_matrix.png", "confusion_matrix_normalized.png", "reliability.png")


def test_a_finished_run_has_its_figures(run: Path) -> None:
    for name in (*GRIDS, *PLOTS):
        with Image.open(run / name) as figure:
            figure.verify()


@pytest.mark.parametrize("others", [0, 1])
def test_an_evaluation_has_a_folder_for_each_of_several_models(run: Path, tmp_path: Path, others: int) -> None:
    weights = run / "weights" / "best.safetensors"
    save(
        model_factory.build_trained(model_factory.build_vit(classes=2), labels=("rose", "tulip")),
        tmp_path / "other.safetensors",
    )
    against = ["--against", str(tmp_path / "other.safetensors")] * others
    options = [*against, "--out", str(tmp_path / "out"), "--workers", "0", "--device", "cpu"]
    with isolate_home(tmp_path / "home"):
        assert main(["evaluate", str(weights), str(run.parent / "set"), *options]) == 0
    assert json.loads((tmp_path / "out" / "evaluate.json").read_text())
    assert (tmp_path / "out" / "risk_coverage.png").is_file()
    for number in range(1 + others):
        folder = tmp_path / "out" / (f"model-{number}" if others else "")
        for name in ("predictions.csv", "per_class.csv", "top_losses.jpg", *PLOTS[1:]):
            assert (folder / name).is_file(), name


def test_a_caption_names_the_labels_that_are_missing_and_extra() -> None:
    targets = torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 0]])
    logits = torch.tensor([[9.0, -9, 9, -9], [-9, -9, -9, -9]])
    predictions = _make_predictions(logits, targets, 1.0, multi_label=True)
    assert _format_label_mistakes(predictions, 0, "abcd") == "a; missing b; extra c"
    assert _format_label_mistakes(predictions, 1, "abcd") == "no label"
