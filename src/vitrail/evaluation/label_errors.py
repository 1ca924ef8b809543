"""Likely label errors of a dataset: features, cross-validated probabilities, and confident learning on them.

n images, of all chosen splits   D features   L classes
"""

import dataclasses
from collections import Counter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.audit import find_duplicate_groups
from vitrail.data.dataset import MAX_BAD_FRACTION, Dataset, without_images
from vitrail.data.image_scan import BAD, DatasetScan, scan_dataset
from vitrail.data.randomness import IntArray
from vitrail.data.sources import advise_data_check
from vitrail.errors import DataError, UsageError
from vitrail.evaluation import confident_learning, features
from vitrail.evaluation.cross_validation import assign_folds, compute_out_of_fold_probabilities
from vitrail.evaluation.linear_classifiers import Features
from vitrail.evaluation.probe_run import ProbeSettings, extract_dataset_features
from vitrail.formatting import pluralize
from vitrail.weights.trained import Trained

SuspectSplit = Literal["train", "val", "test", "all"]
DEFAULT_FOLDS = 5
MIN_CLASS_IMAGES = 2  # of a class with one image, a classifier that was not trained on it knows nothing


class Suspect(NamedTuple):
    """An image whose label is probably wrong."""

    split: str
    position: int
    """In the split of the dataset that was searched."""
    image: str
    label: str
    likely_label: str
    label_probability: float
    likely_probability: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelErrors:
    """The search of a dataset for label errors."""

    dataset: Dataset
    """What was searched: the chosen splits, without unreadable images."""
    features: Features
    """Of all images, split after split, with their labels."""
    probabilities: Tensor
    """float64 (n, L): of each image, by a classifier that was not trained on it or on its duplicates."""
    suspects: tuple[int, ...]
    """The images whose labels are probably wrong, the least probable label first."""
    unjudged: int
    """Images of classes with so few images that their labels cannot be judged."""

    def list_suspects(self) -> list[Suspect]:
        """The suspects, in their order."""
        return [self.describe(image) for image in self.suspects]

    def describe(self, image: int) -> Suspect:
        """An image, its label and the most probable other class."""
        split, index = self.locate(image)
        row, label = self.probabilities[image], int(self.features.targets[image])
        likely = int(confident_learning.find_likely_labels(row[None], self.features.targets[image, None]))
        classes = self.dataset.classes
        name = self.dataset.splits[split].get_image_name(index)
        return Suspect(split, index, name, classes[label], classes[likely], float(row[label]), float(row[likely]))

    def locate(self, image: int) -> tuple[str, int]:
        """The split of an image, and its index there."""
        for name, split in self.dataset.splits.items():
            if image < len(split):
                return name, image
            image -= len(split)
        raise IndexError(image)

    def count_pairs(self) -> list[tuple[str, str, int]]:
        """Label, likely label and number of suspects of each such pair, the most frequent first."""
        pairs = Counter((suspect.label, suspect.likely_label) for suspect in self.list_suspects())
        return [(*pair, count) for pair, count in pairs.most_common()]

    def find_neighbors(self, image: int, label: int, count: int) -> list[int]:
        """The images of a class that are most similar to an image, of which no label is suspected."""
        candidates = self.features.targets == label
        candidates[list(self.suspects)] = False
        candidates[image] = False
        rows = candidates.nonzero()[:, 0]
        similarities = F.cosine_similarity(self.features.values[rows], self.features.values[image, None])
        return rows[similarities.argsort(descending=True)[:count]].tolist()


def find_label_errors(
    trained: Trained,
    dataset: Dataset,
    data: str,
    settings: ProbeSettings,
    *,
    split: SuspectSplit = "all",
    folds: int = DEFAULT_FOLDS,
) -> LabelErrors:
    """Search a dataset for label errors; `data` is the name by which it was opened, for advice in errors.

    Of `settings` only those of the computation count, none of the probe's classifiers.
    """
    dataset = _select_splits(dataset, split)
    if folds < 2:
        raise UsageError(f"--folds is {folds}; it must be at least 2")
    for each in dataset.splits.values():
        features.read_labels(each)  # refuses images without a label, or with several
    dataset, groups = _scan_images(dataset, data, settings)
    values, _ = extract_dataset_features(trained, dataset, data, settings)
    targets = torch.cat([features.read_labels(each) for each in dataset.splits.values()])
    device = settings.device if settings.device.type == "cuda" else torch.device("cpu")  # mps has no float64
    labeled = Features(torch.cat([values[name] for name in dataset.splits]).to(device), targets.to(device))
    fold_index = assign_folds(targets.numpy(), groups, folds)
    with settings.show_progress("cross-validation") as progress:
        probabilities = compute_out_of_fold_probabilities(
            labeled, len(dataset.classes), fold_index, progress=progress
        ).cpu()
    can_judge = _find_judgeable(targets, groups, len(dataset.classes))
    return LabelErrors(
        dataset=dataset,
        features=Features(labeled.values.cpu(), targets),
        probabilities=probabilities,
        suspects=rank_suspects(probabilities, targets, can_judge),
        unjudged=int((~can_judge).sum()),
    )


