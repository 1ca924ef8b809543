"""A split where a set has none: stratified, the same on every machine, and written down.

An image's fate depends on its name alone, so another machine with the same folder splits alike. What was held out once
is stored and stays held out when the folder grows: an image that was tested on never becomes one that is trained on.
"""

import csv
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.data.dataset import SPLITS
from vitrail.data.table import Array
from vitrail.files import data_home, replacing

NO_SPLIT = -1
_TRAIN, _VAL, _TEST = range(3)
Column = NDArray[np.int8]


def completed(
    column: Column, strata: Array, name: Callable[[int], str], *, identity: str, share: float = 0.1
) -> tuple[Column, tuple[str, ...]]:
    """The split column with what is missing held out, and the sentences that say so.

    Without any split a `share` becomes val and as much test; with train but no val, a share of train becomes val.
    """
    known = set(np.unique(column).tolist())
    wanted: tuple[int, ...]
    if NO_SPLIT in known:
        wanted, pool = (_TEST, _VAL), column == NO_SPLIT
    elif _TRAIN in known and _VAL not in known:
        wanted, pool = (_VAL,), column == _TRAIN
    else:
        return column, ()
    stored = _stored_at(identity, share)
    rows = np.flatnonzero(pool)
    before = _read(stored) if stored.exists() else {}
    held = _held(rows, strata, name, wanted, share, before)
    out = column.copy()
    out[rows] = _TRAIN
    for row, split in held.items():
        out[row] = split
    where = _write(stored, before | {name(row): split for row, split in held.items()}, before)
    names = " and ".join(SPLITS[split] for split in sorted(wanted))
    sentence = f"no {names} given: {share:.0%} of each class held out for {'each' if len(wanted) > 1 else 'it'}"
    return out, (f"{sentence} ({len(held):,} images, {where})",)


def _held(
    rows: Array, strata: Array, name: Callable[[int], str], wanted: Sequence[int], share: float, stored: dict[str, int]
) -> dict[int, int]:
    """Rows to hold out: those stored, and of a class without any, those whose names have the smallest digests."""
    held: dict[int, int] = {}
    by_stratum: dict[int, list[int]] = {}
    for row in rows.tolist():
        by_stratum.setdefault(int(strata[row]), []).append(row)
    for members in by_stratum.values():
        names = {row: name(row) for row in members}
        known = {row: stored[text] for row, text in names.items() if text in stored}
        if not known:
            count = max(1, round(share * len(members))) if len(members) > len(wanted) else 0
            ranked = sorted(members, key=lambda row: _digest(names[row]))
            known = {row: wanted[place // count] for place, row in enumerate(ranked[: count * len(wanted)])}
        held |= known
    return held


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def _stored_at(identity: str, share: float) -> Path:
    digest = hashlib.sha256(f"{identity} {share}".encode(errors="surrogateescape")).hexdigest()[:12]
    word = "".join(c if c.isalnum() else "-" for c in Path(identity).name)[:40]
    return data_home() / "splits" / f"{word}-{digest}.csv"


def _read(path: Path) -> dict[str, int]:
    with path.open(newline="", errors="surrogateescape") as file:
        return {row["name"]: SPLITS.index(row["split"]) for row in csv.DictReader(file)}


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
