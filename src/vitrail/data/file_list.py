"""A CSV or JSON-lines file that lists images and their labels.

Columns (or keys): `path` (also file, filename, image), relative to the list; `label` (also class), or `labels` for
several: in CSV separated by semicolons, in JSON an array; and, if there is one, `split`: train, val or test. Without a
label, two other columns or more that all hold nothing but 0 and 1 are one-hot: each is a class, named after its column.
"""

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from vitrail import remote
from vitrail.data import holdout, sample_table
from vitrail.data.dataset import UNLABELED, Dataset, build_splits
from vitrail.data.folder import SPLIT_NAMES, FileStore
from vitrail.data.sample_table import Array, encode_text_column
from vitrail.errors import DataError

LIST_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
LINE_LIMIT = 2**20  # characters
_PATH_COLUMNS = ("path", "file", "filename", "image")
_LABEL_COLUMNS = ("label", "class")
_KNOWN_COLUMNS = {*_PATH_COLUMNS, *_LABEL_COLUMNS, "labels", "split"}
_BIT_VALUES = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}


def open_file_list(path: Path | str, *, holdout_fraction: float = 0.1) -> Dataset:
    """The set that a list describes, given by its path or its URL; the images lie where the list does."""
    path = path.resolve() if isinstance(path, Path) else path
    folder = path.parent if isinstance(path, Path) else path.rpartition("/")[0]
    table = sample_table.load_or_build_table(
        f"list {path} {holdout_fraction}", lambda: [str(path)], lambda: _build_columns(path, holdout_fraction)
    )
    return Dataset(
        name=str(path),
        classes=tuple(table.metadata["classes"]),
        splits=build_splits(FileStore(folder, table), table["split"]),
        generated_splits=tuple(table.metadata["made_up"]),
        notes=tuple(table.metadata["notes"]),
    )


def iter_image_paths(path: Path | str) -> Iterator[str]:
    """The paths or URLs of the images that a list names, in its order and line by line; labels do not matter."""
    for line, row in _iter_rows(path):
        name = _get_text_field(row, _PATH_COLUMNS, f"{path}, line {line}")
        yield str(path.parent / name) if isinstance(path, Path) else remote.join_url(path.rpartition("/")[0], name)


def _build_columns(path: Path | str, holdout_fraction: float) -> tuple[Mapping[str, Array], dict[str, Any]]:
    files: list[str] = []
    names: list[tuple[str, ...]] = []
    splits: list[int] = []
    lines: list[int] = []
    others: list[dict[str, Any]] = []
    several = False
    for line, row in _iter_rows(path):
        where = f"{path}, line {line}"
        files.append(_get_text_field(row, _PATH_COLUMNS, where))
        several = several or "labels" in row
        names.append(_parse_labels(row, where))
        if row.keys().isdisjoint((*_LABEL_COLUMNS, "labels")):
            others.append({key: value for key, value in row.items() if key not in _KNOWN_COLUMNS})
        splits.append(_parse_split(row, where))
        lines.append(line)
    if not files:
        raise DataError(f"{path} lists no image")
    if len(set(splits)) > 1 and holdout.NO_SPLIT in splits:
        raise DataError(f"{path}, line {lines[splits.index(holdout.NO_SPLIT)]} has no split, while others have one")
    hot = _find_one_hot_columns(others, lines, path) if len(others) == len(files) else []
    if hot:
        names = [tuple(name for name in hot if _parse_bit(row.get(name))) for row in others]
        several = any(len(row) != 1 for row in names)
    classes = _sort_classes({name for row in names for name in row} | set(hot))
    number = {name: place for place, name in enumerate(classes)}
    columns: dict[str, Array] = dict(encode_text_column("path", files))
    first = np.array([number[row[0]] if row else UNLABELED for row in names], dtype=np.int32)
    if several:
        columns["label"] = np.array([number[name] for row in names for name in row], dtype=np.int32)
        columns["label.ends"] = np.cumsum([len(row) for row in names], dtype=np.int64)
    else:
        columns["label"] = first
    given = np.array(splits, dtype=np.int8)
    strata = np.zeros_like(first) if several else first
    split = holdout.complete_splits(
        given, strata, files.__getitem__, identity=str(path), holdout_fraction=holdout_fraction
    )
    columns["split"] = split.column
    notes = list(split.notes)
    if hot:
        shown = ", ".join(hot[:5]) + (" ..." if len(hot) > 5 else "")
        notes.append(f"labels are read from {len(hot)} columns of 0 and 1: {shown}")
    if not classes:
        notes.append("no label or labels is given: the images have no labels")
    return columns, {"classes": classes, "made_up": split.generated_splits, "notes": notes}


