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
from pathlib import Path
from typing import Any

import torch

import vitrail
from vitrail import recipes
from vitrail.data.dataset import Split
from vitrail.data.loader import iter_eval_batches
from vitrail.data.memory import build_memory_dataset
from vitrail.data.randomness import sample_indices
from vitrail.data.sources import open_dataset
from vitrail.evaluation.features import extract_split_features, read_labels
from vitrail.evaluation.linear_classifiers import Features
from vitrail.evaluation.predictions import Counts, evaluate_batches
from vitrail.evaluation.probe import sample_shots, score_few_shot, split_features
from vitrail.model.vit import ViT
from vitrail.runtime.distributed import SINGLE_PROCESS
from vitrail.training.loop import iterate_train_batches, train_steps
from vitrail.training.training_run import TrainingRun, adapt_to_dataset
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
        contenders = (
            {}
            if arguments.no_pixels
            else {"pixels": {name: read_pixels(first, split) for name, split in splits.items()}}
        )
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
                    counts = train_model(data, name, arguments, seed)
                    images = counts.images
                    correct.append(counts.correct)
                rows.append({"data": folder.name, "shots": shots, "contender": f"training of {name}"})
                rows[-1] |= summarize(correct, images)
                print_row(rows[-1])
    return rows


def list_samples(split: Split, classes: tuple[str, ...]) -> list[tuple[str, str]]:
    """The path and the class of each image."""
    labels = read_labels(split).tolist()
    return [(str(split.read_image(index)), classes[label]) for index, label in enumerate(labels)]


def train_model(data: dict[str, Any], name: str, arguments: argparse.Namespace, seed: int) -> Counts:
    """What the last weights of a run get right on test: the trainer's steps, without files and validation."""
    dataset = build_memory_dataset(data | {"val": data["train"]})
    images = len(data["train"])
    initial = None
    if name == "random weights":
        recipe = vitrail.load_recipe("builtin")
        schedule = dataclasses.replace(recipe.schedule, warmup=2)
        changes = {"batch": 64, "epochs": arguments.epochs, "schedule": schedule, "ema": 0.0}
        recipe = dataclasses.replace(recipe, distillation=None, **changes)
    else:
        recipe = recipes.build_finetune_recipe("default", images, 8, epochs=arguments.epochs)
        initial = adapt_to_dataset(vitrail.load(name), dataset, recipe)
    device = torch.device(arguments.device)
    run = TrainingRun(recipe=recipe, dataset=dataset, initial_model=initial, seed=seed, device=device)
    state = run.build_state()
    batches = iterate_train_batches(run)
    train_steps(state, batches, run.training_data, run.plan, recipe, after_step=lambda _: None)
    test = iter_eval_batches(dataset.splits["test"], run.preprocess, batch_size=128, num_classes=len(dataset.classes))
    model = state.model
    assert isinstance(model, ViT)
    return evaluate_batches(model, test, run.preprocess)


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
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-pixels", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure_probes(arguments) if arguments.kind == "probe" else measure_finetuning(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
