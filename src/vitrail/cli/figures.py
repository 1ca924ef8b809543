"""`vitrail figures MODEL [MODEL] [IMAGES...]`: what a model has learned and attends to, as pictures and arrays."""

from typing import Any

from vitrail.cli import output, runs
from vitrail.cli.arguments.evaluation import FiguresArguments
from vitrail.errors import DataError, UsageError
from vitrail.figures import all_figures
from vitrail.figures.attention_images import FigureImage
from vitrail.figures.crops import read_boxes
from vitrail.figures.figure_folder import IMAGE_FOLDERS, RECORD_FILE, FigureFolder, claim_folder


def run(arguments: FiguresArguments) -> None:
    """Draw the figures, and list them."""
    if arguments.pictures < 0:
        raise UsageError(f"--pictures is {arguments.pictures}; it must be 0 or more")
    names, image_arguments = all_figures.split_models_and_images(arguments.model, arguments.images)
    if arguments.boxes is not None and not image_arguments:
        raise UsageError("--boxes says where objects are in images: give the images too")
    boxes = {} if arguments.boxes is None else read_boxes(arguments.boxes)
    path = runs.choose_next_folder("figures") if arguments.out is None else claim_folder(arguments.out)
    images = all_figures.list_images(image_arguments)
    drawn = _select_drawn(images, arguments.pictures)
    drawn_names = {image.name for image in drawn}
    read = [*drawn, *(image for image in images if boxes and image.name not in drawn_names)]
    models = all_figures.load_models(names, arguments.image_size, arguments.device, output.print_note)
    folder = FigureFolder(path, [model.name for model in models], notify=output.print_note)
    folder.clear()
    all_figures.draw_weight_figures(models, folder)
    if read:
        all_figures.draw_image_figures(
            models,
            read,
            boxes,
            folder,
            num_drawn=len(drawn),
            faithfulness=arguments.faithfulness,
            show_progress=output.show_progress,
        )
    else:
        reason = "--pictures 0 reads none" if images else f"vitrail figures {arguments.model} IMAGES..."
        folder.add_skipped("attention", f"that takes images: {reason}")
    _print_result(folder, folder.write_record(complete=True), as_json=arguments.output.json)
    if folder.unreadable:
        unreadable, total = len(folder.unreadable), output.pluralize(len(read), "image")
        raise DataError(f"{unreadable:,} of {total} cannot be read; {path / RECORD_FILE} says why")


def _select_drawn(images: list[FigureImage], number: int) -> list[FigureImage]:
    drawn = all_figures.spread_evenly(images, number)
    if len(drawn) < len(images):
        verb = "is" if len(drawn) == 1 else "are"
        total = output.pluralize(len(images), "image")
        output.print_note(f"{len(drawn):,} of {total} {verb} drawn; --pictures {len(images)} draws all")
    return drawn


def _print_result(folder: FigureFolder, facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.print_json(facts)
    else:
        rows = [(name, text) for name, text in folder.files.items() if "/" not in name and not name.endswith(".npz")]
        counts = {kind: sum(name.startswith(f"{kind}/") for name in folder.files) for kind in IMAGE_FOLDERS}
        rows += [(f"{kind}/", output.pluralize(number, "image")) for kind, number in counts.items() if number]
        output.print_table(rows)
    output.print_note(f"written: {folder.folder}")
