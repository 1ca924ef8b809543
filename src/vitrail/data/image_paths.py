"""The images that arguments on a command line mean, one after the other and always in the same order.

An argument is a file, a folder of images or of tar shards, a glob, tar shards by pattern, a list (.csv, .jsonl), or -
for one of these a line on standard input; all but the last may lie elsewhere (s3://bucket/name). Only names are read
here, and no more of them are held than one folder or one glob has. What cannot be listed becomes an image that cannot
be read, and the rest goes on.
"""

import glob
import io
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from vitrail import remote
from vitrail.data import file_list, webdataset
from vitrail.data.folder_visits import FolderVisits, InodeKey, is_folder, walk_folders
from vitrail.data.image_headers import FILE_LIMIT, UNSUPPORTED_SUFFIXES, get_image_suffixes, suggest_decoder
from vitrail.errors import DataError
from vitrail.files import open_regular_file
from vitrail.plurals import pluralize

STDIN = "-"


class ImageRef(NamedTuple):
    """An image that was named and not yet read."""

    name: str
    """What its row is called: its path, or that of its shard and its name there."""
    location: str
    """A path or URL."""
    offset: int = 0
    size: int | None = None
    """Bytes from `start` on, where it is part of a shard."""
    error: str = ""
    """Why it cannot be read, where that is known already."""

    def read(self) -> Path | bytes:
        """What `decode` takes."""
        if self.error:
            raise DataError(self.error)
        if (self.size or 0) > FILE_LIMIT:
            raise DataError(f"{self.name} has {self.size:,} bytes; images of at most {FILE_LIMIT:,} are read")
        if remote.is_remote(self.location):
            return remote.read(self.location, self.offset, self.size)
        return Path(self.location) if self.size is None else self._read_range(self.size)

    def _read_range(self, size: int) -> bytes:
        try:
            with open_regular_file(Path(self.location)) as file:
                file.seek(self.offset)
                content = file.read(size)
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error}") from error
        if len(content) != size:
            raise DataError(f"{self.name}: the shard ends before the image does; check or fetch it again")
        return content


def iter_image_refs(
    arguments: Iterable[str], *, fetch_urls: bool = False, skipped: Counter[str] | None = None
) -> Iterator[ImageRef]:
    """The images that are meant, those of a folder in the order of their paths.

    `skipped` counts, by suffix, the photos in folders that cannot be read for want of a decoder. A URL on standard
    input is fetched with `fetch_urls` alone: whoever wrote the list need not be who runs the command.
    """
    for argument in arguments:
        for name in _iter_lines(sys.stdin) if argument == STDIN else (argument,):
            try:
                if argument == STDIN and remote.is_remote(name) and not fetch_urls:
                    raise DataError(f"{name} is a URL on standard input, which is fetched with --fetch-urls alone")
                yield from _resolve_argument(name, Counter() if skipped is None else skipped)
            except (DataError, OSError) as error:
                yield ImageRef(name, name, error=str(error))


def can_count_images(arguments: Iterable[str]) -> bool:
    """Whether the images may be listed twice, to know their number beforehand, without a request or a lost line."""
    return not any(argument == STDIN or remote.is_remote(argument) for argument in arguments)


def _iter_lines(file: TextIO) -> Iterator[str]:
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="surrogateescape")  # a file's name may be no valid text
    return (name for line in file if (name := line.rstrip("\r\n")).strip())


def _resolve_argument(name: str, skipped: Counter[str]) -> Iterator[ImageRef]:
    if remote.is_remote(name):
        yield from _resolve_url(name)
    elif os.path.isdir(name):  # noqa: PTH112, of a name too long for a path it says no
        yield from _resolve_folder(name, skipped)
    elif webdataset.is_tar_pattern(name):
        for path in webdataset.find_tars(name):
            yield from _iter_tar_images(path)
    elif glob.has_magic(name) and not os.path.lexists(name):
        yield from _resolve_glob(name, skipped)
    elif name.lower().endswith(file_list.LIST_SUFFIXES):
        yield from (ImageRef(image, image) for image in file_list.iter_image_paths(Path(name)))
    else:
        yield ImageRef(name, name)  # where it does not exist, its row will say so


def _resolve_glob(pattern: str, skipped: Counter[str]) -> Iterator[ImageRef]:
    visits = FolderVisits()
    names = sorted(_expand_glob(pattern, visits))
    if "**" in pattern:  # it names what is in a folder besides the folder
        names = [name for name in names if not os.path.isdir(name)]  # noqa: PTH112, as text
    if not names:
        raise DataError(f"no file is named {pattern}")
    for name in names:
        yield from iter_image_refs([name] if name != STDIN else [f"./{name}"], skipped=skipped)
    yield from _report_skipped_folders(pattern, visits)


def _expand_glob(pattern: str, visits: FolderVisits) -> set[str]:
    """The names that a pattern means. Python's glob would follow links from folder to folder without end under `**`."""
    parts = pattern.split("/")
    if "**" not in parts:
        return set(glob.glob(pattern))  # noqa: PTH207, the pattern may be absolute
    place = parts.index("**")
    roots = glob.glob("/".join([*parts[:place], ""])) if place else [""]  # noqa: PTH207
    rest = list(itertools.dropwhile("**".__eq__, parts[place:])) or ["*"]
    folders = (folder for root in roots for folder, _ in walk_folders(root, visits))
    starts = (glob.escape(os.path.join(folder, "")) for folder in folders)  # noqa: PTH118
    return {name for start in starts for name in _expand_glob(start + "/".join(rest), visits)}


