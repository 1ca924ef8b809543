"""`vitrail probe MODEL DATA`: the quality of a model's features on a dataset, without training the model."""

from typing import Any

from vitrail.api.evaluation import probe
from vitrail.cli import output
from vitrail.cli.arguments.evaluation import ProbeArguments
from vitrail.formatting import pluralize
from vitrail.runtime.distributed import silence_other_ranks


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
    rows = [("method", "trained on", "setting", "accuracy", "")]
    for score in facts["scores"]:
        train_images = pluralize(score["learned"], "image")
        rows.append(
            (
                _format_method(score),
                train_images,
                _format_setting(score),
                f"{score['top1']:.1%}",
                _format_uncertainty(score),
            )
        )
    output.print_table(rows, right=(1, 3))
    best = max(facts["scores"], key=lambda score: float(score["top1"]))
    images = pluralize(facts["images"], f"{facts['split']} image")
    advice = "" if facts["saved"] else "; --save FILE writes the model with a linear head"
    output.print_note(f"best: {_format_method(best)}, {best['top1']:.1%} of {images} correct{advice}")
    if saved := facts["saved"]:
        why = "" if saved["chosen"] is None else f", {saved['chosen']:.1%} of {facts['chosen_on']} correct"
        print(f"{saved['path']}: {saved['method']}{why}, temperature {saved['temperature']:.3f}")


def _format_method(score: dict[str, Any]) -> str:
    return f"{score['shots']}-shot" if score["shots"] else str(score["method"])


def _format_uncertainty(score: dict[str, Any]) -> str:
    if score["std"] is None:
        low, high = score["interval"]
        return f"95%: {low:.1%} to {high:.1%}"
    return f"± {score['std']:.1%}, {pluralize(score['seeds'], 'draw')}"
