"""`vitrail convert SRC DST --to FORMAT`: read and write formats, and adapt weights to another task."""

from typing import Any

from vitrail.api.conversion import convert
from vitrail.cli import output
from vitrail.cli.arguments.models import ConvertArguments
from vitrail.formatting import pluralize
from vitrail.weights.precision_measurements import PrecisionMeasurement


def run(arguments: ConvertArguments) -> None:
    """Convert the model and list the changes."""
    options = {name: value for name, value in vars(arguments).items() if name not in ("source", "output")}
    conversion = convert(arguments.source, **options, progress=output.show_progress, notify=output.print_note)
    if arguments.output.json:
        output.print_json(conversion.record)
    else:
        _print_result(conversion.record)


def _print_result(facts: dict[str, Any]) -> None:
    rows = [("changed", change) for change in facts["changes"]] + [("note", note) for note in facts["notes"]]
    if "difference" in facts:
        allowed = f"{facts['allowed']:.0e} is allowed"
        rows.append(("difference", f"{facts['difference']:.1e} from float32 in vitrail; {allowed}"))
    for precision in ("int8", "float16"):
        if precision in facts:
            rows += _format_agreement(precision, facts[precision])
    for measurement in facts.get("precision_measurements", ()):
        rows.append(("measured", PrecisionMeasurement(**measurement).describe()))
    output.print_table([*rows, ("written", f"{facts['written']} ({facts['format']})")])


def _format_agreement(precision: str, facts: dict[str, Any]) -> list[tuple[str, str]]:
    images = f"{pluralize(facts['images'], 'image')} of {facts['data']}"
    confident = ""
    if facts["confident_agreement"] is not None:
        confident = (
            f", {facts['confident_agreement']:.2%} where it is sure ({pluralize(facts['confident_images'], 'image')})"
        )
    change = f"the probability of that prediction by {facts['mean_probability_change']:.4f} on average"
    if "max_probability_change" in facts:
        change += f", any probability by {facts['max_probability_change']:.4f} at most"
    rows = [
        (f"{precision} agrees", f"with float32's prediction on {facts['top1_agreement']:.2%} of {images}{confident}"),
        (f"{precision} changes", change),
    ]
    if "speed" in facts:
        rows.append((f"{precision} speed", f"{facts['speed']:.2f} times float32's, ONNX Runtime on this machine"))
    return rows
