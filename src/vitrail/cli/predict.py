"""`vitrail predict MODEL PATHS...`: what images show, one row for each, in their order."""

import contextlib
import io
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vitrail import __version__, remote
from vitrail.cli import output
from vitrail.cli.arguments.evaluation import PredictArguments
from vitrail.cli.processes import join_processes
from vitrail.config import to_json
from vitrail.data.image_paths import can_count_images, describe_skipped, iter_image_refs
from vitrail.errors import DataError, UsageError
from vitrail.export import exported_model
from vitrail.figures.rollout_images import draw_rollouts, iterate_picture_paths
from vitrail.files import compute_sha256
from vitrail.formatting import pluralize, strip_control_characters
from vitrail.inference.bulk_prediction import (
    AnyClassifier,
    BulkResult,
    BulkSettings,
    PredictionItem,
    check_supported,
    predict_images,
)
from vitrail.inference.classifier import Classifier, ExportedClassifier
from vitrail.inference.prediction_rows import (
    FORMAT_BY_SUFFIX,
    FileFormat,
    ImageT,
    PredictionRow,
    RowFile,
    RowTarget,
    WriteRows,
    WrittenRows,
    format_header,
    format_row,
)
from vitrail.runtime import cpu_threads, distributed, workers
from vitrail.runtime.distributed import ProcessGroup
from vitrail.weights.load import load
from vitrail.weights.tensor_digest import digest_tensors

RowFormat = FileFormat | Literal["table"]
_MAX_COUNTED_LABELS = 5  # labels whose images are counted at the end
_MAX_LABEL_WIDTH = 30  # characters of a label in a table


def run(arguments: PredictArguments) -> None:
    """Predict the images and write the rows."""
    _check_options(arguments)
    row_format = _choose_format(arguments)
    with join_processes(arguments.device) as (group, device):
        cpu_threads.keep_freed_memory()
        classifier = _open_classifier(arguments, device, group)
        if isinstance(classifier, Classifier):
            check_supported(classifier, embed=arguments.embed, attention=arguments.attention is not None)
        result = _predict_paths(classifier, arguments, row_format, group)
    if group.is_rank0 and result.written.failed:
        images = pluralize(result.written.images, "image")
        raise DataError(f"{result.written.failed:,} of {images} cannot be read; their rows say why")


def _predict_paths(
    classifier: AnyClassifier, arguments: PredictArguments, row_format: RowFormat, group: ProcessGroup
) -> BulkResult:
    threads = max(1, workers.count_available_cores() if arguments.workers is None else arguments.workers)
    skipped = Counter[str]()
    items = _iterate_items(arguments, skipped) if group.is_rank0 else iter(())
    countable = group.is_rank0 and can_count_images(arguments.paths)
    total = sum(1 for _ in iter_image_refs(arguments.paths)) if countable else 0

    def draw_pictures(batch: Sequence[PredictionItem], inputs: Sequence[Tensor]) -> None:
        assert isinstance(classifier, Classifier), "an exported file is refused"
        pictures = [(item.image, item.picture) for item in batch if item.picture is not None]
        draw_rollouts(classifier, pictures, inputs, threads)

    settings = BulkSettings(
        top=arguments.top,
        embed=arguments.embed,
        threads=threads,
        group=group,
        draw_pictures=None if arguments.attention is None else draw_pictures,
        notify=output.print_note,
    )
    rows_on_screen = arguments.out is None and sys.stdout.isatty()  # which a progress bar would run into
    with contextlib.ExitStack() as stack:
        progress = workers.ignore_progress
        if not rows_on_screen:
            progress = stack.enter_context(output.show_progress("predicting"))
        target = distributed.run_on_rank0(lambda: _make_target(classifier, arguments, row_format))
        result = predict_images(classifier, items, target, settings, total=total, progress=progress)
    if group.is_rank0:
        output.print_note(_summarize(result, arguments.out) + describe_skipped(skipped))
    return result


def _iterate_items(arguments: PredictArguments, skipped: "Counter[str]") -> Iterator[PredictionItem]:
    images = iter_image_refs(arguments.paths, fetch_urls=arguments.fetch_urls, skipped=skipped)
    if arguments.attention is None:
        return (PredictionItem(image) for image in images)
    pictures = iterate_picture_paths(images, Path(arguments.attention))
    return (PredictionItem(image, path) for image, path in pictures)


def _summarize(result: BulkResult, out: str | None) -> str:
    """How many images there were, their most frequent labels, and where the rows are."""
    written, labels = result.written, result.labels
    failed = f", {written.failed:,} of which cannot be read" if written.failed else ""
    parts = [f"{pluralize(written.images, 'image')}{failed}"]
    if result.new_images < written.images:
        parts.append(f"{result.new_images:,} of them in this run")
    if labels:
        counts = [
            f"{strip_control_characters(name)} {count:,}" for name, count in labels.most_common(_MAX_COUNTED_LABELS)
        ]
        others = len(labels) - _MAX_COUNTED_LABELS
        parts.append(", ".join(counts) + (f", and {pluralize(others, 'other label')}" if others > 0 else ""))
    return "; ".join([*parts, *([] if out is None else [out])])


# --- before anything is computed -------------------------------------------------------------------------------------


def _check_options(arguments: PredictArguments) -> None:
    if arguments.top < 1 or arguments.batch < 1:
        raise UsageError(f"--top is {arguments.top} and --batch {arguments.batch}; both must be at least 1")
    if not arguments.paths:
        raise UsageError("name the images: files, folders, globs, shards, or - for a list on standard input")
    for name, path in (("--out", arguments.out), ("--attention", arguments.attention)):
        if path is not None and remote.is_remote(path):
            raise UsageError(f"{name} {path} must be a local path")
    if arguments.json and arguments.row_format not in (None, "jsonl"):
        raise UsageError(f"--json is --format jsonl, and --format {arguments.row_format} was given too: omit one")


