"""Resolutions and heads of a short fine-tuning at equal cost, on images held out of train.

    python bench/short_runs.py MODEL DATA... --log runs.jsonl [--images 600 2700] [--sides 144 176 224] [--seeds 0 1]

Each DATA has the splits train and val. A budget is so many training images of the model's own side: smaller images cost
less, so there are more of them (by FLOPs); the features of a probe cost a third of an epoch. Accuracy on val after the
last step, nothing is chosen by it. A line of the log for each run; one that is there is not done again.
"""

import argparse
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import torch

from vitrail import recipes
from vitrail.config import ViTConfig
from vitrail.data.sources import open_dataset
from vitrail.evaluation.predictions import evaluate_batches
from vitrail.model.cost import count_training_flops
from vitrail.training import loop
from vitrail.training.head_init import fit_head
from vitrail.training.loop import iterate_split_batches, iterate_train_batches
from vitrail.training.step import build_train_state, make_autocast
from vitrail.training.training_run import TrainingRun, adapt_to_dataset
from vitrail.weights.load import load
from vitrail.weights.trained import Trained

MOST_EPOCHS = 100


def train(model: Trained, case: dict[str, Any], device: torch.device, workers: int) -> dict[str, Any]:
    """One run: its epochs and accuracy."""
    dataset = open_dataset(case["data"])
    assert isinstance(model.model.config, ViTConfig)
    images = len(dataset.splits["train"])

    def build(epochs: float) -> TrainingRun:
        recipe = recipes.build_finetune_recipe("default", images, model.model.config.stride, epochs=epochs)  # type: ignore[union-attr]
        recipe = dataclasses.replace(
            recipe, image_size=case["side"], head_init="probe" if case["head"] == "probe" else None
        )
        start = adapt_to_dataset(model, dataset, recipe)
        return TrainingRun(
            recipe=recipe, dataset=dataset, initial_model=start, seed=case["seed"], device=device, workers=workers
        )

    task = build(1.0)
    cost = count_training_flops(task.config, 1) / count_training_flops(model.model.config, 1)
    total = case["images"] / cost - (images / 3 if case["head"] == "probe" else 0)
    steps = int(min(total, MOST_EPOCHS * images) // task.recipe.batch)
    task = build(max(steps, 1) * task.recipe.batch / images)
    if case["head"] == "probe":
        task = fit_head(task)
    state = build_train_state(task.build_model(), task.recipe, task.class_counts, cuda_graph=task.can_use_cuda_graph)
    batches = iterate_train_batches(task)
    if steps:
        loop.train_steps(state, batches, task.training_data, task.plan, task.recipe, after_step=lambda _: None)
    batches.close()
    with torch.inference_mode(), make_autocast(device):
        counts = evaluate_batches(state.model.eval(), iterate_split_batches(task, "val"), task.preprocess)  # type: ignore[arg-type]
    return {"epochs": task.recipe.epochs if steps else 0.0, "top1": counts.top1, "n": counts.images}


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", nargs="+")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--images", type=int, nargs="+", default=[600, 2700, 10500])
    parser.add_argument("--sides", type=int, nargs="+", default=[144, 176, 224])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    model = load(options.model)
    done = [json.loads(line) for line in options.log.read_text().splitlines()] if options.log.exists() else []
    for seed, images, data, side, head in itertools.product(
        options.seeds, options.images, options.data, options.sides, ("zero", "probe")
    ):
        case = {"data": data, "images": images, "side": side, "head": head, "seed": seed}
        result = next((run for run in done if case.items() <= run.items()), None)
        if result is None:
            result = case | train(model, case, torch.device(options.device), options.workers)
            with options.log.open("a") as file:
                file.write(json.dumps(result) + "\n")
        what = f"{Path(data).name:16} {images:6} images {side:4} {head:5} seed {seed}"
        print(f"{what}: {result['epochs']:5.1f} epochs, {result['top1']:.1%} of {result['n']}", flush=True)


if __name__ == "__main__":
    main()
