"""`vitrail demo`: what the built-in model can do, measured on this machine without a download."""

from collections.abc import Iterator

from vitrail.api.demo import COUNTEREXAMPLE, DATA, DemoResult, run_demo
from vitrail.cli import output, training_output
from vitrail.cli.arguments.training import DemoArguments
from vitrail.formatting import format_duration, pluralize
from vitrail.report.demo_page import format_score, list_short_labels
from vitrail.training.learning_curve import LearningCurve

_TITLES = {
    DATA: "Faces or background: {images} photos tested, accuracy in %",
    COUNTEREXAMPLE: "Digits of 8 x 8 pixels, where pixels are enough: {images} tested, accuracy in %",
}
_LISTED_LABELS = 5


def run(arguments: DemoArguments) -> None:
    """Run the demo and print its results."""
    result = run_demo(arguments.out, callbacks=training_output.make_callbacks())
    if arguments.output.json:
        output.print_json(result.to_dict())
        return
    for curve in result.curves:
        print(_TITLES[curve.data].format(images=curve.test_images))
        output.print_table(list(_list_rows(curve)), right=range(len(curve.scores) + 1))
        print(f"{_describe_draws(curve)}\n")
    output.print_table(list(_list_facts(result)))


def _list_rows(curve: LearningCurve) -> Iterator[tuple[str, ...]]:
    """A row for each number of training images, with a column for each method."""
    yield ("  images of each class", *curve.scores)
    for scores in zip(*curve.scores.values(), strict=True):
        yield (str(scores[0].shots), *map(format_score, scores))


def _describe_draws(curve: LearningCurve) -> str:
    draws = {method: len(scores[0].correct) for method, scores in curve.scores.items()}
    most = max(draws.values())
    fewer = ", ".join(f"{method} {count}" for method, count in draws.items() if count < most)
    return f"  ± standard deviation over {pluralize(most, 'draw')}{f' ({fewer})' if fewer else ''}"


def _list_facts(result: DemoResult) -> Iterator[tuple[str, str]]:
    finetuned = result.finetuned
    correct = f"{finetuned['correct']} of {finetuned['images']} {finetuned['split']} photos correct"
    yield "fine-tuned", f"{correct} ({finetuned['top1']:.1%}), in {format_duration(finetuned['seconds'])}"
    others = ", ".join(f"{method} {count}" for method, count in finetuned["baselines"].items())
    yield "", f"not fine-tuned, from the same 60 photos: {others}"
    for photo in result.photos:
        labels = list_short_labels(photo.labels)[:_LISTED_LABELS]
        yield (
            photo.name,
            ", ".join(
                f"{label} {probability:.0%}" if probability >= 0.005 else f"{label} <1%"
                for label, probability in labels
            ),
        )
    yield "time", format_duration(result.seconds)
    yield "report", f"{result.folder}/report.html"
