"""Splits for a dataset that has none: stratified, the same on every machine, and written to a file.

An image's split depends on its name alone, so another machine with the same folder gets the same splits. Held-out
images are stored and stay held out when the folder grows: a test image never becomes a training image.
"""

import csv
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.dataset import SPLITS
from vitrail.data.sample_table import Array, SampleTable
from vitrail.errors import DataError
from vitrail.files import get_data_home, write_atomically
from vitrail.formatting import pluralize

NO_SPLIT = -1
_NO_SPLITS_NOTE = "no val and test given"
"""The start of the note on a dataset without any split."""
_TRAIN, _VAL, _TEST = range(3)
SplitColumn = NDArray[np.int8]


class CompletedSplits(NamedTuple):
    """The splits of a dataset, with those generated that it lacks."""

    column: SplitColumn
    generated_splits: tuple[str, ...]
    """The splits that were held out here."""
    notes: tuple[str, ...]

    def build_metadata(self, classes: Sequence[str], notes: Iterable[str] = ()) -> dict[str, Any]:
        """The metadata of a table with these splits, from which `build_dataset` builds the dataset."""
        return {
            "classes": list(classes),
            "generated_splits": self.generated_splits,
            "holdout_note": find_holdout_note(self.notes),
            "notes": [*self.notes, *notes],
        }


def find_holdout_note(notes: Iterable[str]) -> str:
    """The note on how a dataset without any split was split, among those that a run has recorded."""
    return next((note for note in notes if note.startswith(_NO_SPLITS_NOTE)), "")


def complete_splits(
    column: SplitColumn,
    table: SampleTable | Mapping[str, Array],
    get_name: Callable[[int], str],
    *,
    identity: str,
    holdout_fraction: float = 0.1,
) -> CompletedSplits:
    """Hold out the splits that a split column lacks, and return it with a note about that.

    Without any split, `holdout_fraction` of each class becomes val and as much test. With train but no val, that
    fraction of train becomes val. Images that may have several labels are not told apart by class.
    """
    existing = set(np.unique(column).tolist())
    missing: tuple[int, ...]
    if NO_SPLIT in existing:
        missing, pool = (_TEST, _VAL), column == NO_SPLIT
    elif _TRAIN in existing and _VAL not in existing:
        missing, pool = (_VAL,), column == _TRAIN
    else:
        return CompletedSplits(column, (), ())
    path = _get_list_path(identity, holdout_fraction)
    rows = np.flatnonzero(pool)
    strata = np.zeros(len(column), dtype=np.int32) if "label.ends" in table else table["label"]
    stored = _read_list(path) if path.exists() else {}
    names_by_class: dict[int, dict[str, None]] = {}
    for row in rows.tolist():
        names_by_class.setdefault(int(strata[row]), {})[get_name(row)] = None
    held_out: dict[str, int] = {}
    for names in names_by_class.values():  # a name that occurs twice goes where it went first: on one side
        held_out = _choose_held_out(list(names), missing, holdout_fraction, stored) | held_out
    completed = column.copy()
    completed[rows] = [held_out.get(get_name(row), _TRAIN) for row in rows.tolist()]
    location = _write_list(path, stored | held_out, stored)
    generated = tuple(SPLITS[split] for split in sorted(missing))
    count = pluralize(int((completed[rows] != _TRAIN).sum()), "image")
    note = (
        f"no {' and '.join(generated)} given: {holdout_fraction:.0%} of each class held out for"
        f" {'each' if generated[1:] else 'it'} ({count}, {location})"
    )
    return CompletedSplits(completed, generated, (note,))


def _choose_held_out(
    names: Sequence[str], missing_splits: Sequence[int], holdout_fraction: float, stored_splits: dict[str, int]
) -> dict[str, int]:
    """Choose names of one class to hold out: the stored ones or, without any, those with the smallest digests."""
    chosen = {name: stored_splits[name] for name in names if name in stored_splits}
    if chosen or len(names) <= 2:
        return chosen
    count = min(max(1, round(holdout_fraction * len(names))), (len(names) - 1) // len(missing_splits))
    ranked = sorted(names, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
    return {name: missing_splits[rank // count] for rank, name in enumerate(ranked[: count * len(missing_splits)])}


def _get_list_path(identity: str, holdout_fraction: float) -> Path:
    digest = hashlib.sha256(f"{identity} {holdout_fraction}".encode(errors="surrogateescape")).hexdigest()[:12]
    word = "".join(c if c.isalnum() else "-" for c in Path(identity).name)[:40]
    return get_data_home() / "splits" / f"{word}-{digest}.csv"


def _read_list(path: Path) -> dict[str, int]:
    try:
        with path.open(newline="", errors="surrogateescape") as file:
            return {row["name"]: SPLITS.index(row["split"]) for row in csv.DictReader(file)}
    except (ValueError, KeyError, csv.Error) as error:
        raise DataError(
            f"{path}, which lists the held-out images, is damaged ({error}); repair or remove it"
        ) from error


def _write_list(path: Path, held_out: dict[str, int], previous: dict[str, int]) -> str:
    """Store the held-out names, and return where; a home that cannot be written loses the list and not the run."""
    if held_out == previous:
        return f"listed in {path}"
    try:
        with (
            write_atomically(path, overwrite=True) as fresh,
            fresh.open("w", newline="", errors="surrogateescape") as file,
        ):
            rows = csv.writer(file)
            rows.writerow(("name", "split"))
            rows.writerows((name, SPLITS[split]) for name, split in sorted(held_out.items()))
    except OSError as error:
        return f"by their names; the list could not be stored: {error}"
    return f"listed in {path}"
