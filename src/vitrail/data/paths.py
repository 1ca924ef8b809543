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
from vitrail.data import lists, tars
from vitrail.data.decode import FILE_LIMIT, UNREAD_SUFFIXES, image_suffixes, suggest_decoder
from vitrail.data.folder_visits import FolderVisits, Identity, is_folder, walk_folders
from vitrail.errors import DataError
from vitrail.files import open_regular
from vitrail.plurals import plural

STDIN = "-"


class Found(NamedTuple):
    """An image that was named and not yet read."""

    name: str
    """What its row is called: its path, or that of its shard and its name there."""
    file: str
    """A path or URL."""
    start: int = 0
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
        if remote.is_remote(self.file):
            return remote.read(self.file, self.start, self.size)
        return Path(self.file) if self.size is None else self._part(self.size)

    def _part(self, size: int) -> bytes:
        try:
            with open_regular(Path(self.file)) as file:
                file.seek(self.start)
                content = file.read(size)
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error}") from error
        if len(content) != size:
            raise DataError(f"{self.name}: the shard ends before the image does; check or fetch it again")
        return content


def found(
    arguments: Iterable[str], *, fetch_urls: bool = False, skipped: Counter[str] | None = None
) -> Iterator[Found]:
    """The images that are meant, those of a folder in the order of their paths.

    `skipped` counts, by suffix, the photos in folders that cannot be read for want of a decoder. A URL on standard
    input is fetched with `fetch_urls` alone: whoever wrote the list need not be who runs the command.
    """
    for argument in arguments:
        for name in _lines(sys.stdin) if argument == STDIN else (argument,):
            try:
                if argument == STDIN and remote.is_remote(name) and not fetch_urls:
                    raise DataError(f"{name} is a URL on standard input, which is fetched with --fetch-urls alone")
                yield from _meant(name, Counter() if skipped is None else skipped)
            except (DataError, OSError) as error:
                yield Found(name, name, error=str(error))


def countable(arguments: Iterable[str]) -> bool:
    """Whether the images may be listed twice, to know their number beforehand, without a request or a lost line."""
    return not any(argument == STDIN or remote.is_remote(argument) for argument in arguments)


def _lines(file: TextIO) -> Iterator[str]:
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="surrogateescape")  # a file's name may be no valid text
    return (name for line in file if (name := line.rstrip("\r\n")).strip())


def _meant(name: str, skipped: Counter[str]) -> Iterator[Found]:
    if remote.is_remote(name):
        yield from _elsewhere(name)
    elif os.path.isdir(name):  # noqa: PTH112, of a name too long for a path it says no
        yield from _in_folder(name, skipped)
    elif tars.is_pattern(name):
        for path in tars.matching(name):
            yield from _in_tar(path)
    elif glob.has_magic(name) and not os.path.lexists(name):
        yield from _matching(name, skipped)
    elif name.lower().endswith(lists.SUFFIXES):
        yield from (Found(image, image) for image in lists.images(Path(name)))
    else:
        yield Found(name, name)  # where it does not exist, its row will say so


def _matching(pattern: str, skipped: Counter[str]) -> Iterator[Found]:
    visits = FolderVisits()
    names = sorted(_expand(pattern, visits))
    if "**" in pattern:  # it names what is in a folder besides the folder
        names = [name for name in names if not os.path.isdir(name)]  # noqa: PTH112, as text
    if not names:
        raise DataError(f"no file is named {pattern}")
    for name in names:
        yield from found([name] if name != STDIN else [f"./{name}"], skipped=skipped)
    yield from _left_out(pattern, visits)


def _expand(pattern: str, visits: FolderVisits) -> set[str]:
    """The names that a pattern means. Python's glob would follow links from folder to folder without end under `**`."""
    parts = pattern.split("/")
    if "**" not in parts:
        return set(glob.glob(pattern))  # noqa: PTH207, the pattern may be absolute
    place = parts.index("**")
    roots = glob.glob("/".join([*parts[:place], ""])) if place else [""]  # noqa: PTH207
    rest = list(itertools.dropwhile("**".__eq__, parts[place:])) or ["*"]
    folders = (folder for root in roots for folder, _ in walk_folders(root, visits))
    starts = (glob.escape(os.path.join(folder, "")) for folder in folders)  # noqa: PTH118
    return {name for start in starts for name in _expand(start + "/".join(rest), visits)}


def _in_folder(root: str, skipped: Counter[str]) -> Iterator[Found]:
    empty = True
    visits, here = FolderVisits(), Counter[str]()
    for image in _walked(root, visits, here):
        empty = False
        yield image
    skipped.update(here)
    if empty:
        shards = sorted(Path(root).glob("*.tar")) or sorted(Path(root).glob("*/*.tar"))
        if not shards:
            raise DataError(f"{root} holds no image: {', '.join(image_suffixes())} are known{describe_skipped(here)}")
        for shard in shards:
            yield from _in_tar(str(shard))
    yield from _left_out(root, visits)


