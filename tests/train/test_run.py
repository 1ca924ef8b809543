"""A whole run: its folder, its repeatability, and that it learns."""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.data.pictures import folder
from vitrail import recipes
from vitrail.config import Schedule
from vitrail.data.sources import open_data
from vitrail.errors import DataError, UsageError
from vitrail.files import sha256
from vitrail.predict import Classifier
from vitrail.train.run import COLUMNS, Task, run
from vitrail.weights.load import load


def task(**changes: Any) -> Task:
    schedule = Schedule(warmup=5)
    recipe = dataclasses.replace(recipes.named("digits"), epochs=2, schedule=schedule, dropout=0.1, ema=0.9)
    fields = {"recipe": recipe, "dataset": open_data("digits"), "device": torch.device("cpu")}
    return Task(**(fields | changes))


def trained(task: Task, folder: Path) -> Any:
    return run(task, folder, after_step=lambda _: None, after_epoch=lambda _: None)


def test_a_run_leaves_its_story_and_its_weights(tmp_path: Path) -> None:
    counts = trained(task(), tmp_path / "run")
    rows = list(csv.DictReader((tmp_path / "run" / "results.csv").open()))
    assert tuple(rows[0]) == COLUMNS
    assert [float(row["epoch"]) for row in rows] == pytest.approx([1.0007, 2.0], abs=0.05)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["steps"] == 45
    assert "Pillow" in config["jpeg_decoder"]
    assert config["recipe"]["optimiser"]["kind"] == "muon"
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["epoch", "epoch", "end"]
    assert events[-1]["right"] == counts.right
    kept = load(tmp_path / "run" / "weights" / "best.safetensors")
    assert kept.labels == tuple("0123456789")
    split = open_data("digits").splits["test"]
    answers = Classifier(kept, device="cpu")([split.read(index) for index in range(len(split))], top=1)
    right = sum(answer[0][0] == kept.labels[split.labels(index)[0]] for index, answer in enumerate(answers))
    assert right == counts.right  # what predict sees is what the run measured


def test_the_same_run_gives_the_same_bytes_with_workers_too(tmp_path: Path) -> None:
    sums = []
    for number, changes in enumerate(({}, {"workers": 2}, {"seed": 1})):
        trained(task(**changes), tmp_path / str(number))
        sums.append(sha256(tmp_path / str(number) / "weights" / "last.safetensors"))
    assert sums[0] == sums[1] != sums[2]


def test_what_cannot_be_trained_on_is_said_before(tmp_path: Path) -> None:
    root = folder(tmp_path / "set", "train", "val", each=3)
    (root / "train" / "orchid").mkdir()
    with pytest.raises(DataError, match="1 classes have no training image, such as orchid"):
        task(dataset=open_data(str(root)))
    only = folder(tmp_path / "only", "test", each=3)
    with pytest.raises(DataError, match="has the splits test; train and val are needed"):
        task(dataset=open_data(str(only)))
    (tmp_path / "run").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        trained(task(), tmp_path / "run")


def test_the_command_trains_and_a_dry_run_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("train", "digits", "--data", "digits", "--epochs", "1", "--workers", "0", "--device", "cpu")
    code, out, _ = vitrail(*arguments, "--dry-run", capsys=capsys)
    assert code == 0
    assert json.loads(out)["steps"] == 23
    assert list(tmp_path.iterdir()) == []
    code, out, err = vitrail(*arguments, capsys=capsys)
    assert code == 0
    assert "of 179 images right (runs/train/weights/best.safetensors)" in out
    assert "epoch 1: loss" in err
    code, _, err = vitrail("train", "vit-b16-i21k", "--data", "digits", "--dry-run", capsys=capsys)
    assert code == 2
    assert "a warm-up of 10000 steps and a cooldown of 0 do not fit into 32 steps; shorten them (--warmup)" in err
    code, out, _ = vitrail("train", "vit-b16-i21k", "--data", "digits", "--dry-run", "--warmup", "3", capsys=capsys)
    assert json.loads(out)["recipe"]["schedule"]["warmup"] == 3
    code, _, err = vitrail("train", "digit", "--data", "digits", capsys=capsys)
    assert code == 2
    assert "did you mean digits?" in err


def test_a_bad_image_ends_a_run_with_advice_and_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    root = folder(tmp_path / "set", "train", "val", each=3)
    (root / "train" / "rose" / "1.jpg").write_bytes(b"<html>")
    arguments = (
        "train",
        "digits",
        "--data",
        "./set",
        "--batch",
        "4",
        "--epochs",
        "2",
        "--workers",
        "0",
        "--device",
        "cpu",
    )
    code, _, err = vitrail(*arguments, "--warmup", "1", capsys=capsys)
    assert code == 3
    assert "train/rose/1.jpg is no image" in err
    assert "vitrail data check ./set" in err
    assert not (tmp_path / "runs" / "train").exists()


def test_a_learning_rate_that_diverges_ends_with_6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("train", "digits", "--data", "digits", "--epochs", "3", "--workers", "0", "--device", "cpu")
    code, _, err = vitrail(*arguments, "--lr", "1e30", capsys=capsys)
    assert code == 6
    assert "nothing was updated" in err


@pytest.mark.slow
def test_digits_are_learned_within_two_points_of_the_nearest_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The demo as a user runs it: seed 0, 179 test digits."""
    monkeypatch.chdir(tmp_path)
    code, out, _ = vitrail("demo", "--json", capsys=capsys)
    assert code == 0
    found = json.loads(out)
    assert found["nearest_neighbour"] == 175
    assert found["right"] >= found["nearest_neighbour"] - 0.02 * 179
