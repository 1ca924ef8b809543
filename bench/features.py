"""Images a second: a model's bare forward passes, the extractor on the same batches, and the extractor from JPEG files.

    python bench/features.py [--model ti16] [--device cpu] [--images 256] [--batch 64] [--workers 0] [--rounds 7]

The three take turns; the median of the rounds counts. On a CPU it is the time of this process's one thread, which
others on the machine do not change; on a GPU, and with workers, the time of the clock. The extractor's goal is the bare
forward less 5 %. Photos are the two of scikit-learn's wheel, cut at random places to 500 x 375.
"""

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitrail.data.loader import Batch, iter_eval_batches
from vitrail.data.sources import open_dataset
from vitrail.data.transforms import normalize
from vitrail.evaluation.features import extract_features
from vitrail.runtime.devices import resolve_device
from vitrail.weights.load import load

SIZE = (500, 375)


def write_photos(folder: Path, count: int) -> None:
    """JPEGs of 500 x 375 pixels, quality 90, for training all but one."""
    from sklearn.datasets import load_sample_images

    generator = np.random.default_rng(0)
    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    for number in range(count + 1):
        photo = photos[number % len(photos)]
        left, top = (int(generator.integers(0, room + 1)) for room in (photo.width - SIZE[0], photo.height - SIZE[1]))
        file = io.BytesIO()
        photo.crop((left, top, left + SIZE[0], top + SIZE[1])).save(file, "JPEG", quality=90)
        place = folder / ("train" if number < count else "val") / "photos"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:05d}.jpg").write_bytes(file.getvalue())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ti16")
    parser.add_argument("--device", default=None)
    for name, default in (("images", 256), ("batch", 64), ("workers", 0), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    device = resolve_device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    trained = load(options.model)
    view, model = trained.preprocess, trained.model.to(device).eval()
    assert view is not None, "name a model that states its preprocessing"

    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder), options.images)
        split = open_dataset(folder).splits["train"]

        def loaded() -> list[Batch]:
            return list(
                iter_eval_batches(split, view, batch_size=options.batch, num_classes=1, workers=options.workers)
            )

        ready = loaded()

        @torch.inference_mode()
        def bare() -> None:
            for batch in ready:
                model.compute_features(normalize(batch.pixels.to(device, non_blocking=True), view))

        def from_batches() -> None:
            extract_features(model, ready, view, num_images=len(split))

        def from_files() -> None:
            batches = iter_eval_batches(split, view, batch_size=options.batch, num_classes=1, workers=options.workers)
            extract_features(model, batches, view, num_images=len(split))

        measure({"bare forward": bare, "extractor": from_batches, "extractor, from files": from_files}, options, device)


def measure(ways: dict[str, Callable[[], None]], options: argparse.Namespace, device: torch.device) -> None:
    """Time the ways in turn."""
    clock = time.process_time if device.type == "cpu" and not options.workers else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds + 1):
        for name, way in ways.items():
            start = clock()
            way()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:  # the first warms up
                seconds[name].append(clock() - start)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, one thread"
    print(f"{options.model}, {options.images} photos in batches of {options.batch}, {where}, float32, {clock.__name__}")
    fastest = statistics.median(seconds["bare forward"])
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"{name:24} {options.images / middle:9.1f} images/s   {fastest / middle:.3f}x")


if __name__ == "__main__":
    main()
