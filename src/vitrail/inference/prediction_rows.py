"""Rows of predictions in files that an interrupted command continues.

    rows.csv       image,rank,label,probability,error[,attention]: a line for each label, or one without a label
    rows.jsonl     {"image": ..., "predictions": [{"label": ..., "probability": ...}, ...]}: one for each image;
                   or "features" or "error" instead
    features.npy   float32 (n, D), a row for each image, NaN where it cannot be read; features.csv has image,error
    FILE.json      beside each of them its command: the model's digest and the options

A command continues at the last complete batch. So batches hold the same images as without the interruption, and their
results are the same to the bit.
"""

import contextlib
import csv
import dataclasses
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, NamedTuple, Protocol

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from vitrail import files, locks
from vitrail.config import BiTConfig, ModelConfig, ViTConfig, from_json, to_json
from vitrail.config.features import describe_features
from vitrail.config.serialization import upgrade_keys
from vitrail.data.image_paths import ImageRef
from vitrail.errors import UsageError
from vitrail.formatting import quote_cell, unquote_cell
from vitrail.inference.classifier import UNSURE, RankedLabels

FileFormat = Literal["csv", "jsonl", "npy"]
FORMAT_BY_SUFFIX: dict[str, FileFormat] = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".npy": "npy"}
_ADVICE = "choose another --out, or remove it"


class PredictionItem(NamedTuple):
    """An image to predict, and the file for its attention picture, if there is to be one."""

    image: ImageRef
    picture: Path | None = None


class PredictionRow(NamedTuple):
    """The prediction for an image: labels, or features, or neither and the error."""

    image: str
    labels: RankedLabels = []  # noqa: RUF012, nobody appends to it
    features: NDArray[np.float32] | None = None
    error: str = ""
    attention: str | None = None
    """The path of the attention picture, empty where it could not be drawn; None where none was requested."""


class WrittenRows(NamedTuple):
    """How much a file holds: images, those of them that cannot be read, and bytes of its lines."""

    images: int = 0
    failed: int = 0
    num_bytes: int = 0


WriteRows = Callable[[Sequence[PredictionRow]], None]


# --- lines -----------------------------------------------------------------------------------------------------------


def format_header(row_format: FileFormat, *, attention: bool) -> str:
    """Format the line above the rows, if there is one."""
    if row_format == "jsonl":
        return ""
    columns = ["image", "error"] if row_format == "npy" else ["image", "rank", "label", "probability", "error"]
    return _format_csv_line([*columns, "attention"] if attention and row_format == "csv" else columns)


def format_row(row: PredictionRow, row_format: FileFormat) -> str:
    """Format a row as lines of text."""
    if row_format == "jsonl":
        return f"{json.dumps(_make_json_object(row))}\n"
    return _format_csv_line((row.image, row.error)) if row_format == "npy" else _format_csv(row)


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


# --- files that can be continued -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowFile:
    """A file of rows, and the command that writes it."""

    path: Path
    row_format: FileFormat
    command: Mapping[str, Any]
    """What must be the same to continue the file: version, model and options."""
    batch: int
    ranks: int | None  # labels per image; None where each has its own number
    features: int = 0  # columns of a matrix of features
    attention: bool = False
    can_continue: bool = True

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def text_path(self) -> Path:
        """Where the lines are: beside a matrix, the names of its rows."""
        return self.path.with_suffix(".csv") if self.row_format == "npy" else self.path

    @property
    def record_path(self) -> Path:
        """Where the command is recorded."""
        return self.path.with_name(f"{self.path.name}.json")

    def find_written(self, items: Iterator[PredictionItem]) -> tuple[WrittenRows, list[PredictionItem]]:
        """Find how much the file holds in complete batches, if the same command began it.

        Items are consumed for as long as there are rows of them, and their names must be the rows'. Those of an
        incomplete batch are returned, to be predicted again. A new file gets a record of its command.
        """
        if not self.path.exists() and not self.text_path.exists():
            known = _read_record(self.record_path) is not None
            with files.write_atomically(self.record_path, overwrite=known) as fresh:
                fresh.write_text(json.dumps(self.command, indent=1))
            return WrittenRows(), []
        self._check_same_command()
        written, stored = WrittenRows(), _iterate_stored(self.text_path, self.row_format, self.ranks)
        if self.row_format == "npy":
            stored = itertools.islice(stored, _count_matrix_rows(self.path, self.features))
        while rows := list(itertools.islice(stored, self.batch)):
            batch = list(itertools.islice(items, len(rows)))
            _check_same_names(self.text_path, written.images, rows, batch)
            if len(rows) < self.batch:
                return written, batch
            failed = sum(row.failed for row in rows)
            written = WrittenRows(written.images + self.batch, written.failed + failed, rows[-1].end)
        return written, []

    def _check_same_command(self) -> None:
        before = _read_record(self.record_path)
        if before is None:
            raise UsageError(f"{self.path} exists, and no {self.record_path.name} records its command: {_ADVICE}")
        for key, value in json.loads(json.dumps(self.command)).items():  # which makes lists of tuples
            if before.get(key) != value:
                difference = "another model" if key == "model" else f"{key} {before.get(key)}, not {value}"
                raise UsageError(f"{self.path} was begun with {difference}: {_ADVICE}")

    @contextlib.contextmanager
    def open_writer(self, written: WrittenRows) -> Iterator[WriteRows]:
        """Open a function that appends rows after those written; anything after them is cut off."""
        with contextlib.ExitStack() as stack:
            matrix = stack.enter_context(_open_locked(self.path)) if self.row_format == "npy" else None
            text = stack.enter_context(_open_locked(self.text_path))
            text.truncate(written.num_bytes)
            text.seek(written.num_bytes)
            if not written.num_bytes:
                text.write(format_header(self.row_format, attention=self.attention).encode())
            images = written.images
            if matrix is not None:
                _write_matrix_header(matrix, images, self.features)

            def write(rows: Sequence[PredictionRow]) -> None:
                nonlocal images
                images += len(rows)
                if matrix is not None:
                    missing = np.full(self.features, np.nan, dtype="<f4")
                    features = (missing if row.features is None else row.features for row in rows)
                    matrix.writelines(each.astype("<f4").tobytes() for each in features)
                    _write_matrix_header(matrix, images, self.features)
                lines = "".join(format_row(row, self.row_format) for row in rows)
                text.write(lines.encode(errors="surrogateescape"))
                text.flush()  # after the matrix, so that no line is without its row

            yield write
        for path in {self.path, self.text_path}:
            files.fsync_path(path)


