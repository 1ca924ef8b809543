"""CSV files of predictions: a row for each image, a row for each class."""

import csv
from collections.abc import Sequence
from pathlib import Path

from vitrail.data.dataset import Split
from vitrail.evaluation.label_metrics import LabelConfusion, LabelScores, ThresholdScore
from vitrail.evaluation.predictions import Counts, Predictions
from vitrail.formatting import quote_cell


def write_predictions(
    split: Split, classes: Sequence[str], outputs: Sequence[str], predictions: Predictions, path: Path
) -> None:
    """Write a row for each image: name, labels, predicted labels, probability, loss, whether it is correct.

    `classes` are the dataset's names and `outputs` the model's. Multiple labels share a cell, separated by " | ".
    """
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow(("image", "label", "predicted", "probability", "loss", "correct"))
        columns = (predictions.images, predictions.confidence, predictions.losses, predictions.correct)
        for row, values in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            image, probability, loss, correct = values
            label = " | ".join(classes[index] for index in sorted(split.get_labels(image)))
            predicted = " | ".join(outputs[index] for index in predictions.get_predicted_classes(row))
            names = map(quote_cell, (split.get_image_name(image), label, predicted))
            writer.writerow((*names, f"{probability:.6f}", f"{loss:.6f}", int(correct)))


def write_class_table(
    counts: Counts, outputs: Sequence[str], path: Path, train_counts: Sequence[int] | None = None
) -> None:
    """Write a row for each class that has images or was predicted: its counts, recall and precision.

    `train_counts` are the training images of each class, if known.
    """
    confusion = counts.confusion
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow(
            ("class", *(("train_images",) if train_counts else ()), "images", "correct", "recall", "precision")
        )
        for index, name in enumerate(outputs):
            images, correct = int(confusion[index].sum()), int(confusion[index, index])
            predicted = int(confusion[:, index].sum())
            if not (images or predicted or train_counts):
                continue
            shares = (f"{correct / total:.6f}" if total else "" for total in (images, predicted))
            writer.writerow(
                (quote_cell(name), *((train_counts[index],) if train_counts else ()), images, correct, *shares)
            )


def write_label_scores(
    label_scores: LabelScores,
    outputs: Sequence[str],
    thresholds: Sequence[float],
    path: Path,
    train_counts: Sequence[int] | None = None,
) -> None:
    """Write a row for each class of multi-label predictions, as `write_class_table` does for single labels.

    `thresholds` are the probabilities above which the labels are predicted.
    """
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        header = ("images", "correct", "recall", "precision", "predicted", "f1", "average_precision", "threshold")
        writer.writerow(("class", *(("train_images",) if train_counts else ()), *header))
        for index, (name, score) in enumerate(zip(outputs, label_scores.classes, strict=True)):
            shares = (f"{score.correct / total:.6f}" if total else "" for total in (score.images, score.predicted))
            precision = "" if score.average_precision is None else f"{score.average_precision:.6f}"
            shown = f"{score.f1:.6f}", precision, f"{thresholds[index]:.6f}"
            row = (score.images, score.correct, *shares, score.predicted, *shown)
            writer.writerow((quote_cell(name), *((train_counts[index],) if train_counts else ()), *row))


def write_threshold_scores(threshold_scores: Sequence[ThresholdScore], path: Path) -> None:
    """Write F1 at each threshold, if it served for all labels."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(ThresholdScore._fields)
        writer.writerows(
            [f"{score.threshold:.2f}", *(f"{value:.6f}" for value in score[1:])] for score in threshold_scores
        )


def write_label_confusions(confusions: Sequence[LabelConfusion], outputs: Sequence[str], path: Path) -> None:
    """Write a row for each pair of a missed and an extra label of the same images."""
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow(LabelConfusion._fields)
        for pair in confusions:
            writer.writerow((quote_cell(outputs[pair.missed]), quote_cell(outputs[pair.extra]), pair.images))
