"""The audit of a dataset before training: bad files, duplicates, classes, sizes and colors.

The paper removes test images from its pre-training datasets; `against_scan` finds such images.
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data import duplicates
from vitrail.data.dataset import SPLITS, Dataset
from vitrail.data.image_headers import FORMATS
from vitrail.data.image_scan import BAD, DECODED, HEADER_ONLY, MAX_DECODED_IMAGES, DatasetScan
from vitrail.data.randomness import IntArray, sample_sorted_indices
from vitrail.errors import DataError, UsageError

REPORT_VERSION = 2
MAX_LISTED_PAIRS = 1000
"""Of pairs by features, the report lists so many at most."""
_OLD_KEYS = {  # keys of version 1, by the section of the report
    "": {"several_labels": "multi_label", "colour": "color", "question": "layout_warning"},
    "color": {"grey": "gray", "of": "split"},
    "duplicates": {"of": "total"},
    "against": {"of": "total", "searched_of": "searched_total", "found": "matches"},
    "width": {"least": "min", "most": "max"},
    "height": {"least": "min", "most": "max"},
    "matches": {"shows": "matched_name"},
}


class EmbeddingPairs(NamedTuple):
    """Probable duplicates by a model's features, the likeliest first."""

    model: str
    threshold: float
    compared: int  # images
    images: IntArray  # (p, 2), indices in the scan
    scores: NDArray[np.float32]  # (p,)


def audit_dataset(
    scan: DatasetScan, against_scan: DatasetScan | None = None, embedding_pairs: EmbeddingPairs | None = None
) -> dict[str, Any]:
    """The contents of data_report.json for a scanned dataset, and for one with which it should share no image."""
    dataset, status = scan.dataset, scan.image_facts["status"]
    groups = find_duplicate_groups(scan)
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
            {**_locate(scan, image), "reason": scan.bad_reasons[image]}
            for image in np.flatnonzero(status == BAD).tolist()
        ],
        "classes": _list_class_counts(dataset),
        "empty_classes": list(dataset.empty_classes),
        "layout_warning": dataset.layout_warning,
        "multi_label": dataset.multi_label,
        **_summarize_sizes(scan),
        "color": _summarize_color(scan),
        "duplicates": _describe_groups(scan, groups),
    }
    if embedding_pairs is not None:
        report["embedding"] = _describe_embedding_pairs(scan, groups, embedding_pairs)
    excluded = [*report["bad"], *_find_leaks(scan, groups)]
    if against_scan is not None:
        report["against"] = _find_shared_images(scan, against_scan)
        excluded += report["against"]["matches"]
    pairs = {(row["split"], row["name"]) for row in excluded}
    report["leave_out"] = [{"split": split, "name": name} for split, name in sorted(pairs)]
    return report


def upgrade_report(report: Any, section: str = "") -> Any:
    """A data report with the keys of the current version, whichever version wrote it."""
    if isinstance(report, list):
        return [upgrade_report(item, section) for item in report]
    if not isinstance(report, dict):
        return report
    keys: dict[Any, Any] = _OLD_KEYS.get(section, {})
    renamed = {keys.get(key, key): value for key, value in report.items()}
    return {key: upgrade_report(value, str(key)) for key, value in renamed.items()}


def _digest_contents(scan: DatasetScan) -> str:
    """One digest of all images' contents, which identifies them to later runs; empty if not all were decoded."""
    all_decoded = bool((scan.image_facts["status"] == DECODED).all())
    return hashlib.sha256(np.ascontiguousarray(scan.image_facts["digest"]).tobytes()).hexdigest() if all_decoded else ""


def _list_class_counts(dataset: Dataset) -> list[dict[str, Any]]:
    counts = {name: split.count_per_class(len(dataset.classes)) for name, split in dataset.splits.items()}
    return [
        {"name": name, **{split: int(class_counts[label]) for split, class_counts in counts.items()}}
        for label, name in enumerate(dataset.classes)
    ]


def _summarize_sizes(scan: DatasetScan) -> dict[str, Any]:
    good = scan.image_facts[scan.image_facts["status"] != BAD]
    sizes = {}
    for side in ("width", "height"):
        values = good[side] if len(good) else np.zeros(1)
        sizes[side] = {"min": int(values.min()), "median": int(np.median(values)), "max": int(values.max())}
    formats = Counter(FORMATS[number] for number in good["format"].tolist())
    return {"sizes": sizes, "formats": dict(formats.most_common())}


