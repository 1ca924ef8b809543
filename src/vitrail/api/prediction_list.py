"""Predictions in memory, and how they show themselves: the result of `vitrail.predict`."""

import dataclasses
import html
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, overload

from PIL import Image

from vitrail.api import notebook
from vitrail.data.decode import decode
from vitrail.data.image_paths import ImageRef
from vitrail.errors import DataError
from vitrail.formatting import pluralize
from vitrail.inference.classifier import NO_LABEL, RankedLabels

_SHOWN_LABELS = 5
_SHOWN_ROWS = 50  # rows of a table in a notebook
MAX_SHOWN_IMAGES = 8  # of them with their image
_THUMBNAIL_WIDTH = 120  # pixels


class Prediction(NamedTuple):
    """A model's prediction for one image; no labels, and a reason in `error`, where it cannot be read.

    A `PredictionList` holds one for each image.

        prediction = vitrail.predict("model.safetensors", "cat.jpg", top=3)[0]
        print(prediction.label, prediction.probability, prediction.labels)
    """

    image: str
    labels: RankedLabels
    """(label, probability), the likeliest first; of a multi-label model perhaps none."""
    error: str = ""

    @property
    def label(self) -> str | None:
        """The likeliest label."""
        return self.labels[0][0] if self.labels else None

    @property
    def probability(self) -> float | None:
        """The probability of the likeliest label."""
        return self.labels[0][1] if self.labels else None


@dataclasses.dataclass(frozen=True, repr=False)
class PredictionList:
    """Predictions in the order of their images.

    `vitrail.predict` returns it.

        for prediction in vitrail.predict("model.safetensors", "photos"):
            print(prediction.image, prediction.error or prediction.label)
    """

    rows: tuple[Prediction, ...]
    notes: tuple[str, ...] = ()
    first_images: tuple[ImageRef, ...] = ()
    """The images of the first rows, for a notebook."""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self.rows)

    @overload
    def __getitem__(self, index: int) -> Prediction: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Prediction, ...]: ...

    def __getitem__(self, index: int | slice) -> Prediction | tuple[Prediction, ...]:
        return self.rows[index]

    def __repr__(self) -> str:
        counts = Counter(row.label for row in self.rows if row.label is not None)
        parts = [f"{label} {count:,}" for label, count in counts.most_common(_SHOWN_LABELS)]
        if len(counts) > _SHOWN_LABELS:
            parts.append(f"{pluralize(len(counts) - _SHOWN_LABELS, 'other label')}")
        errors = [row.error for row in self.rows if row.error]
        if errors:
            parts.append(f"{len(errors):,} cannot be read ({errors[0]:.200})")
        return f"PredictionList({': '.join([pluralize(len(self.rows), 'image'), *filter(None, [', '.join(parts)])])})"

    def _repr_html_(self) -> str:
        thumbnails = itertools.chain(map(_render_thumbnail, self.first_images), itertools.repeat(""))
        cells = "".join(
            f"<tr><td>{thumbnail}</td><td>{html.escape(row.image)}</td>"
            f"<td>{html.escape(row.error or _format_labels(row.labels))}</td></tr>"
            for row, thumbnail in zip(self.rows[:_SHOWN_ROWS], thumbnails, strict=False)
        )
        more = "" if len(self.rows) <= _SHOWN_ROWS else f"<p>and {len(self.rows) - _SHOWN_ROWS:,} more</p>"
        table = f"<table><tr><th></th><th>image</th><th>labels</th></tr>{cells}</table>"
        return notebook.wrap_html(table, more, *notebook.render_notes(self.notes))


def _render_thumbnail(image: ImageRef) -> str:
    """A small copy of an image as HTML; nothing where it cannot be read."""
    try:
        pixels = decode(image.read(), 3, name=image.name)
    except DataError:
        return ""
    picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    return notebook.render_picture(picture, _THUMBNAIL_WIDTH, alt=image.name)


def _format_labels(labels: RankedLabels) -> str:
    return ", ".join(f"{label} {probability:.1%}" for label, probability in labels) or NO_LABEL
