"""Images a second and milliseconds of a served model, against its bare forward pass.

    python -m bench.serve MODEL [--device cpu] [--batch 32] [--side 224] [--seconds 10] [--cores N]

Bare: batches of inputs through the classifier, in a process of its own. Saturated: two batches of requests in flight at
all times, one JPEG each. Both in turns, three times, and the medians. Then loads from a quarter of that to four times
it, offered on schedule whether or not earlier requests were answered: of the accepted p50 and p99, of the refused (503)
p99, and /healthz twenty times a second. The client runs on the same machine and takes its share of the cores, unless
the model, bare or served, is given the first N of them: then it has the others.
"""

import argparse
import asyncio
import contextlib
import io
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
from PIL import Image
from tests.serving.client import RESET, Client, Reply, offer_load, quantile

ROUNDS = 3
LOADS = (0.25, 0.5, 0.75, 0.9, 1.0, 2.0, 4.0)


def make_photos(side: int, count: int = 32) -> list[bytes]:
    """JPEGs like photos: smooth shapes with some noise."""
    generator, replies = np.random.default_rng(0), []
    for _ in range(count):
        small = Image.fromarray(generator.integers(0, 256, (9, 9, 3), dtype=np.uint8))
        smooth = np.asarray(small.resize((side, side), Image.Resampling.BICUBIC)).astype(np.float32)
        file = io.BytesIO()
        noisy = (smooth + generator.normal(0, 6, smooth.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(file, "JPEG", quality=90)
        replies.append(file.getvalue())
    return replies


def measure_bare(model: str, device: str | None, batch: int, images: list[bytes], seconds: float) -> float:
    """Images a second of the classifier alone, on inputs that are ready."""
    from vitrail.inference.classifier import Classifier
    from vitrail.weights.load import load

    classify = Classifier(load(model), device=device)
    inputs = [classify.make_input(images[number % len(images)]) for number in range(batch)]
    times, end = list[float](), time.monotonic() + seconds
    classify.predict_proba(inputs)
    while time.monotonic() < end or len(times) < 3:
        start = time.perf_counter()
        classify.predict_proba(inputs)
        times.append(time.perf_counter() - start)
    return batch / statistics.mean(times)


@contextlib.contextmanager
def start_server(cores: list[int], arguments: list[str]) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "vitrail", "serve", *arguments, "--port", "0"]
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # what is started from here inherits them
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        os.sched_setaffinity(0, mine)
        assert running.stdout is not None
        host, _, port = running.stdout.readline().strip().removeprefix("http://").rpartition(":")
        try:
            yield host, int(port)
        finally:
            running.send_signal(signal.SIGTERM)


async def measure_saturated(host: str, port: int, images: list[bytes], flights: int, seconds: float) -> float:
    """Images a second with so many requests in flight at all times."""
    client, end, done = Client(host, port), time.monotonic() + seconds, 0

    async def send_requests(number: int) -> None:
        nonlocal done
        while time.monotonic() < end:
            reply = await client.ask("/v1/predict", images[number % len(images)])
            done += reply.status == 200
            number += flights

    start = time.monotonic()
    await asyncio.gather(*(send_requests(number) for number in range(flights)))
    rate = done / (time.monotonic() - start)
    await client.close()
    return rate


def format_row(load: float, rate: float, seconds: float, replies: list[Reply], health: list[Reply]) -> str:
    accepted = [reply for reply in replies if reply.status == 200]
    refused = [reply for reply in replies if reply.status == 503]
    resets = sum(reply.status == RESET for reply in (*replies, *health))
    late = f"{quantile(refused, 0.99) * 1e3:8.0f}" if refused else f"{'-':>8}"
    return (
        f"{load:6.0%} {rate:9.1f} {len(accepted) / seconds:9.1f} {quantile(accepted, 0.5) * 1e3:8.0f}"
        f" {quantile(accepted, 0.99) * 1e3:8.0f} {late} {quantile(health, 0.99) * 1e3:8.0f} {resets:7}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--deadline", type=float, default=0.6)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--cores", type=int)
    options = parser.parse_args()
    mine = sorted(os.sched_getaffinity(0))
    given = mine if options.cores is None else mine[: options.cores]
    os.sched_setaffinity(0, mine if options.cores is None else mine[options.cores :])
    images, device = make_photos(options.side), ["--device", options.device] if options.device else []
    sizes = ["--batch", str(options.batch), "--queue", str(4 * options.batch)]
    bares, rates = [], []
    with start_server(given, [options.model, *sizes, "--deadline", "60", *device]) as (host, port):
        asyncio.run(measure_saturated(host, port, images, options.batch, 2))  # warm
        with multiprocessing.get_context("spawn").Pool(1, os.sched_setaffinity, (0, given)) as alone:
            for _ in range(ROUNDS):
                bares.append(
                    alone.apply(measure_bare, (options.model, options.device, options.batch, images, options.seconds))
                )
                rates.append(asyncio.run(measure_saturated(host, port, images, 2 * options.batch, options.seconds)))
    best, rate = statistics.median(bares), statistics.median(rates)
    print(f"bare: {best:.1f} images/s in batches of {options.batch}, on inputs that are ready")
    print(f"served: {rate:.1f} images/s, {rate / best:.1%} of it; JPEGs of {options.side} x {options.side}")
    print("  load offered/s     200/s   p50 ms   p99 ms  503 p99   health  resets")
    with start_server(given, [options.model, *sizes, "--deadline", str(options.deadline), *device]) as (host, port):
        asyncio.run(measure_saturated(host, port, images, 2, 2))
        for load in LOADS:
            replies = asyncio.run(offer_load(host, port, images, rate=load * rate, seconds=options.seconds))
            print(format_row(load, load * rate, options.seconds, *replies), flush=True)


if __name__ == "__main__":
    main()
