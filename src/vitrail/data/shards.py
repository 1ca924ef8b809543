"""Datasets as tar shards in WebDataset's naming, with an index for random access.

    train-000000.tar    000000000.jpg  000000000.cls  000000001.jpg  000000001.cls ...
    index/              the shard, offset, size, labels and name of each sample's image; memory-mapped
    set.json            classes, splits, origin, and the SHA-256 of each shard

`.cls` holds the number of a class, `.json` the numbers of several. WebDataset itself reads shards as streams, which
allow neither exact resuming nor random access. `webdataset.py` reads shards of other origin. For a dataset on an object
store, the index is downloaded once, and each image is one request for a range of its shard.
"""

import dataclasses
import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vitrail import remote
from vitrail.data import holdout, sample_table
from vitrail.data.dataset import SPLITS, Dataset, build_dataset, build_splits
from vitrail.data.image_headers import FILE_LIMIT, get_image_suffixes
from vitrail.data.sample_table import UNLABELED, Array, SampleTable, encode_label_columns, encode_text_column
from vitrail.errors import DataError
from vitrail.files import compute_sha256, get_cache_home, write_atomically
from vitrail.formatting import pluralize
from vitrail.locks import wait_for_lock

INDEX_FOLDER, DESCRIPTION_FILE = "index", "set.json"
SHARD_BYTES = 256 * 2**20
_BLOCK = 512
_MAX_OPEN_FILES = 128
_ROWS_PER_CHECK = 2**20  # rows of an index checked at once
MAX_VERIFIED_BYTES = 4 * 2**30  # size of an index up to which opening verifies its digest: 70 million images, seconds


class Sample(NamedTuple):
    """One image to be written to a shard."""

    split: str
    """train, val or test."""
    name: str
    """Its path in the dataset, with the suffix of its format: roses/0001.jpg."""
    image: bytes
    """The bytes of the image file."""
    labels: tuple[int, ...]
    """Indices of classes: one, several, or none for an image without a label."""


class ShardStore:
    """Images inside tar files."""

    def __init__(self, folder: Path | str, files: tuple[str, ...], table: SampleTable) -> None:
        self.folder, self.files, self.table = folder, files, table  # a remote folder is a URL
        self._descriptors: dict[int, int] = {}

    def __reduce__(self) -> Any:
        return ShardStore, (self.folder, self.files, self.table)

    @property
    def is_remote(self) -> bool:
        """Whether each read is a request to a remote store."""
        return isinstance(self.folder, str)

    def get_name(self, row: int) -> str:
        """The name of the shard, and that of the image in the dataset."""
        return f"{self.files[self.table['shard'][row]]}:{self.table.get_text('name', row)}"

    def read(self, row: int) -> bytes:
        """The image file's bytes."""
        size, offset = int(self.table["size"][row]), int(self.table["offset"][row])
        shard = int(self.table["shard"][row])
        if size > FILE_LIMIT:
            raise DataError(f"{self.get_name(row)} has {size:,} bytes; the limit for images is {FILE_LIMIT:,}")
        try:
            if isinstance(self.folder, Path):
                content = self._read_file(self.folder / self.files[shard], shard, size, offset)
            else:
                content = remote.read(remote.join_url(self.folder, self.files[shard]), offset, size)
        except OSError as error:
            raise DataError(f"{self.get_name(row)} cannot be read: {error}") from error
        if len(content) != size:
            raise DataError(f"{self.get_name(row)}: the shard ends before the image does; check or download it again")
        return content

    def _read_file(self, path: Path, shard: int, size: int, offset: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._get_descriptor(path, shard), size, offset)
        with path.open("rb") as file:  # Windows: threads may read at a time, and a descriptor has one position
            file.seek(offset)
            return file.read(size)

    def _get_descriptor(self, path: Path, shard: int) -> int:
        if shard not in self._descriptors:
            if len(self._descriptors) >= _MAX_OPEN_FILES:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            self._descriptors[shard] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[shard]

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit the module may already be gone
        for descriptor in getattr(self, "_descriptors", {}).values():
            close(descriptor)


# --- writing -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ShardInfo:
    """One finished shard, and the index entries of its samples."""

    file: str
    split: str
    sha256: str
    bytes: int
    names: list[str]
    offsets: list[int]
    sizes: list[int]
    labels: list[tuple[int, ...]]


def write_shards(folder: Path, samples: Iterable[Sample], *, classes: Sequence[str], origin: Mapping[str, Any]) -> None:
    """Write a dataset as tar shards with an index; `folder` appears whole or not at all."""
    with write_atomically(folder) as fresh:
        fresh.mkdir()
        shard_infos: list[ShardInfo] = []
        first = 0
        for batch in _group_by_size(samples):
            number = sum(shard.split == batch[0].split for shard in shard_infos)
            shard_infos.append(write_shard(fresh, format_shard_name(batch[0].split, number), batch, first))
            first += len(batch)
        finalize_shards(fresh, shard_infos, classes=classes, multi_label=False, origin=origin)


