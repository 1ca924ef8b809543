"""Rows of what a model said of images, to stdout or into files with which a command that was stopped goes on.

    rows.csv       image,rank,label,probability,error[,attention]: a line for each label
    rows.jsonl     {"image": ..., "predictions": [{"label": ..., "probability": ...}, ...]}: one for each image;
                   or "features" or "error" instead
    features.npy   float32 (n, D), a row for each image, NaN where it cannot be read; features.csv has image,error
    FILE.json      beside each what made it: the model's digest and the options

A command goes on at the last whole batch, so batches hold the same images as without the interruption, and what they
give is the same to the bit.
"""

import contextlib
import csv
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, Protocol, TypeVar

from vitrail import files, locks
from vitrail.cli import output
from vitrail.errors import UsageError
from vitrail.formatting import quote_cell, unquote_cell

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vitrail.inference.classifier import RankedLabels

RowFormat = Literal["table", "csv", "jsonl", "npy"]
FORMAT_BY_SUFFIX: dict[str, RowFormat] = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".npy": "npy"}
_MAX_LABEL_WIDTH = 30  # letters of a label in a table


class PredictionRow(NamedTuple):
    """What was said of an image: labels, or features, or nothing and why."""

    image: str
    labels: "RankedLabels" = []  # noqa: RUF012, nobody appends to it
    features: "NDArray[np.float32] | None" = None
    error: str = ""
    attention: str | None = None
    """The picture of where the model looked, nothing where it could not; None where none was asked for."""


class WrittenRows(NamedTuple):
    """How far files are: images, those of them that cannot be read, and bytes of the file of lines."""

    images: int = 0
    failed: int = 0
    num_bytes: int = 0


class HasName(Protocol):
    """An image that has a name."""

    @property
    def name(self) -> str: ...


Image = TypeVar("Image", bound=HasName)
WriteRows = Callable[[Sequence[PredictionRow]], None]


# --- lines -----------------------------------------------------------------------------------------------------------


def format_header(row_format: RowFormat, *, attention: bool) -> str:
    """The line above the rows, if there is one."""
    if row_format == "csv":
        return _format_csv_line(
            ("image", "rank", "label", "probability", "error", *(["attention"] if attention else []))
        )
    return _format_csv_line(("image", "error")) if row_format == "npy" else ""


def format_row(row: PredictionRow, row_format: RowFormat, labels: Sequence[str] = ()) -> str:
    """A row as text; a table is as wide as the longest of the `labels` that there are."""
    if row_format == "jsonl":
        return f"{json.dumps(_make_json_object(row))}\n"
    if row_format == "npy":
        return _format_csv_line((row.image, row.error))
    if row_format == "table":
        return _format_table_row(row, min(_MAX_LABEL_WIDTH, max(map(len, labels), default=0)))
    return _format_csv(row)


def _format_csv(row: PredictionRow) -> str:
    from vitrail.inference.classifier import UNSURE

    more = [] if row.attention is None else [row.attention]
    if row.error:
        return _format_csv_line((row.image, "", "", "", row.error, *more))
    unsure = len(row.labels) > 1 and row.labels[0] == (UNSURE, row.labels[1][1])  # and no class of that name
    first = 0 if unsure else 1
    return "".join(
        _format_csv_line((row.image, rank, label, f"{probability:.6f}", "", *more))
        for rank, (label, probability) in enumerate(row.labels, first)
    )


def _format_csv_line(cells: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text).writerow(quote_cell(cell) if isinstance(cell, str) else cell for cell in cells)
    return text.getvalue()


def _make_json_object(row: PredictionRow) -> dict[str, Any]:
    found: dict[str, Any] = {"image": row.image}
    if row.error:
        found["error"] = row.error
    elif row.features is not None:
        found["features"] = [float(f"{value:.9g}") for value in row.features.tolist()]  # enough to have it back
    else:
        found["predictions"] = [{"label": label, "probability": value} for label, value in row.labels]
    return found | ({"attention": row.attention} if row.attention else {})


