"""Predict any number of images, in their order, on all processes; a stopped command continues where it was."""

import contextlib
import dataclasses
import itertools
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.errors import DataError, StoppedError, UsageError
from vitrail.formatting import pluralize
from vitrail.inference.classifier import Classifier, ExportedClassifier
from vitrail.inference.prediction_rows import PredictionItem, PredictionRow, RowTarget, WrittenRows
from vitrail.model.vit import ViT
from vitrail.runtime import distributed, signals, workers
from vitrail.runtime.distributed import SINGLE_PROCESS, ProcessGroup
from vitrail.runtime.signals import StopRequest
from vitrail.runtime.workers import Notify, ProgressCallback, ignore_note

AnyClassifier = Classifier | ExportedClassifier


@dataclasses.dataclass(frozen=True, kw_only=True)
class BulkSettings:
    """What is computed for each image, and how."""

    top: int = 1
    embed: bool = False  # whether rows hold features instead of labels
    threads: int = 1  # that read and prepare images
    group: ProcessGroup = SINGLE_PROCESS
    draw_pictures: Callable[[Sequence[PredictionItem], Sequence[Tensor]], None] | None = None
    """Called with the items of each batch and their inputs."""
    notify: Notify = ignore_note


class BulkResult(NamedTuple):
    """How many images a command predicted."""

    written: WrittenRows  # with those of earlier commands
    new_images: int
    labels: Counter[str]  # how many of the new images have each top label


def check_supported(classifier: Classifier, *, embed: bool, attention: bool) -> None:
    """Refuse what the model does not have, before anything is computed or written."""
    if not embed and not classifier.labels:
        raise UsageError("the model has no head, so it gives features and no labels: --embed")
    if attention and not isinstance(classifier.model, ViT):
        raise UsageError("--attention is for ViTs and hybrids; a BiT ResNet has no attention")


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
    before, labels = written.images, Counter[str]()
    with contextlib.ExitStack() as stack:
        if settings.embed:  # float32 as a probe has it: TF32, to which cuDNN would round convolutions, has three digits
            deterministic = torch.backends.cudnn.deterministic
            flags = torch.backends.cudnn.flags(enabled=True, deterministic=deterministic, allow_tf32=False)
            stack.enter_context(flags)
        stop_request = None
        if target.can_continue:
            announce = partial(_announce_stop, notify=settings.notify)
            stop_request = stack.enter_context(signals.catch_stop_signals(announce))
        write = stack.enter_context(target.open_writer(written)) if group.is_rank0 else None
        for rows, stop_signal in _iterate_rounds(classifier, items, settings, stop_request):
            failed = sum(bool(row.error) for row in rows)
            written = WrittenRows(written.images + len(rows), written.failed + failed)
            if write is not None:
                write(rows)
            labels.update(row.labels[0][0] for row in rows if row.labels)
            progress(written.images, total)
            if stop_signal:
                _raise_stopped(stop_signal, written, target.name, settings.notify)
    return BulkResult(written, written.images - before, labels)


def _announce_stop(stop_signal: signal.Signals, notify: Notify) -> None:
    """Tell at once that a signal was received: a batch may take a while."""
    notify(f"{stop_signal.name}: stopping after this batch")


def _iterate_rounds(
    classifier: AnyClassifier,
    items: Iterator[PredictionItem],
    settings: BulkSettings,
    stop_request: StopRequest | None,
) -> Iterator[tuple[list[PredictionRow], signal.Signals | None]]:
    """Rows of a batch for each process, in the images' order, and the signal that asked one of them to stop.

    Threads read the next batch while one is computed. Rank 0 lists the images and broadcasts them in rounds, so that
    no process holds all the names.
    """
    group, size = settings.group, classifier.batch_size
    gather = distributed.make_all_gather() if group.world_size > 1 else lambda value: [value]

    def iterate_own_batches() -> Iterator[list[PredictionItem]]:
        while batches := distributed.run_on_rank0(lambda: list(itertools.islice(items, size * group.world_size))):
            yield batches[group.rank * size : (group.rank + 1) * size]

    def make_input(item: PredictionItem) -> Tensor | DataError:
        try:
            return classifier.make_input(item.image.read(), name=item.image.name)
        except DataError as error:
            return error

    for batch in workers.prefetch_batches(make_input, iterate_own_batches(), settings.threads):
        own_rows = predict_rows(classifier, batch, settings)
        gathered = gather((own_rows, stop_request and stop_request.signal))  # which may arrive during the batch
        stop_signal = next((one for _, one in gathered if one is not None), None)
        yield [row for rows, _ in gathered for row in rows], stop_signal


def predict_rows(
    classifier: AnyClassifier, batch: Sequence[tuple[PredictionItem, Tensor | DataError]], settings: BulkSettings
) -> list[PredictionRow]:
    """Compute the rows of a batch, and draw its pictures."""
    readable = [(item, pixels) for item, pixels in batch if not isinstance(pixels, DataError)]
    inputs = [pixels for _, pixels in readable]
    results: Iterator[dict[str, Any]] = iter(())
    if inputs and settings.embed:
        assert isinstance(classifier, Classifier), "an exported file is refused"
        results = ({"features": features} for features in classifier.extract_features(inputs).numpy())
    elif inputs:
        results = ({"labels": labels} for labels in classifier.predict(inputs, settings.top))
    if inputs and settings.draw_pictures is not None:
        settings.draw_pictures([item for item, _ in readable], inputs)
    rows = []
    for item, pixels in batch:
        result = {"error": str(pixels)} if isinstance(pixels, DataError) else next(results)
        picture = None if item.picture is None else "" if "error" in result else str(item.picture)
        rows.append(PredictionRow(item.image.name, attention=picture, **result))
    return rows


def _raise_stopped(stop_signal: signal.Signals, written: WrittenRows, target: str, notify: Notify) -> None:
    """End where the rows are complete: by Ctrl-C as interrupted, by other signals as stopped."""
    images = pluralize(written.images, "image")
    message = f"stopped by {stop_signal.name} after {images}; repeat the command to continue {target}"
    if stop_signal == signal.SIGINT:
        notify(message)
        raise KeyboardInterrupt
    raise StoppedError(message, stop_signal)
