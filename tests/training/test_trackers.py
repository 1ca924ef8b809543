"""Experiment trackers: TensorBoard's files, MLflow's file store and W&B's offline files, read back."""

import importlib
import json
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

import vitrail
from tests.training.test_run_results import SENT
from tests.training.test_trainer import read_events, read_rows, run_training
from tests.training.test_training_run import build_digits_run
from tests.training.wandb_server import serve_wandb
from vitrail.cli import options
from vitrail.errors import RemoteError, UsageError
from vitrail.runtime.workers import ignore_note
from vitrail.training import trackers
from vitrail.training.run_execution import RunOptions
from vitrail.training.trackers import BackgroundLogger, Rows, TensorBoardLogger, Tracker, open_tracker

STEP_NAMES = {"train/step_loss", "train/gradient", "lr"}
FINAL_NAMES = {f"final/{name}" for name in ("accuracy_top1", "accuracy_top5", "loss", "calibration_error")}


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """MLflow with a file store."""
    package = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'vitrail[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    return package


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """W&B in offline mode, with time to end on a busy machine."""
    monkeypatch.setattr(trackers, "_CLOSE_SECONDS", 300.0)
    monkeypatch.setitem(trackers._WANDB_DEFAULTS, "finish_timeout", 240.0)
    package = pytest.importorskip("wandb", reason="W&B is not installed: pip install 'vitrail[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_PROJECT", "WANDB_DIR", "WANDB_NAME", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    package.teardown()  # or it would keep the settings of the test before
    yield package
    package.teardown()


def train_tracked(tracker: Tracker, folder: Path, **more: Any) -> None:
    run_training(
        build_digits_run({"epochs": 2}),
        folder,
        make_loggers=lambda path: open_tracker(tracker, path, ignore_note),
        **more,
    )


def train_and_kill(tracker: Tracker, folder: Path) -> None:
    """Train in another process that is killed in step 10, when steps to 9 are sent and 3 is the newest checkpoint."""
    script = f"""
        import math, os, signal, time
        from pathlib import Path
        from tests.training.test_training_run import build_digits_run
        from vitrail.training.trackers import open_tracker
        from vitrail.training.trainer import Trainer

        def wait_or_die(step_end):
            if step_end.step == 4:
                trainer.checkpoint_writer.wait()
                trainer.save_every_seconds = math.inf
            if step_end.step in (8, 9, 10):
                time.sleep(1.5)
            if step_end.step == 10:
                os.kill(os.getpid(), signal.SIGKILL)

        trainer = Trainer(
            build_digits_run({{"epochs": 2}}), Path({str(folder)!r}), after_step=wait_or_die, save_every_seconds=0.0,
            make_loggers=lambda path: open_tracker({tracker!r}, path, print),
        )
        trainer.run()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def read_id(folder: Path, tracker: str) -> str:
    return json.loads((folder / "tracking.json").read_text())[tracker]["id"]


# --- which tracker ----------------------------------------------------------------------------------------------------


def test_without_a_tracker_nothing_is_imported_or_written(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from vitrail.training import run_execution, trackers;"
        " assert trackers.open_tracker(None, Path('.'), print) == [];"
        " assert not {'wandb', 'mlflow', 'tensorboard'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command_and_python_take_the_same_trackers() -> None:
    assert get_args(options.Tracker) == get_args(Tracker)


class OwnLogger:
    """A logger that is told what it gets."""

    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}
        self.closed = 0

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.values.setdefault(step, {}).update(values)

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("track", ["neptune", ["tensorboard", 5], object(), OwnLogger])
def test_what_is_no_tracker_and_no_logger_is_refused(track: Any) -> None:
    with pytest.raises(UsageError, match=r"--track is .*; it takes tensorboard, wandb, mlflow, or objects with log_sc"):
        RunOptions(track=track)


def test_loggers_of_the_caller_get_every_step_and_are_closed_once(tmp_path: Path) -> None:
    own, other = OwnLogger(), OwnLogger()
    run = vitrail.train(
        "digits", "digits", epochs=0.2, out=tmp_path / "run", track=[own, other], workers=0, device="cpu"
    )
    assert set(own.values) == set(range(1, run.config["steps"] + 1))
    last = own.values[run.config["steps"]]
    assert last["val/loss"] == pytest.approx(run.history["val/loss"][-1], rel=1e-4)
    assert last["final/accuracy_top1"] == run.accuracy
    assert (own.closed, other.closed) == (1, 1)
    assert own.values == other.values


@pytest.mark.parametrize(
    ("tracker", "module", "line"),
    [
        ("tensorboard", "torch.utils.tensorboard", r"TensorBoard is not installed: pip install 'vitrail\[track\]'"),
        ("wandb", "wandb", r"Weights & Biases is not installed: pip install 'vitrail\[wandb\]'"),
        ("mlflow", "mlflow", r"MLflow is not installed: pip install 'vitrail\[mlflow\]'"),
    ],
)
@pytest.mark.parametrize("has_folder", [False, True])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: Tracker, module: str, line: str, has_folder: bool
) -> None:
    """Also where a folder of that name can be imported, such as ./wandb with the files of earlier runs."""
    real = importlib.import_module

    def fail(name: str, package: str | None = None) -> ModuleType:
        if name != module:
            return real(name, package)
        if has_folder:
            return ModuleType(name)
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", fail)
    for name in ("WANDB_ERROR_REPORTING", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "unset")
    with pytest.raises(UsageError, match=line):
        open_tracker(tracker, tmp_path, ignore_note)


@pytest.mark.parametrize(("folder", "name"), [("runs/flowers", "flowers"), ("runs/flowers/seed-3", "flowers/seed-3")])
def test_a_run_is_named_by_its_folder(tmp_path: Path, folder: str, name: str) -> None:
    assert trackers._name_run(tmp_path / folder) == name


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tracking.json").write_text('{"wandb": {"id"')
    with pytest.raises(UsageError, match="is damaged; without it the run is tracked as a new one"):
        trackers._read_record(tmp_path, "wandb")


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def test_tensorboard_can_read_the_numbers_of_the_table(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_training(
        build_digits_run({"epochs": 2}),
        tmp_path / "run",
        make_loggers=lambda folder: [TensorBoardLogger(folder / "tensorboard")],
    )
    accumulator = reading.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    accumulator.Reload()
    table = read_rows(tmp_path / "run" / "results.csv")
    steps = [event["step"] for event in read_events(tmp_path / "run") if event["event"] == "epoch"]
    for name in SENT:
        scalars = accumulator.Scalars(name)
        assert [scalar.step for scalar in scalars] == steps
        assert [scalar.value for scalar in scalars] == pytest.approx([float(row[name]) for row in table], rel=1e-5)
    assert [scalar.step for scalar in accumulator.Scalars("train/step_loss")] == list(range(1, 46))
    assert set(accumulator.Tags()["scalars"]) == {*SENT, *STEP_NAMES, *FINAL_NAMES}


# --- MLflow -----------------------------------------------------------------------------------------------------------


def read_mlflow(mlflow: ModuleType, run_id: str) -> tuple[Any, dict[str, dict[int, float]]]:
    """A run, and its metrics by name and step; a step that is there twice is an error."""
    client = mlflow.MlflowClient()
    run = client.get_run(run_id)
    metrics: dict[str, dict[int, float]] = {}
    for name in run.data.metrics:
        history = client.get_metric_history(run_id, name)
        metrics[name] = {point.step: point.value for point in history}
        assert len(metrics[name]) == len(history), name
    return run, metrics


def check_numbers(folder: Path, metrics: Mapping[str, Mapping[int, float]], lr: str = "lr") -> None:
    """The metrics are those of all 45 steps, of the evaluations in results.csv, and of the result."""
    assert set(metrics) == {*SENT, *(STEP_NAMES - {"lr"}), lr, *FINAL_NAMES}
    for name in (*(STEP_NAMES - {"lr"}), lr):
        assert list(metrics[name]) == list(range(1, 46)), name
    evaluations = [event for event in read_events(folder) if event["event"] == "epoch"]
    for name in SENT:
        assert metrics[name] == {event["step"]: pytest.approx(event[name]) for event in evaluations}
    end = next(event for event in read_events(folder) if event["event"] == "end")
    assert metrics["final/accuracy_top1"] == {45: pytest.approx(end["top1"])}


def test_mlflow_has_the_numbers_and_the_configuration(tmp_path: Path, mlflow: ModuleType) -> None:
    folder = tmp_path / "flowers"
    train_tracked("mlflow", folder)
    run, metrics = read_mlflow(mlflow, read_id(folder, "mlflow"))
    check_numbers(folder, metrics, lr="lr/step")
    config = json.loads((folder / "config.json").read_text())
    assert (run.info.run_name, run.info.status) == ("flowers", "FINISHED")
    assert mlflow.MlflowClient().get_experiment(run.info.experiment_id).name == "vitrail"
    assert run.data.params["recipe.optimizer.lr"] == str(config["recipe"]["optimizer"]["lr"])
    assert run.data.params["data"] == "digits"
    assert json.loads(run.data.params["classes"]) == config["classes"]


def test_a_killed_run_continues_in_mlflow(tmp_path: Path, mlflow: ModuleType) -> None:
    folder = tmp_path / "run"
    train_and_kill("mlflow", folder)
    run_id = read_id(folder, "mlflow")
    run, metrics = read_mlflow(mlflow, run_id)
    assert max(metrics["train/step_loss"]) >= 9
    assert run.info.status == "RUNNING"
    train_tracked("mlflow", folder, resume=True)
    assert read_id(folder, "mlflow") == run_id
    run, metrics = read_mlflow(mlflow, run_id)
    check_numbers(folder, metrics, lr="lr/step")
    assert run.info.status == "FINISHED"
    assert len(mlflow.MlflowClient().search_runs([run.info.experiment_id])) == 1


def test_mlflow_reads_its_own_variables_and_shows_failure(
    tmp_path: Path, mlflow: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")

    def fail(_: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        train_tracked("mlflow", tmp_path / "run", after_step=fail)
    experiment = mlflow.MlflowClient().get_experiment_by_name("mine")
    (run,) = mlflow.MlflowClient().search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"


def test_a_new_run_is_refused_without_its_server_and_a_resumed_one_goes_on(
    tmp_path: Path, mlflow: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(RemoteError, match="MLflow cannot be used: "):
        open_tracker("mlflow", tmp_path, ignore_note)
    (tmp_path / "tracking.json").write_text('{"mlflow": {"id": "0123"}}')
    notes: list[str] = []
    assert open_tracker("mlflow", tmp_path, notes.append) == []
    assert len(notes) == 1
    assert "The run continues without it" in notes[0]


# --- Weights & Biases -------------------------------------------------------------------------------------------------


def read_leveldb_log(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a log of LevelDB, in blocks of 32 KiB, after a header of 7 bytes."""
    assert content[:4] == b":W&B"
    position, record = 7, b""
    while position + 7 <= len(content):
        left = 2**15 - position % 2**15
        if left < 7:  # no room for a header: padding
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        if kind == 0 or position + 7 + length > len(content):
            return
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""


def read_wandb(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, dict[int, float]]]]:
    """The run's facts and metrics of each file that W&B wrote in offline mode, the oldest first."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        facts: dict[str, Any] = {"files": sorted(file.name for file in path.parent.glob("files/*"))}
        metrics: dict[str, dict[int, float]] = {}
        for data in read_leveldb_log(path.read_bytes()):
            record = records.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                facts |= {"id": record.run.run_id, "name": record.run.display_name, "project": record.run.project}
                facts["host"] = record.run.host
                facts["config"] = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif record.HasField("exit"):
                facts["exit"] = record.exit.exit_code
            elif record.HasField("history"):
                items = record.history.item
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
                for name in row.keys() - {"_step", "_runtime", "_timestamp"}:
                    assert row["_step"] not in metrics.setdefault(name, {})
                    metrics[name][row["_step"]] = row[name]
        yield facts, metrics


def test_wandb_has_the_numbers_and_the_configuration(tmp_path: Path, wandb: ModuleType) -> None:
    folder = tmp_path / "flowers"
    train_tracked("wandb", folder)
    ((facts, metrics),) = read_wandb(folder)
    check_numbers(folder, metrics)
    assert (facts["id"], facts["name"]) == (read_id(folder, "wandb"), "flowers")
    assert (facts["project"], facts["exit"]) == ("vitrail", 0)
    config = json.loads((folder / "config.json").read_text())
    assert {name: facts["config"][name] for name in config} == config
    assert not {"output.log", "requirements.txt", "wandb-metadata.json"} & set(facts["files"])


def test_a_killed_run_continues_in_wandb(tmp_path: Path, wandb: ModuleType) -> None:
    """Offline the two parts are two files of one id; no step is in both."""
    folder = tmp_path / "run"
    train_and_kill("wandb", folder)
    train_tracked("wandb", folder, resume=True)
    (first, before), (second, after) = read_wandb(folder)
    assert first["id"] == second["id"] == read_id(folder, "wandb")
    assert max(before["train/step_loss"]) >= 8  # W&B's file lacks the step that it still collects
    metrics = {name: before.get(name, {}) | values for name, values in after.items()}
    assert not any(before[name].keys() & after[name].keys() for name in before)
    missing = set(range(1, 46)) - metrics["train/step_loss"].keys()
    assert missing <= {9, 10}
    assert metrics["final/loss"].keys() == {45}


def test_wandb_reads_its_own_variables_and_shows_failure(
    tmp_path: Path, wandb: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))

    def fail(_: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        train_tracked("wandb", tmp_path / "run", after_step=fail)
    ((facts, _),) = read_wandb(tmp_path)
    assert (facts["project"], facts["exit"]) == ("mine", 1)


def test_a_resumed_run_continues_on_a_wandb_server(
    tmp_path: Path, wandb: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that the server has keep their first numbers."""
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", 40 * "a")
    with serve_wandb() as (address, histories):
        monkeypatch.setenv("WANDB_BASE_URL", address)
        for number, steps in enumerate([range(1, 9), range(4, 13)]):
            notes: list[str] = []
            (logger,) = open_tracker("wandb", tmp_path, notes.append)
            for step in steps:
                logger.log_scalars(step, {"loss": float(number)})
            logger.close()
            run_id = read_id(tmp_path, "wandb")
            assert notes == [f"tracked by Weights & Biases: {address}/me/vitrail/runs/{run_id}"]
    (history,) = histories.values()
    assert [(row["_step"], row["loss"]) for row in history] == [(step, float(step > 8)) for step in range(1, 13)]


