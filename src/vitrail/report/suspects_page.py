"""Files of a search for label errors: suspects.csv, and suspects.html, one page to decide about each image."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
from markupsafe import Markup
from PIL import Image

import vitrail
from vitrail.data.decode import decode
from vitrail.data.relabel import Action
from vitrail.errors import DataError
from vitrail.evaluation.label_errors import LabelErrors, Suspect
from vitrail.files import write_atomically
from vitrail.formatting import pluralize, quote_cell
from vitrail.report.model_figures import encode_webp
from vitrail.report.page_templates import load_template

CSV_FILE, PAGE_FILE = "suspects.csv", "suspects.html"
CSV_COLUMNS = (
    "rank", "action", "split", "image", "label", "likely_label", "label_probability", "likely_probability",
)  # fmt: skip
MAX_CARDS = 200
_NEIGHBORS = 3  # of each class
_SUSPECT_SIDE, _NEIGHBOR_SIDE = 192, 96  # pixels of thumbnails
_SMALL_SIDE = 64  # an image below it is shown with visible pixels
_MAX_PAIRS = 20


class Thumbnail(NamedTuple):
    """A reduced image as data URI."""

    image: str
    small: bool


class SuspectCard(NamedTuple):
    """A suspect with the images that resemble it."""

    suspect: Suspect
    action: str
    image: str  # empty where it cannot be read any more
    small: bool
    label_neighbors: list[Thumbnail]
    likely_neighbors: list[Thumbnail]


def write_suspects(errors: LabelErrors, folder: Path, *, action: Action | None, model: str) -> None:
    """Write suspects.csv and suspects.html; `action` fills the column of that name for training images."""
    rows = make_csv_rows(errors.list_suspects(), action)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(CSV_COLUMNS)
    writer.writerows([quote_cell(cell) for cell in row] for row in rows)
    with write_atomically(folder / CSV_FILE, overwrite=True) as temporary:
        temporary.write_bytes(text.getvalue().encode(errors="surrogateescape"))
    page = render_page(errors, rows, model)
    with write_atomically(folder / PAGE_FILE, overwrite=True) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="backslashreplace")


def make_csv_rows(suspects: Sequence[Suspect], action: Action | None) -> list[tuple[str, ...]]:
    """The cells of suspects.csv.

    Val and test stay undecided: a model that corrects the labels it is measured by measures its agreement with itself.
    """
    return [
        (
            str(rank),
            (action or "") if suspect.split == "train" else "",
            suspect.split,
            suspect.image,
            suspect.label,
            suspect.likely_label,
            f"{suspect.label_probability:.4g}",
            f"{suspect.likely_probability:.4g}",
        )
        for rank, suspect in enumerate(suspects, 1)
    ]


# --- the page --------------------------------------------------------------------------------------------------------


def render_page(errors: LabelErrors, rows: Sequence[Sequence[str]], model: str) -> str:
    """Render the whole page, with the first MAX_CARDS suspects."""
    shown = errors.suspects[:MAX_CARDS]
    text = json.dumps({"columns": CSV_COLUMNS, "rows": rows}).replace("<", "\\u003c")
    return load_template("suspects.html").render(
        title=f"Suspected labels of {errors.dataset.name}",
        lead=describe_result(errors) + f" By the features of {model}.",
        pairs=errors.count_pairs()[:_MAX_PAIRS],
        cards=[_make_card(errors, image, row[1]) for image, row in zip(shown, rows, strict=False)],
        classes=errors.dataset.classes,
        actions=get_args(Action),
        omitted=len(errors.suspects) - len(shown),
        table=Markup(text),  # noqa: S704, JSON in which no tag can end
        version=vitrail.__version__,
    )


def describe_result(errors: LabelErrors) -> str:
    """How many labels look wrong, in one sentence."""
    total = len(errors.features.targets)
    return f"About {len(errors.suspects):,} of {pluralize(total, 'label')} look wrong, the least probable first."


def _make_card(errors: LabelErrors, image: int, action: str) -> SuspectCard:
    suspect = errors.describe(image)
    classes = errors.dataset.classes
    thumbnail = _make_thumbnail(errors, image, _SUSPECT_SIDE) or Thumbnail("", small=False)

    def list_neighbors(label: str) -> list[Thumbnail]:
        neighbors = errors.find_neighbors(image, classes.index(label), _NEIGHBORS)
        return [each for row in neighbors if (each := _make_thumbnail(errors, row, _NEIGHBOR_SIDE)) is not None]

    return SuspectCard(suspect, action, *thumbnail, list_neighbors(suspect.label), list_neighbors(suspect.likely_label))


def _make_thumbnail(errors: LabelErrors, image: int, side: int) -> Thumbnail | None:
    """A reduced image; None where it cannot be read any more."""
    split_name, index = errors.locate(image)
    split = errors.dataset.splits[split_name]
    try:
        pixels = decode(split.read_image(index), 3, name=split.get_image_name(index))
    except (DataError, OSError):
        return None
    picture = Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))
    small = max(picture.size) < _SMALL_SIDE
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    return Thumbnail(encode_webp(np.asarray(picture)), small)
