"""A folder of images: one subfolder per class, optionally below train, val and test.

Splits may have longer names, such as training_set and test_set, if each folder names a different split and all of them
share a class.
"""

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from vitrail import remote
from vitrail.data import holdout, sample_table
from vitrail.data.dataset import Dataset, build_dataset
from vitrail.data.image_headers import IMAGE_SUFFIXES, get_image_suffixes, suggest_decoder
from vitrail.data.sample_table import UNLABELED, Array, SampleTable, encode_text_column
from vitrail.errors import DataError, NoImageError
from vitrail.formatting import join_first_names, pluralize

_DATE_PATTERN = re.compile(r"(19|20)\d\d([-_. ]?\d\d?){0,2}")
_SET_SUFFIX = re.compile(r"(?<=.)(set|data|images?)$")
SPLIT_NAMES = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "dev": 1, "test": 2, "testing": 2}


@dataclasses.dataclass(frozen=True)
class FileStore:
    """Images in files of their own."""

    root: Path | str
    """A local folder, or the URL of a remote one."""
    table: SampleTable

    @property
    def is_remote(self) -> bool:
        """Whether each read is a request to a remote store."""
        return isinstance(self.root, str)

    def get_name(self, row: int) -> str:
        """The path below the dataset's folder."""
        return self.table.get_text("path", row)

    def read(self, row: int) -> Path | bytes:
        """The path of a local file, or the bytes of a remote one."""
        if isinstance(self.root, Path):
            return self.root / self.get_name(row)
        return remote.read(remote.join_url(self.root, self.get_name(row)))


class _Listing(NamedTuple):
    """The files and folders below a folder."""

    paths: list[str]
    other_files: list[str]
    """Files without an image suffix."""
    folders: list[str]
    sizes: list[int]
    """Sizes of the images, if the store reports them."""
    notes: list[str]
    """Descriptions of omitted folders."""


def open_folder(root: Path | str, *, holdout_fraction: float = 0.1) -> Dataset:
    """Open a folder of images, given by path or URL, as a dataset."""
    root = root.resolve() if isinstance(root, Path) else root
    folders: list[str] = []

    def build_table() -> tuple[Mapping[str, Array], dict[str, Any]]:
        listing = _list_local_files(root) if isinstance(root, Path) else _list_remote_files(root)
        folders.extend(listing.folders)
        return _build_columns(root, listing, holdout_fraction)

    source = " ".join(["folder", str(root), str(holdout_fraction), *get_image_suffixes()[len(IMAGE_SUFFIXES) :]])
    table = sample_table.load_or_build_table(source, lambda: folders if isinstance(root, Path) else [root], build_table)
    return build_dataset(str(root), FileStore(root, table))


def _build_columns(
    root: Path | str, listing: _Listing, holdout_fraction: float
) -> tuple[dict[str, Array], dict[str, Any]]:
    """The columns and metadata of the dataset's table."""
    if not listing.paths:
        raise NoImageError(_describe_missing_images(root, listing.other_files))
    subfolders = _list_subfolders(listing.paths)
    split_of_folder = _match_split_names(subfolders)
    if not split_of_folder and "train" in subfolders:
        other = next(name for name in subfolders if name.lower() not in SPLIT_NAMES)
        raise DataError(f"{root} holds images in train and in {other}, which is not a split: move {other} elsewhere")
    class_depth = 1 if split_of_folder else 0
    classes = sorted({_get_class_name(path, class_depth) for path in listing.paths} - {""})
    empty_classes = _find_empty_classes(listing, root, class_depth, classes) if classes else []
    _check_stray_images(listing.paths, class_depth, bool(classes))
    class_index = {name: number for number, name in enumerate(classes)} | {"": UNLABELED}
    count = len(listing.paths)
    labels = (class_index[_get_class_name(path, class_depth)] for path in listing.paths)
    label = np.fromiter(labels, dtype=np.int32, count=count)
    split_column = np.full(count, holdout.NO_SPLIT, dtype=np.int8)
    if split_of_folder:
        splits = (split_of_folder[path.partition("/")[0]] for path in listing.paths)
        split_column = np.fromiter(splits, dtype=np.int8, count=count)
    columns = encode_text_column("path", listing.paths) | {"label": label}
    if listing.sizes:
        columns["size"] = np.array(listing.sizes, dtype=np.int64)
    split = holdout.complete_splits(
        split_column, columns, listing.paths.__getitem__, identity=str(root), holdout_fraction=holdout_fraction
    )
    metadata = split.build_metadata(classes, _describe_omissions(listing, classes, empty_classes)) | {
        "empty_classes": empty_classes,
        "layout_warning": "" if split_of_folder else _find_layout_warning(root, subfolders),
    }
    return columns | {"split": split.column}, metadata


