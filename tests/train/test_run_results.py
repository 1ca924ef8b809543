"""What a run's evaluations and its end show: numbers, facts for programs, a sentence for people."""

from pathlib import Path

import pytest
import torch

from tests.train.test_training_run import learning
from vitrail.evaluate.predictions import Counts, Predictions
from vitrail.train import run_results
from vitrail.train.loop import StepEnd
from vitrail.train.masked_evaluation import MaskedCounts
from vitrail.train.run_results import PretrainingResult, RunResult, ValidationResult
from vitrail.train.step import StepResult

STEP_END = StepEnd(step=25, steps=100, epoch=1.25, result=StepResult(0.5, 64, 1.0, 1e-3), seconds=10.0)


def test_the_standard_error_of_a_share_by_hand() -> None:
    assert run_results.standard_error(0.5, 100) == pytest.approx(0.05)
    assert run_results.standard_error(0.9, 100) == pytest.approx(0.03)
    assert run_results.standard_error(0.9, 10) == pytest.approx(0.0948683)
    assert (run_results.standard_error(0.0, 10), run_results.standard_error(1.0, 10)) == (0, 0)


def test_an_evaluation_is_one_line_with_the_time_that_is_left() -> None:
    counts = Counts(200, 150, 190, 80.0, torch.zeros(2, 2, dtype=torch.int64))
    result = ValidationResult(STEP_END, 0.25, counts, 1234.5)
    assert str(result) == "epoch 1.25: loss 0.250, validation 75.0%, 1,234 images/s, 30 s left"
    assert result.examples is None


@pytest.mark.parametrize(
    ("num_colors", "summary"), [(50, "validation 0.400, 20.0% of the colors"), (0, "validation 0.400")]
)
def test_an_evaluation_of_a_masked_run_shows_its_loss(num_colors: int, summary: str) -> None:
    counts = MaskedCounts(images=5, patches=50, loss=2.0, num_colors=num_colors, right=10, right_in_five=30)
    assert ValidationResult(STEP_END, 0.25, counts, 10.0).val_summary == summary


def test_the_facts_of_a_supervised_run(tmp_path: Path) -> None:
    """Only classes 0 and 1 have images: 8 of 10 and 9 of 10 are right."""
    run = learning({}, seed=7)
    confusion = torch.zeros(10, 10, dtype=torch.int64)
    confusion[0, 0], confusion[0, 3], confusion[1, 1], confusion[1, 0] = 8, 2, 9, 1
    empty = Predictions(*[torch.zeros(0)] * 7)
    counts = Counts(20, 17, 20, 10.0, confusion)
    result = RunResult("test", counts, empty, temperature=1.5, calibration_error=0.1, seconds=3.0, epochs=2.0)
    facts = run_results.collect_result_facts(run, result, tmp_path)
    assert (facts["images"], facts["right"], facts["top1"], facts["loss"]) == (20, 17, 0.85, 0.5)
    assert facts["interval"] == pytest.approx([0.6396, 0.9476], abs=1e-4)  # Wilson's, at 95%
    assert facts["macro"] == pytest.approx(0.85)
    assert facts["weakest"] == {"class": "0", "right": pytest.approx(0.8), "images": 10, "taken_for": "3"}
    assert (facts["trained_images"], facts["seed"]) == (2 * 1439, 7)
    assert (facts["report"], facts["multi_label_metrics"], facts["trained_on"]) == (None, None, False)
    (tmp_path / "report.html").touch()
    facts = run_results.collect_result_facts(run, result, tmp_path)
    assert facts["report"] == str(tmp_path / "report.html")
    assert run_results.summarize_result(facts).startswith(
        "85.0% of 20 test images right (64.0 to 94.8); weakest: 0, 80%"
    )


def test_the_facts_of_a_masked_run(tmp_path: Path) -> None:
    result = PretrainingResult(images=179, patches=1432, loss=0.5, top1=0.25, top5=0.75, seconds=3.0, epochs=1.0)
    facts = run_results.collect_result_facts(learning({}), result, tmp_path)
    assert (facts["split"], facts["patches"], facts["trained_images"]) == ("val", 1432, 1439)
    weights = f"({tmp_path}/weights/best.safetensors)"
    assert run_results.summarize_result(facts) == (
        f"val: loss 0.500 of 1,432 masked patches, 25.0% of the colors right {weights}"
    )
    without_colors = run_results.summarize_result(facts | {"top1": None})
    assert without_colors == f"val: loss 0.500 of 1,432 masked patches {weights}"
