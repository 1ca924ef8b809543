"""Parquet files that hold images: their columns, and reading one image without holding a whole file.

A column of images holds bytes, Hugging Face's struct of bytes and path, or paths relative to the file. Where several
columns could be meant, the name of the data chooses: photos.parquet#image=scan,label=kind.

Bytes are compressed by row group, so a row group is decompressed to read one of its images. `RowGroupCache` keeps the
last ones up to a number of bytes. Rows that are read in order come in blocks instead, so a row group of any size costs
a few of them and a page. pyarrow is optional (the extra `parquet`), so functions import it.
"""

import contextlib
import functools
import glob
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from vitrail import remote
from vitrail.data.image_headers import FILE_LIMIT
from vitrail.data.webdataset import expand_braces, list_matches
from vitrail.errors import DataError, UsageError
from vitrail.files import open_regular_file

SUFFIX = ".parquet"
ROLES = ("image", "label", "split", "name")
PATH_COLUMNS = ("path", "file", "filename", "file_name", "image", "image_path")
_NAME_COLUMNS = ("path", "file", "filename", "file_name", "name", "key")
_BLOCK_BYTES = 16 * 2**20  # of images that are read in order and held at once
_STREAM_BUFFER = 2**22

ColumnChoice = Mapping[str, str]
"""The columns that a name chooses, by their role: one of ROLES."""


def import_parquet() -> Any:
    """Import pyarrow.parquet; where it is missing, name the extra that brings it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError("Parquet files need the library pyarrow: pip install 'vitrail[parquet]'") from error
    return pyarrow.parquet


# --- names -----------------------------------------------------------------------------------------------------------


def split_column_choice(name: str) -> tuple[str, ColumnChoice]:
    """photos.parquet#image=scan,label=kind -> photos.parquet and {"image": "scan", "label": "kind"}."""
    location, separator, text = name.rpartition("#")
    pairs = [part.partition("=") for part in text.split(",")]
    if not separator or not any(role in ROLES and equals for role, equals, _ in pairs):
        return name, {}
    for role, _, column in pairs:
        if role not in ROLES or not column:
            raise UsageError(
                f"{name}: {role}={column} chooses no column; write #image=COLUMN,label=COLUMN with {', '.join(ROLES)}"
            )
    return location, {role: column for role, _, column in pairs}


def is_parquet_pattern(name: str) -> bool:
    """Whether a name stands for Parquet files: one, a glob or {000..127}, perhaps with a choice of columns."""
    location, choice = split_column_choice(name)
    return bool(choice) or location.lower().endswith(SUFFIX)


def find_parquet_files(location: str) -> list[str]:
    """The paths or URLs of the files of a pattern or a folder, sorted. What was read of earlier files is forgotten."""
    read_layout.cache_clear()
    _open_block_reader.cache_clear()
    is_pattern = location.lower().endswith(SUFFIX) and not _is_folder(location)
    files = _list_pattern(location) if is_pattern else _list_folder(location)
    if not files:
        raise DataError(f"no {SUFFIX} file matches {location}")
    return files


def has_parquet_files(folder: str) -> bool:
    """Whether a folder, or a folder in it, has Parquet files."""
    return bool(_list_folder(folder))


def _is_folder(location: str) -> bool:
    """Whether a name is that of a folder, as Spark names it: rows.parquet/part-00000.parquet."""
    if any(character in location for character in "*?[{"):
        return False
    return not remote.is_file(location) if remote.is_remote(location) else Path(location).is_dir()


def _list_pattern(pattern: str) -> list[str]:
    return sorted({path for expanded in expand_braces(pattern) for path in list_matches(expanded)})


def _list_folder(folder: str) -> list[str]:
    root = folder.rstrip("/") if remote.is_remote(folder) else glob.escape(folder)
    patterns = (f"{root}/*{SUFFIX}", f"{root}/*/*{SUFFIX}")
    return next((matches for pattern in patterns if (matches := sorted(list_matches(pattern)))), [])


# --- files -----------------------------------------------------------------------------------------------------------


class FileLayout(NamedTuple):
    """What a file's footer says of its rows."""

    schema: Any
    """pyarrow's, of all columns."""
    metadata: Any
    """pyarrow's, with which the file is opened again without reading the footer."""
    group_ends: tuple[int, ...]
    """The row after the last of each row group."""

    @property
    def num_rows(self) -> int:
        """The rows of the file."""
        return self.group_ends[-1] if self.group_ends else 0


@contextlib.contextmanager
def open_parquet(path: str, metadata: Any = None, *, buffer_size: int = 0) -> Iterator[Any]:
    """Open a local or remote file as a pyarrow.parquet.ParquetFile; what goes wrong is an error that names it."""
    parquet = import_parquet()
    import pyarrow

    arrow_errors = pyarrow.ArrowException, OSError  # looked up now: a reader may outlive the modules at exit
    try:
        with _open_file(path) as file:
            yield parquet.ParquetFile(file, metadata=metadata, pre_buffer=False, buffer_size=buffer_size)
    except arrow_errors as error:
        raise DataError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())[:300]}") from error