def _format_table_row(row: PredictionRow, width: int) -> str:
    """A probability, a label and the image for each label: the column whose width is unknown stands last."""
    if row.error:
        return f"     -  {'':{width}}  {output.strip_control_characters(row.error)}\n"
    image = output.strip_control_characters(row.image)
    return "".join(
        f"{probability:6.4f}  {output.strip_control_characters(label)[:_MAX_LABEL_WIDTH]:{width}}  {image}\n"
        for label, probability in row.labels
    )


# --- files that go on ------------------------------------------------------------------------------------------------


def get_names_path(out: Path) -> Path:
    """Where the names of a matrix's rows stand."""
    return out.with_suffix(".csv")


def find_written_rows(
    out: Path, row_format: RowFormat, identity: dict[str, Any], images: Iterator[Image], *, batch: int, ranks: int
) -> tuple[WrittenRows, list[Image]]:
    """How far `out` is, in whole batches, if the same command began it; where it does not exist, at its beginning.

    Images are taken for as long as rows of them are there, and their names must be the rows'. Those of a batch that is
    not whole are given back: they are to be done again. Of each image `ranks` labels are told.
    """
    text, record = get_names_path(out) if row_format == "npy" else out, out.with_name(f"{out.name}.json")
    if not out.exists() and not text.exists():
        with files.write_atomically(record, overwrite=_read_record(record) is not None) as fresh:
            fresh.write_text(json.dumps(identity, indent=1))
        return WrittenRows(), []
    _check_same_command(out, record, identity)
    place, whole = WrittenRows(), _iterate_stored(text, row_format, ranks)
    if row_format == "npy":
        whole = itertools.islice(whole, _count_matrix_rows(out, identity["features"]))
    while some := list(itertools.islice(whole, batch)):
        taken = list(itertools.islice(images, len(some)))
        _check_same_names(text, place.images, [row.image for row in some], [image.name for image in taken])
        if len(some) < batch:
            return place, taken
        place = WrittenRows(place.images + batch, place.failed + sum(row.failed for row in some), some[-1].end)
    return place, []


def _check_same_command(out: Path, record: Path, identity: dict[str, Any]) -> None:
    another, before = "choose another --out, or remove it", _read_record(record)
    if before is None:
        raise UsageError(f"{out} exists, and no {record.name} beside it says what made it: {another}")
    for key, value in json.loads(json.dumps(identity)).items():  # in which tuples are lists too
        if before.get(key) != value:
            what = "another model" if key == "model" else f"{key} {before.get(key)}, not {value}"
            raise UsageError(f"{out} was begun with {what}: {another}")


