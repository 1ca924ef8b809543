"""What is checked of a dataset before it is trained on: its classes, its balance, and every image of it."""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from vitrail.data import memory
from vitrail.data.audit import audit_dataset
from vitrail.data.dataset import MAX_BAD_FRACTION, Dataset, without_images
from vitrail.data.image_scan import scan_dataset
from vitrail.data.sources import advise_data_check
from vitrail.errors import DataError
from vitrail.formatting import pluralize
from vitrail.runtime import distributed
from vitrail.runtime.workers import Notify, ShowProgress
from vitrail.training.training_run import IMBALANCE_THRESHOLD, TrainingRun

_MAX_SCANNED_IMAGES = 20_000  # images that are checked before a run: a minute at most


def list_dataset_notes(dataset: Dataset) -> Iterator[str]:
    """What to know of a dataset before it is trained on."""
    for note in dataset.notes:
        yield f"{'warning' if 'left out' in note else 'note'}: {note}"
    if dataset.multi_label:
        yield "note: images may have several labels, so each class is predicted by itself (loss sigmoid)"
    numbers = [int(name) for name in dataset.classes if name.isdecimal()]
    if len(numbers) == len(dataset.classes) and numbers != sorted(numbers):
        first = ", ".join(dataset.classes[:4])
        yield f"warning: classes are in the order of their names ({first}, ...), so output 2 is not class 2"
    yield from _list_unmeasured_classes(dataset)


def _list_unmeasured_classes(dataset: Dataset) -> Iterator[str]:
    """A note for each split that lacks images of some classes, as those of very few images are."""
    for name in ("val", "test"):
        counts = dataset.splits[name].count_per_class(len(dataset.classes)) if name in dataset.splits else ()
        missing = [label for label, count in zip(dataset.classes, counts, strict=False) if not count]
        if 0 < len(missing) < len(dataset.classes):
            classes = pluralize(len(missing), "class")
            yield f"note: {name} has no image of {classes}, such as {missing[0]!r:.60}, so it says nothing about that"


def check_classes(dataset: Dataset, *, strict: bool = False, train_on_val: bool = False) -> None:
    """Refuse labels that cannot be learned, and with `strict` class folders without an image.

    With `train_on_val` the images of val count as training images.
    """
    empty = dataset.empty_classes
    if strict and empty:
        raise DataError(
            f"{pluralize(len(empty), 'class folder')} of {dataset.name} without an image, such as {empty[0]}:"
            " remove them, or omit --strict"
        )
    if dataset.layout_warning:
        raise DataError(dataset.layout_warning)
    _check_training_images(dataset, train_on_val=train_on_val)
    if len(dataset.classes) != 1:
        return
    (name,) = dataset.classes
    if not dataset.multi_label:
        raise DataError(
            f"{dataset.name} has one class, {name}, and a classifier needs two or more"
            f"{_suggest_subfolder(dataset, name)}"
        )
    if all(split.count_per_class(1)[0] == len(split) for split in dataset.splits.values()):
        raise DataError(f"every image of {dataset.name} has the label {name}: add images without it, with empty labels")


def _check_training_images(dataset: Dataset, *, train_on_val: bool) -> None:
    """Refuse a class without a training image."""
    names = ("train", "val") if train_on_val else ("train",)
    splits = [dataset.splits[name] for name in names if name in dataset.splits]
    columns = zip(*(split.count_per_class(len(dataset.classes)) for split in splits), strict=True)
    counts = [sum(column) for column in columns]
    untrained = [name for name, count in zip(dataset.classes, counts, strict=False) if not count]
    if untrained:
        raise DataError(
            f"{pluralize(len(untrained), 'class')} of {dataset.name} without a training image, such as {untrained[0]}:"
            " add some, or remove the class"
        )


def _suggest_subfolder(dataset: Dataset, name: str) -> str:
    """What may have been meant by a dataset of one class: the folders in its folder, or images without labels."""
    paths = (
        split.get_image_name(index)
        for split in dataset.splits.values()
        for index in range(min(len(split), _MAX_SCANNED_IMAGES))
    )
    subfolders = sorted({path.split("/")[1] for path in paths if path.startswith(f"{name}/") and path.count("/") > 1})
    if len(subfolders) > 1:
        more = " ..." if len(subfolders) > 3 else ""
        return f"; {name} holds the folders {', '.join(subfolders[:3])}{more}: did you mean {dataset.name}/{name}?"
    return ": one subfolder each. Without labels: vitrail train mae-... (vitrail list recipes)"


