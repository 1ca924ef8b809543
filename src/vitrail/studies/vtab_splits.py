"""The splits of a VTAB task: 800 images for train, 200 for val, and its test images.

    ROOT/TASK/  train800.txt  val200.txt  test.txt  images/...     VTAB's own draw, as lists with lines `images/1.png 7`

The benchmark is distributed in that form. From a dataset as published, or as `vitrail data get` stores it, images are
drawn here: results are then on other images than the paper's, and a note says so.
"""

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from vitrail.data import public_datasets, shards
from vitrail.data.dataset import SPLITS, Dataset, Split, build_splits
from vitrail.data.folder import FileStore
from vitrail.data.order import SampleOrder
from vitrail.data.sample_table import SampleTable, encode_text_column
from vitrail.data.shards import Sample
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError
from vitrail.files import get_cache_home
from vitrail.formatting import pluralize
from vitrail.studies import vtab_sources, vtab_tasks
from vitrail.studies.vtab_sources import Integers, LabeledImages

LIST_FILES = {"train": "train800.txt", "val": "val200.txt", "test": "test.txt"}
SPLIT_SIZES = {"train": 800, "val": 200}
SourceKind = Literal["lists", "raw", "public"]


def find_source_kind(task: str, root: Path) -> SourceKind | None:
    """The form of a task's images on this machine, lists first; None if there are none."""
    if (root / task / LIST_FILES["test"]).is_file():
        return "lists"
    if vtab_sources.find_source(task, root) is not None:
        return "raw"
    name = vtab_tasks.get_task(task).public_dataset
    return "public" if name is not None and public_datasets.get_dataset_folder(name).exists() else None


def open_vtab_dataset(task: str, root: Path, seed: int) -> Dataset:
    """Open the splits of a task; `seed` is that of the draw where it is not VTAB's own."""
    match find_source_kind(task, root):
        case "lists":
            return _open_lists(task, root / task)
        case "raw":
            folder = vtab_sources.find_source(task, root)
            assert folder is not None
            return _open_raw(task, folder, seed)
        case "public":
            return _open_public(task, seed)
    title, source = vtab_tasks.get_task(task).title, vtab_tasks.get_task(task).source
    raise DataError(f"{root / task} has no {LIST_FILES['test']}, and {title} is not here in another form: {source}")


def _open_lists(task: str, root: Path) -> Dataset:
    """The dataset of VTAB's lists."""
    paths: list[str] = []
    labels: list[int] = []
    splits: list[int] = []
    classes = vtab_tasks.get_task(task).classes
    for split, name in LIST_FILES.items():
        for number, line in enumerate(_read_lines(root / name), start=1):
            path, _, label = line.strip().rpartition(" ")
            if not path or not label.isdecimal() or int(label) >= classes:
                raise DataError(
                    f"{root / name}, line {number} is {line!r:.80}; it must be a path and 0 to {classes - 1}"
                )
            paths.append(path)
            labels.append(int(label))
            splits.append(SPLITS.index(split))
    rows = np.array(labels, dtype=np.int32)
    return _make_file_dataset(task, root, paths, rows, np.array(splits, dtype=np.int8), _note_split_sizes(splits))


