"""VTAB: the tasks are the paper's, lists are read as they are, and the command runs the tasks that are there."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import making
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.data.pictures import encoded, names, picture
from vitrail.data import public_datasets, shards
from vitrail.data.shards import Sample
from vitrail.errors import DataError, UsageError
from vitrail.studies import grid_cell, vtab, vtab_splits, vtab_tasks
from vitrail.studies.vtab_tasks import TASKS
from vitrail.weights.load import load, save

HERE = ("--workers", "0", "--device", "cpu")
SHORT = ("--steps", "2", "--batch", "4", "--image-size", "32")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save(making.trained(making.vit()), tmp_path / "model.safetensors")


def write_lists(root: Path, task: str, **counts: int) -> Path:
    """A task's folder as the benchmark is distributed; image n has class n modulo the number of classes."""
    task_folder = root / task
    (task_folder / "images").mkdir(parents=True)
    number = 0
    for split, name in vtab_splits.LIST_FILES.items():
        lines = []
        for _ in range(counts.get(split, 4)):
            (task_folder / "images" / f"{number:03d}.png").write_bytes(encoded(picture(number, (20, 40)), "PNG"))
            lines.append(f"images/{number:03d}.png {number % TASKS[task].classes}\n")
            number += 1
        (task_folder / name).write_text("".join(lines))
    return root


# --- the tasks -------------------------------------------------------------------------------------------------------


def test_the_tasks_are_the_papers() -> None:
    groups = [sum(task.group == group for task in TASKS.values()) for group in vtab_tasks.TASK_GROUPS]
    assert groups == [7, 4, 8]
    augmentations: dict[tuple[bool, bool], set[str]] = {(task.random_crop, task.flip): set() for task in TASKS.values()}
    for name, task in TASKS.items():
        augmentations[task.random_crop, task.flip].add(name)
    assert augmentations[False, False] == {"dsprites_loc"}
    assert augmentations[True, False] == {"dsprites_ori", "smallnorb_azi"}
    assert augmentations[False, True] == {"clevr_count", "clevr_dist", "dmlab", "kitti"}
    assert len(augmentations[True, True]) == 12
    assert sum(task.classes for task in TASKS.values()) == 940
    with pytest.raises(UsageError, match="VTAB has no task 'mnist'"):
        vtab_tasks.get_task("mnist")


# --- images ----------------------------------------------------------------------------------------------------------


def test_lists_are_read_as_they_are(tmp_path: Path) -> None:
    write_lists(tmp_path, "svhn", train=800, val=200, test=3)
    dataset = vtab_splits.open_vtab_dataset("svhn", tmp_path, 0)
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 800, "val": 200, "test": 3}
    assert (dataset.classes, dataset.notes) == (tuple("0123456789"), ())
    for first, split in ((0, "train"), (800, "val"), (1000, "test")):
        for index in (0, len(dataset.splits[split]) - 1):
            assert dataset.splits[split].get_image_name(index) == f"images/{first + index:03d}.png"
            assert dataset.splits[split].get_labels(index) == ((first + index) % 10,)
    joined = dataset.splits["train"].merge(dataset.splits["val"])
    assert len(joined) == 1000


@pytest.mark.parametrize("line", ["images/1.png 10", "images/1.png", "images/1.png -1", "images/1.png one"])
def test_a_line_that_is_no_path_and_label_is_named(line: str, tmp_path: Path) -> None:
    write_lists(tmp_path, "svhn")
    (tmp_path / "svhn" / "val200.txt").write_text(f"images/000.png 3\n{line}\n")
    with pytest.raises(DataError, match=r"val200.txt, line 2 is .*; it must be a path and 0 to 9"):
        vtab_splits.open_vtab_dataset("svhn", tmp_path, 0)


def test_a_stored_dataset_is_drawn_from_by_seed() -> None:
    """800 and 200 of those there are, the same for a seed, and all of test."""
    samples = [
        Sample(split, f"{split}/{number:04d}.png", encoded(picture(number, (4, 4)), "PNG"), (number % 10,))
        for split, count in (("train", 900), ("val", 250), ("test", 30))
        for number in range(count)
    ]
    shards.write_shards(public_datasets.get_dataset_folder("svhn"), samples, classes=list("0123456789"), origin={})
    assert vtab_splits.find_source_kind("svhn", Path("nowhere")) == "public"
    datasets = [vtab_splits.open_vtab_dataset("svhn", Path("nowhere"), seed) for seed in (0, 0, 1)]
    assert {name: len(split) for name, split in datasets[0].splits.items()} == {"train": 800, "val": 200, "test": 30}
    assert names(datasets[0]) == names(datasets[1])
    assert set(names(datasets[0])["train"]) != set(names(datasets[2])["train"])
    assert names(datasets[0])["test"] == names(datasets[2])["test"]
    assert "seed 1" in datasets[2].notes[0]


def test_a_missing_dataset_is_named_with_its_source(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"sun397 has no test.txt, and Sun397 is not here in another form: https://vision"
    ):
        vtab_splits.open_vtab_dataset("sun397", tmp_path, 0)
    with pytest.raises(DataError, match="has none of 19 tasks"):
        vtab.find_tasks(tmp_path, (), 0)


# --- the runs --------------------------------------------------------------------------------------------------------


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
    with pytest.raises(UsageError, match="each VTAB task sets crop and flip itself"):
        plan(tmp_path, settings=["flip=false"])


def test_evaluation_uses_the_whole_image_and_training_crops_from_seven_sixths(tmp_path: Path) -> None:
    write_lists(tmp_path, "dtd")
    (cell,) = vtab.list_vtab_cells(plan(tmp_path))
    preprocess = grid_cell.prepare_model(cell, vtab_splits.open_vtab_dataset("dtd", tmp_path, 0)).preprocess
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
        accuracies[record["task"]] = record["right"] / 5
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
