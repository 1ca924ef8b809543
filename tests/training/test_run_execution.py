"""What every training command does: its options, what it reports, and the files at a run's end."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_trainer import build_finetune_run, open_colored_images, read_events, read_rows
from tests.training.test_training_run import CPU, build_recipe
from vitrail.config import AugmentConfig
from vitrail.errors import DataError, UsageError
from vitrail.runtime.distributed import SINGLE_PROCESS
from vitrail.training.run_execution import RunCallbacks, RunOptions, execute_run
from vitrail.training.run_results import RunResult


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_every": -1.0}, "--save-every is -1.0; give minutes"),
        ({"save_every": float("nan")}, "--save-every is nan; give minutes"),
        ({"verify_every": -2}, "--verify-every is -2; give a number of steps"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunOptions(**options)


def test_a_run_has_its_options(tmp_path: Path) -> None:
    given = build_finetune_run(tmp_path)
    options = RunOptions(seed=5, workers=3, micro_batches=2, recompute=True, train_on_val=True)
    run = options.build_run(
        given.recipe, given.dataset, SINGLE_PROCESS, CPU, initial_model=given.initial_model, decisions=((3, 5),)
    )
    assert (run.seed, run.workers, run.micro_batches, run.recompute, run.train_on_val) == (5, 3, 2, True, True)
    assert (run.decisions, run.device, run.initial_model) == (((3, 5),), CPU, given.initial_model)


def test_a_run_tells_its_caller_and_leaves_what_it_was_given(tmp_path: Path) -> None:
    notes, reports = list[str](), list[Any]()
    run, folder = build_finetune_run(tmp_path, changes={"epochs": 2}, shard=True), tmp_path / "run"
    callbacks = RunCallbacks(
        notify=notes.append,
        write_report=lambda *given: reports.append(given[:4]),
        command=("vitrail", "finetune", "set"),
    )
    audit = {"contents": "abc", "bad": []}
    result = execute_run(
        run, folder, "set", RunOptions(), callbacks, resume=False, audit=audit, baselines={"nearest neighbor": 3}
    )
    assert isinstance(result, RunResult)
    assert reports == [(run, result, folder, None)]
    assert notes[0].startswith("note: --shard changes nothing in one process")
    assert any("validation" in note and "s of training left" in note for note in notes)
    assert json.loads((folder / "data_report.json").read_text()) == audit
    logged = {event["event"]: event for event in read_events(folder)}
    assert logged["command"]["arguments"] == ["vitrail", "finetune", "set"]
    assert (logged["baseline"]["name"], logged["baseline"]["correct"]) == ("nearest neighbor", 3)


def test_multi_label_runs_leave_scores_of_every_label(tmp_path: Path) -> None:
    chosen = build_recipe(
        model="ti4",
        settings={"width": 32, "depth": 1, "mlp": 64, "heads": 2},
        loss="sigmoid",
        augment=AugmentConfig(crop="squash"),
    )
    dataset = open_colored_images(tmp_path / "set")
    run = RunOptions(workers=0).build_run(chosen, dataset, SINGLE_PROCESS, CPU)
    execute_run(run, tmp_path / "run", "set", RunOptions(), RunCallbacks(), resume=False)
    scores = read_rows(tmp_path / "run" / "per_class.csv")
    assert [row["class"] for row in scores] == ["blue", "green", "red"]
    (event,) = (event for event in read_events(tmp_path / "run") if event["event"] == "multi_label")
    assert 0 <= event["micro_f1"] <= 1


def test_an_image_that_cannot_be_read_ends_a_run_with_the_command_that_finds_all(tmp_path: Path) -> None:
    run = build_finetune_run(tmp_path)
    (tmp_path / "set" / "train" / "rose" / "1.jpg").write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"1\.jpg.*\. `vitrail data check my/set` names every bad image"):
        execute_run(run, tmp_path / "run", "my/set", RunOptions(), RunCallbacks(), resume=False)