def _read_lines(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not lines:
        raise DataError(f"{path} lists no image")
    return lines


def _make_file_dataset(
    task: str, root: Path, paths: list[str], labels: "np.ndarray", splits: "np.ndarray", notes: tuple[str, ...]
) -> Dataset:
    store = FileStore(
        root.resolve(),
        SampleTable({**encode_text_column("path", paths), "label": labels.astype(np.int32), "split": splits}),
    )
    return Dataset(
        name=str(root.resolve()), classes=_list_class_names(task), splits=build_splits(store, splits), notes=notes
    )


def _list_class_names(task: str) -> tuple[str, ...]:
    return tuple(str(number) for number in range(vtab_tasks.get_task(task).classes))


def _note_split_sizes(splits: list[int]) -> tuple[str, ...]:
    """A note if there are not 800 and 200 images."""
    counts = [splits.count(SPLITS.index(split)) for split in SPLIT_SIZES]
    return (
        () if counts == list(SPLIT_SIZES.values()) else (f"{counts[0]} + {counts[1]} training images, not 800 + 200",)
    )


# --- our own draws ---------------------------------------------------------------------------------------------------


def _open_raw(task: str, folder: Path, seed: int) -> Dataset:
    """A draw from a dataset as published; images that are published as an array become shards in the cache, once."""
    cached = get_cache_home() / "vtab" / f"{task}-{_digest_folder(folder, seed)}"
    if cached.exists():
        return _add_draw_note(shards.open_shards(cached), seed)
    images = vtab_sources.read_source(task, folder)
    rows = {split: _draw_rows(getattr(images, split), number, seed) for split, number in SPLIT_SIZES.items()}
    rows["test"] = images.test
    _check_labels(task, images, rows)
    if images.pixels is not None:
        samples, origin = _encode_samples(images, rows), {"set": task, "seed": seed}
        shards.write_shards(cached, samples, classes=_list_class_names(task), origin=origin)
        return _add_draw_note(shards.open_shards(cached), seed)
    splits = np.repeat(np.arange(len(SPLITS), dtype=np.int8), [len(rows[split]) for split in SPLITS])
    order = np.concatenate([rows[split] for split in SPLITS])
    paths = [images.paths[row] for row in order.tolist()]
    notes = (*images.notes, *_note_split_sizes(splits.tolist()))
    return _add_draw_note(_make_file_dataset(task, images.root, paths, images.labels[order], splits, notes), seed)


def _check_labels(task: str, images: LabeledImages, rows: dict[str, Integers]) -> None:
    classes = vtab_tasks.get_task(task).classes
    for split, split_rows in rows.items():
        if not len(split_rows):
            raise DataError(f"{images.root} has no image for {split}")
        labels = images.labels[split_rows]
        if labels.min() < 0 or labels.max() >= classes:
            raise DataError(
                f"{images.root}: {split} has labels {labels.min()} to {labels.max()} of {pluralize(classes, 'class')}"
            )


def _encode_samples(images: LabeledImages, rows: dict[str, Integers]) -> Iterator[Sample]:
    """Encode the images of an array as PNG, one split after the other."""
    assert images.pixels is not None
    for split in SPLITS:
        for row in rows[split].tolist():
            file = io.BytesIO()
            Image.fromarray(images.pixels[row] * np.uint8(255 // images.white)).save(file, "PNG", compress_level=1)
            yield Sample(split, f"{row:06d}.png", file.getvalue(), (int(images.labels[row]),))


def _open_public(task: str, seed: int) -> Dataset:
    """A draw from a dataset that `vitrail data get` stored."""
    name = vtab_tasks.get_task(task).public_dataset
    assert name is not None
    dataset = open_dataset(name)
    splits = {
        split: Split(part.store, np.asarray(part.rows)[_draw_rows(np.arange(len(part)), SPLIT_SIZES.get(split), seed)])
        for split, part in dataset.splits.items()
    }
    return _add_draw_note(Dataset(name=dataset.name, classes=dataset.classes, splits=splits), seed)


def _draw_rows(rows: Integers, number: int | None, seed: int) -> Integers:
    """`number` random rows in ascending order; all of them for None."""
    if number is None or len(rows) <= number:
        return np.sort(rows)
    return np.sort(rows[SampleOrder(seed=seed, num_samples=len(rows)).get_sample_indices(np.arange(number))])


def _add_draw_note(dataset: Dataset, seed: int) -> Dataset:
    note = f"the training images are vitrail's own draw (seed {seed}), not VTAB's"
    return Dataset(name=dataset.name, classes=dataset.classes, splits=dataset.splits, notes=(note, *dataset.notes))


def _digest_folder(folder: Path, seed: int) -> str:
    """A digest of a folder's files and the draw's seed."""
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())
    return hashlib.sha256(repr((str(folder.resolve()), files, seed)).encode()).hexdigest()[:16]
