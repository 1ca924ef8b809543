"""Corrected labels of a dataset: reading the decisions in suspects.csv, and applying them before anything else.

    split  image  label  likely_label  action      and any other columns

A row whose action is `relabel` gives the image the class in `likely_label`, `drop` leaves the image out, and `keep`
changes nothing. A row without an action, or a row that was deleted, changes nothing either. `label` is the label that
the image had when the file was written: an image with another label now is an error, since the file is of other data.
"""

import csv
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from vitrail.data.dataset import Dataset, LabelChanges, Split, Store
from vitrail.data.randomness import IntArray
from vitrail.data.sample_table import Array, SampleTable
from vitrail.data.shards import ShardStore
from vitrail.errors import DataError, UsageError
from vitrail.formatting import join_first_names, unquote_cell

Action = Literal["relabel", "drop", "keep"]
COLUMNS = ("split", "image", "label", "likely_label", "action")
FIELD_LIMIT = 2**20  # characters of a cell


class Correction(NamedTuple):
    """What is done to an image, or to several of the same name and label."""

    split: str
    image: str
    label: str
    new_label: str | None  # None to leave the image out


class RelabeledTable(SampleTable):
    """A table with other labels in some rows. A worker process receives the table and these rows alone."""

    def __init__(self, original: SampleTable, rows: IntArray, labels: IntArray) -> None:
        self.original, self.rows, self.labels = original, rows, labels

    def __reduce__(self) -> Any:
        return RelabeledTable, (self.original, self.rows, self.labels)

    @cached_property
    def columns(self) -> Mapping[str, Array]:  # type: ignore[override]
        label = np.array(self.original["label"])
        label[self.rows] = self.labels
        return {**self.original.columns, "label": label}

    @property
    def metadata(self) -> Mapping[str, Any]:  # type: ignore[override]
        return self.original.metadata


def relabel_dataset(dataset: Dataset, path: Path | None) -> Dataset:
    """Return the dataset with the corrections of a suspects.csv; without a file, the dataset itself."""
    if path is None:
        return dataset
    if dataset.multi_label or not dataset.classes:
        kind = "may have several labels" if dataset.multi_label else "have no labels"
        raise UsageError(f"--relabel corrects images of one label each, and those of {dataset.name} {kind}: omit it")
    return apply_corrections(dataset, read_corrections(path, dataset.classes), str(path))


# --- the file --------------------------------------------------------------------------------------------------------


def read_corrections(path: Path, classes: Sequence[str]) -> list[Correction]:
    """Read the rows that change something; each is checked, and no image may have two different ones."""
    corrections: dict[tuple[str, str, str], Correction] = {}
    undecided = 0
    for line, row in _read_rows(path):
        split, image, label, likely_label, action = (unquote_cell(row[name]) for name in COLUMNS)
        action = action.strip().lower()
        where = f"{path}, line {line}"
        if action and action not in get_args(Action):
            raise DataError(f"{where}: the action is {action!r:.40}; write relabel, drop or keep, or nothing")
        if action == "relabel" and likely_label not in classes:
            known = join_first_names(classes)
            raise DataError(f"{where}: {likely_label!r:.80} in likely_label is no class of the data ({known})")
        undecided += not action
        if action in ("", "keep") or (action == "relabel" and likely_label == label):
            continue
        correction = Correction(split, image, label, likely_label if action == "relabel" else None)
        if corrections.setdefault((split, image, label), correction) != correction:
            raise DataError(f"{where}: {image} has another row with another decision: keep one of them")
    if not corrections and undecided:
        raise DataError(
            f"{path} decides nothing: write relabel or drop into the column action of a row, or mark the images in"
            " suspects.html and save the file there"
        )
    return list(corrections.values())


def _read_rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """The rows of the file with their line numbers; one with too few or too many cells is refused."""
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            csv.field_size_limit(FIELD_LIMIT)
            reader = csv.DictReader(file, strict=True)
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}): vitrail data suspects writes such a file") from error
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]}; it needs {', '.join(COLUMNS)}, separated by commas, as `vitrail data"
            " suspects` writes them"
        )
    for line, row in rows:
        if None in row or None in row.values():
            raise DataError(f"{path}, line {line}: {len(reader.fieldnames or ())} cells are needed, one for a column")
    return rows


