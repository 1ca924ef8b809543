"""Rows as lines of CSV or JSON, and a matrix of features with the names of its rows in a CSV beside it.

    rows.csv       image,rank,label,probability,error[,attention]: a line for each label, or one without a label
    rows.jsonl     {"image": ..., "predictions": [{"label": ..., "probability": ...}, ...]}: one for each image;
                   or "features" or "error" instead
    features.npy   (n, D), a row for each image, NaN where it cannot be read; features.csv has image,error

A file is continued at the last complete batch.
"""

import contextlib
import csv
import dataclasses
import io
import itertools
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

import numpy as np
from numpy.lib import format as npy_format

from vitrail import files, locks
from vitrail.formatting import quote_cell, unquote_cell
from vitrail.inference.classifier import UNSURE
from vitrail.inference.prediction_rows import PredictionRow, StoredImage, WriteRows, WrittenRows

TextFormat = Literal["csv", "jsonl", "names"]
"""Lines of CSV, of JSON, or of CSV with the names of a matrix's rows alone."""


# --- lines -----------------------------------------------------------------------------------------------------------


def format_header(text_format: TextFormat, *, attention: bool) -> str:
    """Format the line above the rows, if there is one."""
    if text_format == "jsonl":
        return ""
    columns = ["image", "error"] if text_format == "names" else ["image", "rank", "label", "probability", "error"]
    return _format_csv_line([*columns, "attention"] if attention and text_format == "csv" else columns)


def format_row(row: PredictionRow, text_format: TextFormat) -> str:
    """Format a row as lines of text."""
    if text_format == "jsonl":
        return f"{json.dumps(_make_json_object(row))}\n"
    return _format_csv_line((row.image, row.error)) if text_format == "names" else _format_csv(row)


def _format_csv(row: PredictionRow) -> str:
    attention = [] if row.attention is None else [row.attention]
    if row.error:
        return _format_csv_line((row.image, "", "", "", row.error, *attention))
    unsure = len(row.labels) > 1 and row.labels[0] == (UNSURE, row.labels[1][1])  # and no class of that name
    if not row.labels:
        return _format_csv_line((row.image, "", "", "", "", *attention))
    ranked = enumerate(row.labels, 0 if unsure else 1)
    cells = ((row.image, rank, label, f"{value:.6f}", "", *attention) for rank, (label, value) in ranked)
    return "".join(map(_format_csv_line, cells))


def _format_csv_line(cells: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text).writerow(quote_cell(cell) if isinstance(cell, str) else cell for cell in cells)
    return text.getvalue()


def _make_json_object(row: PredictionRow) -> dict[str, Any]:
    value: dict[str, Any] = {"image": row.image}
    if row.error:
        value["error"] = row.error
    elif row.features is not None:
        value["features"] = [float(f"{number:.9g}") for number in row.features.tolist()]  # enough to restore float32
    else:
        value["predictions"] = [{"label": label, "probability": probability} for label, probability in row.labels]
    return value | ({"attention": row.attention} if row.attention else {})


