"""A run that is killed, stopped, damaged or out of space goes on to the same weights."""

import dataclasses
import json
import math
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from vitrail import recipes
from vitrail.config import ScheduleConfig
from vitrail.data.sources import open_dataset
from vitrail.errors import DivergedError, ModelError, StoppedError, UsageError
from vitrail.files import compute_sha256
from vitrail.training import checkpoint as states
from vitrail.training.step import build_train_state
from vitrail.training.trainer import Trainer
from vitrail.training.training_run import TrainingRun

Soaked = Callable[[int, str, str, str], None]
WEIGHTS = ("weights/last.safetensors", "weights/best.safetensors")


def build_run(**changes: Any) -> TrainingRun:
    """Everything that draws or remembers is on: dropout, stochastic depth, mixup, an average of weights."""
    named = recipes.get_recipe("digits")
    augment = dataclasses.replace(named.augment, mixup=0.5, cutmix=0.5, randaugment=(1, 5))
    settings = named.settings | {"width": 48, "mlp": 96, "depth": 3}
    recipe = dataclasses.replace(
        named,
        settings=settings,
        epochs=2,
        schedule=ScheduleConfig(warmup=5),
        dropout=0.1,
        stochastic_depth=0.2,
        ema=0.9,
        augment=augment,
    )
    return TrainingRun(
        **({"recipe": recipe, "dataset": open_dataset("digits"), "device": torch.device("cpu")} | changes)
    )


def run_training(
    task: TrainingRun, folder: Path, after_step: Callable[[Any], None] = lambda _: None, **options: Any
) -> Any:
    return Trainer(task, folder, after_step=after_step, **({"save_every_seconds": 0.0} | options)).run()


def read_events(folder: Path) -> list[dict[str, Any]]:
    """What happened, without when."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if key not in ("at", "time", "seconds")} for line in lines]


def digest_weights(folder: Path) -> list[str]:
    return [compute_sha256(folder / name) for name in WEIGHTS]


def kill_run(task: TrainingRun, folder: Path, seconds: float, number: int = signal.SIGKILL) -> int:
    """Run in a child process, which gets a signal after so many seconds; its wait status."""
    child = os.fork()
    if not child:
        code = 1
        try:
            run_training(task, folder, resume=True)
            code = 0
        except StoppedError as error:
            code = error.exit_code
        finally:
            if code == 1:
                traceback.print_exc()  # which pytest shows if the test fails
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.kill(child, number)
    return os.waitpid(child, 0)[1]


def count_equal_runs(count: int, root: Path, workers: int, seed: int) -> int:
    """Kill a run so many times, and compare it with one that was left alone whenever it ends; how often that was."""
    whole, begun = build_run(workers=workers), time.monotonic()
    run_training(whole, root / "whole")
    longest = (time.monotonic() - begun) / 2  # in which it gets halfway, so that it makes headway in spite of all
    draws, kills, ends = random.Random(seed), 0, 0
    while kills < count:
        status = kill_run(whole, root / "killed", draws.uniform(0.02, longest))
        if os.WIFSIGNALED(status):
            kills += 1
        else:  # it came to its end: once more from the beginning, so that there is something to kill
            assert os.waitstatus_to_exitcode(status) == 0
            assert digest_weights(root / "killed") == digest_weights(root / "whole")
            shutil.rmtree(root / "killed")
            ends += 1
    run_training(whole, root / "killed", resume=True)
    assert digest_weights(root / "killed") == digest_weights(root / "whole")
    assert read_events(root / "killed") == read_events(root / "whole")
    rows = [(root / name / "results.csv").read_text().splitlines() for name in ("whole", "killed")]
    assert [len(row) for row in rows] == [3, 3]
    return ends + 1


def test_a_signal_during_the_last_save_loses_nothing(tmp_path: Path) -> None:
    whole = build_run()
    run_training(whole, tmp_path / "whole")
    last = states.format_checkpoint_name(whole.plan.total_steps)

    def saved(path: Path) -> None:
        if path.name == last:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError, match="stopped after the last step, the checkpoint is saved"):
        run_training(whole, tmp_path / "stopped", after_checkpoint=saved)
    assert (tmp_path / "stopped" / "checkpoints" / last / "manifest.json").exists()
    assert run_training(whole, tmp_path / "stopped", resume=True).counts.images == 179
    assert digest_weights(tmp_path / "stopped") == digest_weights(tmp_path / "whole")


def test_a_run_killed_ten_times_ends_with_the_same_weights(tmp_path: Path) -> None:
    count_equal_runs(10, tmp_path, workers=0, seed=0)


@pytest.mark.soak
def test_a_run_killed_a_hundred_times_with_workers_ends_with_the_same_weights(tmp_path: Path, soaked: Soaked) -> None:
    ends = count_equal_runs(100, tmp_path, workers=2, seed=1)
    soaked(1, "a killed run resumes to the same weights", "100 kills", f"100 kills, {ends} ends, same sha256")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_stops_a_run_after_its_step_and_loses_nothing(tmp_path: Path, number: int) -> None:
    run_training(build_run(), tmp_path / "whole", save_every_seconds=600.0)
    seen: list[int] = []
    announced: list[str] = []

    def ask(moment: Any) -> None:
        seen.append(moment.step)
        if moment.step == 7:
            os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(StoppedError, match=r"stopped after step 7 of 45, the checkpoint is saved in .*run;"):
        run_training(build_run(), tmp_path / "run", ask, save_every_seconds=600.0, notify=announced.append)
    assert seen[-1] == 7
    again = "; Ctrl-C again stops at once, without it" if number == signal.SIGINT else ""
    assert f"{signal.Signals(number).name}: saving a checkpoint after this step{again}" in announced
    assert signal.getsignal(signal.SIGINT) is before
    told: list[str] = []
    run_training(build_run(), tmp_path / "run", save_every_seconds=600.0, resume=True, notify=told.append)
    assert "after step 7. Its weights will be bit-identical to those of an uninterrupted run" in told[0]
    assert digest_weights(tmp_path / "run") == digest_weights(tmp_path / "whole")


def test_ctrl_c_for_the_second_time_does_not_wait(tmp_path: Path) -> None:
    def insist(moment: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_training(build_run(), tmp_path / "run", insist)


def test_the_command_ends_with_75_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("train", "digits", "--data", "digits", "--epochs", "1", "--workers", "0", "--device", "cpu")
    monkeypatch.setattr("vitrail.cli.output.show_progress", asking_for_an_end)
    code, _, err = vitrail(*command, capsys=capsys)
    assert code == 75
    assert "the same command with --resume continues" in err
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    code, out, err = vitrail(*command, "--resume", capsys=capsys)
    assert code == 0
    assert "resuming runs/train after step 1." in err
    assert "runs/train/weights/best.safetensors" in out
    code, _, err = vitrail(*command, "--out", "runs/train", capsys=capsys)
    assert code == 2
    assert "resume it (--resume), replace it (--overwrite)" in err
    code, _, err = vitrail(*command, "--out", "runs/train", "--resume", "--lr", "0.5", capsys=capsys)
    assert code == 2
    assert "was started with another recipe.optimizer.lr: 0.01, not 0.5" in err


class asking_for_an_end:  # noqa: N801  # it stands in for a function
    """A progress bar that sends SIGTERM after the first step."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> Callable[..., None]:
        return lambda *_: os.kill(os.getpid(), signal.SIGTERM) if self.what == "training" else None

    def __exit__(self, *_: object) -> None:
        pass


