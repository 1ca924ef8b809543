"""Image sets of the Hugging Face Hub, through its own `datasets` library: hf:ORG/NAME[:CONFIGURATION][@REVISION]."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data import holdout
from vitrail.data.dataset import UNLABELED, Dataset, build_splits
from vitrail.data.folder import SPLIT_NAMES
from vitrail.data.sample_table import Array, SampleTable
from vitrail.errors import DataError, UsageError
from vitrail.plurals import pluralize

_NAME_PATTERN = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<configuration>[\w.-]+))?(@(?P<revision>[\w./-]+))?")


@dataclasses.dataclass(frozen=True)
class HubStore:
    """Images in the columns of Arrow files, the splits one after the other."""

    split_datasets: tuple[Any, ...]
    """datasets.Dataset, images not decoded; it pickles as the names of its files."""
    split_names: tuple[str, ...]
    image_column: str
    table: SampleTable
    is_remote = False

    def get_name(self, row: int) -> str:
        """The split and the number in it."""
        part, place = self._locate_row(row)
        return f"{self.split_names[part]}/{place}"

    def read(self, row: int) -> bytes | Path:
        """The image file's bytes, or the file."""
        part, place = self._locate_row(row)
        image = self.split_datasets[part][place][self.image_column]
        return image["bytes"] if image["bytes"] is not None else Path(image["path"])

    def _locate_row(self, row: int) -> tuple[int, int]:
        part = int(self.table["part"][row])
        return part, row - int(np.searchsorted(self.table["part"], part))


def open_hub_dataset(name: str, *, holdout_fraction: float = 0.1) -> Dataset:
    """A set of the Hub with one image column and at most one of labels."""
    try:
        import datasets
    except ImportError as error:
        raise UsageError("hf: sets are read by datasets: pip install 'vitrail[datasets]'") from error
    found = _NAME_PATTERN.fullmatch(name)
    if not found:
        raise UsageError(f"hf:{name} is no set: write hf:ORG/NAME, and :CONFIGURATION or @REVISION behind it if needed")
    try:
        loaded = datasets.load_dataset(found["name"], found["configuration"], revision=found["revision"])
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"hf:{name} cannot be loaded: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
    kept = {split: part for split, part in loaded.items() if str(split).lower() in SPLIT_NAMES}
    if not kept:
        raise DataError(f"hf:{name} has the splits {', '.join(map(str, loaded))}, none of which is train, val or test")
    return _build_dataset(f"hf:{name}", kept, sorted(set(map(str, loaded)) - set(map(str, kept))), holdout_fraction)


def _build_dataset(
    name: str, split_datasets: dict[str, Any], skipped_splits: list[str], holdout_fraction: float
) -> Dataset:
    import datasets

    features = next(iter(split_datasets.values())).features
    images = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
    if len(images) != 1:
        raise DataError(f"{name} has {len(images)} image columns among {', '.join(features)}; one is needed")
    column = _find_label_column(features)
    classes, labels, ends = _read_labels(name, split_datasets, column)
    columns: dict[str, Array] = {
        "label": labels,
        "part": np.repeat(
            np.arange(len(split_datasets), dtype=np.int32), [len(part) for part in split_datasets.values()]
        ),
    } | ({} if ends is None else {"label.ends": ends})
    store = HubStore(
        tuple(part.cast_column(images[0], datasets.Image(decode=False)) for part in split_datasets.values()),
        tuple(map(str, split_datasets)),
        images[0],
        SampleTable(columns),
    )
    given = np.array([SPLIT_NAMES[str(split).lower()] for split in split_datasets], dtype=np.int8)[columns["part"]]
    strata = labels if ends is None else np.zeros(len(given), dtype=np.int32)
    split = holdout.complete_splits(given, strata, store.get_name, identity=name, holdout_fraction=holdout_fraction)
    notes = (*split.notes, f"splits left out: {', '.join(skipped_splits)}") if skipped_splits else split.notes
    splits = build_splits(store, split.column)
    return Dataset(name=name, classes=classes, splits=splits, generated_splits=split.generated_splits, notes=notes)


def _find_label_column(features: Any) -> str | None:
    import datasets

    for column, feature in features.items():
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, datasets.ClassLabel) or column in ("label", "labels"):
            return str(column)
    return None


def _read_labels(
    name: str, split_datasets: dict[str, Any], column: str | None
) -> tuple[tuple[str, ...], Array, Array | None]:
    """Class names, labels, and where each row's labels end if it may have several."""
    import datasets

    if column is None:
        return (), np.full(sum(map(len, split_datasets.values())), UNLABELED, dtype=np.int32), None
    feature = next(iter(split_datasets.values())).features[column]
    inner = getattr(feature, "feature", feature)
    values = [value for part in split_datasets.values() for value in part[column]]
    rows = [list(value) if inner is not feature else [value] for value in values]
    if isinstance(inner, datasets.ClassLabel):
        classes, place = tuple(inner.names), {number: number for number in range(-1, len(inner.names))}
    else:
        known = sorted({value for row in rows for value in row})
        classes, place = tuple(map(str, known)), {value: number for number, value in enumerate(known)}
    try:
        labels = np.array([place[value] for row in rows for value in row], dtype=np.int32)
    except KeyError as error:
        raise DataError(
            f"{name}: {column} is {error.args[0]!r:.80}, which is none of its {pluralize(len(classes), 'class')}"
        ) from error
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64) if inner is not feature else None
    return classes, labels, ends
