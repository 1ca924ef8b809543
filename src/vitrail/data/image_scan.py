"""Every image of a set opened once, in parallel: can it be decoded, what are its size and colours, what does it show.

What was found is kept in the cache under the image's name, size and time of change, so a second look costs seconds.
Pillow's own `verify` passes truncated JPEGs; here every pixel is decoded.
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
from vitrail.data.decode import decode, open_image
from vitrail.data.folder import FileStore
from vitrail.data.image_headers import FORMATS, read_header, read_image_file
from vitrail.data.order import permute_indices
from vitrail.data.sample_table import Array
from vitrail.data.shards import ShardStore
from vitrail.errors import DataError
from vitrail.files import get_cache_home
from vitrail.remote import RemoteError
from vitrail.runtime import workers
from vitrail.runtime.workers import ProgressCallback

MAX_DECODED_IMAGES = 200_000
"""Images decoded whole; of a larger set so many drawn at random are, and the rest are known by their headers."""
PENDING, DECODED, HEADER_ONLY, BAD = range(4)
_CHUNK_IMAGES = 64
_CACHE_VERSION = 3
_IMAGE_FACTS_DTYPE = np.dtype(
    [
        ("status", np.int8),
        ("width", np.int32),
        ("height", np.int32),
        ("format", np.int8),  # place in FORMATS
        ("grey", np.bool_),
        ("mean", np.float32, 3),  # of the image's pixels, from 0 to 1
        ("square", np.float32, 3),  # mean of their squares
        ("digest", "V16"),  # of the file's bytes
    ]
)
ImageFacts = NDArray[Any]  # of _FACTS


@dataclasses.dataclass(frozen=True)
class DatasetScan:
    """What is known of a set's n images, split after split."""

    dataset: Dataset
    split_index: NDArray[np.int8]
    """Of each image, the place of its split in the set's."""
    index_in_split: NDArray[np.int64]
    """Of each image, its index in its split."""
    image_facts: ImageFacts
    fingerprints: Array
    """(m, F): of the images that were to be decoded whole."""
    fingerprinted_images: NDArray[np.int64]
    """(m,): which those are."""
    bad_reasons: dict[int, str]
    """Why the bad ones are bad."""
    cached_count: int
    """Images whose facts an earlier look had found."""

    def get_image_name(self, image: int) -> str:
        """What a person calls an image."""
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
"""Bytes for each image that is decoded and compared, and beside them (docs/experiments/duplicates.md)."""


def time_image(dataset: Dataset, count: int = 32) -> float:
    """Seconds in which one core reads, decodes and fingerprints an image: the mean of some, drawn at random."""
    part = max(dataset.splits.values(), key=len)
    drawn = permute_indices(np.arange(min(count, len(part))), len(part), counter_rng.derive_key(0, "time"))
    found = _ScanResult(
        np.zeros(1, dtype=_IMAGE_FACTS_DTYPE), np.zeros((1, duplicates.FINGERPRINT_BYTES), dtype=np.uint8), {}
    )
    begun = 0.0
    for image in (int(drawn[0]), *drawn.tolist()):  # once more the first, for which decoders are made ready
        with contextlib.suppress(DataError, OSError):  # a bad one is named when all are looked at
            _scan_pixels(part.read_image(image), part.get_image_name(image), found, 0)
        begun = begun or time.perf_counter()
    return (time.perf_counter() - begun) / len(drawn)


def scan_dataset(
    dataset: Dataset, *, progress: ProgressCallback = workers.ignore_progress, max_decoded: int = MAX_DECODED_IMAGES
) -> DatasetScan:
    """The facts of every image of a set."""
    if not dataset.splits:
        raise DataError(f"{dataset.name} holds no image")
    parts = list(dataset.splits.values())
    split = np.repeat(np.arange(len(parts), dtype=np.int8), [len(part) for part in parts])
    number = np.concatenate([np.arange(len(part), dtype=np.int64) for part in parts])
    count = len(split)
    places = (
        np.arange(count)
        if count <= max_decoded
        else np.sort(permute_indices(np.arange(max_decoded), count, counter_rng.derive_key(0, "examine")))
    )
    whole = np.zeros(count, dtype=bool)
    whole[places] = True
    examined = DatasetScan(
        dataset,
        split,
        number,
        np.zeros(count, dtype=_IMAGE_FACTS_DTYPE),
        np.zeros((len(places), duplicates.FINGERPRINT_BYTES), dtype=np.uint8),
        places,
        {},
        0,
    )
    keys = np.concatenate([_compute_cache_keys(part, whole[split == place]) for place, part in enumerate(parts)])
    known = _load_cache(examined, keys)
    progress(int(known.sum()), count)
    jobs = [
        _ScanJob(_select_images(parts, split, number, rows), whole[rows], rows)
        for rows in _chunk_by_split(np.flatnonzero(~known), split)
    ]
    done = int(known.sum())
    try:
        for job, found in _run_jobs(jobs):
            _store_result(examined, job.scan_indices, found)
            done += len(job.scan_indices)
            progress(done, count)
    finally:  # what was seen before Ctrl-C need not be seen again
        _save_cache(examined, keys)
    return dataclasses.replace(examined, cached_count=int(known.sum()))


