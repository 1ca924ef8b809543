"""A parallel scan of a dataset that decodes every image once, for its validity, size, colors and fingerprint.

Results are cached by the image's name, size and modification time, so a second scan takes seconds. Pillow's own
`verify` accepts truncated JPEGs; here every pixel is decoded.
"""

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitrail import remote
from vitrail.data import counter_rng, duplicates, sample_table
from vitrail.data.dataset import Dataset, Split
from vitrail.data.dataset_digest import read_file_stamps
from vitrail.data.decode import decode, open_image
from vitrail.data.image_headers import FORMATS, read_header, read_image_file
from vitrail.data.order import permute_indices
from vitrail.data.sample_table import Array
from vitrail.data.shards import ShardStore
from vitrail.errors import DataError, RemoteError
from vitrail.files import get_cache_home
from vitrail.runtime import workers
from vitrail.runtime.workers import ProgressCallback

MAX_DECODED_IMAGES = 200_000
"""Of a larger dataset, this many images drawn at random are decoded; of the others only the headers are read."""
PENDING, DECODED, HEADER_ONLY, BAD = range(4)
_CHUNK_IMAGES = 64
_STAMP_BLOCK = 2**16  # images whose stamps are held at once
_CACHE_VERSION = 3
_IMAGE_FACTS_DTYPE = np.dtype(
    [
        ("status", np.int8),
        ("width", np.int32),
        ("height", np.int32),
        ("format", np.int8),  # index in FORMATS
        ("gray", np.bool_),
        ("mean", np.float32, 3),  # of the image's pixels, from 0 to 1
        ("square", np.float32, 3),  # mean of their squares
        ("digest", "V16"),  # of the file's bytes
    ]
)
ImageFacts = NDArray[Any]  # of _IMAGE_FACTS_DTYPE


@dataclasses.dataclass(frozen=True)
class DatasetScan:
    """The facts of a dataset's n images, split after split."""

    dataset: Dataset
    split_index: NDArray[np.int8]
    """The index of each image's split in the dataset's splits."""
    index_in_split: NDArray[np.int64]
    """The index of each image in its split."""
    image_facts: ImageFacts
    fingerprints: Array
    """(m, F): those of the images selected for decoding."""
    fingerprinted_images: NDArray[np.int64]
    """(m,): the indices of these images."""
    bad_reasons: dict[int, str]
    """Why each bad image cannot be used."""
    cached_count: int
    """Images whose facts came from the cache."""

    def get_image_name(self, image: int) -> str:
        """The name of an image, for people."""
        return self._get_split(image).get_image_name(int(self.index_in_split[image]))

    def get_image_labels(self, image: int) -> tuple[int, ...]:
        """The classes of an image."""
        return self._get_split(image).get_labels(int(self.index_in_split[image]))

    def get_split_name(self, image: int) -> str:
        """train, val or test."""
        return list(self.dataset.splits)[self.split_index[image]]

    def _get_split(self, image: int) -> Split:
        return list(self.dataset.splits.values())[self.split_index[image]]


BYTES_PER_IMAGE, BASE_BYTES = 3_000, 2 * 10**9
"""Memory for each image that is decoded and compared, and the constant part (docs/experiments/duplicates.md)."""


def time_image(dataset: Dataset, count: int = 32) -> float:
    """Seconds for one core to read, decode and fingerprint an image: the mean of `count` drawn at random."""
    split = max(dataset.splits.values(), key=len)
    sample = permute_indices(np.arange(min(count, len(split))), len(split), counter_rng.derive_key(0, "time"))
    result = _ScanResult.allocate(1)
    start = 0.0
    for image in (int(sample[0]), *sample.tolist()):  # the first one twice, as it also initializes the decoders
        with contextlib.suppress(DataError, OSError):  # the scan itself reports bad images
            _scan_pixels(split.read_image(image), split.get_image_name(image), result, 0)
        start = start or time.perf_counter()
    return (time.perf_counter() - start) / len(sample)


