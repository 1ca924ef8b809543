"""Predict any number of images, in their order, on all processes; a stopped command continues where it was."""

import contextlib
import dataclasses
import itertools
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.config import to_json
from vitrail.errors import StoppedError, UsageError
from vitrail.files import compute_sha256
from vitrail.formatting import pluralize
from vitrail.inference.classifier import NO_LABEL, Classifier, ExportedClassifier
from vitrail.inference.input_batches import InputLoader, LoadedBatch, iterate_input_batches
from vitrail.inference.prediction_rows import PredictionItem, PredictionRow, RowTarget, WrittenRows
from vitrail.model.vit import ViT
from vitrail.runtime import devices, distributed, signals, workers
from vitrail.runtime.distributed import SINGLE_PROCESS, ProcessGroup
from vitrail.runtime.signals import StopRequest
from vitrail.runtime.workers import Notify, ProgressCallback, ignore_note
from vitrail.weights.tensor_files import digest_tensors

AnyClassifier = Classifier | ExportedClassifier


@dataclasses.dataclass(frozen=True, kw_only=True)
class BulkSettings:
    """What is computed for each image, and how."""

    top: int | None = 1  # labels; None for those above the model's thresholds
    embed: bool = False  # whether rows hold features instead of labels
    threads: int = 1  # that read and prepare images
    processes: int = 0  # that do so after the first batches for a GPU
    group: ProcessGroup = SINGLE_PROCESS
    draw_pictures: Callable[[Sequence[PredictionItem], Sequence[Tensor]], None] | None = None
    """Called with the items of each batch and their inputs."""
    notify: Notify = ignore_note


class BulkResult(NamedTuple):
    """How many images a command predicted."""

    written: WrittenRows  # with those of earlier commands
    new_images: int
    labels: Counter[str]  # how many of the new images have each top label, or each predicted one
    target: str = ""  # where the rows are


def check_supported(classifier: Classifier, *, embed: bool, attention: bool) -> None:
    """Refuse what the model does not have, before anything is computed or written."""
    if not embed and not classifier.labels:
        raise UsageError("the model has no head, so it gives features and no labels: --embed")
    if attention and not isinstance(classifier.model, ViT):
        raise UsageError("--attention is for ViTs and hybrids; a BiT ResNet has no attention")


def choose_top(classifier: AnyClassifier, top: int | None) -> int | None:
    """The labels of an image; where nothing was asked for, 1, or None: all above the thresholds that the model has."""
    return 1 if top is None and not classifier.label_thresholds else top


def identify_model(classifier: AnyClassifier) -> dict[str, Any]:
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
            **({"label_thresholds": classifier.label_thresholds} if classifier.label_thresholds else {}),
        },
        "features": classifier.model.config.num_features,
        "--precision": classifier.precision,
    }


def predict_images(
    classifier: AnyClassifier,
    items: Iterator[PredictionItem],
    target: RowTarget,
    settings: BulkSettings,
    *,
    total: int = 0,
    progress: ProgressCallback = workers.ignore_progress,
) -> BulkResult:
    """Write a row for each item. Only rank 0 has items and writes; a signal stops after a complete batch.

    `total` is the number of items for the progress, or 0 where it is unknown.
    """
    group = settings.group
    written, again = distributed.run_on_rank0(lambda: target.find_written(items))
    items = itertools.chain(again, items)
    if written.images:
        pronoun = "it" if written.images == 1 else "them"
        settings.notify(f"{target.name} has {pluralize(written.images, 'image')}; continuing after {pronoun}")
    if settings.top is None and not settings.embed and group.is_rank0:
        settings.notify("an image gets all labels above the model's thresholds; --top N gives the N likeliest instead")
    before, labels = written.images, Counter[str]()
    with contextlib.ExitStack() as stack:
        if settings.embed:
            stack.enter_context(avoid_tf32())
        stop_request = None
        if target.can_continue:
            announce = partial(_announce_stop, notify=settings.notify)
            stop_request = stack.enter_context(signals.catch_stop_signals(announce))
        write = stack.enter_context(target.open_writer(written)) if group.is_rank0 else None
        left = max(0, total - written.images)
        for rows, stop_signal in _iterate_rounds(classifier, items, settings, stop_request, left):
            failed = sum(bool(row.error) for row in rows)
            written = WrittenRows(written.images + len(rows), written.failed + failed)
            if write is not None:
                write(rows)
            labels.update(_iterate_counted_labels(rows, settings))
            progress(written.images, total)
            if stop_signal:
                _raise_stopped(stop_signal, written, target.name, settings.notify)
    return BulkResult(written, written.images - before, labels, target.name)


