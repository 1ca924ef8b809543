"""What a temperature is worth that is fitted on a few images, all of them classified correctly.

    python bench/calibration_few.py MODEL FLOWERS102 [--draws 60]

A linear head on the model's features learns six classes from 48 images. T is fitted on n others, in the draws where the
head classifies all of those correctly, and measured on the rest beside T = 1.
"""

import argparse
import statistics

import torch
from calibration import compute_outputs
from torch import Tensor
from torch.nn import functional as F

from vitrail.evaluation.calibration import expected_calibration_error, fit_temperature
from vitrail.weights.load import load

CLASSES, TRAIN_IMAGES, SIZES = 6, 48, (6, 12, 24)
HEADS = ((10, 0.1), (30, 0.1), (300, 0.1), (300, 0.0), (1000, 0.0))  # steps, label smoothing


def draw_logits(features: Tensor, labels: Tensor, steps: int, smoothing: float, rng: torch.Generator) -> list[Tensor]:
    """Logits and targets of the images that the head of a draw has not learned from."""
    classes = torch.randperm(int(labels.max()) + 1, generator=rng)[:CLASSES]
    rows = torch.cat([(labels == label).nonzero()[:, 0] for label in classes])
    rows = rows[torch.randperm(len(rows), generator=rng)]
    targets = (labels[rows][:, None] == classes).int().argmax(dim=1)
    inputs = features[rows]
    inputs = (inputs - inputs.mean(0)) / (inputs.std(0) + 1e-5)
    weight = torch.zeros(CLASSES, inputs.shape[1], requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=3e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = inputs[:TRAIN_IMAGES] @ weight.T
        F.cross_entropy(logits, targets[:TRAIN_IMAGES], label_smoothing=smoothing).backward()
        optimizer.step()
    return [(inputs[TRAIN_IMAGES:] @ weight.T).detach(), targets[TRAIN_IMAGES:]]


def measure(logits: Tensor, targets: Tensor) -> list[float]:
    """Loss, calibration error, mean probability and accuracy."""
    probability, correct = logits.softmax(1).amax(1), logits.argmax(1) == targets
    error = expected_calibration_error(probability, correct)
    return [float(F.cross_entropy(logits, targets)), error, float(probability.mean()), float(correct.float().mean())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--draws", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    _, features, labels = compute_outputs(load(options.model), options.data, every=1, head=False)
    rng = torch.Generator().manual_seed(0)
    print("steps smoothing  n draws     T | loss, error, probability, accuracy with T = 1 | with the fitted T")
    for steps, smoothing in HEADS:
        draws = [draw_logits(features, labels, steps, smoothing, rng) for _ in range(options.draws)]
        for n in SIZES:
            rows = []
            for logits, targets in draws:
                if (logits[:n].argmax(1) == targets[:n]).all():
                    temperature = fit_temperature(logits[:n], targets[:n])
                    rest = logits[n:], targets[n:]
                    rows.append([temperature, *measure(*rest), *measure(rest[0] / temperature, rest[1])])
            means = [f"{statistics.mean(column):.3f}" for column in zip(*rows, strict=True)]
            print(f"{steps:5} {smoothing:9} {n:2} {len(rows):5} {' '.join(means)}")


if __name__ == "__main__":
    main()
