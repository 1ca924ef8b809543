"""Which of a model's outputs are the classes of a set: by name, by WordNet id, or by their order.

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
from vitrail.weights.labels import load_imagenet1k_classes

_IMAGENET_VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})")


def match_outputs(classes: Sequence[str], labels: Sequence[str] | None, num_outputs: int) -> list[int]:
    """The output of each class, (K,), by its label, or by its number where the classes are called by numbers.

    Without labels the classes must be as many as the outputs, in their order.
    """
    if labels is None:
        if len(classes) != num_outputs:
            raise DataError(
                f"the model has {pluralize(num_outputs, 'output')} without names, and the data"
                f" {pluralize(len(classes), 'class')}: name them with `vitrail convert MODEL OUT --labels FILE`"
            )
        return list(range(num_outputs))
    places = _index_labels(labels)
    if not places.keys() & set(classes) and all(name.isdecimal() and int(name) < num_outputs for name in classes):
        return [int(name) for name in classes]  # shards whose labels are numbers
    for name in classes:
        if labels.count(name) > 1:
            raise DataError(
                f"the model has several classes called {name!r:.80}; ImageNet's have WordNet ids to tell them"
            )
        if name not in places:
            close = difflib.get_close_matches(name, places, n=1)
            meant = f"; the nearest it knows is {close[0]!r}" if close else ""
            raise DataError(f"the model has no class {name!r:.80}{meant}")
    return [places[name] for name in classes]


def _index_labels(labels: Sequence[str]) -> dict[str, int]:
    """The output of each name; of ImageNet's classes also by their WordNet id."""
    places = {name: place for place, name in enumerate(labels)}
    known = load_imagenet1k_classes()
    if tuple(labels) == tuple(entry.name for entry in known):
        places |= {entry.wordnet_id: place for place, entry in enumerate(known)}
    return places


def read_class_subset(path: Path, labels: Sequence[str] | None, num_outputs: int) -> list[int]:
    """The outputs that a file names, a line each: a label, a WordNet id, or a number from 0."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError):
        raise DataError(f"{path} cannot be read as a text with a class on each line") from None
    places = _index_labels(labels or ())
    numbers = {str(place): place for place in range(num_outputs)}
    for line in lines:
        if line not in places and line not in numbers:
            raise DataError(f"{path}: the model has no class {line!r:.80}; give labels, WordNet ids or numbers from 0")
    found = [places.get(line, numbers.get(line, 0)) for line in lines]
    if not found or len(set(found)) < len(found):
        raise DataError(f"{path} must name at least one class, and each once")
    return found


def compute_real_accuracy(predictions: Path, real_path: Path) -> float:
    """The share of a run's predictions that are among the labels of a ReaL file, of the images that have some."""
    lists, places = _read_real_file(real_path), _index_labels([entry.name for entry in load_imagenet1k_classes()])
    images = right = 0
    try:
        with predictions.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
            for row in csv.DictReader(file):
                numbered, name = _IMAGENET_VAL_NAME.search(row["image"]), unquote_cell(row["predicted"])
                if numbered is None or name not in places or int(numbered[1]) > len(lists):
                    raise DataError(
                        f"{predictions}: {row['image']!r:.120} with {name!r:.80} is no validation image of ImageNet"
                        f" and one of its classes, of which {real_path} has labels"
                    )
                labels = lists[int(numbered[1]) - 1]
                images, right = images + bool(labels), right + (places[name] in labels)
    except (OSError, KeyError, csv.Error) as error:
        raise DataError(f"{predictions} cannot be read as the predictions of a run: {error}") from error
    if not images:
        raise DataError(f"{real_path} has no labels of any image in {predictions}")
    return right / images


def _read_real_file(path: Path) -> list[list[int]]:
    try:
        lists = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise DataError(f"{path} cannot be read as JSON: a list of labels for each image") from None
    if not (
        isinstance(lists, list) and all(isinstance(row, list) and all(type(n) is int for n in row) for row in lists)
    ):
        raise DataError(f"{path} must hold a list of labels, whole numbers, for each image")
    return lists


def read_real_labels(path: Path, split: Split) -> list[frozenset[int]]:
    """The sets of labels of a ReaL file (Beyer et al. 2020) for the images of a split, in their order.

    The file has a list of labels for each image of ImageNet's validation part, which names like
    ILSVRC2012_val_00000001.JPEG number; of other images it must have as many lists as there are images.
    """
    lists = _read_real_file(path)
    matches = [_IMAGENET_VAL_NAME.search(split.get_image_name(row)) for row in range(len(split))]
    places = [int(match[1]) - 1 if match else row for row, match in enumerate(matches)]
    numbered = all(matches)
    if (max(places, default=-1) >= len(lists)) if numbered else len(lists) != len(split):
        whose = (
            f"number {max(places) + 1:,} is among the images"
            if numbered
            else f"the data have {pluralize(len(split), 'image')}"
        )
        raise DataError(f"{path} has labels of {pluralize(len(lists), 'image')}, and {whose}")
    return [frozenset(lists[place]) for place in places]
