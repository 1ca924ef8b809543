"""One cell of a study: its preprocessing, and classes without a training image."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests import model_factory
from tests.studies.test_vtab import plan
from tests.studies.test_vtab_tasks import write_lists
from vitrail.studies import grid_cell, vtab, vtab_tasks
from vitrail.weights.load import save


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model.safetensors")


def test_evaluation_uses_the_whole_image_and_training_crops_from_seven_sixths(tmp_path: Path) -> None:
    write_lists(tmp_path, "dtd")
    (cell,) = vtab.list_vtab_cells(plan(tmp_path))
    preprocess = grid_cell.prepare_model(cell, vtab_tasks.open_vtab_dataset("dtd", tmp_path, 0)).preprocess
    assert preprocess is not None
    assert (preprocess.size, preprocess.resize) == ((384, 384), (384, 384))
    assert grid_cell.add_crop_margin(preprocess).resize == (448, 448)
    assert dataclasses.replace(grid_cell.add_crop_margin(preprocess), resize=preprocess.resize) == preprocess


def test_classes_without_a_training_image_are_allowed(tmp_path: Path) -> None:
    """Of Sun397's classes a draw of 1,000 images misses some; 8 images miss most."""
    write_lists(tmp_path, "sun397")
    (cell,) = vtab.list_vtab_cells(plan(tmp_path, steps=1, batch=4, image_size=32))
    result = grid_cell.run_cell(cell, tmp_path / "run", "cpu", 0)
    assert (result["split"], result["images"], result["steps"]) == ("test", 4, 1)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["preprocess"]["resize"], config["train_preprocess"]["resize"]) == ([32, 32], [37, 37])