# --- files -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRows:
    """A file of lines."""

    path: Path
    text_format: TextFormat
    unit: int  # images of a batch
    ranks: int | None = 1  # labels per image; None where each has its own number
    is_finished: bool = False  # whether the last image has all of its lines
    attention: bool = False

    def list_files(self) -> list[Path]:
        """The file."""
        return [self.path]

    def iterate_stored(self) -> Iterator[StoredImage]:
        """The images up to the first incomplete one, which was being written when the command stopped."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            is_json = self.text_format == "jsonl"
            yield from _iterate_json_objects(file) if is_json else self._iterate_csv_records(file)

    def _iterate_csv_records(self, file: BinaryIO) -> Iterator[StoredImage]:
        """The images in lines of CSV.

        Where each has its own number of labels, it ends where the next one begins, so the last may be incomplete.
        """
        last: StoredImage | None = None
        with contextlib.suppress(csv.Error):  # a line ends inside of quotes
            for row in csv.DictReader(_iterate_whole_lines(file), strict=True):
                if row.get("error") is None:
                    return
                rank = row.get("rank", "")
                if self.ranks is None and last is not None and rank in ("", "1"):
                    yield last
                last = StoredImage(unquote_cell(row["image"]), bool(row["error"]), file.tell())
                if self.ranks is not None and rank in ("", str(self.ranks)):
                    yield last
        if self.ranks is None and self.is_finished and last is not None:
            yield last

    @contextlib.contextmanager
    def open_writer(self, written: WrittenRows) -> Iterator[WriteRows]:
        """Open a function that appends lines."""
        with locks.open_locked(self.path) as file:
            file.truncate(written.num_bytes)
            file.seek(written.num_bytes)
            if not written.num_bytes:
                file.write(format_header(self.text_format, attention=self.attention).encode())

            def write(rows: Sequence[PredictionRow]) -> None:
                lines = "".join(format_row(row, self.text_format) for row in rows)
                file.write(lines.encode(errors="surrogateescape"))
                file.flush()

            yield write
        files.fsync_path(self.path)

    def write_merged(self, parts: "Sequence[TextRows]") -> None:
        """Write the lines of the parts one after the other under one header."""
        header = format_header(self.text_format, attention=self.attention).encode()
        with self.path.open("wb") as merged:
            merged.write(header)
            for part in parts:
                with part.path.open("rb") as file:
                    file.seek(len(header))
                    shutil.copyfileobj(file, merged)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixRows:
    """A matrix of features, and the names of its rows."""

    path: Path
    features: int
    unit: int  # images of a batch
    dtype: str = "<f4"

    @property
    def names(self) -> TextRows:
        """The names of the rows, beside the matrix."""
        return TextRows(path=self.path.with_suffix(".csv"), text_format="names", unit=self.unit)

    def list_files(self) -> list[Path]:
        """The names and the matrix."""
        return [self.names.path, self.path]

    def iterate_stored(self) -> Iterator[StoredImage]:
        """The images that have both a complete row and a name."""
        return itertools.islice(self.names.iterate_stored(), self._count_rows())

    @contextlib.contextmanager
    def open_writer(self, written: WrittenRows) -> Iterator[WriteRows]:
        """Open a function that appends rows to the matrix, and then their names."""
        with locks.open_locked(self.path) as matrix, self.names.open_writer(written) as write_names:
            images = written.images
            self._write_header(matrix, images)

            def write(rows: Sequence[PredictionRow]) -> None:
                nonlocal images
                images += len(rows)
                missing = np.full(self.features, np.nan, dtype=self.dtype)
                features = (missing if row.features is None else row.features for row in rows)
                matrix.writelines(each.astype(self.dtype).tobytes() for each in features)
                self._write_header(matrix, images)
                write_names(rows)  # after the matrix, so that no line is without its row

            yield write
        files.fsync_path(self.path)

    def write_merged(self, parts: "Sequence[MatrixRows]") -> None:
        """Write the rows of the parts one after the other, and their names."""
        with self.path.open("w+b") as merged:
            self._write_header(merged, 0)
            for part in parts:
                with part.path.open("rb") as file:
                    file.seek(self._header_bytes)
                    shutil.copyfileobj(file, merged)
            self._write_header(merged, (merged.tell() - self._header_bytes) // self._row_bytes)
        self.names.write_merged([part.names for part in parts])

    def _write_header(self, file: IO[bytes], count: int) -> None:
        """State so many rows in the header, truncate the file to them, and seek to its end.

        NumPy leaves room in a header for the number of rows to grow, so its length never changes.
        """
        file.seek(0)
        shape = (count, self.features)
        npy_format.write_array_header_1_0(file, {"descr": self.dtype, "fortran_order": False, "shape": shape})
        end = file.tell() + count * self._row_bytes
        file.truncate(end)
        file.seek(end)
        file.flush()

    @property
    def _header_bytes(self) -> int:
        header = io.BytesIO()
        self._write_header(header, 0)
        return len(header.getvalue())

    @property
    def _row_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * self.features

    def _count_rows(self) -> int:
        """Complete rows of a matrix that was perhaps being written."""
        size = self.path.stat().st_size if self.path.exists() else 0
        return max(0, size - self._header_bytes) // self._row_bytes


def _iterate_json_objects(file: BinaryIO) -> Iterator[StoredImage]:
    for line in _iterate_whole_lines(file):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(row, dict) or not isinstance(row.get("image"), str):
            return  # damaged: it is written again
        yield StoredImage(row["image"], "error" in row, file.tell())


def _iterate_whole_lines(file: BinaryIO) -> Iterator[str]:
    """Complete lines; by readline, after which a file knows its position."""
    while (line := file.readline()).endswith(b"\n"):
        yield line.decode(errors="surrogateescape")