def _describe_missing_images(root: Path | str, other_files: Sequence[str]) -> str:
    count = pluralize(len(other_files), "other file")
    others = f"; it holds {count}, such as {other_files[0]}" if other_files else ""
    return f"{root} holds no image ({', '.join(get_image_suffixes())}){others}{suggest_decoder(other_files)}"


# --- classes and splits by the names of folders ----------------------------------------------------------------------


def _list_subfolders(paths: Iterable[str]) -> dict[str, set[str]]:
    """For each top folder, the names of its subfolders with images; "" stands for images directly in it."""
    subfolders: dict[str, set[str]] = {}
    for path in paths:
        top, *rest = path.split("/")
        if rest:
            subfolders.setdefault(top, set()).add(rest[0] if len(rest) > 1 else "")
    return dict(sorted(subfolders.items()))


def _match_split_names(subfolders: Mapping[str, set[str]]) -> dict[str, int]:
    """The split that each top folder is named after; empty if the folders are not splits."""
    if all(top.lower() in SPLIT_NAMES for top in subfolders):
        return {top: SPLIT_NAMES[top.lower()] for top in subfolders}
    split_of_folder = _match_long_split_names(subfolders)
    return split_of_folder if split_of_folder and _find_shared_classes(subfolders) else {}


def _match_long_split_names(folders: Iterable[str]) -> dict[str, int]:
    """The split in each folder's longer name; empty unless each folder names exactly one, and a different one."""
    splits_in_name = {folder: _find_split_words(folder) for folder in folders}
    split_of_folder = {folder: split for folder, splits in splits_in_name.items() for split in splits}
    one_each = all(len(splits) == 1 for splits in splits_in_name.values())
    distinct = len(set(split_of_folder.values())) == len(splits_in_name)
    return split_of_folder if one_each and distinct and len(splits_in_name) > 1 else {}


def _find_shared_classes(subfolders: Mapping[str, set[str]]) -> list[str]:
    """The subfolders that all top folders have; empty if any top folder holds an image directly."""
    return [] if any("" in names for names in subfolders.values()) else sorted(set.intersection(*subfolders.values()))


def _find_split_words(folder: str) -> set[int]:
    """The splits in a folder's name: training_set, test-images and valset name one each."""
    words = re.findall("[a-z]+", folder.lower())
    stems = [stem for word in words for stem in (word, _SET_SUFFIX.sub("", word))]
    return {SPLIT_NAMES[stem] for stem in stems if stem in SPLIT_NAMES}


def _find_layout_warning(root: Path | str, subfolders: Mapping[str, set[str]]) -> str:
    """A warning if folders look like years, batches or splits above the classes; empty otherwise."""
    tops = list(subfolders)
    if len(tops) < 2:
        return ""
    shared_classes = _find_shared_classes(subfolders)
    splits = [top for top in tops if _find_split_words(top)]
    classes_in_splits = sorted({name for top in splits for name in subfolders[top]} & set(tops))
    if all(re.search(r"\d", top) for top in tops) and len(shared_classes) > 1:
        reason = f", each of which holds {join_first_names(shared_classes)}"
    elif splits and classes_in_splits:
        reason = f", and {splits[0]} has the name of a split and holds {classes_in_splits[0]}"
    elif _match_long_split_names(tops):
        reason = ", which have names of splits and share no class"
    elif all(_DATE_PATTERN.fullmatch(top) for top in tops):
        reason = ", which look like dates"
    else:
        return ""
    return (
        f"{root} holds the folders {join_first_names(tops)}{reason}: are these the classes? If they are splits, name"
        f" them train, val and test; to use only one, pass {root}/{tops[0]}; if they are classes, list the images in a"
        " .csv with path and label, and pass that"
    )


