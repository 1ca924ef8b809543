"""A set as tar shards in WebDataset's naming, with an index through which they are read at random.

    train-000000.tar    000000000.jpg  000000000.cls  000000001.jpg  000000001.cls ...
    index/              for each sample its shard, where its image begins, its size, labels and name; memory-mapped
    set.json            classes, splits, origin, and the sha256 of each shard

`.cls` holds a class's number, `.json` the numbers of several. WebDataset itself reads shards as streams, which can
neither be resumed exactly nor drawn from at random. Shards of other makers are `tars.py`'s. Where a set lies on an
object store, its index is fetched once and each image is one request for a range of its shard.
"""

import dataclasses
import hashlib
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from vitrail import remote
from vitrail.data import holdout, sample_table
from vitrail.data.dataset import SPLITS, UNLABELED, Dataset, build_splits
from vitrail.data.image_headers import FILE_LIMIT, get_image_suffixes
from vitrail.data.sample_table import Array, SampleTable, encode_text_column
from vitrail.errors import DataError
from vitrail.files import compute_sha256, get_cache_home, write_atomically
from vitrail.locks import wait_for_lock
from vitrail.plurals import pluralize

INDEX_FOLDER, DESCRIPTION_FILE = "index", "set.json"
SHARD_BYTES = 256 * 2**20
_BLOCK = 512
_MAX_OPEN_FILES = 128
_ROWS_PER_CHECK = 2**20  # of an index that are checked at once
MAX_VERIFIED_BYTES = (
    4 * 2**30
)  # of an index whose digest is computed when it is opened: 70 million images, some seconds


class Sample(NamedTuple):
    """One image on its way into shards."""

    split: str
    """train, val or test."""
    name: str
    """Its path inside the set, with a suffix that says its format: roses/0001.jpg."""
    image: bytes
    """The image file's own bytes."""
    labels: tuple[int, ...]
    """Places in the list of classes: one, none where the image has no label, or several."""


class ShardStore:
    """Images inside tar files."""

    def __init__(self, folder: Path | str, files: tuple[str, ...], rows: SampleTable) -> None:
        self.folder, self.files, self.table = folder, files, rows  # a folder that is elsewhere is a URL
        self._descriptors: dict[int, int] = {}

    def __reduce__(self) -> Any:
        return ShardStore, (self.folder, self.files, self.table)

    @property
    def is_remote(self) -> bool:
        """Whether a read is a request to a store."""
        return isinstance(self.folder, str)

    def get_name(self, row: int) -> str:
        """The name inside the set, behind that of its shard."""
        return f"{self.files[self.table['shard'][row]]}:{self.table.get_text('name', row)}"

    def read(self, row: int) -> bytes:
        """The image file's bytes."""
        size, offset = int(self.table["size"][row]), int(self.table["offset"][row])
        shard = int(self.table["shard"][row])
        if size > FILE_LIMIT:
            raise DataError(f"{self.get_name(row)} has {size:,} bytes; images of at most {FILE_LIMIT:,} are read")
        try:
            if isinstance(self.folder, Path):
                found = os.pread(self._get_descriptor(self.folder / self.files[shard], shard), size, offset)
            else:
                found = remote.read(remote.join_url(self.folder, self.files[shard]), offset, size)
        except OSError as error:
            raise DataError(f"{self.get_name(row)} cannot be read: {error}") from error
        if len(found) != size:
            raise DataError(f"{self.get_name(row)}: the shard ends before the image does; check or fetch it again")
        return found

    def _get_descriptor(self, path: Path, shard: int) -> int:
        if shard not in self._descriptors:
            if len(self._descriptors) >= _MAX_OPEN_FILES:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            self._descriptors[shard] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[shard]

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit the module may be gone already
        for descriptor in getattr(self, "_descriptors", {}).values():
            close(descriptor)


# --- writing -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ShardInfo:
    """One finished shard and what the index says of its samples."""

    file: str
    split: str
    sha256: str
    bytes: int
    names: list[str]
    offsets: list[int]
    sizes: list[int]
    labels: list[tuple[int, ...]]


def write_shards(folder: Path, samples: Iterable[Sample], *, classes: Sequence[str], origin: Mapping[str, Any]) -> None:
    """Write a set as tar shards with an index: `folder` appears whole or not at all."""
    with write_atomically(folder) as fresh:
        fresh.mkdir()
        written: list[ShardInfo] = []
        first = 0
        for batch in _group_by_size(samples):
            count = sum(shard.split == batch[0].split for shard in written)
            written.append(write_shard(fresh, format_shard_name(batch[0].split, count), batch, first))
            first += len(batch)
        finalize_shards(fresh, written, classes=classes, multi_label=False, origin=origin)


