"""What a run writes down reaches its loggers too, TensorBoard among them."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from tests.train.test_trainer import events, rows, trained, tuned
from tests.train.test_training_run import learning
from vitrail.errors import UsageError
from vitrail.train.run_log import RESULT_COLUMNS, RunLog, TensorBoardLogger

SENT = [name for name in RESULT_COLUMNS if name not in ("epoch", "time")]


class Notes:
    """A logger that remembers."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        assert not self.closed
        self.sent.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


def test_anything_with_two_functions_is_a_logger(tmp_path: Path) -> None:
    notes = Notes()
    trained(learning({"epochs": 2}), tmp_path / "run", make_loggers=lambda _: [notes])
    steps = [(step, values) for step, values in notes.sent if "train/step_loss" in values]
    assert [step for step, _ in steps] == list(range(1, 46))
    assert {tuple(values) for _, values in steps} == {("train/step_loss", "train/gradient", "lr")}
    evaluations = [(step, values) for step, values in notes.sent if "val/loss" in values]
    told = [event for event in events(tmp_path / "run") if event["event"] == "epoch"]
    assert evaluations == [(event["step"], {name: event[name] for name in SENT}) for event in told]
    last = evaluations[-1][0]
    first_epoch = [values["train/step_loss"] for step, values in steps if step <= evaluations[0][0]]
    mean = sum(first_epoch) / len(first_epoch)  # every step but the run's last has 64 images
    assert last == 45
    assert evaluations[0][1]["train/loss"] == pytest.approx(mean, rel=1e-6)
    assert notes.closed == 1


def test_a_logger_is_closed_once_also_where_a_run_fails(tmp_path: Path) -> None:
    notes = Notes()

    def fail(_: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        trained(
            tuned(tmp_path, changes={"epochs": 2}), tmp_path / "run", make_loggers=lambda _: [notes], after_step=fail
        )
    assert notes.closed == 1


def test_tensorboard_can_read_the_numbers_of_the_table(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trained(
        learning({"epochs": 2}),
        tmp_path / "run",
        make_loggers=lambda folder: [TensorBoardLogger(folder / "tensorboard")],
    )
    found = reading.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    table = rows(tmp_path / "run" / "results.csv")
    steps = [event["step"] for event in events(tmp_path / "run") if event["event"] == "epoch"]
    for name in SENT:
        scalars = found.Scalars(name)
        assert [scalar.step for scalar in scalars] == steps
        assert [scalar.value for scalar in scalars] == pytest.approx([float(row[name]) for row in table], rel=1e-5)
    assert [scalar.step for scalar in found.Scalars("train/step_loss")] == list(range(1, 46))
    assert set(found.Tags()["scalars"]) == {*SENT, "train/step_loss", "train/gradient", "lr"}


def test_without_tensorboard_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> ModuleType:
        if name == "torch.utils.tensorboard":
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UsageError, match=r"TensorBoard is not installed: pip install 'vitrail\[track\]'"):
        TensorBoardLogger(tmp_path)


def test_a_book_by_hand(tmp_path: Path) -> None:
    notes = Notes()
    book = RunLog(tmp_path, [notes])
    book.log_evaluation(7, (1.0, 2.5, 0.1234567, 0.5, 1.0, 0.7, 1e-3))
    book.log_event("checkpoint", step=8)
    book.write_line("a sentence")
    book.close()
    assert (tmp_path / "results.csv").read_text().splitlines() == [
        "epoch,time,train/loss,metrics/accuracy_top1,metrics/accuracy_top5,val/loss,lr/pg0",
        "1,2.5,0.123457,0.5,1,0.7,0.001",
    ]
    first, second = (json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())
    assert (first["event"], first["step"], first["train/loss"]) == ("epoch", 7, 0.1234567)
    assert {key: second[key] for key in second if key != "at"} == {"event": "checkpoint", "step": 8}
    assert first["at"] <= second["at"]
    assert (tmp_path / "run.log").read_text().endswith(" a sentence\n")
    assert notes.sent == [(7, dict(zip(SENT, (0.1234567, 0.5, 1.0, 0.7, 1e-3), strict=True)))]
    RunLog(tmp_path).log_evaluation(
        9, (2.0, 5.0, 0.1, 0.5, 1.0, 0.7, 0.0)
    )  # opened again, as a run that is resumed does
    assert len(rows(tmp_path / "results.csv")) == 2
