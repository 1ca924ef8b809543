"""Evaluate models on a dataset: choose the images, match the classes, predict, measure and compare.

`vitrail evaluate` prints the result; report/result_files.py writes its tables and figures.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.config import Precision, PreprocessConfig
from vitrail.data.dataset import MAX_BAD_FRACTION, Dataset, Split
from vitrail.data.dataset_digest import DataDigest, check_unchanged, digest_dataset
from vitrail.data.decode import decode
from vitrail.data.holdout import find_holdout_note
from vitrail.data.loader import Batch, iter_eval_batches
from vitrail.errors import ChangedDataError, DataError, UsageError
from vitrail.evaluation import label_matching, label_metrics
from vitrail.evaluation.metrics import EvaluationMetrics, compute_metrics
from vitrail.evaluation.predictions import (
    Counts,
    EvalWrapper,
    Predictions,
    count_predictions,
    predict_batches,
    relabel_batches,
)
from vitrail.evaluation.statistics import compare_models
from vitrail.formatting import pluralize
from vitrail.model.quantized import convert_precision
from vitrail.model.vit import Model
from vitrail.runtime import distributed
from vitrail.runtime.distributed import SINGLE_PROCESS, ProcessGroup
from vitrail.runtime.workers import Notify, ProgressCallback, ShowProgress, hide_progress, ignore_note
from vitrail.weights import timm_preprocess
from vitrail.weights.load import find_model_path, load
from vitrail.weights.trained import Trained, require_preprocess

__all__ = ["ModelEvaluation"]

TIMM_PREFIX = "timm-model:"
SplitName = Literal["test", "val", "train", "all"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Where and how models are evaluated."""

    device: torch.device
    group: ProcessGroup = SINGLE_PROCESS
    batch: int = 64
    workers: int = 0
    precision: Precision = "float32"
    tta: bool = False
    """Whether predictions are averaged over the image and its mirror image."""
    class_subset: Path | None = None
    """A file with the only classes that may be predicted."""
    real: Path | None = None
    """A ReaL file."""
    strict: bool = False
    """Whether an unreadable image is an error."""
    show_progress: ShowProgress = hide_progress
    notify: Notify = ignore_note


@dataclasses.dataclass(frozen=True)
class EvaluatedModel:
    """A network with what its evaluation needs."""

    name: str
    network: nn.Module
    num_outputs: int
    preprocess: PreprocessConfig
    labels: tuple[str, ...] | None
    temperature: float = 1.0
    multi_label: bool = False
    """Whether each class has a probability of its own."""
    label_thresholds: tuple[float, ...] = ()
    """The probability above which each label is predicted; empty for one half."""
    origin: str = ""
    """What its file says about its training."""


@dataclasses.dataclass(frozen=True)
class SplitEvaluation:
    """The predictions of a model for the images of a split, and its speed."""

    counts: Counts
    predictions: Predictions
    images_per_second: float
    """Of reading, preprocessing and computing, on all ranks."""
    unreadable: Sequence[int] = ()
    """The indices of images that could not be read."""


@dataclasses.dataclass(frozen=True)
class ModelEvaluation:
    """A model and its result.

    `Evaluation.results` has one for each model.

        (result,) = vitrail.evaluate("model.safetensors", "photos").results
        print(result.names, result.metrics.top1, result.evaluation.predictions.correct)
    """

    evaluated_model: EvaluatedModel
    names: tuple[str, ...]
    """Of the outputs it could predict."""
    evaluation: SplitEvaluation
    metrics: EvaluationMetrics
    label_thresholds: tuple[float, ...] = ()
    """Of the outputs of multi-label images: the probability above which each is predicted."""


def evaluate_models(
    models: Sequence[EvaluatedModel], dataset: Dataset, images: Split, settings: EvaluationSettings
) -> list[ModelEvaluation]:
    """Evaluate each model on the same images; every model is checked before the first one runs."""
    matches = [_match_outputs(model, dataset, settings) for model in models]
    real_labels = None if settings.real is None else label_matching.read_real_labels(settings.real, images)
    if real_labels is not None and settings.class_subset is not None:
        raise UsageError("--real counts by all of ImageNet's classes: omit --classes")
    results = []
    for model, (outputs, allowed) in zip(models, matches, strict=True):
        evaluation = evaluate_model(model, images, outputs, settings, allowed)
        labels = model.labels or dataset.classes
        names = labels if allowed is None else tuple(labels[index] for index in allowed)
        metrics = compute_metrics(evaluation.counts, evaluation.predictions, real_labels)
        thresholds = select_thresholds(model, allowed) or (0.5,) * len(names) if images.multi_label else ()
        results.append(ModelEvaluation(model, names, evaluation, metrics, thresholds))
    return results