def avoid_tf32() -> AbstractContextManager[None]:
    """Features are float32 as a probe has them: TF32, to which cuDNN would round convolutions, has three digits."""
    flags: AbstractContextManager[None] = torch.backends.cudnn.flags(
        enabled=True, deterministic=torch.backends.cudnn.deterministic, allow_tf32=False
    )
    return flags


def _iterate_counted_labels(rows: Sequence[PredictionRow], settings: BulkSettings) -> Iterator[str]:
    """The top label of each image, or all that are predicted."""
    for row in rows:
        if settings.top is None and not row.labels and not row.error and not settings.embed:
            yield NO_LABEL
        yield from (label for label, _ in row.labels[: 1 if settings.top else None])


def _announce_stop(stop_signal: signal.Signals, notify: Notify) -> None:
    """Tell at once that a signal was received: a batch may take a while."""
    notify(f"{stop_signal.name}: stopping after this batch")


def _iterate_rounds(
    classifier: AnyClassifier,
    items: Iterator[PredictionItem],
    settings: BulkSettings,
    stop_request: StopRequest | None,
    total: int,
) -> Iterator[tuple[list[PredictionRow], signal.Signals | None]]:
    """Rows of a batch for each process, in the images' order, and the signal that asked one of them to stop.

    The next batches are loaded while one is computed, and a GPU computes one while the rows of the one before are
    written. Rank 0 lists the images and broadcasts them in rounds, so that no process holds all the names.
    """
    group, size, is_gpu = settings.group, classifier.batch_size, classifier.device.type == "cuda"
    gather = distributed.make_all_gather() if group.world_size > 1 else lambda value: [value]

    def iterate_own_batches() -> Iterator[list[PredictionItem]]:
        while batches := distributed.run_on_rank0(lambda: list(itertools.islice(items, size * group.world_size))):
            yield batches[group.rank * size : (group.rank + 1) * size]

    loader = InputLoader(classifier.preprocess, classifier.channels)
    processes = distributed.all_reduce_max(settings.processes, classifier.device) if is_gpu else 0  # equal on all ranks
    with contextlib.closing(
        iterate_input_batches(
            loader, iterate_own_batches(), batch_size=size, threads=settings.threads, processes=processes, total=total
        )
    ) as batches:
        started = (start_rows(classifier, batch, settings) for batch in batches)
        for rows in devices.finish_one_late(started) if is_gpu else (finish() for finish in started):
            gathered = gather((rows, stop_request and stop_request.signal))  # which may arrive during the batch
            stop_signal = next((one for _, one in gathered if one is not None), None)
            yield [row for own_rows, _ in gathered for row in own_rows], stop_signal


def start_rows(
    classifier: AnyClassifier, batch: LoadedBatch, settings: BulkSettings
) -> Callable[[], list[PredictionRow]]:
    """Compute the rows of a batch; call the result to wait for a GPU. Then its pictures are drawn too."""
    items = batch.readable_items
    wait: Callable[[], Iterable[dict[str, Any]]] = _start_results(classifier, batch, settings) if items else list

    def finish() -> list[PredictionRow]:
        results = iter(wait())
        if items and settings.draw_pictures is not None:
            settings.draw_pictures(items, [pixels for part in batch.parts for pixels in part])
        rows = []
        for index, item in enumerate(batch.items):
            result = {"error": batch.errors[index]} if index in batch.errors else next(results)
            picture = None if item.picture is None else "" if "error" in result else str(item.picture)
            rows.append(PredictionRow(item.image.name, attention=picture, **result))
        return rows

    return finish


def _start_results(
    classifier: AnyClassifier, batch: LoadedBatch, settings: BulkSettings
) -> Callable[[], list[dict[str, Any]]]:
    """Compute the features or labels of the images that can be read; call the result to wait for a GPU."""
    if settings.embed:
        assert isinstance(classifier, Classifier), "an exported file is refused"
        wait_for_features = classifier.start_features(batch.parts)
        return lambda: [{"features": features} for features in wait_for_features().numpy()]
    wait_for_labels = classifier.start_prediction(batch.parts, settings.top)
    return lambda: [{"labels": labels} for labels in wait_for_labels()]


def _raise_stopped(stop_signal: signal.Signals, written: WrittenRows, target: str, notify: Notify) -> None:
    """End where the rows are complete: by Ctrl-C as interrupted, by other signals as stopped."""
    images = pluralize(written.images, "image")
    message = f"stopped by {stop_signal.name} after {images}; repeat the command to continue {target}"
    if stop_signal == signal.SIGINT:
        notify(message)
        raise KeyboardInterrupt
    raise StoppedError(message, stop_signal)