@contextlib.contextmanager
def _open_file(path: str) -> Iterator[IO[bytes]]:
    with remote.open_for_random_access(path) if remote.is_remote(path) else open_regular_file(Path(path)) as file:
        yield file


@functools.lru_cache(maxsize=256)
def read_layout(path: str) -> FileLayout:
    """Read a file's footer."""
    with open_parquet(path) as file:
        metadata = file.metadata
        sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        if min(sizes, default=0) < 0 or sum(sizes) != metadata.num_rows:
            raise DataError(f"{path} is damaged: its row groups do not have the {metadata.num_rows} rows of the file")
        return FileLayout(file.schema_arrow, metadata, tuple(np.cumsum(sizes, dtype=np.int64).tolist()))


def measure_row_group(path: str, group: int) -> int:
    """The bytes of a row group, decompressed; of all columns: asked for one, pyarrow may abort over a damaged file."""
    return int(read_layout(path).metadata.row_group(group).total_byte_size)


# --- columns ---------------------------------------------------------------------------------------------------------


class ImageColumn(NamedTuple):
    """Where the images of a file are."""

    name: str
    holds_paths: bool = False
    """Whether its cells are paths, relative to the file."""
    name_column: str = ""
    """The column with the images' names, such as `path`, or image.path of a struct; empty if there is none."""


def choose_image_column(schema: Any, choice: ColumnChoice, where: str) -> ImageColumn:
    """The column of images: the chosen one, or the only one that can hold images."""
    _check_choice(schema, choice, where)
    types = dict(zip(schema.names, schema.types, strict=True))
    holding_bytes = [name for name, kind in types.items() if _holds_bytes(kind)]
    holding_paths = [name for name, kind in types.items() if _is_text(kind) and name.lower() in PATH_COLUMNS]
    candidates = [choice["image"]] if "image" in choice else holding_bytes or holding_paths
    if not candidates:
        raise DataError(
            f"{where} has no column of images among {_list_columns(schema)}: one holds bytes, or paths under the name"
            f" {', '.join(PATH_COLUMNS)}; #image=COLUMN chooses another column of paths"
        )
    if len(candidates) > 1:
        raise DataError(
            f"{where} has {len(candidates)} columns that may hold the images: {', '.join(candidates)}; choose one:"
            f" {where}#image={candidates[0]}"
        )
    [image] = candidates
    if not _holds_bytes(types[image]):
        if not _is_text(types[image]):
            raise DataError(f"{where}: {image} is a column of {types[image]}; images are bytes, or paths to files")
        return ImageColumn(image, holds_paths=True, name_column=choice.get("name", image))
    names = [f"{image}.path"] if _has_path(types[image]) else []
    names += [name for name, kind in types.items() if _is_text(kind) and name.lower() in _NAME_COLUMNS]
    return ImageColumn(image, name_column=choice.get("name", next(iter(names), "")))


def choose_column(schema: Any, role: str, names: Sequence[str], choice: ColumnChoice, where: str) -> str:
    """The column with another role: the chosen one, or the only one with a known name; empty if there is none."""
    candidates = [choice[role]] if role in choice else [name for name in schema.names if name.lower() in names]
    if len(candidates) > 1:
        raise DataError(
            f"{where} has {len(candidates)} columns that may be the {role}: {', '.join(candidates)}; choose one:"
            f" {where}#{role}={candidates[0]}"
        )
    return next(iter(candidates), "")


