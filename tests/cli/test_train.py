"""`vitrail train` as a user calls it, and what all runs of the command line share."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.data.image_files import encode_image, make_image, write_image_folder
from vitrail import recipes
from vitrail.config import OptimizerConfig, ScheduleConfig
from vitrail.evaluation.predictions import Counts
from vitrail.formatting import format_duration
from vitrail.recipes import recipe_file
from vitrail.training import dataset_checks
from vitrail.training.recipe_overrides import RecipeOverrides, override_recipe, shorten_warmup
from vitrail.training.run_folder import choose_next_folder
from vitrail.training.run_results import find_weakest_class, summarize_result
from vitrail.weights.load import load

HERE = ("--workers", "0", "--device", "cpu")
DIGITS = ("train", "digits", "--data", "digits", *HERE)
PICTURES = {
    *("results.png", "confusion_matrix.png", "confusion_matrix_normalized.png", "reliability.png"),
    *("train_batch0.jpg", "val_batch0_labels.jpg", "val_batch0_pred.jpg", "top_losses.jpg"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_command_trains_and_says_where_the_weights_are(tmp_path: Path, capsys: Capture) -> None:
    code, out, err = vitrail(*DIGITS, "--epochs", "1", capsys=capsys)
    assert code == 0
    assert "of 179 test images correct (" in out
    assert (
        "; weights: runs/train/weights/best.safetensors; report: runs/train/report.html; next: vitrail predict" in out
    )
    assert "epoch 1: loss" in err
    assert {path.name for path in (tmp_path / "runs" / "train").iterdir()} >= PICTURES
    code, out, _ = vitrail(*DIGITS, "--epochs", "0.2", "--seed", "3", "--json", capsys=capsys)
    found = json.loads(out)
    assert (found["folder"], found["seed"], found["split"], found["images"]) == ("runs/train-2", 3, "test", 179)
    assert found["top1"] == found["correct"] / 179
    end = json.loads((tmp_path / "runs" / "train-2" / "events.jsonl").read_text().splitlines()[-1])
    assert all(found[name] == end[name] for name in ("top1", "top5", "loss", "temperature", "calibration_error"))


def test_a_dry_run_shows_what_would_be_done_and_trains_nothing(tmp_path: Path, capsys: Capture) -> None:
    code, out, _ = vitrail(*DIGITS, "--epochs", "1", "--dry-run", capsys=capsys)
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in out.splitlines() if line)
    assert lines["data"] == "digits: train 1,439, val 179, test 179"
    assert lines["steps"] == "23 with a batch of 64, 1 epoch"
    assert lines["optimizer"] == "muon, learning rate 0.01, weight decay 0.05"
    assert lines["augmentation"] == "pad crop, no flip, mixup 0.2"
    assert out.endswith("Nothing was trained.\n")
    code, out, _ = vitrail(*DIGITS, "--epochs", "1", "--dry-run", "--json", capsys=capsys)
    found = json.loads(out)
    assert found["steps"] == 23
    assert found["recipe"]["schedule"]["warmup"] == 1  # 50 steps of 1,350, so 0.85 of 23
    assert found["estimate"]["seconds"] > 0
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == [found["picture"]]


def test_bad_images_and_empty_class_folders_are_left_out_of_training_too(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = recipes.get_recipe("digits")
    made = dataclasses.replace(named, batch=8, epochs=1, schedule=ScheduleConfig())
    monkeypatch.setitem(recipes.RECIPES, "short", made)
    write_image_folder(tmp_path / "set", "train", "val", each=6)
    (tmp_path / "set" / "train" / "orchid").mkdir()
    (tmp_path / "set" / "train" / "rose" / "0.jpg").write_bytes(b"<html>")
    command = ("train", "short", "--data", "./set", *HERE)
    code, _, err = vitrail(*command, capsys=capsys)
    assert code == 0, err
    assert "warning: 1 class folder without an image left out: orchid\n" in err
    assert "warning: 1 image of 24 cannot be read, such as train/rose/0.jpg: " in err
    report = json.loads((tmp_path / "runs" / "train" / "data_report.json").read_text())
    assert ([row["name"] for row in report["bad"]], report["empty_classes"]) == (["train/rose/0.jpg"], ["orchid"])
    code, _, err = vitrail(*command, "--strict", capsys=capsys)
    assert (code, "orchid: remove them, or omit --strict" in err) == (3, True)
    (tmp_path / "set" / "train" / "orchid").rmdir()
    code, _, err = vitrail(*command, "--strict", capsys=capsys)
    assert (code, "--strict accepts none" in err) == (3, True)
    write_image_folder(tmp_path / "one", "train", "val", classes=("rose",), each=3)
    code, _, err = vitrail("train", "short", "--data", "./one", *HERE, capsys=capsys)
    assert (code, "has one class, rose, and a classifier needs two or more" in err) == (3, True)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes without labels that take seconds: mpp-small and mae-small, of 16 patches of 4 x 4 pixels."""
    for kind in ("mpp", "mae"):
        named = recipes.get_recipe(f"{kind}-cifar10")
        settings = named.settings | {"width": 32, "depth": 1, "mlp": 64, "heads": 2}
        made = dataclasses.replace(
            named, settings=settings, image_size=16, batch=8, epochs=2, schedule=ScheduleConfig()
        )
        monkeypatch.setitem(recipes.RECIPES, f"{kind}-small", made)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["mpp", "mae"])
