"""VTAB tasks from their datasets as published: each image's label, and the rows from which splits are drawn.

Labels are defined as in VTAB's own code (google-research/task_adaptation). Its splits are slices of the record order of
TensorFlow Datasets, which exists nowhere else; our own permutation replaces it here.
"""

import bisect
import gzip
import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.randomness import SampleOrder
from vitrail.errors import DataError

Integers = NDArray[np.int64]

CLEVR_MIN_OBJECTS = 3  # in an image of CLEVR
CLEVR_DEPTHS = (8.0, 8.5, 9.0, 9.5, 10.0)
KITTI_DEPTHS = (8.0, 20.0, 999.0)  # meters; beyond the last there is no vehicle
KITTI_VEHICLES = ("Car", "Van", "Truck")
DSPRITES_BINS = 16
_NO_VEHICLE_DEPTH = 1000.0
_ORIENTATION_COLUMN, _X_COLUMN = 3, 4  # of dSprites' latents
_ORIENTATION_VALUES, _X_VALUES = 40, 32  # how many values these latents take
_ELEVATION_COLUMN, _AZIMUTH_COLUMN = 1, 2  # of smallNORB's info
_NORB_TYPES = {0x1E3D4C55: "<u1", 0x1E3D4C54: "<i4"}


class LabeledImages(NamedTuple):
    """The images of a dataset, in files or in an array, their labels for a task, and the rows of each split."""

    root: Path
    labels: Integers  # (n,)
    train: Integers
    val: Integers
    test: Integers
    paths: Sequence[str] = ()
    """Below the root, if images are files."""
    pixels: NDArray[np.uint8] | None = None
    """(n, H, W) grayscale, if they are not files."""
    white: int = 255
    """The value of a white pixel."""
    notes: tuple[str, ...] = ()


# --- labels ----------------------------------------------------------------------------------------------------------


def label_clevr_count(depths: Sequence[float]) -> int:
    """The number of objects, 3 to 10, as a class."""
    return len(depths) - CLEVR_MIN_OBJECTS


def label_clevr_distance(depths: Sequence[float]) -> int:
    """Which of six ranges holds the closest object's depth; a threshold belongs to the range below it."""
    return bisect.bisect_left(CLEVR_DEPTHS, float(np.float32(min(depths))))


def label_kitti_distance(objects: Iterable[tuple[str, float]]) -> int:
    """The distance of the closest car, van or truck: up to 8 meters, up to 20, farther, or none present."""
    depths = [depth for kind, depth in objects if kind in KITTI_VEHICLES]
    return bisect.bisect_left(KITTI_DEPTHS, float(np.float32(min(depths, default=_NO_VEHICLE_DEPTH))))


def label_dsprites_bins(values: Integers, count: int) -> Integers:
    """Values from 0 to `count` - 1 in 16 bins of count / 16 values each, which need not be an integer."""
    return values * DSPRITES_BINS // count


# --- datasets --------------------------------------------------------------------------------------------------------


def _read_clevr(label: Callable[[Sequence[float]], int], root: Path) -> LabeledImages:
    """Read images/train/CLEVR_train_000000.png and so on, with JSON scenes; test has none, so VTAB tests on val."""
    paths, labels, counts = [], [], []
    for part in ("train", "val"):
        file = root / "scenes" / f"CLEVR_{part}_scenes.json"
        try:
            scenes: list[dict[str, Any]] = json.loads(file.read_text())["scenes"]
            for scene in scenes:
                paths.append(f"images/{part}/{scene['image_filename']}")
                labels.append(label([float(thing["pixel_coords"][2]) for thing in scene["objects"]]))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(f"{file} has no CLEVR scenes ({type(error).__name__}: {error})") from error
        counts.append(len(scenes))
    rows = _shuffle_rows(counts[0])
    cut = counts[0] * 9 // 10
    test = counts[0] + np.arange(counts[1])
    return LabeledImages(root, np.array(labels), rows[:cut], rows[cut:], test, paths=paths)


def _read_kitti(root: Path) -> LabeledImages:
    """Read training/image_2/000000.png and so on, with a text file of objects each; known drives are not split.

    TensorFlow Datasets takes 711 of the 7,481 images for test and 423 for val, by drives.
    """
    files = sorted((root / "training" / "label_2").glob("*.txt"))
    labels = np.array([label_kitti_distance(_read_kitti_objects(file)) for file in files])
    paths = [f"training/image_2/{file.stem}.png" for file in files]
    drives = _read_kitti_drives(root / "mapping", len(files))
    notes = () if drives is not None else ("without KITTI's mapping, images of one drive are in several splits",)
    groups = np.arange(len(files)) if drives is None else drives
    rank = np.argsort(_shuffle_rows(int(groups.max()) + 1))[groups]  # of an image's drive in a random order
    rows = np.argsort(rank, kind="stable")
    ends = [_find_group_end(rank[rows], math.ceil(share * len(rows))) for share in (711 / 7481, 1134 / 7481)]
    return LabeledImages(
        root, labels, rows[ends[1] :], rows[ends[0] : ends[1]], rows[: ends[0]], paths=paths, notes=notes
    )


def _find_group_end(groups: Integers, min_rows: int) -> int:
    """The end of the first group that completes at least `min_rows` rows."""
    return int(np.searchsorted(groups, groups[min_rows - 1], side="right"))


def _read_kitti_objects(file: Path) -> list[tuple[str, float]]:
    """The kind and depth of each object in a text file of KITTI."""
    try:
        return [(fields[0], float(fields[13])) for line in file.read_text().splitlines() if (fields := line.split())]
    except (ValueError, IndexError) as error:
        raise DataError(f"{file} is not a list of KITTI's objects ({error})") from error


