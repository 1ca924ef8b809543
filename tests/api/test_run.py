"""`vitrail.Run`: any run folder, ended or not, as numbers, text and HTML."""

import shutil
from pathlib import Path

import pytest

import vitrail
from vitrail import Classifier
from vitrail.errors import ModelError, UsageError

GOLDEN = Path(__file__).parents[1] / "golden"


def test_a_finished_run_has_its_numbers(tuned_run: Path) -> None:
    run = vitrail.Run(str(tuned_run))
    assert run.folder == tuned_run
    assert run.accuracy == run.metrics["top1"] == run.metrics["correct"] / run.metrics["images"]
    assert run.interval == run.metrics["interval"]
    assert run.interval is not None
    assert run.interval[0] <= run.metrics["top1"] <= run.interval[1]
    assert {
        "split",
        "images",
        "top5",
        "loss",
        "temperature",
        "calibration_error",
        "macro_accuracy",
    } <= run.metrics.keys()
    assert len(run.history["epoch"]) == len(run.history["val/loss"]) > 0
    assert run.weights.is_file()
    assert run.trained.labels == ("rose", "tulip")
    assert run.report == tuned_run / "report.html"
    assert run.config["seed"] == 0


def test_a_finished_run_shows_its_numbers_with_escaped_names(tuned_run: Path) -> None:
    run = vitrail.Run(tuned_run, notes=("note: <i>",))
    right = f"{run.accuracy:.1%} of 10 test images correct"
    assert right in repr(run)
    html = run._repr_html_()
    assert right in html
    assert "fl&lt;b&gt;wers" in html
    assert "note: &lt;i&gt;" in html
    assert "<b>" not in html
    assert "<i>" not in html
    assert "<svg" in html
    assert "data:image/" in html


@pytest.mark.parametrize("name", ["run", "stopped", "stopped_masked"])
def test_runs_of_earlier_versions_and_interrupted_ones_open(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / name, tmp_path / name)
    run = vitrail.Run(folder)
    if name == "run":
        assert f"{run.accuracy:.1%}" in repr(run)
    else:
        assert (run.metrics, run.accuracy, run.interval, run.report) == ({}, None, None, None)
        assert f"not ended, {len(run.history['epoch'])} evaluation" in repr(run)
        assert f"{run.config['steps']:,} steps planned" in repr(run)
    assert repr(run).removesuffix(")").partition("': ")[2] in run._repr_html_()


def test_a_run_killed_before_its_first_evaluation_opens(tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    shutil.copy(GOLDEN / "stopped" / "config.json", tmp_path / "killed")
    run = vitrail.Run(tmp_path / "killed")
    assert "not ended, 0 evaluations" in repr(run)
    assert "not ended, 0 evaluations" in run._repr_html_()
    with pytest.raises(ModelError, match=r"best.safetensors does not exist"):
        _ = run.trained


def test_a_run_is_read_again_until_it_has_ended(digits_run: Path, tmp_path: Path) -> None:
    """A copy of a run is cut back to before its end, opened, and completed."""
    folder = shutil.copytree(digits_run, tmp_path / "copy")
    results, events = (folder / "results.csv").read_text(), (folder / "events.jsonl").read_text()
    (folder / "results.csv").write_text(results.splitlines()[0] + "\n")
    (folder / "events.jsonl").write_text("")
    run = vitrail.Run(folder)
    assert "not ended, 0 evaluations so far" in repr(run)
    before = run.trained
    (folder / "results.csv").write_text(results)
    assert len(run.history["epoch"]) == len(results.splitlines()) - 1 > 0
    assert run.trained is not before  # the best weights may have changed
    (folder / "events.jsonl").write_text(events)
    assert run.accuracy == run.metrics["top1"] == vitrail.Run(digits_run).accuracy
    assert run.trained is run.trained


def test_a_run_in_place_of_its_model_is_answered_with_its_model(tuned_run: Path) -> None:
    run = vitrail.Run(tuned_run)
    with pytest.raises(UsageError, match=r"it takes a string or a path; run\.trained is its model"):
        vitrail.load(run)
    for function in (lambda: vitrail.save(run, "x.safetensors"), lambda: vitrail.adapt(run), lambda: Classifier(run)):
        with pytest.raises(UsageError, match=r"give a vitrail\.Trained, not Run: run\.trained is one"):
            function()


def test_what_is_no_run_is_refused() -> None:
    for path in (Path("photos"), Path("nothing"), Path("model.safetensors")):
        with pytest.raises(UsageError, match=f"{path} is not a run: it has no config.json"):
            vitrail.Run(path)
    Path("several/seed-0").mkdir(parents=True)
    shutil.copy(GOLDEN / "stopped" / "config.json", "several/seed-0")
    with pytest.raises(UsageError, match="several holds runs of several seeds; give one"):
        vitrail.Run(Path("several"))