# --- the images ------------------------------------------------------------------------------------------------------


def check_evaluable(dataset: Dataset, split_name: SplitName | None) -> None:
    """Refuse data without usable labels or without the split, before a model is loaded."""
    if not dataset.classes:
        raise DataError(
            f"{dataset.name} has no labels to measure by: sort the images into one folder per class, or list them with"
            " labels"
        )
    if dataset.layout_warning:
        raise DataError(dataset.layout_warning)
    if split_name not in (None, "all", *dataset.splits):
        raise DataError(f"{dataset.name} has no {split_name}; it has {', '.join(dataset.splits)}")


def is_unsplit(dataset: Dataset) -> bool:
    """Whether the dataset itself has neither val nor test."""
    return {"val", "test"} <= set(dataset.generated_splits)


def select_images(
    dataset: Dataset,
    split_name: SplitName | None,
    models: Sequence[EvaluatedModel],
    notify: Notify = ignore_note,
) -> Split:
    """Select the images to evaluate on: test by default, or val where there is no test."""
    splits = dataset.splits
    if split_name is None and is_unsplit(dataset):
        return _select_unseen_images(dataset, models, notify)
    if split_name == "all":
        return functools.reduce(Split.merge, splits.values())
    name = split_name or ("test" if "test" in splits else "val" if "val" in splits else "train")
    held_out = " (held out of its images)" if name in dataset.generated_splits else ""
    notify(f"measuring on {name}{held_out}: {pluralize(len(splits[name]), 'image')}")
    return splits[name]


def _select_unseen_images(dataset: Dataset, models: Sequence[EvaluatedModel], notify: Notify) -> Split:
    """All images of a dataset without splits, except those that a model was trained on or chosen by."""
    whole = functools.reduce(Split.merge, dataset.splits.values())
    trained_here = [model for model in models if _is_training_dataset(model, dataset)]
    if not trained_here:
        notify(f"measuring on {_format_all_images(len(whole))}: {dataset.name} has no splits")
        return whole
    name = trained_here[0].name
    if "test" not in dataset.splits:
        raise DataError(
            f"{name} was trained on {_format_all_images(len(whole))} of {dataset.name}: give others, or --split all"
        )
    for model in trained_here:
        _check_same_holdout(model, dataset)
    unseen = dataset.splits["test"]
    excluded = len(whole) - len(unseen)
    notify(
        f"measuring on {pluralize(len(unseen), 'image')}: {pluralize(excluded, 'image')} that {name} was trained on or"
        f" selected with {'is' if excluded == 1 else 'are'} left out (--split all includes them)"
    )
    return unseen


def _check_same_holdout(model: EvaluatedModel, dataset: Dataset) -> None:
    """Refuse a run that held out another share than is held out here: a study of a large dataset trains on more."""
    path = find_model_path(model.name)
    try:
        run_notes = [] if path is None else json.loads((path.parent.parent / "config.json").read_bytes())["notes"]
    except (OSError, ValueError, LookupError, TypeError):  # a model file outside a run folder
        return
    here, there = (note.partition(" (")[0] for note in (dataset.holdout_note, find_holdout_note(run_notes)))
    if there and here != there:
        raise DataError(
            f"{model.name} was trained on other splits of {dataset.name} ({there}), so some of its images would be"
            " measured as unseen: give others, or --split all"
        )


def _is_training_dataset(model: EvaluatedModel, dataset: Dataset) -> bool:
    """Whether the model's file names the data, or its run folder has their digest, as of a duplicate elsewhere."""
    if f" on {dataset.name}, step " in model.origin or f" probe of {dataset.name}," in model.origin:
        return True
    path = find_model_path(model.name)
    checkpoints = [] if path is None else sorted(path.parent.parent.glob("checkpoints/*/state.json"))
    try:
        recorded = json.loads(checkpoints[-1].read_text())["data"]
        check_unchanged(DataDigest(**recorded), digest_dataset(dataset), dataset.name)
    except (OSError, LookupError, TypeError, ValueError, ChangedDataError):
        return False
    return True


def _format_all_images(images: int) -> str:
    return "the only image" if images == 1 else f"all {images:,} images"


# --- the models ------------------------------------------------------------------------------------------------------


