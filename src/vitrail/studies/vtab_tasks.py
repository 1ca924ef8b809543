"""The 19 tasks of VTAB-1k (Zhai et al. 2019), and their splits: 800 images for train, 200 for val, and test images.

    ROOT/TASK/  train800.txt  val200.txt  test.txt  images/...     VTAB's own draw, as lists with lines `images/1.png 7`

The benchmark is distributed in that form. From a dataset as published, or as `vitrail data get` stores it, images are
drawn here: results are then on other images than the paper's, and a note says so.
"""

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image

from vitrail.data import public_datasets, shards
from vitrail.data.dataset import SPLITS, Dataset, Split, build_splits
from vitrail.data.folder import FileStore
from vitrail.data.randomness import SampleOrder
from vitrail.data.sample_table import SampleTable, encode_text_column
from vitrail.data.shards import Sample
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.files import get_cache_home
from vitrail.formatting import pluralize
from vitrail.studies import vtab_sources
from vitrail.studies.vtab_sources import Integers, LabeledImages

TASK_GROUPS = ("Natural", "Specialized", "Structured")
LIST_FILES = {"train": "train800.txt", "val": "val200.txt", "test": "test.txt"}
SPLIT_SIZES = {"train": 800, "val": 200}
SourceKind = Literal["lists", "raw", "public"]


class VtabTask(NamedTuple):
    """A dataset and a classification task on it."""

    title: str
    group: str
    classes: int
    random_crop: bool
    """Whether training crops images rather than using all of them."""
    flip: bool
    origin: str
    """The address of its images, or their name for `vitrail data get`."""

    @property
    def public_dataset(self) -> str | None:
        """The name of its images for `vitrail data get`."""
        return None if "/" in self.origin else self.origin

    @property
    def source(self) -> str:
        """Where its images come from, as text."""
        return f"vitrail data get {self.public_dataset}" if self.public_dataset else f"https://{self.origin}"


_CALTECH_URL = "data.caltech.edu/records/mzrjq-6wc02"
_SUN_URL = "vision.princeton.edu/projects/2010/SUN/"
_DMLAB_URL = "github.com/google-research/task_adaptation"
_CLEVR_URL = "cs.stanford.edu/people/jcjohns/clevr/"
_DSPRITES_URL = "github.com/google-deepmind/dsprites-dataset"
_NORB_URL = "cs.nyu.edu/~ylclab/data/norb-v1.0-small/"
_KITTI_URL = "www.cvlibs.net/datasets/kitti/eval_object.php"
_RETINOPATHY_URL = "www.kaggle.com/c/diabetic-retinopathy-detection"

# fmt: off
TASKS = {  # by the folder names of the widespread lists; crop and flip of the ViT authors' later code keep the label
    #                             title           group        classes crop  flip   origin
    "caltech101":           VtabTask("Caltech101",   "Natural",     102, True,  True,  _CALTECH_URL),
    "cifar":                VtabTask("CIFAR-100",    "Natural",     100, True,  True,  "cifar100"),
    "dtd":                  VtabTask("DTD",          "Natural",      47, True,  True,  "dtd"),
    "oxford_flowers102":    VtabTask("Flowers102",   "Natural",     102, True,  True,  "flowers102"),
    "oxford_iiit_pet":      VtabTask("Pets",         "Natural",      37, True,  True,  "pets"),
    "svhn":                 VtabTask("SVHN",         "Natural",      10, True,  True,  "svhn"),
    "sun397":               VtabTask("Sun397",       "Natural",     397, True,  True,  _SUN_URL),
    "patch_camelyon":       VtabTask("Camelyon",     "Specialized",   2, True,  True,  "github.com/basveeling/pcam"),
    "eurosat":              VtabTask("EuroSAT",      "Specialized",  10, True,  True,  "github.com/phelber/EuroSAT"),
    "resisc45":             VtabTask("Resisc45",     "Specialized",  45, True,  True,  "gcheng-nwpu.github.io/"),
    "diabetic_retinopathy": VtabTask("Retinopathy",  "Specialized",   5, True,  True,  _RETINOPATHY_URL),
    "clevr_count":          VtabTask("Clevr-Count",  "Structured",    8, False, True,  _CLEVR_URL),
    "clevr_dist":           VtabTask("Clevr-Dist",   "Structured",    6, False, True,  _CLEVR_URL),
    "dmlab":                VtabTask("DMLab",        "Structured",    6, False, True,  _DMLAB_URL),
    "dsprites_loc":         VtabTask("dSpr-Loc",     "Structured",   16, False, False, _DSPRITES_URL),
    "dsprites_ori":         VtabTask("dSpr-Ori",     "Structured",   16, True,  False, _DSPRITES_URL),
    "kitti":                VtabTask("KITTI-Dist",   "Structured",    4, False, True,  _KITTI_URL),
    "smallnorb_azi":        VtabTask("sNORB-Azim",   "Structured",   18, True,  False, _NORB_URL),
    "smallnorb_ele":        VtabTask("sNORB-Elev",   "Structured",    9, True,  True,  _NORB_URL),
}
# fmt: on


