"""Opening a DATA argument: a folder, a list, shards, Parquet files, a downloaded dataset, `digits`,
`faces`, or a Hub dataset.

Folders, lists, shards and Parquet files may be remote: s3://bucket/name. Only such a name, or hf:, opens a connection.
"""

import dataclasses
import glob
import importlib
from pathlib import Path

from vitrail import remote
from vitrail.data import (
    file_list,
    folder,
    imagenet,
    memory,
    parquet,
    parquet_files,
    public_datasets,
    shards,
    webdataset,
)
from vitrail.data.dataset import Dataset
from vitrail.data.memory import (
    DIGITS_NAME,
    FACES_NAME,
    InMemoryData,
    build_memory_dataset,
    open_digits,
    open_faces,
)
from vitrail.errors import DataError, NoImageError, UsageError
from vitrail.files import suggest_path
from vitrail.formatting import pluralize

__all__ = ["DataSource", "open_dataset"]

DataSource = str | Path | Dataset | InMemoryData
"""A DATA argument, or the same from Python: an opened dataset, or Python objects (`memory`)."""
HUB_PREFIX = "hf:"


def get_data_name(data: DataSource) -> str:
    """The name of the data in messages."""
    return str(data) if isinstance(data, str | Path) else data.name if isinstance(data, Dataset) else memory.NAME


def advise_data_check(data: str) -> str:
    """The sentence that names the command to find bad images, with a space before; empty for images in memory."""
    return (
        "" if data == memory.NAME else f" `vitrail data check {data}` names every bad image, and how to leave them out"
    )


def open_dataset(name: DataSource, *, holdout_fraction: float = 0.1) -> Dataset:
    """Open the dataset of that name, or made of Python objects.

    Missing val and test splits are held out, `holdout_fraction` of the images each.

    A path takes precedence over a known name only if it contains a separator or is a file: `./digits` is a folder, and
    `digits` is the dataset.

        from vitrail.data.sources import open_dataset

        dataset = open_dataset("photos")
        train = dataset.splits["train"]  # a Split of the Dataset
        print(dataset.classes, len(train), train.get_image_name(0), train.get_labels(0))
    """
    if not 0 < holdout_fraction < 0.5:
        raise UsageError(f"the fraction to hold out is {holdout_fraction}; it must be between 0 and 0.5")
    if isinstance(name, Dataset):
        return name
    if isinstance(name, Path):
        is_parquet = parquet_files.is_parquet_pattern(str(name))
        return (
            open_dataset(str(name), holdout_fraction=holdout_fraction)
            if is_parquet
            else _open_location(name, holdout_fraction)
        )
    if not isinstance(name, str):
        return build_memory_dataset(name, holdout_fraction=holdout_fraction)
    if not name:
        raise UsageError("the name of the data is empty; '.' is the current folder")
    if name.startswith(HUB_PREFIX):
        huggingface = importlib.import_module("vitrail.data.huggingface")
        return huggingface.open_hub_dataset(name.removeprefix(HUB_PREFIX), holdout_fraction=holdout_fraction)
    if parquet_files.is_parquet_pattern(name):
        return parquet.open_parquet_dataset(name, holdout_fraction=holdout_fraction)
    if webdataset.is_tar_pattern(name):
        return webdataset.open_tars(name, holdout_fraction=holdout_fraction)
    if remote.is_remote(name):
        return _open_location(name.rstrip("/"), holdout_fraction)
    if "/" not in name and not Path(name).is_file():
        if name == DIGITS_NAME:
            return open_digits(holdout_fraction=holdout_fraction)
        if name == FACES_NAME:
            return open_faces()
        if name in public_datasets.PUBLIC_DATASETS:
            stored = public_datasets.get_dataset_folder(name)
            if stored.exists():
                return shards.open_shards(stored, holdout_fraction=holdout_fraction)
            raise DataError(
                f"{name} is not downloaded yet: vitrail data get {name}. (A folder of that name is ./{name})"
            )
    return _open_location(Path(name), holdout_fraction)


def _open_location(location: Path | str, holdout_fraction: float) -> Dataset:
    """Open a list or folder, given by path or URL."""
    is_list = str(location).lower().endswith(file_list.LIST_SUFFIXES)
    if is_list and (isinstance(location, str) or location.is_file()):
        return file_list.open_file_list(location, holdout_fraction=holdout_fraction)
    if _is_file(location):
        return _open_misnamed_tar(location, holdout_fraction)
    if isinstance(location, Path) and not location.is_dir():
        names = ", ".join((DIGITS_NAME, FACES_NAME, *public_datasets.PUBLIC_DATASETS))
        hint = suggest_path(location) or "."
        raise DataError(
            f"{location} does not exist{hint} A dataset is a folder, a .csv or .jsonl, shards, Parquet files,"
            f" hf:ORG/NAME, or {names}"
        )
    if _is_file(_join(location, shards.DESCRIPTION_FILE)):
        return shards.open_shards(location, holdout_fraction=holdout_fraction)
    if isinstance(location, Path) and imagenet.has_flat_validation(location):
        return _open_imagenet(location, holdout_fraction)
    try:
        return folder.open_folder(location, holdout_fraction=holdout_fraction)
    except NoImageError:
        root = location if isinstance(location, str) else glob.escape(str(location))
        for pattern in (f"{root}/*.tar", f"{root}/*/*.tar"):
            if webdataset.list_matches(pattern):
                return webdataset.open_tars(pattern, holdout_fraction=holdout_fraction)
        if parquet_files.has_parquet_files(str(location)):
            return parquet.open_parquet_dataset(str(location), holdout_fraction=holdout_fraction)
        raise


def _is_file(location: Path | str) -> bool:
    return location.is_file() if isinstance(location, Path) else remote.is_file(location)


def _join(location: Path | str, name: str) -> Path | str:
    return location / name if isinstance(location, Path) else remote.join_url(location, name)


def _open_imagenet(path: Path, holdout_fraction: float) -> Dataset:
    """Open ImageNet with a flat validation folder; its training images may be in class tars beside it."""
    archives = imagenet.find_train_archives(path)
    if not archives:
        return imagenet.open_imagenet_folder(path, holdout_fraction=holdout_fraction)
    if missing := imagenet.explain_missing_labels(imagenet.find_validation(path)):
        raise DataError(missing)
    train = webdataset.open_tars(f"{glob.escape(str(path))}/{archives}", holdout_fraction=None)
    dataset = imagenet.open_imagenet_folder(path, holdout_fraction=holdout_fraction)
    if train.classes != dataset.classes:
        raise DataError(
            f"{path}/{archives} has {pluralize(len(train.classes), 'class')} and the validation images have"
            f" {len(dataset.classes):,}, which are not the same: put them into separate folders"
        )
    return dataclasses.replace(dataset, splits={**train.splits, **dataset.splits}, notes=(*train.notes, *dataset.notes))


def _open_misnamed_tar(file: Path | str, holdout_fraction: float) -> Dataset:
    """Open a local tar whose name says that it is compressed although it is not; refuse any other file."""
    if isinstance(file, str) or not file.name.lower().endswith((".tar.gz", ".tgz")):
        suffixes = ", ".join(file_list.LIST_SUFFIXES)
        raise DataError(f"{file} is a file; a dataset is a folder, shards (*.tar), *.parquet or a list ({suffixes})")
    with file.open("rb") as content:
        if content.read(2) == b"\x1f\x8b":
            raise DataError(f"{file} is compressed, which prevents random access to its images: gunzip {file} first")
    return webdataset.open_tars(str(file), holdout_fraction=holdout_fraction)