def warn_about_imbalance(run: TrainingRun, notify: Notify) -> None:
    """Warn where accuracy alone would mislead, because some classes have many more images than others."""
    if run.imbalance < IMBALANCE_THRESHOLD or run.dataset.multi_label:
        return
    names, counts = run.dataset.classes, run.class_counts
    most, least = max(range(len(counts)), key=counts.__getitem__), min(range(len(counts)), key=counts.__getitem__)
    advice = "" if run.recipe.logit_adjustment else "; --balanced gives every class the same weight"
    notify(
        f"warning: {names[most]} has {counts[most]:,} training images and {names[least]} {counts[least]:,}, so look"
        f" at the average over classes beside the accuracy{advice}"
    )


def check_images(
    dataset: Dataset,
    data: str,
    *,
    strict: bool = False,
    seconds: float = math.inf,
    notify: Notify,
    show_progress: ShowProgress,
) -> tuple[Dataset, dict[str, Any] | None]:
    """The dataset without the images that cannot be read, and the audit of the dataset.

    There is no audit where it would take long, or more than `seconds`; then, unless `strict`, training leaves out the
    bad images that it meets. Rank 0 reads the images.
    """
    audits: list[dict[str, Any]] = []

    def scan_on_rank0() -> list[tuple[str, str]] | None:
        audit = _scan_images(dataset, data, seconds, notify, show_progress)
        if audit is None:
            return None
        audits.append(audit)
        return _check_bad_images(audit["bad"], dataset, data, strict=strict, notify=notify)

    bad_images = distributed.run_on_rank0(scan_on_rank0)
    if bad_images is None:
        return dataclasses.replace(dataset, skip_bad=not strict), None
    return without_images(dataset, set(bad_images)) if bad_images else dataset, audits[0] if audits else None


class _OutOfTimeError(Exception):
    """Checking the images takes longer than it may."""


def _scan_images(
    dataset: Dataset, data: str, seconds: float, notify: Notify, show_progress: ShowProgress
) -> dict[str, Any] | None:
    images = sum(len(split) for split in dataset.splits.values())
    if images > _MAX_SCANNED_IMAGES:
        notify(f"note: {images:,} images are not checked one by one before training{_name_data_check(data)}")
        return None
    end = time.monotonic() + seconds
    with show_progress("checking images") as progress:

        def report_or_stop(done: int, total: int) -> None:
            progress(done, total)
            if done < total and time.monotonic() > end:
                raise _OutOfTimeError(f"{done:,} of {pluralize(total, 'image')}")

        try:
            audit = audit_dataset(scan_dataset(dataset, progress=report_or_stop))
        except _OutOfTimeError as amount:
            notify(f"note: there was time to check {amount} before training{_name_data_check(data)}")
            return None
    if across := audit["duplicates"]["across_splits"]:
        notify(
            f"warning: {pluralize(across, 'group')} of duplicates across splits, so results look too good"
            f"{_name_data_check(data)}"
        )
    return audit


def _name_data_check(data: str) -> str:
    """The command that checks the images, behind a colon; empty for images in memory, which no command sees."""
    return "" if data == memory.NAME else f": vitrail data check {data}"


def _check_bad_images(
    bad_images: Sequence[dict[str, str]], dataset: Dataset, data: str, *, strict: bool, notify: Notify
) -> list[tuple[str, str]]:
    """Split and name of the images to leave out; refuse many of them, and with `strict` any."""
    if not bad_images:
        return []
    images = sum(len(split) for split in dataset.splits.values())
    first = bad_images[0]
    problem = f"{pluralize(len(bad_images), 'image')} of {images:,} cannot be read"
    problem += f", such as {first['name']}: {first['reason']}"
    if strict or len(bad_images) > MAX_BAD_FRACTION * images:
        rule = "--strict accepts none" if strict else f"more than {MAX_BAD_FRACTION:.0%} are too many"
        raise DataError(f"{problem}; {rule}.{advise_data_check(data)}")
    them = "it" if len(bad_images) == 1 else "them"
    notify(f"warning: {problem}; left out, and listed in data_report.json (--strict refuses {them})")
    return [(image["split"], image["name"]) for image in bad_images]
