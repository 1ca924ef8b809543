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

from vitrail.data import counter_rng, shards
from vitrail.data.dataset import Dataset, Split
from vitrail.data.image_headers import get_image_suffixes, read_header, read_image_file
from vitrail.data.order import permute_indices
from vitrail.data.shards import Sample, ShardInfo
from vitrail.errors import DataError, UsageError
from vitrail.files import write_atomically
from vitrail.runtime import workers
from vitrail.runtime.workers import ProgressCallback

_NOTES_FOLDER, _PLAN_FILE = "notes", "plan.json"


@dataclasses.dataclass(frozen=True)
class _ShardJob:
    """One shard to write."""

    folder: Path
    file: str
    split: str
    image_split: Split
    indices: NDArray[np.int64]
    first_number: int
    multi_label: bool


def pack(dataset: Dataset, out: Path, *, progress: ProgressCallback = workers.ignore_progress) -> None:
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
    jobs = list(_plan_shards(dataset, gathering))
    if not jobs:
        raise DataError(f"{dataset.name} holds no image to pack")
    _prepare_folder(gathering, dataset, jobs)
    written = _run_jobs(jobs, progress)
    origin = {"packed from": dataset.name}
    shards.finalize_shards(gathering, written, classes=dataset.classes, multi_label=dataset.multi_label, origin=origin)
    gathering.rename(out)
    shutil.rmtree(out / _NOTES_FOLDER, ignore_errors=True)


def _plan_shards(dataset: Dataset, folder: Path) -> Iterator[_ShardJob]:
    """The shards a set needs, each about SHARD_BYTES large."""
    first = 0
    for name, split in dataset.splits.items():
        order = permute_indices(np.arange(len(split)), len(split), counter_rng.derive_key(0, f"pack {name}"))
        sizes = np.fromiter(
            (_measure_image_bytes(split, int(index)) for index in order), dtype=np.int64, count=len(order)
        )
        numbers = (np.cumsum(sizes) - sizes) // shards.SHARD_BYTES
        for place, (_, group) in enumerate(itertools.groupby(range(len(order)), key=lambda at: numbers[at])):
            indices = order[list(group)]
            yield _ShardJob(
                folder, shards.format_shard_name(name, place), name, split, indices, first, dataset.multi_label
            )
            first += len(indices)


def _measure_image_bytes(split: Split, index: int) -> int:
    """The bytes of an image as stored; of one in memory, of its pixels."""
    row = int(split.rows[index])
    if "size" in split.store.table:
        return int(split.store.table["size"][row])
    image = split.read_image(index)
    try:
        return (
            image.stat().st_size if isinstance(image, Path) else len(_encode_image(image, split.get_image_name(index)))
        )
    except OSError as error:
        raise DataError(f"{split.get_image_name(index)} cannot be read: {error}") from error


def _encode_image(image: Path | bytes | Image.Image, name: str) -> bytes:
    """The image file's bytes, as they are; a picture in memory becomes a PNG, which loses nothing."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, Path):
        return read_image_file(image, name=name)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _prepare_folder(folder: Path, dataset: Dataset, jobs: list[_ShardJob]) -> None:
    """Begin, or go on with what the same plan began."""
    state = hashlib.sha256(repr((dataset.name, dataset.classes, dataset.multi_label)).encode(errors="surrogateescape"))
    for job in jobs:
        for index in job.indices.tolist():
            sample = (
                job.file,
                job.image_split.get_image_name(index),
                job.image_split.get_labels(index),
                _measure_image_bytes(job.image_split, index),
            )
            state.update(repr(sample).encode(errors="surrogateescape"))
    plan = {"plan": state.hexdigest()}
    known = folder / _NOTES_FOLDER / _PLAN_FILE
    if not folder.exists():
        known.parent.mkdir(parents=True)
        known.write_text(json.dumps(plan))
    elif not known.exists() or json.loads(known.read_text()) != plan:
        raise UsageError(f"{folder} holds the beginning of another packing (the set has changed?); remove it first")


def _run_jobs(jobs: list[_ShardJob], progress: ProgressCallback) -> list[ShardInfo]:
    """Every job's result in order; those done before are not done again."""
    results: dict[str, ShardInfo] = {
        job.file: known for job in jobs if (known := _read_finished_shard(job)) is not None
    }
    progress(len(results), len(jobs))
    for job, written in workers.map_in_processes(
        _pack_shard, [job for job in jobs if job.file not in results], preload=[__name__]
    ):
        if not isinstance(written, ShardInfo):
            raise DataError(f"the process that wrote {job.file} died (out of memory?); run the command again to go on")
        results[job.file] = written
        progress(len(results), len(jobs))
    return [results[job.file] for job in jobs]


def _pack_shard(job: _ShardJob) -> ShardInfo:
    """Write one shard, and beside it what the index will need."""
    with write_atomically(job.folder / job.file, overwrite=True) as fresh:
        written = shards.write_shard(
            fresh.parent, fresh.name, _iter_samples(job), job.first_number, multi_label=job.multi_label
        )
    with write_atomically(_get_note_path(job), overwrite=True) as fresh:
        fresh.write_text(json.dumps(dataclasses.asdict(written)))
    return written


def _iter_samples(job: _ShardJob) -> Iterator[Sample]:
    for index in job.indices.tolist():
        name = job.image_split.get_image_name(index)
        try:
            image = _encode_image(job.image_split.read_image(index), name)
        except OSError as error:
            raise DataError(f"{name} cannot be read: {error}") from error
        yield Sample(job.split, _add_suffix(name, image), image, job.image_split.get_labels(index))


def _add_suffix(name: str, image: bytes) -> str:
    """The name, ending in its format where it says none."""
    if name.lower().endswith(get_image_suffixes()):
        return name
    return f"{name}.{read_header(image, name=name).format.lower()}"


def _read_finished_shard(job: _ShardJob) -> ShardInfo | None:
    try:
        note: dict[str, Any] = json.loads(_get_note_path(job).read_text())
        written = ShardInfo(**(note | {"labels": [tuple(row) for row in note["labels"]]}))
        return written if (job.folder / job.file).stat().st_size == written.bytes else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _get_note_path(job: _ShardJob) -> Path:
    return job.folder / _NOTES_FOLDER / f"{job.file}.json"
