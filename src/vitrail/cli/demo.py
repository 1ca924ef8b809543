"""`vitrail demo`: train a Vision Transformer on handwritten digits, from random weights, on this machine."""

from vitrail.cli import output, training_output
from vitrail.cli.arguments.training import DemoArguments
from vitrail.training.pretrain import run_demo


def run(arguments: DemoArguments) -> None:
    """Train on the digits, and print the result beside that of the nearest neighbor."""
    result = run_demo(arguments.out, resume=arguments.resume, callbacks=training_output.make_callbacks())
    counts, nearest = result.counts, result.nearest_neighbor
    if arguments.output.json:
        facts = {"images": counts.images, "correct": counts.correct, "nearest_neighbor": nearest}
        output.print_json({"folder": str(result.folder)} | facts)
        return
    output.print_table(
        [
            ("vision transformer", f"{counts.correct} of {counts.images} test digits correct ({counts.top1:.1%})"),
            ("nearest neighbor", f"{nearest} of {counts.images} ({nearest / counts.images:.1%}), by pixels"),
            ("mistakes", "; ".join(result.list_mistakes()) or "none"),
            ("run", str(result.folder)),
            ("report", f"{result.folder}/report.html"),
        ]
    )