def read_features(schema: Any) -> Mapping[str, Any]:
    """Hugging Face's description of each column, where the file has it; else empty."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return features if isinstance(features, dict) else {}


def _check_choice(schema: Any, choice: ColumnChoice, where: str) -> None:
    for role, column in choice.items():
        if column not in schema.names:
            raise DataError(f"{where} has no column {column} to be the {role}; it has {_list_columns(schema)}")


def _list_columns(schema: Any) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in zip(schema.names, schema.types, strict=True)) or "no columns"


def _holds_bytes(kind: Any) -> bool:
    from pyarrow import types

    if types.is_struct(kind):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _has_path(kind: Any) -> bool:
    from pyarrow import types

    return types.is_struct(kind) and any(field.name == "path" and _is_text(field.type) for field in kind)


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


# --- cells -----------------------------------------------------------------------------------------------------------


class RowGroupCache:
    """The last row groups that were read, up to a number of bytes; any number of threads may read."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[Any, tuple[Future[Any], int]] = OrderedDict()

    def get(self, key: Any, num_bytes: int, load: Callable[[], Any]) -> Any:
        """The cells under a key; they are loaded once, also where several threads ask for them at a time."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            else:
                self._evict(num_bytes)
                future: Future[Any] = Future()
                self._entries[key] = future, num_bytes
        if entry is not None:
            return entry[0].result()
        try:
            future.set_result(load())
        except BaseException as error:
            with self._lock:
                self._entries.pop(key, None)
            future.set_exception(error)
            raise
        return future.result()

    def _evict(self, num_bytes: int) -> None:
        total = sum(size for _, size in self._entries.values())
        while self._entries and total + num_bytes > self.max_bytes:
            _, (_, size) = self._entries.popitem(last=False)
            total -= size


def read_row_group(path: str, group: int, column: str) -> Any:
    """The cells of a column in a row group, as pyarrow has them."""
    with open_parquet(path, read_layout(path).metadata) as file:
        return file.read_row_group(group, columns=[column], use_threads=False).column(column)


def get_image(cells: Any, index: int, path: str, name: str) -> Path | bytes:
    """An image of a column: bytes, or the path of a file that stands for them; a remote file is read."""
    if index >= len(cells):
        raise DataError(f"{path} is damaged, or has changed since it was opened: it lacks the row of {name}")
    value = cells[index].as_py()
    content = value.get("bytes") if isinstance(value, dict) else value
    if content is None and isinstance(value, dict) and value.get("path"):
        location = join_path(path, value["path"])
        return remote.read(location) if remote.is_remote(location) else Path(location)
    if content is None:
        raise DataError(f"{name} has no image: the cell is empty")
    if len(content) > FILE_LIMIT:
        raise DataError(f"{name} has {len(content):,} bytes; the limit for images is {FILE_LIMIT:,}")
    return bytes(content)


def join_path(parquet_file: str, path: str) -> str:
    """The path or URL of an image by its path relative to a Parquet file."""
    if remote.is_remote(parquet_file):
        return remote.join_url(parquet_file.rpartition("/")[0], path)
    return str(Path(parquet_file).parent / path)


# --- cells in order --------------------------------------------------------------------------------------------------


class _RowBlock(NamedTuple):
    """Some rows of a row group."""

    path: str
    column: str
    group: int
    number: int
    rows: int
    """Of each block of this row group but the last."""


class _BlockReader:
    """Blocks of a row group, one after the other, from a file that stays open between them; the last are kept."""

    def __init__(self) -> None:
        self.cache = RowGroupCache(2 * _BLOCK_BYTES)
        self._lock = threading.Lock()
        self._source: tuple[str, str, int] | None = None
        self._blocks: Iterator[Any] = iter(())
        self._next = 0

    def read(self, block: _RowBlock) -> Any:
        """The cells of a block; those before it are skipped."""
        with self._lock:
            source = block.path, block.column, block.group
            if self._source != source or block.number < self._next:
                self._source, self._blocks, self._next = source, _iterate_blocks(block), 0
            cells = None
            while self._next <= block.number:
                self._source = None  # unless the read succeeds
                cells = next(self._blocks, ())
                self._source, self._next = source, self._next + 1
            return cells


def _iterate_blocks(block: _RowBlock) -> Iterator[Any]:
    with open_parquet(block.path, read_layout(block.path).metadata, buffer_size=_STREAM_BUFFER) as file:
        options = {"row_groups": [block.group], "columns": [block.column], "use_threads": False}
        for batch in file.iter_batches(batch_size=block.rows, **options):
            yield batch.column(0)


@functools.lru_cache(maxsize=1)
def _open_block_reader(_process: int) -> _BlockReader:
    """The reader of a process: after a fork, that of the parent may be in use by a thread that is not there."""
    return _BlockReader()


def read_row(path: str, column: str, row: int, name: str) -> Path | bytes:
    """The image in a row of a file. Rows near the last one read are in memory already."""
    layout = read_layout(path)
    group = int(np.searchsorted(layout.group_ends, row, side="right"))
    start = layout.group_ends[group - 1] if group else 0
    rows, num_bytes = layout.group_ends[group] - start, measure_row_group(path, group)
    block_rows = max(1, min(rows, rows * _BLOCK_BYTES // max(1, num_bytes)))
    number, index = divmod(row - start, block_rows)
    block = _RowBlock(path, column, group, number, block_rows)
    reader = _open_block_reader(os.getpid())
    cells = reader.cache.get(block, min(num_bytes, _BLOCK_BYTES), lambda: reader.read(block))
    return get_image(cells, index, path, name)


def iter_text(path: str, column: str) -> Iterator[str | None]:
    """The cells of a column of text, in order."""
    with open_parquet(path, read_layout(path).metadata, buffer_size=_STREAM_BUFFER) as file:
        for batch in file.iter_batches(columns=[column], use_threads=False):
            cells = batch.column(0)
            values = cells.field(0) if "." in column and column not in batch.schema.names else cells
            yield from values.to_pylist()
