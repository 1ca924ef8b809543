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
from vitrail.data import draws, duplicates, index, table, workers
from vitrail.data.dataset import Dataset, Split
from vitrail.data.decode import FORMATS, decode, opened, read_file, read_header
from vitrail.data.folder import Files
from vitrail.data.order import permuted
from vitrail.data.shards import Shards
from vitrail.data.table import Array
from vitrail.data.workers import Progress
from vitrail.errors import DataError
from vitrail.files import cache_home
from vitrail.remote import RemoteError

LIMIT = 200_000
"""Images decoded whole; of a larger set so many drawn at random are, and the rest are known by their headers."""
UNSEEN, DECODED, HEADER, BAD = range(4)
_CHUNK = 64
_VERSION = 3
_FACTS = np.dtype(
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
Facts = NDArray[Any]  # of _FACTS


@dataclasses.dataclass(frozen=True)
class Examined:
    """What is known of a set's n images, split after split."""

    dataset: Dataset
    split: NDArray[np.int8]
    """Of each image, the place of its split in the set's."""
    number: NDArray[np.int64]
    """Of each image, its index in its split."""
    facts: Facts
    fingerprints: Array
    """(m, F): of the images that were to be decoded whole."""
    fingerprinted: NDArray[np.int64]
    """(m,): which those are."""
    reasons: dict[int, str]
    """Why the bad ones are bad."""
    recalled: int
    """Images whose facts an earlier look had found."""

    def name(self, image: int) -> str:
        """What a person calls an image."""
        return self._split(image).name(int(self.number[image]))

    def labels(self, image: int) -> tuple[int, ...]:
        """The classes of an image."""
        return self._split(image).labels(int(self.number[image]))

    def split_name(self, image: int) -> str:
        """train, val or test."""
        return list(self.dataset.splits)[self.split[image]]

    def _split(self, image: int) -> Split:
        return list(self.dataset.splits.values())[self.split[image]]


MEMORY, BASE_MEMORY = 3_000, 2 * 10**9
"""Bytes for each image that is decoded and compared, and beside them (docs/experiments/duplicates.md)."""


def time_image(dataset: Dataset, count: int = 32) -> float:
    """Seconds in which one core reads, decodes and fingerprints an image: the mean of some, drawn at random."""
    part = max(dataset.splits.values(), key=len)
    drawn = permuted(np.arange(min(count, len(part))), len(part), draws.key(0, "time"))
    found = _Found(np.zeros(1, dtype=_FACTS), np.zeros((1, duplicates.FINGERPRINT), dtype=np.uint8), {})
    begun = 0.0
    for image in (int(drawn[0]), *drawn.tolist()):  # once more the first, for which decoders are made ready
        with contextlib.suppress(DataError, OSError):  # a bad one is named when all are looked at
            _look_at_pixels(part.read(image), part.name(image), found, 0)
        begun = begun or time.perf_counter()
    return (time.perf_counter() - begun) / len(drawn)


def examine(dataset: Dataset, *, progress: Progress = workers.silent, limit: int = LIMIT) -> Examined:
    """The facts of every image of a set."""
    if not dataset.splits:
        raise DataError(f"{dataset.name} holds no image")
    parts = list(dataset.splits.values())
    split = np.repeat(np.arange(len(parts), dtype=np.int8), [len(part) for part in parts])
    number = np.concatenate([np.arange(len(part), dtype=np.int64) for part in parts])
    count = len(split)
    places = np.arange(count) if count <= limit else np.sort(permuted(np.arange(limit), count, draws.key(0, "examine")))
    whole = np.zeros(count, dtype=bool)
    whole[places] = True
    examined = Examined(
        dataset,
        split,
        number,
        np.zeros(count, dtype=_FACTS),
        np.zeros((len(places), duplicates.FINGERPRINT), dtype=np.uint8),
        places,
        {},
        0,
    )
    keys = np.concatenate([_keys(part, whole[split == place]) for place, part in enumerate(parts)])
    known = _recall(examined, keys)
    progress(int(known.sum()), count)
    jobs = [_Job(_some(parts, split, number, rows), whole[rows], rows) for rows in _cut(np.flatnonzero(~known), split)]
    done = int(known.sum())
    try:
        for job, found in _all(jobs):
            _enter(examined, job.places, found)
            done += len(job.places)
            progress(done, count)
    finally:  # what was seen before Ctrl-C need not be seen again
        _remember(examined, keys)
    return dataclasses.replace(examined, recalled=int(known.sum()))


def measure_side(split: Split, images: int = 32) -> int:
    """The median short side of the images, of a few from all over the split that can be read."""
    sides = []
    for place in np.linspace(0, len(split) - 1, min(images, len(split))).round().astype(int).tolist():
        with contextlib.suppress(DataError, OSError):
            image = opened(split.read(place), name=split.name(place))
            sides.append(min(image.height, image.width))
    return round(float(np.median(sides))) if sides else 0


@dataclasses.dataclass(frozen=True)
class _Job:
    """Some images of one split."""

    images: Split
    whole: NDArray[np.bool_]
    places: NDArray[np.int64]

    def singly(self) -> "list[_Job]":
        """A job for each image."""
        rows = np.asarray(self.images.rows)
        cuts = [slice(place, place + 1) for place in range(len(rows))]
        return [_Job(Split(self.images.store, rows[cut]), self.whole[cut], self.places[cut]) for cut in cuts]


@dataclasses.dataclass(frozen=True)
class _Found:
    """What a worker has seen."""

    facts: Facts
    fingerprints: Array  # (k, F), zeros where there is none
    reasons: dict[int, str]


def _cut(places: NDArray[np.int64], split: NDArray[np.int8]) -> Iterator[NDArray[np.int64]]:
    """The places in chunks that lie in one split each."""
    for value in np.unique(split[places]).tolist():
        mine = places[split[places] == value]
        yield from (mine[start : start + _CHUNK] for start in range(0, len(mine), _CHUNK))


def _some(
    parts: Sequence[Split], split: NDArray[np.int8], number: NDArray[np.int64], places: NDArray[np.int64]
) -> Split:
    part = parts[split[places[0]]]
    first, last = int(number[places[0]]), int(number[places[-1]])
    rows = np.asarray(part.rows[first : last + 1])  # a slice first: a range of a billion is not to be listed
    return Split(part.store, rows[number[places] - first])


def _all(jobs: Sequence[_Job]) -> Iterator[tuple[_Job, _Found]]:
    """Each job's result; where a process died, its images are looked at one by one to find the one that killed it."""
    for job, found in workers.finished(_look, jobs):
        if not isinstance(found, BrokenProcessPool):
            yield job, found
        elif len(job.places) > 1:
            yield from _all(job.singly())
        else:
            facts = np.zeros(1, dtype=_FACTS)
            facts["status"] = BAD
            reasons = {0: "the process that decoded it died (a crash, or out of memory)"}
            yield job, _Found(facts, np.zeros((1, duplicates.FINGERPRINT), dtype=np.uint8), reasons)


def _look(job: _Job) -> _Found:
    """What a worker process does."""
    torch.set_num_threads(1)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # libtiff writes of every flaw to stderr, past Python
    count = len(job.places)
    found = _Found(np.zeros(count, dtype=_FACTS), np.zeros((count, duplicates.FINGERPRINT), dtype=np.uint8), {})
    each = remote.at_once if job.images.store.far else map
    for place, source in enumerate(each(partial(_source, job.images), range(count))):
        name = job.images.name(place)
        try:
            if isinstance(source, DataError | OSError):
                raise source
            content = read_file(source, name=name) if isinstance(source, Path) and job.whole[place] else source
            _look_at_header(content, name, found.facts[place])
            if job.whole[place]:
                _look_at_pixels(content, name, found, place)
        except (DataError, OSError) as error:
            found.facts[place] = np.zeros((), dtype=_FACTS)
            found.facts[place]["status"] = BAD
            found.reasons[place] = str(error).removeprefix(f"{name} ")
    return found


def _source(images: Split, place: int) -> Path | bytes | Image.Image | DataError | OSError:
    """An image, still encoded, or what is wrong with it; a store that does not answer is no fault of the image."""
    try:
        return images.read(place)
    except RemoteError:
        raise
    except (DataError, OSError) as error:
        return error


def _look_at_header(source: Path | bytes | Image.Image, name: str, facts: Any) -> None:
    facts["status"] = HEADER
    if isinstance(source, Image.Image):
        facts["width"], facts["height"], facts["format"] = *source.size, FORMATS.index("PNG")
        return
    header = read_header(source, name=name)
    facts["width"], facts["height"], facts["format"] = header.width, header.height, FORMATS.index(header.format)


def _look_at_pixels(source: Path | bytes | Image.Image, name: str, found: _Found, place: int) -> None:
    pixels = decode(source, name=name)  # (3, H, W)
    facts = found.facts[place]
    values = pixels.reshape(3, -1)
    counts = torch.stack([torch.bincount(channel, minlength=256) for channel in values]).double()  # (3, 256)
    levels = torch.arange(256, dtype=torch.float64) / 255
    facts["status"] = DECODED
    facts["mean"] = (counts @ levels / values.shape[1]).numpy()
    facts["square"] = (counts @ levels**2 / values.shape[1]).numpy()
    facts["grey"] = bool((pixels[0] == pixels[1]).all() and (pixels[1] == pixels[2]).all())
    content = source if isinstance(source, bytes) else pixels.contiguous().numpy().tobytes()
    facts["digest"] = hashlib.blake2b(content, digest_size=16).digest()
    found.fingerprints[place] = duplicates.fingerprint(pixels)


def _enter(examined: Examined, places: NDArray[np.int64], found: _Found) -> None:
    examined.facts[places] = found.facts
    whole = np.isin(places, examined.fingerprinted)
    examined.fingerprints[np.searchsorted(examined.fingerprinted, places[whole])] = found.fingerprints[whole]
    examined.reasons.update({int(places[place]): reason for place, reason in found.reasons.items()})


# --- the cache -------------------------------------------------------------------------------------------------------


def _keys(part: Split, whole: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """(n, 16): 128 bits for each image that change when it does, or the depth of the look; zeros where unknown."""
    keys = np.zeros((len(part), 16), dtype=np.uint8)
    if not isinstance(part.store, Files | Shards) or (isinstance(part.store, Files) and part.store.far):
        return keys
    stamps: dict[str, list[int]] = {}
    for place in range(len(part)):
        row = int(part.rows[place])
        try:
            if isinstance(part.store, Files):
                stamp = index.stamp(str(part.store.read(row)))
            else:
                file = f"{part.store.folder}/{part.store.files[part.store.table['shard'][row]]}"
                if file not in stamps:
                    stamps[file] = index.stamp(file)
                stamp = [*stamps[file], int(part.store.table["offset"][row])]
        except OSError:
            continue  # it will be named when it is read
        content = f"{_VERSION} {part.name(place)} {stamp} {whole[place]}".encode(errors="surrogateescape")
        keys[place] = np.frombuffer(hashlib.blake2b(content, digest_size=16).digest(), dtype=np.uint8)
    return keys


def _recall(examined: Examined, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Enter what an earlier look found, and say which images that are."""
    known = np.zeros(len(keys), dtype=bool)
    try:
        earlier = table.read(_folder(examined.dataset))
        if earlier.facts.get("version") != _VERSION or earlier["fingerprint"].shape[1] != duplicates.FINGERPRINT:
            return known
        places = {key.tobytes(): place for place, key in enumerate(earlier["key"])}
        prints = {int(place): row for row, place in enumerate(earlier["fingerprinted"])}
        mine = {int(place): row for row, place in enumerate(examined.fingerprinted)}
        for image, key in enumerate(keys):
            place = places.get(key.tobytes()) if key.any() else None
            if place is None or (image in mine) != (place in prints):
                continue
            examined.facts[image] = earlier["facts"].view(_FACTS)[place]
            if image in mine:
                examined.fingerprints[mine[image]] = earlier["fingerprint"][prints[place]]
            known[image] = True
    except (OSError, ValueError, KeyError, IndexError, EOFError):
        known[:] = False  # absent or damaged: all is looked at again
    return known


def _remember(examined: Examined, keys: NDArray[np.uint8]) -> None:
    """Keep what was found of good images; a bad one may be repaired, or its trouble may have been the disk's."""
    status = examined.facts["status"]
    good = (status == DECODED) | (status == HEADER)
    columns = {
        "key": keys * good[:, None],
        "facts": examined.facts.view(np.uint8),
        "fingerprint": examined.fingerprints,
        "fingerprinted": examined.fingerprinted,
    }
    try:
        table.write(_folder(examined.dataset), columns, {"version": _VERSION})
    except OSError:
        return  # a cache that cannot be written costs time, not the result


def _folder(dataset: Dataset) -> Path:
    name = hashlib.sha256(dataset.name.encode(errors="surrogateescape")).hexdigest()[:24]
    return cache_home() / "examined" / name
