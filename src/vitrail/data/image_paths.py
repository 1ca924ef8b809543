"""The images that command-line arguments name, lazily and always in the same order.

An argument is a file, a folder of images, of tar shards or of Parquet files, a glob, a pattern of tar shards, a list
(.csv, .jsonl), a Parquet file, or - to read such arguments from standard input, one per line. All but the last may be
remote (s3://bucket/name). This module reads only names, and holds those of one folder or glob at a time. An argument
that cannot be listed becomes an image that cannot be read, and the others follow.
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
from vitrail.data import file_list, parquet_files, webdataset
from vitrail.data.decode import ImageSource
from vitrail.data.folder import FolderVisits, walk_folder
from vitrail.data.image_headers import FILE_LIMIT, UNSUPPORTED_SUFFIXES, get_image_suffixes, suggest_decoder
from vitrail.errors import DataError
from vitrail.files import open_regular_file
from vitrail.formatting import pluralize

STDIN = "-"


class ImageRef(NamedTuple):
    """A reference to an image that has not been read yet."""

    name: str
    """The name of its output row: its path, or its shard's path and its name there."""
    location: str
    """A path or URL."""
    offset: int = 0
    size: int | None = None
    """Bytes from `offset` on, if it is part of a shard."""
    error: str = ""
    """Why it cannot be read, if that is already known."""
    content: ImageSource | None = None
    """The image itself, if it is in no file."""
    column: str = ""
    """The column of a Parquet file, of which `offset` is the row."""

    def read(self) -> ImageSource:
        """The path, bytes or image to decode."""
        if self.error:
            raise DataError(self.error)
        if self.content is not None:
            return self.content
        if self.column:
            return parquet_files.read_row(self.location, self.column, self.offset, self.name)
        if (self.size or 0) > FILE_LIMIT:
            raise DataError(f"{self.name} has {self.size:,} bytes; the limit for images is {FILE_LIMIT:,}")
        if remote.is_remote(self.location):
            return remote.read(self.location, self.offset, self.size)
        if self.size is None:
            return Path(self.location)
        try:
            with open_regular_file(Path(self.location)) as file:
                file.seek(self.offset)
                content = file.read(self.size)
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error}") from error
        if len(content) != self.size:
            raise DataError(f"{self.name}: the shard ends before the image does; check or download it again")
        return content


class ShardRef(NamedTuple):
    """A reference to a tar shard or a Parquet file whose images have not been listed yet."""

    name: str
    """Its path or URL."""
    columns: parquet_files.ColumnChoice | None = None
    """The columns that were chosen of a Parquet file; None for a tar."""


def iter_image_refs(
    arguments: Iterable[str], *, fetch_urls: bool = False, skipped: Counter[str] | None = None
) -> Iterator[ImageRef]:
    """The images that arguments name; those of a folder are sorted by path.

    `skipped` counts, by suffix, the photos in folders that no installed decoder reads. URLs on standard input are
    fetched only with `fetch_urls`: the author of the list may not be the user who runs the command.
    """
    for file in iter_image_files(arguments, fetch_urls=fetch_urls, skipped=skipped):
        yield from iter_images_of(file)


def iter_image_files(
    arguments: Iterable[str], *, fetch_urls: bool = False, skipped: Counter[str] | None = None
) -> Iterator[ImageRef | ShardRef]:
    """The same images, with shards that are not opened in place of theirs."""
    for argument in arguments:
        for name in _iter_lines(sys.stdin) if argument == STDIN else (argument,):
            try:
                if argument == STDIN and remote.is_remote(name) and not fetch_urls:
                    raise DataError(f"{name} is a URL on standard input, which is fetched only with --fetch-urls")
                yield from _resolve_argument(name, Counter() if skipped is None else skipped)
            except (DataError, OSError) as error:
                yield ImageRef(name, name, error=str(error))


def iter_images_of(file: ImageRef | ShardRef) -> Iterator[ImageRef]:
    """The images in a shard; an image is one itself."""
    if isinstance(file, ImageRef):
        return iter((file,))
    return _iter_tar_images(file.name) if file.columns is None else _iter_parquet_images(file.name, file.columns)