class RowTarget(Protocol):
    """Where rows go: a file that can be continued, or a stream."""

    @property
    def name(self) -> str: ...

    @property
    def can_continue(self) -> bool: ...

    def find_written(self, items: Iterator[PredictionItem]) -> tuple[WrittenRows, list[PredictionItem]]: ...

    def open_writer(self, written: WrittenRows) -> AbstractContextManager[WriteRows]: ...


def _read_record(path: Path) -> dict[str, Any] | None:
    """The recorded command, or None where there is none."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or "vitrail" not in record:
        return None
    model = record.get("model")
    if isinstance(model, dict) and "several" in model:  # its name in earlier versions
        model["multi_label"] = model.pop("several")
    if isinstance(model, dict) and "config" in model:
        model["config"] = _upgrade_model_config(model["config"])
        if record.get("--embed") and "--features" not in record:  # earlier versions wrote the default
            record["--features"], record["--normalize"] = _describe_default_features(model["config"]), False
    return record


def _upgrade_model_config(config: Any) -> Any:
    """A recorded config with today's names, and with the defaults of fields that it is older than."""
    config = upgrade_keys(ModelConfig, config)
    try:
        current = to_json(from_json(BiTConfig, config) if config["kind"] == "bit" else from_json(ViTConfig, config))
        return json.loads(json.dumps(current))  # which makes lists of tuples
    except (KeyError, TypeError, UsageError):  # damaged: it equals no model's
        return config


def _describe_default_features(config: Any) -> str:
    """The features that the head of a recorded model reads; empty for a damaged record."""
    try:
        is_bit = config["kind"] == "bit"
        return describe_features(from_json(BiTConfig, config) if is_bit else from_json(ViTConfig, config))
    except (KeyError, TypeError, UsageError):
        return ""


def _check_same_names(path: Path, done: int, rows: "Sequence[_StoredImage]", items: Sequence[PredictionItem]) -> None:
    for number, (row, item) in enumerate(itertools.zip_longest(rows, items), done + 1):
        if item is None or item.image.name != row.image:
            now = "there are fewer images" if item is None else f"it is {item.image.name}"
            raise UsageError(f"image {number:,} of {path} is {row.image}, and now {now}: {_ADVICE}")


class _StoredImage(NamedTuple):
    """An image all of whose lines are in a file, and where they end."""

    image: str
    failed: bool
    end: int


def _iterate_stored(path: Path, row_format: FileFormat, ranks: int | None) -> Iterator[_StoredImage]:
    """The images of a file up to the first incomplete one, which was being written when the command stopped."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
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


def _iterate_csv_records(file: BinaryIO, ranks: int | None) -> Iterator[_StoredImage]:
    """The images in lines of CSV.

    Where each has its own number of labels, it ends where the next one begins, so the last may be incomplete.
    """
    before: _StoredImage | None = None
    with contextlib.suppress(csv.Error):  # a line ends inside of quotes
        for row in csv.DictReader(_iterate_whole_lines(file), strict=True):
            if row.get("error") is None:
                return
            if ranks is None and before is not None and row.get("rank", "") in ("", "1"):
                yield before
            before = _StoredImage(unquote_cell(row["image"]), bool(row["error"]), file.tell())
            if ranks is not None and row.get("rank", "") in ("", str(ranks)):
                yield before


def _iterate_whole_lines(file: BinaryIO) -> Iterator[str]:
    """Complete lines; by readline, after which a file knows its position."""
    while (line := file.readline()).endswith(b"\n"):
        yield line.decode(errors="surrogateescape")


@contextlib.contextmanager
def _open_locked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to read and write for this process alone; create it if it is missing."""
    with locks.hold_lock(path.with_name(f".{path.name}.lock"), str(path)):
        path.touch()
        with path.open("r+b") as file:
            yield file


# --- a matrix that grows ---------------------------------------------------------------------------------------------


def _write_matrix_header(file: IO[bytes], count: int, features: int) -> None:
    """State so many rows in the header, truncate the file to them, and seek to its end.

    NumPy leaves room in a header for the number of rows to grow, so its length never changes.
    """
    file.seek(0)
    npy_format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (count, features)})
    end = file.tell() + 4 * count * features
    file.truncate(end)
    file.seek(end)
    file.flush()


def _count_matrix_rows(path: Path, features: int) -> int:
    """Complete rows of a matrix that was perhaps being written."""
    header = io.BytesIO()
    _write_matrix_header(header, 0, features)
    size = path.stat().st_size if path.exists() else 0
    return max(0, size - len(header.getvalue())) // (4 * features)
