"""The figures and the report that a finished run gets: what training commands pass as `RunCallbacks.write_report`."""

import csv
import shlex
from pathlib import Path

from jinja2 import TemplateError

from vitrail.data.loader import BatchPlan, iter_train_batches
from vitrail.errors import VitrailError
from vitrail.figures import image_grids, plots
from vitrail.report import image_sheets
from vitrail.report.write_report import REPORT_FILE, write_report
from vitrail.train.dataset_checks import Notify
from vitrail.train.deadline import Deadline
from vitrail.train.run_results import PretrainingResult, RunResult
from vitrail.train.training_run import TrainingRun

_GRID_IMAGES = 16  # images in the grid of a batch
_WORST_IMAGES = 24  # images in the grid of the greatest losses
_REPORT_ERRORS = (
    VitrailError, OSError, MemoryError, RuntimeError, TemplateError,
    ArithmeticError, LookupError, TypeError, ValueError,  # what a file may lead to that no check knows
)  # fmt: skip


def write_run_outputs(
    run: TrainingRun, result: RunResult | PretrainingResult, folder: Path, deadline: Deadline | None, notify: Notify
) -> None:
    """Draw the figures of a finished run, and write its report and card."""
    draw_run_images(run, result, folder)
    write_run_report(run, folder, deadline, notify)


def write_run_report(run: TrainingRun, folder: Path, deadline: Deadline | None, notify: Notify) -> None:
    """Write a finished run's report and card. An error here is reported and costs the run nothing."""
    command = shlex.join(["vitrail", "report", str(folder)])
    try:
        has_time = deadline is None or deadline.seconds_left > deadline.figure_seconds
        write_report(folder, run.dataset, run.device, with_figures=has_time)
        notify(f"report: {folder / REPORT_FILE}")
        if not has_time:
            notify(f"note: no time was left for the report's figures of the model: `{command}` draws them")
    except _REPORT_ERRORS as error:
        notify(f"warning: the report is not written ({' '.join(str(error).split())}); `{command}` does it")


def draw_run_images(run: TrainingRun, result: RunResult | PretrainingResult, folder: Path) -> None:
    """Draw the curves, the first batch, and for a supervised run the confusion, calibration and predictions."""
    with (folder / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = {name: [float(row[name] or "nan") for row in rows] for name in rows[0]}
    plots.plot_training_curves(columns, folder / "results.png")
    draw_first_batch(run, folder / "train_batch0.jpg")
    if isinstance(result, RunResult):
        _draw_predictions(run, result, folder)


def _draw_predictions(run: TrainingRun, result: RunResult, folder: Path) -> None:
    predictions, classes, preprocess = result.predictions, run.dataset.classes, run.preprocess
    if result.counts.has_confusion:
        confusion = result.counts.confusion.numpy()
        plots.plot_confusion_matrix(confusion, classes, folder / "confusion_matrix.png")
        plots.plot_confusion_matrix(confusion, classes, folder / "confusion_matrix_normalized.png", normalize=True)
    confidence, correct = predictions.calibration_pairs
    plots.plot_reliability(
        confidence.numpy(), correct.numpy(), folder / "reliability.png", calibration_error=result.calibration_error
    )
    split, first = run.dataset.splits[result.split], range(min(_GRID_IMAGES, len(predictions.images)))
    worst = predictions.losses.argsort(descending=True)[:_WORST_IMAGES].tolist()
    image_sheets.draw_prediction_sheet(split, classes, preprocess, predictions, first, folder / "val_batch0_pred.jpg")
    image_sheets.draw_labeled_sheet(
        split, classes, preprocess, predictions.images[list(first)].tolist(), folder / "val_batch0_labels.jpg"
    )
    image_sheets.draw_prediction_sheet(split, classes, preprocess, predictions, worst, folder / "top_losses.jpg")


def draw_first_batch(run: TrainingRun, path: Path) -> None:
    """Draw the first training images as the model sees them, before they are mixed."""
    training = run.training_data
    count = min(_GRID_IMAGES, run.plan.get_step_size(0))
    batch = next(iter_train_batches(training, BatchPlan(batch_size=count, total_positions=count)))
    rows = training.order.get_sample_indices(batch.positions.numpy()).tolist()[:count]
    captions = [image_sheets.format_labels(training.split, run.dataset.classes, row) for row in rows]
    image_grids.write_image_grid(batch.pixels[:count], captions, path)
