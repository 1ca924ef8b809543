"""Parts of a collection of images, for jobs that work apart: part 3/128 is the third of 128.

The files and shards that arguments name are listed in their order, without opening any, and divided into runs of equal
length. So a shard belongs to one part alone, and the parts one after the other are the whole in its own order. Where
there are fewer files and shards than parts, shards are opened and their images divided. The digest of the list tells
whether all parts were taken from the same one.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from vitrail.data.image_paths import STDIN, ImageRef, ShardRef, iter_image_files, iter_images_of
from vitrail.errors import UsageError
from vitrail.runtime import distributed

_PART_NAME = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})(\.\w+)?")
AUTO = "auto"


class Part(NamedTuple):
    """One of so many parts."""

    number: int
    """From 1."""
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


class PartImages(NamedTuple):
    """The images of a part."""

    listing: str
    """The digest of the list that was divided."""
    images: Iterator[ImageRef]
    total: int
    """How many images there are, or 0 where shards would have to be opened to know."""


def parse_part(text: str) -> Part:
    """The part that K/N means; auto is this process's, by its environment."""
    if text == AUTO:
        position, count = distributed.read_task_position()
        return Part(position + 1, count)
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--part is {text!r:.80}; it is K/N, such as 3/128 for the third of 128 parts, or {AUTO}")
    return Part(int(match[1]), int(match[2]))


def name_part(out: str, part: Part) -> str:
    """The output of a part: rows.parquet -> rows-00003-of-00128.parquet, features/ -> features-00003-of-00128/."""
    stem = out.rstrip("/")
    suffix = "" if out.endswith("/") else Path(stem).suffix
    name = f"{stem[: len(stem) - len(suffix)]}-{part.number:05}-of-{part.of:05}{suffix}"
    return f"{name}/" if out.endswith("/") else name


def find_part_names(out: str, names: Sequence[str]) -> dict[Part, str]:
    """Those of the names that `name_part` gives to parts of `out`."""
    found = {}
    for name in names:
        if match := _PART_NAME.fullmatch(name.rstrip("/")):
            part = Part(int(match[2]), int(match[3]))
            if name_part(out, part).rstrip("/") == name.rstrip("/"):
                found[part] = name
    return found


def select_part(
    arguments: Sequence[str], part: Part, *, fetch_urls: bool = False, skipped: Counter[str] | None = None
) -> PartImages:
    """Select the images of a part. Names are listed twice, but for standard input, whose names are kept in memory."""

    def list_names(counter: Counter[str] | None) -> Iterator[ImageRef | ShardRef]:
        return iter_image_files(arguments, fetch_urls=fetch_urls, skipped=counter)

    read_once = list(list_names(skipped)) if STDIN in arguments else None
    count, listing, has_shards = _scan(list_names(skipped) if read_once is None else read_once)
    open_shards = has_shards and count < part.of

    def list_files() -> Iterator[ImageRef | ShardRef]:
        files = list_names(None) if read_once is None else iter(read_once)
        return _open_shards(files) if open_shards else files

    if open_shards:
        count, listing, has_shards = _scan(list_files())
    start, end = count * (part.number - 1) // part.of, count * part.number // part.of
    return PartImages(listing, _open_shards(islice(list_files(), start, end)), 0 if has_shards else end - start)


def _open_shards(files: Iterator[ImageRef | ShardRef]) -> Iterator[ImageRef]:
    return chain.from_iterable(map(iter_images_of, files))


def _scan(files: Iterable[ImageRef | ShardRef]) -> tuple[int, str, bool]:
    """How many files there are, a digest of their names, and whether there are shards."""
    count, shards, digest = 0, False, hashlib.sha256()
    for file in files:
        count += 1
        shards = shards or isinstance(file, ShardRef)
        digest.update(f"{file.name}\0".encode(errors="surrogateescape"))
    return count, digest.hexdigest(), shards