def rank_suspects(probabilities: Tensor, labels: Tensor, can_judge: Tensor) -> tuple[int, ...]:
    """The images with the least probable labels, as many as confident learning counts label errors."""
    rows = can_judge.nonzero()[:, 0]
    probabilities, labels = probabilities[rows], labels[rows]
    count = int(confident_learning.flag_label_errors(probabilities, labels).sum())
    self_confidence = confident_learning.compute_self_confidence(probabilities, labels)
    self_confidence = self_confidence.masked_fill(probabilities.argmax(dim=1) == labels, torch.inf)
    order = self_confidence.argsort(stable=True)[:count]
    return tuple(rows[order].tolist())


def _select_splits(dataset: Dataset, split: SuspectSplit) -> Dataset:
    """The dataset with the splits to search."""
    if dataset.multi_label:
        raise DataError(
            f"{dataset.name} is multi-label: label errors are looked for among images of one label each. A missing"
            " label and a wrong one are different errors there"
        )
    if len(dataset.classes) < 2:
        classes = pluralize(len(dataset.classes), "class")
        raise DataError(f"{dataset.name} has {classes}; a label can be wrong where there are two or more")
    if split == "all":
        return dataset
    if split not in dataset.splits:
        raise UsageError(f"--split {split}: {dataset.name} has the splits {', '.join(dataset.splits)}")
    return dataclasses.replace(dataset, splits={split: dataset.splits[split]})


def _scan_images(dataset: Dataset, data: str, settings: ProbeSettings) -> tuple[Dataset, IntArray]:
    """The dataset without unreadable images, and for each image the first of its duplicates."""
    with settings.show_progress("reading images") as progress:
        scan = scan_dataset(dataset, progress=progress)
    is_bad = scan.image_facts["status"] == BAD
    if is_bad.any():
        _check_bad_images(scan, data, settings)
    groups = np.arange(len(is_bad))
    for group in find_duplicate_groups(scan):
        groups[list(group)] = group[0]
    bad = [(scan.get_split_name(image), scan.get_image_name(image)) for image in np.flatnonzero(is_bad).tolist()]
    return without_images(dataset, set(bad)) if bad else dataset, groups[~is_bad]


def _check_bad_images(scan: DatasetScan, data: str, settings: ProbeSettings) -> None:
    """Name the unreadable images, and refuse many of them."""
    first = min(scan.bad_reasons)
    total = len(scan.image_facts)
    problem = f"{pluralize(len(scan.bad_reasons), 'image')} of {total:,} cannot be read"
    problem += f", such as {scan.get_image_name(first)}: {scan.bad_reasons[first]}"
    if len(scan.bad_reasons) > MAX_BAD_FRACTION * total:
        raise DataError(f"{problem}; more than {MAX_BAD_FRACTION:.0%} are too many.{advise_data_check(data)}")
    settings.notify(f"warning: {problem}; left out")


def _find_judgeable(targets: Tensor, groups: IntArray, num_classes: int) -> Tensor:
    """bool (n,): images of classes that occur in two folds or more."""
    leaders = torch.from_numpy(np.unique(groups, return_index=True)[1])
    counts = targets[leaders].bincount(minlength=num_classes)
    return counts[targets] >= MIN_CLASS_IMAGES


def collect_facts(errors: LabelErrors) -> dict[str, Any]:
    """The numbers of a search, for JSON."""
    counts = Counter(errors.locate(image)[0] for image in errors.suspects)
    return {
        "data": errors.dataset.name,
        "images": {name: len(split) for name, split in errors.dataset.splits.items()},
        "classes": len(errors.dataset.classes),
        "suspects": {name: counts[name] for name in errors.dataset.splits},
        "unjudged": errors.unjudged,
        "pairs": [
            {"label": label, "likely_label": likely, "suspects": count} for label, likely, count in errors.count_pairs()
        ],
    }
