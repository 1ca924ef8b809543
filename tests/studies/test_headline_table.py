"""The headline table: studies next to the paper's numbers, with notes on what differs."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from vitrail.errors import UsageError
from vitrail.studies import headline_table
from vitrail.weights.trained import load_imagenet1k_classes

SMALL = {"batch": 64, "image_size": 224}


def write_study(folder: Path, study: dict[str, Any], results: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "study.json").write_text(json.dumps(study))
    lines = [json.dumps({"cell": str(number), **record}) for number, record in enumerate(results)]
    (folder / "results.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def write_sweep(folder: Path, dataset: str, shares: list[float], tested: int = 6149, **changes: Any) -> Path:
    recipe = {"batch": 512, "image_size": 384}
    images = {"train": 1000, "val": 100, "test": tested}
    study = {"study": "sweep", "dataset": dataset, "model": "/m/b16.npz", "rates": [0.01], "runs": len(shares)}
    rate_result = {"stage": "rate", "lr": 0.01, "status": "done", "correct": 9, "loss": 1, "top1": 0.9}
    tests = [{"stage": "test", "lr": 0.01, "status": "done", "top1": share, "images": tested} for share in shares]
    full = study | {"recipe": recipe, "images": images, "steps": 500} | changes
    return write_study(folder, full, [rate_result, *tests])


def write_vtab(folder: Path, shares: dict[str, float], draw: str = "VTAB") -> Path:
    study = {"study": "vtab", "model": "/m/b16.npz", "tasks": {name: {} for name in shares}, "steps": 2500}
    results = [{"task": n, "seed": 0, "status": "done", "top1": share, "draw": draw} for n, share in shares.items()]
    return write_study(folder, study | {"recipe": {"batch": 512, "image_size": 384}}, results)


def test_rows_columns_and_notes_by_hand(tmp_path: Path, capsys: Capture) -> None:
    flowers = write_sweep(tmp_path / "a", "/data/flowers102", [0.99, 0.98, 0.97])
    own = write_sweep(tmp_path / "b", "./photos", [0.5], steps=20, recipe=SMALL, settings=["mixup=0.2"])
    half = write_vtab(tmp_path / "c", {"dtd": 0.6, "kitti": 0.8}, draw="own")
    code, out, _ = vitrail("study", "table", *map(str, (flowers, own, half)), capsys=capsys)
    assert code == 0
    lines = out.splitlines()
    cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in lines if "|" in line}
    heads = lines[0].strip("|").split("|")
    assert heads[1].strip() == "b16.npz"
    assert sum("weights never published" in head for head in heads) == 3
    assert "weights never published" not in next(head for head in heads if "I21k" in head)
    assert cells["Oxford Flowers-102"][:4] == ["98.00 ± 1.00", "99.68 ± 0.02", "99.74 ± 0.00", "99.61 ± 0.02"]
    assert cells["photos"] == ["50.00 [1]", "-", "-", "-", "-", "-"]
    assert cells["VTAB (19 tasks)"][:2] == ["70.00 [2]", "77.63 ± 0.23"]
    assert cells["CIFAR-10"][:2] == ["-", "99.50 ± 0.06"]
    assert cells["TPUv3-core-days"] == ["-", "2.5k", "0.68k", "0.23k", "9.9k", "12.3k"]
    assert "[1] 20 steps of 64 images at 224 pixels; mixup=0.2" in lines
    assert "[2] 2 of 19 tasks; 2 tasks on vitrail's own draws" in lines

    path = tmp_path / "table.csv"
    code, out, _ = vitrail("study", "table", str(flowers), "--csv", str(path), "--json", capsys=capsys)
    assert code == 0
    summary = json.loads(out)
    assert summary["table"]["Oxford Flowers-102"]["b16.npz"] == "98.00 ± 1.00"
    assert summary["studies"][0]["mean"] == pytest.approx(0.98)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows[6][:2] == ["Oxford Flowers-102", "98.00 ± 1.00"]
    assert {len(row) for row in rows} == {7}


def test_real_and_cost_hold_models_of_ones_own(tmp_path: Path, capsys: Capture) -> None:
    """ReaL from two runs' predictions by hand: 3 of 4 and 2 of 4 images that have labels."""
    classes = [entry.wordnet_id for entry in load_imagenet1k_classes()]
    (tmp_path / "real.json").write_text(json.dumps([[1, 2], [3], [], [4], [5]]))
    folder = write_sweep(tmp_path / "sweep", "/data/imagenet", [0.5, 0.6], tested=5)
    for cell, predicted in (("1", (2, 3, 9, 9, 5)), ("2", (1, 9, 9, 4, 9))):
        run = folder / "cells" / cell / "run"
        run.mkdir(parents=True)
        lines = [f"v:n/ILSVRC2012_val_{n:08d}.JPEG,x,{classes[number]},1,0,1" for n, number in enumerate(predicted, 1)]
        header = "image,label,predicted,probability,loss,right"
        (run / "predictions.csv").write_text("\n".join([header, *lines]) + "\n")
    real = ("--real", str(tmp_path / "real.json"))
    cost = ("--cost", "b16.npz=vit-h14-jft")
    code, out, err = vitrail("study", "table", str(folder), *real, *cost, "--json", capsys=capsys)
    assert code == 0, err
    summary = json.loads(out)
    assert summary["table"]["ImageNet"]["b16.npz"].startswith("55.00 ± 7.07")
    assert summary["table"]["ImageNet ReaL"]["b16.npz"].startswith("62.50 ± 17.68")  # of 0.75 and 0.5
    cost_cell = summary["table"]["TPUv3-core-days"]["b16.npz"]
    assert cost_cell.startswith("2.6k [")  # 4,258 exaFLOPs at 30.3 % of 61.5 TFLOP/s
    assert "planned for vit-h14-jft, at 30% of 61.5 TFLOP/s a core" in summary["notes"]
    code, out, _ = vitrail("study", "table", str(folder), "--cost", "b16.npz=230", "--json", capsys=capsys)
    assert json.loads(out)["table"]["TPUv3-core-days"]["b16.npz"] == "0.23k"
    photos = write_sweep(tmp_path / "other", "./photos", [0.5])
    for options, message in (
        ((str(folder), "--cost", "b32=230"), "of the columns b16.npz"),
        ((str(folder), "--cost", "b16.npz=-1"), "must be above 0"),
        ((str(folder), "--cost", "b16.npz=vit-b61-jft"), "did you mean"),
        ((str(photos), *real), "none of the studies is one"),
    ):
        code, _, err = vitrail("study", "table", *options, capsys=capsys)
        assert (code, message in err) == (2, True), err
    (run / "predictions.csv").write_text(f"{header}\nphoto.jpg,x,{classes[0]},1,0,1\n")
    code, _, err = vitrail("study", "table", str(folder), *real, capsys=capsys)
    assert code == 3
    assert "is no validation image of ImageNet" in err


