"""What a DATA argument names, opened: a folder, a list, shards, a set that was got, `digits`, or a Hugging Face set.

Folders, lists and shards may lie elsewhere: s3://bucket/name. Only such a name, or hf:, opens a connection.
"""

import dataclasses
import glob
import importlib
from pathlib import Path

from vitrail import remote
from vitrail.data import file_list, folder, imagenet, public_datasets, shards, webdataset
from vitrail.data.dataset import Dataset
from vitrail.errors import DataError, UsageError

HUB_PREFIX = "hf:"
DIGITS_NAME = "digits"


def open_dataset(name: str, *, holdout_fraction: float = 0.1) -> Dataset:
    """The set of that name; what it lacks of val and test is held out of its images, `share` of them for each.

    A path wins over a known name only when it contains a separator or is a file, so `./digits` is a folder and
    `digits` is the set.
    """
    if not 0 < holdout_fraction < 0.5:
        raise UsageError(f"the share held out is {holdout_fraction}; it must lie between 0 and 0.5")
    if not name:
        raise UsageError("the name of the data is empty; '.' is the folder you are in")
    path = Path(name)
    if name.startswith(HUB_PREFIX):
        return importlib.import_module("vitrail.data.huggingface").open_hub(
            name.removeprefix(HUB_PREFIX), holdout_fraction=holdout_fraction
        )
    if remote.is_remote(name) and not webdataset.is_tar_pattern(name):
        return _open_remote(name.rstrip("/"), holdout_fraction)
    if webdataset.is_tar_pattern(name):
        return webdataset.open_tars(name, holdout_fraction=holdout_fraction)
    if "/" in name or path.is_file():
        return _open_path(path, holdout_fraction)
    if name == DIGITS_NAME:
        return importlib.import_module("vitrail.data.digits").open_digits(holdout_fraction=holdout_fraction)
    if name in public_datasets.PUBLIC_DATASETS:
        return _open_public_dataset(name, holdout_fraction)
    return _open_path(path, holdout_fraction)


def _open_public_dataset(name: str, holdout_fraction: float) -> Dataset:
    stored = public_datasets.get_dataset_folder(name)
    if not stored.exists():
        raise DataError(f"{name} is not here yet: vitrail data get {name}. (A folder of that name is ./{name})")
    return shards.open_shards(stored, holdout_fraction=holdout_fraction)


def _open_path(path: Path, holdout_fraction: float) -> Dataset:
    if path.is_file():
        if path.name.lower().endswith((".tar.gz", ".tgz")):
            return _open_misnamed_tar(path, holdout_fraction)
        if path.suffix.lower() not in file_list.LIST_SUFFIXES:
            raise DataError(
                f"{path} is a file; a set is a folder, shards (*.tar) or a list ({', '.join(file_list.LIST_SUFFIXES)})"
            )
        return file_list.open_file_list(path, holdout_fraction=holdout_fraction)
    if not path.is_dir():
        known = ", ".join((DIGITS_NAME, *public_datasets.PUBLIC_DATASETS))
        raise DataError(f"{path} does not exist. A set is a folder, a .csv or .jsonl, shards, hf:ORG/NAME, or {known}")
    if (path / shards.DESCRIPTION_FILE).exists():
        return shards.open_shards(path, holdout_fraction=holdout_fraction)
    if imagenet.has_flat_validation(path):
        return _open_imagenet(path, holdout_fraction)
    try:
        return folder.open_folder(path, holdout_fraction=holdout_fraction)
    except folder.NoImageError:
        for pattern in ("*.tar", "*/*.tar"):
            if next(path.glob(pattern), None):
                return webdataset.open_tars(f"{glob.escape(str(path))}/{pattern}", holdout_fraction=holdout_fraction)
        raise


def _open_imagenet(path: Path, share: float) -> Dataset:
    """ImageNet with a flat validation folder; its training images may be tars of classes that lie beside it."""
    archives = imagenet.find_train_archives(path)
    if not archives:
        return imagenet.open_imagenet_folder(path, holdout_fraction=share)
    if missing := imagenet.explain_missing_labels(imagenet.find_validation(path)):
        raise DataError(missing)
    train = webdataset.open_tars(f"{glob.escape(str(path))}/{archives}", holdout_fraction=None)
    dataset = imagenet.open_imagenet_folder(path, holdout_fraction=share)
    if train.classes != dataset.classes:
        raise DataError(
            f"{path}/{archives} has {len(train.classes):,} classes and the validation images have"
            f" {len(dataset.classes):,}, which are not the same: put them into folders of their own"
        )
    return dataclasses.replace(dataset, splits={**train.splits, **dataset.splits}, notes=(*train.notes, *dataset.notes))


def _open_misnamed_tar(path: Path, holdout_fraction: float) -> Dataset:
    """A tar that is only called compressed."""
    with path.open("rb") as file:
        if file.read(2) == b"\x1f\x8b":
            raise DataError(f"{path} is compressed, so its images cannot be read at random: gunzip {path} first")
    return webdataset.open_tars(str(path), holdout_fraction=holdout_fraction)


def _open_remote(url: str, holdout_fraction: float) -> Dataset:
    """The same of a name with a scheme, less those kinds of sets that are only read here."""
    if url.lower().endswith(file_list.LIST_SUFFIXES):
        return file_list.open_file_list(url, holdout_fraction=holdout_fraction)
    if remote.is_file(url):
        raise DataError(
            f"{url} is a file; a set is a folder, shards (*.tar) or a list ({', '.join(file_list.LIST_SUFFIXES)})"
        )
    if remote.is_file(remote.join_url(url, shards.DESCRIPTION_FILE)):
        return shards.open_shards(url, holdout_fraction=holdout_fraction)
    try:
        return folder.open_folder(url, holdout_fraction=holdout_fraction)
    except folder.NoImageError:
        for pattern in ("*.tar", "*/*.tar"):
            if remote.glob(remote.join_url(url, pattern)):
                return webdataset.open_tars(remote.join_url(url, pattern), holdout_fraction=holdout_fraction)
        raise
