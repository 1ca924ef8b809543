"""Seconds to compute every number of `vitrail evaluate` from a model's predictions, intervals included.

    python bench/metrics.py [--images 50000] [--classes 1000] [--repeats 5]

The predictions are made up. Goal: under one second for ImageNet's validation images.
"""

import argparse
import statistics
import time

import torch

from vitrail.evaluation.metrics import compute_metrics
from vitrail.evaluation.predictions import Predictions, count_predictions


def make_predictions(images: int, classes: int) -> Predictions:
    """What a model might predict: right on three images of four."""
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, (images,), generator=draws)
    best = torch.randint(0, classes, (images, 5), generator=draws)
    best[:, 0] = torch.where(torch.rand(images, generator=draws) < 0.75, labels, best[:, 0])
    probabilities = torch.rand(images, 5, generator=draws).sort(dim=1, descending=True).values
    right = best[:, 0] == labels
    in_five = (best == labels[:, None]).any(dim=1)
    return Predictions(best, probabilities, -probabilities[:, 0].log(), right, torch.arange(images), labels, in_five)


def main() -> None:
    """Print the median of the repeats."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    predictions, seconds = make_predictions(options.images, options.classes), []
    for _ in range(options.repeats):
        start = time.perf_counter()
        compute_metrics(count_predictions(predictions, options.classes), predictions)
        seconds.append(time.perf_counter() - start)
    print(
        f"{options.images:,} images, {options.classes:,} classes: median {statistics.median(seconds):.3f} s"
        f" of {options.repeats} ({min(seconds):.3f} to {max(seconds):.3f}), torch {torch.__version__},"
        f" {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()
