"""Digests of a dataset, by which a resumed run knows that its images are still those it started with.

    listing    names, labels, classes and splits
    sizes      of the image files
    times      of their last change, which a copy to another machine may alter
    contents   of the files, where they are few bytes or were read already; else empty

For a dataset of more than 200,000 images, sizes and times cover a random sample of that many: on a network file system
a request for each of a million files takes minutes.
"""

import hashlib
import itertools
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from vitrail.data.dataset import Dataset, Split, Store
from vitrail.data.folder import FileStore
from vitrail.data.parquet import ParquetStore
from vitrail.data.randomness import IntArray, sample_sorted_indices
from vitrail.data.sample_table import read_stamp
from vitrail.data.shards import ShardStore
from vitrail.errors import ChangedDataError, DataError

MAX_STAMPED_IMAGES = 200_000  # images whose files' sizes and times are read
MAX_CONTENT_BYTES = 2**28  # of all images together, up to which their contents are read: takes a second
MAX_CONTENT_IMAGES = 20_000  # likewise: on a network file system each is a round trip
_ASSUMED_SIZE = 2**14  # bytes, a guess for images that are not in files
_THREADS = 16
_CHUNK = 1024  # images a thread handles at once


class DataDigest(NamedTuple):
    """The digests of a dataset, as hexadecimal numbers."""

    listing: str
    sizes: str
    times: str
    contents: str = ""


def digest_dataset(dataset: Dataset, contents: str = "") -> DataDigest:
    """Compute the digests of a dataset as it is now. Test images decide nothing: only their names and labels count.

    `contents` is the digest of all images' contents where a check has read them.
    """
    splits = {name: split for name, split in dataset.splits.items() if name != "test"}
    listing = hashlib.sha256(repr((dataset.classes, list(splits))).encode(errors="surrogateescape"))
    tables = {id(split.store.table): split.store.table for split in splits.values()}
    for table in tables.values():
        for name in sorted(table.columns):
            column = np.ascontiguousarray(table.columns[name])
            listing.update(f"{name} {column.dtype} {column.shape}".encode())
            listing.update(column.data if column.size else b"")
    for split in splits.values():
        listing.update(repr(split.rows).encode() if isinstance(split.rows, range) else np.asarray(split.rows).tobytes())
    sizes, times = np.concatenate([_stat_files(split) for split in splits.values()]).T
    is_small = np.where(sizes < 0, _ASSUMED_SIZE, sizes).sum() <= MAX_CONTENT_BYTES
    is_local = not any(split.store.is_remote for split in splits.values())
    if is_small and is_local and sum(map(len, splits.values())) <= MAX_CONTENT_IMAGES:
        contents = _digest_contents(splits.values())
    size_digest, time_digest = (hashlib.sha256(values.tobytes()).hexdigest() for values in (sizes, times))
    return DataDigest(listing.hexdigest(), size_digest, time_digest, contents)


def check_unchanged(recorded: DataDigest, current: DataDigest, name: str) -> str:
    """Refuse a changed dataset; otherwise return a note on what may have changed, or an empty string."""
    contents_known = bool(recorded.contents and current.contents)
    differences = {
        "names, labels or splits of its images": recorded.listing != current.listing,
        "sizes of its image files": recorded.sizes != current.sizes,
        "contents of its images": contents_known and recorded.contents != current.contents,
    }
    if difference := next((what for what, differs in differences.items() if differs), ""):
        raise ChangedDataError(
            f"{name} is not the dataset that the run started with, other {difference}: restore it, or start a new run"
            " (--overwrite, or another --out)"
        )
    times_differ = recorded.times != current.times and not contents_known
    return "image files have changed since, by their modification times" if times_differ else ""


def _stat_files(split: Split) -> IntArray:
    """Read (n, 2): size and time of change in nanoseconds of each image, or of its shard; -1 and 0 where unknown."""
    store = split.store
    sampled = sample_sorted_indices(MAX_STAMPED_IMAGES, len(split), "digest")
    rows = [int(split.rows[index]) for index in sampled.tolist()]
    sizes_and_times = np.zeros((len(rows), 2), dtype=np.int64)
    sizes_and_times[:, 0] = store.table["size"][rows] if "size" in store.table else -1
    stamps = [] if store.is_remote else read_file_stamps(store, rows)
    for number, stamp in enumerate(stamps):
        time, size = stamp or (0, -1)
        sizes_and_times[number, 1] = time
        if isinstance(store, FileStore):
            sizes_and_times[number, 0] = size
    return sizes_and_times


def read_file_stamps(store: Store, rows: Sequence[int]) -> list[list[int]]:
    """The stamp (`read_stamp`) of the file or shard of each row; empty if it is missing, and for images in no files."""
    if isinstance(store, ParquetStore):
        files = [store.get_path(row) for row in rows]
        stamp_of_file = {path: _read_stamp_if_present(path) for path in set(files)}
        return [stamp_of_file[path] for path in files]
    if isinstance(store, ShardStore):
        shards = store.table["shard"][rows].tolist()
        paths = {shard: f"{store.folder}/{store.files[shard]}" for shard in set(shards)}
        stamp_of_shard = {shard: _read_stamp_if_present(path) for shard, path in paths.items()}
        return [stamp_of_shard[shard] for shard in shards]
    if not isinstance(store, FileStore) or store.is_remote:
        return [[] for _ in rows]
    with ThreadPoolExecutor(_THREADS) as threads:
        chunks = [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]
        stamps = threads.map(lambda chunk: [_read_stamp_if_present(str(store.read(row))) for row in chunk], chunks)
        return list(itertools.chain.from_iterable(stamps))


def _read_stamp_if_present(path: str) -> list[int]:
    try:
        return read_stamp(path)
    except OSError:
        return []  # the error is reported when the file is read


def _digest_contents(splits: Iterable[Split]) -> str:
    digest, total = hashlib.sha256(), 0
    for content in (_read_content(split, index) for split in splits for index in range(len(split))):
        total += len(content)
        if total > MAX_CONTENT_BYTES:
            return ""  # the sizes were not known before
        digest.update(len(content).to_bytes(8, "big"))
        digest.update(content)
    return digest.hexdigest()


def _read_content(split: Split, index: int) -> bytes:
    """Read the bytes of an image; none of an unreadable one, which is reported when it is used."""
    try:
        source = split.read_image(index)
        if isinstance(source, Path):
            return source.read_bytes() if os.path.isfile(source) else b""  # noqa: PTH113
    except (DataError, OSError):
        return b""
    return source.tobytes() if isinstance(source, Image.Image) else source