def _check_stray_images(paths: Sequence[str], class_depth: int, has_labels: bool) -> None:
    """Refuse images outside of class folders, or of splits, while other images are inside."""
    for path in paths:
        if path.count("/") < class_depth or (has_labels and not _get_class_name(path, class_depth)):
            raise DataError(f"{path} is in no class folder, while other images are; every image needs one")


def _get_class_name(path: str, class_depth: int) -> str:
    """The name of the folder at that depth; empty if the file is above it."""
    parts = path.split("/", class_depth + 1)
    return parts[class_depth] if len(parts) > class_depth + 1 else ""


def _find_empty_classes(listing: _Listing, root: Path | str, class_depth: int, classes: Iterable[str]) -> list[str]:
    """Class folders without an image in any split."""
    folder_parts = [Path(os.path.relpath(folder, root)).parts for folder in listing.folders[1:]]
    names = {parts[class_depth] for parts in folder_parts if len(parts) == class_depth + 1}
    return sorted(names.difference(classes))


def _describe_omissions(listing: _Listing, classes: Sequence[str], empty_classes: Sequence[str]) -> Iterator[str]:
    yield from listing.notes
    if listing.other_files:
        count, names = pluralize(len(listing.other_files), "file"), join_first_names(listing.other_files)
        yield f"{count} without an image suffix left out: {names}{suggest_decoder(listing.other_files)}"
    if empty_classes:
        count = pluralize(len(empty_classes), "class folder")
        yield f"{count} without an image left out: {join_first_names(empty_classes)}"
    if not classes:
        yield "no class folders: the images have no labels"


# --- listing files ---------------------------------------------------------------------------------------------------


def _list_local_files(root: Path) -> _Listing:
    """All files below a folder, a folder's own files before those of its subfolders; links are followed."""
    listing, visits = _Listing([], [], [], [], []), FolderVisits()
    prefix = os.path.join(root, "")  # noqa: PTH118, as text
    for walked in walk_folder(str(root), visits, files_first=True):
        if walked.error:
            raise DataError(f"{walked.path} cannot be listed: {walked.error.strerror}") from walked.error
        if walked.is_folder:
            listing.folders.append(walked.path)
        else:
            is_image = walked.path.lower().endswith(get_image_suffixes())
            (listing.paths if is_image else listing.other_files).append(walked.path.removeprefix(prefix))
    listing.notes.extend([visits.describe()] if visits.skipped_folders else [])
    return listing


def _list_remote_files(url: str) -> _Listing:
    """All files below a remote folder, in the order of a local walk; remote folders exist only through their files."""
    files = remote.list_files(url)
    visible = [path for path in files if "/." not in f"/{path}"]
    parents = {PurePosixPath(path.rpartition("/")[0]) for path in visible}
    folders = {str(folder) for parent in parents for folder in (parent, *parent.parents)} - {"."}
    listing = _Listing([], [], [url, *(remote.join_url(url, folder) for folder in sorted(folders))], [], [])
    for path in sorted(visible, key=_get_walk_order_key):
        if path.lower().endswith(get_image_suffixes()):
            listing.paths.append(path)
            listing.sizes.append(files[path].size)
        else:
            listing.other_files.append(path)
    return listing


def _get_walk_order_key(path: str) -> list[tuple[bool, str]]:
    """A sort key that puts a folder's own files before those of its subfolders."""
    *folders, name = path.split("/")
    return [*((True, folder) for folder in folders), (False, name)]


