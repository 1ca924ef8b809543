"""Read the features that `vitrail predict --embed --out FILE` writes: .npy with its .csv and .json, or Parquet.

A file is read in blocks, so its size does not matter. Its record states the model and the kind of features.
"""

import csv
import importlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import DataError, UsageError
from vitrail.files import suggest_path
from vitrail.formatting import unquote_cell

BLOCK_ROWS = 4096
SUFFIXES = (".npy", ".parquet")
MODEL_KEYS = ("weights", "config", "preprocess")
"""What a record states of the model, and an index keeps."""
_METADATA_KEY = b"vitrail"
_ADVICE = "vitrail predict MODEL PATHS --embed --out features.npy writes one"


class FeatureBlock(NamedTuple):
    """Some rows of a file."""

    names: list[str]
    features: NDArray[Any]  # (b, D); the rows of unreadable images hold anything
    readable: NDArray[np.bool_]  # (b,)


class FeatureFile(NamedTuple):
    """A file of features: what computed them, and how many there are."""

    path: Path
    record: Mapping[str, Any]
    width: int
    num_rows: int

    def iterate_blocks(self) -> Iterator[FeatureBlock]:
        """The rows, in blocks."""
        return _iterate_parquet(self) if self.path.suffix == ".parquet" else _iterate_matrix(self)


def list_feature_files(paths: Sequence[Path]) -> list[FeatureFile]:
    """Open the files named, and those of the folders named, in the order of their names; all are of one model."""
    opened = [_open_feature_file(path) for named in paths for path in _list_parts(named)]
    if not opened:
        raise UsageError(f"name the files of features: {_ADVICE}")
    first = opened[0]
    for other in opened[1:]:
        for key in ("model", "--features"):
            if other.record.get(key) != first.record.get(key):
                what = "another model" if key == "model" else f"{other.record.get(key)} features"
                raise DataError(f"{other.path} has the features of {what}, not those of {first.path}: index each alone")
    return opened


def _list_parts(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"{path} does not exist{suggest_path(path)}")
    parts = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES) if path.is_dir() else [path]
    if not parts:
        raise DataError(f"{path} has no .npy or .parquet file: {_ADVICE}")
    return parts


def _open_feature_file(path: Path) -> FeatureFile:
    if path.suffix == ".parquet":
        return _open_parquet(path)
    if path.suffix == ".npy":
        return _open_matrix(path)
    raise UsageError(f"{path} is no file of features: name a .npy or .parquet that vitrail predict --embed wrote")


def _check_record(path: Path, record: Any) -> Mapping[str, Any]:
    model = record.get("model") if isinstance(record, dict) else None
    if not isinstance(model, dict) or not set(MODEL_KEYS) <= model.keys():
        raise DataError(
            f"{path} does not state the model of its features: write them with vitrail predict MODEL PATHS --embed"
        )
    if not record.get("--features"):
        raise DataError(f"{path} does not state the kind of its features: write them with vitrail predict --embed")
    return record


# --- a matrix, and the names of its rows -----------------------------------------------------------------------------


def _open_matrix(path: Path) -> FeatureFile:
    record_path = path.with_name(f"{path.name}.json")
    try:
        record = json.loads(record_path.read_text())
        matrix = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read with its {record_path.name}: {error}") from error
    if matrix.ndim != 2 or not np.issubdtype(matrix.dtype, np.floating):
        raise DataError(f"{path} holds {matrix.dtype} {matrix.shape}, not a row of features for each image")
    return FeatureFile(path, _check_record(record_path, record), matrix.shape[1], len(matrix))


def _iterate_matrix(file: FeatureFile) -> Iterator[FeatureBlock]:
    matrix, names_path = np.load(file.path, mmap_mode="r", allow_pickle=False), file.path.with_suffix(".csv")
    if not names_path.is_file():
        raise DataError(f"{names_path} is missing; it names the rows of {file.path}")
    done = 0
    with names_path.open(newline="", encoding="utf-8", errors="surrogateescape") as text:
        rows = csv.DictReader(text)
        while block := list(itertools.islice(rows, BLOCK_ROWS)):
            if any(row.get("image") is None or row.get("error") is None for row in block):
                raise DataError(f"{names_path} has a line without its image and error: write {file.path} again")
            features = np.array(matrix[done : done + len(block)])
            done += len(block)
            if len(features) < len(block):
                break
            readable = np.array([not row["error"] for row in block])
            yield FeatureBlock([unquote_cell(row["image"]) for row in block], features, readable)
    if done != file.num_rows:
        raise DataError(
            f"{file.path} has {file.num_rows:,} rows and {names_path.name} names {done:,}: repeat the command that"
            " wrote them, which continues where it stopped"
        )


# --- Parquet ---------------------------------------------------------------------------------------------------------


def _import_parquet() -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise UsageError("Parquet files need pyarrow: pip install 'vitrail[parquet]'") from None


def _open_parquet(path: Path) -> FeatureFile:
    parquet = _import_parquet()
    try:
        with parquet.ParquetFile(path) as file:
            schema, count = file.schema_arrow, file.metadata.num_rows
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
        raise DataError(f"{path} is no Parquet file that can be read: {error}") from error
    columns = {field.name: field.type for field in schema}
    kind = str(columns.get("features", "no such column"))
    if not {"image", "error", "features"} <= columns.keys() or not kind.startswith("fixed_size_list"):
        raise DataError(f"{path} has no columns image, error and features, a list of fixed size: {kind}")
    try:
        record = json.loads((schema.metadata or {}).get(_METADATA_KEY, b""))
    except ValueError:
        record = None
    return FeatureFile(path, _check_record(path, record), columns["features"].list_size, count)


def _iterate_parquet(file: FeatureFile) -> Iterator[FeatureBlock]:
    with _import_parquet().ParquetFile(file.path) as table:
        for batch in table.iter_batches(batch_size=BLOCK_ROWS, columns=["image", "error", "features"]):
            column = batch.column("features")
            present = np.array(column.is_valid().to_pylist(), dtype=bool)
            readable = present & np.array(batch.column("error").is_null().to_pylist(), dtype=bool)
            values = column.drop_null().flatten().to_numpy(zero_copy_only=False)
            features = np.zeros((len(batch), file.width), dtype=values.dtype)
            features[present] = values.reshape(-1, file.width)
            yield FeatureBlock(batch.column("image").to_pylist(), features, readable)