def _resolve_folder(root: str, skipped: Counter[str]) -> Iterator[ImageRef]:
    empty = True
    visits, here = FolderVisits(), Counter[str]()
    for image in _walk_images(root, visits, here):
        empty = False
        yield image
    skipped.update(here)
    if empty:
        shards = sorted(Path(root).glob("*.tar")) or sorted(Path(root).glob("*/*.tar"))
        if not shards:
            raise DataError(
                f"{root} holds no image: {', '.join(get_image_suffixes())} are known{describe_skipped(here)}"
            )
        for shard in shards:
            yield from _iter_tar_images(str(shard))
    yield from _report_skipped_folders(root, visits)


def describe_skipped(skipped: Counter[str]) -> str:
    """How many photos were skipped, and what reads them; nothing where none was."""
    if not skipped:
        return ""
    kinds = ", ".join(f"{suffix} {count:,}" for suffix, count in sorted(skipped.items()))
    return (
        f"; {pluralize(skipped.total(), 'image')} skipped that cannot be read here: {kinds}{suggest_decoder(skipped)}"
    )


def _report_skipped_folders(name: str, visits: FolderVisits) -> Iterator[ImageRef]:
    if visits.skipped_folders:
        yield ImageRef(name, name, error=f"{name}: {visits.describe()}")


class _FolderLevel(NamedTuple):
    """A folder that is being walked."""

    path: str
    names: Iterator[str]
    """Of its images and, with a slash, its folders: those still to come."""
    ancestors: tuple[InodeKey, ...]
    through_link: bool


def _walk_images(root: str, visits: FolderVisits, skipped: Counter[str]) -> Iterator[ImageRef]:
    """Images below a folder, sorted by their paths; links are followed, as FolderVisits allows.

    Without recursion: folders may lie in each other a thousand deep.
    """
    levels = [_enter_folder(root, (), False, visits, skipped)]
    while levels:
        level = levels[-1]
        name = None if isinstance(level, ImageRef) else next(level.names, None)
        if isinstance(level, ImageRef):
            yield level
        if isinstance(level, ImageRef) or name is None:
            levels.pop()
            continue
        path = os.path.join(level.path, name.removesuffix("/"))  # noqa: PTH118
        if name.endswith("/"):
            linked = level.through_link or os.path.islink(path)  # noqa: PTH114
            levels.append(_enter_folder(path, level.ancestors, linked, visits, skipped))
        else:
            yield ImageRef(path, path)


def _enter_folder(
    folder: str, ancestors: tuple[InodeKey, ...], through_link: bool, visits: FolderVisits, skipped: Counter[str]
) -> _FolderLevel | ImageRef:
    """A folder's names in order, none where it is not to be entered again; or an image that cannot be read."""
    try:
        within = visits.enter(folder, ancestors, through_link=through_link)
        if within is None:
            return _FolderLevel(folder, iter(()), (), through_link)
        with os.scandir(folder) as entries:
            names = sorted(name for entry in entries if (name := _get_listed_name(entry, skipped)))
            return _FolderLevel(folder, iter(names), within, through_link)
    except OSError as error:
        return ImageRef(folder, folder, error=f"{folder} cannot be listed: {error.strerror}")


def _get_listed_name(entry: os.DirEntry[str], skipped: Counter[str]) -> str:
    """The name of an image, or of a folder with a slash, which sorts names as paths; nothing of what else there is."""
    if entry.name.startswith("."):
        return ""
    if is_folder(entry):
        return f"{entry.name}/"
    lower = entry.name.lower()
    if lower.endswith(get_image_suffixes()):
        return entry.name
    if lower.endswith(UNSUPPORTED_SUFFIXES):
        skipped[lower[lower.rindex(".") :]] += 1
    return ""


def _iter_tar_images(path: str) -> Iterator[ImageRef]:
    """The images in a tar in its order, found by its headers alone; where it is damaged, what stands before that."""
    empty = True
    try:
        for member, _ in webdataset.iter_files(path if remote.is_remote(path) else Path(path)):
            name = member.name
            if name.lower().endswith(get_image_suffixes()) and not name.rpartition("/")[2].startswith("."):
                empty = False
                yield ImageRef(f"{path}:{name}", path, member.offset_data, member.size)
        if empty:
            raise DataError(f"{path} holds no image: {', '.join(get_image_suffixes())} are known")
    except (DataError, OSError) as error:
        yield ImageRef(path, path, error=str(error))


def _resolve_url(url: str) -> Iterator[ImageRef]:
    if webdataset.is_tar_pattern(url):
        for path in webdataset.find_tars(url):
            yield from _iter_tar_images(path)
    elif glob.has_magic(url):
        names = remote.glob(url)
        if not names:
            raise DataError(f"no file is named {url}")
        yield from (ImageRef(name, name) for name in names)
    elif url.lower().endswith(file_list.LIST_SUFFIXES):
        yield from (ImageRef(image, image) for image in file_list.iter_image_paths(url))
    elif url.lower().endswith(get_image_suffixes()):
        yield ImageRef(url, url)
    else:
        files = sorted(remote.list_files(url))
        names = [remote.join_url(url, name) for name in files if name.lower().endswith(get_image_suffixes())]
        shards = [remote.join_url(url, name) for name in files if name.endswith(".tar")]
        if not names and not shards:
            raise DataError(f"{url} holds no image: {', '.join(get_image_suffixes())} are known")
        yield from (ImageRef(name, name) for name in names)
        for shard in () if names else shards:
            yield from _iter_tar_images(shard)
