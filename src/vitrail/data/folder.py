"""A folder of images: one subfolder a class, with or without train, val and test above them.

Splits may have longer names, such as training_set and test_set, where each is named after another split and all have a
class in common.
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from vitrail import remote
from vitrail.data import holdout, index
from vitrail.data.dataset import UNLABELLED, Dataset, from_column
from vitrail.data.decode import SUFFIXES, image_suffixes, suggest_decoder
from vitrail.data.folder_visits import FolderVisits, is_folder, walk_folders
from vitrail.data.table import Array, Table, texts
from vitrail.errors import DataError
from vitrail.plurals import plural

_DATE = re.compile(r"(19|20)\d\d([-_. ]?\d\d?){0,2}")
_SET = re.compile(r"(?<=.)(set|data|images?)$")
SPLIT_NAMES = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "dev": 1, "test": 2, "testing": 2}


@dataclasses.dataclass(frozen=True)
class Files:
    """Images in files of their own."""

    root: Path | str
    """A folder, here or, by its URL, elsewhere."""
    table: Table

    @property
    def far(self) -> bool:
        """Whether a read is a request to a store."""
        return isinstance(self.root, str)

    def name(self, row: int) -> str:
        """The path below the set's folder."""
        return self.table.text("path", row)

    def read(self, row: int) -> Path | bytes:
        """The file, or its bytes where it is elsewhere."""
        if isinstance(self.root, Path):
            return self.root / self.name(row)
        return remote.read(remote.joined(self.root, self.name(row)))


class NoImageError(DataError):
    """A folder without a single image file."""


class _Listing(NamedTuple):
    """What a walk has seen."""

    paths: list[str]
    others: list[str]
    """Files that are no images by their suffix."""
    folders: list[str]
    sizes: list[int]
    """Of the images, where the store says them."""
    remarks: list[str]
    """What was left out."""


def open_folder(root: Path | str, *, share: float = 0.1) -> Dataset:
    """The set a folder holds, given by its path or its URL."""
    root = root.resolve() if isinstance(root, Path) else root
    folders: list[str] = []

    def build() -> tuple[Mapping[str, Array], dict[str, Any]]:
        listing = _walked(root) if isinstance(root, Path) else _listed(root)
        folders.extend(listing.folders)
        return _columns(root, listing, share)

    source = " ".join(["folder", str(root), str(share), *image_suffixes()[len(SUFFIXES) :]])
    table = index.cached(source, lambda: folders if isinstance(root, Path) else [root], build)
    facts = table.facts
    store = Files(root, table)
    return Dataset(
        name=str(root),
        classes=tuple(facts["classes"]),
        splits=from_column(store, table["split"]),
        made_up=tuple(facts["made_up"]),
        notes=tuple(facts["notes"]),
        empty_classes=tuple(facts["empty_classes"]),
        question=facts["question"],
    )


def _columns(root: Path | str, listing: _Listing, share: float) -> tuple[dict[str, Array], dict[str, Any]]:
    """The table's columns and facts."""
    if not listing.paths:
        what = plural(len(listing.others), "other file")
        other = f"; it holds {what}, such as {listing.others[0]}" if listing.others else ""
        other += suggest_decoder(listing.others)
        raise NoImageError(f"{root} holds no image ({', '.join(image_suffixes())}){other}")
    tops = sorted({path.partition("/")[0] for path in listing.paths if "/" in path})
    inner = _list_inner(listing.paths, tops)
    by_name = _name_splits(inner)
    split_by = bool(by_name)
    if not split_by and "train" in tops:
        beside = next(top for top in tops if top.lower() not in SPLIT_NAMES)
        raise DataError(f"{root} holds images in train and in {beside}, which is no split: move {beside} elsewhere")
    at = 1 if split_by else 0
    found = {_class_of(path, at) for path in listing.paths} - {""}
    empty = _empty_classes(listing, root, at, found) if found else []
    classes = sorted(found)
    _check_strays(listing.paths, at, bool(classes))
    number = {name: place for place, name in enumerate(classes)} | {"": UNLABELLED}
    count = len(listing.paths)
    label = np.fromiter((number[_class_of(path, at)] for path in listing.paths), dtype=np.int32, count=count)
    given = np.full(count, holdout.NO_SPLIT, dtype=np.int8)
    if split_by:
        splits = (by_name[path.partition("/")[0]] for path in listing.paths)
        given = np.fromiter(splits, dtype=np.int8, count=count)
    split = holdout.completed(given, label, listing.paths.__getitem__, identity=str(root), share=share)
    notes = [*split.notes, *_remarks(listing, classes, empty)]
    facts = {"classes": classes, "made_up": split.made_up, "notes": notes, "empty_classes": empty}
    facts["question"] = "" if split_by else _question(root, inner)
    sizes = {"size": np.array(listing.sizes, dtype=np.int64)} if listing.sizes else {}
    return texts("path", listing.paths) | {"label": label, "split": split.column} | sizes, facts


def _list_inner(paths: Sequence[str], tops: Sequence[str]) -> dict[str, set[str]]:
    """The names of the folders with images in each folder; an empty one stands for images that lie in it directly."""
    inner: dict[str, set[str]] = {top: set() for top in tops}
    for path in paths:
        top, *rest = path.split("/")
        if rest:
            inner[top].add(rest[0] if len(rest) > 1 else "")
    return inner


