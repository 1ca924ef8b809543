"""The grid runner: what has ended is not run again, what was stopped goes on, and what failed is written down."""

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import making
from tests.data.pictures import folder
from tests.train.test_training_run import tuning
from vitrail.config import AugmentConfig, OptimizerConfig, ScheduleConfig, to_json
from vitrail.errors import DataError, UsageError
from vitrail.runtime.signals import StoppedError
from vitrail.studies import grid
from vitrail.studies.grid import Cell, CellsError
from vitrail.studies.grid_cell import run_cell
from vitrail.weights.load import save

TWO = ("cpu", "cpu:0")  # the same one twice: two cells at a time


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a few pictures and a small model; the processes of cells have one thread each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder(tmp_path / "set", "train", "val", each=4)
    save(making.trained(making.vit(depth=1)), tmp_path / "tiny.safetensors")


def cell(name: str, *, lr: float = 1e-3, epochs: float = 4, **fields: Any) -> Cell:
    """A run on the pictures, of moments unless it is told to be longer."""
    recipe = tuning(
        batch=8, epochs=epochs, optimiser=OptimizerConfig(kind="sgd", lr=lr), augment=AugmentConfig(crop="pad")
    )
    given = {"model": "tiny.safetensors", "data": {"name": "./set", "share": 0.1}, "measured": "val"}
    return Cell(**{"name": name, "about": {"lr": lr}, "recipe": recipe, **given, **fields})


def run(cells: list[Cell], devices: Sequence[str] = ("cpu",), tell: grid.Notify = lambda _: None) -> Any:
    place = Path("study")
    with grid.open_study(place, {"study": "test"}) as lock:
        return grid.run_cells(cells, place, lock=lock, devices=devices, workers=0, notify=tell)


def ask_to_stop_when(ready: Callable[[], bool]) -> threading.Thread:
    def ask() -> None:
        while not ready():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def test_a_study_goes_on_where_it_was_stopped_and_bad_cells_stop_no_other() -> None:
    missing, wild = cell("missing", model="nothing.safetensors"), cell("wild", lr=1e15)
    short, long = cell("short"), cell("long", epochs=60)
    cells = [missing, wild, short, long]
    evaluated = Path("study/cells/long/run/results.csv")
    thread = ask_to_stop_when(lambda: evaluated.is_file() and evaluated.read_text().count("\n") > 2)
    with pytest.raises(StoppedError, match=r"SIGTERM: study is saved .* the same command goes on") as stopped:
        run(cells)
    assert stopped.value.exit_code == 75
    thread.join()
    found = grid.read_results(Path("study"))
    assert {name: found[name]["status"] for name in found} == {"missing": "failed", "wild": "diverged", "short": "done"}
    assert "nothing.safetensors" in found["missing"]["error"]
    assert (found["missing"]["exit_code"], found["wild"]["exit_code"]) == (2, 6)
    assert "learning rate" in found["wild"]["error"]
    assert not found["wild"]["error"].startswith("vitrail")
    before = (Path("study") / "results.jsonl").read_bytes()

    save(making.trained(making.vit(depth=1)), "nothing.safetensors")
    told: list[str] = []
    ended = run(cells, TWO, told.append)
    assert {name: ended[name]["status"] for name in ended} == {
        "missing": "done",  # it failed for what can be repaired, so it was tried again
        "wild": "diverged",
        "short": "done",
        "long": "done",
    }
    assert "2 of 4 cells have ended before" in told
    assert [line.split(": begun")[0] for line in told if ": begun" in line] == ["missing", "long"]
    assert (Path("study") / "results.jsonl").read_bytes().startswith(before)
    assert "resuming study/cells/long/run after step" in Path("study/cells/long/log").read_text()
    alone = run_cell(long, Path("alone"), "cpu", 0)
    assert (ended["long"]["right"], ended["long"]["loss"]) == (alone["right"], alone["loss"])
    for name in ("long", "short"):  # what only a run that goes on needs is gone
        assert not (Path("study/cells") / name / "run" / "checkpoints").exists()
        assert not (Path("study/cells") / name / "run" / "weights").exists()
    Path("tiny.safetensors").unlink()
    assert run(cells) == ended  # of which nothing is computed: the model is gone


def test_a_cell_is_what_its_file_says() -> None:
    one = cell("one", whole=True, seed=3, everything=True)
    one = dataclasses.replace(
        one, recipe=dataclasses.replace(one.recipe, schedule=ScheduleConfig(decay="linear", warmup=1))
    )
    assert grid.cell_from_json(json.loads(json.dumps(to_json(one)))) == one


def test_another_study_is_refused_by_what_differs_and_another_folder_by_what_it_is() -> None:
    study = {"study": "sweep", "recipe": {"batch": 512, "optimiser": {"lr": 0.1}}, "rates": (0.1, 0.2)}
    with grid.open_study(Path("mine"), study):
        pass
    with grid.open_study(Path("mine"), study):  # the same, however its numbers are held
        pass
    other = study | {"recipe": {"batch": 512, "optimiser": {"lr": 0.3}}}
    refusal = r"another study, with recipe.optimiser.lr 0.1 and not 0.3"
    with pytest.raises(UsageError, match=refusal), grid.open_study(Path("mine"), other):
        pass
    Path("photos").mkdir()
    Path("photos/a.jpg").touch()
    with pytest.raises(UsageError, match="photos is no study"), grid.open_study(Path("photos"), study):
        pass
    with pytest.raises(DataError, match="photos is no study"):
        grid.read_study(Path("photos"))


def test_two_processes_cannot_work_on_one_study() -> None:
    refused = pytest.raises(UsageError, match="worked on by another process")
    with grid.open_study(Path("mine"), {"study": "x"}), refused, grid.open_study(Path("mine"), {"study": "x"}):
        pass
    with grid.open_study(Path("mine"), {"study": "x"}):  # when it has ended, another may
        pass


def test_a_line_cut_short_by_a_crash_is_left_out_and_written_over() -> None:
    place = Path("mine")
    place.mkdir()
    whole = {"cell": "a", "status": "done", "top1": 0.5}
    grid._append_result(place, whole)
    with (place / "results.jsonl").open("a") as file:
        file.write('{"cell": "b", "sta')
    assert grid.read_results(place) == {"a": whole}
    grid._append_result(place, {"cell": "c", "status": "failed"})
    grid._append_result(place, {"cell": "c", "status": "done"})
    assert grid.read_results(place) == {"a": whole, "c": {"cell": "c", "status": "done"}}
    assert (place / "results.jsonl").read_text().count("\n") == 3
    damaged = (place / "results.jsonl").read_text().replace('{"cell": "a"', '{"cell"')
    (place / "results.jsonl").write_text(damaged)
    with pytest.raises(DataError, match="line 1 is damaged"):
        grid.read_results(place)


def test_a_process_that_was_killed_is_taken_for_one_without_memory() -> None:
    assert grid._describe_failure(-signal.SIGKILL, "")["exit_code"] == 5
    assert "SIGSEGV" in grid._describe_failure(-signal.SIGSEGV, "last words")["error"]
    records = [{"cell": "a", "status": "done"}, {"cell": "b", **grid._describe_failure(-signal.SIGKILL, "")}]
    with pytest.raises(CellsError, match=r"1 of 2 cells failed; b: killed.*\(x/cells/b/log\)") as failed:
        grid.check_failures(records, Path("x"))
    assert failed.value.exit_code == 5
