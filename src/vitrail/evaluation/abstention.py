"""The probability below which a model abstains: chosen on val, stored in the model's file."""

import dataclasses
from pathlib import Path

from vitrail.data.dataset import Dataset
from vitrail.errors import DataError, UsageError
from vitrail.evaluation import calibration, label_matching
from vitrail.evaluation.dataset_evaluation import EvaluationSettings, evaluate_model, make_evaluated_model
from vitrail.weights.load import find_model_path, is_native_file, load, save


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
    threshold = calibration.find_threshold(confidence, predictions.correct, accuracy)
    if settings.group.is_rank0:
        save(dataclasses.replace(trained, threshold=threshold), path, overwrite=True)
        answered = float((confidence >= threshold).double().mean())
        settings.notify(
            f"{path}: predictions below a probability of {threshold:.4f} are unsure; on val {answered:.1%} are sure"
        )
    return threshold
