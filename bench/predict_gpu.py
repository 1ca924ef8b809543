"""Images a second of a ViT on a GPU, from JPEG files to labels: `vitrail predict` beside timm and transformers.

    python bench/predict_gpu.py [--model b16] [--count 19000] [--rounds 3] [--workers 15] [--json FILE]

The same random weights and the same files, noisy shapes of 256 x 256 pixels, which all contenders read in every round.
Everyone computes in bf16 and may use `--workers` processes. timm's row is the loop of its inference script: its loader
with prefetching to the GPU, its network under autocast, eager and compiled, the top label of each image kept.
transformers' is its pipeline, with loader processes, at several batch sizes. vitrail's rows are its predict command
without the start of Python: listing the files, loading the model, writing a CSV file. Two rates bound all of them:
`cores` is what vitrail's processes decode and resize without a model, `GPU` what the compiled network alone computes.
Each contender runs once before it is timed, and peers are compared in their fastest setting.
"""

import argparse
import copy
import dataclasses
import io
import json
import multiprocessing
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import allow_torchvision
from PIL import Image

import vitrail
from vitrail.data.image_paths import iter_image_refs
from vitrail.inference.input_batches import InputLoader, iterate_input_batches
from vitrail.inference.precision import build_inference_functions
from vitrail.inference.prediction_rows import PredictionItem

SIDE, BATCH, SHARD_IMAGES = 256, 256, 1000
Run = Callable[[], object]


def encode_jpeg(number: int) -> bytes:
    """A file like a photo: smooth shapes with some noise."""
    generator = np.random.default_rng(number)
    small = Image.fromarray(generator.integers(0, 256, (12, 12, 3), dtype=np.uint8))
    smooth = np.asarray(small.resize((SIDE, SIDE), Image.Resampling.BICUBIC)).astype(np.float32)
    noisy = (smooth + generator.normal(0, 8, smooth.shape)).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=90)
    return file.getvalue()


def write_images(folder: Path, count: int) -> tuple[list[str], list[str]]:
    """The files, and shards of the same images."""
    (folder / "files" / "class").mkdir(parents=True)
    with multiprocessing.get_context("spawn").Pool() as pool:
        for number, content in enumerate(pool.imap(encode_jpeg, range(count), chunksize=64)):
            (folder / "files" / "class" / f"{number:06}.jpg").write_bytes(content)
    paths = sorted((folder / "files" / "class").iterdir())
    for start in range(0, count, SHARD_IMAGES):
        with tarfile.open(folder / f"shard-{start // SHARD_IMAGES:03}.tar", "w") as shard:
            for path in paths[start : start + SHARD_IMAGES]:
                shard.add(path, path.name)
    return [str(path) for path in paths], sorted(map(str, folder.glob("*.tar")))


def write_model(folder: Path, model: str) -> vitrail.Trained:
    """Random weights as vitrail's file, timm's folder and transformers' folder."""
    trained = dataclasses.replace(vitrail.load(model), labels=tuple(f"class {index}" for index in range(1000)))
    torch.nn.init.normal_(trained.model.get_parameter("head.weight"), std=0.02)
    vitrail.save(trained, folder / "model.safetensors")
    for name in ("timm", "transformers"):
        vitrail.save(trained, folder / name, name)
    return trained


def build_vitrail_run(folder: Path, images: list[str], workers: int) -> Run:
    """vitrail's own command."""

    def run() -> None:
        out = folder / "rows.csv"
        for path in (out, out.with_name("rows.csv.json")):
            path.unlink(missing_ok=True)
        vitrail.predict(
            str(folder / "model.safetensors"), images, out=out, precision="bfloat16", device="cuda", workers=workers
        )

    return run


def iterate_timm_runs(folder: Path, root: Path, workers: int) -> Iterator[tuple[str, Run]]:
    """The loop of timm's inference script."""
    import timm
    from timm.data import create_dataset, create_loader, resolve_data_config

    for compiled in (False, True):
        network = timm.create_model(f"local-dir:{folder / 'timm'}", pretrained=True).cuda().eval()
        config = resolve_data_config({}, model=network)
        called: Any = torch.compile(network) if compiled else network

        def run(called: Any = called, config: dict[str, Any] = config) -> None:
            loader = create_loader(
                create_dataset("", str(root)), batch_size=BATCH, use_prefetcher=True, num_workers=workers,
                device=torch.device("cuda"), **config,
            )  # fmt: skip
            labels = []
            with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
                for pixels, _ in loader:
                    probabilities, indices = called(pixels).softmax(-1).topk(1)
                    labels.append((probabilities.float().cpu().numpy(), indices.cpu().numpy()))

        yield f"timm, {'compiled' if compiled else 'eager'}", run


