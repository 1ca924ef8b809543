"""Images a second of one model over the same images: `vitrail predict`, whole and in parts, Ray Data, multiprocessing.

    python bench/engines.py --images FOLDER --model MODEL [--count 512] [--rounds 3] [--workers 2]

The images are the folder's JPEG files, as bytes in Parquet files. Everyone computes with the same number of cores:
predict with that many threads, its parts and the engines with that many processes of one thread. The processes of
multiprocessing and Ray itself start before; those of parts start in each run, and their files are merged in it. Ray's
actors start anew for each dataset and load the model, so each round first scores 128 images, and the last column is
without their time.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BATCH = 64
Run = Callable[[Path], int]
"""A Parquet folder; how many rows came out."""


def write_parquet(files: list[Path], folder: Path, parts: int) -> Path:
    """Files of bytes and paths, in row groups of a batch."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir()
    size = -(-len(files) // parts)
    for part in range(parts):
        own = files[part * size : (part + 1) * size]
        table = pyarrow.table({"path": list(map(str, own)), "bytes": [file.read_bytes() for file in own]})
        parquet.write_table(table, folder / f"part-{part}.parquet", row_group_size=BATCH)
    return folder


def run_predict(model: str, threads: int) -> Run:
    """`vitrail.predict`, which reads the Parquet files itself; the model is loaded before."""
    import torch

    import vitrail

    torch.set_num_threads(threads)
    trained = vitrail.load(model)
    return lambda folder: len(vitrail.predict(trained, str(folder), batch=BATCH, workers=threads, progress=False))


def run_parts(model: str, parts: int) -> Run:
    """`vitrail predict --part` in a process for each part, and `vitrail merge`."""

    def run(folder: Path) -> int:
        vitrail, environment = [sys.executable, "-m", "vitrail"], os.environ | {"OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryDirectory() as temporary:
            out = f"{temporary}/rows.csv"
            command = [*vitrail, "predict", model, str(folder), "--out", out, "--batch", str(BATCH), "--workers", "1"]
            started = [
                subprocess.Popen([*command, "--part", f"{part}/{parts}"], env=environment, stderr=subprocess.DEVNULL)
                for part in range(1, parts + 1)
            ]
            assert [process.wait() for process in started] == [0] * parts
            merged = subprocess.run(
                [*vitrail, "merge", out, "--json"], env=environment, capture_output=True, check=True
            )
            return int(json.loads(merged.stdout)["images"])

    return run


def iterate_batches(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of Parquet files as dictionaries of columns."""
    from pyarrow import parquet

    for path in sorted(folder.glob("*.parquet")):
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=BATCH):
            yield batch.to_pydict()


def run_pool(pool: Any, scorer: Any) -> Run:
    """A pool of processes, which gets batches of bytes and gives back their labels."""
    return lambda folder: sum(len(batch["label"]) for batch in pool.imap(scorer, iterate_batches(folder)))


def run_ray(ray: Any, model: str, workers: int) -> Run:
    """Ray Data, whose actors score; they start anew in each call, which is a part of the time."""
    import vitrail

    def run(folder: Path) -> int:
        images = ray.data.read_parquet(str(folder)).repartition(4 * workers)  # small files are read as one block
        rows = images.map_batches(
            vitrail.Scorer,
            fn_constructor_kwargs={"model": model, "batch": BATCH},
            compute=ray.data.ActorPoolStrategy(size=workers),
            batch_size=BATCH,
            batch_format="numpy",
        )
        return sum(len(batch["label"]) for batch in rows.select_columns(["label"]).iter_batches(batch_size=None))

    return run


def measure(run: Run, folder: Path, count: int) -> float:
    """Seconds of a run, all of whose rows came out."""
    start = time.perf_counter()
    rows = run(folder)
    assert rows == count, (rows, count)
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import pyarrow
    import ray
    import torch

    import vitrail

    files = sorted(options.images.rglob("*.jp*g"))[: options.count]
    model = str(Path(options.model).resolve())
    ray.init(num_cpus=options.workers + 2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as temporary,
        context.Pool(options.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        folder = write_parquet(files, Path(temporary) / "all", parts=4)
        few = write_parquet(files[: 2 * BATCH], Path(temporary) / "few", parts=2)
        runs = {
            "vitrail predict": run_predict(model, options.workers),
            "predict in parts": run_parts(model, options.workers),
            "multiprocessing": run_pool(pool, vitrail.Scorer(model, batch=BATCH)),
            "Ray Data": run_ray(ray, model, options.workers),
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for run in runs.values():
            measure(run, few, min(len(files), 2 * BATCH))
        for _ in range(options.rounds):
            for name, run in runs.items():
                short = measure(run, few, min(len(files), 2 * BATCH))
                seconds[name].append((measure(run, folder, len(files)), short))
    ray.shutdown()
    print(f"{len(files)} images, {model}, {options.workers} of {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, Ray {ray.__version__}, pyarrow", end=" ")
    print(f"{pyarrow.__version__}; medians of {options.rounds} rounds\n")
    print(f"{'':16} {'seconds':>8} {'images/s':>9} {'images/s after the first 128':>29}")
    for name, values in seconds.items():
        whole = statistics.median(value for value, _ in values)
        rest = statistics.median(value - short for value, short in values)
        print(f"{name:16} {whole:8.1f} {len(files) / whole:9.1f} {(len(files) - 2 * BATCH) / rest:29.1f}")


if __name__ == "__main__":
    main()
