"""Fewer bits at the end of a run."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.test_trainer import trained, tuned
from vitrail.errors import ModelError
from vitrail.inference.precision import list_available_precisions
from vitrail.weights.load import load, save


@pytest.fixture(autouse=True)
def _without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    """To translate a model for it takes seconds."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)


def test_a_large_model_is_measured_when_it_is_made_and_its_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrail.evaluate.precision_benchmark.MIN_MULTIPLY_ADDS", 0)
    task = tuned(tmp_path)
    trained(task, tmp_path / "run")
    best, last = (load(tmp_path / "run" / "weights" / f"{name}.safetensors") for name in ("best", "last"))
    assert {tried.precision for tried in best.precision_measurements} == set(list_available_precisions(best)) - {
        "float32",
        "openvino-int8",
    }
    val = len(task.dataset.splits["val"])
    assert all(1 <= tried.images <= val for tried in best.precision_measurements)
    assert best.activation_ranges
    assert not last.precision_measurements, "it is not the one that is used"
    log = (tmp_path / "run" / "run.log").read_text()
    assert all(tried.describe() in log for tried in best.precision_measurements)


@pytest.mark.attack
@pytest.mark.parametrize("small", [0, 5 * 10**8], ids=["measured", "too small to be measured"])
def test_equal_runs_leave_equal_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attacked: Callable[[str, str], None], small: int
) -> None:
    """Speeds are never measured twice alike, so they lie beside the weights."""
    monkeypatch.setattr("vitrail.evaluate.precision_benchmark.MIN_MULTIPLY_ADDS", small)
    task = tuned(tmp_path)
    for name in ("one", "two"):
        trained(task, tmp_path / name)
    files = [(tmp_path / name / "weights" / "best.safetensors") for name in ("one", "two")]
    assert bool(load(files[0]).precision_measurements) == (small == 0)
    assert files[0].with_name("best.precision.json").exists() == (small == 0)
    assert files[0].read_bytes() == files[1].read_bytes()
    attacked("the same run twice", "the same bytes of best.safetensors")


def test_what_was_measured_is_of_the_weights_it_lies_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.evaluate.precision_benchmark.MIN_MULTIPLY_ADDS", 0)
    trained(tuned(tmp_path), tmp_path / "run")
    best = tmp_path / "run" / "weights" / "best.safetensors"
    measured, beside = load(best), best.with_name("best.precision.json")
    save(measured, tmp_path / "alone.safetensors")
    assert load(tmp_path / "alone.safetensors").precision_measurements == measured.precision_measurements, (
        "a file that is written by itself has it inside"
    )
    save(dataclasses.replace(measured, precision_measurements=(), temperature=2.0), best, overwrite=True)
    assert load(best).precision_measurements == (), "other weights took their place"
    text = beside.read_text()
    for damaged in ("{", "[]", "null", text.replace('"speedup": ', '"speedup": "x'), text.replace('"cpu"', '"x"')):
        save(dataclasses.replace(measured, precision_measurements=()), best, overwrite=True)
        beside.write_text(damaged)
        with pytest.raises(ModelError, match=r"best\.precision\.json"):
            load(best)
    content = json.loads(text)
    for wrong in (None, 3, {"speedup": 1}, [None]):
        beside.write_text(json.dumps(content | {"precision_measurements": wrong}))
        with pytest.raises(ModelError, match=r"best\.precision\.json is damaged: .* Remove it"):
            load(best)
