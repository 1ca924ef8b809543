"""The grid runner: finished cells are not run again, stopped ones resume, and failures are recorded."""

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

from tests import model_factory
from tests.data.image_files import write_image_folder
from tests.training.test_training_run import build_finetune_recipe
from vitrail.config import AugmentConfig, OptimizerConfig, ScheduleConfig, from_json, to_json
from vitrail.errors import CellsError, DataError, StoppedError, UsageError
from vitrail.runtime.workers import Notify
from vitrail.studies import grid
from vitrail.studies.grid import Cell
from vitrail.studies.grid_cell import run_cell
from vitrail.weights.load import save

TWO_DEVICES = ("cpu", "cpu:0")  # the same device twice: two cells at a time


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a few images and a small model; cells have one thread each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_image_folder(tmp_path / "set", "train", "val", each=4)
    save(model_factory.build_trained(model_factory.build_vit(depth=1)), tmp_path / "tiny.safetensors")


def cell(name: str, *, lr: float = 1e-3, epochs: float = 4, **fields: Any) -> Cell:
    """A run on these images, a short one by default."""
    recipe = build_finetune_recipe(
        batch=8, epochs=epochs, optimizer=OptimizerConfig(kind="sgd", lr=lr), augment=AugmentConfig(crop="pad")
    )
    defaults = {"model": "tiny.safetensors", "data": {"name": "./set", "share": 0.1}, "eval_split": "val"}
    return Cell(**{"name": name, "result_fields": {"lr": lr}, "recipe": recipe, **defaults, **fields})


def run(cells: list[Cell], devices: Sequence[str] = ("cpu",), notify: Notify = lambda _: None) -> Any:
    folder_path = Path("study")
    with grid.open_study(folder_path, {"study": "test"}) as lock:
        return grid.run_cells(cells, folder_path, lock=lock, devices=devices, workers=0, notify=notify)


def request_stop_when(ready: Callable[[], bool]) -> threading.Thread:
    def send_signal() -> None:
        while not ready():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send_signal, daemon=True)
    thread.start()
    return thread


def test_a_stopped_study_resumes_and_failed_cells_stop_no_other() -> None:
    missing, wild = cell("missing", model="nothing.safetensors"), cell("wild", lr=1e15)
    short, long = cell("short"), cell("long", epochs=60)
    cells = [missing, wild, short, long]
    evaluated = Path("study/cells/long/run/results.csv")
    thread = request_stop_when(lambda: evaluated.is_file() and evaluated.read_text().count("\n") > 2)
    with pytest.raises(StoppedError, match=r"SIGTERM: study is saved .* the same command continues it") as stopped:
        run(cells)
    assert stopped.value.exit_code == 75
    thread.join()
    results = grid.read_results(Path("study"))
    assert {name: results[name]["status"] for name in results} == {
        "missing": "failed",
        "wild": "diverged",
        "short": "done",
    }
    assert "nothing.safetensors" in results["missing"]["error"]
    assert (results["missing"]["exit_code"], results["wild"]["exit_code"]) == (2, 6)
    assert "learning rate" in results["wild"]["error"]
    assert not results["wild"]["error"].startswith("vitrail")
    before = (Path("study") / "results.jsonl").read_bytes()

    save(model_factory.build_trained(model_factory.build_vit(depth=1)), "nothing.safetensors")
    lines: list[str] = []
    ended = run(cells, TWO_DEVICES, lines.append)
    assert {name: ended[name]["status"] for name in ended} == {
        "missing": "done",  # its cause was repaired, so it ran again
        "wild": "diverged",
        "short": "done",
        "long": "done",
    }
    assert "2 of 4 cells are done already" in lines
    assert [line.split(": started")[0] for line in lines if ": started" in line] == ["missing", "long"]
    assert (Path("study") / "results.jsonl").read_bytes().startswith(before)
    assert "resuming study/cells/long/run after step" in Path("study/cells/long/log").read_text()
    alone = run_cell(long, Path("alone"), "cpu", 0)
    assert (ended["long"]["correct"], ended["long"]["loss"]) == (alone["correct"], alone["loss"])
    for name in ("long", "short"):  # what only resuming needs is gone
        assert not (Path("study/cells") / name / "run" / "checkpoints").exists()
        assert not (Path("study/cells") / name / "run" / "weights").exists()
    Path("tiny.safetensors").unlink()
    assert run(cells) == ended  # nothing is computed: the model is gone


