"""Evaluate models on a dataset: choose the images, match the classes, predict, measure and compare.

`vitrail evaluate` prints the result; report/evaluation_files.py writes its tables and figures.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from vitrail.data.dataset import MAX_BAD_FRACTION, Dataset, Split
from vitrail.data.dataset_digest import DataDigest, check_unchanged, digest_dataset
from vitrail.data.holdout import find_holdout_note
from vitrail.errors import ChangedDataError, DataError, UsageError
from vitrail.evaluate import abstention, label_matching
from vitrail.evaluate.evaluator import EvaluatedModel, SplitEvaluation, evaluate_split, make_evaluated_model
from vitrail.evaluate.metrics import EvaluationMetrics, compute_metrics
from vitrail.evaluate.statistics import compare_models
from vitrail.formatting import pluralize
from vitrail.runtime import distributed
from vitrail.runtime.distributed import SINGLE_PROCESS, ProcessGroup
from vitrail.runtime.progress import Notify, ShowProgress, hide_progress, ignore_note
from vitrail.weights.load import find_model_path, is_native_file, load, save

SplitName = Literal["test", "val", "train", "all"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Where and how models are evaluated."""

    device: torch.device
    group: ProcessGroup = SINGLE_PROCESS
    batch: int = 64
    workers: int = 0
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
class ModelEvaluation:
    """A model and its result."""

    evaluated_model: EvaluatedModel
    names: tuple[str, ...]
    """Of the outputs it could predict."""
    evaluation: SplitEvaluation
    metrics: EvaluationMetrics


class MatchedModel(NamedTuple):
    """A model whose outputs are matched to the classes of the data."""

    evaluated_model: EvaluatedModel
    output_indices: Sequence[int]
    """The output of each class of the data."""
    allowed_outputs: Sequence[int] | None
    """The outputs it may predict, where not all."""
    real_labels: list[frozenset[int]] | None
    """All correct labels of each image, where a ReaL file gives them."""


def evaluate_models(
    models: Sequence[EvaluatedModel], dataset: Dataset, images: Split, settings: EvaluationSettings
) -> list[ModelEvaluation]:
    """Evaluate each model on the same images; every model is checked before the first one runs."""
    matched_models = [match_model(model, dataset, images, settings) for model in models]
    return [_evaluate_matched(matched, dataset, images, settings) for matched in matched_models]


# --- the images ------------------------------------------------------------------------------------------------------


def check_evaluable(dataset: Dataset, split_name: SplitName | None) -> None:
    """Refuse data without usable labels or without the split, before a model is loaded."""
    if not dataset.classes:
        raise DataError(f"{dataset.name} has no labels to measure by")
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
        return _join_splits(splits.values())
    name = split_name or ("test" if "test" in splits else "val" if "val" in splits else "train")
    held_out = " (held out of its images)" if name in dataset.generated_splits else ""
    notify(f"measuring on {name}{held_out}: {pluralize(len(splits[name]), 'image')}")
    return splits[name]


def _select_unseen_images(dataset: Dataset, models: Sequence[EvaluatedModel], notify: Notify) -> Split:
    """All images of a dataset without splits, except those that a model was trained on or chosen by."""
    whole = _join_splits(dataset.splits.values())
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
        f" chosen by {'is' if excluded == 1 else 'are'} left out (--split all takes them)"
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


def _join_splits(splits: Iterable[Split]) -> Split:
    whole, *others = splits
    for other in others:
        whole = whole.merge(other)
    return whole


def _format_all_images(images: int) -> str:
    return "the only image" if images == 1 else f"all {images:,} images"


# --- the models ------------------------------------------------------------------------------------------------------


def match_model(model: EvaluatedModel, dataset: Dataset, images: Split, settings: EvaluationSettings) -> MatchedModel:
    """Match the classes of the data to the outputs of the model."""
    try:
        outputs = label_matching.match_outputs(dataset.classes, model.labels, model.num_outputs)
    except DataError as error:
        raise DataError(f"{model.name}: {error}") from error
    subset, real = settings.class_subset, settings.real
    allowed = None if subset is None else label_matching.read_class_subset(subset, model.labels, model.num_outputs)
    if allowed is not None and (missing := set(outputs) - set(allowed)):
        name = dataset.classes[outputs.index(min(missing))]
        raise DataError(f"{subset} leaves out {name!r}, which images of {dataset.name} show")
    real_labels = None if real is None else label_matching.read_real_labels(real, images)
    if real_labels is not None and allowed is not None:
        raise UsageError("--real counts by all of ImageNet's classes: omit --classes")
    return MatchedModel(model, outputs, allowed, real_labels)


