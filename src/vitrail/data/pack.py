"""Packing a dataset into tar shards: in parallel, and resumable after an interruption.

Samples are shuffled before they are packed. A folder lists class after class, and training shuffles only within a
window of shards, which cannot mix shards of a few classes each.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data import shards
from vitrail.data.dataset import Dataset, Split
from vitrail.data.image_headers import get_image_suffixes, read_header, read_image_file
from vitrail.data.parquet import ParquetStore
from vitrail.data.randomness import SampleOrder, sample_indices
from vitrail.data.shards import Sample, ShardInfo
from vitrail.errors import DataError, UsageError
from vitrail.files import write_atomically
from vitrail.runtime import workers
from vitrail.runtime.workers import ProgressCallback

_STATE_FOLDER, _PLAN_FILE = "notes", "plan.json"


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
    """Write a dataset as shards into the folder `out`, which appears when all are written.

    Until then they are in a folder beside it, from which the same call resumes after an interruption.
    """
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} exists already; choose another name, or remove it first")
    if out.parts[:1] and out.parts[0].endswith(":"):  # how a path spells s3://bucket
        raise UsageError(f"{out} is not a local folder: pack into one, and copy its contents to the store")
    if Path(dataset.name) in out.resolve().parents:
        raise UsageError(
            f"{out} lies inside {dataset.name}, which would then contain itself; choose a folder beside it"
        )
    staging = out.with_name(f"{out.name}.packing")
    jobs = list(_plan_shards(dataset, staging))
    if not jobs:
        raise DataError(f"{dataset.name} holds no image to pack")
    _prepare_folder(staging, dataset, jobs)
    shard_infos = _run_jobs(jobs, progress)
    origin = {"packed from": dataset.name}
    shards.finalize_shards(
        staging, shard_infos, classes=dataset.classes, multi_label=dataset.multi_label, origin=origin
    )
    staging.rename(out)
    shutil.rmtree(out / _STATE_FOLDER, ignore_errors=True)


def _plan_shards(dataset: Dataset, folder: Path) -> Iterator[_ShardJob]:
    """The shards of a dataset, each of about SHARD_BYTES."""
    first_number = 0
    for name, split in dataset.splits.items():
        order = _shuffle(split, name)
        sizes = np.array([_measure_image_bytes(split, int(index)) for index in order], dtype=np.int64)
        shard_numbers = (np.cumsum(sizes) - sizes) // shards.SHARD_BYTES
        for number, shard in enumerate(np.unique(shard_numbers)):
            indices, file = order[shard_numbers == shard], shards.format_shard_name(name, number)
            yield _ShardJob(folder, file, name, split, indices, first_number, dataset.multi_label)
            first_number += len(indices)


def _shuffle(split: Split, name: str) -> NDArray[np.int64]:
    """The images in random order; those of Parquet files as in training, so that row groups are not read in vain."""
    if not isinstance(split.store, ParquetStore):
        return sample_indices(len(split), len(split), f"pack {name}")
    order = SampleOrder(
        seed=0, num_samples=len(split), shard_sizes=split.count_per_shard(), shard_window=split.shard_window
    )
    return order.get_sample_indices(np.arange(len(split)))


def _measure_image_bytes(split: Split, index: int) -> int:
    """The size of an image as it will be stored; in Parquet files, the mean of its row group."""
    row = int(split.rows[index])
    if "size" in split.store.table:
        return int(split.store.table["size"][row])
    image = split.read_image(index)
    try:
        if isinstance(image, Path):
            return image.stat().st_size
        return len(_encode_image(image, split.get_image_name(index)))
    except OSError as error:
        raise DataError(f"{split.get_image_name(index)} cannot be read: {error}") from error


def _encode_image(image: Path | bytes | Image.Image, name: str) -> bytes:
    """The unchanged bytes of an image file; an image in memory becomes a PNG, which is lossless."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, Path):
        return read_image_file(image, name=name)
    return shards.encode_png(image)


def _prepare_folder(folder: Path, dataset: Dataset, jobs: list[_ShardJob]) -> None:
    """Create the folder, or check that the same plan created it."""
    digest = hashlib.sha256(repr((dataset.name, dataset.classes, dataset.multi_label)).encode(errors="surrogateescape"))
    for job in jobs:
        split = job.image_split
        for index in job.indices.tolist():
            sample = job.file, split.get_image_name(index), split.get_labels(index), _measure_image_bytes(split, index)
            digest.update(repr(sample).encode(errors="surrogateescape"))
    plan = {"plan": digest.hexdigest()}
    plan_file = folder / _STATE_FOLDER / _PLAN_FILE
    if not folder.exists():
        plan_file.parent.mkdir(parents=True)
        plan_file.write_text(json.dumps(plan))
    elif not plan_file.exists() or json.loads(plan_file.read_text()) != plan:
        raise UsageError(f"{folder} was started by another packing (the dataset has changed?); remove it first")


def _run_jobs(jobs: list[_ShardJob], progress: ProgressCallback) -> list[ShardInfo]:
    """The results of all jobs, in order; jobs already finished are not repeated."""
    finished = {job.file: _read_finished_shard(job) for job in jobs}
    results = {file: shard_info for file, shard_info in finished.items() if shard_info is not None}
    progress(len(results), len(jobs))
    for job, shard_info in workers.map_in_processes(_pack_shard, [job for job in jobs if job.file not in results]):
        if not isinstance(shard_info, ShardInfo):
            raise DataError(f"the process that wrote {job.file} died (out of memory?); run the command again to resume")
        results[job.file] = shard_info
        progress(len(results), len(jobs))
    return [results[job.file] for job in jobs]


def _pack_shard(job: _ShardJob) -> ShardInfo:
    """Write one shard, and a file with its index entries."""
    with write_atomically(job.folder / job.file, overwrite=True) as fresh:
        shard_info = shards.write_shard(
            fresh.parent, fresh.name, _iter_samples(job), job.first_number, multi_label=job.multi_label
        )
    with write_atomically(_get_state_path(job), overwrite=True) as fresh:
        fresh.write_text(json.dumps(dataclasses.asdict(shard_info)))
    return shard_info


def _iter_samples(job: _ShardJob) -> Iterator[Sample]:
    for index in job.indices.tolist():
        name = job.image_split.get_image_name(index)
        try:
            image = _encode_image(job.image_split.read_image(index), name)
        except OSError as error:
            raise DataError(f"{name} cannot be read: {error}") from error
        yield Sample(job.split, _add_suffix(name, image), image, job.image_split.get_labels(index))


def _add_suffix(name: str, image: bytes) -> str:
    """The name, with the suffix of its format if it has none."""
    has_suffix = name.lower().endswith(get_image_suffixes())
    return name if has_suffix else f"{name}.{read_header(image, name=name).format.lower()}"


def _read_finished_shard(job: _ShardJob) -> ShardInfo | None:
    try:
        state: dict[str, Any] = json.loads(_get_state_path(job).read_text())
        shard_info = ShardInfo(**(state | {"labels": [tuple(row) for row in state["labels"]]}))
        return shard_info if (job.folder / job.file).stat().st_size == shard_info.bytes else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _get_state_path(job: _ShardJob) -> Path:
    return job.folder / _STATE_FOLDER / f"{job.file}.json"
