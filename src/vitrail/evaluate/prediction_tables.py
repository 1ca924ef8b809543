"""What a model said, as files: a row for each image, a row for each class."""

import csv
from collections.abc import Sequence
from pathlib import Path

from vitrail.data.dataset import Split
from vitrail.evaluate.multi_label import LabelScores
from vitrail.evaluate.predictions import Counts, Predictions
from vitrail.formatting import quote_cell


def write_predictions(
    split: Split, classes: Sequence[str], outputs: Sequence[str], predictions: Predictions, path: Path
) -> None:
    """A row for each image: its name, labels, what the model said, how sure it was and how wrong.

    `classes` are the data's names and `outputs` the model's. Several labels stand in one cell, separated by " | ".
    """
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow(("image", "label", "predicted", "probability", "loss", "right"))
        columns = (predictions.images, predictions.confidence, predictions.losses, predictions.correct)
        for place, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            image, probability, loss, right = row
            label = " | ".join(classes[index] for index in sorted(split.get_labels(image)))
            predicted = " | ".join(outputs[index] for index in predictions.get_predicted_classes(place))
            names = map(quote_cell, (split.get_image_name(image), label, predicted))
            writer.writerow((*names, f"{probability:.6f}", f"{loss:.6f}", int(right)))


def write_class_table(
    counts: Counts, outputs: Sequence[str], path: Path, train_counts: Sequence[int] | None = None
) -> None:
    """A row for each class that has images or was an answer: how many were found, and how many answers were true.

    `trained` are the training images of each class, where they are known.
    """
    confusion = counts.confusion
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow(
            ("class", *(("train_images",) if train_counts else ()), "images", "right", "recall", "precision")
        )
        for index, name in enumerate(outputs):
            images, right = int(confusion[index].sum()), int(confusion[index, index])
            said = int(confusion[:, index].sum())
            if not (images or said or train_counts):
                continue
            shares = (f"{right / total:.6f}" if total else "" for total in (images, said))
            writer.writerow(
                (quote_cell(name), *((train_counts[index],) if train_counts else ()), images, right, *shares)
            )


def write_label_scores(
    label_scores: LabelScores, outputs: Sequence[str], path: Path, train_counts: Sequence[int] | None = None
) -> None:
    """A row for each class of multi-label predictions, as `write_classes` for one label."""
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        heads = ("images", "right", "recall", "precision", "predicted", "f1", "average_precision")
        writer.writerow(("class", *(("train_images",) if train_counts else ()), *heads))
        for index, (name, each) in enumerate(zip(outputs, label_scores.classes, strict=True)):
            shares = (f"{each.correct / total:.6f}" if total else "" for total in (each.images, each.predicted))
            precision = "" if each.average_precision is None else f"{each.average_precision:.6f}"
            row = (each.images, each.correct, *shares, each.predicted, f"{each.f1:.6f}", precision)
            writer.writerow((quote_cell(name), *((train_counts[index],) if train_counts else ()), *row))
