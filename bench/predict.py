"""Images a second of a ViT-B/16 on the CPU, from JPEG files to labels: vitrail beside transformers' pipeline.

    python bench/predict.py [--images FOLDER] [--count 32] [--rounds 15] [--threads 2]

The same random weights for all, in vitrail's file and in transformers' folder, and the same files: those of the folder,
or written here, noisy shapes of 500 x 375 pixels. Everyone has a process of its own, which loads its model and answers
once before anything is timed. First transformers chooses: in float32, with each of its image processors at batches of
1 to 32, three rounds, of which very slow settings see one; the least median wins. Then it and vitrail take their turns.
The rounds in which it was chosen do not count, or the luckiest of many would be compared. transformers is 1.0, and a
ratio is the median of what each round gave, since the speed of a machine drifts. vitrail runs what `vitrail predict`
runs: reading, decoding, resizing and computing at once, rows written to nowhere. predict_gpu.py is for GPUs.
"""

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
from peers import allow_torchvision
from PIL import Image

SIZE = (500, 375)
BATCH, BATCHES = 64, (1, 4, 8, 16, 32)  # vitrail's default, and what transformers may choose from
PROCESSORS = ("torchvision", "pil")
PRECISIONS = ("float32", "bfloat16", "int8", "openvino-int8")
CHOOSING = 3  # rounds
SLOW = 1.25  # times the fastest in the first round: who takes longer is not asked again


class Seconds(NamedTuple):
    """Seconds: by the clock, and of all threads of the process together, which others on the machine hardly change."""

    clock: float
    process: float


Run = Callable[[list[str], int], None]
"""Files, and how many at once."""
Contender = tuple[Connection, int]
"""A process, and how many files it is to take at once."""


def write_images(folder: Path, count: int) -> list[str]:
    """JPEG files like photos: smooth shapes with some noise."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    for number in range(count):
        small = Image.fromarray(generator.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(small.resize(SIZE, Image.Resampling.BICUBIC)).astype(np.float32)
        noisy = (smooth + generator.normal(0, 8, smooth.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{number:05}.jpg", quality=90)
    return sorted(map(str, folder.iterdir()))


def write_models(folder: Path, paths: list[str]) -> tuple[Path, Path]:
    """A ViT-B/16 with random weights: vitrail's file, with the scales that OpenVINO needs, and transformers' folder."""
    import torch

    from vitrail.evaluation.precision_benchmark import measure_precisions
    from vitrail.inference.classifier import Classifier
    from vitrail.weights.load import save
    from vitrail.weights.trained import create_random

    trained = create_random("b16", gelu="erf")  # as transformers' ViTs have it; the other form takes torch much longer
    torch.nn.init.normal_(
        trained.model.get_parameter("head.weight"), std=0.02, generator=torch.Generator().manual_seed(0)
    )
    trained = dataclasses.replace(trained, labels=tuple(f"class {index}" for index in range(1000)))
    classifier = Classifier(trained, device="cpu")
    trained = measure_precisions(
        trained, [torch.stack([classifier.make_input(path) for path in paths[:16]])], seconds=0
    )
    save(trained, folder / "b16.safetensors")
    save(trained, folder / "transformers", "transformers")
    return folder / "b16.safetensors", folder / "transformers"


def build_transformers_run(folder: Path, processor: str) -> Run:
    """transformers' pipeline, as its documentation has it."""
    allow_torchvision()
    from transformers import AutoImageProcessor, pipeline
    from transformers.utils import logging

    logging.set_verbosity_error()
    image_processor = AutoImageProcessor.from_pretrained(folder, backend=processor)
    classify = pipeline(
        "image-classification", model=str(folder), image_processor=image_processor, device="cpu", top_k=1
    )
    return lambda paths, batch: list(classify(paths, batch_size=batch)).clear()


def build_vitrail_run(file: Path, precision: str) -> Run:
    """What `vitrail predict` does between loading the model and its end."""
    from vitrail.cli.predict import StdoutRows
    from vitrail.data.image_paths import iter_image_refs
    from vitrail.inference.bulk_prediction import BulkSettings, predict_images
    from vitrail.inference.classifier import Classifier
    from vitrail.inference.prediction_rows import PredictionItem
    from vitrail.runtime.cpu_threads import keep_freed_memory
    from vitrail.runtime.workers import count_available_cores
    from vitrail.weights.load import load

    keep_freed_memory()
    classifier = Classifier(load(file), device="cpu", batch_size=BATCH, precision=precision)  # type: ignore[arg-type]

    def run(paths: list[str], _: int) -> None:
        items = (PredictionItem(image) for image in iter_image_refs(paths))
        settings = BulkSettings(threads=count_available_cores())
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            predict_images(classifier, items, StdoutRows("csv", classifier.labels), settings)

    return run


