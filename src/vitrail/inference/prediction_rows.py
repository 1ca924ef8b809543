"""The rows of predictions, and what writes them: each image has one, in the images' order."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from vitrail.data.image_paths import ImageRef
from vitrail.inference.classifier import RankedLabels


class PredictionItem(NamedTuple):
    """An image to predict, and the file for its attention picture, if there is to be one."""

    image: ImageRef
    picture: Path | None = None


class PredictionRow(NamedTuple):
    """The prediction for an image: labels, or features, or neither and the error."""

    image: str
    labels: RankedLabels = []  # noqa: RUF012, nobody appends to it
    features: NDArray[np.float32] | None = None
    error: str = ""
    attention: str | None = None
    """The path of the attention picture, empty where it could not be drawn; None where none was requested."""


class WrittenRows(NamedTuple):
    """How much a file holds: images, those of them that cannot be read, and bytes of its lines."""

    images: int = 0
    failed: int = 0
    num_bytes: int = 0


class StoredImage(NamedTuple):
    """An image whose row is complete in a file, and in lines of text where it ends."""

    image: str
    failed: bool
    end: int = 0


WriteRows = Callable[[Sequence[PredictionRow]], None]


class RowTarget(Protocol):
    """Where rows go: a file that can be continued, or a stream."""

    @property
    def name(self) -> str: ...

    @property
    def can_continue(self) -> bool: ...

    def find_written(self, items: Iterator[PredictionItem]) -> tuple[WrittenRows, list[PredictionItem]]: ...

    def open_writer(self, written: WrittenRows) -> AbstractContextManager[WriteRows]: ...


class RowStore(Protocol):
    """The files of a format, and how rows lie in them."""

    @property
    def unit(self) -> int:
        """So many images are stored together or not at all; only the last ones may be fewer."""

    def list_files(self) -> list[Path]:
        """The files that hold the rows, those that others need to be read first."""

    def iterate_stored(self) -> Iterator[StoredImage]:
        """The images of complete rows, up to the first that is incomplete."""

    def open_writer(self, written: WrittenRows) -> AbstractContextManager[WriteRows]:
        """Open a function that appends rows after those written; anything after them is cut off."""

    def write_merged(self, parts: Sequence[Self]) -> None:
        """Write the rows of the parts one after the other to files that do not exist."""


def make_valid_text(text: str) -> str:
    r"""The text with what is no valid UTF-8, as in some files' names, written as \udcff."""
    return text.encode(errors="backslashreplace").decode()
