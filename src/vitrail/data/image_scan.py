"""A parallel scan of a dataset that decodes every image once, for its validity, size, colors and fingerprint.

Results are cached by the image's name, size and modification time, so a second scan takes seconds. Pillow's own
`verify` accepts truncated JPEGs; here every pixel is decoded.
"""

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitrail import remote
from vitrail.data import duplicates, sample_table
from vitrail.data.dataset import Dataset, Split
from vitrail.data.dataset_digest import read_file_stamps
from vitrail.data.decode import decode, open_image
from vitrail.data.image_headers import FORMATS, ImageHeader, read_header, read_image_file
from vitrail.data.memory import MemoryStore
from vitrail.data.randomness import IntArray, sample_indices, sample_sorted_indices
from vitrail.data.sample_table import Array
from vitrail.data.shards import ShardStore
from vitrail.errors import DataError, RemoteError
from vitrail.runtime import workers
from vitrail.runtime.workers import ProgressCallback

MAX_DECODED_IMAGES = 200_000
"""Of a larger dataset, this many images drawn at random are decoded; of the others only the headers are read."""
PENDING, DECODED, HEADER_ONLY, BAD = range(4)
_CHUNK_IMAGES = 64
_STAMP_BLOCK = 2**16  # images whose stamps are held at once
_CACHE_KIND, _CACHE_VERSION = "examined", 3
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
    index_in_split: IntArray
    """The index of each image in its split."""
    image_facts: ImageFacts
    fingerprints: Array
    """(m, F): those of the images selected for decoding."""
    fingerprinted_images: IntArray
    """(m,): the indices of these images."""
    bad_reasons: dict[int, str]
    """Why each bad image cannot be used."""
    cached_count: int
    """Images whose facts came from the cache."""

    def get_image_name(self, image: int) -> str:
        """The name of an image, for people."""
        return self.get_split(image).get_image_name(int(self.index_in_split[image]))

    def get_image_labels(self, image: int) -> tuple[int, ...]:
        """The classes of an image."""
        return self.get_split(image).get_labels(int(self.index_in_split[image]))

    def get_split_name(self, image: int) -> str:
        """train, val or test."""
        return list(self.dataset.splits)[self.split_index[image]]

    def get_split(self, image: int) -> Split:
        """The split of an image."""
        return list(self.dataset.splits.values())[self.split_index[image]]


BYTES_PER_IMAGE, BASE_BYTES = 3_000, 2 * 10**9
"""Memory for each image that is decoded and compared, and the constant part (docs/experiments/duplicates.md)."""


def time_image(dataset: Dataset, count: int = 32) -> float:
    """Seconds for one core to read, decode and fingerprint an image: the mean of `count` drawn at random."""
    split = max(dataset.splits.values(), key=len)
    sample = sample_indices(count, len(split), "time").tolist()
    start = 0.0
    for image in (sample[0], *sample):  # the first one twice, as it also initializes the decoders
        with contextlib.suppress(DataError, OSError):  # the scan itself reports bad images
            _scan_pixels(split.read_image(image), split.get_image_name(image), _allocate_facts(PENDING))
        start = start or time.perf_counter()
    return (time.perf_counter() - start) / len(sample)