def test_files_of_earlier_versions_are_read_under_the_new_names() -> None:
    """cell.json and study.json had other keys, and a study that was begun with them is still the same one."""
    new = to_json(cell("one", resize_whole_image=True, train_on_val=True, keep_weights=True))
    old_recipe = dict(new["recipe"])
    old_recipe["optimiser"] = old_recipe.pop("optimizer")
    old_names = {
        "result_fields": "about",
        "resize_whole_image": "whole",
        "allow_empty_classes": "sparse",
        "train_on_val": "everything",
        "eval_split": "measured",
        "keep_weights": "keeps",
    }
    old = {old_names.get(name, name): value for name, value in new.items()}
    assert {"about", "whole", "sparse", "everything", "measured", "keeps"} < old.keys()
    assert from_json(grid.Cell, json.loads(json.dumps(old | {"recipe": old_recipe}))) == from_json(grid.Cell, new)
    origin = {"format": "timm", "name": "x", "assumptions": ["one wording"]}
    before = {"study": "sweep", "recipe": old_recipe, "origin": origin | {"licence": "mit"}}
    now = {"study": "sweep", "recipe": new["recipe"], "origin": origin | {"license": "mit", "assumptions": ["another"]}}
    Path("earlier").mkdir()
    Path("earlier/study.json").write_text(json.dumps(before))
    with grid.open_study(Path("earlier"), now):
        pass


def test_a_cell_is_what_its_file_says() -> None:
    one = cell("one", resize_whole_image=True, seed=3, train_on_val=True)
    one = dataclasses.replace(
        one, recipe=dataclasses.replace(one.recipe, schedule=ScheduleConfig(decay="linear", warmup=1))
    )
    assert from_json(grid.Cell, json.loads(json.dumps(to_json(one)))) == one


def test_another_study_is_refused_by_what_differs_and_another_folder_by_what_it_is() -> None:
    study = {"study": "sweep", "recipe": {"batch": 512, "optimizer": {"lr": 0.1}}, "rates": (0.1, 0.2)}
    with grid.open_study(Path("mine"), study):
        pass
    with grid.open_study(Path("mine"), study):  # the same, however its numbers are held
        pass
    other = study | {"recipe": {"batch": 512, "optimizer": {"lr": 0.3}}}
    refusal = r"another study, with recipe.optimizer.lr 0.1 and not 0.3"
    with pytest.raises(UsageError, match=refusal), grid.open_study(Path("mine"), other):
        pass
    Path("photos").mkdir()
    Path("photos/a.jpg").touch()
    with pytest.raises(UsageError, match="photos is not a study"), grid.open_study(Path("photos"), study):
        pass
    with pytest.raises(DataError, match="photos is not a study"):
        grid.read_study(Path("photos"))


def test_two_processes_cannot_work_on_one_study() -> None:
    refused = pytest.raises(UsageError, match="in use by another process")
    with grid.open_study(Path("mine"), {"study": "x"}), refused, grid.open_study(Path("mine"), {"study": "x"}):
        pass
    with grid.open_study(Path("mine"), {"study": "x"}):  # when it has ended, another may
        pass


def test_a_line_cut_short_by_a_crash_is_skipped_and_overwritten() -> None:
    folder_path = Path("mine")
    folder_path.mkdir()
    first = {"cell": "a", "status": "done", "top1": 0.5}
    grid._append_result(folder_path, first)
    with (folder_path / "results.jsonl").open("a") as file:
        file.write('{"cell": "b", "sta')
    assert grid.read_results(folder_path) == {"a": first}
    grid._append_result(folder_path, {"cell": "c", "status": "failed"})
    grid._append_result(folder_path, {"cell": "c", "status": "done"})
    assert grid.read_results(folder_path) == {"a": first, "c": {"cell": "c", "status": "done"}}
    assert (folder_path / "results.jsonl").read_text().count("\n") == 3
    damaged = (folder_path / "results.jsonl").read_text().replace('{"cell": "a"', '{"cell"')
    (folder_path / "results.jsonl").write_text(damaged)
    with pytest.raises(DataError, match="line 1 is damaged"):
        grid.read_results(folder_path)


def test_a_process_that_was_killed_is_taken_for_one_without_memory() -> None:
    assert grid._describe_failure(-signal.SIGKILL, "")["exit_code"] == 5
    assert "SIGSEGV" in grid._describe_failure(-signal.SIGSEGV, "last words")["error"]
    records = [{"cell": "a", "status": "done"}, {"cell": "b", **grid._describe_failure(-signal.SIGKILL, "")}]
    with pytest.raises(CellsError, match=r"1 of 2 cells failed; b: killed.*\(x/cells/b/log\)") as failed:
        grid.check_failures(records, Path("x"))
    assert failed.value.exit_code == 5