def run_contender(make: Callable[..., Run], arguments: tuple[object, ...], threads: int, other: Connection) -> None:
    """A process: load, then the seconds of each list of files that comes, by the clock and of all its threads."""
    import torch

    torch.set_num_threads(threads)
    run = make(*arguments)
    while request := other.recv():
        start = time.perf_counter(), time.process_time()
        run(*request)
        other.send((time.perf_counter() - start[0], time.process_time() - start[1]))


@contextlib.contextmanager
def start_contender(make: Callable[..., Run], arguments: tuple[object, ...], threads: int) -> Iterator[Connection]:
    """A process that has loaded its model, and answers until the end of the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run_contender, args=(make, arguments, threads, there))
    process.start()
    there.close()
    try:
        yield here
    finally:
        with contextlib.suppress(ConnectionError):
            here.send(())
        process.join()


def time_files(contender: Connection, paths: list[str], batch: int) -> Seconds | None:
    """Seconds for the files, or None where the contender has ended: its own error says why."""
    try:
        contender.send((paths, batch))
        return Seconds(*contender.recv())
    except (EOFError, ConnectionError):
        return None


def choose_fastest(peers: dict[str, Contender], paths: list[str]) -> str:
    """Which of transformers' settings is the fastest here; all are printed."""
    seconds: dict[str, list[float]] = {}
    for name, values in compare_in_turns(peers, paths, 1).items():
        seconds[name] = [values[0].clock]
    near = {name: peers[name] for name in seconds if seconds[name][0] <= SLOW * min(seconds.values())[0]}
    for name, values in compare_in_turns(near, paths, CHOOSING - 1).items():
        seconds[name] += [each.clock for each in values]
    for name, each in seconds.items():
        print(f"{name:36} {len(paths) / statistics.median(each):9.2f} images/s in {len(each)}")
    return min(near, key=lambda name: statistics.median(seconds[name]))


def compare_in_turns(contenders: dict[str, Contender], paths: list[str], rounds: int) -> dict[str, list[Seconds]]:
    """Seconds of each in every round, by turns, after each has answered once."""
    seconds: dict[str, list[Seconds]] = {
        name: [] for name, (other, batch) in contenders.items() if time_files(other, paths[:8], batch) is not None
    }
    for number in range(rounds):
        for name, values in seconds.items():
            seconds_taken = time_files(contenders[name][0], paths, contenders[name][1])
            assert seconds_taken is not None, f"{name} ended in round {number + 1}"
            values.append(seconds_taken)
    return seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precisions", nargs="*", default=PRECISIONS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        if options.images is None:
            paths = write_images(folder / "images", options.count)
        else:
            paths = sorted(map(str, options.images.rglob("*.jpg")))[: options.count]
        file, peer = write_models(folder, paths)
        print(f"{len(paths)} JPEG files, {options.threads} threads, ViT-B/16 at 224 x 224")
        peers: dict[str, Contender] = {}
        for processor in PROCESSORS:
            other = stack.enter_context(start_contender(build_transformers_run, (peer, processor), options.threads))
            peers |= {f"transformers, {processor}, batch {batch}": (other, batch) for batch in BATCHES}
        best = choose_fastest(peers, paths)
        contenders = {best: peers[best]}
        for precision in options.precisions:
            other = stack.enter_context(start_contender(build_vitrail_run, (file, precision), options.threads))
            contenders[f"vitrail, {precision}, batch {BATCH}"] = other, BATCH
        seconds = compare_in_turns(contenders, paths, options.rounds)
    print(f"\n{f'{options.rounds} rounds':36} {'images/s':>9} {'':>7} {'CPU ms an image':>16}")
    for name, values in seconds.items():
        middle = Seconds(*map(statistics.median, zip(*values, strict=True)))
        pairs = list(zip(seconds[best], values, strict=True))
        clock = statistics.median(peer.clock / own.clock for peer, own in pairs)
        process = statistics.median(peer.process / own.process for peer, own in pairs)
        rate, cost = len(paths) / middle.clock, 1e3 * middle.process / len(paths)
        print(f"{name:36} {rate:9.2f} {clock:6.2f}x {cost:16.1f} {process:6.2f}x")


if __name__ == "__main__":
    main()