def _find_one_hot_columns(rows: Sequence[Mapping[str, Any]], lines: Sequence[int], path: Path | str) -> list[str]:
    """All columns, if they are two or more and hold nothing but 0 and 1; a cell that alone does not is refused."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name]  # an index has no name
    bits = {name: [_parse_bit(row.get(name)) for row in rows] for name in names}
    mostly = all(2 * column.count(None) < len(rows) for column in bits.values())
    if len(names) < 2 or not mostly or not any(True in column for column in bits.values()):
        return []
    for name, column in bits.items():
        if None in column:
            row = column.index(None)
            raise DataError(
                f"{path}, line {lines[row]}: {name} is {rows[row].get(name)!r:.80}, and most of its column is 0 or 1:"
                " correct it, remove the column, or add a column named label"
            )
    return names


def _parse_bit(value: Any) -> bool | None:
    """What a cell says, if it is 0 or 1."""
    return _BIT_VALUES.get(str(value).strip().lower())


def _iter_rows(path: Path | str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row with its line number."""
    try:
        suffix = PurePosixPath(path).suffix.lower()
        with _open_text(path) as file:
            if suffix in (".csv", ".tsv"):
                rows = csv.DictReader(_iter_lines(file, path), delimiter="\t" if suffix == ".tsv" else ",")
                _check_header(path, rows.fieldnames or ())
                for row in rows:
                    yield (
                        rows.line_num,
                        {_normalize_column_name(key): value for key, value in row.items() if key is not None},
                    )
            else:
                for number, line in enumerate(_iter_lines(file, path), start=1):
                    if line.strip():
                        yield number, _parse_json_object(line, f"{path}, line {number}")
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as text in UTF-8: {error}") from error


def _normalize_column_name(column: str) -> str:
    """The name of a column; the known ones in any case."""
    name = column.strip()
    return name.lower() if name.lower() in _KNOWN_COLUMNS else name


def _open_text(path: Path | str) -> IO[str]:
    if isinstance(path, Path):
        return path.open(newline="", encoding="utf-8-sig")
    return io.StringIO(remote.read(path).decode("utf-8-sig"), newline="")


def _iter_lines(file: IO[str], path: Path | str) -> Iterator[str]:
    """Line by line, none longer than any row is: a device named as a list is one line without end."""
    while line := file.readline(LINE_LIMIT + 1):
        if len(line) > LINE_LIMIT:
            raise DataError(f"{path} has a line of over {LINE_LIMIT:,} characters; a list has one image a line")
        yield line


def _parse_json_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{where} is no JSON object")
    return value


def _check_header(path: Path | str, header: Any) -> None:
    names = {str(name).strip().lower() for name in header}
    if not names.intersection(_PATH_COLUMNS):
        raise DataError(
            f"{path} has the columns {', '.join(sorted(names))}; one must be named path, another label or labels"
        )


def _get_text_field(row: Mapping[str, Any], keys: tuple[str, ...], where: str) -> str:
    for key in keys:
        value = row.get(key)
        if isinstance(value, str) and value and "\0" not in value:
            _check_encodable(value, where)
            return value
        if value is not None and value != "":
            raise DataError(f"{where}: {key} is {value!r:.80}; it must be text")
    raise DataError(f"{where} has no {keys[0]}")


def _check_encodable(path: str, where: str) -> None:
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {path!r:.80} is no file name: {error}") from error


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
            raise DataError(f"{where}: {key} is {value!r:.80}; it must be one name (several stand under labels)")
    return ()


def _parse_split(row: Mapping[str, Any], where: str) -> int:
    value = row.get("split")
    if value is None or value == "":
        return holdout.NO_SPLIT
    if str(value).strip().lower() not in SPLIT_NAMES:
        raise DataError(f"{where}: split is {value!r:.80}; it must be train, val or test")
    return SPLIT_NAMES[str(value).strip().lower()]


def _sort_classes(names: set[str]) -> list[str]:
    """By name, or by value where all are whole numbers."""
    if all(name.isascii() and name.isdigit() for name in names):
        return sorted(names, key=lambda name: (len(name.lstrip("0")), name.lstrip("0"), name))
    return sorted(names)
