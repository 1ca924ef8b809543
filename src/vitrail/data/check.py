"""What a set is worth: its bad files, its copies, its classes and colours, before anyone trains on it.

The paper removes from its pre-training sets what occurs in the test sets; `against` finds those images.
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data import draws, duplicates
from vitrail.data.dataset import SPLITS, Dataset
from vitrail.data.decode import FORMATS
from vitrail.data.examine import BAD, DECODED, HEADER, LIMIT, Examined
from vitrail.data.order import permuted
from vitrail.errors import DataError, UsageError

VERSION = 1


def check(seen: Examined, against: Examined | None = None) -> dict[str, Any]:
    """The contents of data_report.json, of what was seen of a set, and of one that it should not show."""
    dataset, status = seen.dataset, seen.facts["status"]
    groups = _groups(seen)
    report: dict[str, Any] = {
        "version": VERSION,
        "data": dataset.name,
        "notes": list(dataset.notes),
        "images": {name: len(split) for name, split in dataset.splits.items()},
        "decoded": int((status == DECODED).sum()),
        "headers_only": int((status == HEADER).sum()),
        "from_earlier_check": seen.recalled,
        "contents": _digest_contents(seen),
        "bad": [
            {"split": seen.split_name(image), "name": seen.name(image), "reason": seen.reasons[image]}
            for image in np.flatnonzero(status == BAD).tolist()
        ],
        "classes": _classes(dataset),
        "empty_classes": list(dataset.empty_classes),
        "question": dataset.question,
        "several_labels": dataset.several,
        **_sizes(seen),
        "colour": _colour(seen),
        "duplicates": _described(seen, groups),
    }
    unwanted = {(row["split"], row["name"]) for row in report["bad"]} | set(_leaks(seen, groups))
    if against is not None:
        report["against"] = _against(seen, against)
        unwanted |= {(row["split"], row["name"]) for row in report["against"]["found"]}
    report["leave_out"] = [{"split": split, "name": name} for split, name in sorted(unwanted)]
    return report


def _digest_contents(seen: Examined) -> str:
    """One digest of all images' contents, by which a later run knows them; empty where not all were decoded."""
    whole = bool((seen.facts["status"] == DECODED).all())
    return hashlib.sha256(np.ascontiguousarray(seen.facts["digest"]).tobytes()).hexdigest() if whole else ""


def _classes(dataset: Dataset) -> list[dict[str, Any]]:
    counts = {name: split.counts(len(dataset.classes)) for name, split in dataset.splits.items()}
    return [
        {"name": name, **{split: int(column[place]) for split, column in counts.items()}}
        for place, name in enumerate(dataset.classes)
    ]


def _sizes(seen: Examined) -> dict[str, Any]:
    good = seen.facts[seen.facts["status"] != BAD]
    sizes = {}
    for side in ("width", "height"):
        values = good[side] if len(good) else np.zeros(1)
        sizes[side] = {"least": int(values.min()), "median": int(np.median(values)), "most": int(values.max())}
    formats = Counter(FORMATS[place] for place in good["format"].tolist())
    return {"sizes": sizes, "formats": dict(formats.most_common())}


def _colour(seen: Examined) -> dict[str, Any]:
    """Mean and standard deviation of the pixels of train, or of all where there is none; every image counts alike."""
    names = list(seen.dataset.splits)
    of = "train" if "train" in names else "all"
    use = seen.facts["status"] == DECODED
    if of == "train":
        use &= seen.split == names.index("train")
    facts = seen.facts[use]
    if not len(facts):
        return {"of": of, "images": 0, "mean": None, "std": None, "grey": 0}
    mean, square = facts["mean"].mean(axis=0, dtype=np.float64), facts["square"].mean(axis=0, dtype=np.float64)
    std = np.sqrt(np.maximum(square - mean**2, 0))
    grey = int(facts["grey"].sum())
    return {"of": of, "images": len(facts), "mean": mean.round(4).tolist(), "std": std.round(4).tolist(), "grey": grey}


# --- copies ----------------------------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """Images that show the same picture."""

    kind: str
    """exact: equal files. near: some are resized, encoded again, cropped, mirrored or recoloured."""
    images: tuple[int, ...]


def _groups(seen: Examined) -> list[_Group]:
    """The images that occur more than once, each with all of its copies, among LIMIT of them at most."""
    rows, places = _prints(seen)
    if len(places) > LIMIT:
        some = np.sort(permuted(np.arange(LIMIT), len(places), draws.key(0, "copies")))
        rows, places = rows[some], places[some]
    digests = seen.facts["digest"]
    equal = [places[group] for group in _equal(digests[places])]
    keep = ~np.isin(places, np.concatenate([np.empty(0, dtype=np.int64), *(group[1:] for group in equal)]))
    near = places[keep][duplicates.pairs(rows[keep]).indices]  # of equal files one is compared, and stands for all
    pairs = [(int(group[0]), int(image)) for group in equal for image in group[1:]]
    joined = _joined(pairs + [(one, two) for one, two in near.tolist()])
    return [_Group("exact" if len(set(digests[list(group)].tolist())) == 1 else "near", group) for group in joined]