def iterate_transformers_runs(folder: Path, paths: list[str], workers: int) -> Iterator[tuple[str, Run]]:
    """transformers' pipeline."""
    from transformers import AutoImageProcessor, pipeline
    from transformers.utils import logging

    logging.set_verbosity_error()
    processor = AutoImageProcessor.from_pretrained(folder / "transformers", backend="pil")
    classify = pipeline(
        "image-classification", model=str(folder / "transformers"), image_processor=processor, device=0,
        dtype=torch.bfloat16, top_k=1,
    )  # fmt: skip
    for batch in (64, 256):
        keywords = {"batch_size": batch, "num_workers": workers}
        yield f"transformers, batch {batch}", lambda keywords=keywords: list(classify(paths, **keywords)).clear()


def measure_cores(trained: vitrail.Trained, paths: list[str], workers: int) -> float:
    """Images a second that the processes decode and resize."""
    assert trained.preprocess is not None
    items = [PredictionItem(image) for image in iter_image_refs(paths)]
    batches = [items[start : start + BATCH] for start in range(0, len(items), BATCH)]
    loaded = iterate_input_batches(
        InputLoader(trained.preprocess, 3), batches, batch_size=BATCH, threads=1, processes=workers
    )
    for _ in range(2 + 2 * workers * 64 // BATCH):  # those of threads, and those that were ready meanwhile
        next(loaded)
    start = time.perf_counter()
    images = sum(len(batch.items) for batch in loaded)
    return images / (time.perf_counter() - start)


def measure_gpu(trained: vitrail.Trained, *, compiled: bool) -> float:
    """Images a second of vitrail's own inference function in bf16, pixels on the GPU."""
    on_gpu = dataclasses.replace(trained, model=copy.deepcopy(trained.model).cuda().eval())
    compute = build_inference_functions(on_gpu, "bfloat16", compiled_batch=BATCH if compiled else 0).probabilities
    size = trained.model.config.image_size
    pixels = torch.randint(0, 256, (BATCH, 3, *size), dtype=torch.uint8, device="cuda")
    start = time.perf_counter()
    for _ in range(5):
        compute(pixels)
    torch.cuda.synchronize()
    print(f"first batches {'compiled' if compiled else 'eager'}: {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    for _ in range(40):
        compute(pixels)
    torch.cuda.synchronize()
    return 40 * BATCH / (time.perf_counter() - start)


def time_runs(runs: dict[str, Run], images: int, rounds: int) -> dict[str, float]:
    """The median of the rates of each, in turns; who fails is left out, and its error printed."""
    rates: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name in list(runs):
            start = time.perf_counter()
            try:
                runs[name]()
            except Exception as error:  # noqa: BLE001  # a peer's error ends its row alone
                print(f"{name}: {type(error).__name__}: {str(error)[:300]}")
                del runs[name]
                continue
            if number:  # the first round warms up
                rates.setdefault(name, []).append(images / (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="b16")
    for name, default in (("count", 19000), ("rounds", 3), ("workers", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--peers", nargs="*", default=["timm", "transformers"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, workers = Path(temporary), options.workers
        paths, shards = write_images(folder, options.count)
        trained = write_model(folder, options.model)
        rates = {"cores": measure_cores(trained, paths, workers)}
        rates |= {"GPU": measure_gpu(trained, compiled=False), "GPU, compiled": measure_gpu(trained, compiled=True)}
        runs = {"vitrail, files": build_vitrail_run(folder, [str(folder / "files")], workers)}
        runs["vitrail, shards"] = build_vitrail_run(folder, shards, workers)
        if options.peers:
            allow_torchvision()
        if "timm" in options.peers:
            runs |= iterate_timm_runs(folder, folder / "files", workers)
        if "transformers" in options.peers:
            runs |= iterate_transformers_runs(folder, paths, workers)
        rates |= time_runs(runs, options.count, options.rounds)
    limit = min(rates["cores"], rates["GPU, compiled"])
    print(f"{options.model}, {options.count} files of {SIDE} pixels, {workers} processes, {options.rounds} rounds")
    for name, rate in rates.items():
        print(f"{name:24} {rate:9,.0f} images/s {rate / limit:6.2f} of the lower limit")
    if options.json is not None:
        options.json.write_text(json.dumps(rates))


if __name__ == "__main__":
    main()