def load_evaluated_model(name: str) -> EvaluatedModel:
    """Load a MODEL; timm-model:NAME is timm's own network, which need not be one that vitrail has."""
    return _load_timm_network(name) if name.startswith(TIMM_PREFIX) else make_evaluated_model(load(name), name)


def make_evaluated_model(trained: Trained, name: str) -> EvaluatedModel:
    """Prepare a model for evaluation; it must have a head and preprocessing."""
    outputs = trained.model.config.classes
    if not outputs:
        raise UsageError(f"{name} has no head, so it makes no predictions: `vitrail probe` evaluates its features")
    return EvaluatedModel(
        name,
        trained.model,
        outputs,
        require_preprocess(trained, name=name),
        trained.labels,
        trained.temperature,
        trained.multi_label,
        trained.label_thresholds,
        "; ".join((trained.origin.name, *trained.origin.changes)),
    )


def _load_timm_network(name: str) -> EvaluatedModel:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # a torchvision that does not fit torch raises the latter
        raise UsageError(
            f"{name} is timm's own network, and timm cannot be imported: {error}. pip install timm"
        ) from None
    try:
        network = timm.create_model(name.removeprefix(TIMM_PREFIX), pretrained=True).eval()
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        raise UsageError(f"timm cannot create {name}: {' '.join(str(error).split())[:200]}") from None
    config: dict[str, Any] = dict(network.pretrained_cfg)
    preprocess, unsupported = timm_preprocess.parse_preprocess_config(config)
    if preprocess is None:
        raise UsageError(f"timm preprocesses images of {name} in a way that vitrail lacks: {'; '.join(unsupported)}")
    outputs = int(network.num_classes)
    return EvaluatedModel(name, network, outputs, preprocess, timm_preprocess.parse_labels({}, config, outputs))


def _match_outputs(
    model: EvaluatedModel, dataset: Dataset, settings: EvaluationSettings
) -> tuple[Sequence[int], Sequence[int] | None]:
    """The output of each class of the data, and the outputs that the model may predict, where not all."""
    try:
        outputs = label_matching.match_outputs(dataset.classes, model.labels, model.num_outputs)
    except DataError as error:
        raise DataError(f"{model.name}: {error}") from error
    subset = settings.class_subset
    allowed = None if subset is None else label_matching.read_class_subset(subset, model.labels, model.num_outputs)
    if allowed is not None and (missing := set(outputs) - set(allowed)):
        name = dataset.classes[outputs.index(min(missing))]
        raise DataError(f"{subset} leaves out {name!r}, which images of {dataset.name} show")
    return outputs, allowed


