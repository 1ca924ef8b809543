"""`vitrail data suspects` as a user calls it, and what follows: finetune and data pack with --relabel, resumed."""

import csv
import json
from pathlib import Path

import pytest

from tests import model_factory
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.cli.test_train import HERE
from tests.evaluation.test_label_errors import make_colored, write_colors
from vitrail.data.sources import open_dataset
from vitrail.weights.load import save

SHORT = ("--model", "model.safetensors", "--epochs", "1", "--batch", "8", *HERE)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of three colors with a wrong label, and a small model."""
    monkeypatch.chdir(tmp_path)
    root = write_colors(tmp_path / "colors")
    make_colored("red", 1000).save(root / "train" / "blue" / "wrong.png")
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model.safetensors")


def write_suspects(*options: str, capsys: Capture) -> tuple[int, str, str]:
    return vitrail("data", "suspects", "colors", "--model", "model.safetensors", *HERE, *options, capsys=capsys)


def finetune(*options: str, capsys: Capture) -> tuple[int, str, str]:
    return vitrail("finetune", "colors", *SHORT, *options, capsys=capsys)


def decide(path: Path, image: str, action: str) -> None:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["action"] = action if row["image"] == image else row["action"]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_suspects_are_printed_and_written_and_never_overwritten(capsys: Capture) -> None:
    code, out, err = write_suspects(capsys=capsys)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("About ")
    assert lines[0].endswith(" of 61 labels look wrong, the least probable first.")
    assert lines[2].split()[:3] == ["train:", "train/blue/wrong.png", "blue"]
    assert "red" in lines[2]
    assert lines[-1].split() == ["table", "runs/suspects/suspects.csv"]
    assert Path("runs/suspects/suspects.html").is_file()
    assert write_suspects(capsys=capsys)[1].splitlines()[-1].split()[1] == "runs/suspects-2/suspects.csv"
    code, _, err = write_suspects("--out", "runs/suspects", capsys=capsys)
    assert (code, "must be a local folder that is new or empty" in err) == (2, True)
    facts = json.loads(write_suspects("--json", "--split", "train", capsys=capsys)[1])
    assert (facts["images"], facts["folder"]) == ({"train": 37}, "runs/suspects-3")


def test_a_run_on_corrected_labels_is_recorded_and_resumed_with_the_same_file_alone(capsys: Capture) -> None:
    assert write_suspects("--out", "found", capsys=capsys)[0] == 0
    table = Path("found/suspects.csv")
    code, _, err = finetune("--relabel", str(table), "--out", "run", capsys=capsys)
    assert (code, "decides nothing" in err) == (3, True)
    assert not Path("run").exists()
    decide(table, "train/blue/wrong.png", "relabel")
    code, _, err = finetune("--relabel", str(table), "--out", "run", "--save-every", "0", capsys=capsys)
    assert code == 0, err
    assert "note: 1 label changed, 0 images dropped, by found/suspects.csv" in err
    config = json.loads(Path("run/config.json").read_text())
    assert (config["relabel"]["changed"], config["relabel"]["dropped"]) == (1, 0)
    assert "1 label changed, 0 images dropped" in Path("run/report.html").read_text()
    weights = Path("run/weights/last.safetensors").read_bytes()
    code, _, err = finetune("--relabel", str(table), "--out", "run", "--resume", capsys=capsys)
    assert (code, "bit-identical" in err) == (0, True), err
    assert Path("run/weights/last.safetensors").read_bytes() == weights
    code, _, err = finetune("--out", "run", "--resume", capsys=capsys)
    assert (code, "was started with another relabel" in err) == (2, True), err
    decide(table, "train/blue/wrong.png", "drop")
    code, _, err = finetune("--relabel", str(table), "--out", "run", "--resume", capsys=capsys)
    assert (code, "was started with another" in err) == (2, True), err


def test_packed_data_are_corrected_once_and_for_all(capsys: Capture) -> None:
    assert write_suspects("--out", "found", "--action", "drop", "--split", "train", capsys=capsys)[0] == 0
    code, _, err = vitrail("data", "pack", "colors", "shards", "--relabel", "found/suspects.csv", capsys=capsys)
    assert code == 0, err
    assert "dropped, by found/suspects.csv" in err
    packed = open_dataset(Path("shards"))
    with Path("found/suspects.csv").open(newline="") as file:
        dropped = [row["image"] for row in csv.DictReader(file)]
    assert "train/blue/wrong.png" in dropped
    assert len(packed.splits["train"]) == 37 - len(dropped)
