"""Any set as tar shards: in parallel, and again from where it stopped.

Samples are shuffled before they are packed. A folder lists class after class, and shards that each hold a few classes
could not be mixed again by shuffling among a window of them.
"""

import dataclasses
import hashlib
import io
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data import draws, shards, workers
from vitrail.data.dataset import Dataset, Split
from vitrail.data.decode import image_suffixes, read_file, read_header
from vitrail.data.order import permuted
from vitrail.data.shards import Sample, Written
from vitrail.data.workers import Progress
from vitrail.errors import DataError, UsageError
from vitrail.files import replacing

_NOTES, _PLAN = "notes", "plan.json"


@dataclasses.dataclass(frozen=True)
class _Job:
    """One shard to write."""

    folder: Path
    file: str
    split: str
    images: Split
    indices: NDArray[np.int64]
    first: int
    several: bool


def pack(dataset: Dataset, out: Path, *, progress: Progress = workers.silent) -> None:
    """Write a set as shards into the folder `out`, which appears when all are there.

    Until then they gather in a folder beside it, from which the same call goes on after an interruption.
    """
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} exists already; choose another name, or remove it first")
    if out.parts[:1] and out.parts[0].endswith(":"):  # a path spells s3://bucket so
        raise UsageError(f"{out} is no folder here: pack into one, and copy all that it then holds to the store")
    if Path(dataset.name) in out.resolve().parents:
        raise UsageError(f"{out} lies inside {dataset.name}, which would then hold itself; choose a place beside it")
    gathering = out.with_name(f"{out.name}.packing")
    jobs = list(_jobs(dataset, gathering))
    if not jobs:
        raise DataError(f"{dataset.name} holds no image to pack")
    _prepare(gathering, dataset, jobs)
    written = _run(jobs, progress)
    origin = {"packed from": dataset.name}
    shards.finish(gathering, written, classes=dataset.classes, several=dataset.several, origin=origin)
    gathering.rename(out)
    shutil.rmtree(out / _NOTES, ignore_errors=True)


def _jobs(dataset: Dataset, folder: Path) -> Iterator[_Job]:
    """The shards a set needs, each about SHARD_BYTES large."""
    first = 0
    for name, split in dataset.splits.items():
        order = permuted(np.arange(len(split)), len(split), draws.key(0, f"pack {name}"))
        sizes = np.fromiter((_size(split, int(index)) for index in order), dtype=np.int64, count=len(order))
        numbers = (np.cumsum(sizes) - sizes) // shards.SHARD_BYTES
        for place, (_, group) in enumerate(itertools.groupby(range(len(order)), key=lambda at: numbers[at])):
            indices = order[list(group)]
            yield _Job(folder, shards.shard_name(name, place), name, split, indices, first, dataset.several)
            first += len(indices)


def _size(split: Split, index: int) -> int:
    """The bytes of an image as stored; of one in memory, of its pixels."""
    row = int(split.rows[index])
    if "size" in split.store.table:
        return int(split.store.table["size"][row])
    image = split.read(index)
    try:
        return image.stat().st_size if isinstance(image, Path) else len(_encoded(image, split.name(index)))
    except OSError as error:
        raise DataError(f"{split.name(index)} cannot be read: {error}") from error


def _encoded(image: Path | bytes | Image.Image, name: str) -> bytes:
    """The image file's bytes, as they are; a picture in memory becomes a PNG, which loses nothing."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, Path):
        return read_file(image, name=name)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _prepare(folder: Path, dataset: Dataset, jobs: list[_Job]) -> None:
    """Begin, or go on with what the same plan began."""
    state = hashlib.sha256(repr((dataset.name, dataset.classes, dataset.several)).encode(errors="surrogateescape"))
    for job in jobs:
        for index in job.indices.tolist():
            sample = (job.file, job.images.name(index), job.images.labels(index), _size(job.images, index))
            state.update(repr(sample).encode(errors="surrogateescape"))
    plan = {"plan": state.hexdigest()}
    known = folder / _NOTES / _PLAN
    if not folder.exists():
        known.parent.mkdir(parents=True)
        known.write_text(json.dumps(plan))
    elif not known.exists() or json.loads(known.read_text()) != plan:
        raise UsageError(f"{folder} holds the beginning of another packing (the set has changed?); remove it first")


def _run(jobs: list[_Job], progress: Progress) -> list[Written]:
    """Every job's result in order; those done before are not done again."""
    results: dict[str, Written] = {job.file: known for job in jobs if (known := _finished(job)) is not None}
    progress(len(results), len(jobs))
    for job, written in workers.finished(_packed, [job for job in jobs if job.file not in results]):
        if not isinstance(written, Written):
            raise DataError(f"the process that wrote {job.file} died (out of memory?); run the command again to go on")
        results[job.file] = written
        progress(len(results), len(jobs))
    return [results[job.file] for job in jobs]


def _packed(job: _Job) -> Written:
    """Write one shard, and beside it what the index will need."""
    with replacing(job.folder / job.file, overwrite=True) as fresh:
        written = shards.write_shard(fresh.parent, fresh.name, _samples(job), job.first, several=job.several)
    with replacing(_note(job), overwrite=True) as fresh:
        fresh.write_text(json.dumps(dataclasses.asdict(written)))
    return written


def _samples(job: _Job) -> Iterator[Sample]:
    for index in job.indices.tolist():
        name = job.images.name(index)
        try:
            image = _encoded(job.images.read(index), name)
        except OSError as error:
            raise DataError(f"{name} cannot be read: {error}") from error
        yield Sample(job.split, _with_suffix(name, image), image, job.images.labels(index))


def _with_suffix(name: str, image: bytes) -> str:
    """The name, ending in its format where it says none."""
    if name.lower().endswith(image_suffixes()):
        return name
    return f"{name}.{read_header(image, name=name).format.lower()}"


def _finished(job: _Job) -> Written | None:
    try:
        note: dict[str, Any] = json.loads(_note(job).read_text())
        written = Written(**(note | {"labels": [tuple(row) for row in note["labels"]]}))
        return written if (job.folder / job.file).stat().st_size == written.bytes else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _note(job: _Job) -> Path:
    return job.folder / _NOTES / f"{job.file}.json"
