"""Sheets of images as a model sees them, with what they show and what it said of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from vitrail.config import PreprocessConfig
    from vitrail.data.dataset import Split
    from vitrail.evaluate.predictions import Predictions


def load_inputs(split: "Split", rows: Sequence[int], preprocess: "PreprocessConfig") -> "torch.Tensor":
    """Images of a split, uint8 (B, C, S, S)."""
    import torch

    from vitrail.data.decode import decode
    from vitrail.data.transforms import make_eval_input

    channels = len(preprocess.mean)
    decoded = (decode(split.read_image(row), channels, name=split.get_image_name(row)) for row in rows)
    return torch.stack([make_eval_input(image, preprocess) for image in decoded])


def format_labels(split: "Split", classes: Sequence[str], row: int) -> str:
    """What an image shows."""
    return ", ".join(classes[index] for index in split.get_labels(row)) or "no label"


def draw_labeled_sheet(
    split: "Split", classes: Sequence[str], preprocess: "PreprocessConfig", rows: Sequence[int], path: Path
) -> None:
    """Write images with their labels."""
    from vitrail.figures import image_grids

    image_grids.write_image_grid(
        load_inputs(split, rows, preprocess), [format_labels(split, classes, row) for row in rows], path
    )


def draw_prediction_sheet(
    split: "Split",
    classes: Sequence[str],
    preprocess: "PreprocessConfig",
    predictions: "Predictions",
    indices: Sequence[int],
    path: Path,
    *,
    output_names: Sequence[str] | None = None,
) -> None:
    """Write images with what was said of them, those at `places` of the answers, and whether that is right.

    `outputs` are what the model calls its classes, where the data has other names or fewer.
    """
    from vitrail.figures import image_grids

    rows = predictions.images[list(indices)].tolist()
    captions, marks, confidence = [], predictions.correct[list(indices)].tolist(), predictions.confidence
    for place, row, right in zip(indices, rows, marks, strict=True):
        name = (
            ", ".join((output_names or classes)[index] for index in predictions.get_predicted_classes(place))
            or "no label"
        )
        answer = f"{name} {float(confidence[place]):.0%}"
        captions.append(answer if right else f"{answer}, is {format_labels(split, classes, row)}")
    image_grids.write_image_grid(load_inputs(split, rows, preprocess), captions, path, correct=marks)
