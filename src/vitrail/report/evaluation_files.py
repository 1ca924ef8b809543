"""The files of an evaluation: tables by image and by class, and figures of its errors and confidence."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.data.dataset import Dataset, Split
from vitrail.evaluate import abstention, prediction_tables
from vitrail.evaluate.evaluation import ModelEvaluation
from vitrail.evaluate.multi_label import measure_labels
from vitrail.figures import image_grids, plots
from vitrail.report import image_sheets

_MAX_SHEET_IMAGES = 64


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
        curve = abstention.compute_risk_coverage(predictions.confidence, predictions.correct)
        curves[result.evaluated_model.name] = (curve.coverage.numpy(), curve.accuracy.numpy())
    plots.plot_risk_coverage(curves, folder / "risk_coverage.png")
    for number, other in enumerate(results[1:], 1):
        _draw_differences(images, results[0], other, folder / f"differences-{number}.jpg")


def _write_model(dataset: Dataset, images: Split, result: ModelEvaluation, folder: Path) -> None:
    predictions = result.evaluation.predictions
    prediction_tables.write_predictions(images, dataset.classes, result.names, predictions, folder / "predictions.csv")
    if result.evaluation.counts.has_confusion:
        _write_classes(result, folder)
    if predictions.multi_label:
        prediction_tables.write_label_scores(measure_labels(predictions), result.names, folder / "per_class.csv")
    confidence, correct = predictions.calibration_pairs
    plots.plot_reliability(
        confidence.numpy(),
        correct.numpy(),
        folder / "reliability.png",
        calibration_error=result.metrics.calibration_error,
    )
    worst = predictions.losses.argsort(descending=True)[:_MAX_SHEET_IMAGES].tolist()
    image_sheets.draw_prediction_sheet(
        images,
        dataset.classes,
        result.evaluated_model.preprocess,
        predictions,
        worst,
        folder / "top_losses.jpg",
        output_names=result.names,
    )


def _write_classes(result: ModelEvaluation, folder: Path) -> None:
    counts = result.evaluation.counts
    prediction_tables.write_class_table(counts, result.names, folder / "per_class.csv")
    occurring = ((counts.confusion.sum(dim=0) + counts.confusion.sum(dim=1)) > 0).nonzero()[:, 0]
    confusion = counts.confusion[occurring][:, occurring].numpy()
    names = [result.names[index] for index in occurring.tolist()]
    plots.plot_confusion_matrix(confusion, names, folder / "confusion_matrix.png")
    plots.plot_confusion_matrix(confusion, names, folder / "confusion_matrix_normalized.png", normalize=True)


def _draw_differences(images: Split, one: ModelEvaluation, other: ModelEvaluation, path: Path) -> None:
    """Draw the images on which exactly one of two models is correct, with both predictions."""
    first, second = one.evaluation.predictions, other.evaluation.predictions
    positions = (first.correct != second.correct).nonzero()[:, 0].tolist()[:_MAX_SHEET_IMAGES]
    if not positions:
        return
    captions = [" / ".join(_format_prediction(result, position) for result in (one, other)) for position in positions]
    rows = [int(first.images[position]) for position in positions]
    correct = [bool(first.correct[position]) for position in positions]
    inputs = image_sheets.load_inputs(images, rows, one.evaluated_model.preprocess)
    image_grids.write_image_grid(inputs, captions, path, correct=correct)


def _format_prediction(result: ModelEvaluation, position: int) -> str:
    classes = result.evaluation.predictions.get_predicted_classes(position)
    return ", ".join(result.names[index] for index in classes) or "no label"
