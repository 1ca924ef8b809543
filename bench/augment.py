"""Milliseconds for 1,024 images of 32 x 32 pixels that live on a device, augmented there, random numbers included.

python bench/augment.py [--device cuda] [--rounds 20]
"""

import argparse
import statistics
import time

import numpy as np
import torch

from vitrail.config import AugmentConfig, PreprocessConfig
from vitrail.data import batch_augment
from vitrail.data.randomness import CounterRNG

BATCH = 1024
WAYS = {
    "pad, flip": AugmentConfig(crop="pad"),
    "inception crop, flip": AugmentConfig(),
    "pad, flip, RandAugment(2, 15)": AugmentConfig(crop="pad", randaugment=(2, 15)),
    "pad, flip, jitter 0.4": AugmentConfig(crop="pad", jitter=0.4),
    "pad, flip, erase 0.25": AugmentConfig(crop="pad", erase=0.25),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    device = torch.device(options.device)
    pixels = torch.randint(0, 256, (BATCH, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels = pixels.to(device)
    view = PreprocessConfig(size=(32, 32), resize=(32, 32))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, median of {options.rounds}")
    for name, augment in WAYS.items():
        seconds = []
        for turn in range(options.rounds + 3):
            start = time.perf_counter()
            batch_augment.make_train_inputs(
                pixels, CounterRNG(0, np.arange(turn * BATCH, (turn + 1) * BATCH)), augment, view
            )
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        print(f"{name:32} {statistics.median(seconds[3:]) * 1e3:7.2f} ms")


if __name__ == "__main__":
    main()
