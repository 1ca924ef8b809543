"""Match the classes of a dataset to a model's outputs: by name, by WordNet id, or by their order.

L outputs of the model   K classes of the data
"""

import csv
import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from vitrail.data.dataset import Split
from vitrail.errors import DataError
from vitrail.formatting import pluralize, unquote_cell
from vitrail.weights.trained import load_imagenet1k_classes

_IMAGENET_VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})")


def match_outputs(classes: Sequence[str], labels: Sequence[str] | None, num_outputs: int) -> list[int]:
    """The output of each class, (K,), by its label; classes whose names are plain numbers match by number.

    Names with leading zeros, such as 001, are a catalog's: taken for outputs, they would give a wrong accuracy.

    Without labels there must be as many classes as outputs, in the same order.
    """
    if labels is None:
        if len(classes) != num_outputs:
            raise DataError(
                f"the model has {pluralize(num_outputs, 'output')} without names, and the dataset"
                f" {pluralize(len(classes), 'class')}: name them with `vitrail convert MODEL OUT --labels FILE`"
            )
        return list(range(num_outputs))
    outputs = _index_labels(labels)
    if not outputs.keys() & set(classes) and all(_is_output_number(name, num_outputs) for name in classes):
        return [int(name) for name in classes]  # shards with numbers as labels
    if not outputs.keys() & set(classes) and not any(name.isdecimal() for name in classes):
        close = difflib.get_close_matches(classes[0], outputs, n=1)
        example = f"the closest is {close[0]!r}" if close else f"it has {labels[0]!r:.80}"
        raise DataError(
            f"the model has no class {classes[0]!r:.80}, nor any other of the dataset; {example}. Fine-tune it"
            " (`vitrail finetune`), or measure its features (`vitrail probe`)"
        )
    for name in classes:
        if labels.count(name) > 1:
            raise DataError(
                f"the model has several classes called {name!r:.80}; WordNet ids distinguish those of ImageNet"
            )
        if name not in outputs:
            close = difflib.get_close_matches(name, outputs, n=1)
            hint = f"; the closest is {close[0]!r}" if close else ""
            if name.isdecimal():
                hint = f": it has names such as {labels[0]!r:.80}, and numbers without leading zeros are its outputs"
            raise DataError(f"the model has no class {name!r:.80}{hint}")
    return [outputs[name] for name in classes]


def _is_output_number(name: str, num_outputs: int) -> bool:
    return name.isdecimal() and name == str(int(name)) and int(name) < num_outputs


def _index_labels(labels: Sequence[str]) -> dict[str, int]:
    """The output of each label; ImageNet's classes also have their WordNet ids."""
    outputs = {name: output for output, name in enumerate(labels)}
    imagenet = load_imagenet1k_classes()
    if tuple(labels) == tuple(entry.name for entry in imagenet):
        outputs |= {entry.wordnet_id: output for output, entry in enumerate(imagenet)}
    elif outputs.keys() <= {entry.name for entry in imagenet}:  # some of them, as Tiny-ImageNet's
        outputs |= {entry.wordnet_id: outputs[entry.name] for entry in imagenet if entry.name in outputs}
    return outputs


def read_class_subset(path: Path, labels: Sequence[str] | None, num_outputs: int) -> list[int]:
    """The outputs that a file lists, one on each line: a label, a WordNet id, or a number from 0."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError):
        raise DataError(f"{path} cannot be read as text with a class on each line") from None
    by_number = {str(output): output for output in range(num_outputs)}
    by_name = by_number | _index_labels(labels or ())
    for line in lines:
        if line not in by_name:
            raise DataError(f"{path}: the model has no class {line!r:.80}; give labels, WordNet ids or numbers from 0")
    subset = [by_name[line] for line in lines]
    if not subset or len(set(subset)) < len(subset):
        raise DataError(f"{path} must list at least one class, and each once")
    return subset


def compute_real_accuracy(predictions: Path, real_path: Path) -> float:
    """The share of a run's predictions that are among the labels of a ReaL file, of the images that have any."""
    lists, outputs = _read_real_file(real_path), _index_labels([entry.name for entry in load_imagenet1k_classes()])
    images = correct = 0
    try:
        with predictions.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
            for row in csv.DictReader(file):
                match, name = _IMAGENET_VAL_NAME.search(row["image"]), unquote_cell(row["predicted"])
                if match is None or name not in outputs or int(match[1]) > len(lists):
                    raise DataError(
                        f"{predictions}: {row['image']!r:.120} with {name!r:.80} is no validation image of ImageNet"
                        f" with one of its classes, for which {real_path} has labels"
                    )
                labels = lists[int(match[1]) - 1]
                images, correct = images + bool(labels), correct + (outputs[name] in labels)
    except (OSError, KeyError, csv.Error) as error:
        raise DataError(f"{predictions} cannot be read as the predictions of a run: {error}") from error
    if not images:
        raise DataError(f"{real_path} has no labels for any image in {predictions}")
    return correct / images


def _read_real_file(path: Path) -> list[list[int]]:
    try:
        lists = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise DataError(f"{path} cannot be read as JSON: a list of labels for each image") from None
    if not (
        isinstance(lists, list) and all(isinstance(row, list) and all(type(n) is int for n in row) for row in lists)
    ):
        raise DataError(f"{path} must hold a list of labels, as integers, for each image")
    return lists


def read_real_labels(path: Path, split: Split) -> list[frozenset[int]]:
    """The labels in a ReaL file (Beyer et al. 2020) for the images of a split, in their order.

    The file has a list of labels for each of ImageNet's validation images, numbered by names such as
    ILSVRC2012_val_00000001.JPEG. For other images it must have as many lists as there are images.
    """
    lists = _read_real_file(path)
    matches = [_IMAGENET_VAL_NAME.search(split.get_image_name(row)) for row in range(len(split))]
    rows = [int(match[1]) - 1 if match else row for row, match in enumerate(matches)]
    mismatch = ""
    if all(matches) and max(rows, default=-1) >= len(lists):
        mismatch = f"the images include number {max(rows) + 1:,}"
    elif not all(matches) and len(lists) != len(split):
        mismatch = f"the dataset has {pluralize(len(split), 'image')}"
    if mismatch:
        raise DataError(f"{path} has labels for {pluralize(len(lists), 'image')}, and {mismatch}")
    return [frozenset(lists[row]) for row in rows]
