"""The memory that `vitrail plan` predicts against what torch reports, for steps of real training on a GPU.

    python bench/memory.py [b16:256 l16:128 h14:64 b16:256:recompute r50-b16:128 bit-r50x1:128]

A name is PRESET:IMAGES[:recompute]. Three steps of AdamW on random images of 224 pixels; goal: within 10 %.
"""

import argparse
import json
import subprocess
import sys

import torch

from vitrail.config import OptimizerConfig, Recipe, ScheduleConfig
from vitrail.model.vit import ViT
from vitrail.training.step import build_train_state, train_step
from vitrail.weights.trained import create_random

MODELS = ("s16:512", "b16:256", "b16:256:recompute", "l16:128", "h14:64", "r50-b16:128", "bit-r50x1:128")
SIZE, CLASSES, STEPS = 224, 1000, 3


def predict_memory(preset: str, images: int, *, recompute: bool) -> int:
    """The bytes that the command predicts."""
    command = [sys.executable, "-m", "vitrail", "plan", preset, "--gpu", "h200", "--batch", str(images), "--json"]
    command += ["--steps", "100", "--data-images", "1000", *(["--recompute"] if recompute else [])]
    plan = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return int(plan["memory"]["whole"]["total"])


def measure_memory(preset: str, images: int, *, recompute: bool) -> int:
    """The most that torch had allocated."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    recipe = Recipe(
        model=preset,
        image_size=SIZE,
        batch=images,
        epochs=1.0,
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.1, clip=1.0),
        schedule=ScheduleConfig(),
        source="bench",
    )
    model = create_random(preset, image_size=SIZE, num_classes=CLASSES).model.cuda()
    if isinstance(model, ViT):
        model.recompute = recompute
    state = build_train_state(model, recipe)
    batch = (torch.rand(images, 3, SIZE, SIZE, device="cuda"), torch.randint(0, CLASSES, (images,), device="cuda"))
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        train_step(state, [batch], recipe, step_images=images, steps=100, seed=0)
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU: there is nothing to compare the plan with")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in parser.parse_args().models:
        preset, images, *rest = name.split(":")
        recompute = rest == ["recompute"]
        plan, used = (f(preset, int(images), recompute=recompute) for f in (predict_memory, measure_memory))
        print(f"{name:20} predicted {plan / 1e9:6.2f} GB  measured {used / 1e9:6.2f} GB  {plan / used - 1:+.1%}")


if __name__ == "__main__":
    main()
