"""CSV and JSON-lines files that list images and their labels.

Columns or keys: `path` (also file, filename, image), relative to the list; `label` (also class), or `labels` for
several (in CSV separated by semicolons, in JSON an array); and optionally `split`: train, val or test. If there is no
label, and the other columns are at least two and hold only 0 and 1, they are one-hot: each is a class named after its
column.
"""

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

import numpy as np

from vitrail import remote
from vitrail.data import holdout, sample_table
from vitrail.data.dataset import Dataset, build_dataset
from vitrail.data.folder import SPLIT_NAMES, FileStore
from vitrail.data.sample_table import Array, encode_label_columns, encode_text_column
from vitrail.errors import DataError
from vitrail.formatting import join_first_names

LIST_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
LINE_LIMIT = 2**20  # characters
_PATH_COLUMNS = ("path", "file", "filename", "image")
_LABEL_COLUMNS = ("label", "class")
_KNOWN_COLUMNS = {*_PATH_COLUMNS, *_LABEL_COLUMNS, "labels", "split"}
_BIT_VALUES = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}


def open_file_list(path: Path | str, *, holdout_fraction: float = 0.1) -> Dataset:
    """Open the dataset of a list, given by path or URL; image paths are relative to the list."""
    path = path.resolve() if isinstance(path, Path) else path
    folder = path.parent if isinstance(path, Path) else path.rpartition("/")[0]
    table = sample_table.load_or_build_table(
        f"list {path} {holdout_fraction}", lambda: [str(path)], lambda: _build_columns(path, holdout_fraction)
    )
    return build_dataset(str(path), FileStore(folder, table))


def iter_image_paths(path: Path | str) -> Iterator[str]:
    """The paths or URLs of the images in a list, in its order and line by line; labels are ignored."""
    for line, row in _iter_rows(path):
        name = _get_path(row, f"{path}, line {line}")
        yield str(path.parent / name) if isinstance(path, Path) else remote.join_url(path.rpartition("/")[0], name)


class _ListedImages(NamedTuple):
    """The images of a list, by row."""

    files: list[str]
    labels: list[tuple[str, ...]]
    splits: list[int]
    line_numbers: list[int]
    one_hot_classes: list[str]
    multi_label: bool


def _build_columns(path: Path | str, holdout_fraction: float) -> tuple[Mapping[str, Array], dict[str, Any]]:
    images = _read_images(path)
    classes = sort_classes({name for labels in images.labels for name in labels} | set(images.one_hot_classes))
    class_index = {name: number for number, name in enumerate(classes)}
    labels = ([class_index[name] for name in names] for names in images.labels)
    columns = encode_text_column("path", images.files)
    columns |= encode_label_columns(labels, multi_label=images.multi_label)
    split_column = np.array(images.splits, dtype=np.int8)
    split = holdout.complete_splits(
        split_column, columns, images.files.__getitem__, identity=str(path), holdout_fraction=holdout_fraction
    )
    notes = []
    if one_hot := images.one_hot_classes:
        notes.append(f"labels are read from {len(one_hot)} columns of 0 and 1: {join_first_names(one_hot)}")
    if not classes:
        notes.append("no column named label or labels: the images have no labels")
    return columns | {"split": split.column}, split.build_metadata(classes, notes)


def _read_images(path: Path | str) -> _ListedImages:
    """Read a whole list; refuse one without images, or with splits for only a part of them."""
    images = _ListedImages([], [], [], [], [], False)
    other_columns: list[dict[str, Any]] = []
    multi_label = False
    for line_number, row in _iter_rows(path):
        where = f"{path}, line {line_number}"
        images.files.append(_get_path(row, where))
        images.labels.append(_parse_labels(row, where))
        images.splits.append(_parse_split(row, where))
        images.line_numbers.append(line_number)
        multi_label = multi_label or "labels" in row
        if row.keys().isdisjoint((*_LABEL_COLUMNS, "labels")):
            other_columns.append({key: value for key, value in row.items() if key not in _KNOWN_COLUMNS})
    if not images.files:
        raise DataError(f"{path} lists no image")
    if len(set(images.splits)) > 1 and holdout.NO_SPLIT in images.splits:
        line_number = images.line_numbers[images.splits.index(holdout.NO_SPLIT)]
        raise DataError(f"{path}, line {line_number} has no split, while other lines have one")
    if len(other_columns) < len(images.files):
        return images._replace(multi_label=multi_label)
    one_hot = _find_one_hot_columns(other_columns, images.line_numbers, path)
    if not one_hot:
        return images
    labels = [tuple(name for name in one_hot if _parse_bit(row.get(name))) for row in other_columns]
    return images._replace(labels=labels, one_hot_classes=one_hot, multi_label=any(len(row) != 1 for row in labels))