def evaluate_model(
    model: EvaluatedModel,
    images: Split,
    outputs: Sequence[int],
    settings: EvaluationSettings,
    allowed_outputs: Sequence[int] | None = None,
) -> SplitEvaluation:
    """Predict every image, each process its share of them; class k of the data is the model's output `outputs[k]`.

    The model may predict `allowed_outputs` only. Unless `settings.strict`, images that cannot be read are skipped.
    """
    device, rank, world_size = settings.device, settings.group.rank, settings.group.world_size
    network = _convert_network(model, settings.precision, device)
    wrapper = EvalWrapper(network, flip_tta=settings.tta, outputs=allowed_outputs)
    num_outputs = model.num_outputs if allowed_outputs is None else len(allowed_outputs)
    columns = list(outputs) if allowed_outputs is None else [list(allowed_outputs).index(output) for output in outputs]
    batches = iter_eval_batches(
        images,
        model.preprocess,
        batch_size=settings.batch,
        num_classes=len(columns),
        rank=rank,
        world_size=world_size,
        workers=settings.workers,
        skip_bad=not settings.strict,
    )
    share = slice(len(images) * rank // world_size, len(images) * (rank + 1) // world_size)
    is_read = torch.zeros(len(images), dtype=torch.bool)
    with settings.show_progress(f"evaluating {model.name}") as progress:
        start = time.perf_counter()
        tracked_batches = _track_progress(batches, progress, is_read, -(-len(images) // world_size))
        predictions = predict_batches(
            wrapper,
            relabel_batches(tracked_batches, columns, num_outputs),
            model.preprocess,
            temperature=model.temperature,
            num_classes=num_outputs,
            multi_label=model.multi_label,
            label_thresholds=select_thresholds(model, allowed_outputs),
        )
        model.network.cpu()  # the next model may need the memory
        predictions = _gather_predictions(predictions, device, num_outputs if images.multi_label else 0)
        seconds = time.perf_counter() - start
        unreadable = (~distributed.all_gather_rows(is_read[share], device)).nonzero()[:, 0].tolist()
    if len(unreadable) == len(images):
        raise DataError(
            f"none of {pluralize(len(images), 'image')} can be read, such as {_explain_unreadable(images, 0)}"
        )
    counts = count_predictions(predictions, num_outputs)
    return SplitEvaluation(counts, predictions, len(predictions.images) / seconds, unreadable)


def select_thresholds(model: EvaluatedModel, outputs: Sequence[int] | None) -> tuple[float, ...]:
    """The label thresholds of these outputs of a model, or of all; empty where it has none."""
    thresholds = model.label_thresholds
    return tuple(thresholds[output] for output in outputs) if thresholds and outputs is not None else thresholds


def _explain_unreadable(images: Split, row: int) -> str:
    """The name of an image that cannot be read, and the reason."""
    name = images.get_image_name(row)
    try:
        decode(images.read_image(row), name=name)
    except DataError as error:
        return str(error) if str(error).startswith(name) else f"{name}: {error}"
    return name


def _convert_network(model: EvaluatedModel, precision: Precision, device: torch.device) -> nn.Module:
    """The network on the device, in another precision if one is asked for."""
    network = model.network.to(device)
    if precision == "float32":
        return network
    if not isinstance(network, Model):
        raise UsageError(f"{model.name} is timm's own network, which is evaluated in float32 only")
    return convert_precision(network, precision, model.preprocess)


def _gather_predictions(predictions: Predictions, device: torch.device, label_columns: int) -> Predictions:
    """The predictions of all ranks; a rank without images gets label columns as wide as the others'."""
    if label_columns and not len(predictions.images):
        no_rows = torch.zeros(0, label_columns)
        predictions = predictions._replace(
            label_probabilities=no_rows, label_targets=no_rows.bool(), predicted_labels=no_rows.bool()
        )
    return Predictions(
        *(distributed.all_gather_rows(column, device) for column in predictions if column.shape[1:] != (0,))
    )


def _track_progress(
    batches: Iterable[Batch], progress: ProgressCallback, is_read: Tensor, total: int
) -> Iterator[Batch]:
    """The batches; reports how many of `total` images have passed, and marks them in `is_read`."""
    images = 0
    for batch in batches:
        yield batch
        is_read[batch.positions] = True
        images += len(batch.positions)
        progress(images, total)


# --- the result ------------------------------------------------------------------------------------------------------


def list_unreadable(images: Split, results: Sequence[ModelEvaluation], notify: Notify = ignore_note) -> list[str]:
    """List the images that were left out as unreadable; refuse more than a tenth of all."""
    rows = sorted({row for result in results for row in result.evaluation.unreadable})
    names = [images.get_image_name(row) for row in rows]
    if not names:
        return []
    sentence = f"{pluralize(len(names), 'image')} of {len(images):,} cannot be read, such as"
    if len(names) > MAX_BAD_FRACTION * len(images):
        rule = f"more than {MAX_BAD_FRACTION:.0%} are too many"
        raise DataError(f"{sentence} {_explain_unreadable(images, rows[0])}; {rule}")
    pronoun = "it" if len(names) == 1 else "them"
    notify(f"warning: {sentence} {names[0]}; left out, and listed in evaluate.json (--strict refuses {pronoun})")
    return names


def collect_facts(dataset: Dataset, results: Sequence[ModelEvaluation], settings: EvaluationSettings) -> dict[str, Any]:
    """Collect all numbers, for JSON: those of each model, and the comparisons of the first with the others."""
    models = [
        {"model": result.evaluated_model.name, "classes": len(result.names)}
        | result.metrics.to_dict()
        | {"images_per_second": result.evaluation.images_per_second, "temperature": result.evaluated_model.temperature}
        | label_metrics.collect_class_facts(result.evaluation.predictions, result.names, result.label_thresholds)
        for result in results
    ]
    first, *others = results
    comparisons = [
        {"model": first.evaluated_model.name, "against": other.evaluated_model.name}
        | compare_models(first.evaluation.predictions.correct, other.evaluation.predictions.correct)._asdict()
        for other in others
    ]
    return {
        "data": dataset.name,
        "tta": settings.tta,
        "device": str(settings.device),
        "precision": settings.precision,
        "world_size": settings.group.world_size,
        "models": models,
        "comparisons": comparisons,
    }
