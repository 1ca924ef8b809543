"""Evaluation of a run: of masked patches while it trains, and of its best weights at the end.

B images of a batch   N patches of an image   M masked ones   p pixels along the side of a predicted patch
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from vitrail.config import PreprocessConfig
from vitrail.data.loader import Batch
from vitrail.data.transforms import normalize
from vitrail.errors import DataError
from vitrail.evaluation import calibration, precision_benchmark, prediction_tables
from vitrail.evaluation.label_thresholds import choose_label_thresholds
from vitrail.evaluation.predictions import count_predictions, iterate_logits, predict_batches
from vitrail.formatting import pluralize
from vitrail.model.masked import MaskedViT, compute_masked_losses
from vitrail.model.vit import Model
from vitrail.training.run_results import MaskedCounts, MaskedExamples, RunLog, RunResult
from vitrail.training.training_run import TrainingRun
from vitrail.weights import native
from vitrail.weights.load import load, save
from vitrail.weights.trained import Trained, logits_to_probabilities

MAX_EXAMPLES = 6  # images in the reconstruction image


@torch.inference_mode()
def evaluate_masked(
    model: MaskedViT,
    batches: Iterable[Batch],
    preprocess: PreprocessConfig,
    *,
    reduce_ranks: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> MaskedCounts:
    """The sums over batches of images with their masks; `reduce_ranks` adds those of other processes.

    The first few images are returned as examples. The model is left in eval mode.
    """
    device = next(model.parameters()).device
    model.eval()
    sums = torch.zeros(6, dtype=torch.float64, device=device)
    examples = None
    for batch in batches:
        images = normalize(batch.pixels.to(device, non_blocking=True), preprocess)
        masking = batch.targets.to(device, non_blocking=True)
        predictions, targets = model(images, masking).float(), model.compute_targets(images, masking)
        counts = (
            len(predictions),
            predictions.shape[0] * predictions.shape[1],
            compute_masked_losses(predictions, targets).sum(),
            *_count_correct_colors(predictions, targets),
        )
        sums += torch.stack([torch.as_tensor(count, dtype=torch.float64, device=device) for count in counts])
        if examples is None:
            examples = _select_examples(model, batch.pixels, images, masking, predictions, targets)
    count, patches, loss, colors, correct, correct_top5 = reduce_ranks(sums).tolist()
    if not count:
        raise DataError("there is no image to evaluate on")
    return MaskedCounts(int(count), int(patches), loss, int(colors), int(correct), int(correct_top5), examples)


def _count_correct_colors(predictions: Tensor, targets: Tensor) -> tuple[int | Tensor, int | Tensor, int | Tensor]:
    """The colors to predict, those predicted correctly, and those among the five most likely."""
    if targets.is_floating_point():
        return 0, 0, 0
    logits = predictions.unflatten(-1, (targets.shape[-1], -1))  # (B, M, 1 or 16, L)
    hits = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == targets[..., None]
    return targets.numel(), hits[..., 0].sum(), hits.sum()


def _select_examples(
    model: MaskedViT, pixels: Tensor, images: Tensor, masking: Tensor, predictions: Tensor, targets: Tensor
) -> MaskedExamples:
    """The first images of a batch, and the partner of the last of them."""
    count = min(MAX_EXAMPLES, len(predictions))
    partner = len(pixels) - len(predictions)
    rendered = [
        model.render_patches(patches[:count], images, masking[:count]).cpu() for patches in (predictions, targets)
    ]
    return MaskedExamples(pixels[: count + partner].cpu(), masking[:count].cpu(), *rendered)


_MAX_CALIBRATION_LOGITS = 2**27  # logits that a temperature is fitted to, at most

IterateBatches = Callable[[str], Iterator[Batch]]
"""All images of a split, in batches."""


def evaluate_best_weights(
    run: TrainingRun,
    folder: Path,
    log: RunLog,
    iterate_batches: IterateBatches,
    get_precision_seconds: Callable[[], float | None],
    *,
    seconds: float,
    epochs: float,
) -> RunResult:
    """Calibrate the best weights on val, measure them on test, and write both to the folder.

    `seconds` and `epochs` are those of training.
    `get_precision_seconds` says for how long lower precisions are compared on this machine's CPU; None for not at all.
    """
    path = folder / "weights" / "best.safetensors"
    split = run.eval_split or ("test" if "test" in run.dataset.splits else "val")
    best = load(path)
    model = best.model.to(run.device)
    temperature, label_thresholds = _calibrate(run, model, iterate_batches)
    best = dataclasses.replace(best, temperature=temperature, label_thresholds=label_thresholds)
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
        label_thresholds=label_thresholds,
    )
    counts = count_predictions(predictions, len(run.dataset.classes))
    error = calibration.expected_calibration_error(*predictions.calibration_pairs)
    result = RunResult(split, counts, predictions, temperature, error, seconds, epochs, label_thresholds)
    _write_result(run, folder, log, result)
    return result


def _calibrate(run: TrainingRun, model: Model, iterate_batches: IterateBatches) -> tuple[float, tuple[float, ...]]:
    """The temperature and, for multi-label images, the threshold of each class that suit val.

    Where val was trained on it cannot choose them: the temperature is 1 and each threshold one half.
    """
    multi_label = run.dataset.multi_label
    if run.train_on_val:
        return 1.0, (0.5,) * len(run.dataset.classes) if multi_label else ()
    logits, targets = _collect_val_logits(run, model, iterate_batches)
    temperature = calibration.fit_temperature(logits, targets)
    if not multi_label:
        return temperature, ()
    probabilities = logits_to_probabilities(logits, temperature, multi_label=True)
    return temperature, choose_label_thresholds(probabilities.numpy(), (targets > 0).numpy())


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
    """The weights with what lower precisions change on this machine's CPU and GPU, where that is worth measuring."""
    if run.train_on_val or not precision_benchmark.is_worth_measuring(best):  # it is too sure of images it has learned
        return best
    seconds = get_seconds()
    if seconds is None:
        log.write_line("no time was left to compare precisions: vitrail convert --measure does it")
        return best

    def iterate_inputs() -> Iterator[Tensor]:
        return (batch.pixels for batch in iterate_batches("val"))

    data = f"{Path(run.dataset.name).name} (val)"
    measured = precision_benchmark.measure_on_devices(best, run.device, iterate_inputs, seconds=seconds, data=data)
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
        correct=counts.correct,
        top1=counts.top1,
        top5=counts.top5,
        loss=counts.mean_loss,
        temperature=result.temperature,
        calibration_error=result.calibration_error,
        seconds=result.seconds,
    )
    log.write_line(
        f"{result.split}: {counts.top1:.2%} of {pluralize(counts.images, 'image')} correct;"
        f" temperature {result.temperature:.3f}"
    )
    prediction_tables.write_predictions(
        run.dataset.splits[result.split], classes, classes, result.predictions, folder / "predictions.csv"
    )
    if counts.has_confusion:
        prediction_tables.write_class_table(counts, classes, folder / "per_class.csv", run.class_counts)
