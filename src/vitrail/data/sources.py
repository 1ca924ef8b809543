"""What a DATA argument names, opened: a folder, a list, shards, a set that was got, `digits`, or a Hugging Face set.

Folders, lists and shards may lie elsewhere: s3://bucket/name. Only such a name, or hf:, opens a connection.
"""

import dataclasses
import glob
import importlib
from pathlib import Path

from vitrail import remote
from vitrail.data import folder, imagenet, lists, public, shards, tars
from vitrail.data.dataset import Dataset
from vitrail.errors import DataError, UsageError

HUB = "hf:"
DIGITS = "digits"


def open_data(name: str, *, share: float = 0.1) -> Dataset:
    """The set of that name; what it lacks of val and test is held out of its images, `share` of them for each.

    A path wins over a known name only when it contains a separator or is a file, so `./digits` is a folder and
    `digits` is the set.
    """
    if not 0 < share < 0.5:
        raise UsageError(f"the share held out is {share}; it must lie between 0 and 0.5")
    if not name:
        raise UsageError("the name of the data is empty; '.' is the folder you are in")
    path = Path(name)
    if name.startswith(HUB):
        return importlib.import_module("vitrail.data.huggingface").open_hub(name.removeprefix(HUB), share=share)
    if remote.is_remote(name) and not tars.is_pattern(name):
        return _open_remote(name.rstrip("/"), share)
    if tars.is_pattern(name):
        return tars.open_tars(name, share=share)
    if "/" in name or path.is_file():
        return _open_path(path, share)
    if name == DIGITS:
        return importlib.import_module("vitrail.data.digits").open_digits(share=share)
    if name in public.SETS:
        return _open_public(name, share)
    return _open_path(path, share)


def _open_public(name: str, share: float) -> Dataset:
    stored = public.home(name)
    if not stored.exists():
        raise DataError(f"{name} is not here yet: vitrail data get {name}. (A folder of that name is ./{name})")
    return shards.open_set(stored, share=share)


def _open_path(path: Path, share: float) -> Dataset:
    if path.is_file():
        if path.name.lower().endswith((".tar.gz", ".tgz")):
            return _open_compressed(path, share)
        if path.suffix.lower() not in lists.SUFFIXES:
            raise DataError(
                f"{path} is a file; a set is a folder, shards (*.tar) or a list ({', '.join(lists.SUFFIXES)})"
            )
        return lists.open_list(path, share=share)
    if not path.is_dir():
        known = ", ".join((DIGITS, *public.SETS))
        raise DataError(f"{path} does not exist. A set is a folder, a .csv or .jsonl, shards, hf:ORG/NAME, or {known}")
    if (path / shards.SET).exists():
        return shards.open_set(path, share=share)
    if imagenet.has_flat_validation(path):
        return _open_imagenet(path, share)
    try:
        return folder.open_folder(path, share=share)
    except folder.NoImageError:
        for pattern in ("*.tar", "*/*.tar"):
            if next(path.glob(pattern), None):
                return tars.open_tars(f"{glob.escape(str(path))}/{pattern}", share=share)
        raise


def _open_imagenet(path: Path, share: float) -> Dataset:
    """ImageNet with a flat validation folder; its training images may be tars of classes that lie beside it."""
    archives = imagenet.find_train_archives(path)
    if not archives:
        return imagenet.open_images(path, share=share)
    if missing := imagenet.explain_missing_labels(imagenet.find_validation(path)):
        raise DataError(missing)
    train = tars.open_tars(f"{glob.escape(str(path))}/{archives}", share=None)
    dataset = imagenet.open_images(path, share=share)
    if train.classes != dataset.classes:
        raise DataError(
            f"{path}/{archives} has {len(train.classes):,} classes and the validation images have"
            f" {len(dataset.classes):,}, which are not the same: put them into folders of their own"
        )
    return dataclasses.replace(dataset, splits={**train.splits, **dataset.splits}, notes=(*train.notes, *dataset.notes))


def _open_compressed(path: Path, share: float) -> Dataset:
    """A tar that is only called compressed."""
    with path.open("rb") as file:
        if file.read(2) == b"\x1f\x8b":
            raise DataError(f"{path} is compressed, so its images cannot be read at random: gunzip {path} first")
    return tars.open_tars(str(path), share=share)


def _open_remote(url: str, share: float) -> Dataset:
    """The same of a name with a scheme, less those kinds of sets that are only read here."""
    if url.lower().endswith(lists.SUFFIXES):
        return lists.open_list(url, share=share)
    if remote.is_file(url):
        raise DataError(f"{url} is a file; a set is a folder, shards (*.tar) or a list ({', '.join(lists.SUFFIXES)})")
    if remote.is_file(remote.joined(url, shards.SET)):
        return shards.open_set(url, share=share)
    try:
        return folder.open_folder(url, share=share)
    except folder.NoImageError:
        for pattern in ("*.tar", "*/*.tar"):
            if remote.glob(remote.joined(url, pattern)):
                return tars.open_tars(remote.joined(url, pattern), share=share)
        raise
