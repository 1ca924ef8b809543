"""Files that version 0.1.0 wrote (tests/golden/make.py) are read, gone on with, and give the same results.

Numbers are compared within 1e-5, since another CPU adds in another order; labels, counts and bytes exactly.
"""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import vitrail
from tests.golden.make import COMMANDS, PREDICT, PROBE, ROWS, SWEEP
from vitrail.cli import main
from vitrail.config.serialization import upgrade_result_keys

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
MEASUREMENT_NAMES = {
    "cpu": "processor",
    "speed": "speedup",
    "top1": "top1_agreement",
    "sure": "confident_agreement",
    "sure_images": "confident_images",
    "change": "mean_probability_change",
}
"""Today's names of a measurement's fields, by those of version 0.1.0."""


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files, in which commands are run as they were when the files were made."""
    folder = tmp_path / "golden"
    shutil.copytree(GOLDEN, folder)
    for name in ("DATA", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(folder / "homes" / name.lower()))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def fresh_home(golden: Path) -> Path:
    """The same where nothing was ever held out."""
    shutil.rmtree(golden / "homes")
    return golden


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints."""
    capsys.readouterr()
    code = main(arguments)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def predict(capsys: pytest.CaptureFixture[str], model: str) -> list[dict[str, str]]:
    options = ("--top", "3", "--format", "csv", "--precision", "float32", "--device", "cpu")
    return list(csv.DictReader(run(capsys, "predict", model, "shards", *options).splitlines()))