def format_shard_name(split: str, number: int) -> str:
    """train-000012.tar."""
    return f"{split}-{number:06d}.tar"


def _group_by_size(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Consecutive samples of one split, a shard's worth at a time."""
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
    """Write one shard, its samples numbered from `first`; equal samples give equal bytes."""
    names, offsets, sizes, labels, split = [], [], [], [], ""
    with (folder / file).open("wb") as tar:
        for number, sample in enumerate(samples, start=first_number):
            suffix = PurePosixPath(sample.name).suffix.lower()
            if suffix not in get_image_suffixes():
                known = ", ".join(get_image_suffixes())
                raise DataError(f"{sample.name} has the suffix {suffix!r}; an image has one of {known}")
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
    """Append one member and return where its content begins."""
    header = tarfile.TarInfo(name)
    header.size, header.mode = len(content), 0o644
    tar.write(header.tobuf(tarfile.USTAR_FORMAT))
    start: int = tar.tell()
    tar.write(content)
    tar.write(bytes(-len(content) % _BLOCK))
    return start


def finalize_shards(
    folder: Path,
    shard_infos: Sequence[ShardInfo],
    *,
    classes: Sequence[str],
    multi_label: bool,
    origin: Mapping[str, Any],
) -> None:
    """Write the index of finished shards, and the description that makes them a set."""
    numbers = np.repeat(np.arange(len(shard_infos), dtype=np.int32), [len(shard.names) for shard in shard_infos])
    labels = [row if row or multi_label else (UNLABELED,) for shard in shard_infos for row in shard.labels]
    columns: dict[str, Array] = {
        "shard": numbers,
        "offset": np.array([offset for shard in shard_infos for offset in shard.offsets], dtype=np.int64),
        "size": np.array([size for shard in shard_infos for size in shard.sizes], dtype=np.int64),
        "split": np.array([SPLITS.index(shard.split) for shard in shard_infos], dtype=np.int8)[numbers],
        "label": np.array([label for row in labels for label in row], dtype=np.int32),
        **encode_text_column("name", (name for shard in shard_infos for name in shard.names)),
    }
    if multi_label:
        columns["label.ends"] = np.cumsum([len(row) for row in labels], dtype=np.int64)
    files = {shard.file: {"bytes": shard.bytes, "sha256": shard.sha256} for shard in shard_infos}
    sample_table.write_table(
        folder / INDEX_FOLDER, columns, {"files": {name: facts["bytes"] for name, facts in files.items()}}
    )
    images = {split: int((columns["split"] == number).sum()) for number, split in enumerate(SPLITS)}
    described = {"version": 1, "classes": list(classes), "images": images, "origin": dict(origin), "shards": files}
    with write_atomically(folder / DESCRIPTION_FILE, overwrite=True) as fresh:
        fresh.write_text(json.dumps(described, indent=1))


# --- reading -------------------------------------------------------------------------------------------------------


def open_shards(folder: Path | str, *, holdout_fraction: float = 0.1) -> Dataset:
    """A set that was packed or got, given by its path or its URL: its index lies beside the shards."""
    listed = None if isinstance(folder, Path) else remote.list_files(folder)
    here = folder if isinstance(folder, Path) else _fetch_index(folder, listed or {})
    try:
        described = json.loads((here / DESCRIPTION_FILE).read_text())
        rows = sample_table.read_table(here / INDEX_FOLDER, max_verified_bytes=MAX_VERIFIED_BYTES)
        files = {str(name): int(size) for name, size in rows.metadata["files"].items()}
        classes = tuple(map(str, described["classes"]))
        images = dict(described["images"])
        _check_index(rows, list(files.values()), len(classes))
        column = rows["split"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{folder} is no whole set of shards ({error}); pack or get it again") from error
    for name, size in files.items():
        if (
            "/" in name
            or (_get_file_size(here / name) if listed is None else listed.get(name, _MISSING_FILE).size) != size
        ):
            raise DataError(
                f"{folder}/{name} is missing or has not the {size:,} bytes it was packed with; pack or get it again"
            )
    identity = str(folder.resolve()) if isinstance(folder, Path) else folder
    split = None if not images.get("train") or images.get("val") else _hold_out_val(identity, rows, holdout_fraction)
    return Dataset(
        name=identity,
        classes=classes,
        splits=build_splits(ShardStore(folder, tuple(files), rows), column if split is None else split["split"]),
        generated_splits=() if split is None else tuple(split.metadata["made_up"]),
        notes=() if split is None else tuple(split.metadata["notes"]),
    )


def _check_index(rows: SampleTable, sizes: Sequence[int], num_classes: int) -> None:
    """Raise ValueError where an index points outside of its shards or classes; ten million rows take 0.1 s."""
    several = "label.ends" in rows
    count = len(rows["shard"])
    inner = {"name.ends": "name.bytes"} | ({"label.ends": "label"} if several else {})
    each = ("shard", "offset", "size", "split", *inner, *(() if several else ("label",)))
    for name in {*each, *inner.values()}:
        column, kind = rows[name], "u" if name == "name.bytes" else "i"
        if column.ndim != 1 or column.dtype.kind != kind or (name in each and len(column) != count):
            raise ValueError(
                f"the column {name} is {column.dtype} {column.shape}, and the set has {pluralize(count, 'image')}"
            )
    _check_range(rows, "shard", 0, len(sizes) - 1, increasing=True)
    _check_range(rows, "split", 0, len(SPLITS) - 1)
    _check_range(rows, "label", 0 if several else UNLABELED, num_classes - 1)
    for name, values in inner.items():
        _check_range(rows, name, 0, len(rows[values]), increasing=True)
        if count and int(rows[name][-1]) != len(rows[values]):
            raise ValueError(f"the column {name} ends at {rows[name][-1]} of {len(rows[values])}")
    lengths = np.array(sizes, dtype=np.int64)
    for start in range(0, count, _ROWS_PER_CHECK):
        shard, offset, size = (rows[name][start : start + _ROWS_PER_CHECK] for name in ("shard", "offset", "size"))
        if (offset < 0).any() or (size < 0).any() or (size > lengths[shard] - offset).any():
            raise ValueError(f"an image of rows {start} to {start + len(shard) - 1} lies outside of its shard")


def _check_range(rows: SampleTable, name: str, minimum: int, maximum: int, *, increasing: bool = False) -> None:
    """Raise ValueError where a column leaves its range, or falls where it must not."""
    column = rows[name]
    for start in range(0, len(column), _ROWS_PER_CHECK):
        block = column[start : start + _ROWS_PER_CHECK]
        if int(block.min()) < minimum or int(block.max()) > maximum:
            raise ValueError(
                f"the column {name} holds {block.min()} to {block.max()}, and it must be {minimum} to {maximum}"
            )
        if increasing and (np.diff(column[max(0, start - 1) : start + _ROWS_PER_CHECK]) < 0).any():
            raise ValueError(f"the column {name} falls between rows {start} and {start + len(block) - 1}")


_MISSING_FILE = remote.RemoteFile(-1, "")
_INDEX_FILES = re.compile(
    rf"{re.escape(DESCRIPTION_FILE)}|{INDEX_FOLDER}/\w[\w.-]*"
)  # and nothing that a store's keys could lead outside with


def _get_file_size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _fetch_index(url: str, remote_files: Mapping[str, remote.RemoteFile]) -> Path:
    """A folder of the cache with the description and the index of a set that lies elsewhere, as they are there now."""
    wanted = {name: file for name, file in remote_files.items() if _INDEX_FILES.fullmatch(name)}
    version = hashlib.sha256(repr((url, sorted(wanted.items()))).encode(errors="surrogateescape")).hexdigest()[:24]
    place = get_cache_home() / "remote" / version
    place.parent.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(place.with_suffix(".lock"), url):  # of several ranks on a machine one fetches
        if not place.exists():
            with write_atomically(place) as fresh:
                (fresh / INDEX_FOLDER).mkdir(parents=True)
                for name in wanted:
                    remote.copy_from_remote(remote.join_url(url, name), fresh / name)
    return place


def _hold_out_val(identity: str, rows: SampleTable, holdout_fraction: float) -> SampleTable:
    """The split column with a val held out of train."""

    def build_columns() -> tuple[dict[str, Array], dict[str, Any]]:
        strata = np.zeros(len(rows["split"])) if "label.ends" in rows else rows["label"]
        found = holdout.complete_splits(
            rows["split"],
            strata,
            lambda row: rows.get_text("name", row),
            identity=identity,
            holdout_fraction=holdout_fraction,
        )
        return {"split": found.column}, {"made_up": found.generated_splits, "notes": found.notes}

    place = f"{identity}/{DESCRIPTION_FILE}"
    return sample_table.load_or_build_table(f"set {place} {holdout_fraction}", lambda: [place], build_columns)