def encode_png(image: Image.Image, *, compress_level: int = -1) -> bytes:
    """Encode an image as PNG, which is lossless; the default level is zlib's own."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=compress_level)
    return file.getvalue()


def format_shard_name(split: str, number: int) -> str:
    """("train", 12) -> train-000012.tar."""
    return f"{split}-{number:06d}.tar"


def _group_by_size(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Group consecutive samples of one split into batches of about a shard's size."""
    batch: list[Sample] = []
    size = 0
    for sample in samples:
        if batch and (size >= SHARD_BYTES or sample.split != batch[0].split):
            yield batch
            batch, size = [], 0
        batch.append(sample)
        size += len(sample.image)
    if batch:
        yield batch


def write_shard(
    folder: Path, file: str, samples: Iterable[Sample], first_number: int, *, multi_label: bool = False
) -> ShardInfo:
    """Write one shard, its samples numbered from `first_number`; equal samples give equal bytes."""
    names, offsets, sizes, labels, split = [], [], [], [], ""
    with (folder / file).open("wb") as tar:
        for number, sample in enumerate(samples, start=first_number):
            suffix = PurePosixPath(sample.name).suffix.lower()
            if suffix not in get_image_suffixes():
                suffixes = ", ".join(get_image_suffixes())
                raise DataError(f"{sample.name} has the suffix {suffix!r}; an image has one of {suffixes}")
            offsets.append(_append_member(tar, f"{number:09d}{suffix}", sample.image))
            if multi_label:
                _append_member(tar, f"{number:09d}.json", json.dumps({"labels": sample.labels}).encode())
            elif sample.labels:
                _append_member(tar, f"{number:09d}.cls", str(sample.labels[0]).encode())
            names.append(sample.name)
            sizes.append(len(sample.image))
            labels.append(sample.labels)
            split = sample.split
        tar.write(bytes(2 * _BLOCK))
    path = folder / file
    return ShardInfo(file, split, compute_sha256(path), path.stat().st_size, names, offsets, sizes, labels)


def _append_member(tar: Any, name: str, content: bytes) -> int:
    """Append one member and return the offset of its content."""
    header = tarfile.TarInfo(name)
    header.size, header.mode = len(content), 0o644
    tar.write(header.tobuf(tarfile.USTAR_FORMAT))
    offset: int = tar.tell()
    tar.write(content)
    tar.write(bytes(-len(content) % _BLOCK))
    return offset


def finalize_shards(
    folder: Path, infos: Sequence[ShardInfo], *, classes: Sequence[str], multi_label: bool, origin: Mapping[str, Any]
) -> None:
    """Write the index of finished shards, and the description that makes them a dataset."""
    numbers = np.repeat(np.arange(len(infos), dtype=np.int32), [len(shard.names) for shard in infos])
    columns: dict[str, Array] = {
        "shard": numbers,
        "offset": np.array([offset for shard in infos for offset in shard.offsets], dtype=np.int64),
        "size": np.array([size for shard in infos for size in shard.sizes], dtype=np.int64),
        "split": np.array([SPLITS.index(shard.split) for shard in infos], dtype=np.int8)[numbers],
        **encode_label_columns((row for shard in infos for row in shard.labels), multi_label=multi_label),
        **encode_text_column("name", (name for shard in infos for name in shard.names)),
    }
    files = {shard.file: {"bytes": shard.bytes, "sha256": shard.sha256} for shard in infos}
    sample_table.write_table(folder / INDEX_FOLDER, columns, {"files": {shard.file: shard.bytes for shard in infos}})
    images = {split: int((columns["split"] == number).sum()) for number, split in enumerate(SPLITS)}
    description = {"version": 1, "classes": list(classes), "images": images, "origin": dict(origin), "shards": files}
    with write_atomically(folder / DESCRIPTION_FILE, overwrite=True) as fresh:
        fresh.write_text(json.dumps(description, indent=1))


# --- reading -------------------------------------------------------------------------------------------------------


def open_shards(folder: Path | str, *, holdout_fraction: float = 0.1) -> Dataset:
    """Open a packed or downloaded dataset, given by path or URL, through the index beside its shards."""
    remote_files = {} if isinstance(folder, Path) else remote.list_files(folder)
    index_parent = folder if isinstance(folder, Path) else _download_index(folder, remote_files)
    try:
        description = json.loads((index_parent / DESCRIPTION_FILE).read_text())
        table = sample_table.read_table(index_parent / INDEX_FOLDER, max_verified_bytes=MAX_VERIFIED_BYTES)
        files = {str(name): int(size) for name, size in table.metadata["files"].items()}
        classes = tuple(map(str, description["classes"]))
        image_counts = dict(description["images"])
        _check_index(table, list(files.values()), len(classes))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{folder} is not a complete dataset of shards ({error}); pack or download it again") from error
    if isinstance(folder, Path):
        actual_sizes = {name: (folder / name).stat().st_size for name in files if (folder / name).is_file()}
    else:
        actual_sizes = {name: file.size for name, file in remote_files.items()}
    for name, size in files.items():
        if "/" in name or size != actual_sizes.get(name):
            raise DataError(
                f"{folder}/{name} is missing or does not have the {size:,} bytes it was packed with;"
                " pack or download it again"
            )
    identity = str(folder.resolve()) if isinstance(folder, Path) else folder
    store = ShardStore(folder, tuple(files), table)
    if image_counts.get("train") and not image_counts.get("val"):
        return build_dataset(identity, store, _hold_out_val(identity, classes, table, holdout_fraction))
    return Dataset(name=identity, classes=classes, splits=build_splits(store, table["split"]))