def test_images_without_labels_make_a_model_that_every_command_takes(
    tmp_path: Path, capsys: Capture, kind: str
) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(40):
        (tmp_path / "photos" / f"{number}.jpg").write_bytes(encode_image(make_image(number)))
    code, out, err = vitrail("train", f"{kind}-small", "--data", "./photos", "--out", "run", *HERE, capsys=capsys)
    assert code == 0
    hidden = {"mpp": 8, "mae": 12}[kind]
    colours = r", \d+\.\d% of the colors correct" if kind == "mpp" else ""
    assert re.fullmatch(
        rf"val: loss \d+\.\d+ of {4 * hidden} masked patches{colours} \(run/weights/best.safetensors\)\n", out
    )
    assert "epoch 2: loss" in err
    found = {path.name for path in (tmp_path / "run").iterdir()}
    assert found >= {"results.png", "train_batch0.jpg", "reconstruction.jpg"}
    assert not found & {"confusion_matrix.png", "predictions.csv"}
    write_image_folder(tmp_path / "set", "train", "val", "test", each=4)
    model = ("--model", "run/weights/best.safetensors")
    code, out, _ = vitrail("finetune", "./set", *model, "--epochs", "2", "--out", "tuned", *HERE, capsys=capsys)
    assert (code, "of 8 test images correct" in out) == (0, True)
    code, out, _ = vitrail("probe", model[1], "./set", "--methods", "few-shot", "--shots", "1", *HERE, capsys=capsys)
    assert code == 0
    assert "head: none, the model ends with its features" in vitrail("info", model[1], capsys=capsys)[1]
    code, _, err = vitrail("predict", model[1], "photos/0.jpg", "--device", "cpu", capsys=capsys)
    assert (code, "the model has no head" in err) == (2, True)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["mpp", "mae"])
def test_bad_images_that_nobody_looked_for_are_left_out_of_masked_training(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(dataset_checks, "_MAX_SCANNED_IMAGES", 10)
    write_image_folder(tmp_path / "set", "train", "val", each=8)
    bad = [f"{split}/rose/3.jpg" for split in ("train", "val")]
    for name in bad:
        (tmp_path / "set" / name).write_bytes(b"<html>")
    code, _, err = vitrail("train", f"{kind}-small", "--data", "./set", "--out", "run", *HERE, capsys=capsys)
    assert code == 0, err
    assert "warning: 2 images cannot be read, such as" in err
    assert sorted((tmp_path / "run" / "unreadable.txt").read_text().splitlines()) == bad


@pytest.mark.usefixtures("small")
def test_a_masked_run_is_planned_dry_and_has_another_target_if_that_is_asked_for(capsys: Capture) -> None:
    command = ("train", "mpp-small", "--data", "digits", "--dry-run", *HERE)
    code, out, _ = vitrail(*command, capsys=capsys)
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in out.splitlines() if line)
    assert lines["masked"] == "8 of 16 patches (mpp), target: mean-color"
    found = json.loads(vitrail(*command, "--target", "4x4-colors", "--json", capsys=capsys)[1])
    assert found["recipe"]["masked"] == {"kind": "mpp", "mask_ratio": 0.5, "target": "4x4-colors"}
    code, _, err = vitrail(*DIGITS, "--target", "pixels", capsys=capsys)
    assert (code, "--target pixels is for recipes that mask patches" in err) == (2, True)
    code, _, err = vitrail(*command, "--balanced", capsys=capsys)
    assert (code, "is for learning from labels, and this recipe is masked" in err) == (2, True)


