"""`vitrail predict` on made-up pictures, by one process and by two."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import making
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.data.pictures import folder
from vitrail import Classifier, load, save


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save(making.trained(making.vit()), path)
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    root = folder(tmp_path / "pictures", each=4)
    (root / "rose" / "broken.jpg").write_bytes(b"<html>")
    return root


def test_rows_are_the_classifiers_answers_in_order_and_a_bad_file_is_named_in_its_own(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    code, out, error = vitrail("predict", str(model), str(pictures), "--top", "2", "--batch", "3", capsys=capsys)
    assert code == 3
    assert "1 of 9 images cannot be read" in error
    rows = list(csv.DictReader(io.StringIO(out)))
    paths = sorted(str(path) for path in pictures.rglob("*.*"))
    assert list(dict.fromkeys(row["image"] for row in rows)) == paths
    (bad,) = (row for row in rows if row["error"])
    assert bad["image"].endswith("broken.jpg")
    good = [path for path in paths if not path.endswith("broken.jpg")]
    expected = [pair for answer in Classifier(load(model))(good, top=2) for pair in answer]
    found = [(row["label"], float(row["probability"])) for row in rows if not row["error"]]
    for (label, probability), (name, value) in zip(found, expected, strict=True):
        assert label == name
        assert probability == pytest.approx(value, abs=1e-5)


def test_two_processes_write_what_one_writes(model: Path, pictures: Path, tmp_path: Path) -> None:
    """9 images in batches of 2 are no whole number of rounds for two processes."""
    written = []
    for starter in (
        [sys.executable, "-m"],
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"],
    ):
        command = [*starter, "vitrail", "predict", str(model), str(pictures), "--device", "cpu", "--batch", "2"]
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240)
        assert done.returncode == (1 if "torch.distributed.run" in starter else 3)  # torchrun has codes of its own
        written.append([json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")])
    assert [row["image"] for row in written[0]] == [row["image"] for row in written[1]]
    assert len(written[0]) == 9
    for one, two in zip(*written, strict=True):
        assert one.get("error") == two.get("error")
        labels = [[label for label, _ in row.get("labels", [])] for row in (one, two)]
        assert labels[0] == labels[1]


def test_a_list_on_standard_input_and_a_file_for_the_rows(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = sorted(str(path) for path in (pictures / "tulip").iterdir())
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*some, "", "nowhere.jpg", ""])))
    code, out, _ = vitrail("predict", str(model), "-", "--out", str(tmp_path / "rows.csv"), capsys=capsys)
    assert (code, out) == (3, "")
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == [*some, "nowhere.jpg"]
    assert "nowhere.jpg" in rows[-1]["error"]


def test_an_empty_folder_is_refused(model: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty").mkdir()
    code, _, error = vitrail("predict", str(model), str(tmp_path / "empty"), capsys=capsys)
    assert code == 3
    assert "holds no image" in error
