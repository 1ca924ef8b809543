"""Datasets in Parquet files: a row is an image with its label, and the index is read once.

Labels come from a column `label` or `class`, or `labels` for several: text, or integers, which Hugging Face's metadata
give names. Splits come from a column `split`, or from the names of the files: train-00000-of-00004.parquet.

Row groups take the place of tar shards in the order of training: some of them are shuffled together, as many as
`_WINDOW_BYTES` hold. A process keeps that many in memory, so it decompresses each row group once an epoch.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data import holdout, parquet_files, sample_table
from vitrail.data.dataset import Dataset, build_dataset
from vitrail.data.file_list import sort_classes
from vitrail.data.folder import SPLIT_NAMES, FileStore
from vitrail.data.parquet_files import ColumnChoice, ImageColumn, RowGroupCache
from vitrail.data.sample_table import UNLABELED, Array, SampleTable, encode_label_columns, encode_text_column
from vitrail.data.webdataset import parse_split, split_common_folder
from vitrail.errors import DataError
from vitrail.formatting import format_bytes, pluralize

_WINDOW_BYTES = 2**29  # of the row groups that are shuffled together, and kept in memory by a process
_MAX_WINDOW = 1024  # row groups
_MAX_GROUP_BYTES = 2**30  # above this a row group is refused: each process would hold it
_LABEL_COLUMNS, _LABELS_COLUMN = ("label", "class"), "labels"


class ParquetStore:
    """Images in a column of Parquet files."""

    def __init__(self, folder: Path | str, files: tuple[str, ...], column: str, table: SampleTable) -> None:
        self.folder, self.files, self.column, self.table = folder, files, column, table  # a remote folder is a URL
        self._caches: dict[int, RowGroupCache] = {}

    def __reduce__(self) -> Any:
        return ParquetStore, (self.folder, self.files, self.column, self.table)

    @property
    def is_remote(self) -> bool:
        """Whether row groups are requested from a remote store."""
        return isinstance(self.folder, str)

    def get_name(self, row: int) -> str:
        """The name of the file, and the row in it."""
        group = int(self.table["shard"][row])
        row_in_file = row - int(self.table["group.first_of_file"][group])
        return f"{self.files[self.table['group.file'][group]]}#{row_in_file}"

    def get_path(self, row: int) -> str:
        """The path or URL of the file with this row."""
        return f"{self.folder}/{self.files[self.table['group.file'][self.table['shard'][row]]]}"

    def read(self, row: int) -> bytes | Path:
        """The image file's bytes, or its path where the cell names a file."""
        group, path = int(self.table["shard"][row]), self.get_path(row)
        number, num_bytes = int(self.table["group.number"][group]), int(self.table["group.bytes"][group])
        load = partial(parquet_files.read_row_group, path, number, self.column)
        cells = self._get_cache().get(group, num_bytes, load)
        index = row - int(self.table["group.first"][group])
        return parquet_files.get_image(cells, index, path, self.get_name(row))

    def _get_cache(self) -> RowGroupCache:
        """The cache of this process: a forked one cannot use its parent's, which a thread may hold."""
        process = os.getpid()
        if process not in self._caches:
            self._caches = {process: _open_cache(process, str(self.folder), self.files, self.column)}
        return self._caches[process]


@functools.lru_cache(maxsize=2)
def _open_cache(_process: int, _folder: str, _files: tuple[str, ...], _column: str) -> RowGroupCache:
    """The cache of a process, which the store of each of its tasks uses: a store is pickled anew for each."""
    return RowGroupCache(_WINDOW_BYTES)


def open_parquet_dataset(name: str, *, holdout_fraction: float = 0.1) -> Dataset:
    """Open the Parquet files of a pattern or a folder, given by path or URL; their index is cached."""
    location, choice = parquet_files.split_column_choice(name)
    parquet_files.import_parquet()
    _open_cache.cache_clear()  # the files may have changed
    paths = parquet_files.find_parquet_files(location)
    folder, files = split_common_folder(paths)
    column = _choose_image_column(paths, choice)
    source = _Source(paths, folder, files, choice, column)
    table = sample_table.load_or_build_table(
        f"parquet {folder} {' '.join(files)} {sorted(choice.items())} {holdout_fraction}",
        lambda: paths,
        lambda: _build_columns(source, holdout_fraction),
    )
    if column.holds_paths:
        return build_dataset(name, FileStore(folder, table))
    return build_dataset(name, ParquetStore(folder, files, column.name, table))


class _Source(NamedTuple):
    """The files of a dataset, and its column of images."""

    paths: Sequence[str]
    folder: Path | str
    files: Sequence[str]
    """Their names in the folder."""
    choice: ColumnChoice
    column: ImageColumn


