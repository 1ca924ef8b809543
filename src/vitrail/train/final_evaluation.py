"""The end of a supervised run: its best weights are calibrated on val, measured on test, and written again."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.loader import Batch
from vitrail.evaluate import calibration, precision_benchmark, prediction_tables
from vitrail.evaluate.predictions import count_predictions, iterate_logits, predict_batches
from vitrail.formatting import pluralize
from vitrail.model.build import Model
from vitrail.train.run_log import RunLog
from vitrail.train.run_results import RunResult
from vitrail.train.training_run import TrainingRun
from vitrail.weights import native
from vitrail.weights.load import load, save
from vitrail.weights.trained import Trained

_MAX_CALIBRATION_LOGITS = 2**27  # logits that a temperature is fitted to, at most

IterateBatches = Callable[[str], Iterator[Batch]]
"""All images of a split, in batches."""


class TrainingTotals(NamedTuple):
    """What the training of a run took."""

    seconds: float
    epochs: float


def evaluate_best_weights(
    run: TrainingRun,
    folder: Path,
    log: RunLog,
    iterate_batches: IterateBatches,
    totals: TrainingTotals,
    get_precision_seconds: Callable[[], float | None],
) -> RunResult:
    """Calibrate the best weights on val, measure them on test, and write both to the folder.

    `get_precision_seconds` says for how long lower precisions are compared on this machine's CPU; None for not at all.
    """
    path = folder / "weights" / "best.safetensors"
    split = run.eval_split or ("test" if "test" in run.dataset.splits else "val")
    best = load(path)
    model = best.model.to(run.device)
    temperature = 1.0
    if not run.train_on_val:
        temperature = calibration.fit_temperature(*_collect_val_logits(run, model, iterate_batches))
    best = dataclasses.replace(best, temperature=temperature)
    best = _measure_precisions(run, best, log, iterate_batches, get_precision_seconds)
    save(dataclasses.replace(best, precision_measurements=()), path, overwrite=True)
    native.write_measurements(path, best.precision_measurements)
    predictions = predict_batches(
        model,
        iterate_batches(split),
        run.preprocess,
        temperature=temperature,
        num_classes=len(run.dataset.classes),
        multi_label=run.dataset.multi_label,
    )
    counts = count_predictions(predictions, len(run.dataset.classes))
    error = calibration.expected_calibration_error(*predictions.calibration_pairs)
    result = RunResult(split, counts, predictions, temperature, error, totals.seconds, totals.epochs)
    _write_result(run, folder, log, result)
    return result


def _collect_val_logits(run: TrainingRun, model: Model, iterate_batches: IterateBatches) -> tuple[Tensor, Tensor]:
    """Logits and targets of as many validation images as a temperature needs, on the CPU."""
    limit = max(1, _MAX_CALIBRATION_LOGITS // len(run.dataset.classes))
    logits, targets, count = [], [], 0
    for batch_logits, batch_targets, _ in iterate_logits(model, iterate_batches("val"), run.preprocess):
        logits.append(batch_logits.cpu())
        targets.append(batch_targets.cpu())
        count += len(batch_logits)
        if count >= limit:
            break
    return torch.cat(logits), torch.cat(targets)


def _measure_precisions(
    run: TrainingRun,
    best: Trained,
    log: RunLog,
    iterate_batches: IterateBatches,
    get_seconds: Callable[[], float | None],
) -> Trained:
    """The weights with what lower precisions change on this machine's CPU, where that is worth measuring."""
    if run.train_on_val or not precision_benchmark.is_worth_measuring(best):  # it is too sure of images it has learned
        return best
    seconds = get_seconds()
    if seconds is None:
        log.write_line("no time was left to compare precisions: vitrail convert --measure does it")
        return best
    inputs = (batch.pixels for batch in iterate_batches("val"))
    cpu_model = dataclasses.replace(best, model=copy.deepcopy(best.model).cpu())  # the GPU's is still to be measured
    data = f"{Path(run.dataset.name).name} (val)"
    measured = precision_benchmark.measure_precisions(cpu_model, inputs, seconds=seconds, data=data)
    for measurement in measured.precision_measurements:
        log.write_line(measurement.describe())
    return measured


def _write_result(run: TrainingRun, folder: Path, log: RunLog, result: RunResult) -> None:
    """Write the event that ends the run, and the tables of predictions and classes."""
    counts, classes = result.counts, run.dataset.classes
    log.log_event(
        "end",
        split=result.split,
        images=counts.images,
        right=counts.correct,
        top1=counts.top1,
        top5=counts.top5,
        loss=counts.mean_loss,
        temperature=result.temperature,
        calibration_error=result.calibration_error,
        seconds=result.seconds,
    )
    log.write_line(
        f"{result.split}: {counts.top1:.2%} of {pluralize(counts.images, 'image')} right;"
        f" temperature {result.temperature:.3f}"
    )
    prediction_tables.write_predictions(
        run.dataset.splits[result.split], classes, classes, result.predictions, folder / "predictions.csv"
    )
    if counts.has_confusion:
        prediction_tables.write_class_table(counts, classes, folder / "per_class.csv", run.class_counts)
