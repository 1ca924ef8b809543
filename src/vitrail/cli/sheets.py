"""Sheets of images as a model sees them, with what they show and what it said of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from vitrail.config import Preprocess
    from vitrail.data.dataset import Split
    from vitrail.evaluate.classify import Answers


def views(split: "Split", rows: Sequence[int], preprocess: "Preprocess") -> "torch.Tensor":
    """Images of a split, uint8 (B, C, S, S)."""
    import torch

    from vitrail.data.decode import decode
    from vitrail.data.transforms import evaluation_view

    channels = len(preprocess.mean)
    decoded = (decode(split.read(row), channels, name=split.name(row)) for row in rows)
    return torch.stack([evaluation_view(image, preprocess) for image in decoded])


def label(split: "Split", classes: Sequence[str], row: int) -> str:
    """What an image shows."""
    return ", ".join(classes[index] for index in split.labels(row)) or "no label"


def labelled(split: "Split", classes: Sequence[str], preprocess: "Preprocess", rows: Sequence[int], path: Path) -> None:
    """Write images with their labels."""
    from vitrail.figures import pictures

    pictures.grid(views(split, rows, preprocess), [label(split, classes, row) for row in rows], path)


def answered(
    split: "Split",
    classes: Sequence[str],
    preprocess: "Preprocess",
    said: "Answers",
    places: Sequence[int],
    path: Path,
    *,
    outputs: Sequence[str] | None = None,
) -> None:
    """Write images with what was said of them, those at `places` of the answers, and whether that is right.

    `outputs` are what the model calls its classes, where the data has other names or fewer.
    """
    from vitrail.figures import pictures

    rows = said.images[list(places)].tolist()
    captions, marks, confidence = [], said.right[list(places)].tolist(), said.confidence
    for place, row, right in zip(places, rows, marks, strict=True):
        name = ", ".join((outputs or classes)[index] for index in said.predicted(place)) or "no label"
        answer = f"{name} {float(confidence[place]):.0%}"
        captions.append(answer if right else f"{answer}, is {label(split, classes, row)}")
    pictures.grid(views(split, rows, preprocess), captions, path, marks=marks)
