"""A million rows on a small machine: speed beside the bare network, memory over time, and 20 kills.

    python bench/rows.py MODEL [--images FOLDER] [--rows 1000000] [--kills 20] [--image-size 32] [--work FOLDER]

The images of the folder, or noise drawn here, are packed into shards of 10,000, and these are listed under other names
until there are enough rows. MODEL is adapted to the small images. Then, each in a process of its own with the same
threads:

1. the network alone, on model inputs that are ready, and decoding alone, before and after everything else;
2. `vitrail predict --out whole.parquet`, whose resident memory is read twice a second;
3. the same to killed.parquet, killed with SIGKILL at random times and repeated, and then to its end.

Both files must have a row for each image, in order, and the same bytes.
"""

import argparse
import hashlib
import io
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

SHARD_IMAGES = 10_000
DRAWN_IMAGES = 200
GROUP_IMAGES = 2048  # of a row group
BATCH = 64  # vitrail's default on a CPU
SECONDS_BETWEEN_READINGS = 0.5

BARE = """
import itertools, sys, time, torch
from pathlib import Path
from vitrail import Classifier, load
from vitrail.data.image_paths import iter_image_refs
from vitrail.inference.input_batches import InputLoader
from vitrail.runtime import workers
model, shard, seconds, threads = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
classifier = Classifier(load(model), device="cpu", batch_size=64)
loader = InputLoader(classifier.preprocess, classifier.channels)
images = list(itertools.islice(iter_image_refs([shard]), 64))
inputs, _ = loader.stack([loader.load(image) for image in images])
for what in ("network", "decoding"):
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        if what == "network":
            classifier.predict(list(inputs), 1)
        else:
            list(next(workers.prefetch_batches(loader.load, [images], threads)))
        count += len(images)
    print(count / (time.perf_counter() - start))
"""


class Reading(NamedTuple):
    """A process at a moment."""

    seconds: float
    memory: int
    """Resident bytes."""
    size: int
    """Bytes of its output."""


def iterate_images(folder: Path | None) -> Iterator[bytes]:
    """The JPEG files below a folder, or drawn ones."""
    if folder is not None:
        for path in sorted(folder.rglob("*.[jJ][pP]*[gG]")):
            yield path.read_bytes()
        return
    generator = np.random.default_rng(0)
    for _ in range(DRAWN_IMAGES):
        small = Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        content = io.BytesIO()
        small.resize((64, 64), Image.Resampling.BICUBIC).save(content, "JPEG", quality=90)
        yield content.getvalue()


def write_shards(folder: Path, images: Path | None, rows: int) -> None:
    """Shards with so many images in all: real ones, and links to them under other names."""
    folder.mkdir()
    contents, shards, number = iterate_images(images), list[tuple[Path, int]](), 0
    while number < rows and (batch := list(itertools.islice(contents, min(SHARD_IMAGES, rows - number)))):
        path = folder / f"{len(shards):05}.tar"
        with tarfile.open(path, "w") as file:
            for index, content in enumerate(batch):
                member = tarfile.TarInfo(f"{index:05}.jpg")
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
        shards.append((path, len(batch)))
        number += len(batch)
    for turn in range(rows):
        path, count = shards[turn % len(shards)]
        if number + count > rows:
            break
        (folder / f"{len(shards) + turn:05}.tar").symlink_to(path.name)
        number += count


def count_images(folder: Path) -> int:
    """Images in the shards."""
    from vitrail.data.image_paths import iter_image_refs

    return sum(1 for _ in iter_image_refs([str(folder)]))


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, "-m", "vitrail", *command], stdout=file, stderr=file)


