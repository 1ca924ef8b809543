"""Draw what a model has learned and what it attends to: `vitrail.figures`."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.api import notebook
from vitrail.api.images import Images, ListedImage, list_images
from vitrail.api.keyword_errors import name_keywords
from vitrail.api.models import AnyModel, get_model_name, load_trained
from vitrail.api.progress import NoteCollector, Progress, choose_progress
from vitrail.data.image_paths import ImageRef
from vitrail.errors import UsageError
from vitrail.formatting import pluralize
from vitrail.runtime.workers import Notify, ShowProgress
from vitrail.training.run_folder import choose_next_folder
from vitrail.visualization import all_figures
from vitrail.visualization.all_figures import FigureModel
from vitrail.visualization.attention_images import FigureImage
from vitrail.visualization.crops import Box, read_boxes
from vitrail.visualization.figure_folder import FigureFolder, claim_folder
from vitrail.weights.load import is_preset

_SHOWN_WIDTH = 800  # pixels of a figure in a notebook


@dataclasses.dataclass(frozen=True, repr=False)
class Figures:
    """The figures that were drawn, in a folder.

    `vitrail.figures` returns it.

        drawn = vitrail.figures("model.safetensors")
        print(drawn.folder, list(drawn.files))
    """

    folder: Path
    record: dict[str, Any]
    """The record of the folder: models, files, numbers, and what was skipped and why."""

    @property
    def files(self) -> dict[str, str]:
        """A description of each file, by its name in the folder."""
        return dict(self.record["files"])

    @property
    def numbers(self) -> dict[str, dict[str, Any]]:
        """The numbers of the figures, by figure and model."""
        return dict(self.record["numbers"])

    def __repr__(self) -> str:
        names = self._list_pictures()
        number = len(self.files) - len(names)
        more = f" and {number:,} more" if number else ""
        return f"Figures({str(self.folder)!r}: {', '.join(names)}{more})"

    def _list_pictures(self) -> list[str]:
        """The pictures of all images together; those of a single one are in folders."""
        return [name for name in self.files if name.endswith(".png") and "/" not in name]

    def _repr_html_(self) -> str:
        pictures = self._list_pictures()
        images = [notebook.render_image(self.folder / name, _SHOWN_WIDTH, alt=name) for name in pictures]
        parts = [
            notebook.render_figure(f"{name.removesuffix('.png')}: {self.files[name]}", image)
            for name, image in zip(pictures, images, strict=True)
        ]
        return notebook.wrap_html(*parts)


@name_keywords
def figures(
    model: AnyModel,
    images: Images = (),
    *,
    against: AnyModel | None = None,
    out: str | Path | None = None,
    boxes: str | Path | None = None,
    image_size: int | tuple[int, ...] | None = None,
    num_images: int = 64,
    faithfulness: bool = False,
    device: str | None = None,
    progress: Progress = True,
    notify: Notify | None = None,
) -> Figures:
    """Draw the paper's figures of a model, or of two side by side: `vitrail figures` from Python, with its defaults.

    Images that cannot be read are listed in `record["unreadable"]`.

        vitrail.figures("model.safetensors", "photos").numbers

    Arguments:

    - `model`: A name, a path, a `Run` or a `Trained`.
    - `images`: Files, folders or globs, a dataset such as "digits", images in memory, or a torch Dataset.
    - `against`: Another model, drawn beside the first.
    - `out`: The folder, new or empty; runs/figures, runs/figures-2, ... by default.
    - `boxes`: A file of object boxes, to measure how much of the rollout falls inside.
    - `image_size`: Resolution, one side or height and width; positions are resampled. The model's by default.
    - `num_images`: How many images to draw, evenly spread over those given; `boxes` reads the others too.
    - `faithfulness`: Delete and insert patches by relevance, and plot the probability of the class.
    - `device`: cpu, cuda or mps; the best device available by default.
    - `progress`: Whether a bar is shown, or a function that shows progress.
    - `notify`: Called with each note; by default they go to the logger `vitrail`.
    """
    notify = NoteCollector(notify)
    if num_images < 0:
        raise UsageError(f"--num-images is {num_images}; it must be 0 or more")
    given = [model] if against is None else [model, against]
    names = [get_model_name(each) for each in given]
    listed_images = list_images(images)
    if boxes is not None and not listed_images:
        raise UsageError("--boxes says where objects are in images: give the images too")
    object_boxes = {} if boxes is None else read_boxes(Path(boxes))
    path = choose_next_folder("figures") if out is None else claim_folder(str(out))
    listed = _list_figure_images(listed_images)
    size = (image_size,) if isinstance(image_size, int) else image_size
    models = all_figures.prepare_models([_load_model(each, notify) for each in given], size, device)
    folder = FigureFolder(path, [each.name for each in models], notify=notify)
    progress = choose_progress(progress)
    num_read = _draw(models, listed, object_boxes, folder, num_images, faithfulness=faithfulness, progress=progress)
    if not num_read:
        reason = "--num-images 0 reads none" if listed else f"vitrail figures {names[0]} IMAGES..."
        folder.add_skipped("attention", f"that takes images: {reason}")
    return Figures(path, folder.write_record(complete=True) | {"images": num_read})


def _draw(
    models: Sequence[FigureModel],
    images: list[FigureImage],
    boxes: Mapping[str, Box],
    folder: FigureFolder,
    num_images: int,
    *,
    faithfulness: bool,
    progress: ShowProgress,
) -> int:
    """Draw the figures of the weights and of the images; return the number of images that were read."""
    drawn = _select_drawn(images, num_images, folder.notify)
    drawn_names = {image.name for image in drawn}
    read = [*drawn, *(image for image in images if boxes and image.name not in drawn_names)]
    folder.clear()
    weights = all_figures.draw_weight_figures(models, folder)
    if read:
        all_figures.draw_image_figures(
            models,
            read,
            boxes,
            folder,
            weights=weights,
            num_drawn=len(drawn),
            faithfulness=faithfulness,
            show_progress=progress,
        )
    return len(read)


def _list_figure_images(images: Sequence[ListedImage]) -> list[FigureImage]:
    """The images by name, each once."""
    listed: dict[str, FigureImage] = {}
    for number, image in enumerate(images):
        if isinstance(image, str | Path):
            listed |= {each.name: each for each in all_figures.list_images([str(image)])}
        else:
            name = f"image {number}"
            listed[name] = FigureImage(name, image if callable(image) else ImageRef(name, "", content=image).read)
    return list(listed.values())


def _load_model(model: AnyModel, notify: Notify) -> FigureModel:
    trained = load_trained(model, notify)
    if isinstance(model, str) and is_preset(model):
        notify(f"{model} is a preset: its weights are random")
    return FigureModel(get_model_name(model), trained)


def _select_drawn(images: list[FigureImage], number: int, notify: Notify) -> list[FigureImage]:
    drawn = all_figures.spread_evenly(images, number)
    if len(drawn) < len(images):
        verb = "is" if len(drawn) == 1 else "are"
        total = pluralize(len(images), "image")
        notify(f"{len(drawn):,} of {total} {verb} drawn; --num-images {len(images)} draws all")
    return drawn