def _check_index(table: SampleTable, shard_sizes: Sequence[int], num_classes: int) -> None:
    """Raise ValueError if an index points outside of its shards or classes; ten million rows take 0.1 s."""
    multi_label = "label.ends" in table
    count = len(table["shard"])
    values_of_ends = {"name.ends": "name.bytes"} | ({"label.ends": "label"} if multi_label else {})
    row_columns = ("shard", "offset", "size", "split", *values_of_ends, *(() if multi_label else ("label",)))
    for name in {*row_columns, *values_of_ends.values()}:
        column, kind = table[name], "u" if name == "name.bytes" else "i"
        if column.ndim != 1 or column.dtype.kind != kind or (name in row_columns and len(column) != count):
            raise ValueError(
                f"the column {name} is {column.dtype} {column.shape}, and the dataset has {pluralize(count, 'image')}"
            )
    _check_range(table, "shard", 0, len(shard_sizes) - 1, increasing=True)
    _check_range(table, "split", 0, len(SPLITS) - 1)
    _check_range(table, "label", 0 if multi_label else UNLABELED, num_classes - 1)
    for name, values in values_of_ends.items():
        _check_range(table, name, 0, len(table[values]), increasing=True)
        if count and int(table[name][-1]) != len(table[values]):
            raise ValueError(f"the column {name} ends at {table[name][-1]} of {len(table[values])}")
    lengths = np.array(shard_sizes, dtype=np.int64)
    for start in range(0, count, _ROWS_PER_CHECK):
        shard, offset, size = (table[name][start : start + _ROWS_PER_CHECK] for name in ("shard", "offset", "size"))
        if (offset < 0).any() or (size < 0).any() or (size > lengths[shard] - offset).any():
            raise ValueError(f"an image of rows {start} to {start + len(shard) - 1} lies outside of its shard")


def _check_range(table: SampleTable, name: str, minimum: int, maximum: int, *, increasing: bool = False) -> None:
    """Raise ValueError if a column leaves its range, or decreases although it must not."""
    column = table[name]
    for start in range(0, len(column), _ROWS_PER_CHECK):
        block = column[start : start + _ROWS_PER_CHECK]
        if int(block.min()) < minimum or int(block.max()) > maximum:
            raise ValueError(
                f"the column {name} holds {block.min()} to {block.max()}; the range is {minimum} to {maximum}"
            )
        if increasing and (np.diff(column[max(0, start - 1) : start + _ROWS_PER_CHECK]) < 0).any():
            raise ValueError(f"the column {name} decreases between rows {start} and {start + len(block) - 1}")


_INDEX_FILES = re.compile(rf"{re.escape(DESCRIPTION_FILE)}|{INDEX_FOLDER}/\w[\w.-]*")  # no key that leads outside


def _download_index(url: str, remote_files: Mapping[str, remote.RemoteFile]) -> Path:
    """A cache folder with the current description and index of a remote dataset."""
    index_files = {name: file for name, file in remote_files.items() if _INDEX_FILES.fullmatch(name)}
    version = hashlib.sha256(repr((url, sorted(index_files.items()))).encode(errors="surrogateescape")).hexdigest()[:24]
    folder = get_cache_home() / "remote" / version
    folder.parent.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(folder.with_suffix(".lock"), url):  # one of several ranks on a machine downloads it
        if not folder.exists():
            with write_atomically(folder) as fresh:
                (fresh / INDEX_FOLDER).mkdir(parents=True)
                for name in index_files:
                    remote.copy_from_remote(remote.join_url(url, name), fresh / name)
    return folder


def _hold_out_val(identity: str, classes: Sequence[str], table: SampleTable, holdout_fraction: float) -> SampleTable:
    """A table of the splits, with a val held out of train."""

    def build_columns() -> tuple[dict[str, Array], dict[str, Any]]:
        get_name = partial(table.get_text, "name")
        split = holdout.complete_splits(
            table["split"], table, get_name, identity=identity, holdout_fraction=holdout_fraction
        )
        return {"split": split.column}, split.build_metadata(classes)

    description_file = f"{identity}/{DESCRIPTION_FILE}"
    source = f"set {description_file} {holdout_fraction}"
    return sample_table.load_or_build_table(source, lambda: [description_file], build_columns)