def _summarize_color(scan: DatasetScan) -> dict[str, Any]:
    """Mean and standard deviation of the pixels of train, or of all images if there is none; images weigh the same."""
    names = list(scan.dataset.splits)
    split = "train" if "train" in names else "all"
    selected = scan.image_facts["status"] == DECODED
    if split == "train":
        selected &= scan.split_index == names.index("train")
    facts = scan.image_facts[selected]
    if not len(facts):
        return {"split": split, "images": 0, "mean": None, "std": None, "gray": 0}
    mean, square = facts["mean"].mean(axis=0, dtype=np.float64), facts["square"].mean(axis=0, dtype=np.float64)
    std = np.sqrt(np.maximum(square - mean**2, 0))
    return {
        "split": split,
        "images": len(facts),
        "mean": mean.round(4).tolist(),
        "std": std.round(4).tolist(),
        "gray": int(facts["gray"].sum()),
    }


# --- duplicates ------------------------------------------------------------------------------------------------------


def find_duplicate_groups(scan: DatasetScan) -> list[tuple[int, ...]]:
    """The images that occur more than once, each with all its duplicates, among MAX_DECODED_IMAGES at most."""
    fingerprints, images = _select_fingerprints(scan)
    if len(images) > MAX_DECODED_IMAGES:
        sample = sample_sorted_indices(MAX_DECODED_IMAGES, len(images), "copies")
        fingerprints, images = fingerprints[sample], images[sample]
    digests = scan.image_facts["digest"]
    equal = [images[group] for group in _group_equal_digests(digests[images])]
    # Of equal files only the first is compared with others.
    keep = ~np.isin(images, np.concatenate([np.empty(0, dtype=np.int64), *(group[1:] for group in equal)]))
    near_pairs = images[keep][duplicates.find_duplicate_pairs(fingerprints[keep]).indices]
    equal_pairs = [(int(group[0]), int(image)) for group in equal for image in group[1:]]
    return _find_connected_groups([*equal_pairs, *near_pairs.tolist()])


def _select_fingerprints(scan: DatasetScan) -> tuple[NDArray[np.uint8], IntArray]:
    """The fingerprints of the decoded images, and the indices of these images."""
    good = scan.image_facts["status"][scan.fingerprinted_images] == DECODED
    return scan.fingerprints[good], scan.fingerprinted_images[good]


def _group_equal_digests(digests: NDArray[Any]) -> list[IntArray]:
    """Groups of indices with equal digests."""
    order = np.argsort(digests, kind="stable")
    ordered = digests[order]
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    return [np.sort(group) for group in np.split(order, cuts) if len(group) > 1]