def _choose_image_column(paths: Sequence[str], choice: ColumnChoice) -> ImageColumn:
    """The column of images, which all files must have with one type."""
    schema = parquet_files.read_layout(paths[0]).schema
    column = parquet_files.choose_image_column(schema, choice, paths[0])
    for path in paths[1:]:
        other = parquet_files.read_layout(path).schema
        if column.name not in other.names or other.field(column.name).type != schema.field(column.name).type:
            kind = schema.field(column.name).type
            raise DataError(f"{path} has no column {column.name} of {kind}, as {paths[0]} has: give files of one kind")
    return column


def _build_columns(source: _Source, holdout_fraction: float) -> tuple[Mapping[str, Array], dict[str, Any]]:
    """The columns and metadata of the table: of rows and, under names that begin with group, of row groups."""
    if not any(parquet_files.read_layout(path).num_rows for path in source.paths):
        raise DataError(f"{source.paths[0]} holds no image: it has no row")
    own_metadata: dict[str, Any] = {}
    if source.column.holds_paths:
        columns = encode_text_column("path", _iter_paths(source))
        get_name: Callable[[int], str] = partial(SampleTable(columns).get_text, "path")
    else:
        columns, own_metadata["shard_window"] = _list_row_groups(source)
        get_name = ParquetStore(source.folder, tuple(source.files), source.column.name, SampleTable(columns)).get_name
    labels, classes, notes = _read_labels(source)
    columns |= labels
    split = holdout.complete_splits(
        _read_splits(source), columns, get_name, identity=str(source.folder), holdout_fraction=holdout_fraction
    )
    return columns | {"split": split.column}, split.build_metadata(classes, notes) | own_metadata