# --- walking local folders -------------------------------------------------------------------------------------------

VISIT_LIMIT = 16  # visits of one folder through links, in one walk
InodeKey = tuple[int, int]
"""Device and inode."""


class FolderVisits:
    """The folders that a walk has entered, which limits how links multiply them.

    Links are followed: train/cat and val/cat may lead to one folder. But 8 folders that link to each other have 109,600
    paths. So a walk enters no folder within itself, and none through links more often than a sensible layout needs.
    """

    def __init__(self) -> None:
        self._through_links: Counter[InodeKey] = Counter()
        self.skipped_folders: list[str] = []
        """Paths of folders that were visited too often to be entered again."""

    def enter(self, folder: str, ancestors: tuple[InodeKey, ...], *, through_link: bool) -> tuple[InodeKey, ...] | None:
        """The ancestors of this folder's entries, itself included; None if it must not be entered.

        `ancestors` is how the walk came here, and `through_link` whether any of them was a link.
        """
        status = os.stat(folder)  # noqa: PTH116, a million paths as plain text
        inode = (status.st_dev, status.st_ino)
        if inode in ancestors:
            return None  # a cycle, which holds nothing new
        if through_link:
            self._through_links[inode] += 1
            if self._through_links[inode] > VISIT_LIMIT:
                self.skipped_folders.append(folder)
                return None
        return (*ancestors, inode)

    def describe(self) -> str:
        """A sentence on the skipped folders, of which there must be one."""
        return (
            f"{pluralize(len(self.skipped_folders), 'link')} left out, to folders already listed"
            f" {VISIT_LIMIT} times through other links, such as {self.skipped_folders[0]}"
        )


class WalkedPath(NamedTuple):
    """A file or folder that a walk has reached."""

    path: str
    is_folder: bool = False
    error: OSError | None = None
    """Why a folder cannot be listed."""


class _WalkLevel(NamedTuple):
    """A folder that is being walked."""

    path: str
    names: Iterator[str]
    """The remaining entries; those of folders end with a slash."""
    ancestors: tuple[InodeKey, ...]
    through_link: bool


def walk_folder(root: str, visits: FolderVisits, *, files_first: bool = False) -> Iterator[WalkedPath]:
    """Walk a folder depth first, itself included, in the order of the paths; names that begin with a dot are skipped.

    With `files_first`, a folder's own files come before its subfolders. There is no recursion: folders may be nested a
    thousand deep. Only the names of the folders on the current path are held.
    """
    levels: list[_WalkLevel] = []

    def enter_folder(path: str, ancestors: tuple[InodeKey, ...], through_link: bool) -> Iterator[WalkedPath]:
        try:
            inner_ancestors = visits.enter(path or ".", ancestors, through_link=through_link)
            if inner_ancestors is None:
                return
            names = _list_names(path or ".", files_first=files_first)
        except OSError as error:
            yield WalkedPath(path, is_folder=True, error=error)
            return
        levels.append(_WalkLevel(path, iter(names), inner_ancestors, through_link))
        yield WalkedPath(path, is_folder=True)

    yield from enter_folder(root, (), False)
    while levels:
        level = levels[-1]
        name = next(level.names, None)
        if name is None:
            levels.pop()
            continue
        path = os.path.join(level.path, name.removesuffix("/"))  # noqa: PTH118, as text
        if name.endswith("/"):
            yield from enter_folder(path, level.ancestors, level.through_link or os.path.islink(path))  # noqa: PTH114
        else:
            yield WalkedPath(path)


def _list_names(folder: str, *, files_first: bool) -> list[str]:
    """The sorted names in a folder; those of folders end with a slash, which sorts names as paths."""
    with os.scandir(folder) as entries:
        visible = (entry for entry in entries if not entry.name.startswith("."))
        names = [f"{entry.name}/" if _is_folder(entry) else entry.name for entry in visible]
    return sorted(names, key=lambda name: (name.endswith("/"), name.removesuffix("/")) if files_first else name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
