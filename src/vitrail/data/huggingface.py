"""Image sets of the Hugging Face Hub, through its own `datasets` library: hf:ORG/NAME[:CONFIGURATION][@REVISION]."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data import holdout
from vitrail.data.dataset import UNLABELLED, Dataset, from_column
from vitrail.data.folder import SPLIT_NAMES
from vitrail.data.table import Array, Table
from vitrail.errors import DataError, UsageError
from vitrail.plurals import plural

_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<configuration>[\w.-]+))?(@(?P<revision>[\w./-]+))?")


@dataclasses.dataclass(frozen=True)
class Rows:
    """Images in the columns of Arrow files, the splits one after the other."""

    parts: tuple[Any, ...]
    """datasets.Dataset, images not decoded; it pickles as the names of its files."""
    names: tuple[str, ...]
    column: str
    table: Table
    far = False

    def name(self, row: int) -> str:
        """The split and the number in it."""
        part, place = self._at(row)
        return f"{self.names[part]}/{place}"

    def read(self, row: int) -> bytes | Path:
        """The image file's bytes, or the file."""
        part, place = self._at(row)
        image = self.parts[part][place][self.column]
        return image["bytes"] if image["bytes"] is not None else Path(image["path"])

    def _at(self, row: int) -> tuple[int, int]:
        part = int(self.table["part"][row])
        return part, row - int(np.searchsorted(self.table["part"], part))


def open_hub(name: str, *, share: float = 0.1) -> Dataset:
    """A set of the Hub with one image column and at most one of labels."""
    try:
        import datasets
    except ImportError as error:
        raise UsageError("hf: sets are read by datasets: pip install 'vitrail[datasets]'") from error
    found = _NAME.fullmatch(name)
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
    return _dataset(f"hf:{name}", kept, sorted(set(map(str, loaded)) - set(map(str, kept))), share)


def _dataset(name: str, parts: dict[str, Any], left: list[str], share: float) -> Dataset:
    import datasets

    features = next(iter(parts.values())).features
    images = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
    if len(images) != 1:
        raise DataError(f"{name} has {len(images)} image columns among {', '.join(features)}; one is needed")
    column = _label_column(features)
    classes, labels, ends = _labels(name, parts, column)
    columns: dict[str, Array] = {
        "label": labels,
        "part": np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts.values()]),
    } | ({} if ends is None else {"label.ends": ends})
    store = Rows(
        tuple(part.cast_column(images[0], datasets.Image(decode=False)) for part in parts.values()),
        tuple(map(str, parts)),
        images[0],
        Table(columns),
    )
    given = np.array([SPLIT_NAMES[str(split).lower()] for split in parts], dtype=np.int8)[columns["part"]]
    strata = labels if ends is None else np.zeros(len(given), dtype=np.int32)
    split = holdout.completed(given, strata, store.name, identity=name, share=share)
    notes = (*split.notes, f"splits left out: {', '.join(left)}") if left else split.notes
    splits = from_column(store, split.column)
    return Dataset(name=name, classes=classes, splits=splits, made_up=split.made_up, notes=notes)


def _label_column(features: Any) -> str | None:
    import datasets

    for column, feature in features.items():
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, datasets.ClassLabel) or column in ("label", "labels"):
            return str(column)
    return None


def _labels(name: str, parts: dict[str, Any], column: str | None) -> tuple[tuple[str, ...], Array, Array | None]:
    """Class names, labels, and where each row's labels end if it may have several."""
    import datasets

    if column is None:
        return (), np.full(sum(map(len, parts.values())), UNLABELLED, dtype=np.int32), None
    feature = next(iter(parts.values())).features[column]
    inner = getattr(feature, "feature", feature)
    values = [value for part in parts.values() for value in part[column]]
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
            f"{name}: {column} is {error.args[0]!r:.80}, which is none of its {plural(len(classes), 'class')}"
        ) from error
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64) if inner is not feature else None
    return classes, labels, ends
