"""Rows in a Parquet file that grows by row groups, and that a killed command continues to the same bytes.

    image           string
    error           string, null where the image was read
    labels          list<string>               the likeliest first; null where the image cannot be read
    probabilities   list<float32>              of these labels
    features        fixed_size_list<float>[D]  float32 or float16, instead of labels
    attention       string                     the picture's path, where pictures are drawn

A Parquet file ends with a footer that says where its row groups are. Its writers keep that in memory until they close
the file, so what is left of one that was killed cannot be read. Here a row group is encoded by itself and appended. Its
part of the footer goes to a journal beside the file, `.FILE.journal`, once the row group is on disk. The last step
joins the parts to the footer and removes the journal. So a file without a footer is unfinished, no reader takes it for
a shorter one, and a file with neither a footer nor a journal is damaged.

The footer's metadata has the record of the command under `vitrail`.
"""

import base64
import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitrail import files, locks
from vitrail.errors import DataError, UsageError
from vitrail.inference.prediction_rows import PredictionRow, StoredImage, WriteRows, WrittenRows, make_valid_text

if TYPE_CHECKING:
    import pyarrow

GROUP_IMAGES = 2048  # at least, and a multiple of the batch: 6 MB of 768 features, seconds on a GPU, minutes on a CPU
METADATA_KEY = "vitrail"
_MAGIC = b"PAR1"
_COMPRESSION = "zstd"


