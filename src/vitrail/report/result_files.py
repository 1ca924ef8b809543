"""Files of results: the figures of a finished run, and the tables and figures of an evaluation."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.config import PreprocessConfig
from vitrail.data.dataset import Dataset, Split
from vitrail.data.decode import decode
from vitrail.data.loader import BatchPlan, iter_train_batches
from vitrail.data.transforms import make_eval_input
from vitrail.evaluation import prediction_tables
from vitrail.evaluation.calibration import compute_risk_coverage, count_bins
from vitrail.evaluation.dataset_evaluation import ModelEvaluation
from vitrail.evaluation.label_metrics import list_label_confusions, list_threshold_scores, measure_labels
from vitrail.evaluation.predictions import Predictions
from vitrail.training.run_results import PretrainingResult, RunResult
from vitrail.training.training_run import TrainingRun
from vitrail.visualization import image_grids, plots

_GRID_IMAGES = 16  # images in the grid of a batch
_WORST_IMAGES = 24  # images in the grid of a run's greatest losses
_EVALUATION_IMAGES = 64  # images in a grid of an evaluation
_NO_LABEL = "no label"


# --- a run -----------------------------------------------------------------------------------------------------------


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
        _plot_confusion(result.counts.confusion.numpy(), classes, folder)
    binned, error = count_bins(*predictions.calibration_pairs), result.calibration_error
    plots.plot_reliability(binned.counts, binned.correct, folder / "reliability.png", calibration_error=error)
    split, first = run.dataset.splits[result.split], list(range(min(_GRID_IMAGES, len(predictions.images))))
    rows = predictions.images[first].tolist()
    captions = [_format_labels(split, classes, row) for row in rows]
    image_grids.write_image_grid(load_inputs(split, rows, preprocess), captions, folder / "val_batch0_labels.jpg")
    worst = predictions.losses.argsort(descending=True)[:_WORST_IMAGES].tolist()
    for indices, name in ((first, "val_batch0_pred.jpg"), (worst, "top_losses.jpg")):
        grid = _make_prediction_grid(split, classes, preprocess, predictions, indices, classes)
        image_grids.write_jpeg(grid, folder / name)


def draw_first_batch(run: TrainingRun, path: Path) -> None:
    """Draw the first training images as the model sees them, before they are mixed."""
    training = run.training_data
    count = min(_GRID_IMAGES, run.plan.get_batch_size(0))
    batch = next(iter_train_batches(training, BatchPlan(batch_size=count, total_samples=count)))
    rows = training.order.get_sample_indices(batch.positions.numpy()).tolist()[:count]
    captions = [_format_labels(training.split, run.dataset.classes, row) for row in rows]
    image_grids.write_image_grid(batch.pixels[:count], captions, path)


# --- an evaluation ---------------------------------------------------------------------------------------------------


def write_evaluation(
    dataset: Dataset, images: Split, results: Sequence[ModelEvaluation], facts: dict[str, Any], folder: Path
) -> None:
    """Write tables and figures: of one model into the folder itself, of several into one folder each."""
    for number, result in enumerate(results):
        model_folder = folder if len(results) == 1 else folder / f"model-{number}"
        model_folder.mkdir(parents=True, exist_ok=True)
        _write_model(dataset, images, result, model_folder)
    (folder / "evaluate.json").write_text(json.dumps(facts, indent=2) + "\n")
    curves = {}
    for result in results:
        predictions = result.evaluation.predictions
        curve = compute_risk_coverage(predictions.confidence, predictions.correct)
        curves[result.evaluated_model.name] = (curve.coverage.numpy(), curve.accuracy.numpy())
    plots.plot_risk_coverage(curves, folder / "risk_coverage.png")
    for number, other in enumerate(results[1:], 1):
        _draw_differences(images, results[0], other, folder / f"differences-{number}.jpg")


def _write_model(dataset: Dataset, images: Split, result: ModelEvaluation, folder: Path) -> None:
    predictions, counts, names = result.evaluation.predictions, result.evaluation.counts, result.names
    prediction_tables.write_predictions(images, dataset.classes, names, predictions, folder / "predictions.csv")
    if counts.has_confusion:
        prediction_tables.write_class_table(counts, names, folder / "per_class.csv")
        occurring = ((counts.confusion.sum(dim=0) + counts.confusion.sum(dim=1)) > 0).nonzero()[:, 0]
        confusion = counts.confusion[occurring][:, occurring].numpy()
        _plot_confusion(confusion, [names[index] for index in occurring.tolist()], folder)
    if predictions.multi_label:
        _write_labels(result, folder)
    binned, error = count_bins(*predictions.calibration_pairs), result.metrics.calibration_error
    plots.plot_reliability(binned.counts, binned.correct, folder / "reliability.png", calibration_error=error)
    worst = predictions.losses.argsort(descending=True)[:_EVALUATION_IMAGES].tolist()
    image_grids.write_jpeg(make_evaluation_grid(dataset, images, result, worst), folder / "top_losses.jpg")


def _write_labels(result: ModelEvaluation, folder: Path) -> None:
    """Write the scores of each label, F1 by threshold, and which labels are mistaken for which."""
    predictions, names = result.evaluation.predictions, result.names
    path = folder / "per_class.csv"
    prediction_tables.write_label_scores(measure_labels(predictions), names, result.label_thresholds, path)
    scores = list_threshold_scores(predictions)
    prediction_tables.write_threshold_scores(scores, folder / "f1_by_threshold.csv")
    plots.plot_f1_by_threshold(scores, folder / "f1_by_threshold.png")
    prediction_tables.write_label_confusions(list_label_confusions(predictions), names, folder / "label_confusions.csv")


def make_evaluation_grid(
    dataset: Dataset, images: Split, result: ModelEvaluation, indices: Sequence[int]
) -> Image.Image:
    """Images of an evaluation with what was predicted for them, those at `indices` of its predictions."""
    predictions, preprocess = result.evaluation.predictions, result.evaluated_model.preprocess
    return _make_prediction_grid(images, dataset.classes, preprocess, predictions, indices, result.names)


def _draw_differences(images: Split, one: ModelEvaluation, other: ModelEvaluation, path: Path) -> None:
    """Draw the images on which exactly one of two models is correct, with both predictions."""
    first, second = one.evaluation.predictions, other.evaluation.predictions
    indices = (first.correct != second.correct).nonzero()[:, 0].tolist()[:_EVALUATION_IMAGES]
    if not indices:
        return
    captions = [
        f"{_format_predicted(first, index, one.names)} / {_format_predicted(second, index, other.names)}"
        for index in indices
    ]
    inputs = load_inputs(images, first.images[indices].tolist(), one.evaluated_model.preprocess)
    image_grids.write_image_grid(inputs, captions, path, correct=first.correct[indices].tolist())


# --- figures of both -------------------------------------------------------------------------------------------------


def _plot_confusion(confusion: NDArray[Any], names: Sequence[str], folder: Path) -> None:
    plots.plot_confusion_matrix(confusion, names, folder / "confusion_matrix.png")
    plots.plot_confusion_matrix(confusion, names, folder / "confusion_matrix_normalized.png", normalize=True)


def _make_prediction_grid(
    split: Split,
    classes: Sequence[str],
    preprocess: PreprocessConfig,
    predictions: Predictions,
    indices: Sequence[int],
    output_names: Sequence[str],
) -> Image.Image:
    """Images with what was predicted for them, those at `indices` of the predictions.

    `output_names` are the model's names of its classes; the dataset may have other names or fewer classes.
    """
    chosen = list(indices)
    rows, correct = predictions.images[chosen].tolist(), predictions.correct[chosen].tolist()
    captions = []
    for index, row, is_correct in zip(indices, rows, correct, strict=True):
        if predictions.multi_label:
            captions.append(_format_label_mistakes(predictions, index, output_names))
            continue
        predicted = _format_predicted(predictions, index, output_names)
        caption = f"{predicted} {float(predictions.confidence[index]):.0%}"
        captions.append(caption if is_correct else f"{caption}, is {_format_labels(split, classes, row)}")
    return image_grids.make_image_grid(load_inputs(split, rows, preprocess), captions, correct=correct)


def load_inputs(split: Split, rows: Sequence[int], preprocess: PreprocessConfig) -> Tensor:
    """Load model inputs of a split, uint8 (B, C, S, S)."""
    channels = len(preprocess.mean)
    images = (decode(source, channels, name=name) for name, source in split.read_images(rows))
    return torch.stack([make_eval_input(image, preprocess) for image in images])


def _format_labels(split: Split, classes: Sequence[str], row: int) -> str:
    return ", ".join(classes[index] for index in split.get_labels(row)) or _NO_LABEL


def _format_predicted(predictions: Predictions, index: int, names: Sequence[str]) -> str:
    return ", ".join(names[output] for output in predictions.get_predicted_classes(index)) or _NO_LABEL


def _format_label_mistakes(predictions: Predictions, index: int, names: Sequence[str]) -> str:
    """The labels that are right, then those that are missing and those that are extra."""
    truth, predicted = predictions.label_targets[index], predictions.predicted_labels[index]
    parts = {"": truth & predicted, "missing ": truth & ~predicted, "extra ": predicted & ~truth}
    listed = {
        title: ", ".join(names[label] for label in chosen.nonzero()[:, 0].tolist()) for title, chosen in parts.items()
    }
    return "; ".join(f"{title}{labels}" for title, labels in listed.items() if labels) or _NO_LABEL