def describe_skipped(skipped: Counter[str]) -> str:
    """How many photos were skipped, and what reads them; nothing where none was."""
    if not skipped:
        return ""
    kinds = ", ".join(f"{suffix} {count:,}" for suffix, count in sorted(skipped.items()))
    return f"; {plural(skipped.total(), 'image')} skipped that cannot be read here: {kinds}{suggest_decoder(skipped)}"


def _left_out(name: str, visits: FolderVisits) -> Iterator[Found]:
    if visits.left_out:
        yield Found(name, name, error=f"{name}: {visits.describe()}")


class _Level(NamedTuple):
    """A folder that is being walked."""

    path: str
    names: Iterator[str]
    """Of its images and, with a slash, its folders: those still to come."""
    within: tuple[Identity, ...]
    linked: bool


def _walked(root: str, visits: FolderVisits, skipped: Counter[str]) -> Iterator[Found]:
    """Images below a folder, sorted by their paths; links are followed, as FolderVisits allows.

    Without recursion: folders may lie in each other a thousand deep.
    """
    levels = [_enter(root, (), False, visits, skipped)]
    while levels:
        level = levels[-1]
        name = None if isinstance(level, Found) else next(level.names, None)
        if isinstance(level, Found):
            yield level
        if isinstance(level, Found) or name is None:
            levels.pop()
            continue
        path = os.path.join(level.path, name.removesuffix("/"))  # noqa: PTH118
        if name.endswith("/"):
            linked = level.linked or os.path.islink(path)  # noqa: PTH114
            levels.append(_enter(path, level.within, linked, visits, skipped))
        else:
            yield Found(path, path)


def _enter(
    folder: str, above: tuple[Identity, ...], linked: bool, visits: FolderVisits, skipped: Counter[str]
) -> _Level | Found:
    """A folder's names in order, none where it is not to be entered again; or an image that cannot be read."""
    try:
        within = visits.enter(folder, above, linked=linked)
        if within is None:
            return _Level(folder, iter(()), (), linked)
        with os.scandir(folder) as entries:
            names = sorted(name for entry in entries if (name := _shown(entry, skipped)))
            return _Level(folder, iter(names), within, linked)
    except OSError as error:
        return Found(folder, folder, error=f"{folder} cannot be listed: {error.strerror}")


def _shown(entry: os.DirEntry[str], skipped: Counter[str]) -> str:
    """The name of an image, or of a folder with a slash, which sorts names as paths; nothing of what else there is."""
    if entry.name.startswith("."):
        return ""
    if is_folder(entry):
        return f"{entry.name}/"
    lower = entry.name.lower()
    if lower.endswith(image_suffixes()):
        return entry.name
    if lower.endswith(UNREAD_SUFFIXES):
        skipped[lower[lower.rindex(".") :]] += 1
    return ""


def _in_tar(path: str) -> Iterator[Found]:
    """The images in a tar in its order, found by its headers alone; where it is damaged, what stands before that."""
    empty = True
    try:
        for member, _ in tars.members(path if remote.is_remote(path) else Path(path)):
            name = member.name
            if name.lower().endswith(image_suffixes()) and not name.rpartition("/")[2].startswith("."):
                empty = False
                yield Found(f"{path}:{name}", path, member.offset_data, member.size)
        if empty:
            raise DataError(f"{path} holds no image: {', '.join(image_suffixes())} are known")
    except (DataError, OSError) as error:
        yield Found(path, path, error=str(error))


def _elsewhere(url: str) -> Iterator[Found]:
    if tars.is_pattern(url):
        for path in tars.matching(url):
            yield from _in_tar(path)
    elif glob.has_magic(url):
        names = remote.glob(url)
        if not names:
            raise DataError(f"no file is named {url}")
        yield from (Found(name, name) for name in names)
    elif url.lower().endswith(lists.SUFFIXES):
        yield from (Found(image, image) for image in lists.images(url))
    elif url.lower().endswith(image_suffixes()):
        yield Found(url, url)
    else:
        files = sorted(remote.find(url))
        names = [remote.joined(url, name) for name in files if name.lower().endswith(image_suffixes())]
        shards = [remote.joined(url, name) for name in files if name.endswith(".tar")]
        if not names and not shards:
            raise DataError(f"{url} holds no image: {', '.join(image_suffixes())} are known")
        yield from (Found(name, name) for name in names)
        for shard in () if names else shards:
            yield from _in_tar(shard)