def _read_record(record: Path) -> dict[str, Any] | None:
    """What made a file, or None where nothing says it."""
    try:
        found = json.loads(record.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "vitrail" in found else None


def _check_same_names(path: Path, done: int, before: Sequence[str], now: Sequence[str]) -> None:
    for number, (old, new) in enumerate(itertools.zip_longest(before, now), done + 1):
        if old != new:
            stands = f"{new} stands there" if new is not None else "there are fewer images"
            raise UsageError(
                f"image {number:,} of {path} is {old}, and now {stands}: choose another --out, or remove it"
            )


class _StoredImage(NamedTuple):
    """An image all of whose lines are in a file, and where they end."""

    image: str
    failed: bool
    end: int


def _iterate_stored(path: Path, row_format: RowFormat, ranks: int) -> Iterator[_StoredImage]:
    """The images of a file up to the first that is not there whole: it was being written when the command stopped."""
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from _iterate_json_objects(file) if row_format == "jsonl" else _iterate_csv_records(file, ranks)


def _iterate_json_objects(file: BinaryIO) -> Iterator[_StoredImage]:
    for line in _iterate_whole_lines(file):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(row, dict) or not isinstance(row.get("image"), str):
            return  # damaged: it is written again
        yield _StoredImage(row["image"], "error" in row, file.tell())


def _iterate_csv_records(file: BinaryIO, ranks: int) -> Iterator[_StoredImage]:
    rows = csv.DictReader(_iterate_whole_lines(file), strict=True)
    try:
        for row in rows:
            if row.get("error") is None:
                return
            if row.get("rank", "") in ("", str(ranks)):
                yield _StoredImage(unquote_cell(row["image"]), bool(row["error"]), file.tell())
    except csv.Error:  # a line ends inside of quotes
        return


def _iterate_whole_lines(file: BinaryIO) -> Iterator[str]:
    """Lines that end; by readline, after which a file knows where it is."""
    while (line := file.readline()).endswith(b"\n"):
        yield line.decode(errors="surrogateescape")


@contextlib.contextmanager
def open_stdout_writer(row_format: RowFormat, labels: Sequence[str], *, attention: bool) -> Iterator[WriteRows]:
    """A function that prints rows."""
    file = sys.stdout  # a progress bar puts itself in its place
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="surrogateescape")  # a file's name may be no valid text
    file.write(format_header(row_format, attention=attention))

    def write(rows: Sequence[PredictionRow]) -> None:
        file.write("".join(format_row(row, row_format, labels) for row in rows))
        file.flush()

    yield write


@contextlib.contextmanager
def open_file_writer(
    out: Path, row_format: RowFormat, written: WrittenRows, *, features: int, attention: bool
) -> Iterator[WriteRows]:
    """A function that appends rows after what is there; what comes after `place` is cut off."""
    with contextlib.ExitStack() as stack:
        names = get_names_path(out) if row_format == "npy" else out
        matrix = stack.enter_context(_open_locked(out)) if row_format == "npy" else None
        text = stack.enter_context(_open_locked(names))
        text.truncate(written.num_bytes)
        text.seek(written.num_bytes)
        if not written.num_bytes:
            text.write(format_header(row_format, attention=attention).encode())
        images = written.images
        if matrix is not None:
            _write_matrix_header(matrix, images, features)

        def write(rows: Sequence[PredictionRow]) -> None:
            nonlocal images
            images += len(rows)
            if matrix is not None:
                matrix.write(_pack_features(rows, features))
                _write_matrix_header(matrix, images, features)
            text.write("".join(format_row(row, row_format) for row in rows).encode(errors="surrogateescape"))
            text.flush()  # after the matrix, so that no line is without its row

        yield write
    for path in {out, names}:
        files.fsync_path(path)


@contextlib.contextmanager
def _open_locked(path: Path) -> Iterator[IO[bytes]]:
    """A file to read and write, made where it is not there, for this process alone."""
    with locks.hold_lock(path.with_name(f".{path.name}.lock"), str(path)):
        path.touch()
        with path.open("r+b") as file:
            yield file


# --- a matrix that grows ---------------------------------------------------------------------------------------------


def _write_matrix_header(file: IO[bytes], count: int, features: int) -> None:
    """State so many rows in the header, cut the file to them, and stand at its end.

    NumPy leaves room in a header for the number of rows to grow, so that it always has the same length.
    """
    from numpy.lib import format as layout

    file.seek(0)
    layout.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (count, features)})
    end = file.tell() + 4 * count * features
    file.truncate(end)
    file.seek(end)
    file.flush()


def _pack_features(rows: Sequence[PredictionRow], features: int) -> bytes:
    import numpy as np

    nothing = np.full(features, np.nan, dtype="<f4")
    return b"".join((nothing if row.features is None else row.features.astype("<f4")).tobytes() for row in rows)


def _count_matrix_rows(path: Path, features: int) -> int:
    """Whole rows of a matrix that was perhaps being written."""
    header = io.BytesIO()
    _write_matrix_header(header, 0, features)
    size = path.stat().st_size if path.exists() else 0
    return max(0, size - len(header.getvalue())) // (4 * features)