def test_wandb_without_a_server_refuses_a_new_run(
    tmp_path: Path, wandb: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", 40 * "a")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    with pytest.raises(RemoteError, match="Weights & Biases cannot be used: "):
        open_tracker("wandb", tmp_path, ignore_note)


# --- a tracker that fails ---------------------------------------------------------------------------------------------


class FailingRun:
    """A remote run whose server is gone for some batches of rows."""

    title, address = "A tracker", "nowhere"

    def __init__(self, good: int, bad: int) -> None:
        self.good, self.bad = good, bad
        self.steps: list[int] = []
        self.threads: set[int] = set()
        self.finished = 0

    def log_rows(self, rows: Rows) -> None:
        self.threads.add(threading.get_ident())
        self.good -= 1
        if self.good < 0 <= self.good + self.bad:
            raise ConnectionResetError("the server\nis gone")
        self.steps += [step for step, _ in rows]

    def finish(self) -> None:
        self.finished += 1


def log_steps(logger: BackgroundLogger, steps: int) -> None:
    for step in range(steps):
        logger.log_scalars(step, {"loss": 1.0})
        assert logger._sending is not None
        logger._sending.wait(10)


def test_a_tracker_that_fails_is_a_warning_once_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_SEND_EVERY_SECONDS", 0.0)
    remote_run, notes = FailingRun(good=2, bad=3), list[str]()
    logger = BackgroundLogger(remote_run, notes.append)
    log_steps(logger, 8)
    logger.close()
    assert remote_run.steps == [0, 1, 5, 6, 7]
    assert remote_run.finished == 1
    assert len(remote_run.threads) == 1
    assert threading.get_ident() not in remote_run.threads
    assert len(notes) == 1
    assert notes[0].startswith("warning: A tracker fails: the server is gone. The run continues;")


def test_a_run_is_the_same_with_a_tracker_that_fails(tmp_path: Path) -> None:
    notes: list[str] = []
    logger = BackgroundLogger(FailingRun(good=1, bad=1000), notes.append)
    run_training(build_digits_run({"epochs": 2}), tmp_path / "tracked", make_loggers=lambda _: [logger])
    run_training(build_digits_run({"epochs": 2}), tmp_path / "plain")
    assert len(notes) == 1
    last = [(tmp_path / name / "weights" / "last.safetensors").read_bytes() for name in ("tracked", "plain")]
    assert last[0] == last[1]


def test_a_tracker_that_does_not_answer_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(trackers, "_SEND_EVERY_SECONDS", 0.0)
    release, remote_run, notes = threading.Event(), FailingRun(good=9, bad=0), list[str]()
    monkeypatch.setattr(remote_run, "log_rows", lambda _: release.wait(60))
    logger = BackgroundLogger(remote_run, notes.append)
    start = time.monotonic()
    for step in range(1000):
        logger.log_scalars(step, {"loss": 1.0})
    logger.close()
    release.set()
    assert time.monotonic() - start < 10
    assert len(notes) == 1
    assert "A tracker fails: no answer for 0 s" in notes[0]