def write_stopped_run(folder: Path) -> Path:
    """A run that was stopped after step 9, with checkpoints of steps 8 and 9."""

    def ask(moment: Any) -> None:
        if moment.step == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError):
        run_training(build_run(), folder, ask)
    assert [path.name for path in states.list_checkpoints(folder / "checkpoints")] == ["step-00000009", "step-00000008"]
    return folder / "checkpoints"


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path) -> None:
    run_training(build_run(), tmp_path / "whole")
    checkpoints = write_stopped_run(tmp_path / "run")
    path = checkpoints / "step-00000009" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    told: list[str] = []
    run_training(build_run(), tmp_path / "run", resume=True, notify=told.append)
    assert "step-00000009 is damaged: optimizer.safetensors does not match its manifest.json" in told[0]
    assert "after step 8." in told[1]
    assert digest_weights(tmp_path / "run") == digest_weights(tmp_path / "whole")


def test_where_no_checkpoint_is_whole_nothing_is_trained(tmp_path: Path) -> None:
    checkpoints = write_stopped_run(tmp_path / "run")
    for path in states.list_checkpoints(checkpoints):
        (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"none of the 2 checkpoints .* is intact; --overwrite starts over"):
        run_training(build_run(), tmp_path / "run", resume=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["loss", "gradient"])
def test_a_bad_number_stops_the_run_before_it_spreads(tmp_path: Path, soaked: Soaked, place: str, value: float) -> None:
    one = build_run()
    model = one.build_model()
    weight = next(parameter for parameter in model.parameters() if parameter.ndim > 1)

    def poison(moment: Any) -> None:
        if moment.step == 6 and place == "loss":
            model.register_forward_hook(lambda *given: given[-1] * value)
        elif moment.step == 6:
            weight.register_hook(lambda gradient: gradient + value)

    class Poisoned(TrainingRun):
        def build_model(self) -> Any:
            return model

    bad = Poisoned(**{field.name: getattr(one, field.name) for field in dataclasses.fields(one)})
    with pytest.raises(DivergedError, match=r"step 6: the loss is .*; nothing was updated") as caught:
        run_training(bad, tmp_path / "run", poison)
    assert caught.value.exit_code == 6
    end = read_events(tmp_path / "run")[-1]
    assert (end["event"], end["step"]) == ("stopped", 6)
    rows = one.training_data.order.get_sample_indices(np.arange(6 * 64, 7 * 64))
    assert end["batch"] == [one.train_split.get_image_name(row) for row in rows.tolist()]
    kept = states.read_newest_checkpoint(tmp_path / "run" / "checkpoints", print)
    assert kept is not None
    assert kept.step == 6
    states.restore_state(restored := build_train_state(one.build_model(), one.recipe), kept)
    assert states.digest_weights(restored.model.state_dict()) == states.digest_weights(
        model.state_dict()
    )  # nothing moved
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    soaked(9, "a bad number stops the run before it spreads", f"{value} in the {place}", "exit 6, weights as saved")


