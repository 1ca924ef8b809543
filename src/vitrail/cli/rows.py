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
from vitrail.cli import show
from vitrail.errors import UsageError
from vitrail.spreadsheet import quote_cell, unquote_cell

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vitrail.predict import Answer

Form = Literal["table", "csv", "jsonl", "npy"]
SUFFIXES: dict[str, Form] = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".npy": "npy"}
_WIDEST = 30  # letters of a label in a table


class Row(NamedTuple):
    """What was said of an image: labels, or features, or nothing and why."""

    image: str
    labels: "Answer" = []  # noqa: RUF012, nobody appends to it
    features: "NDArray[np.float32] | None" = None
    error: str = ""
    attention: str | None = None
    """The picture of where the model looked, nothing where it could not; None where none was asked for."""


class Place(NamedTuple):
    """How far files are: images, those of them that cannot be read, and bytes of the file of lines."""

    images: int = 0
    failed: int = 0
    length: int = 0


class Named(Protocol):
    """An image that has a name."""

    @property
    def name(self) -> str: ...


Image = TypeVar("Image", bound=Named)
Write = Callable[[Sequence[Row]], None]


# --- lines -----------------------------------------------------------------------------------------------------------


def head(form: Form, *, attention: bool) -> str:
    """The line above the rows, if there is one."""
    if form == "csv":
        return _line(("image", "rank", "label", "probability", "error", *(["attention"] if attention else [])))
    return _line(("image", "error")) if form == "npy" else ""


def lines(row: Row, form: Form, labels: Sequence[str] = ()) -> str:
    """A row as text; a table is as wide as the longest of the `labels` that there are."""
    if form == "jsonl":
        return f"{json.dumps(_object(row))}\n"
    if form == "npy":
        return _line((row.image, row.error))
    if form == "table":
        return _aligned(row, min(_WIDEST, max(map(len, labels), default=0)))
    return _records(row)


def _records(row: Row) -> str:
    from vitrail.predict import UNSURE

    more = [] if row.attention is None else [row.attention]
    if row.error:
        return _line((row.image, "", "", "", row.error, *more))
    unsure = len(row.labels) > 1 and row.labels[0] == (UNSURE, row.labels[1][1])  # and no class of that name
    first = 0 if unsure else 1
    return "".join(
        _line((row.image, rank, label, f"{probability:.6f}", "", *more))
        for rank, (label, probability) in enumerate(row.labels, first)
    )


def _line(cells: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text).writerow(quote_cell(cell) if isinstance(cell, str) else cell for cell in cells)
    return text.getvalue()