def _name_splits(inner: Mapping[str, set[str]]) -> dict[str, int]:
    """The split that each folder is named after, or nothing where these are no splits."""
    if all(top.lower() in SPLIT_NAMES for top in inner):
        return {top: SPLIT_NAMES[top.lower()] for top in inner}
    named = _name_long_splits(inner)
    return named if named and _shared_classes(inner) else {}


def _name_long_splits(tops: Iterable[str]) -> dict[str, int]:
    """The split that each folder's longer name speaks of, where each speaks of another one."""
    words = {top: _split_words(top) for top in tops}
    named = {top: split for top, splits in words.items() for split in splits}
    one_each = all(len(splits) == 1 for splits in words.values()) and len(set(named.values())) == len(words)
    return named if one_each and len(words) > 1 else {}


def _shared_classes(inner: Mapping[str, set[str]]) -> list[str]:
    """The folders that all folders have in them, where none has an image directly."""
    return [] if any("" in names for names in inner.values()) else sorted(set.intersection(*inner.values()))


def _split_words(folder: str) -> set[int]:
    """The splits that a folder's name speaks of: training_set, test-images and valset name one each."""
    words = re.findall("[a-z]+", folder.lower())
    return {SPLIT_NAMES[word] for each in words for word in (each, _SET.sub("", each)) if word in SPLIT_NAMES}


def _question(root: Path | str, inner: Mapping[str, set[str]]) -> str:
    """What to ask where folders look like years, batches or splits above the classes; nothing where they do not."""
    tops = list(inner)
    if len(tops) < 2:
        return ""
    shared = _shared_classes(inner)
    splits = [top for top in tops if _split_words(top)]
    known = sorted({name for top in splits for name in inner[top]} & set(tops))
    if all(re.search(r"\d", top) for top in tops) and len(shared) > 1:
        why = f", each with {_first(shared)} in it"
    elif splits and known:
        why = f", and {splits[0]} has a split's name and {known[0]} in it"
    elif _name_long_splits(tops):
        why = ", which have splits' names and no class in common"
    elif all(_DATE.fullmatch(top) for top in tops):
        why = ", which look like dates"
    else:
        return ""
    return (
        f"{root} holds the folders {_first(tops)}{why}: are these the classes? If they are splits, name them train, val"
        f" and test; if only one is meant, give {root}/{tops[0]}; if they are classes, list the images in a .csv with"
        " path and label, and give that"
    )


def _check_strays(paths: Sequence[str], at: int, labelled: bool) -> None:
    """Every image lies in a class's folder or none does, and likewise with splits."""
    for path in paths:
        if path.count("/") < at or (labelled and not _class_of(path, at)):
            raise DataError(f"{path} lies in no class's folder, while others do; every image needs one")


def _class_of(path: str, at: int) -> str:
    """The name of the folder at that depth, or nothing where the file lies above it."""
    parts = path.split("/", at + 1)
    return parts[at] if len(parts) > at + 1 else ""


def _empty_classes(listing: _Listing, root: Path | str, at: int, known: set[str]) -> list[str]:
    """Class folders without an image in any split."""
    depth = [Path(os.path.relpath(folder, root)).parts for folder in listing.folders[1:]]
    return sorted({parts[at] for parts in depth if len(parts) == at + 1} - known)


def _remarks(listing: _Listing, classes: list[str], empty: list[str]) -> Iterator[str]:
    yield from listing.remarks
    if listing.others:
        count, names = plural(len(listing.others), "file"), _first(listing.others)
        yield f"{count} without an image's suffix left out: {names}{suggest_decoder(listing.others)}"
    if empty:
        yield f"{plural(len(empty), 'class folder')} without an image left out: {_first(empty)}"
    if not classes:
        yield "no class folders: the images have no labels"


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def _walked(root: Path) -> _Listing:
    """Every file below a folder, in the order of the names; links are followed, as FolderVisits allows."""
    listing = _Listing([], [], [], [], [])
    visits = FolderVisits()
    for folder, entries in walk_folders(str(root), visits):
        if isinstance(entries, OSError):
            raise DataError(f"{folder} cannot be listed: {entries.strerror}") from entries
        listing.folders.append(folder)
        prefix = f"{folder.removeprefix(str(root)).lstrip('/')}/" if len(listing.folders) > 1 else ""
        for entry in entries:
            if not is_folder(entry):
                kept = listing.paths if entry.name.lower().endswith(image_suffixes()) else listing.others
                kept.append(prefix + entry.name)
    listing.remarks.extend([visits.describe()] if visits.left_out else [])
    return listing


def _listed(url: str) -> _Listing:
    """Every file below a folder that lies elsewhere, in the order of a walk; without files there are no folders."""
    files = remote.find(url)
    shown = [path for path in files if "/." not in f"/{path}"]
    inner = {PurePosixPath(path.rpartition("/")[0]) for path in shown}
    folders = {str(above) for folder in inner for above in (folder, *folder.parents)} - {"."}
    listing = _Listing([], [], [url, *(remote.joined(url, folder) for folder in sorted(folders))], [], [])
    for path in sorted(shown, key=_walk_order):
        if path.lower().endswith(image_suffixes()):
            listing.paths.append(path)
            listing.sizes.append(files[path].size)
        else:
            listing.others.append(path)
    return listing


def _walk_order(path: str) -> list[tuple[bool, str]]:
    """A folder's own files come before those of the folders in it."""
    *folders, name = path.split("/")
    return [*((True, folder) for folder in folders), (False, name)]
