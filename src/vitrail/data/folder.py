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
from vitrail.data import holdout, sample_table
from vitrail.data.dataset import UNLABELED, Dataset, build_splits
from vitrail.data.folder_visits import FolderVisits, is_folder, walk_folders
from vitrail.data.image_headers import IMAGE_SUFFIXES, get_image_suffixes, suggest_decoder
from vitrail.data.sample_table import Array, SampleTable, encode_text_column
from vitrail.errors import DataError
from vitrail.plurals import pluralize

_DATE_PATTERN = re.compile(r"(19|20)\d\d([-_. ]?\d\d?){0,2}")
_SET_SUFFIX = re.compile(r"(?<=.)(set|data|images?)$")
SPLIT_NAMES = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "dev": 1, "test": 2, "testing": 2}


@dataclasses.dataclass(frozen=True)
class FileStore:
    """Images in files of their own."""

    root: Path | str
    """A folder, here or, by its URL, elsewhere."""
    table: SampleTable

    @property
    def is_remote(self) -> bool:
        """Whether a read is a request to a store."""
        return isinstance(self.root, str)

    def get_name(self, row: int) -> str:
        """The path below the set's folder."""
        return self.table.get_text("path", row)

    def read(self, row: int) -> Path | bytes:
        """The file, or its bytes where it is elsewhere."""
        if isinstance(self.root, Path):
            return self.root / self.get_name(row)
        return remote.read(remote.join_url(self.root, self.get_name(row)))


class NoImageError(DataError):
    """A folder without a single image file."""


class _Listing(NamedTuple):
    """What a walk has seen."""

    paths: list[str]
    other_files: list[str]
    """Files that are no images by their suffix."""
    folders: list[str]
    sizes: list[int]
    """Of the images, where the store says them."""
    notes: list[str]
    """What was left out."""


def open_folder(root: Path | str, *, holdout_fraction: float = 0.1) -> Dataset:
    """The set a folder holds, given by its path or its URL."""
    root = root.resolve() if isinstance(root, Path) else root
    folders: list[str] = []

    def build_table() -> tuple[Mapping[str, Array], dict[str, Any]]:
        listing = _list_local_files(root) if isinstance(root, Path) else _list_remote_files(root)
        folders.extend(listing.folders)
        return _build_columns(root, listing, holdout_fraction)

    source = " ".join(["folder", str(root), str(holdout_fraction), *get_image_suffixes()[len(IMAGE_SUFFIXES) :]])
    table = sample_table.load_or_build_table(source, lambda: folders if isinstance(root, Path) else [root], build_table)
    facts = table.metadata
    store = FileStore(root, table)
    return Dataset(
        name=str(root),
        classes=tuple(facts["classes"]),
        splits=build_splits(store, table["split"]),
        generated_splits=tuple(facts["made_up"]),
        notes=tuple(facts["notes"]),
        empty_classes=tuple(facts["empty_classes"]),
        layout_warning=facts["question"],
    )


def _build_columns(
    root: Path | str, listing: _Listing, holdout_fraction: float
) -> tuple[dict[str, Array], dict[str, Any]]:
    """The table's columns and facts."""
    if not listing.paths:
        what = pluralize(len(listing.other_files), "other file")
        other = f"; it holds {what}, such as {listing.other_files[0]}" if listing.other_files else ""
        other += suggest_decoder(listing.other_files)
        raise NoImageError(f"{root} holds no image ({', '.join(get_image_suffixes())}){other}")
    tops = sorted({path.partition("/")[0] for path in listing.paths if "/" in path})
    inner = _list_subfolders(listing.paths, tops)
    by_name = _match_split_names(inner)
    split_by = bool(by_name)
    if not split_by and "train" in tops:
        beside = next(top for top in tops if top.lower() not in SPLIT_NAMES)
        raise DataError(f"{root} holds images in train and in {beside}, which is no split: move {beside} elsewhere")
    at = 1 if split_by else 0
    found = {_get_class_name(path, at) for path in listing.paths} - {""}
    empty = _find_empty_classes(listing, root, at, found) if found else []
    classes = sorted(found)
    _check_stray_images(listing.paths, at, bool(classes))
    number = {name: place for place, name in enumerate(classes)} | {"": UNLABELED}
    count = len(listing.paths)
    label = np.fromiter((number[_get_class_name(path, at)] for path in listing.paths), dtype=np.int32, count=count)
    given = np.full(count, holdout.NO_SPLIT, dtype=np.int8)
    if split_by:
        splits = (by_name[path.partition("/")[0]] for path in listing.paths)
        given = np.fromiter(splits, dtype=np.int8, count=count)
    split = holdout.complete_splits(
        given, label, listing.paths.__getitem__, identity=str(root), holdout_fraction=holdout_fraction
    )
    notes = [*split.notes, *_describe_omissions(listing, classes, empty)]
    facts = {"classes": classes, "made_up": split.generated_splits, "notes": notes, "empty_classes": empty}
    facts["question"] = "" if split_by else _find_layout_warning(root, inner)
    sizes = {"size": np.array(listing.sizes, dtype=np.int64)} if listing.sizes else {}
    return encode_text_column("path", listing.paths) | {"label": label, "split": split.column} | sizes, facts


def _list_subfolders(paths: Sequence[str], tops: Sequence[str]) -> dict[str, set[str]]:
    """The names of the folders with images in each folder; an empty one stands for images that lie in it directly."""
    inner: dict[str, set[str]] = {top: set() for top in tops}
    for path in paths:
        top, *rest = path.split("/")
        if rest:
            inner[top].add(rest[0] if len(rest) > 1 else "")
    return inner


