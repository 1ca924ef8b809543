"""ImageNet as it is distributed: a tar of class tars, and validation images whose labels are in the devkit.

    ILSVRC2012_img_train.tar      n01440764.tar ... n15075141.tar, each with the images of its class (`webdataset.py`)
    ILSVRC2012_img_val.tar        ILSVRC2012_val_00000001.JPEG to ..._00050000.JPEG; or a folder of them
    ILSVRC2012_devkit_t12.tar.gz  data/ILSVRC2012_validation_ground_truth.txt: one ILSVRC2012_ID per line, and
                                  data/meta.mat: `synsets`, with the WNID (WordNet ID) of each ILSVRC2012_ID

Classes are sorted WordNet IDs, the order of every published head of 1,000 outputs.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data import archives, holdout, public_formats, sample_table
from vitrail.data.dataset import SPLITS, Dataset, build_dataset
from vitrail.data.folder import FileStore, open_folder
from vitrail.data.image_headers import IMAGE_SUFFIXES
from vitrail.data.sample_table import Array, encode_text_column
from vitrail.errors import DataError

WORDNET_ID = re.compile(r"n\d{8}")
VAL_IMAGE_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")
TEST_IMAGE_NAME = re.compile(r"ILSVRC2012_test_(\d{8})\.JPEG")
_FIRST_VAL_IMAGE = "ILSVRC2012_val_00000001.JPEG"
_DEVKIT = "ILSVRC2012_devkit_t12"
_LABELS_FILE, _META_FILE = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
_RELEASES = {  # by number of classes
    21_841: "ImageNet-21k of fall 2011. The heads of Google's checkpoints have 21,843 outputs in the order of the"
    " WordNet IDs, with two more (n03931044 and n09859684, outputs 9,205 and 15,027): after the first of them"
    " output and class differ",
    21_843: "those of the heads of Google's checkpoints; ImageNet-21k of fall 2011 has images of 21,841",
    19_167: "ImageNet-21k of winter 2021, which omits 2,674 of the 21,841 classes of fall 2011",
}


def describe_release(classes: Sequence[str]) -> str:
    """A sentence on the release of ImageNet-21k with these classes; empty if there is none."""
    release = _RELEASES.get(len(classes), "")
    return f"{len(classes):,} classes are {release}" if release and all(map(WORDNET_ID.fullmatch, classes)) else ""


def find_devkit(folder: Path) -> Path | None:
    """The devkit's archive or unpacked folder, in a folder or its parent."""
    for parent in (folder, folder.parent):
        for path in (parent / f"{_DEVKIT}.tar.gz", parent / _DEVKIT / "data", parent):
            if path.is_file() or ((path / _LABELS_FILE).is_file() and (path / _META_FILE).is_file()):
                return path
    return None


def explain_missing_labels(folder: Path | str) -> str:
    """Why the validation images in a local or remote folder have no labels; empty if the devkit is there."""
    if isinstance(folder, str):
        return f"{folder} holds ImageNet's validation images without labels: pack them locally, with the devkit"
    if find_devkit(folder) is not None:
        return ""
    return f"{folder} has ImageNet's validation images, whose labels are in the devkit: put {_DEVKIT}.tar.gz there"


def read_validation_labels(folder: Path) -> list[str]:
    """The WordNet ID of each validation image, in order, from the devkit in or beside a folder."""
    devkit = find_devkit(folder)
    if devkit is None:
        raise DataError(explain_missing_labels(folder))
    if devkit.is_file():
        names = [f"{_DEVKIT}/data/{name}" for name in (_LABELS_FILE, _META_FILE)]
        contents = archives.read_members(devkit, names)
        labels, meta = (contents[name] for name in names)
    else:
        labels, meta = ((devkit / name).read_bytes() for name in (_LABELS_FILE, _META_FILE))
    return _parse_devkit(labels, meta, devkit)


