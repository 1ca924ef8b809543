"""`vitrail study sweep`: the learning rate is chosen without reading test, then test is evaluated for each seed."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests import model_factory
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.data.image_files import list_names, write_image_folder
from vitrail.data.sources import open_dataset
from vitrail.errors import CellsError, DataError, UsageError
from vitrail.studies import grid, sweep
from vitrail.studies.grid import read_results
from vitrail.weights.load import load, save

OPTIONS = ("--rates", "0.01", "--steps", "4", "--batch", "8", "--image-size", "32", "--runs", "1")
HERE = ("--workers", "0", "--device", "cpu")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with images of two classes and a small model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_image_folder(tmp_path / "set", "train", "val", "test", each=4)
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model.safetensors")


def run_sweep(*options: str, capsys: Capture) -> tuple[int, str, str]:
    return vitrail("study", "sweep", "./set", "--model", "model.safetensors", *options, *HERE, capsys=capsys)


def plan(rates: tuple[float, ...] = (), **changes: Any) -> sweep.Sweep:
    dataset, share = sweep.open_sweep_dataset("./set")
    settings = {"steps": None, "batch": None, "image_size": None, "runs": 3, "seed": 0, "micro_batches": 1} | changes
    trained = load("model.safetensors")
    return sweep.plan_sweep(
        "./set", dataset, share, "model.safetensors", trained, rates=rates, preprocess=None, **settings
    )


def test_test_is_not_read_before_the_rate_is_chosen(tmp_path: Path, capsys: Capture) -> None:
    """With test images that cannot even be opened, the choice is made; the run that measures on test is what fails."""
    images = sorted((tmp_path / "set" / "test").rglob("*.jpg"))
    contents = {path: path.read_bytes() for path in images}
    for path in images:
        path.unlink()
        path.symlink_to(tmp_path / "gone" / path.name)
    code, out, err = run_sweep(*OPTIONS, capsys=capsys)
    study_folder = tmp_path / "runs" / "sweep-set-model.safetensors"
    results = read_results(study_folder)
    assert code == 3
    first, name = results
    assert (first, results[first]["status"], results[first]["split"], results[first]["images"]) == (
        "rate-0.01",
        "done",
        "val",
        8,
    )
    assert name == "test-0.01-seed-0"
    assert results[name]["status"] == "failed"
    assert results[name]["error"].startswith("test/rose/0.jpg does not exist")
    assert err.splitlines()[-1].startswith("vitrail: 1 of 2 cells failed; test-")
    assert "(chosen)" in out

    for path, content in contents.items():
        path.unlink()
        path.write_bytes(content)
    code, out, err = run_sweep(*OPTIONS, "--json", capsys=capsys)
    assert code == 0
    assert "rate-" not in err  # nothing that had ended was run again
    summary = json.loads(out)
    with (study_folder / "cells" / name / "run" / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    right = sum(row["label"] == row["predicted"] for row in rows)
    assert (summary["test"], summary["mean"], summary["std"], summary["n"]) == ([right / 8], right / 8, None, 1)
    config = json.loads((study_folder / "cells" / name / "run" / "config.json").read_text())
    assert config["train_on_val"]
    assert (config["steps"], config["recipe"]["optimizer"]["lr"]) == (4, summary["lr"])
    assert (study_folder / "cells" / name / "run" / "weights" / "best.safetensors").is_file()
    with Image.open(study_folder / "study.png") as picture:
        assert min(picture.size) > 100

    code, _, err = run_sweep(*OPTIONS[:-1], "2", capsys=capsys)
    assert code == 2
    assert "is another study, with runs 1 and not 2" in err


# --- the plan --------------------------------------------------------------------------------------------------------


def test_the_study_is_the_papers_for_a_small_dataset() -> None:
    study = plan()
    assert study.rates == (0.001, 0.003, 0.01, 0.03)
    assert (study.steps, study.recipe.batch, study.recipe.image_size, study.recipe.schedule.warmup) == (
        500,
        512,
        384,
        100,
    )
    assert (study.recipe.optimizer.kind, study.recipe.optimizer.clip, study.recipe.optimizer.weight_decay) == (
        "sgd",
        1,
        0,
    )
    choosing, testing = sweep.list_rate_cells(study), sweep.list_test_cells(study, 0.003)
    assert [cell.recipe.optimizer.lr for cell in choosing] == [0.001, 0.003, 0.01, 0.03]
    assert {(cell.eval_split, cell.train_on_val, cell.seed) for cell in choosing} == {("val", False, 0)}
    assert [(cell.eval_split, cell.train_on_val, cell.seed) for cell in testing] == [
        ("test", True, s) for s in (0, 1, 2)
    ]
    for cell, images in ((choosing[0], 8), (testing[0], 16)):  # as many steps, whether val is trained on or not
        assert cell.recipe.epochs * images == 500 * 512


def test_a_shorter_run_has_a_shorter_warm_up() -> None:
    study = plan(steps=50, batch=8, image_size=64)
    assert (study.steps, study.recipe.batch, study.recipe.image_size, study.recipe.schedule.warmup) == (50, 8, 64, 10)


@pytest.mark.parametrize(
    ("images", "rates", "share"),
    [
        (19_999, (0.001, 0.003, 0.01, 0.03), 0.1),
        (20_000, (0.001, 0.003, 0.01, 0.03), 0.02),
        (499_999, (0.001, 0.003, 0.01, 0.03), 0.02),
        (500_000, (0.003, 0.01, 0.03, 0.06), 0.01),
    ],
)
def test_rates_and_the_share_held_out_go_by_the_size_of_the_dataset(
    images: int, rates: tuple[float, ...], share: float
) -> None:
    assert sweep._get_size_settings(images)[1:] == (rates, share)


def test_what_makes_no_study_is_refused(tmp_path: Path) -> None:
    for rates in ((0.1, 0.1), (0.0,), (-1.0, 0.1)):
        with pytest.raises(UsageError, match="--rates is"):
            plan(rates=rates)
    with pytest.raises(UsageError, match="--runs is 0; it must be at least 1"):
        plan(runs=0)
    write_image_folder(tmp_path / "two", "train", "test", each=2)
    with pytest.raises(DataError, match="has no val"):
        sweep.open_sweep_dataset("./two")


def test_the_usual_imagenet_is_evaluated_on_val_and_chosen_on_a_part_of_train(tmp_path: Path, capsys: Capture) -> None:
    """With the validation images unreadable, the rate is still chosen: only the run on test needs them."""
    write_image_folder(tmp_path / "imagenet", "train", each=20)
    write_image_folder(tmp_path / "imagenet", "val", each=3, start=500)
    plain = open_dataset("./imagenet")
    assert set(plain.splits) == {"train", "val"}
    dataset, share = sweep.open_sweep_dataset("./imagenet")
    assert share == 0.1
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 36, "val": 4, "test": 6}
    assert list_names(dataset)["test"] == list_names(plain)["val"]
    assert sorted(list_names(dataset)["train"] + list_names(dataset)["val"]) == sorted(list_names(plain)["train"])
    assert [int(count) for count in dataset.splits["val"].count_per_class(2)] == [2, 2]  # of each class alike
    assert "val is the test split, as there is no other; 10% of each class of train (4 images)" in dataset.notes[-1]
    for path in (tmp_path / "imagenet" / "val").rglob("*.jpg"):
        path.unlink()
        path.symlink_to(tmp_path / "gone")
    command = ("study", "sweep", "./imagenet", "--model", "model.safetensors", *OPTIONS, *HERE)
    code, _, err = vitrail(*command, capsys=capsys)
    study_folder = tmp_path / "runs" / "sweep-imagenet-model.safetensors"
    results = read_results(study_folder)
    assert code == 3
    assert (results["rate-0.01"]["split"], results["rate-0.01"]["images"]) == ("val", 4)
    assert results["test-0.01-seed-0"]["error"].startswith("val/rose/")
    assert "note: val is the test" in err
    assert json.loads((study_folder / "study.json").read_text())["val_is_test"]


def test_timms_own_network_is_refused_before_anything_is_read(capsys: Capture) -> None:
    for command in (
        ("study", "sweep", "./no-such-data", "--model", "timm-model:vit_tiny_patch16_224"),
        ("study", "vtab", "timm-model:vit_tiny_patch16_224", "--data-root", "./no-such-data"),
        ("probe", "timm-model:vit_tiny_patch16_224", "./no-such-data"),
    ):
        code, _, err = vitrail(*command, capsys=capsys)
        assert code == 2
        assert "timm-model:vit_tiny_patch16_224 is timm's own network" in err
        assert "timm:vit_tiny_patch16_224 reads its weights" in err


def test_the_optimizer_and_decay_of_a_sweep_can_be_others_and_its_rate_only_by_rates() -> None:
    study = plan(settings=["optimizer=adam", "weight_decay=0.1", "decay=linear", "mixup=0.2"])
    assert (study.recipe.optimizer.kind, study.recipe.optimizer.weight_decay) == ("adam", 0.1)
    assert (study.recipe.schedule.decay, study.recipe.augment.mixup) == ("linear", 0.2)
    assert study.settings == ("optimizer=adam", "weight_decay=0.1", "decay=linear", "mixup=0.2")
    for setting in ("lr=0.1", "optimizer.lr=0.1"):
        with pytest.raises(
            UsageError, match=r"lr cannot be set here: a sweep chooses the learning rate; --rates gives"
        ):
            plan(settings=[setting])
    with pytest.raises(UsageError, match="loss cannot be set here: the labels of the data decide"):
        plan(settings=["recipe.loss=sigmoid"])
    with pytest.raises(UsageError, match="epochs cannot be set here: give --steps N"):
        plan(settings=["epochs=3"])
    with pytest.raises(UsageError, match="a trained model keeps its own"):
        plan(settings=["depth=3"])


def test_a_warm_up_that_is_set_is_kept_as_it_is() -> None:
    study = plan(steps=50, settings=["schedule.warmup=7"])
    assert (study.steps, study.recipe.schedule.warmup) == (50, 7)


def test_a_study_begun_before_a_field_existed_is_the_same_one() -> None:
    assert grid.find_difference({"seed": 0}, {"seed": 0, "settings": []}) == ""
    old, new = {"recipe": {"lr": 1}, "seed": 0}, {"recipe": {"lr": 1, "head": None}, "seed": 7}
    assert grid.find_difference(old, new) == "seed 0 and not 7"
    assert grid.find_difference(old, new | {"seed": 0}) == ""
    assert grid.find_difference({"seed": 0}, {"seed": 0, "settings": ["a=1"]}) == "settings None and not ['a=1']"


# --- the choice ------------------------------------------------------------------------------------------------------


def make_rate_result(lr: float, right: int | None, loss: float = 1.0) -> dict[str, object]:
    status = (
        {"status": "diverged"}
        if right is None
        else {"status": "done", "correct": right, "loss": loss, "top1": right / 10}
    )
    return {"cell": f"rate-{lr}", "stage": "rate", "lr": lr} | status


def test_the_rate_with_the_most_correct_images_is_chosen_and_of_equals_the_one_with_the_lowest_loss() -> None:
    assert (
        sweep.choose_learning_rate([make_rate_result(0.1, 5), make_rate_result(0.2, 7), make_rate_result(0.3, None)])
        == 0.2
    )
    assert (
        sweep.choose_learning_rate(
            [make_rate_result(0.1, 7, 0.4), make_rate_result(0.2, 7, 0.3), make_rate_result(0.3, 7, 0.5)]
        )
        == 0.2
    )
    with pytest.raises(CellsError, match="diverged at every learning rate") as failed:
        sweep.choose_learning_rate([make_rate_result(0.1, None)])
    assert failed.value.exit_code == 6


def test_the_summary_is_the_mean_and_deviation_at_the_chosen_rate() -> None:
    study = {"dataset": "s", "model": "m", "rates": [0.1, 0.2], "images": {"test": 10}}
    tests = [
        {"stage": "test", "lr": lr, "status": "done", "top1": top1, "images": 10}
        for lr, top1 in ((0.2, 0.5), (0.2, 0.7), (0.2, 0.9), (0.1, 0.0))
    ]
    summary = sweep.summarize_sweep(study, [make_rate_result(0.1, 5), make_rate_result(0.2, 7), *tests])
    assert (summary["lr"], summary["n"]) == (0.2, 3)
    assert summary["mean"] == pytest.approx(0.7)
    assert summary["std"] == pytest.approx(0.2)
    assert summary["validation"] == {"0.1": 0.5, "0.2": 0.7}
    unfinished = sweep.summarize_sweep(study, [make_rate_result(0.1, 5)])
    assert (unfinished["lr"], unfinished["mean"]) == (None, None)