def measure_median_short_side(split: Split, max_images: int = 32) -> int:
    """The median short side of the images, of a few from all over the split that can be read."""
    sides = []
    for place in np.linspace(0, len(split) - 1, min(max_images, len(split))).round().astype(int).tolist():
        with contextlib.suppress(DataError, OSError):
            image = open_image(split.read_image(place), name=split.get_image_name(place))
            sides.append(min(image.height, image.width))
    return round(float(np.median(sides))) if sides else 0


@dataclasses.dataclass(frozen=True)
class _ScanJob:
    """Some images of one split."""

    split: Split
    decode_mask: NDArray[np.bool_]
    scan_indices: NDArray[np.int64]

    def split_by_image(self) -> "list[_ScanJob]":
        """A job for each image."""
        rows = np.asarray(self.split.rows)
        cuts = [slice(place, place + 1) for place in range(len(rows))]
        return [
            _ScanJob(Split(self.split.store, rows[cut]), self.decode_mask[cut], self.scan_indices[cut]) for cut in cuts
        ]


@dataclasses.dataclass(frozen=True)
class _ScanResult:
    """What a worker has seen."""

    image_facts: ImageFacts
    fingerprints: Array  # (k, F), zeros where there is none
    bad_reasons: dict[int, str]


def _chunk_by_split(places: NDArray[np.int64], split: NDArray[np.int8]) -> Iterator[NDArray[np.int64]]:
    """The places in chunks that lie in one split each."""
    for value in np.unique(split[places]).tolist():
        mine = places[split[places] == value]
        yield from (mine[start : start + _CHUNK_IMAGES] for start in range(0, len(mine), _CHUNK_IMAGES))


def _select_images(
    parts: Sequence[Split], split: NDArray[np.int8], number: NDArray[np.int64], places: NDArray[np.int64]
) -> Split:
    part = parts[split[places[0]]]
    first, last = int(number[places[0]]), int(number[places[-1]])
    rows = np.asarray(part.rows[first : last + 1])  # a slice first: a range of a billion is not to be listed
    return Split(part.store, rows[number[places] - first])


def _run_jobs(jobs: Sequence[_ScanJob]) -> Iterator[tuple[_ScanJob, _ScanResult]]:
    """Each job's result; where a process died, its images are looked at one by one to find the one that killed it."""
    for job, found in workers.map_in_processes(_scan_images, jobs, preload=[__name__]):
        if not isinstance(found, BrokenProcessPool):
            yield job, found
        elif len(job.scan_indices) > 1:
            yield from _run_jobs(job.split_by_image())
        else:
            facts = np.zeros(1, dtype=_IMAGE_FACTS_DTYPE)
            facts["status"] = BAD
            reasons = {0: "the process that decoded it died (a crash, or out of memory)"}
            yield job, _ScanResult(facts, np.zeros((1, duplicates.FINGERPRINT_BYTES), dtype=np.uint8), reasons)


def _scan_images(job: _ScanJob) -> _ScanResult:
    """What a worker process does."""
    torch.set_num_threads(1)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # libtiff writes of every flaw to stderr, past Python
    count = len(job.scan_indices)
    found = _ScanResult(
        np.zeros(count, dtype=_IMAGE_FACTS_DTYPE), np.zeros((count, duplicates.FINGERPRINT_BYTES), dtype=np.uint8), {}
    )
    each = remote.map_concurrently if job.split.store.is_remote else map
    for place, source in enumerate(each(partial(_read_source, job.split), range(count))):
        name = job.split.get_image_name(place)
        try:
            if isinstance(source, DataError | OSError):
                raise source
            content = (
                read_image_file(source, name=name) if isinstance(source, Path) and job.decode_mask[place] else source
            )
            _scan_header(content, name, found.image_facts[place])
            if job.decode_mask[place]:
                _scan_pixels(content, name, found, place)
        except (DataError, OSError) as error:
            found.image_facts[place] = np.zeros((), dtype=_IMAGE_FACTS_DTYPE)
            found.image_facts[place]["status"] = BAD
            found.bad_reasons[place] = str(error).removeprefix(f"{name} ")
    return found


def _read_source(images: Split, place: int) -> Path | bytes | Image.Image | DataError | OSError:
    """An image, still encoded, or what is wrong with it; a store that does not answer is no fault of the image."""
    try:
        return images.read_image(place)
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