def scan_dataset(
    dataset: Dataset, *, progress: ProgressCallback = workers.ignore_progress, max_decoded: int = MAX_DECODED_IMAGES
) -> DatasetScan:
    """Scan every image of a dataset; of more than `max_decoded`, decode a random sample of that size."""
    scan, decode_mask = _allocate_scan(dataset, max_decoded)
    splits = list(dataset.splits.values())
    keys = np.concatenate(
        [_compute_cache_keys(split, decode_mask[scan.split_index == number]) for number, split in enumerate(splits)]
    )
    cached = _load_cache(scan, keys)
    done, count = int(cached.sum()), len(cached)
    progress(done, count)
    jobs = [
        _ScanJob(_select_images(scan, chunk), decode_mask[chunk], chunk)
        for chunk in _chunk_by_split(np.flatnonzero(~cached), scan.split_index)
    ]
    try:
        for job, result in _run_jobs(jobs):
            _store_result(scan, job.scan_indices, result)
            done += len(job.scan_indices)
            progress(done, count)
    finally:  # after Ctrl-C the images scanned so far need no second scan
        _save_cache(scan, keys)
    return dataclasses.replace(scan, cached_count=int(cached.sum()))


def _allocate_scan(dataset: Dataset, max_decoded: int) -> tuple[DatasetScan, NDArray[np.bool_]]:
    """A scan without results, and a mask of the images to decode."""
    if not dataset.splits:
        raise DataError(f"{dataset.name} holds no image")
    sizes = [len(split) for split in dataset.splits.values()]
    count = sum(sizes)
    decoded = np.arange(count)
    if count > max_decoded:
        decoded = np.sort(permute_indices(np.arange(max_decoded), count, counter_rng.derive_key(0, "examine")))
    decode_mask = np.zeros(count, dtype=bool)
    decode_mask[decoded] = True
    scan = DatasetScan(
        dataset=dataset,
        split_index=np.repeat(np.arange(len(sizes), dtype=np.int8), sizes),
        index_in_split=np.concatenate([np.arange(size, dtype=np.int64) for size in sizes]),
        image_facts=np.zeros(count, dtype=_IMAGE_FACTS_DTYPE),
        fingerprints=np.zeros((len(decoded), duplicates.FINGERPRINT_BYTES), dtype=np.uint8),
        fingerprinted_images=decoded,
        bad_reasons={},
        cached_count=0,
    )
    return scan, decode_mask


def measure_median_short_side(split: Split, max_images: int = 32) -> int:
    """The median short side of up to `max_images` readable images from all over the split; 0 if none is readable."""
    sides = []
    for number in np.linspace(0, len(split) - 1, min(max_images, len(split))).round().astype(int).tolist():
        with contextlib.suppress(DataError, OSError):
            image = open_image(split.read_image(number), name=split.get_image_name(number))
            sides.append(min(image.height, image.width))
    return round(float(np.median(sides))) if sides else 0


@dataclasses.dataclass(frozen=True)
class _ScanJob:
    """Images of one split to scan."""

    split: Split
    decode_mask: NDArray[np.bool_]
    scan_indices: NDArray[np.int64]

    def split_by_image(self) -> "list[_ScanJob]":
        """One job per image."""
        rows = np.asarray(self.split.rows)
        slices = [slice(number, number + 1) for number in range(len(rows))]
        return [_ScanJob(Split(self.split.store, rows[s]), self.decode_mask[s], self.scan_indices[s]) for s in slices]


@dataclasses.dataclass(frozen=True)
class _ScanResult:
    """The facts of the images of a job."""

    image_facts: ImageFacts
    fingerprints: Array  # (k, F), zeros for images that were not decoded
    bad_reasons: dict[int, str]

    @classmethod
    def allocate(cls, count: int) -> "_ScanResult":
        """A result of zeros, to be filled."""
        fingerprints = np.zeros((count, duplicates.FINGERPRINT_BYTES), dtype=np.uint8)
        return cls(np.zeros(count, dtype=_IMAGE_FACTS_DTYPE), fingerprints, {})

    def mark_bad(self, number: int, reason: str) -> None:
        """Record that an image cannot be used."""
        self.image_facts[number] = np.zeros((), dtype=_IMAGE_FACTS_DTYPE)
        self.image_facts[number]["status"] = BAD
        self.bad_reasons[number] = reason


