"""A dataset of labeled images: its splits, its classes, and what was assumed about it."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from vitrail import remote
from vitrail.data.randomness import SHARD_WINDOW, IntArray
from vitrail.data.sample_table import UNLABELED, Array, SampleTable
from vitrail.errors import DataError
from vitrail.formatting import pluralize

__all__ = ["Dataset", "Split"]

SPLITS = ("train", "val", "test")
MAX_BAD_FRACTION = 0.1
"""Up to this fraction of the images may be unreadable and are skipped; more are an error."""


class Store(Protocol):
    """Images by row. Its table has the column `label`, and `label.ends` where an image may have several labels."""

    @property
    def table(self) -> SampleTable: ...

    @property
    def is_remote(self) -> bool:
        """Whether a read is a request to an object store, so that several should run concurrently."""

    def get_name(self, row: int) -> str:
        """Return the image's name for people: a path, or a shard and a member."""

    def read(self, row: int) -> Path | bytes | Image.Image:
        """Read the image, still encoded, as `decode` takes it."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Some rows of a store, indexed from 0."""

    store: Store
    rows: Array | range

    def __len__(self) -> int:
        return len(self.rows)

    def get_image_name(self, index: int) -> str:
        """Return the image's name for people."""
        return self.store.get_name(int(self.rows[index]))

    def read_image(self, index: int) -> Path | bytes | Image.Image:
        """Read an image, still encoded."""
        return self.store.read(int(self.rows[index]))

    def read_images(self, indices: Sequence[int]) -> Iterator[tuple[str, Path | bytes | Image.Image]]:
        """Read several images, still encoded, in order; each with its name."""
        map_indices = remote.map_concurrently if self.store.is_remote else map
        return zip(map(self.get_image_name, indices), map_indices(self.read_image, indices), strict=True)

    @property
    def multi_label(self) -> bool:
        """Whether an image may have several labels, or none."""
        return "label.ends" in self.store.table

    def get_labels(self, index: int) -> tuple[int, ...]:
        """Return the classes of one image."""
        row, column = int(self.rows[index]), self.store.table["label"]
        if not self.multi_label:
            return () if column[row] == UNLABELED else (int(column[row]),)
        ends = self.store.table["label.ends"]
        return tuple(column[int(ends[row - 1]) if row else 0 : int(ends[row])].tolist())

    def count_per_class(self, num_classes: int) -> IntArray:
        """Count the images of each class."""
        column = self.store.table["label"]
        if self.multi_label:
            ends = self.store.table["label.ends"]
            owner_rows = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
            labels = column[np.isin(owner_rows, np.asarray(self.rows))]
        else:
            labels = column[_to_index(self.rows)]
        return np.bincount(labels[labels != UNLABELED], minlength=num_classes)

    def count_per_shard(self) -> tuple[int, ...]:
        """Count the samples in each tar shard or row group, in the order of the rows; empty where there are none."""
        if "shard" not in self.store.table:
            return ()
        shards = self.store.table["shard"][_to_index(self.rows)]  # ascending: a binary search need not read it all
        starts = np.searchsorted(shards, np.arange(int(shards[-1]) + 2))
        return tuple(np.diff(starts).tolist())

    @property
    def shard_window(self) -> int:
        """How many consecutive shards, or row groups of Parquet files, training shuffles together."""
        return int(self.store.table.metadata.get("shard_window", SHARD_WINDOW))

    def merge(self, other: "Split") -> "Split":
        """Merge two splits, in the order of their store."""
        if self.store is not other.store:
            raise DataError("the splits are in two stores and cannot be merged")
        return Split(self.store, np.sort(np.concatenate([np.asarray(self.rows), np.asarray(other.rows)])))

    def drop_images(self, indices: Sequence[int]) -> "Split":
        """Return the split without these images."""
        return Split(self.store, np.delete(np.asarray(self.rows), list(indices)))


def _to_index(rows: Array | range) -> Array | slice:
    """Return rows as an index that copies nothing where they are consecutive."""
    return slice(rows.start, rows.stop) if isinstance(rows, range) else rows


class LabelChanges(NamedTuple):
    """How many images of a dataset were corrected, and a digest of the decisions (`data/relabel.py`)."""

    changed: int
    dropped: int
    digest: str

    @property
    def summary(self) -> str:
        """The numbers in words."""
        return f"{pluralize(self.changed, 'label')} changed, {pluralize(self.dropped, 'image')} dropped"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """The dataset that a DATA argument names."""

    name: str
    classes: tuple[str, ...]
    """In the order of the model's outputs; empty for unlabeled images."""
    splits: Mapping[str, Split]
    """Those of train, val and test that exist."""
    generated_splits: tuple[str, ...] = ()
    """Splits that the set does not have itself: they were held out of its images."""
    holdout_note: str = ""
    """How val and test were held out, if the dataset has no split of its own; one of the notes."""
    notes: tuple[str, ...] = ()
    """What was assumed or omitted, for the user to read."""
    empty_classes: tuple[str, ...] = ()
    """Folders that would be classes but hold no image: they are omitted."""
    layout_warning: str = ""
    """Why the folders may not be classes, and what to do about it; checked before training and evaluation."""
    skip_bad: bool = False
    """Whether training skips unreadable images when it meets them, because no check has looked for them before."""
    label_changes: LabelChanges | None = None
    """What `--relabel` corrected."""

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
    """Build the splits that a column of indices into SPLITS describes."""
    split_rows = {name: _find_rows(column, number) for number, name in enumerate(SPLITS)}
    return {name: Split(store, rows) for name, rows in split_rows.items() if len(rows)}


def _find_rows(column: Array, split_number: int, block: int = 2**24) -> Array | range:
    """Find the rows of a split: a range if they are consecutive, found without listing them."""
    first, last, count = 0, -1, 0
    for start in range(0, len(column), block):
        rows = np.flatnonzero(column[start : start + block] == split_number)
        if len(rows):
            first = first if count else start + int(rows[0])
            last = start + int(rows[-1])
            count += len(rows)
    return range(first, last + 1) if last - first + 1 == count else np.flatnonzero(column == split_number)


def without_images(dataset: Dataset, images: Collection[tuple[str, str]]) -> Dataset:
    """Return the dataset without these images, each given by its split and name."""
    splits = {}
    for name, split in dataset.splits.items():
        dropped = [index for index in range(len(split)) if (name, split.get_image_name(index)) in images]
        if len(dropped) < len(split):
            splits[name] = split.drop_images(dropped)
    if not splits:
        raise DataError(f"{dataset.name}: no image is left without {pluralize(len(images), 'image')}")
    return dataclasses.replace(dataset, splits=splits)