def scan_dataset(
    dataset: Dataset, *, progress: ProgressCallback = workers.ignore_progress, max_decoded: int = MAX_DECODED_IMAGES
) -> DatasetScan:
    """Scan every image of a dataset; of more than `max_decoded`, decode a random sample of that size."""
    scan = _allocate_scan(dataset, max_decoded)
    decode_mask = np.isin(np.arange(len(scan.image_facts)), scan.fingerprinted_images)
    splits = enumerate(dataset.splits.values())
    keys = np.concatenate(
        [_compute_cache_keys(split, decode_mask[scan.split_index == number]) for number, split in splits]
    )
    cached = _load_cache(scan, keys)
    done, count = int(cached.sum()), len(cached)
    progress(done, count)
    try:
        chunks = _chunk_by_split(np.flatnonzero(~cached), scan.split_index)
        for images, results in _scan_chunks(scan, decode_mask, chunks):
            for image, (facts, fingerprint, bad_reason) in zip(images.tolist(), results, strict=True):
                scan.image_facts[image] = facts
                if fingerprint is not None:
                    scan.fingerprints[np.searchsorted(scan.fingerprinted_images, image)] = fingerprint
                if bad_reason:
                    scan.bad_reasons[image] = bad_reason
            done += len(images)
            progress(done, count)
    finally:  # after Ctrl-C the images scanned so far need no second scan
        _save_cache(scan, keys)
    return dataclasses.replace(scan, cached_count=int(cached.sum()))


def _allocate_scan(dataset: Dataset, max_decoded: int) -> DatasetScan:
    """A scan without results."""
    if not dataset.splits:
        raise DataError(f"{dataset.name} holds no image")
    sizes = [len(split) for split in dataset.splits.values()]
    count = sum(sizes)
    decoded = sample_sorted_indices(max_decoded, count, "examine")
    return DatasetScan(
        dataset=dataset,
        split_index=np.repeat(np.arange(len(sizes), dtype=np.int8), sizes),
        index_in_split=np.concatenate([np.arange(size, dtype=np.int64) for size in sizes]),
        image_facts=np.zeros(count, dtype=_IMAGE_FACTS_DTYPE),
        fingerprints=np.zeros((len(decoded), duplicates.FINGERPRINT_BYTES), dtype=np.uint8),
        fingerprinted_images=decoded,
        bad_reasons={},
        cached_count=0,
    )


def measure_median_short_side(split: Split, max_images: int = 32) -> int:
    """The median short side of up to `max_images` readable images from all over the split; 0 if none is readable."""
    sides = []
    for number in np.linspace(0, len(split) - 1, min(max_images, len(split))).round().astype(int).tolist():
        with contextlib.suppress(DataError, OSError):
            image = open_image(split.read_image(number), name=split.get_image_name(number))
            sides.append(min(image.height, image.width))
    return round(float(np.median(sides))) if sides else 0


def _chunk_by_split(images: IntArray, split_index: NDArray[np.int8]) -> Iterator[IntArray]:
    """The images in chunks of one split each."""
    for number in np.unique(split_index[images]).tolist():
        in_split = images[split_index[images] == number]
        yield from (in_split[start : start + _CHUNK_IMAGES] for start in range(0, len(in_split), _CHUNK_IMAGES))


class _ScanJob(NamedTuple):
    """Images of one split to scan in a worker process."""

    images: IntArray
    """Their indices in the scan."""
    split: Split
    """These images alone."""
    decode_mask: NDArray[np.bool_]


class _ScanResult(NamedTuple):
    facts: ImageFacts
    fingerprint: Array | None
    bad_reason: str


def _scan_chunks(
    scan: DatasetScan, decode_mask: NDArray[np.bool_], chunks: Iterable[IntArray]
) -> Iterator[tuple[IntArray, list[_ScanResult]]]:
    """Each chunk and its results; if a process died, its images are scanned one by one to find the cause."""
    jobs = [_ScanJob(images, _select_images(scan, images), decode_mask[images]) for images in chunks]
    in_memory = isinstance(scan.get_split(0).store, MemoryStore)  # it may hold objects that no process can receive
    scanned: Iterable[tuple[_ScanJob, list[_ScanResult] | BrokenProcessPool]]
    scanned = zip(jobs, map(_scan_images, jobs), strict=True)
    for job, results in scanned if in_memory else workers.map_in_processes(_scan_in_worker, jobs):
        if not isinstance(results, BrokenProcessPool):
            yield job.images, results
        elif len(job.images) > 1:
            yield from _scan_chunks(scan, decode_mask, job.images[:, None])
        else:
            reason = "the process that decoded it died (a crash, or out of memory)"
            yield job.images, [_ScanResult(_allocate_facts(BAD), None, reason)]