def _find_connected_groups(pairs: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """The connected groups of a list of pairs."""
    leader: dict[int, int] = {}

    def find_root(image: int) -> int:
        while leader.setdefault(image, image) != image:
            leader[image] = leader[leader[image]]
            image = leader[image]
        return image

    for first, second in pairs:
        leader[find_root(second)] = find_root(first)
    groups: dict[int, list[int]] = {}
    for image in sorted(leader):
        groups.setdefault(find_root(image), []).append(image)
    return sorted(tuple(group) for group in groups.values())


def _describe_groups(scan: DatasetScan, groups: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """What the report says of groups. exact: equal files. near: some are resized, cropped, recolored or the like."""
    decoded = int((scan.image_facts["status"][scan.fingerprinted_images] == DECODED).sum())
    digests, classes = scan.image_facts["digest"], scan.dataset.classes
    kinds = ["exact" if len(set(digests[list(group)].tolist())) == 1 else "near" for group in groups]
    images = [
        [
            {**_locate(scan, image), "labels": [classes[label] for label in scan.get_image_labels(image)]}
            for image in group
        ]
        for group in groups
    ]
    return {
        "compared": min(MAX_DECODED_IMAGES, decoded),
        "total": len(scan.image_facts),
        "exact": kinds.count("exact"),
        "near": kinds.count("near"),
        "across_splits": sum(len({scan.get_split_name(image) for image in group}) > 1 for group in groups),
        "different_labels": sum(len({scan.get_image_labels(image) for image in group}) > 1 for group in groups),
        "groups": [{"kind": kind, "images": described} for kind, described in zip(kinds, images, strict=True)],
    }


def _describe_embedding_pairs(
    scan: DatasetScan, groups: Sequence[tuple[int, ...]], pairs: EmbeddingPairs
) -> dict[str, Any]:
    """What the report says of pairs by features that fingerprints do not join. They are for eyes, not left out."""
    group_of_image = {image: number for number, group in enumerate(groups) for image in group}
    described = []
    for images, score in zip(pairs.images.tolist(), pairs.scores.tolist(), strict=True):
        first, second = (group_of_image.get(image, -1 - image) for image in images)
        if first != second:
            labels = [[scan.dataset.classes[label] for label in scan.get_image_labels(image)] for image in images]
            located = [{**_locate(scan, image), "labels": names} for image, names in zip(images, labels, strict=True)]
            described.append({"score": round(score, 4), "images": located})
    return {
        "model": pairs.model,
        "threshold": pairs.threshold,
        "compared": pairs.compared,
        "also_by_fingerprints": len(pairs.images) - len(described),
        "new_pairs": len(described),
        "across_splits": sum(_differ(pair, "split") for pair in described),
        "different_labels": sum(_differ(pair, "labels") for pair in described),
        "pairs": described[:MAX_LISTED_PAIRS],
    }


def _differ(pair: dict[str, Any], key: str) -> bool:
    first, second = pair["images"]
    return first[key] != second[key]


def _locate(scan: DatasetScan, image: int) -> dict[str, str]:
    return {"split": scan.get_split_name(image), "name": scan.get_image_name(image)}


def _find_leaks(scan: DatasetScan, groups: Sequence[tuple[int, ...]]) -> Iterator[dict[str, str]]:
    """Training images with duplicates in val or test, and val images with some in test."""
    for group in groups:
        ranks = {image: SPLITS.index(scan.get_split_name(image)) for image in group}
        yield from (_locate(scan, image) for image in group if ranks[image] < max(ranks.values()))


def keep_eval_splits(dataset: Dataset) -> Dataset:
    """The dataset with only its own val and test, which others should not contain; all of it if it has neither."""
    names = _list_own_eval_splits(dataset)
    return dataclasses.replace(dataset, splits={name: dataset.splits[name] for name in names}) if names else dataset


def _list_own_eval_splits(dataset: Dataset) -> list[str]:
    return [name for name in dataset.splits if name != "train" and name not in dataset.generated_splits]


def _find_shared_images(scan: DatasetScan, against_scan: DatasetScan) -> dict[str, Any]:
    """The images of one dataset with duplicates in the other's own val and test, or anywhere if it has neither."""
    eval_names = _list_own_eval_splits(against_scan.dataset)
    eval_splits = [number for number, name in enumerate(against_scan.dataset.splits) if name in eval_names]
    fingerprints, images = _select_fingerprints(scan)
    other_fingerprints, other_images = _select_fingerprints(against_scan)
    total = len(against_scan.split_index)
    if eval_splits:
        selected = np.isin(against_scan.split_index[other_images], eval_splits)
        other_fingerprints, other_images = other_fingerprints[selected], other_images[selected]
        total = int(np.isin(against_scan.split_index, eval_splits).sum())
    other_digests = against_scan.image_facts["digest"]
    image_of_digest = {other_digests[image].tobytes(): int(image) for image in other_images}
    matches = {
        int(image): ("exact", image_of_digest[digest])
        for image in images
        if (digest := scan.image_facts["digest"][image].tobytes()) in image_of_digest
    }
    for start in range(0, len(images), MAX_DECODED_IMAGES):  # in blocks, which bounds the memory of a large dataset
        block = fingerprints[start : start + MAX_DECODED_IMAGES]
        for first, second in duplicates.find_duplicate_pairs(block, other_fingerprints).indices.tolist():
            matches.setdefault(int(images[start + first]), ("near", int(other_images[second])))
    return {
        "data": against_scan.dataset.name,
        "compared": len(other_images),
        "total": total,
        "searched": len(images),
        "searched_total": len(scan.split_index),
        "matches": [
            {"kind": kind, **_locate(scan, image), "matched_name": against_scan.get_image_name(match)}
            for image, (kind, match) in sorted(matches.items())
        ],
    }


def read_excluded_images(path: Path, dataset: Dataset) -> frozenset[tuple[str, str]]:
    """The split and name of each image that a dataset's data_report.json lists to leave out."""
    try:
        report = upgrade_report(json.loads(path.read_text()))
        name = str(report["data"])
        excluded = frozenset((str(row["split"]), str(row["name"])) for row in report["leave_out"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a data_report.json ({error}): vitrail data check DATA writes one") from error
    if name != dataset.name:
        raise UsageError(f"{path} is the report of {name}, not of {dataset.name}: vitrail data check writes its own")
    return excluded
