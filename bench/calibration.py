"""What a prior on the temperature is worth, by the number of images that it is fitted on.

    python bench/calibration.py MODEL TINY_IMAGENET_VAL FLOWERS102 [--cache FILE] [--draws 100] [--deviations 0.1 0.2]

Logits of one model on two datasets: its own head's on Tiny-ImageNet's validation images, restricted to their 200
classes, and those of a linear head learned from a third of Flowers-102 with smoothed labels. Of each, n images are
drawn, a temperature is fitted on them and measured on all others, many times; the same for 20 classes at a time.
"""

import argparse
import statistics
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.dataset import Dataset, Split
from vitrail.data.loader import iter_eval_batches
from vitrail.data.sources import open_dataset
from vitrail.data.transforms import normalize
from vitrail.evaluation import label_matching
from vitrail.evaluation.calibration import expected_calibration_error, fit_temperature
from vitrail.weights.load import load
from vitrail.weights.trained import Trained

SIZES = (50, 180, 500, 2000)
LEAST_LEFT = 120  # images to measure on


def extract(model: str, tiny: str, flowers: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Logits and targets, by what they are of."""
    trained = load(model)
    dataset, rows, labels = compute_outputs(trained, tiny, every=2, head=True)
    places = label_matching.match_outputs(dataset.classes, trained.labels, trained.model.config.classes)
    own = rows[:, places], labels
    dataset, rows, labels = compute_outputs(trained, flowers, every=1, head=False)
    return {"tiny-imagenet": own, "flowers102": fit_linear_head(rows, labels, len(dataset.classes))}


@torch.no_grad()
def compute_outputs(trained: Trained, data: str, *, every: int, head: bool) -> tuple[Dataset, Tensor, Tensor]:
    """Logits or features, and targets, of one image in so many."""
    dataset, values, targets = open_dataset(data), [], []
    assert trained.preprocess is not None
    for split in dataset.splits.values():
        some = Split(split.store, split.rows[::every])
        for batch in iter_eval_batches(some, trained.preprocess, batch_size=64, num_classes=len(dataset.classes)):
            images = normalize(batch.pixels, trained.preprocess)
            values.append(trained.model(images) if head else trained.model.compute_features(images))
            targets.append(batch.targets)
    return dataset, torch.cat(values).float(), torch.cat(targets)


def fit_linear_head(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Logits of two thirds of the images, by a linear head learned from the other third, labels smoothed by 0.1."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    third = len(labels) // 3
    features = ((features - features.mean(0)) / (features.std(0) + 1e-5))[order].clone()
    labels = labels[order].clone()
    weight = torch.zeros(classes, features.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=200)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(features[:third] @ weight.T, labels[:third], label_smoothing=0.1)
        loss = loss + 1e-3 * weight.square().sum() / 2
        loss.backward()
        return loss

    optimizer.step(step)
    return (features[third:] @ weight.T).detach(), labels[third:]


def measure_temperature(logits: Tensor, targets: Tensor, value: float) -> tuple[float, float]:
    """Calibration error and negative log-likelihood at a temperature."""
    probabilities = (logits / value).softmax(dim=1)
    best = probabilities.max(dim=1)
    error = expected_calibration_error(best.values, best.indices == targets)
    return error, float(F.cross_entropy(logits / value, targets))


def compute_information(logits: Tensor, value: float) -> float:
    """What an image tells of log T on average: the variance of its logits under its own probabilities."""
    scaled = (logits / value).double()
    probabilities = scaled.softmax(dim=1)
    mean = (probabilities * scaled).sum(dim=1)
    return float(((probabilities * scaled.square()).sum(dim=1) - mean.square()).mean())


def split_classes(logits: Tensor, targets: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """The logits of so many classes at a time, of their images: smaller questions, answered better."""
    parts = []
    for first in range(0, logits.shape[1] - size + 1, size):
        there = (targets >= first) & (targets < first + size)
        parts.append((logits[there, first : first + size], targets[there] - first))
    return parts


def compare_priors(name: str, parts: list[tuple[Tensor, Tensor]], options: argparse.Namespace) -> None:
    """Print what temperatures of n images are worth on all others, over parts and draws."""
    images = sum(len(targets) for _, targets in parts)
    whole = [(fit_temperature(*part, prior_std=float("inf")), *part) for part in parts]
    correct = statistics.mean(float((logits.argmax(dim=1) == targets).double().mean()) for _, logits, targets in whole)
    mean_information = statistics.mean(compute_information(logits, best) for best, logits, _ in whole)
    print(
        f"{name}: {images} images in {len(parts)} parts, {correct:.1%} correct, information"
        f" {mean_information:.2f} an image;"
    )
    for label, values in (("1", [1.0] * len(whole)), ("fitted on all", [best for best, _, _ in whole])):
        rows = [
            measure_temperature(logits, targets, value)
            for value, (_, logits, targets) in zip(values, whole, strict=True)
        ]
        error, loss = (statistics.mean(column) for column in zip(*rows, strict=True))
        print(f"  T {label} ({min(values):.2f} to {max(values):.2f}): ECE {error:.2%}, loss {loss:.4f}")
    for count in SIZES:
        if count > min(len(targets) for _, targets in parts) - LEAST_LEFT:
            continue
        for deviation in options.deviations:
            draws, fits = torch.Generator().manual_seed(options.seed), list[tuple[float, float, float]]()
            for number in range(options.draws):
                logits, targets = parts[number % len(parts)]
                order = torch.randperm(len(targets), generator=draws)
                fit, rest = order[:count], order[count:]
                value = fit_temperature(logits[fit], targets[fit], prior_std=deviation)
                fits.append((value, *measure_temperature(logits[rest], targets[rest], value)))
            temperatures, errors, losses = zip(*fits, strict=True)
            print(
                f"  n {count:5d} deviation {deviation:4.2f}: T {statistics.mean(temperatures):.3f}"
                f" ({min(temperatures):.2f} to {max(temperatures):.2f}), ECE {statistics.mean(errors):.2%}"
                f" (worst {max(errors):.2%}), loss {statistics.mean(losses):.4f} (worst {max(losses):.4f})"
            )


def main() -> None:
    """Print a table for each set of logits, and for each in parts of 20 classes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tiny")
    parser.add_argument("flowers")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deviations", type=float, nargs="+", default=[float("inf"), 0.5, 0.3, 0.2, 0.1])
    options = parser.parse_args()
    if options.cache and options.cache.exists():
        outputs = torch.load(options.cache)
    else:
        outputs = extract(options.model, options.tiny, options.flowers)
        if options.cache:
            torch.save(outputs, options.cache)
    for name, (logits, targets) in outputs.items():
        compare_priors(f"{name}, 20 classes at a time", split_classes(logits, targets, 20), options)
        compare_priors(name, [(logits, targets)], options)


if __name__ == "__main__":
    main()