def _object(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {"image": row.image}
    if row.error:
        found["error"] = row.error
    elif row.features is not None:
        found["features"] = [float(f"{value:.9g}") for value in row.features.tolist()]  # enough to have it back
    else:
        found["predictions"] = [{"label": label, "probability": value} for label, value in row.labels]
    return found | ({"attention": row.attention} if row.attention else {})


def _aligned(row: Row, width: int) -> str:
    """A probability, a label and the image for each label: the column whose width is unknown stands last."""
    if row.error:
        return f"     -  {'':{width}}  {show.printable(row.error)}\n"
    image = show.printable(row.image)
    return "".join(
        f"{probability:6.4f}  {show.printable(label)[:_WIDEST]:{width}}  {image}\n" for label, probability in row.labels
    )


# --- files that go on ------------------------------------------------------------------------------------------------


def beside(out: Path) -> Path:
    """Where the names of a matrix's rows stand."""
    return out.with_suffix(".csv")


def begun(
    out: Path, form: Form, identity: dict[str, Any], images: Iterator[Image], *, batch: int, ranks: int
) -> tuple[Place, list[Image]]:
    """How far `out` is, in whole batches, if the same command began it; where it does not exist, at its beginning.

    Images are taken for as long as rows of them are there, and their names must be the rows'. Those of a batch that is
    not whole are given back: they are to be done again. Of each image `ranks` labels are told.
    """
    text, record = beside(out) if form == "npy" else out, out.with_name(f"{out.name}.json")
    if not out.exists() and not text.exists():
        with files.replacing(record, overwrite=_recorded(record) is not None) as fresh:
            fresh.write_text(json.dumps(identity, indent=1))
        return Place(), []
    _check_same(out, record, identity)
    place, whole = Place(), _whole(text, form, ranks)
    if form == "npy":
        whole = itertools.islice(whole, _matrix_rows(out, identity["features"]))
    while some := list(itertools.islice(whole, batch)):
        taken = list(itertools.islice(images, len(some)))
        _check_names(text, place.images, [row.image for row in some], [image.name for image in taken])
        if len(some) < batch:
            return place, taken
        place = Place(place.images + batch, place.failed + sum(row.failed for row in some), some[-1].end)
    return place, []


def _check_same(out: Path, record: Path, identity: dict[str, Any]) -> None:
    another, before = "choose another --out, or remove it", _recorded(record)
    if before is None:
        raise UsageError(f"{out} exists, and no {record.name} beside it says what made it: {another}")
    for key, value in json.loads(json.dumps(identity)).items():  # in which tuples are lists too
        if before.get(key) != value:
            what = "another model" if key == "model" else f"{key} {before.get(key)}, not {value}"
            raise UsageError(f"{out} was begun with {what}: {another}")


def _recorded(record: Path) -> dict[str, Any] | None:
    """What made a file, or None where nothing says it."""
    try:
        found = json.loads(record.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "vitrail" in found else None


def _check_names(path: Path, done: int, before: Sequence[str], now: Sequence[str]) -> None:
    for number, (old, new) in enumerate(itertools.zip_longest(before, now), done + 1):
        if old != new:
            stands = f"{new} stands there" if new is not None else "there are fewer images"
            raise UsageError(
                f"image {number:,} of {path} is {old}, and now {stands}: choose another --out, or remove it"
            )


class _Kept(NamedTuple):
    """An image all of whose lines are in a file, and where they end."""

    image: str
    failed: bool
    end: int


def _whole(path: Path, form: Form, ranks: int) -> Iterator[_Kept]:
    """The images of a file up to the first that is not there whole: it was being written when the command stopped."""
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from _kept_objects(file) if form == "jsonl" else _kept_records(file, ranks)


def _kept_objects(file: BinaryIO) -> Iterator[_Kept]:
    for line in _ended(file):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(row, dict) or not isinstance(row.get("image"), str):
            return  # damaged: it is written again
        yield _Kept(row["image"], "error" in row, file.tell())


def _kept_records(file: BinaryIO, ranks: int) -> Iterator[_Kept]:
    rows = csv.DictReader(_ended(file), strict=True)
    try:
        for row in rows:
            if row.get("error") is None:
                return
            if row.get("rank", "") in ("", str(ranks)):
                yield _Kept(unquote_cell(row["image"]), bool(row["error"]), file.tell())
    except csv.Error:  # a line ends inside of quotes
        return


def _ended(file: BinaryIO) -> Iterator[str]:
    """Lines that end; by readline, after which a file knows where it is."""
    while (line := file.readline()).endswith(b"\n"):
        yield line.decode(errors="surrogateescape")


@contextlib.contextmanager
def to_stdout(form: Form, labels: Sequence[str], *, attention: bool) -> Iterator[Write]:
    """A function that prints rows."""
    file = sys.stdout  # a progress bar puts itself in its place
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="surrogateescape")  # a file's name may be no valid text
    file.write(head(form, attention=attention))

    def write(rows: Sequence[Row]) -> None:
        file.write("".join(lines(row, form, labels) for row in rows))
        file.flush()

    yield write


@contextlib.contextmanager
def to_files(out: Path, form: Form, place: Place, *, features: int, attention: bool) -> Iterator[Write]:
    """A function that appends rows after what is there; what comes after `place` is cut off."""
    with contextlib.ExitStack() as stack:
        names = beside(out) if form == "npy" else out
        matrix = stack.enter_context(_opened(out)) if form == "npy" else None
        text = stack.enter_context(_opened(names))
        text.truncate(place.length)
        text.seek(place.length)
        if not place.length:
            text.write(head(form, attention=attention).encode())
        images = place.images
        if matrix is not None:
            _set_rows(matrix, images, features)

        def write(rows: Sequence[Row]) -> None:
            nonlocal images
            images += len(rows)
            if matrix is not None:
                matrix.write(_stacked(rows, features))
                _set_rows(matrix, images, features)
            text.write("".join(lines(row, form) for row in rows).encode(errors="surrogateescape"))
            text.flush()  # after the matrix, so that no line is without its row

        yield write
    for path in {out, names}:
        files.sync(path)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """A file to read and write, made where it is not there, for this process alone."""
    with locks.hold_lock(path.with_name(f".{path.name}.lock"), str(path)):
        path.touch()
        with path.open("r+b") as file:
            yield file


# --- a matrix that grows ---------------------------------------------------------------------------------------------


def _set_rows(file: IO[bytes], count: int, features: int) -> None:
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


def _stacked(rows: Sequence[Row], features: int) -> bytes:
    import numpy as np

    nothing = np.full(features, np.nan, dtype="<f4")
    return b"".join((nothing if row.features is None else row.features.astype("<f4")).tobytes() for row in rows)


def _matrix_rows(path: Path, features: int) -> int:
    """Whole rows of a matrix that was perhaps being written."""
    header = io.BytesIO()
    _set_rows(header, 0, features)
    size = path.stat().st_size if path.exists() else 0
    return max(0, size - len(header.getvalue())) // (4 * features)