def _parse_devkit(labels: bytes, meta: bytes, devkit: Path) -> list[str]:
    try:
        synsets = public_formats.read_structures(meta)["synsets"]
        ids = {int(row["ILSVRC2012_ID"].item()): str(row["WNID"]) for row in synsets}
        numbers = [int(line) for line in labels.split()]
        wnids = [ids[number] for number in numbers]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{devkit} is not an ImageNet devkit: {type(error).__name__} {error}") from error
    if bad := next((wnid for wnid in wnids if not WORDNET_ID.fullmatch(wnid)), None):
        raise DataError(f"{devkit} is not an ImageNet devkit: {bad!r:.80} is not a WordNet ID")
    return wnids


def label_validation(names: Sequence[str], labels: Sequence[str]) -> list[str]:
    """The labels of validation images, by the numbers in their names."""
    numbers = [int(VAL_IMAGE_NAME.fullmatch(name)[1]) for name in names]  # type: ignore[index]
    if not numbers or max(numbers) > len(labels) or min(numbers) < 1:
        last = max(numbers, default=0)
        raise DataError(
            f"validation image {last:,} has no label: the devkit has labels for images 1 to {len(labels):,}"
        )
    return [labels[number - 1] for number in numbers]


# --- folders ---------------------------------------------------------------------------------------------------------


def has_flat_validation(root: Path) -> bool:
    """Whether a folder or its `val` holds ImageNet's validation images without class folders."""
    return (find_validation(root) / _FIRST_VAL_IMAGE).exists()


def find_validation(root: Path) -> Path:
    """The folder of ImageNet's validation images, if they exist: the root itself or its `val`."""
    return root if (root / _FIRST_VAL_IMAGE).exists() else root / "val"


def find_train_archives(root: Path) -> str:
    """The glob pattern of the training tars in a folder; empty if there are none, or class folders instead."""
    if any(path.is_dir() for path in (root / "train").glob("*")):
        return ""
    return next((pattern for pattern in ("*train*.tar", "train/*.tar") if next(root.glob(pattern), None)), "")


def open_imagenet_folder(root: Path, *, holdout_fraction: float = 0.1) -> Dataset:
    """Open ImageNet with a flat validation folder: the folder itself, or `val` beside a `train` of class folders.

    Without the devkit, validation images alone have no labels; beside training images they need it.
    """
    root = root.resolve()
    val = find_validation(root)
    train = sorted(path for path in (root / "train").glob("*") if path.is_dir()) if val != root else []
    if not train and (missing := explain_missing_labels(val)):
        dataset = open_folder(root, holdout_fraction=holdout_fraction)
        return dataclasses.replace(dataset, notes=(*dataset.notes, missing))
    watched = [root, val, *filter(Path.is_dir, [root / "train"]), *train, *filter(None, [find_devkit(val)])]
    source = f"imagenet {root} {holdout_fraction}"
    table = sample_table.load_or_build_table(
        source, lambda: map(str, watched), lambda: _build_columns(root, val, train, holdout_fraction)
    )
    return build_dataset(str(root), FileStore(root, table))


def _build_columns(
    root: Path, val: Path, train: Sequence[Path], holdout_fraction: float
) -> tuple[Mapping[str, Array], dict[str, Any]]:
    names = sorted(path.name for path in val.iterdir() if VAL_IMAGE_NAME.fullmatch(path.name))
    labels = label_validation(names, read_validation_labels(val))
    paths = [(val / name).relative_to(root).as_posix() for name in names]
    splits = [SPLITS.index("val")] * len(paths)
    for folder in train:
        images = sorted(path.name for path in folder.iterdir() if path.name.lower().endswith(IMAGE_SUFFIXES))
        paths += [f"train/{folder.name}/{name}" for name in images]
        labels += [folder.name] * len(images)
        splits += [SPLITS.index("train")] * len(images)
    classes = sorted(set(labels))
    class_index = {name: number for number, name in enumerate(classes)}
    columns = encode_text_column("path", paths)
    columns["label"] = np.array([class_index[name] for name in labels], dtype=np.int32)
    split_column = np.array(splits, dtype=np.int8)
    split = holdout.complete_splits(
        split_column, columns, paths.__getitem__, identity=str(root), holdout_fraction=holdout_fraction
    )
    note = f"the labels of {len(names):,} validation images come from the devkit"
    return columns | {"split": split.column}, split.build_metadata(classes, [note])
