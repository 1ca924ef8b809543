"""`vitrail figures MODEL [MODEL] [IMAGES...]`: what a model has learned and attends to, as pictures and arrays."""

from vitrail.api.figures import Figures, figures
from vitrail.cli import output
from vitrail.cli.arguments.evaluation import FiguresArguments
from vitrail.errors import DataError
from vitrail.formatting import pluralize
from vitrail.visualization.all_figures import split_models_and_images
from vitrail.visualization.figure_folder import IMAGE_FOLDERS, RECORD_FILE


def run(arguments: FiguresArguments) -> None:
    """Draw the figures, and list them."""
    (model, *others), images = split_models_and_images(arguments.model, arguments.images)
    result = figures(
        model,
        images,
        against=others[0] if others else None,
        out=arguments.out,
        boxes=arguments.boxes,
        image_size=arguments.image_size,
        num_images=arguments.num_images,
        faithfulness=arguments.faithfulness,
        device=arguments.device,
        progress=output.show_progress,
        notify=output.print_note,
    )
    _print_result(result, as_json=arguments.output.json)
    if result.record["unreadable"]:
        unreadable, total = len(result.record["unreadable"]), pluralize(result.record["images"], "image")
        raise DataError(f"{unreadable:,} of {total} cannot be read; {result.folder / RECORD_FILE} says why")


def _print_result(result: Figures, *, as_json: bool) -> None:
    if as_json:
        output.print_json({name: value for name, value in result.record.items() if name != "images"})
    else:
        files = result.files
        rows = [(name, text) for name, text in files.items() if "/" not in name and not name.endswith(".npz")]
        counts = {kind: sum(name.startswith(f"{kind}/") for name in files) for kind in IMAGE_FOLDERS}
        rows += [(f"{kind}/", pluralize(number, "image")) for kind, number in counts.items() if number]
        output.print_table(rows)
    output.print_note(f"written: {result.folder}")