class GroupEntry(NamedTuple):
    """A row group that is on disk."""

    end: int
    """Where it ends in the file."""
    images: int
    footer: bytes
    """Its metadata, as a Parquet file that holds nothing else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetRows:
    """A Parquet file of labels, or of features."""

    path: Path
    batch: int
    metadata: str
    """JSON for the footer."""
    features: int = 0  # 0 where rows hold labels
    dtype: str = "<f4"  # of the features
    attention: bool = False

    @property
    def unit(self) -> int:
        """Images of a row group: whole batches."""
        return self.batch * math.ceil(GROUP_IMAGES / self.batch)

    @property
    def journal_path(self) -> Path:
        """Where the metadata of the row groups is until the file is finished."""
        return self.path.with_name(f".{self.path.name}.journal")

    def list_files(self) -> list[Path]:
        """The file."""
        return [self.path]

    def iterate_stored(self) -> Iterator[StoredImage]:
        """The images of all row groups on disk."""
        _, parquet = import_pyarrow()
        if self._is_finished():
            metadata = _read_footer(self.path)
        else:
            metadata = self._join_metadata(_read_journal(self.journal_path, self.path))
        file = parquet.ParquetFile(self.path, metadata=metadata)
        with contextlib.closing(file):
            for number in range(file.num_row_groups):
                group = file.read_row_group(number, columns=["image", "error"])
                for name, error in zip(*(column.to_pylist() for column in group.columns), strict=True):
                    yield StoredImage(name, error is not None)

    @contextlib.contextmanager
    def open_writer(self, written: WrittenRows) -> Iterator[WriteRows]:
        """Open a function that collects rows and appends them as row groups; the footer follows without an error."""
        waiting: list[PredictionRow] = []
        with self.open_appender(written.images) as append:

            def write(rows: Sequence[PredictionRow]) -> None:
                waiting.extend(rows)
                while len(waiting) >= self.unit:
                    append(self.make_table(waiting[: self.unit]))
                    del waiting[: self.unit]

            yield write
            if waiting:
                append(self.make_table(waiting))

    @contextlib.contextmanager
    def open_appender(self, images: int) -> "Iterator[Callable[[pyarrow.Table], None]]":
        """Open a function that appends a table as a row group after so many images; write the footer at the end.

        A finished file to which nothing is appended stays as it is.
        """
        import_pyarrow()
        with locks.open_locked(self.path) as file:
            is_whole = self._is_finished() and _read_footer(self.path).num_rows == images
            begun, tail = False, list[GroupEntry]()

            def append(table: "pyarrow.Table") -> None:
                nonlocal begun
                if not begun:
                    self._begin(file, images)
                    begun = True
                entry = self._append_group(file, table)
                if len(table) == self.unit:
                    _append_to_journal(self.journal_path, entry)
                else:
                    tail.append(entry)

            yield append
            if not begun and not is_whole:
                self._begin(file, images)
            if begun or not is_whole:
                self._finish(file, tail)

    def write_merged(self, parts: "Sequence[ParquetRows]") -> None:
        """Write the rows of the parts one after the other, in row groups as a single command writes them."""
        pa, parquet = import_pyarrow()
        schema, waiting = self._make_schema(), self._make_schema().empty_table()
        with self.open_appender(0) as append:
            for part in parts:
                with contextlib.closing(parquet.ParquetFile(part.path)) as file:
                    for batch in file.iter_batches(batch_size=self.unit):
                        table = pa.Table.from_batches([batch]).replace_schema_metadata(None).cast(schema)
                        waiting = pa.concat_tables([waiting, table])
                        if len(waiting) >= self.unit:
                            append(waiting.slice(0, self.unit))
                            waiting = waiting.slice(self.unit)
            if len(waiting):
                append(waiting)

    def _is_finished(self) -> bool:
        return self.path.stat().st_size > 0 and not self.journal_path.exists()

    def _begin(self, file: IO[bytes], images: int) -> None:
        """Truncate the file to the row groups of so many images, all of them complete, and seek to its end."""
        entries = self._recover_entries(file) if self._is_finished() else _read_journal(self.journal_path, self.path)
        entries = entries[: images // self.unit]
        with files.write_atomically(self.journal_path, overwrite=True) as fresh:
            fresh.touch()
            for entry in entries:
                _append_to_journal(fresh, entry)
        file.truncate(entries[-1].end if entries else 0)
        file.seek(0, os.SEEK_END)
        if not entries:
            file.write(_MAGIC)

    def _recover_entries(self, file: IO[bytes]) -> list[GroupEntry]:
        """The whole row groups of a finished file, whose footer has no parts: they are encoded again, and compared."""
        _, parquet = import_pyarrow()
        entries, start = list[GroupEntry](), len(_MAGIC)
        with contextlib.closing(parquet.ParquetFile(self.path)) as groups:
            for number in range(groups.num_row_groups):
                table = groups.read_row_group(number)
                if len(table) < self.unit:
                    break
                content, footer = self._encode_group(table.replace_schema_metadata(None), start)
                file.seek(start)
                if file.read(len(content)) != content:
                    raise UsageError(
                        f"{self.path} is finished, and this version of pyarrow writes its rows in other bytes, so"
                        " images cannot be added: choose another --out, or remove it"
                    )
                start += len(content)
                entries.append(GroupEntry(start, len(table), footer))
        return entries

    def _append_group(self, file: IO[bytes], table: "pyarrow.Table") -> GroupEntry:
        content, footer = self._encode_group(table, file.tell())
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # before the journal says so
        return GroupEntry(file.tell(), len(table), footer)

    def _encode_group(self, table: "pyarrow.Table", start: int) -> tuple[bytes, bytes]:
        """A table as a row group that begins at `start`, and a Parquet file of its metadata alone.

        pyarrow begins only new files, and takes a row group's place from the file's position. So it writes to a sparse
        file, whose position is set.
        """
        _, parquet = import_pyarrow()
        import pyarrow

        scratch = self.path.with_name(f".{self.path.name}.group")
        try:
            with (
                pyarrow.OSFile(str(scratch), "wb") as sink,
                parquet.ParquetWriter(sink, self._make_schema(), store_schema=False, **self._encoding) as writer,
            ):
                os.lseek(sink.fileno(), start, os.SEEK_SET)
                writer.write_table(table.combine_chunks(), row_group_size=max(1, len(table)))
            with scratch.open("rb") as file:
                file.seek(start)
                content = file.read()
        finally:
            scratch.unlink(missing_ok=True)
        footer_bytes = int.from_bytes(content[-8:-4], "little") + 8  # its length and the magic bytes follow it
        return content[:-footer_bytes], _MAGIC + content[-footer_bytes:]

    @property
    def _encoding(self) -> dict[str, Any]:
        repeated = [] if self.features else ["labels.list.element"]  # for others a dictionary takes time and no less
        return {"compression": _COMPRESSION, "use_dictionary": repeated, "write_statistics": ["image"]}

    def _finish(self, file: IO[bytes], tail: Sequence[GroupEntry]) -> None:
        import pyarrow

        sink = pyarrow.BufferOutputStream()
        self._join_metadata([*_read_journal(self.journal_path, self.path), *tail]).write_metadata_file(sink)
        file.write(sink.getvalue().to_pybytes()[len(_MAGIC) :])
        file.flush()
        os.fsync(file.fileno())
        self.journal_path.unlink()
        files.fsync_path(self.path.parent)

    def _join_metadata(self, entries: Sequence[GroupEntry]) -> Any:
        """The metadata of a file with these row groups."""
        _, parquet = import_pyarrow()
        import pyarrow

        sink = pyarrow.BufferOutputStream()
        with parquet.ParquetWriter(sink, self._make_schema().with_metadata({METADATA_KEY: self.metadata})):
            pass
        joined = parquet.read_metadata(pyarrow.BufferReader(sink.getvalue()))
        for entry in entries:
            joined.append_row_groups(parquet.read_metadata(pyarrow.BufferReader(entry.footer)))
        return joined

    # --- tables ------------------------------------------------------------------------------------------------------

    def _make_schema(self) -> "pyarrow.Schema":
        pa, _ = import_pyarrow()
        if self.features:
            float_type = pa.float16() if self.dtype == "<f2" else pa.float32()
            values = [("features", pa.list_(float_type, self.features))]
        else:
            values = [("labels", pa.list_(pa.string())), ("probabilities", pa.list_(pa.float32()))]
        pictures = [("attention", pa.string())] if self.attention else []
        return pa.schema([("image", pa.string()), ("error", pa.string()), *values, *pictures])

    def make_table(self, rows: Sequence[PredictionRow]) -> "pyarrow.Table":
        """The rows as a table."""
        pa, _ = import_pyarrow()
        schema = self._make_schema()
        columns = {
            "image": [make_valid_text(row.image) for row in rows],
            "error": [make_valid_text(row.error) if row.error else None for row in rows],
            "attention": [make_valid_text(row.attention) if row.attention else None for row in rows],
            "labels": [None if row.error else [label for label, _ in row.labels] for row in rows],
            "probabilities": [None if row.error else [value for _, value in row.labels] for row in rows],
        }
        arrays = {name: pa.array(columns[name], schema.field(name).type) for name in schema.names if name in columns}
        if self.features:
            arrays["features"] = self._make_features(rows)
        return pa.table([arrays[name] for name in schema.names], schema=schema)

    def _make_features(self, rows: Sequence[PredictionRow]) -> Any:
        pa, _ = import_pyarrow()
        missing = np.zeros(self.features, dtype=self.dtype)
        matrix = np.stack([missing if row.features is None else row.features.astype(self.dtype) for row in rows])
        mask = pa.array([row.features is None for row in rows])
        return pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), self.features, mask=mask)


def import_pyarrow() -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet, which are optional."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UsageError("Parquet needs pyarrow: pip install 'vitrail[parquet]'") from None
    return pyarrow, parquet


def _read_footer(path: Path) -> Any:
    """The metadata of a finished file."""
    pa, parquet = import_pyarrow()
    try:
        return parquet.read_metadata(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{path} is damaged: it has no footer, and no journal beside it has its row groups; remove it"
        ) from error


def _append_to_journal(path: Path, entry: GroupEntry) -> None:
    footer = base64.b64encode(entry.footer).decode()
    with path.open("a") as file:
        file.write(f"{json.dumps({'end': entry.end, 'images': entry.images, 'footer': footer})}\n")


def _read_journal(path: Path, rows_path: Path) -> list[GroupEntry]:
    """The row groups on disk: a line that was being written is none, and neither is what the file does not have."""
    if not path.exists():
        return []
    size = rows_path.stat().st_size
    entries = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            entry = json.loads(line)
            entry = GroupEntry(entry["end"], entry["images"], base64.b64decode(entry["footer"]))
        except (ValueError, KeyError, TypeError):
            break
        if not line.endswith("\n") or entry.end > size:
            break
        entries.append(entry)
    return entries