# --- the dataset -----------------------------------------------------------------------------------------------------


def apply_corrections(dataset: Dataset, corrections: Sequence[Correction], source: str) -> Dataset:
    """Return the dataset with other labels and without the dropped images; `source` names the file in messages."""
    by_split: dict[str, list[Correction]] = {}
    for correction in corrections:
        by_split.setdefault(correction.split, []).append(correction)
    if unknown := by_split.keys() - dataset.splits.keys():
        raise DataError(
            f"{source}: {dataset.name} has no split {min(unknown)!r:.40}; it has {', '.join(dataset.splits)}"
        )
    numbers = {name: number for number, name in enumerate(dataset.classes)}
    new_rows: dict[int, list[tuple[int, int]]] = {}  # of each store, rows and their labels
    dropped: dict[str, list[int]] = {}
    for name, of_split in by_split.items():
        split = dataset.splits[name]
        for correction, indices in _locate_images(split, of_split, numbers, f"{source}, {name}"):
            if correction.new_label is None:
                dropped.setdefault(name, []).extend(indices)
            else:
                label = numbers[correction.new_label]
                new_rows.setdefault(id(split.store), []).extend((int(split.rows[index]), label) for index in indices)
    changes = LabelChanges(
        sum(map(len, new_rows.values())), sum(map(len, dropped.values())), _digest_corrections(corrections)
    )
    relabeled = _replace_stores(dataset.splits, new_rows)
    splits = {name: split.drop_images(dropped[name]) if name in dropped else split for name, split in relabeled.items()}
    if empty := next((name for name, split in splits.items() if not len(split)), None):
        raise DataError(f"{source} drops every image of {empty}: keep some")
    return dataclasses.replace(
        dataset, splits=splits, label_changes=changes, notes=(*dataset.notes, f"{changes.summary}, by {source}")
    )


def _locate_images(
    split: Split, corrections: Sequence[Correction], numbers: Mapping[str, int], where: str
) -> list[tuple[Correction, list[int]]]:
    """The indices of the images that each correction names; refuse a name that is not there, or with another label."""
    wanted = {correction.image for correction in corrections}
    indices: dict[str, list[int]] = {}
    for index in range(len(split)):
        if (image := split.get_image_name(index)) in wanted:
            indices.setdefault(image, []).append(index)
    located = []
    for correction in corrections:
        if correction.image not in indices:
            raise DataError(f"{where}: there is no image {correction.image!r:.200}; the file is of other data")
        label = numbers.get(correction.label)
        matches = [index for index in indices[correction.image] if split.get_labels(index) == (label,)]
        if not matches:
            raise DataError(
                f"{where}: {correction.image} is not labeled {correction.label!r:.80} now; the file is of other data"
            )
        located.append((correction, matches))
    return located


def _digest_corrections(corrections: Sequence[Correction]) -> str:
    """A digest of the decisions, in any order."""
    text = "\n".join(sorted(repr(tuple(correction)) for correction in corrections))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def _replace_stores(splits: Mapping[str, Split], new_rows: Mapping[int, list[tuple[int, int]]]) -> dict[str, Split]:
    """The splits with other labels; those of one store stay in one store."""
    stores: dict[int, Store] = {}
    for split in splits.values():
        if (key := id(split.store)) in new_rows and key not in stores:
            rows, labels = np.array(new_rows[key], dtype=np.int64).T
            stores[key] = _replace_table(split.store, RelabeledTable(split.store.table, rows, labels))
    return {name: Split(stores.get(id(split.store), split.store), split.rows) for name, split in splits.items()}


def _replace_table(store: Store, table: SampleTable) -> Store:
    if isinstance(store, ShardStore):
        return ShardStore(store.folder, store.files, table)
    replaced: Store = dataclasses.replace(store, table=table)  # type: ignore[type-var]
    return replaced