def _chunk_by_split(images: NDArray[np.int64], split_index: NDArray[np.int8]) -> Iterator[NDArray[np.int64]]:
    """The images in chunks of one split each."""
    for number in np.unique(split_index[images]).tolist():
        in_split = images[split_index[images] == number]
        yield from (in_split[start : start + _CHUNK_IMAGES] for start in range(0, len(in_split), _CHUNK_IMAGES))


def _select_images(scan: DatasetScan, images: NDArray[np.int64]) -> Split:
    """Images of one split, as a split."""
    split = list(scan.dataset.splits.values())[scan.split_index[images[0]]]
    indices = scan.index_in_split[images]
    first, last = int(indices[0]), int(indices[-1])
    rows = np.asarray(split.rows[first : last + 1])  # sliced first: a range of a billion rows must stay a range
    return Split(split.store, rows[indices - first])


def _run_jobs(jobs: Sequence[_ScanJob]) -> Iterator[tuple[_ScanJob, _ScanResult]]:
    """The result of each job; if a process died, its images are scanned one by one to find the cause."""
    for job, result in workers.map_in_processes(_scan_images, jobs):
        if not isinstance(result, BrokenProcessPool):
            yield job, result
        elif len(job.scan_indices) > 1:
            yield from _run_jobs(job.split_by_image())
        else:
            bad = _ScanResult.allocate(1)
            bad.mark_bad(0, "the process that decoded it died (a crash, or out of memory)")
            yield job, bad


def _scan_images(job: _ScanJob) -> _ScanResult:
    """Scan the images of a job, in a worker process."""
    torch.set_num_threads(1)
    with Path(os.devnull).open("wb") as devnull:
        os.dup2(devnull.fileno(), 2)  # libtiff writes warnings to stderr, bypassing Python
    result = _ScanResult.allocate(len(job.scan_indices))
    map_images = remote.map_concurrently if job.split.store.is_remote else map
    sources = map_images(partial(_read_source, job.split), range(len(job.scan_indices)))
    for number, source in enumerate(sources):
        name = job.split.get_image_name(number)
        try:
            if isinstance(source, DataError | OSError):
                raise source
            is_decoded = bool(job.decode_mask[number])
            content = read_image_file(source, name=name) if isinstance(source, Path) and is_decoded else source
            _scan_header(content, name, result.image_facts[number])
            if is_decoded:
                _scan_pixels(content, name, result, number)
        except (DataError, OSError) as error:
            result.mark_bad(number, str(error).removeprefix(f"{name} "))
    return result


def _read_source(split: Split, number: int) -> Path | bytes | Image.Image | DataError | OSError:
    """An encoded image, or its error; an unreachable store is not the image's fault and raises."""
    try:
        return split.read_image(number)
    except RemoteError:
        raise
    except (DataError, OSError) as error:
        return error


def _scan_header(source: Path | bytes | Image.Image, name: str, facts: Any) -> None:
    facts["status"] = HEADER_ONLY
    if isinstance(source, Image.Image):
        facts["width"], facts["height"], facts["format"] = *source.size, FORMATS.index("PNG")
        return
    header = read_header(source, name=name)
    facts["width"], facts["height"], facts["format"] = header.width, header.height, FORMATS.index(header.format)


def _scan_pixels(source: Path | bytes | Image.Image, name: str, result: _ScanResult, number: int) -> None:
    pixels = decode(source, name=name)  # (3, H, W)
    facts = result.image_facts[number]
    values = pixels.reshape(3, -1)
    counts = torch.stack([torch.bincount(channel, minlength=256) for channel in values]).double()  # (3, 256)
    levels = torch.arange(256, dtype=torch.float64) / 255
    facts["status"] = DECODED
    facts["mean"] = (counts @ levels / values.shape[1]).numpy()
    facts["square"] = (counts @ levels**2 / values.shape[1]).numpy()
    facts["gray"] = bool((pixels[0] == pixels[1]).all() and (pixels[1] == pixels[2]).all())
    content = source if isinstance(source, bytes) else pixels.contiguous().numpy().tobytes()
    facts["digest"] = hashlib.blake2b(content, digest_size=16).digest()
    result.fingerprints[number] = duplicates.compute_fingerprint(pixels)