def get_task(name: str) -> VtabTask:
    """The task of a folder name."""
    if name not in TASKS:
        raise UsageError(f"VTAB has no task {name!r:.60}; it has {', '.join(TASKS)}")
    return TASKS[name]


# --- splits ----------------------------------------------------------------------------------------------------------


def find_source_kind(task: str, root: Path) -> SourceKind | None:
    """The form of a task's images on this machine, lists first; None if there are none."""
    if (root / task / LIST_FILES["test"]).is_file():
        return "lists"
    if vtab_sources.find_source(task, root) is not None:
        return "raw"
    name = get_task(task).public_dataset
    return "public" if name is not None and public_datasets.get_dataset_folder(name).exists() else None


def open_vtab_dataset(task: str, root: Path, seed: int) -> Dataset:
    """Open the splits of a task; `seed` is that of the draw where it is not VTAB's own."""
    if (root / task / LIST_FILES["test"]).is_file():
        return _open_lists(task, root / task)
    if folder := vtab_sources.find_source(task, root):
        dataset = _open_raw(task, folder, seed)
    elif find_source_kind(task, root) == "public":
        dataset = _open_public(task, seed)
    else:
        title, source = get_task(task).title, get_task(task).source
        raise DataError(f"{root / task} has no {LIST_FILES['test']}, and {title} is not here in another form: {source}")
    note = f"the training images are vitrail's own draw (seed {seed}), not VTAB's"
    return Dataset(name=dataset.name, classes=dataset.classes, splits=dataset.splits, notes=(note, *dataset.notes))


def _open_lists(task: str, root: Path) -> Dataset:
    """The dataset of VTAB's lists."""
    paths: list[str] = []
    labels: list[int] = []
    splits: list[int] = []
    classes = get_task(task).classes
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
    return _make_file_dataset(task, root, paths, np.array(labels), np.array(splits))


def _read_lines(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not lines:
        raise DataError(f"{path} lists no image")
    return lines


def _make_file_dataset(
    task: str, root: Path, paths: list[str], labels: Integers, splits: Integers, notes: tuple[str, ...] = ()
) -> Dataset:
    """The dataset of image files below `root`, with a note if there are not 800 and 200 images."""
    column, path_columns = splits.astype(np.int8), encode_text_column("path", paths)
    store = FileStore(root.resolve(), SampleTable({**path_columns, "label": labels.astype(np.int32), "split": column}))
    counts = [int((splits == SPLITS.index(split)).sum()) for split in SPLIT_SIZES]
    if counts != list(SPLIT_SIZES.values()):
        notes = (*notes, f"{counts[0]} + {counts[1]} training images, not 800 + 200")
    classes = _list_class_names(task)
    return Dataset(name=str(root.resolve()), classes=classes, splits=build_splits(store, column), notes=notes)


def _list_class_names(task: str) -> tuple[str, ...]:
    return tuple(map(str, range(get_task(task).classes)))


def _open_raw(task: str, folder: Path, seed: int) -> Dataset:
    """A draw from a dataset as published; images that are published as an array become shards in the cache, once."""
    cached = get_cache_home() / "vtab" / f"{task}-{_digest_folder(folder, seed)}"
    if cached.exists():
        return shards.open_shards(cached)
    images = vtab_sources.SOURCES[task].read(folder)
    rows = {split: _draw_rows(getattr(images, split), number, seed) for split, number in SPLIT_SIZES.items()}
    rows["test"] = images.test
    _check_labels(task, images, rows)
    if images.pixels is not None:
        samples, origin = _encode_samples(images, rows), {"set": task, "seed": seed}
        shards.write_shards(cached, samples, classes=_list_class_names(task), origin=origin)
        return shards.open_shards(cached)
    splits = np.repeat(np.arange(len(SPLITS)), [len(rows[split]) for split in SPLITS])
    order = np.concatenate([rows[split] for split in SPLITS])
    paths = [images.paths[row] for row in order.tolist()]
    return _make_file_dataset(task, images.root, paths, images.labels[order], splits, images.notes)


def _check_labels(task: str, images: LabeledImages, rows: dict[str, Integers]) -> None:
    classes = get_task(task).classes
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
    name = get_task(task).public_dataset
    assert name is not None
    dataset = open_dataset(name)
    splits = {
        split: Split(part.store, np.asarray(part.rows)[_draw_rows(np.arange(len(part)), SPLIT_SIZES.get(split), seed)])
        for split, part in dataset.splits.items()
    }
    return Dataset(name=dataset.name, classes=dataset.classes, splits=splits)


def _draw_rows(rows: Integers, number: int | None, seed: int) -> Integers:
    """`number` random rows in ascending order; all of them for None."""
    if number is None or len(rows) <= number:
        return np.sort(rows)
    return np.sort(rows[SampleOrder(seed=seed, num_samples=len(rows)).get_sample_indices(np.arange(number))])


def _digest_folder(folder: Path, seed: int) -> str:
    """A digest of a folder's files and the draw's seed."""
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())
    return hashlib.sha256(repr((str(folder.resolve()), files, seed)).encode()).hexdigest()[:16]