def read_process(process: subprocess.Popen[bytes], began: float, out: Path) -> Reading | None:
    """The process now, or None where it has ended."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
        memory = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    except (OSError, StopIteration):
        return None
    return Reading(time.monotonic() - began, memory, out.stat().st_size if out.exists() else 0)


def watch(command: list[str], out: Path, log: Path) -> tuple[float, list[Reading]]:
    """Run a command to its end: its seconds, and what it was like meanwhile."""
    began, process, readings = time.monotonic(), start(command, log), list[Reading]()
    while process.poll() is None:
        if reading := read_process(process, began, out):
            readings.append(reading)
        time.sleep(SECONDS_BETWEEN_READINGS)
    assert process.returncode == 0, log.read_text()
    return time.monotonic() - began, readings


def run_killed(command: list[str], log: Path, kills: int, start_up: float, seconds: float) -> int:
    """Repeat a command until it ends, the first times killed at random; how often it was killed."""
    generator, killed = random.Random(0), 0  # noqa: S311
    for _ in range(kills):
        process = start(command, log)
        try:  # on average four fifths of the work are done when the last one is killed
            code = process.wait(generator.uniform(0.5, 1) * start_up + generator.uniform(0, 1.6) * seconds / kills)
            assert code == 0, log.read_text()
            break
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
    assert start(command, log).wait() == 0, log.read_text()
    return killed


def measure_bare(model: Path, shard: Path, seconds: float, threads: int) -> tuple[float, float]:
    """Images a second of the network alone and of decoding alone."""
    command = [sys.executable, "-c", BARE, str(model), str(shard), str(seconds), str(threads)]
    network, decoding = map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    return network, decoding


def write_model(source: str, size: int, path: Path) -> None:
    import vitrail

    vitrail.save(vitrail.adapt(vitrail.load(source), image_size=(size, size)), path)


def check_rows(path: Path, folder: Path) -> int:
    """The rows of a file, which must be those of the images, in their order and without an error."""
    from pyarrow import parquet

    from vitrail.data.image_paths import iter_image_refs

    file, names = parquet.ParquetFile(path), (image.name for image in iter_image_refs([str(folder)]))
    for batch in file.iter_batches(columns=["image", "error", "labels"]):
        assert batch.column("error").null_count == len(batch)
        assert batch.column("labels").null_count == 0
        assert batch.column("image").to_pylist() == list(itertools.islice(names, len(batch)))
    assert next(names, None) is None
    return int(file.metadata.num_rows)


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All numbers, after the checks."""
    model, shards, log = folder / "model.safetensors", folder / "shards", folder / "log"
    write_model(options.model, options.image_size, model)
    write_shards(shards, options.images, options.rows)
    threads, rows = len(os.sched_getaffinity(0)), count_images(shards)
    before = measure_bare(model, shards / "00000.tar", options.seconds, threads)
    command = ["predict", str(model), str(shards), "--device", "cpu", "--batch", str(BATCH), "--out"]
    whole, killed = folder / "whole.parquet", folder / "killed.parquet"
    seconds, readings = watch([*command, str(whole)], whole, log)
    began = next((each for each in readings if each.size > 0), readings[0])
    kills = run_killed([*command, str(killed)], log, options.kills, began.seconds, seconds - began.seconds)
    after = measure_bare(model, shards / "00000.tar", options.seconds, threads)
    assert check_rows(whole, shards) == check_rows(killed, shards) == rows
    assert hash_file(whole) == hash_file(killed), "other bytes after the kills"
    running = [each for each in readings if each.seconds >= began.seconds]
    tenths = [running[len(running) * tenth // 10].memory for tenth in range(1, 10)]
    network, decoding = (statistics.mean(pair) for pair in zip(before, after, strict=True))
    return {
        "rows": rows,
        "kills": kills,
        "seconds": seconds,
        "start_up_seconds": began.seconds,
        "images_per_second": (rows - GROUP_IMAGES) / (seconds - began.seconds),  # the file begins with a row group
        "network_images_per_second": network,
        "decoding_images_per_second": decoding,
        "file_bytes": whole.stat().st_size,
        "memory_by_tenth": tenths,
        "largest_memory": max(each.memory for each in readings),
        "threads": threads,
    }


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--images", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20, help="of the network alone, and of decoding alone")
    parser.add_argument(
        "--work", type=Path, help="a folder for the shards and the rows; by default one that is removed"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        result = measure(options, Path(folder))
    both = 1 / (1 / result["network_images_per_second"] + 1 / result["decoding_images_per_second"])
    print(f"{result['rows']:,} rows, {result['file_bytes'] / 1e6:,.1f} MB, {result['threads']} threads")
    print(
        f"predict   {result['images_per_second']:9,.0f} images/s after {result['start_up_seconds']:.0f} s of start-up"
    )
    print(f"network   {result['network_images_per_second']:9,.0f} images/s alone")
    print(f"decoding  {result['decoding_images_per_second']:9,.0f} images/s alone; one after the other {both:,.0f}")
    tenths = ", ".join(f"{memory / 1e6:.0f}" for memory in result["memory_by_tenth"])
    print(f"memory    {tenths} MB at each tenth of the time, {result['largest_memory'] / 1e6:.0f} MB at most")
    print(f"kills     {result['kills']}: every row there, and the bytes of the run without kills")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
