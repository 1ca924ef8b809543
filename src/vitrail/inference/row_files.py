"""Files of rows that an interrupted command continues: what made them, how much they hold, and where they are copied.

    FILE        rows in one of the formats: text_rows.py, parquet_rows.py, partition_rows.py
    FILE.json   what made them: the model's digest and the options; and how many images there are, once all are written

A command continues at the last complete unit: a batch, or several that are written together. So batches hold the same
images as without the interruption, and their results are the same to the bit.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vitrail import files, remote
from vitrail.config import BiTConfig, ModelConfig, ViTConfig, from_json, to_json
from vitrail.config.features import describe_features
from vitrail.config.serialization import upgrade_keys
from vitrail.errors import UsageError
from vitrail.inference.parquet_rows import ParquetRows
from vitrail.inference.partition_rows import PartitionRows
from vitrail.inference.prediction_rows import (
    PredictionItem,
    PredictionRow,
    RowStore,
    StoredImage,
    WriteRows,
    WrittenRows,
    make_valid_text,
)
from vitrail.inference.text_rows import MatrixRows, TextRows

FileFormat = Literal["csv", "jsonl", "npy", "parquet", "partitions"]
_FORMAT_BY_SUFFIX: dict[str, FileFormat] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".npy": "npy",
    ".parquet": "parquet",
}
MODEL_NAME = "model_name"
"""The key of a record that says where the model was, which may change."""
FINISHED = "finished"
"""The key of a record that a command adds when all rows are written."""
_KEEPS_TAIL = ("parquet", "partitions")  # a repeated command leaves the last, smaller unit alone, which costs more
_ADVICE = "choose another --out, or remove it"


def find_file_format(out: str) -> FileFormat | None:
    """The format that a file's name asks for; a name that ends with a slash is a folder of partitions."""
    return "partitions" if out.endswith("/") else _FORMAT_BY_SUFFIX.get(Path(out).suffix.lower())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowFile:
    """A file of rows, and the command that writes it."""

    path: Path
    row_format: FileFormat
    command: Mapping[str, Any]
    """What must be the same to continue the file: version, model and options."""
    batch: int
    ranks: int | None  # labels per image; None where each has its own number
    features: int = 0  # columns of features; 0 where rows hold labels
    float16: bool = False  # whether features are stored so
    attention: bool = False
    is_finished: bool = False  # whether it is known that all rows are written
    url: str | None = None
    """Where a copy is uploaded once all rows are written."""
    can_continue: bool = True

    @property
    def name(self) -> str:
        return self.url or str(self.path)

    @property
    def record_path(self) -> Path:
        """Where the command is recorded."""
        return self.path.with_name(f"{self.path.name}.json")

    @property
    def store(self) -> RowStore:
        """The files of its format."""
        dtype = "<f2" if self.float16 else "<f4"
        if self.row_format == "npy":
            return MatrixRows(path=self.path, features=self.features, unit=self.batch, dtype=dtype)
        if self.row_format == "partitions":
            return PartitionRows(folder=self.path, features=self.features, batch=self.batch, dtype=dtype)
        if self.row_format == "parquet":
            return ParquetRows(
                path=self.path,
                batch=self.batch,
                features=self.features,
                dtype=dtype,
                attention=self.attention,
                metadata=json.dumps(self.command),
            )
        return TextRows(
            path=self.path,
            text_format=self.row_format,
            unit=self.batch,
            ranks=self.ranks,
            is_finished=self.is_finished,
            attention=self.attention,
        )

    def find_written(self, items: Iterator[PredictionItem]) -> tuple[WrittenRows, list[PredictionItem]]:
        """Find how much the file holds in complete units, if the same command began it.

        Items are consumed for as long as there are rows of them, and their names must be the rows'. Those of an
        incomplete unit are returned, to be predicted again. A new file gets a record of its command.
        """
        store = self.store
        if not any(path.exists() for path in store.list_files()):
            self.check_url_free()
            self._write_record(self.command)
            return WrittenRows(), []
        record = self._check_same_command()
        written, stored = WrittenRows(), store.iterate_stored()
        while rows := list(itertools.islice(stored, store.unit)):
            images = list(itertools.islice(items, len(rows)))
            _check_same_names(str(self.path), written.images, rows, images)
            failed = sum(row.failed for row in rows)
            longer = WrittenRows(written.images + len(rows), written.failed + failed, rows[-1].end)
            if len(rows) < store.unit:
                following = list(itertools.islice(items, 1))
                if following or self.row_format not in _KEEPS_TAIL or record.get(FINISHED) != self._count(longer):
                    return written, [*images, *following]
            written = longer
        return written, []

    def check_url_free(self) -> None:
        """Refuse a URL in use."""
        if self.url is not None and remote.list_files(self.url):
            raise UsageError(f"{self.url} exists, and no {self.path} that continues it: {_ADVICE}")

    def upload(self) -> None:
        """Upload the files if there is a URL: the record, what is beside the file, and the file itself last."""
        if self.url is None:
            return
        paths = self.store.list_files()
        remote.copy_to_remote(self.record_path, f"{self.url}.json")
        for path in paths:
            in_folder = self.path in path.parents
            parent = self.url if in_folder else self.url.rpartition("/")[0]
            name = path.relative_to(self.path).as_posix() if in_folder else path.name
            remote.copy_to_remote(path, remote.join_url(parent, name))

    def _write_record(self, record: Mapping[str, Any]) -> None:
        known = read_record(self.record_path) is not None
        with files.write_atomically(self.record_path, overwrite=known) as fresh:
            fresh.write_text(json.dumps(record, indent=1))

    def record_finished(self, total: WrittenRows) -> None:
        """Record that all rows are written, and how many there are."""
        self._write_record({**self.command, FINISHED: self._count(total)})

    def _count(self, total: WrittenRows) -> dict[str, int | None]:
        return {"images": total.images, "failed": total.failed, "ranks": self.ranks, "features": self.features}

    def _check_same_command(self) -> dict[str, Any]:
        """The record, if it is of the same command."""
        before = read_record(self.record_path)
        if before is None:
            raise UsageError(f"{self.path} exists, and no {self.record_path.name} records its command: {_ADVICE}")
        for key, value in json.loads(json.dumps(self.command)).items():  # which makes lists of tuples
            if key != MODEL_NAME and before.get(key) != value:
                difference = "another model" if key == "model" else f"{key} {before.get(key)}, not {value}"
                raise UsageError(f"{self.path} was begun with {difference}: {_ADVICE}")
        return before

    @contextlib.contextmanager
    def open_writer(self, written: WrittenRows) -> Iterator[WriteRows]:
        """Open a function that appends rows after those written; anything after them is cut off.

        A command that ends without an error has written all: then that is recorded, and the files are uploaded.
        """
        total, before = written, read_record(self.record_path) or {}
        with self.store.open_writer(written) as write_rows:

            def write(rows: Sequence[PredictionRow]) -> None:
                nonlocal total
                if before.pop(FINISHED, None) is not None:
                    self._write_record(self.command)
                total = WrittenRows(total.images + len(rows), total.failed + sum(bool(row.error) for row in rows))
                write_rows(rows)

            yield write
        if before.get(FINISHED) != self._count(total):
            self.record_finished(total)
        self.upload()


def read_record(path: Path) -> dict[str, Any] | None:
    """The recorded command, or None where there is none."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or "vitrail" not in record:
        return None
    record.setdefault("--float16", False)
    model = record.get("model")
    if isinstance(model, dict) and "several" in model:  # its name in earlier versions
        model["multi_label"] = model.pop("several")
    if isinstance(model, dict) and "config" in model:
        model["config"] = upgrade_model_config(model["config"])
        if record.get("--embed") and "--features" not in record:  # earlier versions wrote the default
            record["--features"], record["--normalize"] = _describe_default_features(model["config"]), False
    return record


def upgrade_model_config(config: Any) -> Any:
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


def _check_same_names(file_name: str, done: int, rows: Sequence[StoredImage], items: Sequence[PredictionItem]) -> None:
    for number, (row, item) in enumerate(itertools.zip_longest(rows, items), done + 1):
        if item is None or make_valid_text(item.image.name) != make_valid_text(row.image):
            now = "there are fewer images" if item is None else f"it is {item.image.name}"
            raise UsageError(f"image {number:,} of {file_name} is {row.image}, and now {now}: {_ADVICE}")