def _evaluate_matched(
    matched: MatchedModel, dataset: Dataset, images: Split, settings: EvaluationSettings
) -> ModelEvaluation:
    model, outputs, allowed, real_labels = matched
    evaluation = evaluate_model(model, images, outputs, settings, allowed)
    labels = model.labels or dataset.classes
    names = labels if allowed is None else tuple(labels[index] for index in allowed)
    metrics = compute_metrics(evaluation.counts, evaluation.predictions, real_labels)
    return ModelEvaluation(model, names, evaluation, metrics)


def evaluate_model(
    model: EvaluatedModel,
    images: Split,
    output_indices: Sequence[int],
    settings: EvaluationSettings,
    allowed_outputs: Sequence[int] | None = None,
) -> SplitEvaluation:
    """Evaluate one model on all processes, each with its share of the images."""
    group = settings.group
    with settings.show_progress(f"evaluating {model.name}") as report:
        return evaluate_split(
            model,
            images,
            output_indices,
            device=settings.device,
            batch=settings.batch,
            workers=settings.workers,
            rank=group.rank,
            world=group.world_size,
            flip_tta=settings.tta,
            allowed_outputs=allowed_outputs,
            skip_bad=not settings.strict,
            gather_rows=lambda rows: distributed.all_gather_rows(rows, settings.device),
            report_progress=lambda count: report(count, -(-len(images) // group.world_size)),
        )


# --- the result ------------------------------------------------------------------------------------------------------


def list_unreadable(images: Split, results: Sequence[ModelEvaluation], notify: Notify = ignore_note) -> list[str]:
    """List the images that were left out as unreadable; refuse more than a tenth of all."""
    rows = sorted({row for result in results for row in result.evaluation.unreadable})
    names = [images.get_image_name(row) for row in rows]
    if not names:
        return []
    sentence = f"{pluralize(len(names), 'image')} of {len(images):,} cannot be read, such as {names[0]}"
    if len(names) > MAX_BAD_FRACTION * len(images):
        raise DataError(f"{sentence}; more than {MAX_BAD_FRACTION:.0%} are too many: `vitrail data check` says why")
    pronoun = "it" if len(names) == 1 else "them"
    notify(f"warning: {sentence}; left out, and listed in evaluate.json (--strict refuses {pronoun})")
    return names


def collect_facts(dataset: Dataset, results: Sequence[ModelEvaluation], settings: EvaluationSettings) -> dict[str, Any]:
    """Collect all numbers, for JSON: those of each model, and the comparisons of the first with the others."""
    models = [
        {"model": result.evaluated_model.name, "classes": len(result.names)}
        | result.metrics.to_dict()
        | {"images_per_second": result.evaluation.images_per_second, "temperature": result.evaluated_model.temperature}
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
        "world_size": settings.group.world_size,
        "models": models,
        "comparisons": comparisons,
    }


# --- the threshold of a model that may abstain -----------------------------------------------------------------------


def check_threshold_target(name: str, dataset: Dataset) -> None:
    """Refuse a model file that cannot store a threshold, or data that cannot choose one, before anything runs."""
    _find_threshold_file(name)
    if "val" not in dataset.splits:
        raise DataError(f"{dataset.name} has no val, on which a threshold is chosen")
    if dataset.multi_label:
        raise UsageError(f"--abstain is for images with one label each, and those of {dataset.name} may have several")


def _find_threshold_file(name: str) -> Path:
    """The file that stores the model's threshold: the model itself, or the best weights of a run folder."""
    path = find_model_path(name)
    if path is None or not is_native_file(path):
        raise UsageError(
            f"{name} cannot store a threshold; a file in vitrail's own format can: vitrail convert {name}"
            " OUT.safetensors"
        )
    return path


def fit_threshold(name: str, dataset: Dataset, settings: EvaluationSettings, accuracy: float) -> float:
    """Find the probability above which this share of predictions is correct on val, and store it in the model file."""
    path, trained = _find_threshold_file(name), load(name)
    model = make_evaluated_model(trained, name)
    outputs = label_matching.match_outputs(dataset.classes, model.labels, model.num_outputs)
    without_tta = dataclasses.replace(settings, tta=False)
    predictions = evaluate_model(model, dataset.splits["val"], outputs, without_tta).predictions
    confidence = predictions.probabilities[:, 0]
    threshold = abstention.find_threshold(confidence, predictions.correct, accuracy)
    if settings.group.is_rank0:
        save(dataclasses.replace(trained, threshold=threshold), path, overwrite=True)
        answered = float((confidence >= threshold).double().mean())
        settings.notify(
            f"{path}: predictions below a probability of {threshold:.4f} are unsure; on val {answered:.1%} are sure"
        )
    return threshold
