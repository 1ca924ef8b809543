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

from vitrail.data import counter_rng, duplicates
from vitrail.data.dataset import SPLITS, Dataset
from vitrail.data.image_headers import FORMATS
from vitrail.data.image_scan import BAD, DECODED, HEADER_ONLY, MAX_DECODED_IMAGES, DatasetScan
from vitrail.data.order import permute_indices
from vitrail.errors import DataError, UsageError

REPORT_VERSION = 1


def audit_dataset(scan: DatasetScan, against_scan: DatasetScan | None = None) -> dict[str, Any]:
    """The contents of data_report.json, of what was seen of a set, and of one that it should not show."""
    dataset, status = scan.dataset, scan.image_facts["status"]
    groups = _find_duplicate_groups(scan)
    report: dict[str, Any] = {
        "version": REPORT_VERSION,
        "data": dataset.name,
        "notes": list(dataset.notes),
        "images": {name: len(split) for name, split in dataset.splits.items()},
        "decoded": int((status == DECODED).sum()),
        "headers_only": int((status == HEADER_ONLY).sum()),
        "from_earlier_check": scan.cached_count,
        "contents": _digest_contents(scan),
        "bad": [
            {"split": scan.get_split_name(image), "name": scan.get_image_name(image), "reason": scan.bad_reasons[image]}
            for image in np.flatnonzero(status == BAD).tolist()
        ],
        "classes": _list_class_counts(dataset),
        "empty_classes": list(dataset.empty_classes),
        "question": dataset.layout_warning,
        "several_labels": dataset.multi_label,
        **_summarize_sizes(scan),
        "colour": _summarize_color(scan),
        "duplicates": _describe_groups(scan, groups),
    }
    unwanted = {(row["split"], row["name"]) for row in report["bad"]} | set(_find_leaks(scan, groups))
    if against_scan is not None:
        report["against"] = _find_shared_images(scan, against_scan)
        unwanted |= {(row["split"], row["name"]) for row in report["against"]["found"]}
    report["leave_out"] = [{"split": split, "name": name} for split, name in sorted(unwanted)]
    return report


def _digest_contents(scan: DatasetScan) -> str:
    """One digest of all images' contents, by which a later run knows them; empty where not all were decoded."""
    whole = bool((scan.image_facts["status"] == DECODED).all())
    return hashlib.sha256(np.ascontiguousarray(scan.image_facts["digest"]).tobytes()).hexdigest() if whole else ""


def _list_class_counts(dataset: Dataset) -> list[dict[str, Any]]:
    counts = {name: split.count_per_class(len(dataset.classes)) for name, split in dataset.splits.items()}
    return [
        {"name": name, **{split: int(column[place]) for split, column in counts.items()}}
        for place, name in enumerate(dataset.classes)
    ]


def _summarize_sizes(scan: DatasetScan) -> dict[str, Any]:
    good = scan.image_facts[scan.image_facts["status"] != BAD]
    sizes = {}
    for side in ("width", "height"):
        values = good[side] if len(good) else np.zeros(1)
        sizes[side] = {"least": int(values.min()), "median": int(np.median(values)), "most": int(values.max())}
    formats = Counter(FORMATS[place] for place in good["format"].tolist())
    return {"sizes": sizes, "formats": dict(formats.most_common())}


def _summarize_color(scan: DatasetScan) -> dict[str, Any]:
    """Mean and standard deviation of the pixels of train, or of all where there is none; every image counts alike."""
    names = list(scan.dataset.splits)
    of = "train" if "train" in names else "all"
    use = scan.image_facts["status"] == DECODED
    if of == "train":
        use &= scan.split_index == names.index("train")
    facts = scan.image_facts[use]
    if not len(facts):
        return {"of": of, "images": 0, "mean": None, "std": None, "grey": 0}
    mean, square = facts["mean"].mean(axis=0, dtype=np.float64), facts["square"].mean(axis=0, dtype=np.float64)
    std = np.sqrt(np.maximum(square - mean**2, 0))
    grey = int(facts["grey"].sum())
    return {"of": of, "images": len(facts), "mean": mean.round(4).tolist(), "std": std.round(4).tolist(), "grey": grey}


# --- copies ----------------------------------------------------------------------------------------------------------


class _DuplicateGroup(NamedTuple):
    """Images that show the same picture."""

    kind: str
    """exact: equal files. near: some are resized, encoded again, cropped, mirrored or recoloured."""
    images: tuple[int, ...]


def _find_duplicate_groups(scan: DatasetScan) -> list[_DuplicateGroup]:
    """The images that occur more than once, each with all of its copies, among LIMIT of them at most."""
    rows, places = _select_fingerprints(scan)
    if len(places) > MAX_DECODED_IMAGES:
        some = np.sort(permute_indices(np.arange(MAX_DECODED_IMAGES), len(places), counter_rng.derive_key(0, "copies")))
        rows, places = rows[some], places[some]
    digests = scan.image_facts["digest"]
    equal = [places[group] for group in _group_equal_digests(digests[places])]
    keep = ~np.isin(places, np.concatenate([np.empty(0, dtype=np.int64), *(group[1:] for group in equal)]))
    near = places[keep][
        duplicates.find_duplicate_pairs(rows[keep]).indices
    ]  # of equal files one is compared, and stands for all
    pairs = [(int(group[0]), int(image)) for group in equal for image in group[1:]]
    joined = _find_connected_groups(pairs + [(one, two) for one, two in near.tolist()])
    return [
        _DuplicateGroup("exact" if len(set(digests[list(group)].tolist())) == 1 else "near", group) for group in joined
    ]