def _store_result(scan: DatasetScan, images: NDArray[np.int64], result: _ScanResult) -> None:
    scan.image_facts[images] = result.image_facts
    decoded = np.isin(images, scan.fingerprinted_images)
    scan.fingerprints[np.searchsorted(scan.fingerprinted_images, images[decoded])] = result.fingerprints[decoded]
    scan.bad_reasons.update({int(images[number]): reason for number, reason in result.bad_reasons.items()})


# --- the cache -------------------------------------------------------------------------------------------------------


def _compute_cache_keys(split: Split, decode_mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """(n, 16): 128 bits per image that change with the image and with the depth of the scan; zeros if unknown."""
    keys = np.zeros((len(split), 16), dtype=np.uint8)
    for start in range(0, len(split), _STAMP_BLOCK):
        rows = [int(row) for row in split.rows[start : start + _STAMP_BLOCK]]
        stamps = read_file_stamps(split.store, rows)
        for number, (row, stamp) in enumerate(zip(rows, stamps, strict=True), start):
            if stamp:
                offset = [int(split.store.table["offset"][row])] if isinstance(split.store, ShardStore) else []
                content = f"{_CACHE_VERSION} {split.get_image_name(number)} {stamp + offset} {decode_mask[number]}"
                digest = hashlib.blake2b(content.encode(errors="surrogateescape"), digest_size=16).digest()
                keys[number] = np.frombuffer(digest, dtype=np.uint8)
    return keys


def _load_cache(scan: DatasetScan, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Copy the cached facts into the scan, and return the mask of the images that had some."""
    cached = np.zeros(len(keys), dtype=bool)
    try:
        table = sample_table.read_table(_get_cache_folder(scan.dataset))
        same_width = table["fingerprint"].shape[1] == duplicates.FINGERPRINT_BYTES
        if table.metadata.get("version") != _CACHE_VERSION or not same_width:
            return cached
        row_of_key = {key.tobytes(): row for row, key in enumerate(table["key"])}
        cached_fingerprints = {int(row): number for number, row in enumerate(table["fingerprinted"])}
        fingerprints = {int(image): number for number, image in enumerate(scan.fingerprinted_images)}
        for image, key in enumerate(keys):
            row = row_of_key.get(key.tobytes()) if key.any() else None
            if row is None or (image in fingerprints) != (row in cached_fingerprints):
                continue
            scan.image_facts[image] = table["facts"].view(_IMAGE_FACTS_DTYPE)[row]
            if image in fingerprints:
                scan.fingerprints[fingerprints[image]] = table["fingerprint"][cached_fingerprints[row]]
            cached[image] = True
    except (OSError, ValueError, KeyError, IndexError, EOFError):
        cached[:] = False  # absent or damaged: all images are scanned again
    return cached


def _save_cache(scan: DatasetScan, keys: NDArray[np.uint8]) -> None:
    """Cache the facts of good images; a bad one may be repaired, or may have failed because of the disk."""
    status = scan.image_facts["status"]
    good = (status == DECODED) | (status == HEADER_ONLY)
    columns = {
        "key": keys * good[:, None],
        "facts": scan.image_facts.view(np.uint8),
        "fingerprint": scan.fingerprints,
        "fingerprinted": scan.fingerprinted_images,
    }
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, not the result
        sample_table.write_table(_get_cache_folder(scan.dataset), columns, {"version": _CACHE_VERSION})


def _get_cache_folder(dataset: Dataset) -> Path:
    name = hashlib.sha256(dataset.name.encode(errors="surrogateescape")).hexdigest()[:24]
    return get_cache_home() / "examined" / name
