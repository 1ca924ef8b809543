"""A split where a set has none: stratified, the same on every machine, and written down.

An image's fate depends on its name alone, so another machine with the same folder splits alike. What was held out once
is stored and stays held out when the folder grows: an image that was tested on never becomes one that is trained on.
"""

import csv
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.dataset import SPLITS
from vitrail.data.sample_table import Array
from vitrail.errors import DataError
from vitrail.files import get_data_home, write_atomically
from vitrail.formatting import pluralize

NO_SPLIT = -1
_NO_SPLITS_NOTE = "no val and test given"
"""The start of the note on a dataset without any split."""
_TRAIN, _VAL, _TEST = range(3)
SplitColumn = NDArray[np.int8]


class CompletedSplits(NamedTuple):
    """The splits of a set, with those made up that it lacks."""

    column: SplitColumn
    generated_splits: tuple[str, ...]
    """The splits that were held out here."""
    notes: tuple[str, ...]

    @property
    def holdout_note(self) -> str:
        """How val and test were held out, if there was no split at all."""
        return find_holdout_note(self.notes)

    def build_metadata(self, classes: Sequence[str], notes: Iterable[str] = ()) -> dict[str, Any]:
        """The metadata of a table with these splits, from which `build_dataset` builds the dataset."""
        return {
            "classes": list(classes),
            "generated_splits": self.generated_splits,
            "holdout_note": self.holdout_note,
            "notes": [*self.notes, *notes],
        }


def find_holdout_note(notes: Iterable[str]) -> str:
    """The note on how a dataset without any split was split, among those that a run has recorded."""
    return next((note for note in notes if note.startswith(_NO_SPLITS_NOTE)), "")


def complete_splits(
    column: SplitColumn, strata: Array, get_name: Callable[[int], str], *, identity: str, holdout_fraction: float = 0.1
) -> CompletedSplits:
    """The split column with what is missing held out, and a sentence that says so.

    Without any split a `share` becomes val and as much test; with train but no val, a share of train becomes val.
    """
    known = set(np.unique(column).tolist())
    wanted: tuple[int, ...]
    if NO_SPLIT in known:
        wanted, pool = (_TEST, _VAL), column == NO_SPLIT
    elif _TRAIN in known and _VAL not in known:
        wanted, pool = (_VAL,), column == _TRAIN
    else:
        return CompletedSplits(column, (), ())
    stored = _get_list_path(identity, holdout_fraction)
    rows = np.flatnonzero(pool)
    before = _read_list(stored) if stored.exists() else {}
    held = _choose_held_out(rows, strata, get_name, wanted, holdout_fraction, before)
    out = column.copy()
    out[rows] = _TRAIN
    for row in rows.tolist():
        out[row] = held.get(get_name(row), _TRAIN)
    where = _write_list(stored, before | held, before)
    names = tuple(SPLITS[split] for split in sorted(wanted))
    sentence = f"no {' and '.join(names)} given: {holdout_fraction:.0%} of each class held out for {'each' if names[1:] else 'it'}"
    count = int((out[rows] != _TRAIN).sum())
    return CompletedSplits(out, names, (f"{sentence} ({pluralize(count, 'image')}, {where})",))


def _choose_held_out(
    rows: Array,
    strata: Array,
    get_name: Callable[[int], str],
    missing_splits: Sequence[int],
    holdout_fraction: float,
    stored_splits: dict[str, int],
) -> dict[str, int]:
    """Names to hold out: those stored, and of a class without any, those that have the smallest digests.

    A name that occurs twice goes where it went first, so that no image stands on both sides.
    """
    held: dict[str, int] = {}
    by_stratum: dict[int, dict[str, None]] = {}
    for row in rows.tolist():
        by_stratum.setdefault(int(strata[row]), {})[get_name(row)] = None
    for members in by_stratum.values():
        known = {text: stored_splits[text] for text in members if text in stored_splits}
        if not known and len(members) > 2:
            count = min(max(1, round(holdout_fraction * len(members))), (len(members) - 1) // len(missing_splits))
            ranked = sorted(members, key=_digest_name)
            known = {
                text: missing_splits[place // count] for place, text in enumerate(ranked[: count * len(missing_splits)])
            }
        held = known | held
    return held


def _digest_name(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def _get_list_path(identity: str, holdout_fraction: float) -> Path:
    digest = hashlib.sha256(f"{identity} {holdout_fraction}".encode(errors="surrogateescape")).hexdigest()[:12]
    word = "".join(c if c.isalnum() else "-" for c in Path(identity).name)[:40]
    return get_data_home() / "splits" / f"{word}-{digest}.csv"


def _read_list(path: Path) -> dict[str, int]:
    try:
        with path.open(newline="", errors="surrogateescape") as file:
            return {row["name"]: SPLITS.index(row["split"]) for row in csv.DictReader(file)}
    except (ValueError, KeyError, csv.Error) as error:
        raise DataError(f"{path}, which says what is held out, is damaged ({error}); repair or remove it") from error


def _write_list(path: Path, held_out: dict[str, int], previous: dict[str, int]) -> str:
    """Store what is held out, and say where; a home that cannot be written loses the list and not the run."""
    if held_out == previous:
        return f"listed in {path}"
    try:
        with (
            write_atomically(path, overwrite=True) as fresh,
            fresh.open("w", newline="", errors="surrogateescape") as file,
        ):
            rows = csv.writer(file)
            rows.writerow(("name", "split"))
            rows.writerows((text, SPLITS[split]) for text, split in sorted(held_out.items()))
    except OSError as error:
        return f"by their names; the list could not be stored: {error}"
    return f"listed in {path}"
