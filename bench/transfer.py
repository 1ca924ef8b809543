"""Accuracy on other datasets from a few images a class: probes of models, pixels, fine-tuning, and random weights.

    python bench/transfer.py probe --data flowers102 cifar10 --shots 10 100 --models builtin [--draws 5]
    python bench/transfer.py finetune --data flowers102 cifar10 --shots 10 --models builtin [--draws 3] [--epochs 10]

DATA is a folder with train/CLASS and test/CLASS. `probe` fits ridge regressions to a model's features, and to the
pixels of its inputs, as the rows to beat. Each draw is of other training images, the penalty is chosen on a fifth of
train, and test is measured. `finetune` trains each model by the default recipe, and the same network from random
weights by that of the built-in model without its teacher, for as many epochs on the same draws. `--test-images` limits
the test images, the same ones for all.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import vitrail
from vitrail.data.dataset import Split
from vitrail.data.loader import iter_eval_batches
from vitrail.data.randomness import sample_indices
from vitrail.data.sources import open_dataset
from vitrail.evaluation.features import extract_split_features, read_labels
from vitrail.evaluation.linear_classifiers import Features
from vitrail.evaluation.probe import sample_shots, score_few_shot, split_features
from vitrail.runtime.distributed import SINGLE_PROCESS
from vitrail.weights.trained import Trained, require_preprocess


def open_splits(folder: Path, test_images: int | None) -> tuple[dict[str, Split], tuple[str, ...]]:
    """All training images, and the test images or some of them."""
    dataset = open_dataset(str(folder))
    train = dataset.splits["train"]
    if "val" in dataset.splits:
        train = train.merge(dataset.splits["val"])
    test = dataset.splits["test"]
    if test_images is not None and test_images < len(test):
        kept = set(sample_indices(test_images, len(test), "test images").tolist())
        test = test.drop_images([index for index in range(len(test)) if index not in kept])
    return {"train": train, "test": test}, dataset.classes


def compute_features(trained: Trained, split: Split) -> Features:
    """The model's features of all images."""
    preprocess = require_preprocess(trained)
    values = extract_split_features(trained.model, split, preprocess, SINGLE_PROCESS, batch=128, workers=0)
    return Features(values, read_labels(split))


def read_pixels(trained: Trained, split: Split) -> Features:
    """The pixels of the model's inputs, from 0 to 1."""
    batches = iter_eval_batches(split, require_preprocess(trained), batch_size=256, num_classes=0)
    return Features(torch.cat([batch.pixels.flatten(1).float() / 255 for batch in batches]), read_labels(split))


def summarize(correct: list[int], images: int) -> dict[str, Any]:
    """The mean accuracy and its deviation over draws."""
    accuracies = [number / images for number in correct]
    deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else None
    return {"top1": statistics.mean(accuracies), "std": deviation, "draws": len(correct), "test_images": images}


def measure_probes(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each dataset, number of images and contender."""
    rows = []
    models = {name: vitrail.load(name) for name in arguments.models}
    for folder in arguments.data:
        splits, classes = open_splits(folder, arguments.test_images)
        first = next(iter(models.values()))
        contenders = {"pixels": {name: read_pixels(first, split) for name, split in splits.items()}}
        for name, trained in models.items():
            contenders[name] = {part: compute_features(trained, split) for part, split in splits.items()}
        for name, features in contenders.items():
            probe_splits = split_features(features)
            most = int(features["train"].targets.bincount().min())
            for shots in (number for number in arguments.shots if number <= most):
                score = score_few_shot(probe_splits, classes, shots, seeds=arguments.draws, penalty=None)
                rows.append({"data": folder.name, "shots": shots, "contender": f"probe of {name}"})
                rows[-1] |= summarize(list(score.correct), score.test_images)
                print_row(rows[-1])
    return rows


def measure_finetuning(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each dataset, number of images and contender."""
    rows = []
    for folder in arguments.data:
        splits, classes = open_splits(folder, arguments.test_images)
        samples = {name: list_samples(split, classes) for name, split in splits.items()}
        targets = read_labels(splits["train"])
        most = int(targets.bincount().min())
        for shots in (number for number in arguments.shots if number <= most):
            for name in [*arguments.models, "random weights"]:
                correct, images = [], 0
                for seed in range(arguments.draws):
                    chosen = sample_shots(targets, classes, shots, seed).tolist()
                    data = {"train": [samples["train"][index] for index in chosen], "test": samples["test"]}
                    evaluated = train_model(data, name, arguments, seed)
                    images = evaluated["images"]
                    correct.append(evaluated["correct"])
                rows.append({"data": folder.name, "shots": shots, "contender": f"training of {name}"})
                rows[-1] |= summarize(correct, images)
                print_row(rows[-1])
    return rows


def list_samples(split: Split, classes: tuple[str, ...]) -> list[tuple[str, str]]:
    """The path and the class of each image."""
    labels = read_labels(split).tolist()
    return [(str(split.read_image(index)), classes[label]) for index, label in enumerate(labels)]


def train_model(data: Any, name: str, arguments: argparse.Namespace, seed: int) -> dict[str, int]:
    """The test images, and how many of them a trained model has right."""
    options: dict[str, Any] = {"seed": seed, "progress": False, "notify": lambda _: None}
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/run"
        if name == "random weights":
            recipe = vitrail.load_recipe("builtin")
            recipe = dataclasses.replace(recipe, distillation=None, batch=64, epochs=arguments.epochs, ema=0.99)
            run = vitrail.train(recipe, data, out=out, **options)
        else:
            run = vitrail.finetune(data, name, epochs=arguments.epochs, out=out, **options)
        test = run.metrics
        return {"images": test["images"], "correct": test["correct"]}


def print_row(row: dict[str, Any]) -> None:
    """Print a row, as soon as it is known."""
    deviation = "" if row["std"] is None else f" ± {row['std']:.1%}"
    print(f"{row['data']:16} {row['shots']:>4} a class  {row['contender']:40} {row['top1']:.1%}{deviation}", flush=True)


def main() -> None:
    """Measure all rows and print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("probe", "finetune"))
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--models", nargs="+", default=["builtin"])
    parser.add_argument("--shots", type=int, nargs="+", default=[10])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--test-images", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure_probes(arguments) if arguments.kind == "probe" else measure_finetuning(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
