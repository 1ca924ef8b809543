"""A split where a set has none: stratified, the same on every machine, and written down.

An image's fate depends on its name alone, so another machine with the same folder splits alike. What was held out once
is stored and stays held out when the folder grows: an image that was tested on never becomes one that is trained on.
"""

import csv
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.dataset import SPLITS
from vitrail.data.table import Array
from vitrail.errors import DataError
from vitrail.files import data_home, replacing
from vitrail.plurals import plural

NO_SPLIT = -1
NOTHING_GIVEN = "no val and test given"
"""How the sentence begins of a dataset without any split."""
_TRAIN, _VAL, _TEST = range(3)
Column = NDArray[np.int8]


class Completed(NamedTuple):
    """The splits of a set, with those made up that it lacks."""

    column: Column
    made_up: tuple[str, ...]
    """The splits that were held out here."""
    notes: tuple[str, ...]


def completed(
    column: Column, strata: Array, name: Callable[[int], str], *, identity: str, share: float = 0.1
) -> Completed:
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
        return Completed(column, (), ())
    stored = _stored_at(identity, share)
    rows = np.flatnonzero(pool)
    before = _read(stored) if stored.exists() else {}
    held = _held(rows, strata, name, wanted, share, before)
    out = column.copy()
    out[rows] = _TRAIN
    for row in rows.tolist():
        out[row] = held.get(name(row), _TRAIN)
    where = _write(stored, before | held, before)
    names = tuple(SPLITS[split] for split in sorted(wanted))
    sentence = f"no {' and '.join(names)} given: {share:.0%} of each class held out for {'each' if names[1:] else 'it'}"
    count = int((out[rows] != _TRAIN).sum())
    return Completed(out, names, (f"{sentence} ({plural(count, 'image')}, {where})",))


def _held(
    rows: Array, strata: Array, name: Callable[[int], str], wanted: Sequence[int], share: float, stored: dict[str, int]
) -> dict[str, int]:
    """Names to hold out: those stored, and of a class without any, those that have the smallest digests.

    A name that occurs twice goes where it went first, so that no image stands on both sides.
    """
    held: dict[str, int] = {}
    by_stratum: dict[int, dict[str, None]] = {}
    for row in rows.tolist():
        by_stratum.setdefault(int(strata[row]), {})[name(row)] = None
    for members in by_stratum.values():
        known = {text: stored[text] for text in members if text in stored}
        if not known and len(members) > 2:
            count = min(max(1, round(share * len(members))), (len(members) - 1) // len(wanted))
            ranked = sorted(members, key=_digest)
            known = {text: wanted[place // count] for place, text in enumerate(ranked[: count * len(wanted)])}
        held = known | held
    return held


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def _stored_at(identity: str, share: float) -> Path:
    digest = hashlib.sha256(f"{identity} {share}".encode(errors="surrogateescape")).hexdigest()[:12]
    word = "".join(c if c.isalnum() else "-" for c in Path(identity).name)[:40]
    return data_home() / "splits" / f"{word}-{digest}.csv"


def _read(path: Path) -> dict[str, int]:
    try:
        with path.open(newline="", errors="surrogateescape") as file:
            return {row["name"]: SPLITS.index(row["split"]) for row in csv.DictReader(file)}
    except (ValueError, KeyError, csv.Error) as error:
        raise DataError(f"{path}, which says what is held out, is damaged ({error}); repair or remove it") from error


def _write(path: Path, held: dict[str, int], before: dict[str, int]) -> str:
    """Store what is held out, and say where; a home that cannot be written loses the list and not the run."""
    if held == before:
        return f"listed in {path}"
    try:
        with replacing(path, overwrite=True) as fresh, fresh.open("w", newline="", errors="surrogateescape") as file:
            rows = csv.writer(file)
            rows.writerow(("name", "split"))
            rows.writerows((text, SPLITS[split]) for text, split in sorted(held.items()))
    except OSError as error:
        return f"by their names; the list could not be stored: {error}"
    return f"listed in {path}"
