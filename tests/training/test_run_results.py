"""A run's results: numbers, facts for programs, a sentence for people; and its log, with a logger of two functions."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.training.test_trainer import build_finetune_run, read_events, read_rows, run_training
from tests.training.test_training_run import build_digits_run
from vitrail.evaluation.predictions import Counts, Predictions
from vitrail.training import run_results
from vitrail.training.loop import StepEnd
from vitrail.training.run_results import (
    RESULT_COLUMNS,
    MaskedCounts,
    PretrainingResult,
    RunLog,
    RunResult,
    ValidationResult,
)
from vitrail.training.step import StepResult

STEP_END = StepEnd(step=25, steps=100, epoch=1.25, result=StepResult(0.5, 64, 1.0, 1e-3), seconds=10.0)


def test_the_standard_error_of_a_share_by_hand() -> None:
    assert run_results.standard_error(0.5, 100) == pytest.approx(0.05)
    assert run_results.standard_error(0.9, 100) == pytest.approx(0.03)
    assert run_results.standard_error(0.9, 10) == pytest.approx(0.0948683)
    assert (run_results.standard_error(0.0, 10), run_results.standard_error(1.0, 10)) == (0, 0)


def test_an_evaluation_is_one_line_with_the_time_that_training_has_left() -> None:
    counts = Counts(200, 150, 190, 80.0, torch.zeros(2, 2, dtype=torch.int64))
    result = ValidationResult(STEP_END, 0.25, counts, 1234.5)
    assert str(result) == "epoch 1.25: loss 0.250, validation 75.0%, 1,234 images/s, 30 s of training left"
    assert result.examples is None


@pytest.mark.parametrize(
    ("num_colors", "summary"), [(50, "validation 0.400, 20.0% of the colors"), (0, "validation 0.400")]
)
def test_an_evaluation_of_a_masked_run_shows_its_loss(num_colors: int, summary: str) -> None:
    counts = MaskedCounts(images=5, patches=50, loss=2.0, num_colors=num_colors, correct=10, correct_top5=30)
    assert ValidationResult(STEP_END, 0.25, counts, 10.0).val_summary == summary


def test_the_facts_of_a_supervised_run(tmp_path: Path) -> None:
    """Only classes 0 and 1 have images: 8 of 10 and 9 of 10 are right."""
    run = build_digits_run({}, seed=7)
    confusion = torch.zeros(10, 10, dtype=torch.int64)
    confusion[0, 0], confusion[0, 3], confusion[1, 1], confusion[1, 0] = 8, 2, 9, 1
    empty = Predictions(*[torch.zeros(0)] * 7)
    counts = Counts(20, 17, 20, 10.0, confusion)
    result = RunResult("test", counts, empty, temperature=1.5, calibration_error=0.1, seconds=3.0, epochs=2.0)
    facts = run_results.collect_result_facts(run, result, tmp_path)
    assert (facts["images"], facts["correct"], facts["top1"], facts["loss"]) == (20, 17, 0.85, 0.5)
    assert facts["interval"] == pytest.approx([0.6396, 0.9476], abs=1e-4)  # Wilson's, at 95%
    assert facts["macro"] == pytest.approx(0.85)
    assert facts["weakest"] == {"class": "0", "accuracy": pytest.approx(0.8), "images": 10, "taken_for": "3"}
    assert (facts["trained_images"], facts["seed"]) == (2 * 1439, 7)
    assert (facts["report"], facts["multi_label_metrics"], facts["trained_on"]) == (None, None, False)
    (tmp_path / "report.html").touch()
    facts = run_results.collect_result_facts(run, result, tmp_path)
    assert facts["report"] == str(tmp_path / "report.html")
    assert run_results.summarize_result(facts).startswith(
        "85.0% of 20 test images correct (64.0 to 94.8); weakest: 0, 80%"
    )


def test_the_facts_of_a_masked_run(tmp_path: Path) -> None:
    result = PretrainingResult(images=179, patches=1432, loss=0.5, top1=0.25, top5=0.75, seconds=3.0, epochs=1.0)
    facts = run_results.collect_result_facts(build_digits_run({}), result, tmp_path)
    assert (facts["split"], facts["patches"], facts["trained_images"]) == ("val", 1432, 1439)
    weights = f"({tmp_path}/weights/best.safetensors)"
    assert run_results.summarize_result(facts) == (
        f"val: loss 0.500 of 1,432 masked patches, 25.0% of the colors correct {weights}"
    )
    without_colors = run_results.summarize_result(facts | {"top1": None})
    assert without_colors == f"val: loss 0.500 of 1,432 masked patches {weights}"


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
    run_training(build_digits_run({"epochs": 2}), tmp_path / "run", make_loggers=lambda _: [notes])
    steps = [(step, values) for step, values in notes.sent if "train/step_loss" in values]
    assert [step for step, _ in steps] == list(range(1, 46))
    assert {tuple(values) for _, values in steps} == {("train/step_loss", "train/gradient", "lr")}
    evaluations = [(step, values) for step, values in notes.sent if "val/loss" in values]
    told = [event for event in read_events(tmp_path / "run") if event["event"] == "epoch"]
    assert evaluations == [(event["step"], {name: event[name] for name in SENT}) for event in told]
    last = evaluations[-1][0]
    first_epoch = [values["train/step_loss"] for step, values in steps if step <= evaluations[0][0]]
    mean = sum(first_epoch) / len(first_epoch)  # every step but the run's last has 64 images
    assert last == 45
    assert evaluations[0][1]["train/loss"] == pytest.approx(mean, rel=1e-6)
    result = [(step, values) for step, values in notes.sent if "final/loss" in values]
    end = next(event for event in read_events(tmp_path / "run") if event["event"] == "end")
    names = {"accuracy_top1": "top1", "accuracy_top5": "top5", "loss": "loss", "calibration_error": "calibration_error"}
    assert result == [(45, {f"final/{name}": end[key] for name, key in names.items()})]
    assert notes.sent[-1] == result[0]
    assert notes.closed == 1


def test_a_logger_is_closed_once_also_where_a_run_fails(tmp_path: Path) -> None:
    notes = Notes()

    def fail(_: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        run_training(
            build_finetune_run(tmp_path, changes={"epochs": 2}),
            tmp_path / "run",
            make_loggers=lambda _: [notes],
            after_step=fail,
        )
    assert notes.closed == 1


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
    assert len(read_rows(tmp_path / "results.csv")) == 2
