"""`vitrail evaluate MODEL DATA`: the accuracy of models, its uncertainty, and their mistakes."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail import remote
from vitrail.cli import output, training_output
from vitrail.cli.arguments.evaluation import EvaluateArguments
from vitrail.cli.processes import count_workers, join_processes
from vitrail.data.dataset import Dataset
from vitrail.data.sources import open_dataset
from vitrail.errors import UsageError
from vitrail.evaluate import evaluation
from vitrail.evaluate.evaluator import load_evaluated_model
from vitrail.evaluate.predictions import MIN_TOP5_CLASSES
from vitrail.formatting import pluralize
from vitrail.report.evaluation_files import write_evaluation
from vitrail.train.run_folder import choose_next_folder

_COLUMN_TITLES = {
    "top1": "top-1",
    "top5": "top-5",
    "exact_match": "exact match",
    "micro_f1": "F1",
    "macro_f1": "F1 per class",
    "mean_average_precision": "mAP",
    "real": "ReaL",
    "macro": "per class",
    "loss": "loss",
    "calibration_error": "calibration",
}


def run(arguments: EvaluateArguments) -> None:
    """Evaluate the models, write the files and print the numbers."""
    _check_options(arguments)
    with join_processes(arguments.inference.device) as (group, device):
        dataset = open_dataset(arguments.data)
        if arguments.abstain is not None:
            evaluation.check_threshold_target(arguments.model, dataset)
        settings = evaluation.EvaluationSettings(
            group=group,
            device=device,
            batch=arguments.inference.batch,
            workers=count_workers(arguments.inference.workers),
            tta=arguments.tta,
            class_subset=arguments.classes,
            real=arguments.real,
            strict=arguments.strict,
            show_progress=output.show_progress,
            notify=output.print_note,
        )
        _print_dataset_notes(dataset, arguments.split)
        evaluation.check_evaluable(dataset, arguments.split)
        models = [load_evaluated_model(name) for name in dict.fromkeys((arguments.model, *arguments.against))]
        images = evaluation.select_images(dataset, arguments.split, models, output.print_note)
        results = evaluation.evaluate_models(models, dataset, images, settings)
        unreadable = evaluation.list_unreadable(images, results, output.print_note)
        facts = evaluation.collect_facts(dataset, results, settings) | (
            {"unreadable": unreadable} if unreadable else {}
        )
        folder = choose_next_folder("evaluate") if arguments.out is None else Path(arguments.out)
        if group.is_rank0:
            write_evaluation(dataset, images, results, facts, folder)
        if arguments.abstain is not None:
            facts["threshold"] = evaluation.fit_threshold(arguments.model, dataset, settings, arguments.abstain)
        if group.is_rank0:
            _print_result(facts, folder, as_json=arguments.output.json)


def _check_options(arguments: EvaluateArguments) -> None:
    batch, abstain, out = arguments.inference.batch, arguments.abstain, arguments.out
    if batch < 1:
        raise UsageError(f"--batch is {batch}; it must be at least 1")
    if abstain is not None and not 0 < abstain < 1:
        raise UsageError(f"--abstain is {abstain}; it is the share of correct predictions, such as 0.95")
    if out is None:
        return
    folder = Path(out)
    if remote.is_remote(out) or folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(f"--out {out} must be a local folder that is new or empty")


def _print_dataset_notes(dataset: Dataset, split_name: str | None) -> None:
    """Print the notes, except that images were held out where all of them are measured."""
    if split_name is None and evaluation.is_unsplit(dataset):
        notes = [note for note in dataset.notes if note != dataset.holdout_note]
        dataset = dataclasses.replace(dataset, notes=tuple(notes))
    training_output.print_dataset_notes(dataset)


def _print_result(facts: dict[str, Any], folder: Path, *, as_json: bool) -> None:
    if as_json:
        output.print_json(facts | {"folder": str(folder)})
        return
    models = facts["models"]
    no_top5 = all(model["classes"] < MIN_TOP5_CLASSES for model in models)
    columns = [
        name for name in _COLUMN_TITLES if any(name in model for model in models) and not (no_top5 and name == "top5")
    ]
    rows = [["model", "images", *(_COLUMN_TITLES[name] for name in columns), "images/s"]]
    for model in models:
        numbers = [_format_metric(model, name) for name in columns]
        rows.append([model["model"], f"{model['images']:,}", *numbers, f"{model['images_per_second']:,.0f}"])
    output.print_table(list(zip(*rows, strict=True)) if len(models) == 1 else rows)
    for pair in facts["comparisons"]:
        print(
            f"only {pair['model']} is right on {pluralize(pair['only_first'], 'image')}, only {pair['against']}"
            f" on {pair['only_second']:,}: p = {pair['p_value']:.2g} (McNemar's test)"
        )
    output.print_note(f"{_summarize_best(models)}; tables and figures: {folder}")


def _summarize_best(models: Sequence[dict[str, Any]]) -> str:
    """The result in one line, that of the best of several models."""
    name, what = ("top1", "right") if "top1" in models[0] else ("exact_match", "with exactly their labels")
    best = max(models, key=lambda model: float(model[name]))
    low, high = best[f"{name}_interval"]
    images = pluralize(best["images"], "image")
    right = f"{best[name]:.1%} of {images} {what} ({100 * low:.1f} to {100 * high:.1f})"
    return right if len(models) == 1 else f"best of {len(models)} models: {best['model']}, {right}"


def _format_metric(model: dict[str, Any], name: str) -> str:
    """A number and its interval: a loss as it is, all others as percentages."""
    if name not in model:
        return "-"
    low, high = model.get(f"{name}_interval", (math.nan, math.nan))
    if name == "loss":
        return f"{model[name]:.3f} ({low:.3f} to {high:.3f})"
    return f"{model[name]:.2%} ({low:.1%} to {high:.1%})"
