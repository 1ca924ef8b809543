"""`vitrail probe MODEL DATA`: the quality of a model's features on a dataset, without training the model."""

from typing import Any

from vitrail.api.evaluation import probe
from vitrail.cli import output
from vitrail.cli.arguments.evaluation import ProbeArguments
from vitrail.formatting import pluralize
from vitrail.runtime.distributed import silence_other_ranks

_LABEL_COLUMNS = {
    "mean_average_precision": "mAP",
    "micro_f1": "F1",
    "macro_f1": "F1 per class",
    "exact_match": "exact match",
}


def run(arguments: ProbeArguments) -> None:
    """Probe the model and print the scores."""
    with silence_other_ranks():
        result = probe(
            arguments.model,
            arguments.data,
            methods=arguments.methods,
            shots=arguments.shots,
            seeds=arguments.seeds,
            penalty=arguments.penalty,
            k=arguments.k,
            train_on_val=arguments.train_on_val,
            segmentation=arguments.segmentation,
            save=arguments.save,
            overwrite=arguments.overwrite,
            preprocess=arguments.preprocess,
            **vars(arguments.inference),
            progress=output.show_progress,
            notify=output.print_note,
        )
        if arguments.output.json:
            output.print_json(result.metrics)
        else:
            _print_splits(result.metrics)
            (_print_segmentation if arguments.segmentation else _print_scores)(result.metrics)


def _print_splits(facts: dict[str, Any]) -> None:
    chosen = f"settings chosen on {facts['chosen_on']}{', then trained on too' if facts['train_on_val'] else ''}"
    images, classes = pluralize(facts["images"], "image"), pluralize(facts["classes"], "class")
    print(f"{facts['split']}: {images}, {classes}; {chosen}")


def _print_segmentation(facts: dict[str, Any]) -> None:
    """The IoU of each class, with a column for each classifier."""
    scores = facts["scores"]
    rows = [("IoU", *(score["method"] for score in scores))]
    rows += [(name, *(_format_iou(score["iou"][name]) for score in scores)) for name in scores[0]["iou"]]
    rows.append(("mean IoU", *(f"{score['miou']:.1%}" for score in scores)))
    rows.append(("95 %", *("{:.1%} to {:.1%}".format(*score["interval"]) for score in scores)))
    rows.append(("pixels correct", *(f"{score['pixel_accuracy']:.1%}" for score in scores)))
    rows.append(("trained on", *(pluralize(score["learned"], "patch") for score in scores)))
    rows.append(("setting", *map(_format_setting, scores)))
    output.print_table(rows, right=range(1, len(scores) + 1))
    best = max(scores, key=lambda score: float(score["miou"]))
    images = pluralize(facts["images"], f"{facts['split']} image")
    output.print_note(f"best: {best['method']}, mean IoU {best['miou']:.1%} on {images}")


def _format_iou(iou: float | None) -> str:
    return "-" if iou is None else f"{iou:.1%}"


def _format_setting(score: dict[str, Any]) -> str:
    return next(f"{name} {score[name]:.4g}" for name in ("lambda", "k", "L2") if name in score)


def _print_scores(facts: dict[str, Any]) -> None:
    multi_label = "mean_average_precision" in facts["scores"][0]
    columns = _LABEL_COLUMNS if multi_label else {"top1": "accuracy"}
    (measure, *others), titles = columns, list(columns.values())
    rows = [("method", "trained on", "setting", titles[0], "", *titles[1:])]
    for score in facts["scores"]:
        first = _format_method(score), pluralize(score["learned"], "image"), _format_setting(score)
        shares = [f"{score[name]:.1%}" for name in (measure, *others)]
        rows.append((*first, shares[0], _format_uncertainty(score), *shares[1:]))
    output.print_table(rows, right=(1, 3, *range(5, 5 + len(others))))
    best = max(facts["scores"], key=lambda score: float(score[measure]))
    images = pluralize(facts["images"], f"{facts['split']} image")
    advice = "" if facts["saved"] else "; --save FILE writes the model with a linear head"
    result = f"mAP {best[measure]:.1%} on {images}" if multi_label else f"{best[measure]:.1%} of {images} correct"
    output.print_note(f"best: {_format_method(best)}, {result}{advice}")
    if saved := facts["saved"]:
        print(_describe_saved(saved, facts["chosen_on"], multi_label=multi_label))


def _describe_saved(saved: dict[str, Any], chosen_on: str, *, multi_label: bool) -> str:
    """The file, the method of its head and why it was chosen, and what else was fitted."""
    why = ""
    if saved["chosen"] is not None:
        share = f"{saved['chosen']:.1%}"
        why = f", mAP {share} on {chosen_on}" if multi_label else f", {share} of {chosen_on} correct"
    thresholds = ", a threshold for each label" if multi_label else ""
    return f"{saved['path']}: {saved['method']}{why}, temperature {saved['temperature']:.3f}{thresholds}"


def _format_method(score: dict[str, Any]) -> str:
    return f"{score['shots']}-shot" if score["shots"] else str(score["method"])


def _format_uncertainty(score: dict[str, Any]) -> str:
    if score["std"] is None:
        low, high = score["interval"]
        return f"95%: {low:.1%} to {high:.1%}"
    return f"± {score['std']:.1%}, {pluralize(score['seeds'], 'draw')}"