def test_the_papers_table_alone_has_every_number(capsys: Capture) -> None:
    code, out, _ = vitrail("study", "table", capsys=capsys)
    assert code == 0
    assert out.count("\n|") == 9
    assert all(len(column.cells) == len(headline_table.ROWS) for column in headline_table.PAPER_COLUMNS)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("cifar10", "CIFAR-10"),
        ("/home/x/.local/share/vitrail/data/cifar100", "CIFAR-100"),
        ("/data/oxford_iiit_pet", "Oxford-IIIT Pets"),
        ("pets", "Oxford-IIIT Pets"),
        ("/d/imagenet/", "ImageNet"),
        ("hf:ILSVRC/imagenet-1k", "ImageNet"),
        ("/d/ILSVRC2012", "ImageNet"),
        ("/d/imagenet21k", "imagenet21k"),
        ("tiny-imagenet", "tiny-imagenet"),
        ("/d/flowers", "Oxford Flowers-102"),
    ],
)
def test_a_dataset_is_recognized_by_its_name(name: str, row: str) -> None:
    assert headline_table._get_row_name(name) == row


def test_what_has_no_place_in_the_table_is_refused(tmp_path: Path, capsys: Capture) -> None:
    first, second = (write_sweep(tmp_path / name, "flowers", [0.9]) for name in "ab")
    with pytest.raises(UsageError, match=r"two studies are of b16.npz on Oxford Flowers-102"):
        headline_table.build_table([headline_table.read_entry(first), headline_table.read_entry(second)])
    empty = write_sweep(tmp_path / "c", "flowers", [])
    with pytest.raises(UsageError, match="has no result on test yet"):
        headline_table.read_entry(empty)
    code, _, err = vitrail("study", "table", str(tmp_path / "nowhere"), capsys=capsys)
    assert code == 3
    assert "is not a study" in err
    fewer = write_sweep(tmp_path / "d", "flowers", [0.9, 0.9], runs=3)
    assert headline_table.read_entry(fewer).note == "2 of 3 runs"


def test_a_dataset_of_another_size_than_the_papers_gets_a_note(tmp_path: Path) -> None:
    assert headline_table.read_entry(write_sweep(tmp_path / "a", "flowers", [0.9])).note == ""
    smaller = write_sweep(tmp_path / "b", "flowers", [0.9], tested=816)
    assert headline_table.read_entry(smaller).note == "816 test images, not 6,149"