def _read_kitti_drives(mapping: Path, count: int) -> Integers | None:
    """The drive of each image as a number, from the devkit's two lists; None without them."""
    if not (mapping / "train_mapping.txt").is_file() or not (mapping / "train_rand.txt").is_file():
        return None
    lines = (mapping / "train_mapping.txt").read_text().splitlines()
    order = [int(number) for number in (mapping / "train_rand.txt").read_text().replace(",", " ").split()]
    if len(order) != count or max(order, default=0) > len(lines):
        raise DataError(f"{mapping} covers {len(order):,} images, and there are {count:,}")
    names = [" ".join(lines[number - 1].split()[:2]) for number in order]
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def _read_dsprites(column: int, count: int, root: Path) -> LabeledImages:
    """Read one .npz with all images, as 0 and 1, and the class of each latent; unpacked it takes 3 GB."""
    path = next(root.glob("dsprites*.npz"))
    try:
        with np.load(path, allow_pickle=False) as arrays:
            pixels, values = arrays["imgs"], arrays["latents_classes"][:, column].astype(np.int64)
    except (OSError, ValueError, LookupError) as error:
        raise DataError(f"{path} is not dSprites ({error})") from error
    rows = _shuffle_rows(len(values))
    first, second = len(rows) * 8 // 10, len(rows) * 9 // 10
    labels = label_dsprites_bins(values, count)
    return LabeledImages(root, labels, rows[:first], rows[first:second], rows[second:], pixels=pixels, white=1)


def _read_smallnorb(column: int, step: int, root: Path) -> LabeledImages:
    """Read the first of two cameras' images, and their poses; half of testing is val, half test."""
    parts, poses = [], []
    for part in ("training", "testing"):
        parts.append(_read_norb_matrix(root, f"smallnorb-*-{part}-dat.mat")[:, 0])  # (24300, 96, 96)
        poses.append(_read_norb_matrix(root, f"smallnorb-*-{part}-info.mat")[:, column].astype(np.int64))
        if len(parts[-1]) != len(poses[-1]):
            raise DataError(f"{root}: {part} has {len(parts[-1]):,} images and {len(poses[-1]):,} poses")
    train, half = len(parts[0]), len(parts[1]) // 2
    rows = train + _shuffle_rows(len(parts[1]))
    labels = np.concatenate(poses) // step
    return LabeledImages(root, labels, np.arange(train), rows[:half], rows[half:], pixels=np.concatenate(parts))


def _read_norb_matrix(root: Path, pattern: str) -> NDArray[Any]:
    """Read a matrix in NORB's own format: its type, the number of axes, their lengths (three at least), the values."""
    path = next((path for suffix in ("", ".gz") for path in root.glob(pattern + suffix)), None)
    if path is None:
        raise DataError(f"{root} lacks {pattern}")
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    kind, axes = np.frombuffer(content, "<i4", 2).tolist() if len(content) >= 8 else (0, 0)
    start = 8 + 4 * max(3, axes)
    if kind not in _NORB_TYPES or not 1 <= axes <= 4 or len(content) < start:
        raise DataError(f"{path} is not a matrix of bytes or integers in NORB's format")
    shape = np.frombuffer(content, "<i4", axes, offset=8).tolist()
    values = np.frombuffer(content, _NORB_TYPES[kind], offset=start)
    if values.size != math.prod(shape):
        raise DataError(f"{path} has {values.size:,} values for the shape {shape}")
    return values.reshape(shape)


def _shuffle_rows(count: int) -> Integers:
    """0 to count - 1, in a random order that is always the same."""
    return SampleOrder(seed=0, num_samples=count).get_sample_indices(np.arange(count))


# --- the table of sources --------------------------------------------------------------------------------------------


class VtabSource(NamedTuple):
    """How to find and read a task's dataset."""

    folders: tuple[str, ...]
    """Its possible folders below the root of all datasets."""
    marker: str
    """A pattern of a file in that folder."""
    read: Callable[[Path], LabeledImages]


_CLEVR_FILES = (("clevr", "clevr/CLEVR_v1.0", "CLEVR_v1.0"), "scenes/CLEVR_val_scenes.json")
_DSPRITES_FILES = (("dsprites", "."), "dsprites*.npz")
_NORB_FILES = (("smallnorb", "."), "smallnorb-*-training-dat.mat*")

SOURCES = {
    "clevr_count": VtabSource(*_CLEVR_FILES, partial(_read_clevr, label_clevr_count)),
    "clevr_dist": VtabSource(*_CLEVR_FILES, partial(_read_clevr, label_clevr_distance)),
    "dsprites_loc": VtabSource(*_DSPRITES_FILES, partial(_read_dsprites, _X_COLUMN, _X_VALUES)),
    "dsprites_ori": VtabSource(*_DSPRITES_FILES, partial(_read_dsprites, _ORIENTATION_COLUMN, _ORIENTATION_VALUES)),
    "kitti": VtabSource(("kitti", "kitti/data_object"), "training/label_2", _read_kitti),
    "smallnorb_azi": VtabSource(*_NORB_FILES, partial(_read_smallnorb, _AZIMUTH_COLUMN, 2)),  # every other one of 36
    "smallnorb_ele": VtabSource(*_NORB_FILES, partial(_read_smallnorb, _ELEVATION_COLUMN, 1)),
}


def find_source(task: str, root: Path) -> Path | None:
    """The folder of a task's dataset as published, or None."""
    if task not in SOURCES:
        return None
    source = SOURCES[task]
    return next((root / name for name in source.folders if next((root / name).glob(source.marker), None)), None)