@pytest.mark.parametrize("name", EXPECTED["predictions"])
def test_predictions_of_a_model_file(golden: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Its labels, preprocessing, temperature, threshold and whether an image has several labels are in the numbers."""
    rows, expected = predict(capsys, f"{name}.safetensors"), EXPECTED["predictions"][name]
    assert [[row["image"], row["label"]] for row in rows] == [row[:2] for row in expected]
    assert [float(row["probability"]) for row in rows] == pytest.approx([row[2] for row in expected], abs=1e-5)


@pytest.mark.parametrize("name", EXPECTED["features"])
def test_features_of_a_model_file(golden: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """That of a masked run has no head."""
    run(capsys, "predict", f"{name}.safetensors", "shards", "--embed", "--out", "features.npy", "--device", "cpu")
    np.testing.assert_allclose(np.load("features.npy"), EXPECTED["features"][name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("model", "key"), [("precision.safetensors", "measured"), ("run", "measured beside")])
def test_measured_precisions(golden: Path, capsys: pytest.CaptureFixture[str], model: str, key: str) -> None:
    """In the file, and beside a run's weights; each field has today's name."""
    measurements = json.loads(run(capsys, "info", model, "--json"))["precision_measurements"]
    assert EXPECTED[key]
    assert measurements == [
        {MEASUREMENT_NAMES.get(name, name): value for name, value in expected.items()} for expected in EXPECTED[key]
    ]


def test_accuracy_of_a_model_on_shards(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("evaluate", "labels.safetensors", "shards", "--split", "all", "--device", "cpu", "--workers", "0")
    (found,) = json.loads(run(capsys, *arguments, "--json"))["models"]
    expected = upgrade_result_keys(EXPECTED["evaluate"])
    assert {name: found[name] for name in expected} == expected


def test_a_finished_run_is_measured_and_reported(fresh_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("evaluate", "run", "digits", "--device", "cpu", "--workers", "0", "--json")
    (found,) = json.loads(run(capsys, *arguments))["models"]
    expected = EXPECTED["run"]
    assert (found["images"], found["correct"]) == (expected["images"], expected["right"])
    run(capsys, "report", "run")
    page = Path("run/report.html").read_text()
    assert f"{expected['right'] / expected['images']:.1%}"[:-1] in page
    assert Path("run/events.jsonl").read_bytes() == (GOLDEN / "run/events.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["stopped", "stopped_masked"])
def test_a_stopped_run_is_resumed(fresh_home: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """It goes on after its checkpoint, keeps what it had written, and ends with the weights that it had then."""
    before = Path(name, "results.csv").read_text()
    (checkpoint,) = Path(name, "checkpoints").glob("step-*")
    run(capsys, *COMMANDS[name], "--out", name, "--resume")
    after = Path(name, "results.csv").read_text()
    assert after.startswith(before)
    assert len(after.splitlines()) - 1 == EXPECTED[name]["evaluations"]
    assert f"resumed after step {int(checkpoint.name.partition('-')[2]):,}" in Path(name, "run.log").read_text()
    weights, expected = (
        load_file(path / "last.safetensors")
        for path in (Path(name, "weights"), GOLDEN / name.replace("stopped", "ended"))
    )
    assert weights.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(weights[key], values, rtol=0, atol=1e-3, err_msg=key)  # of several steps


def test_shards_are_packed_and_read_alike(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An old report still says what to leave out, and the shards have the same bytes."""
    report = Path("faulty_report.json")
    here = json.dumps(str(golden / "photos"))  # a report is of one folder
    report.write_text(re.sub(r'"[^"]*/photos"', here, report.read_text()))
    run(capsys, "data", "pack", "photos", "again", "--leave-out", "faulty_report.json")
    tars = sorted(path.relative_to("shards") for path in Path("shards").rglob("*.tar"))
    assert tars
    for path in tars:
        assert ("again" / path).read_bytes() == ("shards" / path).read_bytes()
    checked = json.loads(run(capsys, "data", "check", "shards", "--json"))
    assert checked["images"] == {"train": 11, "val": 10, "test": 9}
    assert not checked["bad"]


def test_what_was_held_out_stays_held_out(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One image was moved by hand from val to test."""
    arguments = ("evaluate", "run", "digits", "--device", "cpu", "--workers", "0", "--json")
    (found,) = json.loads(run(capsys, *arguments))["models"]
    assert found["images"] == EXPECTED["held out"] == EXPECTED["run"]["images"] + 1


def test_kept_features_are_used(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = Path("homes/cache/vitrail/features")
    before = {path.name: path.stat().st_mtime_ns for path in kept.iterdir()}
    found = json.loads(run(capsys, *PROBE, "--json"))
    assert {path.name: path.stat().st_mtime_ns for path in kept.iterdir()} == before
    assert leaves(found["scores"]) == pytest.approx(leaves(EXPECTED["probe"]["scores"]), abs=1e-5)


def leaves(value: Any) -> list[float]:
    """The numbers of a JSON value that are no times."""
    if isinstance(value, dict):
        return [leaf for key, each in value.items() if "seconds" not in key for leaf in leaves(each)]
    if isinstance(value, list):
        return [leaf for each in value for leaf in leaves(each)]
    return [value] if isinstance(value, int | float) else []


def test_a_study_whose_cells_have_ended_is_not_run_again(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("study/results.jsonl").read_bytes()
    expected = dict(EXPECTED["sweep"])
    expected["dataset"] = expected.pop("set")  # as version 0.1.0 called it
    assert json.loads(run(capsys, *SWEEP)) == expected
    assert Path("study/results.jsonl").read_bytes() == before
    table = run(capsys, "study", "table", "study")
    assert f"{100 * EXPECTED['sweep']['mean']:.2f}" in table


@pytest.mark.parametrize("name", ROWS)
def test_predictions_that_were_cut_short_go_on(golden: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Whole batches stay as they are; the rest is computed."""
    record = Path(f"{name}.json")
    identity = json.loads(record.read_text())
    record.write_text(json.dumps(identity | {"vitrail": vitrail.__version__}))  # another version is refused, on purpose
    text = Path(name).with_suffix(".csv") if name.endswith(".npy") else Path(name)
    begun = text.read_text()
    run(capsys, *PREDICT, *ROWS[name], "--out", name)
    found, expected = text.read_text(), EXPECTED["rows"][name]
    assert begun[: len(begun) // 2] == found[: len(begun) // 2]
    assert len(found.splitlines()) == len(expected.splitlines())
    if name.endswith(".npy"):
        np.testing.assert_allclose(np.load(name), np.load("matrix-whole.npy"), rtol=1e-5, atol=1e-5)
        assert found == expected
    else:
        read = json.loads if name.endswith(".jsonl") else lambda line: next(csv.reader([line]))
        for line, other in zip(found.splitlines(), expected.splitlines(), strict=True):
            compare(read(line), read(other))


def compare(found: Any, expected: Any) -> None:
    """Equal but for numbers, also those in texts, which may differ by rounding."""
    if isinstance(expected, dict | list):
        assert len(found) == len(expected)
        pairs = found.items() if isinstance(found, dict) else enumerate(found)
        for key, value in pairs:
            compare(value, expected[key])
        return
    try:
        number = float(expected)
    except (TypeError, ValueError):
        assert found == expected
    else:
        assert float(found) == pytest.approx(number, abs=2e-5)