def _choose_format(arguments: PredictArguments) -> RowFormat:
    """Choose the format of the rows, if it can hold them."""
    requested = "jsonl" if arguments.json else arguments.row_format
    out, embed = arguments.out, arguments.embed
    by_suffix = None if out is None else FORMAT_BY_SUFFIX.get(Path(out).suffix.lower())
    if out is not None and requested is None and by_suffix is None:
        raise UsageError(f"--out {out} has no known suffix: .csv, .jsonl, or with --embed .npy; or give --format")
    on_stdout: RowFormat = "jsonl" if embed else "table" if sys.stdout.isatty() else "csv"
    row_format: RowFormat = "npy" if by_suffix == "npy" else requested or by_suffix or on_stdout
    if row_format == "npy" and (requested is not None or not embed):
        raise UsageError(f"--out {out} is a matrix of features: it takes --embed and no --format")
    if row_format == "table" and out is not None:
        raise UsageError(f"--out {out}: a table is for a terminal; files are CSV or JSON lines")
    if embed and row_format in ("csv", "table"):
        raise UsageError(
            f"--embed gives hundreds of numbers per image, too many for {row_format}: jsonl, or --out FILE.npy"
        )
    return row_format


def _open_classifier(arguments: PredictArguments, device: torch.device, group: ProcessGroup) -> AnyClassifier:
    if exported_model.is_exported(arguments.model):
        return _open_exported(arguments)
    precision = arguments.precision or ("float32" if arguments.embed else None)
    classifier = Classifier(load(arguments.model), device=device, batch_size=arguments.batch, precision=precision)
    if group.is_rank0 and classifier.precision != "float32":
        recorded = "which the model's file records as faster here with the same predictions"
        why = "as requested" if arguments.precision else recorded
        output.print_note(f"computing in {classifier.precision}, {why}")
    return classifier


def _open_exported(arguments: PredictArguments) -> ExportedClassifier:
    """Open an exported file in its runtime, which gives labels alone."""
    model = arguments.model
    options = {
        "--embed": arguments.embed,
        "--attention": None if arguments.attention is None else str(Path(arguments.attention)),
        "--precision": arguments.precision,
    }
    for option, value in options.items():
        if value:
            raise UsageError(f"{option} is for models, and {model} is an exported file: give the model it was made of")
    exported = exported_model.open_exported_model(Path(model))
    if not exported.labels:
        raise UsageError(f"{model} gives features and no labels, or its labels have no names: give the model itself")
    output.print_note(f"{model} is run on the CPU by {'ONNX Runtime' if model.endswith('.onnx') else 'OpenVINO'}")
    return ExportedClassifier(exported, batch_size=arguments.batch)


# --- where rows go ---------------------------------------------------------------------------------------------------


class StdoutRows(NamedTuple):
    """Rows on stdout; a table is as wide as the longest of the labels."""

    row_format: RowFormat
    labels: Sequence[str]
    attention: bool = False
    name: str = "stdout"
    can_continue: bool = False

    def find_written(self, images: Iterator[ImageT]) -> tuple[WrittenRows, list[ImageT]]:  # noqa: ARG002, RowTarget's
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
    return "".join(
        f"{probability:6.4f}  {strip_control_characters(label)[:_MAX_LABEL_WIDTH]:{width}}  {image}\n"
        for label, probability in row.labels
    )


def _make_target(classifier: AnyClassifier, arguments: PredictArguments, row_format: RowFormat) -> RowTarget:
    attention = arguments.attention is not None
    if arguments.attention is not None and (arguments.out is None or not Path(arguments.out).exists()):
        _check_empty(Path(arguments.attention))
    if arguments.out is None or row_format == "table":
        return StdoutRows(row_format, classifier.labels, attention)
    command: dict[str, Any] = {
        "vitrail": __version__,
        **_identify_model(classifier),
        "format": row_format,
        "--top": arguments.top,
        "--embed": arguments.embed,
        "--batch": classifier.batch_size,
        "--attention": None if arguments.attention is None else str(Path(arguments.attention)),
    }
    return RowFile(
        path=Path(arguments.out),
        row_format=row_format,
        command=command,
        batch=classifier.batch_size,
        ranks=min(arguments.top, len(classifier.labels)),
        features=0 if isinstance(classifier, ExportedClassifier) else classifier.model.config.num_features,
        attention=attention,
    )


def _check_empty(folder: Path) -> None:
    """Refuse a folder in which pictures could replace somebody's images."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--attention {folder} must be a folder that is new or empty")


def _identify_model(classifier: AnyClassifier) -> dict[str, Any]:
    """What distinguishes one model from another in the record of a file of rows."""
    if isinstance(classifier, ExportedClassifier):
        path = classifier.path
        weights = path.with_suffix(".bin" if path.suffix == ".xml" else ".onnx.data")  # OpenVINO's, and large ONNX ones
        return {"model": " ".join(compute_sha256(file) for file in (path, weights) if file.is_file())}
    return {
        "model": {
            "weights": digest_tensors(classifier.model.state_dict()),
            "config": to_json(classifier.model.config),
            "preprocess": to_json(classifier.preprocess),
            "labels": classifier.labels,
            "temperature": classifier.temperature,
            "threshold": classifier.threshold,
            "multi_label": classifier.multi_label,
        },
        "features": classifier.model.config.num_features,
        "--precision": classifier.precision,
    }
