"""VTAB: the runs are the paper's, and the command runs the tasks whose images are there."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import model_factory
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.studies.test_vtab_tasks import write_lists
from vitrail.errors import DataError, UsageError
from vitrail.studies import vtab, vtab_tasks
from vitrail.weights.load import load, save

HERE = ("--workers", "0", "--device", "cpu")
SHORT = ("--steps", "2", "--batch", "4", "--image-size", "32")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model.safetensors")


def test_a_missing_dataset_is_named_with_its_source(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"sun397 has no test.txt, and Sun397 is not here in another form: https://vision"
    ):
        vtab_tasks.open_vtab_dataset("sun397", tmp_path, 0)
    with pytest.raises(DataError, match="has none of 19 tasks"):
        vtab.find_tasks(tmp_path, (), 0)


def plan(tmp_path: Path, **changes: Any) -> vtab.VtabStudy:
    tasks, _ = vtab.find_tasks(tmp_path, (), 0)
    settings = {"steps": None, "batch": None, "image_size": None, "runs": 1, "seed": 0, "micro_batches": 1} | changes
    return vtab.plan_vtab(tmp_path, tasks, "model.safetensors", load("model.safetensors"), preprocess=None, **settings)


def test_a_run_is_the_papers_on_all_thousand_images(tmp_path: Path) -> None:
    for task in ("dtd", "kitti"):
        write_lists(tmp_path, task, train=12, val=4)
    textures, distances = vtab.list_vtab_cells(plan(tmp_path))
    for cell in (textures, distances):
        recipe = cell.recipe
        assert (recipe.batch, recipe.image_size, recipe.schedule.warmup, recipe.optimizer.lr) == (512, 384, 200, 0.01)
        assert recipe.epochs * 16 == 2500 * 512
        assert (cell.train_on_val, cell.eval_split) == (True, "test")
    assert (textures.recipe.augment.crop, textures.recipe.augment.flip) == ("window", True)
    assert (distances.recipe.augment.crop, distances.recipe.augment.flip) == ("squash", True)


def test_settings_reach_the_runs_and_crop_and_flip_stay_the_tasks(tmp_path: Path) -> None:
    write_lists(tmp_path, "dtd", train800=2, val200=1, test=1)
    (cell,) = vtab.list_vtab_cells(plan(tmp_path, settings=["optimizer=adam", "lr=0.001", "mixup=0.2"]))
    assert (cell.recipe.optimizer.kind, cell.recipe.optimizer.lr, cell.recipe.augment.mixup) == ("adam", 0.001, 0.2)
    assert (cell.recipe.augment.crop, cell.recipe.augment.flip) == ("window", True)
    for setting in ("flip=false", "augment.flip=false", "crop=squash", "augment.crop=squash"):
        with pytest.raises(UsageError, match="cannot be set here: each VTAB task sets crop and flip itself"):
            plan(tmp_path, settings=[setting])
    (cell,) = vtab.list_vtab_cells(plan(tmp_path, steps=50, settings=["warmup=7"]))
    assert cell.recipe.schedule.warmup == 7


def test_the_command_runs_available_tasks_and_names_missing_ones(tmp_path: Path, capsys: Capture) -> None:
    for task in ("dtd", "kitti"):
        write_lists(tmp_path / "vtab", task, test=5)
    code, out, err = vitrail("study", "vtab", "model.safetensors", "--data-root", "vtab", *SHORT, *HERE, capsys=capsys)
    assert code == 0, err
    assert err.count("missing: ") == 17
    assert "missing: Clevr-Count, vtab/clevr_count/train800.txt and so on; from https://cs.stanford.edu" in err
    assert "missing: CIFAR-100, vtab/cifar/train800.txt and so on; from vitrail data get cifar100" in err
    assert "2 of 19 tasks" in out
    assert "the paper, ViT-L/16 (I21k)  72.72%" in out
    study_folder = tmp_path / "runs" / "vtab-model.safetensors"
    with Image.open(study_folder / "study.png") as image:
        assert min(image.size) > 100
    code, out, err = vitrail(
        "study", "vtab", "model.safetensors", "--data-root", "vtab", *SHORT, *HERE, "--json", capsys=capsys
    )
    summary = json.loads(out)
    assert ": started" not in err
    accuracies = {}
    for line in (study_folder / "results.jsonl").read_text().splitlines():
        record = json.loads(line)
        accuracies[record["task"]] = record["correct"] / 5
        assert (record["images"], record["draw"]) == (5, "VTAB")
    assert summary["mean"] == pytest.approx(np.mean([accuracies["dtd"], accuracies["kitti"]]))
    assert summary["groups"] == pytest.approx({"Natural": accuracies["dtd"], "Structured": accuracies["kitti"]})
    assert len(summary["missing"]) == 17


def test_means_are_of_tasks_then_of_seeds() -> None:
    study = {"model": "m", "tasks": {"dtd": {}, "svhn": {}, "kitti": {}}}
    shares = {
        ("dtd", 0): 0.2,
        ("svhn", 0): 0.4,
        ("kitti", 0): 0.9,
        ("dtd", 1): 0.4,
        ("svhn", 1): 0.6,
        ("kitti", 1): 0.8,
    }
    results = [
        {"task": task, "seed": seed, "status": "done", "top1": share, "draw": "VTAB"}
        for (task, seed), share in shares.items()
    ]
    summary = vtab.summarize_vtab(study, results)
    assert summary["tasks"]["dtd"]["mean"] == pytest.approx(0.3)
    assert summary["groups"] == pytest.approx({"Natural": 0.4, "Structured": 0.85})
    assert (summary["mean"], summary["std"]) == (pytest.approx(0.55), pytest.approx(0.1 / 2**0.5))
    assert (
        vtab.summarize_vtab(study, results[:-1])["n"] == 1
    )  # the second seed lacks a task, so its mean is another thing
    groups = vtab.group_by_task_group(summary)
    assert list(groups) == ["Natural, mean 40.0%", "Structured, mean 85.0%"]
    assert list(groups["Natural, mean 40.0%"]) == ["DTD", "SVHN"]