def test_a_recipe_that_does_not_fit_is_said_at_once(capsys: Capture) -> None:
    code, _, err = vitrail("train", "vit-b16-i21k", "--data", "digits", "--dry-run", "--warmup", "100", capsys=capsys)
    assert code == 2
    assert "a warm-up of 100 steps and a cooldown of 0 do not fit into 32 steps; shorten them (--warmup)" in err
    code, _, err = vitrail("train", "digit", "--data", "digits", capsys=capsys)
    assert code == 2
    assert "did you mean digits?" in err


def test_a_warm_up_for_a_larger_dataset_is_shortened_to_fit(tmp_path: Path, capsys: Capture) -> None:
    """The recipe's 3,906 steps are for CIFAR-10's 50,000 images."""
    photos = write_image_folder(tmp_path / "photos", "train", "val", each=20)
    given = ("train", "mpp-cifar10", "--data", str(photos), "--batch", "8", "--epochs", "10", "--dry-run", *HERE)
    code, out, err = vitrail(*given, capsys=capsys)
    assert code == 0, err
    said = re.search(r"warm-up of (\S+) steps is for a larger dataset; this run of (\d+) steps takes (\d+)", err)
    assert said is not None
    assert int(said[3]) == int(said[2]) // 10
    assert f"{said[3]} steps of warm-up" in out
    recipe = override_recipe(recipes.get_recipe("digits"), RecipeOverrides())
    assert shorten_warmup(recipe, 1439, pytest.fail) is recipe, "its own dataset"


def test_a_batch_larger_than_the_training_set_is_noted(tmp_path: Path, capsys: Capture) -> None:
    """As a recipe file without `batch` has it, whose default is the paper's 4,096."""
    write_image_folder(tmp_path / "photos", "train", "val", each=3)
    text = recipe_file.format_recipe(recipes.get_recipe("digits"), "digits")
    (tmp_path / "my.toml").write_text(re.sub("(?m)^batch .*\n", "", text))
    command = ("train", "my.toml", "--data", "photos", "--epochs", "2", "--dry-run", *HERE)
    code, _, err = vitrail(*command, capsys=capsys)
    assert code == 0, err
    large = (
        "note: the batch of 4,096 is larger than the training set of 6 images, so the run has only 1 step; --batch N"
    )
    assert large in err
    code, _, err = vitrail(*command, "--batch", "6", capsys=capsys)
    assert (code, "is larger than" in err) == (0, False), err


def test_a_bad_image_ends_a_run_with_advice_and_without_a_folder(tmp_path: Path, capsys: Capture) -> None:
    root = write_image_folder(tmp_path / "set", "train", "val", each=3)
    (root / "train" / "rose" / "1.jpg").write_bytes(b"<html>")
    sizes = ("--batch", "4", "--epochs", "2", "--warmup", "1")
    code, _, err = vitrail("train", "digits", "--data", "./set", "--strict", *sizes, *HERE, capsys=capsys)
    assert code == 3
    assert "train/rose/1.jpg: is not an image" in err
    assert "vitrail data check ./set" in err
    assert not (tmp_path / "runs" / "train").exists()


def test_a_learning_rate_that_diverges_ends_with_6(tmp_path: Path, capsys: Capture) -> None:
    code, _, err = vitrail(*DIGITS, "--epochs", "3", "--lr", "1e30", capsys=capsys)
    assert code == 6
    assert "nothing was updated" in err
    assert not (tmp_path / "runs" / "train").exists()