def _prints(seen: Examined) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The fingerprints of the decoded images, and which images those are."""
    good = seen.facts["status"][seen.fingerprinted] == DECODED
    return seen.fingerprints[good], seen.fingerprinted[good]


def _equal(digests: NDArray[Any]) -> list[NDArray[np.int64]]:
    """Groups of places with equal digests."""
    order = np.argsort(digests, kind="stable")
    ordered = digests[order]
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    return [np.sort(group) for group in np.split(order, cuts) if len(group) > 1]


def _joined(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The connected groups of a list of pairs."""
    leader: dict[int, int] = {}

    def find(image: int) -> int:
        while leader.setdefault(image, image) != image:
            leader[image] = leader[leader[image]]
            image = leader[image]
        return image

    for one, two in pairs:
        leader[find(two)] = find(one)
    groups: dict[int, list[int]] = {}
    for image in sorted(leader):
        groups.setdefault(find(image), []).append(image)
    return sorted(tuple(group) for group in groups.values())


def _described(seen: Examined, groups: Sequence[_Group]) -> dict[str, Any]:
    return {
        "compared": min(LIMIT, int((seen.facts["status"][seen.fingerprinted] == DECODED).sum())),
        "of": len(seen.facts),
        "exact": sum(group.kind == "exact" for group in groups),
        "near": sum(group.kind == "near" for group in groups),
        "across_splits": sum(len({int(seen.split[image]) for image in group.images}) > 1 for group in groups),
        "different_labels": sum(len({seen.labels(image) for image in group.images}) > 1 for group in groups),
        "groups": [
            {
                "kind": group.kind,
                "images": [
                    {"split": seen.split_name(image), "name": seen.name(image), "labels": _names(seen, image)}
                    for image in group.images
                ],
            }
            for group in groups
        ],
    }


def _names(seen: Examined, image: int) -> list[str]:
    return [seen.dataset.classes[label] for label in seen.labels(image)]


def _leaks(seen: Examined, groups: Sequence[_Group]) -> Iterator[tuple[str, str]]:
    """Training images that show what val or test shows, and validation images that show what test shows."""
    for group in groups:
        last = max(SPLITS.index(seen.split_name(image)) for image in group.images)
        for image in group.images:
            if SPLITS.index(seen.split_name(image)) < last:
                yield seen.split_name(image), seen.name(image)


def keep_held_out(dataset: Dataset) -> Dataset:
    """The dataset's own val and test alone, which others should not show; all of it where it has neither."""
    own = _held_out(dataset)
    return dataclasses.replace(dataset, splits={name: dataset.splits[name] for name in own}) if own else dataset


def _held_out(dataset: Dataset) -> list[str]:
    return [name for name in dataset.splits if name != "train" and name not in dataset.made_up]


def _against(seen: Examined, other: Examined) -> dict[str, Any]:
    """The images of one set that another shows too: in its own val and test, or anywhere where it has neither."""
    own = _held_out(other.dataset)
    held = [place for place, name in enumerate(other.dataset.splits) if name in own]
    mine, places = _prints(seen)
    theirs, others = _prints(other)
    if held:
        use = np.isin(other.split[others], held)
        theirs, others = theirs[use], others[use]
    known: dict[bytes, int] = {other.facts["digest"][image].tobytes(): int(image) for image in others}
    found = {
        int(image): ("exact", known[key]) for image in places if (key := seen.facts["digest"][image].tobytes()) in known
    }
    for start in range(0, len(mine), LIMIT):  # part by part, so that a large dataset needs no more memory at once
        for one, two in duplicates.pairs(mine[start : start + LIMIT], theirs).indices.tolist():
            found.setdefault(int(places[start + one]), ("near", int(others[two])))
    return {
        "data": other.dataset.name,
        "compared": len(others),
        "of": int(np.isin(other.split, held).sum()) if held else len(other.split),
        "searched": len(places),
        "searched_of": len(seen.split),
        "found": [
            {"kind": kind, "split": seen.split_name(image), "name": seen.name(image), "shows": other.name(shown)}
            for image, (kind, shown) in sorted(found.items())
        ],
    }


def to_leave_out(path: Path, dataset: Dataset) -> frozenset[tuple[str, str]]:
    """The images that a set's data_report.json says it is better without: the split and the name of each."""
    try:
        report = json.loads(path.read_text())
        named = str(report["data"])
        found = frozenset((str(row["split"]), str(row["name"])) for row in report["leave_out"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no data_report.json ({error}): vitrail data check DATA writes one") from error
    if named != dataset.name:
        raise UsageError(f"{path} is the report of {named}, not of {dataset.name}: vitrail data check writes its own")
    return found