def can_count_images(arguments: Iterable[str]) -> bool:
    """Whether the images can be listed twice, to count them first, without requests and without losing input lines."""
    return not any(argument == STDIN or remote.is_remote(argument) for argument in arguments)


def _iter_lines(file: TextIO) -> Iterator[str]:
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="surrogateescape")  # a file name may be invalid UTF-8
    return (name for line in file if (name := line.rstrip("\r\n")).strip())


def _resolve_argument(name: str, skipped: Counter[str]) -> Iterator[ImageRef | ShardRef]:
    is_remote = remote.is_remote(name)
    if parquet_files.is_parquet_pattern(name):
        yield from _list_parquet_files(name)
    elif not is_remote and os.path.isdir(name):  # noqa: PTH112, it is False for a name too long for a path
        yield from _resolve_folder(name, skipped)
    elif webdataset.is_tar_pattern(name):
        yield from map(ShardRef, webdataset.find_tars(name))
    elif glob.has_magic(name) and (is_remote or not os.path.lexists(name)):
        yield from _resolve_glob(name, skipped)
    elif name.lower().endswith(file_list.LIST_SUFFIXES):
        yield from _make_refs(file_list.iter_image_paths(name if is_remote else Path(name)))
    elif is_remote and not name.lower().endswith(get_image_suffixes()):
        yield from _resolve_remote_folder(name)
    else:
        yield ImageRef(name, name)  # if it does not exist, its row says so


def _make_refs(names: Iterable[str]) -> Iterator[ImageRef]:
    return (ImageRef(name, name) for name in names)


def _resolve_glob(pattern: str, skipped: Counter[str]) -> Iterator[ImageRef | ShardRef]:
    visits, is_remote = FolderVisits(), remote.is_remote(pattern)
    names = remote.glob(pattern) if is_remote else sorted(_expand_glob(pattern, visits))
    if "**" in pattern and not is_remote:  # it matches the contents of folders besides the folders
        names = [name for name in names if not os.path.isdir(name)]  # noqa: PTH112, as text
    if not names:
        raise DataError(f"no file matches {pattern}")
    if is_remote:
        yield from _make_refs(names)
        return
    for name in names:
        yield from iter_image_files([name] if name != STDIN else [f"./{name}"], skipped=skipped)
    yield from _report_skipped_folders(pattern, visits)


def _expand_glob(pattern: str, visits: FolderVisits) -> set[str]:
    """The names that a pattern matches. Under `**`, Python's own glob would follow cyclic links endlessly."""
    parts = pattern.split("/")
    if "**" not in parts:
        return set(glob.glob(pattern))  # noqa: PTH207, the pattern may be absolute
    depth = parts.index("**")
    roots = glob.glob("/".join([*parts[:depth], ""])) if depth else [""]  # noqa: PTH207
    rest = list(itertools.dropwhile("**".__eq__, parts[depth:])) or ["*"]
    folders = (walked.path for root in roots for walked in walk_folder(root, visits) if walked.is_folder)
    prefixes = (glob.escape(os.path.join(folder, "")) for folder in folders)  # noqa: PTH118
    return {name for prefix in prefixes for name in _expand_glob(prefix + "/".join(rest), visits)}


def _resolve_folder(root: str, skipped: Counter[str]) -> Iterator[ImageRef | ShardRef]:
    empty, visits, skipped_here = True, FolderVisits(), Counter[str]()
    for image in _walk_images(root, visits, skipped_here):
        empty = False
        yield image
    skipped.update(skipped_here)
    if empty:
        shards = sorted(Path(root).glob("*.tar")) or sorted(Path(root).glob("*/*.tar"))
        if not shards and not parquet_files.has_parquet_files(root):
            raise DataError(f"{_describe_no_image(root)}{describe_skipped(skipped_here)}")
        yield from (ShardRef(str(path)) for path in shards) if shards else _list_parquet_files(root)
    yield from _report_skipped_folders(root, visits)