def test_what_is_no_run_or_another_run_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match=r"is no run: it has no config\.json"):
        run_training(build_run(), tmp_path / "other", resume=True)
    write_stopped_run(tmp_path / "run")
    with pytest.raises(UsageError, match="was started with another seed: 0, not 1"):
        run_training(build_run(seed=1), tmp_path / "run", resume=True)


def test_resuming_a_finished_run_says_so_and_changes_nothing(tmp_path: Path) -> None:
    run_training(build_run(), tmp_path / "run")
    before, notes = digest_weights(tmp_path / "run"), list[str]()
    run_training(build_run(), tmp_path / "run", resume=True, notify=notes.append)
    assert any(note.startswith(f"warning: {tmp_path / 'run'} has finished already") for note in notes)
    assert digest_weights(tmp_path / "run") == before


def test_a_run_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    run_training(build_run(), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "events.jsonl").write_text("".join(line for line in events if '"event": "end"' not in line))
    told: list[str] = []
    run_training(build_run(), tmp_path / "run", resume=True, notify=told.append)
    assert "has no checkpoint yet" in told[0]
    assert digest_weights(tmp_path / "run") == digest_weights(tmp_path / "whole")
    assert read_events(tmp_path / "run") == read_events(tmp_path / "whole")


def test_other_threads_are_said_to_change_the_bits(tmp_path: Path) -> None:
    checkpoints = write_stopped_run(tmp_path / "run")
    for path in states.list_checkpoints(checkpoints):
        snapshot = states.read_checkpoint(path)
        snapshot.facts["machine"]["threads"] = 7
        states.write_checkpoint(checkpoints, snapshot)
    told: list[str] = []
    run_training(build_run(), tmp_path / "run", resume=True, notify=told.append)
    assert "Not bit-identical to an uninterrupted run: threads 7 -> 1" in told[0]


def test_a_signal_to_the_whole_group_does_not_kill_the_workers_first(tmp_path: Path) -> None:
    """As `timeout`, systemd and batch systems send it."""

    def ask(moment: Any) -> None:
        if moment.step == 5:
            os.killpg(0, signal.SIGTERM)

    child = os.fork()
    if not child:
        code = 1
        try:
            os.setpgid(0, 0)
            run_training(build_run(workers=2), tmp_path / "run", ask)
        except StoppedError as error:
            code = error.exit_code
        finally:
            if code == 1:
                traceback.print_exc()  # which pytest shows if the test fails
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75
    assert states.list_checkpoints(tmp_path / "run" / "checkpoints")[0].name == "step-00000005"


def test_a_run_that_has_ended_is_measured_again_and_not_trained_again(tmp_path: Path) -> None:
    first = run_training(build_run(), tmp_path / "run", save_every_seconds=600.0)
    (tmp_path / "run" / "letter.txt").write_text("dear")
    before = digest_weights(tmp_path / "run")
    steps: list[Any] = []
    again = run_training(build_run(), tmp_path / "run", steps.append, save_every_seconds=600.0, resume=True)
    assert steps == []
    assert (again.counts.correct, again.temperature) == (first.counts.correct, first.temperature)
    assert digest_weights(tmp_path / "run") == before
    assert (tmp_path / "run" / "letter.txt").read_text() == "dear"
    assert read_events(tmp_path / "run")[-1]["event"] == "end"


def test_overwriting_removes_runs_alone_and_only_when_the_new_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    run_training(build_run(), tmp_path / "run")
    command = (
        "train",
        "digits",
        "--epochs",
        "0.1",
        "--warmup",
        "1",
        "--workers",
        "0",
        "--device",
        "cpu",
        "--overwrite",
    )
    code, _, _ = vitrail(*command, "--data", "nowhere", "--out", "run", capsys=capsys)
    assert code == 3
    assert (tmp_path / "run" / "weights" / "best.safetensors").exists()
    (tmp_path / "precious" / "model").mkdir(parents=True)
    (tmp_path / "precious" / "model" / "config.json").write_text("{}")
    code, _, err = vitrail(*command, "--data", "digits", "--out", "precious", capsys=capsys)
    assert code == 2
    assert "precious is no run to overwrite" in err
    code, _, _ = vitrail(*command, "--data", "digits", "--out", "run", capsys=capsys)
    assert code == 0
    assert len((tmp_path / "run" / "results.csv").read_text().splitlines()) == 2


def test_a_damaged_configuration_is_named(tmp_path: Path) -> None:
    write_stopped_run(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text('{"recipe"')
    with pytest.raises(UsageError, match=r"config\.json is damaged or not of a run; --overwrite starts over"):
        run_training(build_run(), tmp_path / "run", resume=True)
