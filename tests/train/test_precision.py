"""Fewer bits at the end of a run."""

from pathlib import Path

import pytest

from tests.train.test_run import trained, tuned
from vitrail import compute
from vitrail.weights.load import load


@pytest.fixture(autouse=True)
def _without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    """To translate a model for it takes seconds."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)


def test_a_large_model_is_measured_when_it_is_made_and_its_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrail.evaluate.precision.SMALL", 0)
    task = tuned(tmp_path)
    trained(task, tmp_path / "run")
    best, last = (load(tmp_path / "run" / "weights" / f"{name}.safetensors") for name in ("best", "last"))
    assert {tried.precision for tried in best.tried} == set(compute.possible(best)) - {"float32", "openvino-int8"}
    val = len(task.dataset.splits["val"])
    assert all(1 <= tried.images <= val for tried in best.tried)
    assert best.ranges
    assert not last.tried, "it is not the one that is used"
    log = (tmp_path / "run" / "run.log").read_text()
    assert all(tried.told() in log for tried in best.tried)


def test_a_small_model_is_not_so_that_equal_runs_leave_equal_files(tmp_path: Path) -> None:
    task = tuned(tmp_path)
    for name in ("one", "two"):
        trained(task, tmp_path / name)
    files = [(tmp_path / name / "weights" / "best.safetensors") for name in ("one", "two")]
    assert load(files[0]).tried == ()
    assert files[0].read_bytes() == files[1].read_bytes()