def _select_images(scan: DatasetScan, images: IntArray) -> Split:
    """Images of one split, as a split."""
    split = scan.get_split(int(images[0]))
    indices = scan.index_in_split[images]
    first, last = int(indices[0]), int(indices[-1])
    rows = np.asarray(split.rows[first : last + 1])  # sliced first: a range of a billion rows must stay a range
    return Split(split.store, rows[indices - first])


def _scan_in_worker(job: _ScanJob) -> list[_ScanResult]:
    """Scan the images of a job in a process of its own, whose threads and stderr nobody else uses."""
    torch.set_num_threads(1)
    with Path(os.devnull).open("wb") as devnull:
        os.dup2(devnull.fileno(), 2)  # libtiff writes warnings to stderr, bypassing Python
    return _scan_images(job)


def _scan_images(job: _ScanJob) -> list[_ScanResult]:
    """Scan the images of a job."""
    map_images = remote.map_concurrently if job.split.store.is_remote else map
    sources = map_images(partial(_read_source, job.split), range(len(job.images)))
    names = map(job.split.get_image_name, range(len(job.images)))
    return [_scan_image(*image) for image in zip(sources, names, job.decode_mask.tolist(), strict=True)]


def _read_source(split: Split, number: int) -> Path | bytes | Image.Image | DataError | OSError:
    """An encoded image, or its error; an unreachable store is not the image's fault and raises."""
    try:
        return split.read_image(number)
    except RemoteError:
        raise
    except (DataError, OSError) as error:
        return error


def _scan_image(source: Path | bytes | Image.Image | DataError | OSError, name: str, is_decoded: bool) -> _ScanResult:
    try:
        if isinstance(source, DataError | OSError):
            raise source
        content = read_image_file(source, name=name) if isinstance(source, Path) and is_decoded else source
        facts = _allocate_facts(HEADER_ONLY)
        if isinstance(content, Image.Image):
            header = ImageHeader("PNG", content.height, content.width)
        else:
            header = read_header(content, name=name)
        facts["width"], facts["height"], facts["format"] = header.width, header.height, FORMATS.index(header.format)
        return _ScanResult(facts, _scan_pixels(content, name, facts) if is_decoded else None, "")
    except (DataError, OSError) as error:
        return _ScanResult(_allocate_facts(BAD), None, str(error).removeprefix(f"{name} "))


def _scan_pixels(source: Path | bytes | Image.Image, name: str, facts: ImageFacts) -> Array:
    """Add the facts that take decoding, and return the fingerprint."""
    pixels = decode(source, name=name)  # (3, H, W)
    values = pixels.reshape(3, -1)
    counts = torch.stack([torch.bincount(channel, minlength=256) for channel in values]).double()  # (3, 256)
    levels = torch.arange(256, dtype=torch.float64) / 255
    facts["status"] = DECODED
    facts["mean"] = (counts @ levels / values.shape[1]).numpy()
    facts["square"] = (counts @ levels**2 / values.shape[1]).numpy()
    facts["gray"] = bool((pixels[0] == pixels[1]).all() and (pixels[1] == pixels[2]).all())
    content = source if isinstance(source, bytes) else pixels.contiguous().numpy().tobytes()
    facts["digest"] = hashlib.blake2b(content, digest_size=16).digest()
    return duplicates.compute_fingerprint(pixels)


def _allocate_facts(status: int) -> ImageFacts:
    facts = np.zeros((), dtype=_IMAGE_FACTS_DTYPE)
    facts["status"] = status
    return facts


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
        table = sample_table.read_table(sample_table.get_cache_folder(_CACHE_KIND, scan.dataset.name))
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
        folder = sample_table.get_cache_folder(_CACHE_KIND, scan.dataset.name)
        sample_table.write_table(folder, columns, {"version": _CACHE_VERSION})
