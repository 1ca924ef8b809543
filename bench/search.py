"""Build and search an index of random rows: seconds, memory and disk.

    python bench/search.py FOLDER --rows 10000000 --width 192

The rows are written to FOLDER as ten files of float32 features, indexed as float16, searched for with 1 and with 64
queries, and deleted. The first search reads the index from the disk as far as the system has not kept it in memory.
"""

import argparse
import json
import re
import shutil
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from vitrail import __version__
from vitrail.inference.cosine_search import find_nearest
from vitrail.inference.feature_files import list_feature_files
from vitrail.inference.feature_index import open_index, write_index

PARTS, BLOCK, ROUNDS = 10, 50_000, 5
MODEL = {"weights": "none", "config": {}, "preprocess": {}}


def write_features(folder: Path, rows: int, width: int) -> None:
    """Random features, in files as `vitrail predict --embed` writes them."""
    folder.mkdir(parents=True)
    for part in range(PARTS):
        count, random = rows // PARTS, np.random.default_rng(part)
        matrix = np.lib.format.open_memmap(folder / f"{part}.npy", "w+", np.float32, (count, width))
        with (folder / f"{part}.csv").open("w") as names:
            names.write("image,error\n")
            for start in range(0, count, BLOCK):
                end = min(start + BLOCK, count)
                matrix[start:end] = random.standard_normal((end - start, width), dtype=np.float32)
                names.writelines(f"photos/{part}/{number:08d}.jpg,\n" for number in range(start, end))
        (folder / f"{part}.npy.json").write_text(json.dumps({"model": MODEL, "--features": "class"}))


def read_memory(name: str) -> float:
    """Megabytes that this process uses, by a name of /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", text)
    return int(found[1]) / 1e3 if found else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    source, target = arguments.folder / "features", arguments.folder / "index"
    try:
        write_features(source, arguments.rows, arguments.width)
        sources = list_feature_files([source])
        start, cpu_start = time.perf_counter(), time.process_time()
        write_index(sources, target, version=__version__)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        size = sum(path.stat().st_size for path in target.iterdir())
        own, most = read_memory("RssAnon"), read_memory("VmHWM")
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.device}")
        print(f"{arguments.rows:,} rows of {arguments.width}: {seconds:.0f} s, of CPU {cpu_seconds:.0f} s", end="; ")
        print(f"{size / 1e9:.2f} GB; {own:.0f} MB of its own, with mapped pages at most {most:.0f} MB", flush=True)
        shutil.rmtree(source)
        index, random = open_index(target), np.random.default_rng(99)
        for count in (1, 64):
            planted = random.choice(len(index.rows), count, replace=False)
            noise = random.standard_normal((count, arguments.width), dtype=np.float32) * arguments.width**-0.5
            queries = index.rows[planted].astype(np.float32) + 0.3 * noise
            times, cpu_times, own = [], [], 0.0
            for _ in range(1 + ROUNDS):
                start, cpu_start = time.perf_counter(), time.process_time()
                found = find_nearest(index.rows, queries, 20, device=arguments.device)
                times.append(time.perf_counter() - start)
                cpu_times.append(time.process_time() - cpu_start)
                own = max(own, read_memory("RssAnon"))
            assert (found.rows[:, 0] == planted).all()
            print(f"{count} queries: first {times[0]:.2f} s, then median {statistics.median(times[1:]):.2f} s", end=" ")
            print(f"({min(times[1:]):.2f} to {max(times[1:]):.2f}, n = {ROUNDS}), of CPU", end=" ")
            print(f"{statistics.median(cpu_times[1:]):.2f} s; {own:.0f} MB of its own", flush=True)
    finally:
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)


if __name__ == "__main__":
    main()
