"""A set of labelled images: its splits, its classes, and what was assumed about it."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail import remote
from vitrail.data.decode import IMAGE_SUFFIXES as IMAGE_SUFFIXES
from vitrail.data.sample_table import Array, SampleTable
from vitrail.errors import DataError
from vitrail.formatting import pluralize

SPLITS = ("train", "val", "test")
UNLABELED = -1
BAD_SHARE = 0.1
"""Of the images may be unreadable, and are left out of training."""


class Store(Protocol):
    """Images by row; the columns `label`, and `label.ends` where an image has several, belong to its table."""

    @property
    def table(self) -> SampleTable: ...

    @property
    def is_remote(self) -> bool:
        """Whether a read is a request to a store, so that several should be on their way at once."""
        ...

    def get_name(self, row: int) -> str:
        """What a person calls it: a path, or a shard and a member."""
        ...

    def read(self, row: int) -> Path | bytes | Image.Image:
        """What `decode` takes."""
        ...


@dataclasses.dataclass(frozen=True)
class Split:
    """Some rows of a store, by number from 0."""

    store: Store
    rows: Array | range

    def __len__(self) -> int:
        return len(self.rows)

    def get_image_name(self, index: int) -> str:
        """What a person calls the image."""
        return self.store.get_name(int(self.rows[index]))

    def read_image(self, index: int) -> Path | bytes | Image.Image:
        """The image, still encoded."""
        return self.store.read(int(self.rows[index]))

    def read_images(self, indices: Sequence[int]) -> Iterator[Path | bytes | Image.Image]:
        """Several images, still encoded, in order."""
        return (
            remote.map_concurrently(self.read_image, indices) if self.store.is_remote else map(self.read_image, indices)
        )

    @property
    def multi_label(self) -> bool:
        """Whether an image may have several labels, or none."""
        return "label.ends" in self.store.table

    def get_labels(self, index: int) -> tuple[int, ...]:
        """The classes of one image."""
        row, column = int(self.rows[index]), self.store.table["label"]
        if not self.multi_label:
            return () if column[row] == UNLABELED else (int(column[row]),)
        ends = self.store.table["label.ends"]
        return tuple(column[int(ends[row - 1]) if row else 0 : int(ends[row])].tolist())

    def count_per_class(self, num_classes: int) -> NDArray[np.int64]:
        """Images of each class."""
        column = self.store.table["label"]
        if self.multi_label:
            ends = self.store.table["label.ends"]
            owners = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
            labels = column[np.isin(owners, np.asarray(self.rows))]
        else:
            labels = column[_to_index(self.rows)]
        return np.bincount(labels[labels != UNLABELED], minlength=num_classes)

    def count_per_shard(self) -> tuple[int, ...]:
        """Samples in each tar shard, in the order of the rows; empty where the images are no shards."""
        if "shard" not in self.store.table:
            return ()
        column = self.store.table["shard"][
            _to_index(self.rows)
        ]  # rising, so that its steps are found without reading it
        steps = np.searchsorted(column, np.arange(int(column[-1]) + 2))
        return tuple(np.diff(steps).tolist())

    def merge(self, other: "Split") -> "Split":
        """The images of both, in the order of their store."""
        if self.store is not other.store:
            raise DataError("the splits lie in two stores and cannot be joined")
        return Split(self.store, np.sort(np.concatenate([np.asarray(self.rows), np.asarray(other.rows)])))

    def drop_images(self, indices: Sequence[int]) -> "Split":
        """The split less some of its images."""
        return Split(self.store, np.delete(np.asarray(self.rows), list(indices)))


def _to_index(rows: Array | range) -> Array | slice:
    """Rows as an index that copies nothing where they are consecutive."""
    return slice(rows.start, rows.stop) if isinstance(rows, range) else rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """What a DATA argument names."""

    name: str
    classes: tuple[str, ...]
    """In the order of the model's outputs; empty for images without labels."""
    splits: Mapping[str, Split]
    """Those of train, val and test that there are."""
    generated_splits: tuple[str, ...] = ()
    """Splits that the set does not have itself: they were held out of its images."""
    holdout_note: str = ""
    """How val and test were held out, if the dataset has no split of its own; one of the notes."""
    notes: tuple[str, ...] = ()
    """What was taken for granted or left out, for the user to read."""
    empty_classes: tuple[str, ...] = ()
    """Folders that would be classes and hold no image: they are left out."""
    layout_warning: str = ""
    """Why the classes may be none, and what to do about it; asked before anyone learns or measures them."""
    unchecked: bool = False
    """Whether nobody has looked for images that cannot be read, so that training is to leave out those it meets."""

    @property
    def multi_label(self) -> bool:
        """Whether an image may have several labels, or none."""
        return any(split.multi_label for split in self.splits.values())


def build_dataset(name: str, store: Store, splits: SampleTable | None = None) -> Dataset:
    """The dataset that a store's table describes; `splits` is the table of its splits, if that is another one."""
    splits = store.table if splits is None else splits
    metadata = splits.metadata
    return Dataset(
        name=name,
        classes=tuple(metadata["classes"]),
        splits=build_splits(store, splits["split"]),
        generated_splits=tuple(metadata["generated_splits"]),
        holdout_note=metadata["holdout_note"],
        notes=tuple(metadata["notes"]),
        empty_classes=tuple(metadata.get("empty_classes", ())),
        layout_warning=metadata.get("layout_warning", ""),
    )


def build_splits(store: Store, column: Array) -> dict[str, Split]:
    """The splits that a column of places in SPLITS describes."""
    found = {name: _find_rows(column, number) for number, name in enumerate(SPLITS)}
    return {name: Split(store, rows) for name, rows in found.items() if len(rows)}


def _find_rows(column: Array, split_number: int, block: int = 2**24) -> Array | range:
    """Where a column holds a number: a range if those places are consecutive, found without listing them."""
    first, last, count = 0, -1, 0
    for start in range(0, len(column), block):
        here = np.flatnonzero(column[start : start + block] == split_number)
        if len(here):
            first = first if count else start + int(here[0])
            last = start + int(here[-1])
            count += len(here)
    return range(first, last + 1) if last - first + 1 == count else np.flatnonzero(column == split_number)


def without_images(dataset: Dataset, images: Collection[tuple[str, str]]) -> Dataset:
    """The set without these images, each given by its split and name."""
    splits = {}
    for key, split in dataset.splits.items():
        left = split.drop_images([index for index in range(len(split)) if (key, split.get_image_name(index)) in images])
        if len(left):
            splits[key] = left
    if not splits:
        raise DataError(f"{dataset.name}: nothing is left without {pluralize(len(images), 'image')}")
    return dataclasses.replace(dataset, splits=splits)
