"""Image datasets of the Hugging Face Hub, through its `datasets` library: hf:ORG/NAME[:CONFIGURATION][@REVISION].

The library is optional, so functions import it.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data import holdout
from vitrail.data.dataset import Dataset, build_dataset
from vitrail.data.folder import SPLIT_NAMES
from vitrail.data.sample_table import Array, SampleTable, encode_label_columns
from vitrail.errors import DataError, UsageError
from vitrail.formatting import pluralize

_NAME_PATTERN = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<configuration>[\w.-]+))?(@(?P<revision>[\w./-]+))?")


@dataclasses.dataclass(frozen=True)
class HubStore:
    """Images in columns of Arrow files, split after split."""

    split_datasets: tuple[Any, ...]
    """Each a datasets.Dataset with undecoded images, which pickles as the names of its files."""
    split_names: tuple[str, ...]
    image_column: str
    table: SampleTable
    is_remote = False

    def get_name(self, row: int) -> str:
        """The split and the row in it."""
        part, part_row = self._locate_row(row)
        return f"{self.split_names[part]}/{part_row}"

    def read(self, row: int) -> bytes | Path:
        """The bytes or the path of the image file."""
        part, part_row = self._locate_row(row)
        image = self.split_datasets[part][part_row][self.image_column]
        return image["bytes"] if image["bytes"] is not None else Path(image["path"])

    def _locate_row(self, row: int) -> tuple[int, int]:
        part = int(self.table["part"][row])
        return part, row - int(np.searchsorted(self.table["part"], part))


def open_hub_dataset(name: str, *, holdout_fraction: float = 0.1) -> Dataset:
    """Open a Hub dataset with one image column and at most one label column."""
    try:
        import datasets
    except ImportError as error:
        raise UsageError("hf: datasets need the library datasets: pip install 'vitrail[datasets]'") from error
    parts = _NAME_PATTERN.fullmatch(name)
    if not parts:
        raise UsageError(f"hf:{name} is not a dataset: write hf:ORG/NAME[:CONFIGURATION][@REVISION]")
    try:
        loaded = datasets.load_dataset(parts["name"], parts["configuration"], revision=parts["revision"])
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise DataError(f"hf:{name} cannot be loaded: {reason}") from error
    split_datasets = {str(split): part for split, part in loaded.items() if str(split).lower() in SPLIT_NAMES}
    if not split_datasets:
        raise DataError(f"hf:{name} has the splits {', '.join(map(str, loaded))}, none of which is train, val or test")
    skipped_splits = sorted(set(map(str, loaded)).difference(split_datasets))
    return _build_dataset(f"hf:{name}", split_datasets, skipped_splits, holdout_fraction)


def _build_dataset(
    name: str, split_datasets: dict[str, Any], skipped_splits: list[str], holdout_fraction: float
) -> Dataset:
    import datasets

    features = next(iter(split_datasets.values())).features
    image_columns = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
    if len(image_columns) != 1:
        raise DataError(f"{name} has {len(image_columns)} image columns among {', '.join(features)}; one is needed")
    classes, columns = _read_labels(name, split_datasets)
    sizes = [len(part) for part in split_datasets.values()]
    columns["part"] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    store = HubStore(
        tuple(part.cast_column(image_columns[0], datasets.Image(decode=False)) for part in split_datasets.values()),
        tuple(split_datasets),
        image_columns[0],
        SampleTable(columns),
    )
    split_column = np.array([SPLIT_NAMES[split.lower()] for split in split_datasets], dtype=np.int8)[columns["part"]]
    split = holdout.complete_splits(
        split_column, columns, store.get_name, identity=name, holdout_fraction=holdout_fraction
    )
    notes = [f"splits left out: {', '.join(skipped_splits)}"] if skipped_splits else []
    splits = SampleTable({"split": split.column}, split.build_metadata(classes, notes))
    return build_dataset(name, store, splits)


def _read_labels(name: str, split_datasets: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, Array]]:
    """The class names, and the columns of labels; each row of the first label column has one label, or a list."""
    import datasets

    for column, feature in next(iter(split_datasets.values())).features.items():
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, datasets.ClassLabel) or column in ("label", "labels"):
            break
    else:
        no_labels = [()] * sum(map(len, split_datasets.values()))
        return (), encode_label_columns(no_labels, multi_label=False)
    values = [value for part in split_datasets.values() for value in part[column]]
    rows = [list(value) if inner is not feature else [value] for value in values]
    if isinstance(inner, datasets.ClassLabel):
        classes, class_index = tuple(inner.names), {number: number for number in range(-1, len(inner.names))}
    else:
        distinct = sorted({value for row in rows for value in row})
        classes, class_index = tuple(map(str, distinct)), {value: number for number, value in enumerate(distinct)}
    try:
        labels = [[class_index[value] for value in row] for row in rows]
    except KeyError as error:
        raise DataError(
            f"{name}: {column} is {error.args[0]!r:.80}, which is not one of its {pluralize(len(classes), 'class')}"
        ) from error
    return classes, encode_label_columns(labels, multi_label=inner is not feature)