def describe_skipped(skipped: Counter[str]) -> str:
    """How many photos were skipped, and which decoder reads them; empty if none were."""
    if not skipped:
        return ""
    kinds = ", ".join(f"{suffix} {count:,}" for suffix, count in sorted(skipped.items()))
    count = pluralize(skipped.total(), "image")
    return f"; {count} skipped for lack of a decoder: {kinds}{suggest_decoder(skipped)}"


def _describe_no_image(source: str) -> str:
    return f"{source} holds no image: {', '.join(get_image_suffixes())} are known"


def _report_skipped_folders(name: str, visits: FolderVisits) -> Iterator[ImageRef]:
    if visits.skipped_folders:
        yield ImageRef(name, name, error=f"{name}: {visits.describe()}")


def _walk_images(root: str, visits: FolderVisits, skipped: Counter[str]) -> Iterator[ImageRef]:
    """The images below a folder, sorted by path; a folder that cannot be listed is an image that cannot be read."""
    for walked in walk_folder(root, visits):
        lower = walked.path.lower()
        if walked.error:
            yield ImageRef(walked.path, walked.path, error=f"{walked.path} cannot be listed: {walked.error.strerror}")
        elif walked.is_folder:
            continue
        elif lower.endswith(get_image_suffixes()):
            yield ImageRef(walked.path, walked.path)
        elif lower.endswith(UNSUPPORTED_SUFFIXES):
            skipped[lower[lower.rindex(".") :]] += 1


def _iter_tar_images(path: str) -> Iterator[ImageRef]:
    """The images in a tar, in their order and from headers alone; a damaged tar yields those before the damage."""
    empty = True
    try:
        for member, _ in webdataset.iter_files(path if remote.is_remote(path) else Path(path)):
            name = member.name
            if name.lower().endswith(get_image_suffixes()) and not name.rpartition("/")[2].startswith("."):
                empty = False
                yield ImageRef(f"{path}:{name}", path, member.offset_data, member.size)
        if empty:
            raise DataError(_describe_no_image(path))
    except (DataError, OSError) as error:
        yield ImageRef(path, path, error=str(error))


def _list_parquet_files(name: str) -> Iterator[ShardRef]:
    """The Parquet files that a name stands for."""
    location, choice = parquet_files.split_column_choice(name)
    parquet_files.import_parquet()
    return (ShardRef(path, choice) for path in parquet_files.find_parquet_files(location))


def _iter_parquet_images(path: str, choice: parquet_files.ColumnChoice) -> Iterator[ImageRef]:
    """The images in a Parquet file, in their order; a damaged file is an image that cannot be read."""
    try:
        yield from _iter_rows(path, choice)
    except (DataError, OSError) as error:
        yield ImageRef(path, path, error=str(error))


def _iter_rows(path: str, choice: parquet_files.ColumnChoice) -> Iterator[ImageRef]:
    layout = parquet_files.read_layout(path)
    column = parquet_files.choose_image_column(layout.schema, choice, path)
    names: Iterable[str | None] = itertools.repeat(None, layout.num_rows)
    if column.holds_paths or column.name_column:
        names = parquet_files.iter_text(path, column.name if column.holds_paths else column.name_column)
    for row, name in enumerate(names):
        if not column.holds_paths:
            yield ImageRef(name or f"{path}#{row}", path, row, column=column.name)
        elif name:
            yield ImageRef(location := parquet_files.join_path(path, name), location)
        else:
            yield ImageRef(f"{path}#{row}", path, error=f"{path}#{row} has no path in {column.name}")


def _resolve_remote_folder(url: str) -> Iterator[ImageRef | ShardRef]:
    files = [remote.join_url(url, name) for name in sorted(remote.list_files(url))]
    names = [name for name in files if name.lower().endswith(get_image_suffixes())]
    shards = [name for name in files if name.endswith(".tar")]
    if names or shards:
        yield from _make_refs(names) if names else map(ShardRef, shards)
    elif any(name.endswith(parquet_files.SUFFIX) for name in files):
        yield from _list_parquet_files(url)
    else:
        raise DataError(_describe_no_image(url))