def _find_one_hot_columns(
    rows: Sequence[Mapping[str, Any]], line_numbers: Sequence[int], path: Path | str
) -> list[str]:
    """All columns, if there are at least two and they hold only 0 and 1; a stray other value is refused."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name]  # an index has no name
    bits = {name: [_parse_bit(row.get(name)) for row in rows] for name in names}
    mostly_bits = all(2 * column.count(None) < len(rows) for column in bits.values())
    if len(names) < 2 or not mostly_bits or not any(True in column for column in bits.values()):
        return []
    for name, column in bits.items():
        if None in column:
            row = column.index(None)
            raise DataError(
                f"{path}, line {line_numbers[row]}: {name} is {rows[row].get(name)!r:.80}, and most of its column is 0"
                " or 1: correct it, remove the column, or add a column named label"
            )
    return names


def _parse_bit(value: Any) -> bool | None:
    """The value of a cell, or None if it is neither 0 nor 1."""
    return _BIT_VALUES.get(str(value).strip().lower())


def _iter_rows(path: Path | str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a list, each with its line number."""
    try:
        suffix = PurePosixPath(path).suffix.lower()
        with _open_text(path) as file:
            if suffix in (".csv", ".tsv"):
                rows = csv.DictReader(_iter_lines(file, path), delimiter="\t" if suffix == ".tsv" else ",")
                names = {name.strip().lower() for name in rows.fieldnames or ()}
                if names.isdisjoint(_PATH_COLUMNS):
                    columns = ", ".join(sorted(names))
                    raise DataError(
                        f"{path} has the columns {columns}; one must be named path, another label or labels"
                    )
                for row in rows:
                    cells = {_normalize_column_name(key): value for key, value in row.items() if key is not None}
                    yield rows.line_num, cells
            else:
                for number, line in enumerate(_iter_lines(file, path), start=1):
                    if line.strip():
                        yield number, _parse_json_object(line, f"{path}, line {number}")
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _normalize_column_name(column: str) -> str:
    """The name of a column; known names match in any case."""
    name = column.strip()
    return name.lower() if name.lower() in _KNOWN_COLUMNS else name


def _open_text(path: Path | str) -> IO[str]:
    if isinstance(path, Path):
        return path.open(newline="", encoding="utf-8-sig")
    return io.StringIO(remote.read(path).decode("utf-8-sig"), newline="")


def _iter_lines(file: IO[str], path: Path | str) -> Iterator[str]:
    """Lines of bounded length: a device named as a list would be one endless line."""
    while line := file.readline(LINE_LIMIT + 1):
        if len(line) > LINE_LIMIT:
            raise DataError(f"{path} has a line of over {LINE_LIMIT:,} characters; a list has one image per line")
        yield line


def _parse_json_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{where} is not a JSON object")
    return value


def _get_path(row: Mapping[str, Any], where: str) -> str:
    for key in _PATH_COLUMNS:
        value = row.get(key)
        if isinstance(value, str) and value and "\0" not in value:
            try:
                os.fsencode(value)
            except UnicodeEncodeError as error:
                raise DataError(f"{where}: {value!r:.80} is not a file name: {error}") from error
            return value
        if value is not None and value != "":
            raise DataError(f"{where}: {key} is {value!r:.80}; it must be text")
    raise DataError(f"{where} has no path")


def _parse_labels(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    value = row.get("labels")
    if value is not None:
        items = [part.strip() for part in value.split(";")] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str | int) for item in items):
            raise DataError(f"{where}: labels is {value!r:.80}; it must be a list of names")
        return tuple(dict.fromkeys(str(item) for item in items if item != ""))
    for key in _LABEL_COLUMNS:
        value = row.get(key)
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            return (str(value).strip(),)
        if key in row:
            raise DataError(f"{where}: {key} is {value!r:.80}; it must be one name (use labels for several)")
    return ()


def _parse_split(row: Mapping[str, Any], where: str) -> int:
    value = row.get("split")
    if value is None or value == "":
        return holdout.NO_SPLIT
    if str(value).strip().lower() not in SPLIT_NAMES:
        raise DataError(f"{where}: split is {value!r:.80}; it must be train, val or test")
    return SPLIT_NAMES[str(value).strip().lower()]


def sort_classes(names: set[str]) -> list[str]:
    """Sort classes by name, or by value if all are whole numbers."""
    if all(name.isascii() and name.isdigit() for name in names):
        return sorted(names, key=lambda name: (len(name.lstrip("0")), name.lstrip("0"), name))
    return sorted(names)
