"""Sheets of model inputs with their labels, or with what a model predicted for them."""

from collections.abc import Sequence
from pathlib import Path

import torch

from vitrail.config import PreprocessConfig
from vitrail.data.dataset import Split
from vitrail.data.decode import decode
from vitrail.data.transforms import make_eval_input
from vitrail.evaluate.predictions import Predictions
from vitrail.figures.image_grids import write_image_grid

_NO_LABEL = "no label"


def load_inputs(split: Split, rows: Sequence[int], preprocess: PreprocessConfig) -> torch.Tensor:
    """Load model inputs of a split, uint8 (B, C, S, S)."""
    channels = len(preprocess.mean)
    images = (decode(split.read_image(row), channels, name=split.get_image_name(row)) for row in rows)
    return torch.stack([make_eval_input(image, preprocess) for image in images])


def format_labels(split: Split, classes: Sequence[str], row: int) -> str:
    """The labels of an image."""
    return ", ".join(classes[index] for index in split.get_labels(row)) or _NO_LABEL


def draw_labeled_sheet(
    split: Split, classes: Sequence[str], preprocess: PreprocessConfig, rows: Sequence[int], path: Path
) -> None:
    """Write images with their labels."""
    captions = [format_labels(split, classes, row) for row in rows]
    write_image_grid(load_inputs(split, rows, preprocess), captions, path)


def draw_prediction_sheet(
    split: Split,
    classes: Sequence[str],
    preprocess: PreprocessConfig,
    predictions: Predictions,
    indices: Sequence[int],
    path: Path,
    *,
    output_names: Sequence[str] | None = None,
) -> None:
    """Write images with what was predicted for them, those at `indices` of the predictions.

    `output_names` are the model's names of its classes, if the dataset has other names or fewer classes.
    """
    rows, correct = (values[list(indices)].tolist() for values in (predictions.images, predictions.correct))
    captions = []
    for index, row, is_correct in zip(indices, rows, correct, strict=True):
        names = [(output_names or classes)[output] for output in predictions.get_predicted_classes(index)]
        caption = f"{', '.join(names) or _NO_LABEL} {float(predictions.confidence[index]):.0%}"
        captions.append(caption if is_correct else f"{caption}, is {format_labels(split, classes, row)}")
    write_image_grid(load_inputs(split, rows, preprocess), captions, path, correct=correct)