def _scan_pixels(source: Path | bytes | Image.Image, name: str, result: _ScanResult, place: int) -> None:
    pixels = decode(source, name=name)  # (3, H, W)
    facts = result.image_facts[place]
    values = pixels.reshape(3, -1)
    counts = torch.stack([torch.bincount(channel, minlength=256) for channel in values]).double()  # (3, 256)
    levels = torch.arange(256, dtype=torch.float64) / 255
    facts["status"] = DECODED
    facts["mean"] = (counts @ levels / values.shape[1]).numpy()
    facts["square"] = (counts @ levels**2 / values.shape[1]).numpy()
    facts["grey"] = bool((pixels[0] == pixels[1]).all() and (pixels[1] == pixels[2]).all())
    content = source if isinstance(source, bytes) else pixels.contiguous().numpy().tobytes()
    facts["digest"] = hashlib.blake2b(content, digest_size=16).digest()
    result.fingerprints[place] = duplicates.compute_fingerprint(pixels)


def _store_result(scan: DatasetScan, places: NDArray[np.int64], result: _ScanResult) -> None:
    scan.image_facts[places] = result.image_facts
    whole = np.isin(places, scan.fingerprinted_images)
    scan.fingerprints[np.searchsorted(scan.fingerprinted_images, places[whole])] = result.fingerprints[whole]
    scan.bad_reasons.update({int(places[place]): reason for place, reason in result.bad_reasons.items()})


# --- the cache -------------------------------------------------------------------------------------------------------


def _compute_cache_keys(part: Split, decode_mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """(n, 16): 128 bits for each image that change when it does, or the depth of the look; zeros where unknown."""
    keys = np.zeros((len(part), 16), dtype=np.uint8)
    if not isinstance(part.store, FileStore | ShardStore) or (
        isinstance(part.store, FileStore) and part.store.is_remote
    ):
        return keys
    stamps: dict[str, list[int]] = {}
    for place in range(len(part)):
        row = int(part.rows[place])
        try:
            if isinstance(part.store, FileStore):
                stamp = sample_table.read_stamp(str(part.store.read(row)))
            else:
                file = f"{part.store.folder}/{part.store.files[part.store.table['shard'][row]]}"
                if file not in stamps:
                    stamps[file] = sample_table.read_stamp(file)
                stamp = [*stamps[file], int(part.store.table["offset"][row])]
        except OSError:
            continue  # it will be named when it is read
        content = f"{_CACHE_VERSION} {part.get_image_name(place)} {stamp} {decode_mask[place]}".encode(
            errors="surrogateescape"
        )
        keys[place] = np.frombuffer(hashlib.blake2b(content, digest_size=16).digest(), dtype=np.uint8)
    return keys


def _load_cache(scan: DatasetScan, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Enter what an earlier look found, and say which images that are."""
    known = np.zeros(len(keys), dtype=bool)
    try:
        earlier = sample_table.read_table(_get_cache_folder(scan.dataset))
        if (
            earlier.metadata.get("version") != _CACHE_VERSION
            or earlier["fingerprint"].shape[1] != duplicates.FINGERPRINT_BYTES
        ):
            return known
        places = {key.tobytes(): place for place, key in enumerate(earlier["key"])}
        prints = {int(place): row for row, place in enumerate(earlier["fingerprinted"])}
        mine = {int(place): row for row, place in enumerate(scan.fingerprinted_images)}
        for image, key in enumerate(keys):
            place = places.get(key.tobytes()) if key.any() else None
            if place is None or (image in mine) != (place in prints):
                continue
            scan.image_facts[image] = earlier["facts"].view(_IMAGE_FACTS_DTYPE)[place]
            if image in mine:
                scan.fingerprints[mine[image]] = earlier["fingerprint"][prints[place]]
            known[image] = True
    except (OSError, ValueError, KeyError, IndexError, EOFError):
        known[:] = False  # absent or damaged: all is looked at again
    return known


def _save_cache(scan: DatasetScan, keys: NDArray[np.uint8]) -> None:
    """Keep what was found of good images; a bad one may be repaired, or its trouble may have been the disk's."""
    status = scan.image_facts["status"]
    good = (status == DECODED) | (status == HEADER_ONLY)
    columns = {
        "key": keys * good[:, None],
        "facts": scan.image_facts.view(np.uint8),
        "fingerprint": scan.fingerprints,
        "fingerprinted": scan.fingerprinted_images,
    }
    try:
        sample_table.write_table(_get_cache_folder(scan.dataset), columns, {"version": _CACHE_VERSION})
    except OSError:
        return  # a cache that cannot be written costs time, not the result


def _get_cache_folder(dataset: Dataset) -> Path:
    name = hashlib.sha256(dataset.name.encode(errors="surrogateescape")).hexdigest()[:24]
    return get_cache_home() / "examined" / name
