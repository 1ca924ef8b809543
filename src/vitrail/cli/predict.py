"""`vitrail predict MODEL PATHS...`: what images show, one row for each, in their order."""

import contextlib
import io
import sys
import typing
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from vitrail.api.prediction import run_prediction
from vitrail.api.prediction_files import PredictOptions, make_row_file
from vitrail.cli import output
from vitrail.cli.arguments.evaluation import PredictArguments
from vitrail.cli.prediction_job import make_sbatch_script
from vitrail.data.image_parts import AUTO, parse_part
from vitrail.errors import DataError, UsageError
from vitrail.formatting import pluralize, strip_control_characters
from vitrail.inference.bulk_prediction import (
    AnyClassifier,
    BulkResult,
)
from vitrail.inference.classifier import NO_LABEL
from vitrail.inference.prediction_rows import PredictionItem, PredictionRow, RowTarget, WriteRows, WrittenRows
from vitrail.inference.row_files import FileFormat, find_file_format
from vitrail.inference.text_rows import format_header, format_row
from vitrail.runtime import distributed
from vitrail.runtime.distributed import silence_other_ranks
from vitrail.runtime.workers import hide_progress

PrintedFormat = Literal["table", "csv", "jsonl"]
_MAX_COUNTED_LABELS = 5  # labels whose images are counted at the end
_MAX_LABEL_WIDTH = 30  # characters of a label in a table


def run(arguments: PredictArguments) -> None:
    """Predict the images and write the rows."""
    if not arguments.paths:
        raise UsageError("name the images: files, folders, globs, shards, or - for a list on standard input")
    row_format = _choose_format(arguments)
    if arguments.sbatch is not None:
        print(make_sbatch_script(arguments), end="")
        return
    part = None if arguments.part is None else parse_part(arguments.part)
    if arguments.part == AUTO:
        distributed.leave_process_group()
    options = PredictOptions(
        top=arguments.top,
        embed=arguments.embed,
        features=arguments.features,
        normalize=arguments.normalize,
        float16=arguments.float16,
        attention=arguments.attention,
        out=arguments.out,
        row_format=None if row_format == "table" or arguments.out is None else row_format,
        part=part,
        batch=arguments.batch,
        device=arguments.device,
        precision=arguments.precision,
        workers=arguments.workers,
        fetch_urls=arguments.fetch_urls,
    )

    def make_target(classifier: AnyClassifier, listing: str) -> RowTarget:
        if options.out is None:
            assert row_format in typing.get_args(PrintedFormat)
            return StdoutRows(typing.cast(PrintedFormat, row_format), classifier.labels, options.attention is not None)
        return make_row_file(classifier, options, arguments.model, listing)

    rows_on_screen = arguments.out is None and sys.stdout.isatty()  # which a progress bar would run into
    progress = hide_progress if rows_on_screen else output.show_progress
    with silence_other_ranks():
        result, skipped = run_prediction(
            arguments.model, arguments.paths, options, make_target, notify=output.print_note, progress=progress
        )
        output.print_note(_summarize(result, None if arguments.out is None else result.target) + skipped)
    if result.written.failed and distributed.read_process_group().is_rank0:
        images = pluralize(result.written.images, "image")
        raise DataError(f"{result.written.failed:,} of {images} cannot be read; the error column says why")


def _summarize(result: BulkResult, out: str | None) -> str:
    """How many images there were, their most frequent labels, and where the rows are."""
    written, labels = result.written, result.labels
    failed = f", {written.failed:,} of which cannot be read" if written.failed else ""
    parts = [f"{pluralize(written.images, 'image')}{failed}"]
    if result.new_images < written.images:
        parts.append(f"{result.new_images:,} of them in this run")
    if labels:
        named = len(labels) if len(labels) == _MAX_COUNTED_LABELS + 1 else _MAX_COUNTED_LABELS  # no "1 other label"
        counts = [f"{strip_control_characters(name)} {count:,}" for name, count in labels.most_common(named)]
        others = len(labels) - named
        parts.append(", ".join(counts) + (f", and {pluralize(others, 'other label')}" if others > 0 else ""))
    return "; ".join([*parts, *([] if out is None else [out])])


def _choose_format(arguments: PredictArguments) -> FileFormat | Literal["table"]:
    """Choose the format of the rows, if it can hold them."""
    if arguments.json and arguments.row_format not in (None, "jsonl"):
        raise UsageError(f"--json is --format jsonl, and --format {arguments.row_format} was given too: omit one")
    requested = "jsonl" if arguments.json else arguments.row_format
    out, embed = arguments.out, arguments.embed
    by_suffix = None if out is None else find_file_format(out)
    if out is not None and requested is None and by_suffix is None:
        known = ".csv, .jsonl, .parquet, or with --embed .npy or a folder/"
        raise UsageError(f"--out {out} has no known suffix: {known}; or give --format")
    if by_suffix in ("npy", "parquet", "partitions") and requested is not None:
        raise UsageError(f"--out {out} is no text: it takes no --format and no --json")
    if requested == "table" and out is not None:
        raise UsageError(f"--out {out}: a table is for a terminal; files are CSV, JSON lines or Parquet")
    on_stdout: PrintedFormat = "jsonl" if embed else "table" if sys.stdout.isatty() else "csv"
    row_format = requested or by_suffix or on_stdout
    if embed and row_format in ("csv", "table"):
        raise UsageError(
            f"--embed gives hundreds of numbers per image, too many for {row_format}: jsonl, or --out FILE.npy"
        )
    return row_format


class StdoutRows(NamedTuple):
    """Rows on stdout; a table is as wide as the longest of the labels."""

    row_format: PrintedFormat
    labels: Sequence[str]
    attention: bool = False
    name: str = "stdout"
    can_continue: bool = False

    def find_written(self, items: Iterator[PredictionItem]) -> tuple[WrittenRows, list[PredictionItem]]:  # noqa: ARG002
        """Nothing is written before."""
        return WrittenRows(), []

    @contextlib.contextmanager
    def open_writer(self, written: WrittenRows) -> Iterator[WriteRows]:  # noqa: ARG002, the signature of RowTarget
        """Open a function that prints rows."""
        file = sys.stdout
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="surrogateescape")  # a file's name may be no valid text
        if self.row_format != "table":
            file.write(format_header(self.row_format, attention=self.attention))
        width = min(_MAX_LABEL_WIDTH, max(map(len, self.labels), default=0))

        def write(rows: Sequence[PredictionRow]) -> None:
            for row in rows:
                file.write(
                    _format_table_row(row, width) if self.row_format == "table" else format_row(row, self.row_format)
                )
            file.flush()

        yield write


def _format_table_row(row: PredictionRow, width: int) -> str:
    """A probability, a label and the image for each label: the column of unknown width is the last."""
    if row.error:
        return f"     -  {'':{width}}  {strip_control_characters(row.error)}\n"
    image = strip_control_characters(row.image)
    if not row.labels:
        return f"     -  {NO_LABEL:{width}}  {image}\n"
    return "".join(
        f"{probability:6.4f}  {strip_control_characters(label)[:_MAX_LABEL_WIDTH]:{width}}  {image}\n"
        for label, probability in row.labels
    )
