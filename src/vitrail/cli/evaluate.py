"""`vitrail evaluate MODEL DATA`: the accuracy of models, its uncertainty, and their mistakes."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.api.evaluation import evaluate
from vitrail.cli import output
from vitrail.cli.arguments.evaluation import EvaluateArguments
from vitrail.evaluation.predictions import MIN_TOP5_CLASSES
from vitrail.formatting import pluralize
from vitrail.runtime.distributed import silence_other_ranks
from vitrail.training.run_folder import choose_next_folder

_COLUMN_TITLES = {
    "top1": "top-1",
    "top5": "top-5",
    "exact_match": "exact match",
    "mean_average_precision": "mAP",
    "micro_f1": "F1",
    "macro_f1": "F1 per class",
    "precision": "precision",
    "recall": "recall",
    "real": "ReaL",
    "macro": "per class",
    "loss": "loss",
    "calibration_error": "calibration error",
}


def run(arguments: EvaluateArguments) -> None:
    """Evaluate the models, write the files and print the numbers."""
    with silence_other_ranks():
        evaluation = evaluate(
            arguments.model,
            arguments.data,
            against=arguments.against,
            split=arguments.split,
            real=arguments.real,
            classes=arguments.classes,
            tta=arguments.tta,
            abstain=arguments.abstain,
            strict=arguments.strict,
            precision=arguments.precision,
            out=choose_next_folder("evaluate") if arguments.out is None else arguments.out,
            **vars(arguments.inference),
            progress=output.show_progress,
            notify=output.print_note,
        )
        assert evaluation.folder is not None, "it was given"
        _print_result(evaluation.metrics, evaluation.folder, as_json=arguments.output.json)


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
            f"only {pair['model']} is correct on {pluralize(pair['only_first'], 'image')}, only {pair['against']}"
            f" on {pair['only_second']:,}: p = {pair['p_value']:.2g} (McNemar's test)"
        )
    if empty := models[0].get("classes_without_images"):
        output.print_note(f"{pluralize(empty, 'class')} without an image: averages over classes omit them")
    output.print_note(f"{_summarize_best(models)}; tables and figures: {folder}")


def _summarize_best(models: Sequence[dict[str, Any]]) -> str:
    """The result in one line, that of the best of several models."""
    multi_label = "mean_average_precision" in models[0]
    name = "mean_average_precision" if multi_label else "top1"
    best = max(models, key=lambda model: float(model[name]))
    low, high = best[f"{name}_interval"]
    images, interval = pluralize(best["images"], "image"), f"({100 * low:.1f} to {100 * high:.1f})"
    right = f"{best[name]:.1%} of {images} correct {interval}"
    if multi_label:
        right = f"mAP {best[name]:.1%} {interval} of {images}, F1 {best['micro_f1']:.1%}"
        right += f", all labels right in {best['exact_match']:.1%}"
    return right if len(models) == 1 else f"best of {len(models)} models: {best['model']}, {right}"


def _format_metric(model: dict[str, Any], name: str) -> str:
    """A number and its interval: a loss as it is, all others as percentages."""
    if name not in model:
        return "-"
    low, high = model.get(f"{name}_interval", (math.nan, math.nan))
    if name == "loss":
        return f"{model[name]:.3f} ({low:.3f} to {high:.3f})"
    return f"{model[name]:.2%} ({low:.1%} to {high:.1%})"