def _select_fingerprints(scan: DatasetScan) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The fingerprints of the decoded images, and which images those are."""
    good = scan.image_facts["status"][scan.fingerprinted_images] == DECODED
    return scan.fingerprints[good], scan.fingerprinted_images[good]


def _group_equal_digests(digests: NDArray[Any]) -> list[NDArray[np.int64]]:
    """Groups of places with equal digests."""
    order = np.argsort(digests, kind="stable")
    ordered = digests[order]
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    return [np.sort(group) for group in np.split(order, cuts) if len(group) > 1]


def _find_connected_groups(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The connected groups of a list of pairs."""
    leader: dict[int, int] = {}

    def find_root(image: int) -> int:
        while leader.setdefault(image, image) != image:
            leader[image] = leader[leader[image]]
            image = leader[image]
        return image

    for one, two in pairs:
        leader[find_root(two)] = find_root(one)
    groups: dict[int, list[int]] = {}
    for image in sorted(leader):
        groups.setdefault(find_root(image), []).append(image)
    return sorted(tuple(group) for group in groups.values())


def _describe_groups(scan: DatasetScan, groups: Sequence[_DuplicateGroup]) -> dict[str, Any]:
    return {
        "compared": min(
            MAX_DECODED_IMAGES, int((scan.image_facts["status"][scan.fingerprinted_images] == DECODED).sum())
        ),
        "of": len(scan.image_facts),
        "exact": sum(group.kind == "exact" for group in groups),
        "near": sum(group.kind == "near" for group in groups),
        "across_splits": sum(len({int(scan.split_index[image]) for image in group.images}) > 1 for group in groups),
        "different_labels": sum(len({scan.get_image_labels(image) for image in group.images}) > 1 for group in groups),
        "groups": [
            {
                "kind": group.kind,
                "images": [
                    {
                        "split": scan.get_split_name(image),
                        "name": scan.get_image_name(image),
                        "labels": _get_label_names(scan, image),
                    }
                    for image in group.images
                ],
            }
            for group in groups
        ],
    }


def _get_label_names(scan: DatasetScan, image: int) -> list[str]:
    return [scan.dataset.classes[label] for label in scan.get_image_labels(image)]


def _find_leaks(scan: DatasetScan, groups: Sequence[_DuplicateGroup]) -> Iterator[tuple[str, str]]:
    """Training images that show what val or test shows, and validation images that show what test shows."""
    for group in groups:
        last = max(SPLITS.index(scan.get_split_name(image)) for image in group.images)
        for image in group.images:
            if SPLITS.index(scan.get_split_name(image)) < last:
                yield scan.get_split_name(image), scan.get_image_name(image)


def keep_eval_splits(dataset: Dataset) -> Dataset:
    """The dataset's own val and test alone, which others should not show; all of it where it has neither."""
    own = _list_own_eval_splits(dataset)
    return dataclasses.replace(dataset, splits={name: dataset.splits[name] for name in own}) if own else dataset


def _list_own_eval_splits(dataset: Dataset) -> list[str]:
    return [name for name in dataset.splits if name != "train" and name not in dataset.generated_splits]


def _find_shared_images(scan: DatasetScan, against_scan: DatasetScan) -> dict[str, Any]:
    """The images of one set that another shows too: in its own val and test, or anywhere where it has neither."""
    own = _list_own_eval_splits(against_scan.dataset)
    held = [place for place, name in enumerate(against_scan.dataset.splits) if name in own]
    mine, places = _select_fingerprints(scan)
    theirs, others = _select_fingerprints(against_scan)
    if held:
        use = np.isin(against_scan.split_index[others], held)
        theirs, others = theirs[use], others[use]
    known: dict[bytes, int] = {against_scan.image_facts["digest"][image].tobytes(): int(image) for image in others}
    found = {
        int(image): ("exact", known[key])
        for image in places
        if (key := scan.image_facts["digest"][image].tobytes()) in known
    }
    for start in range(
        0, len(mine), MAX_DECODED_IMAGES
    ):  # part by part, so that a large dataset needs no more memory at once
        for one, two in duplicates.find_duplicate_pairs(
            mine[start : start + MAX_DECODED_IMAGES], theirs
        ).indices.tolist():
            found.setdefault(int(places[start + one]), ("near", int(others[two])))
    return {
        "data": against_scan.dataset.name,
        "compared": len(others),
        "of": int(np.isin(against_scan.split_index, held).sum()) if held else len(against_scan.split_index),
        "searched": len(places),
        "searched_of": len(scan.split_index),
        "found": [
            {
                "kind": kind,
                "split": scan.get_split_name(image),
                "name": scan.get_image_name(image),
                "shows": against_scan.get_image_name(shown),
            }
            for image, (kind, shown) in sorted(found.items())
        ],
    }


def read_excluded_images(path: Path, dataset: Dataset) -> frozenset[tuple[str, str]]:
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