def test_the_next_folder_is_the_first_that_is_free(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        names.append(str(choose_next_folder("train")))
        (tmp_path / names[-1]).mkdir(parents=True)
    assert names == ["runs/train", "runs/train-2", "runs/train-3"]


def test_a_run_ends_with_its_accuracy_its_weakest_class_and_what_to_do_next() -> None:
    confusion = torch.tensor([[9, 1, 0], [2, 4, 4], [0, 0, 10]])
    counts = Counts(30, 23, 30, 1.0, confusion)
    weakest = find_weakest_class(counts, ("cat", "dog", "cow"))
    assert weakest == {"class": "dog", "accuracy": pytest.approx(0.4), "images": 10, "taken_for": "cow"}
    assert find_weakest_class(Counts(30, 30, 30, 1.0, torch.eye(3).long() * 10), ("cat", "dog", "cow")) is None
    found = {"split": "test", "top1": 0.95, "images": 1200, "macro": 0.94, "folder": "runs/train", "trained_on": False}
    found |= {"interval": [0.936, 0.961], "weakest": weakest, "report": "runs/train/report.html"}
    where = "; weights: runs/train/weights/best.safetensors; report: runs/train/report.html"
    where += "; next: vitrail predict runs/train IMAGES, vitrail serve runs/train"
    accuracy, worst = "95.0% of 1,200 test images correct (93.6 to 96.1)", "; weakest: dog, 40%, taken for cow"
    assert summarize_result(found) == accuracy + worst + where
    flattered = summarize_result(found | {"macro": 0.5})
    assert flattered == f"{accuracy}, 50.0% of a class on average{worst}{where}"
    trained_on = summarize_result(found | {"split": "val", "trained_on": True, "weakest": None, "images": 1})
    assert trained_on == f"95.0% of 1 image correct (on images that were trained on){where}"
    assert "report" not in summarize_result(found | {"report": None})
    assert summarize_result(found | {"macro": None}) == summarize_result(
        found
    )  # several labels: there is no such average


def changed(**given: Any) -> Any:
    """A recipe of 100 epochs, batch 64 and 40 steps of warm-up, with these in their place."""
    recipe = dataclasses.replace(
        recipes.get_recipe("digits"),
        batch=64,
        epochs=100,
        schedule=ScheduleConfig(warmup=40),
        optimizer=OptimizerConfig(kind="muon", lr=1e-2, head_lr=2e-2, adam_lr=1e-3),
    )
    return override_recipe(recipe, RecipeOverrides(**given))


def test_a_shorter_run_has_a_shorter_warm_up_and_a_given_one_stays() -> None:
    assert changed().schedule.warmup == 40
    assert changed(epochs=25).schedule.warmup == 10
    assert changed(epochs=200).schedule.warmup == 40
    assert changed(batch=128).schedule.warmup == 20  # half of the steps
    assert changed(batch=32).schedule.warmup == 40
    assert changed(batch=128, epochs=200).schedule.warmup == 40
    assert changed(epochs=25, warmup=33).schedule.warmup == 33
    assert (changed(epochs=25, batch=8).epochs, changed(batch=8).batch) == (25, 8)


def test_a_learning_rate_takes_those_of_head_and_adam_with_it() -> None:
    optimizer = changed(lr=2e-2).optimizer
    assert (optimizer.lr, optimizer.head_lr, optimizer.adam_lr) == (2e-2, pytest.approx(4e-2), pytest.approx(2e-3))


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (89, "89 s"), (91, "2 min"), (3600, "60 min"), (93_784, "26 h 3 min"), (432_000, "5.0 days")],
)
def test_a_duration_is_said_as_people_do(seconds: float, said: str) -> None:
    assert format_duration(seconds) == said


@pytest.mark.slow
def test_digits_are_learned_within_two_points_of_the_nearest_neighbor(tmp_path: Path, capsys: Capture) -> None:
    """The recipe as a user runs it: seed 0, 179 test digits, of which the nearest neighbor by pixels gets 175."""
    code, out, _ = vitrail(*DIGITS, "--json", capsys=capsys)
    assert code == 0
    assert json.loads(out)["correct"] >= 175 - 0.02 * 179


def test_a_recipe_of_the_paper_trains_with_other_settings_and_its_hidden_head_is_dropped_by_finetune(
    tmp_path: Path, capsys: Capture
) -> None:
    write_image_folder(tmp_path / "set", "train", "val", each=4)
    settings = ("depth=1", "width=32", "mlp=64", "heads=2", "image_size=32", "positions=learned-2d", "optimizer=muon",
                "weight_decay=0.5", "decay=cosine")  # fmt: skip
    train = ("train", "vit-b16-i21k", "--data", "./set", "--epochs", "1", "--batch", "8", "--warmup", "0", *HERE)
    code, _, err = vitrail(*train, "--set", *settings, capsys=capsys)
    assert code == 0, err
    config = json.loads((tmp_path / "runs" / "train" / "config.json").read_text())["recipe"]
    assert (config["optimizer"]["kind"], config["optimizer"]["weight_decay"], config["schedule"]["decay"]) == (
        *("muon", 0.5),
        "cosine",
    )
    trained = load("runs/train")
    assert (trained.model.config.positions, trained.model.config.depth, trained.model.config.width) == (
        *("learned-2d", 1),
        32,
    )
    assert trained.model.config.hidden_head
    assert "pre_logits.fc.weight" in trained.model.state_dict()
    code, _, err = vitrail(
        *("finetune", "./set", "--model", "runs/train", "--epochs", "1", "--batch", "8", *HERE), capsys=capsys
    )
    assert code == 0, err
    tuned = load("runs/finetune")
    assert not tuned.model.config.hidden_head
    assert any(text.startswith("pre_logits.fc.weight (32, 32): removed") for text in tuned.origin.changes)
    code, _, err = vitrail(*train, "--set", "positions=3d", capsys=capsys)
    assert code == 2
    assert "positions is '3d'; it must be one of none, learned-1d" in err