def _list_row_groups(source: _Source) -> tuple[dict[str, Array], int]:
    """The columns of row groups, that of each row's, and how many row groups are shuffled together."""
    files, numbers, sizes, num_bytes, first_of_file = [], [], [], [], []
    total = 0
    for file, path in enumerate(source.paths):
        layout = parquet_files.read_layout(path)
        ends = (0, *layout.group_ends)
        for number in range(len(layout.group_ends)):
            files.append(file)
            numbers.append(number)
            sizes.append(ends[number + 1] - ends[number])
            num_bytes.append(parquet_files.measure_row_group(path, number))
            first_of_file.append(total)
        total += layout.num_rows
    if max(num_bytes) > _MAX_GROUP_BYTES:
        raise DataError(
            f"{source.paths[files[int(np.argmax(num_bytes))]]} has a row group of {format_bytes(max(num_bytes))}, and"
            f" each process would hold it to read one image; the limit is {format_bytes(_MAX_GROUP_BYTES)}. Write"
            " smaller ones: pyarrow.parquet.write_table(table, path, row_group_size=1000)"
        )
    rows, byte_counts = np.array(sizes, dtype=np.int64), np.array(num_bytes, dtype=np.int64)
    columns: dict[str, Array] = {
        "shard": np.repeat(np.arange(len(rows), dtype=np.int32), rows),
        "size": np.repeat(byte_counts // np.maximum(rows, 1), rows),  # their mean: pack divides a dataset by it
        "group.file": np.array(files, dtype=np.int32),
        "group.number": np.array(numbers, dtype=np.int32),
        "group.bytes": byte_counts,
        "group.first": np.cumsum(rows) - rows,
        "group.first_of_file": np.array(first_of_file, dtype=np.int64),
    }
    return columns, int(np.clip(_WINDOW_BYTES // max(1, byte_counts.max(initial=1)), 1, _MAX_WINDOW))


def _iter_paths(source: _Source) -> Iterator[str]:
    """The paths of the images, relative to the common folder of the Parquet files."""
    for path, file in zip(source.paths, source.files, strict=True):
        parent = file.rpartition("/")[0]
        for row, name in enumerate(parquet_files.iter_text(path, source.column.name)):
            if not name or "\0" in name:
                raise DataError(f"{path}#{row}: {source.column.name} is {name!r:.80}; it must be a path")
            yield f"{parent}/{name}" if parent and not name.startswith("/") else name


# --- splits ----------------------------------------------------------------------------------------------------------


def _read_splits(source: _Source) -> holdout.SplitColumn:
    """The split of each row: of the column, else of its file's name."""
    schema = parquet_files.read_layout(source.paths[0]).schema
    column = parquet_files.choose_column(schema, "split", ("split",), source.choice, source.paths[0])
    if not column:
        counts = [parquet_files.read_layout(path).num_rows for path in source.paths]
        splits = np.repeat(np.array([parse_split(file) for file in source.files], dtype=np.int8), counts)
    else:
        parts = [_parse_split_column(path, column) for path in source.paths]
        splits = np.concatenate(parts)
    if holdout.NO_SPLIT in splits and (splits != holdout.NO_SPLIT).any():
        where = f"rows of {column}" if column else "files"
        raise DataError(f"some {where} of {source.paths[0]} name a split and others do not: name all or none")
    return splits


def _parse_split_column(path: str, column: str) -> holdout.SplitColumn:
    codes, names = _encode_column(path, column)
    unknown = [name for name in names if str(name).strip().lower() not in SPLIT_NAMES]
    if unknown:
        raise DataError(f"{path}: {column} is {unknown[0]!r:.80}; it must be train, val or test")
    numbers = np.array([SPLIT_NAMES[str(name).strip().lower()] for name in names] + [holdout.NO_SPLIT], dtype=np.int8)
    return numbers[codes.codes]


# --- labels ----------------------------------------------------------------------------------------------------------


class _Codes(NamedTuple):
    """A column as indices of its distinct values."""

    codes: Array
    """-1 for a cell without a value."""
    ends: Array | None
    """Where the values of each row end, if rows hold lists."""


def _encode_column(path: str, column: str) -> tuple[_Codes, list[Any]]:
    """A column of integers, text or lists of them as indices, and its distinct values."""
    import pyarrow
    from pyarrow import types

    layout = parquet_files.read_layout(path)
    if column not in layout.schema.names:
        raise DataError(f"{path} has no column {column}, as other files have: give files of one kind")
    with parquet_files.open_parquet(path, layout.metadata) as file:
        cells = file.read(columns=[column], use_threads=False).column(column).combine_chunks()
    if isinstance(cells, pyarrow.ChunkedArray):  # of a file without rows
        cells = pyarrow.array([], cells.type)
    ends = None
    if types.is_list(cells.type) or types.is_large_list(cells.type) or types.is_fixed_size_list(cells.type):
        lengths = cells.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        ends, cells = np.cumsum(lengths, dtype=np.int64), cells.flatten()
    if types.is_dictionary(cells.type):
        cells = cells.cast(cells.type.value_type)
    if not (types.is_integer(cells.type) or types.is_string(cells.type) or types.is_large_string(cells.type)):
        raise DataError(f"{path}: {column} is a column of {cells.type}; it must hold integers, text or lists of them")
    encoded = cells.dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32)
    return _Codes(codes, ends), encoded.dictionary.to_pylist()


def _read_labels(source: _Source) -> tuple[dict[str, Array], list[str], list[str]]:
    """The columns of labels, the classes, and a note where there are no labels."""
    schema, where = parquet_files.read_layout(source.paths[0]).schema, source.paths[0]
    column = parquet_files.choose_column(schema, "label", _find_label_columns(schema), source.choice, where)
    if not column:
        count = sum(parquet_files.read_layout(path).num_rows for path in source.paths)
        note = "no column named label, class or labels: the images have no labels"
        return encode_label_columns([()] * count, multi_label=False), [], [note]
    parts = [(path, *_encode_column(path, column)) for path in source.paths]
    feature = parquet_files.read_features(schema).get(column)
    classes, number_of_value = _number_classes(feature, {value for _, _, values in parts for value in values}, column)
    labels, ends, total = [], [], 0
    for path, codes, values in parts:
        if codes.ends is None and (codes.codes < 0).any() and (codes.codes >= 0).any():
            row = int(np.flatnonzero(codes.codes < 0)[0])
            raise DataError(f"{path}#{row}: {column} is empty, while other images have a label")
        numbers = np.array([*(number_of_value[value] for value in values), UNLABELED], dtype=np.int32)
        labels.append(numbers[codes.codes])
        if codes.ends is not None:
            ends.append(codes.ends + total)
        total += len(codes.codes)
    columns: dict[str, Array] = {"label": np.concatenate(labels)}
    if ends:
        columns["label.ends"] = np.concatenate(ends)
        if (columns["label"] < 0).any():
            raise DataError(f"{where}: a list in {column} holds a label that is empty or -1: leave it out of the list")
    return columns, classes, []


def _find_label_columns(schema: Any) -> list[str]:
    """The names of the columns that Hugging Face's metadata describe as classes; else the usual names."""
    described = [name for name, feature in parquet_files.read_features(schema).items() if _get_class_names(feature)]
    named = [name for name in described if name in schema.names]
    return [name.lower() for name in named] or [*_LABEL_COLUMNS, _LABELS_COLUMN]


def _get_class_names(feature: Any) -> list[str]:
    """The classes of a ClassLabel, or of a list of them; else none."""
    if isinstance(feature, list) and feature:
        return _get_class_names(feature[0])
    if not isinstance(feature, dict):
        return []
    if feature.get("_type") == "ClassLabel":
        return [str(name) for name in feature.get("names") or []]
    return _get_class_names(feature.get("feature"))


def _number_classes(feature: Any, values: set[Any], column: str) -> tuple[list[str], dict[Any, int]]:
    """The classes, and the number of each value: with Hugging Face's names a value is a number, and -1 is no label."""
    names = _get_class_names(feature)
    if names and all(isinstance(value, int) for value in values):
        unknown = sorted(value for value in values if not -1 <= value < len(names))
        if unknown:
            raise DataError(f"{column} is {unknown[0]}, which is not one of its {pluralize(len(names), 'class')}")
        return names, {value: value for value in values}
    number_of_value = {str(value): value for value in values}
    classes = sort_classes(set(number_of_value))
    return classes, {number_of_value[name]: number for number, name in enumerate(classes)}