def _match_split_names(subfolders: Mapping[str, set[str]]) -> dict[str, int]:
    """The split that each folder is named after, or nothing where these are no splits."""
    if all(top.lower() in SPLIT_NAMES for top in subfolders):
        return {top: SPLIT_NAMES[top.lower()] for top in subfolders}
    named = _match_long_split_names(subfolders)
    return named if named and _find_shared_classes(subfolders) else {}


def _match_long_split_names(tops: Iterable[str]) -> dict[str, int]:
    """The split that each folder's longer name speaks of, where each speaks of another one."""
    words = {top: _find_split_words(top) for top in tops}
    named = {top: split for top, splits in words.items() for split in splits}
    one_each = all(len(splits) == 1 for splits in words.values()) and len(set(named.values())) == len(words)
    return named if one_each and len(words) > 1 else {}


def _find_shared_classes(subfolders: Mapping[str, set[str]]) -> list[str]:
    """The folders that all folders have in them, where none has an image directly."""
    return [] if any("" in names for names in subfolders.values()) else sorted(set.intersection(*subfolders.values()))


def _find_split_words(folder: str) -> set[int]:
    """The splits that a folder's name speaks of: training_set, test-images and valset name one each."""
    words = re.findall("[a-z]+", folder.lower())
    return {SPLIT_NAMES[word] for each in words for word in (each, _SET_SUFFIX.sub("", each)) if word in SPLIT_NAMES}


def _find_layout_warning(root: Path | str, subfolders: Mapping[str, set[str]]) -> str:
    """What to ask where folders look like years, batches or splits above the classes; nothing where they do not."""
    tops = list(subfolders)
    if len(tops) < 2:
        return ""
    shared = _find_shared_classes(subfolders)
    splits = [top for top in tops if _find_split_words(top)]
    known = sorted({name for top in splits for name in subfolders[top]} & set(tops))
    if all(re.search(r"\d", top) for top in tops) and len(shared) > 1:
        why = f", each with {_join_first_names(shared)} in it"
    elif splits and known:
        why = f", and {splits[0]} has a split's name and {known[0]} in it"
    elif _match_long_split_names(tops):
        why = ", which have splits' names and no class in common"
    elif all(_DATE_PATTERN.fullmatch(top) for top in tops):
        why = ", which look like dates"
    else:
        return ""
    return (
        f"{root} holds the folders {_join_first_names(tops)}{why}: are these the classes? If they are splits, name them train, val"
        f" and test; if only one is meant, give {root}/{tops[0]}; if they are classes, list the images in a .csv with"
        " path and label, and give that"
    )


def _check_stray_images(paths: Sequence[str], class_depth: int, has_labels: bool) -> None:
    """Every image lies in a class's folder or none does, and likewise with splits."""
    for path in paths:
        if path.count("/") < class_depth or (has_labels and not _get_class_name(path, class_depth)):
            raise DataError(f"{path} lies in no class's folder, while others do; every image needs one")


def _get_class_name(path: str, class_depth: int) -> str:
    """The name of the folder at that depth, or nothing where the file lies above it."""
    parts = path.split("/", class_depth + 1)
    return parts[class_depth] if len(parts) > class_depth + 1 else ""


def _find_empty_classes(listing: _Listing, root: Path | str, class_depth: int, known_classes: set[str]) -> list[str]:
    """Class folders without an image in any split."""
    depth = [Path(os.path.relpath(folder, root)).parts for folder in listing.folders[1:]]
    return sorted({parts[class_depth] for parts in depth if len(parts) == class_depth + 1} - known_classes)


def _describe_omissions(listing: _Listing, classes: list[str], empty_classes: list[str]) -> Iterator[str]:
    yield from listing.notes
    if listing.other_files:
        count, names = pluralize(len(listing.other_files), "file"), _join_first_names(listing.other_files)
        yield f"{count} without an image's suffix left out: {names}{suggest_decoder(listing.other_files)}"
    if empty_classes:
        yield f"{pluralize(len(empty_classes), 'class folder')} without an image left out: {_join_first_names(empty_classes)}"
    if not classes:
        yield "no class folders: the images have no labels"


def _join_first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def _list_local_files(root: Path) -> _Listing:
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
                kept = listing.paths if entry.name.lower().endswith(get_image_suffixes()) else listing.other_files
                kept.append(prefix + entry.name)
    listing.notes.extend([visits.describe()] if visits.skipped_folders else [])
    return listing


def _list_remote_files(url: str) -> _Listing:
    """Every file below a folder that lies elsewhere, in the order of a walk; without files there are no folders."""
    files = remote.list_files(url)
    shown = [path for path in files if "/." not in f"/{path}"]
    inner = {PurePosixPath(path.rpartition("/")[0]) for path in shown}
    folders = {str(above) for folder in inner for above in (folder, *folder.parents)} - {"."}
    listing = _Listing([], [], [url, *(remote.join_url(url, folder) for folder in sorted(folders))], [], [])
    for path in sorted(shown, key=_get_walk_order_key):
        if path.lower().endswith(get_image_suffixes()):
            listing.paths.append(path)
            listing.sizes.append(files[path].size)
        else:
            listing.other_files.append(path)
    return listing


def _get_walk_order_key(path: str) -> list[tuple[bool, str]]:
    """A folder's own files come before those of the folders in it."""
    *folders, name = path.split("/")
    return [*((True, folder) for folder in folders), (False, name)]
