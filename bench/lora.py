"""Fine-tuning with LoRA beside fine-tuning of all layers: images a second, peak memory, bytes of a checkpoint.

    python bench/lora.py [--model l16] [--batch 64] [--rank 16] [--device cuda] [--rounds 7] [--json FILE]

Each row trains the same model on the same images on the device, by the trainer's own step: bf16 on a GPU, clipping at
1, fused AdamW, there a replayed CUDA graph, and with --compile compiled blocks. Rows are measured one after the other,
so that the memory of one is free before the next; the speed is the median over rounds of a few steps. Memory is the
peak of what torch allocated on the GPU, weights included; a CPU has no such counter. On a CPU the default is a tiny
model: that shows that the bench works, not what is fast.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import vitrail
from vitrail.config import LoRAConfig, OptimizerConfig, Recipe, ScheduleConfig
from vitrail.model import lora
from vitrail.training.checkpoint import estimate_size
from vitrail.training.step import TrainState, build_train_state, train_step

CLASSES, STEPS = 100, 5
TINY = {"image_size": 32, "depth": 2}


def build_recipe(batch: int, config: LoRAConfig | None) -> Recipe:
    """A recipe of which only the step matters."""
    return Recipe(
        model=None,
        batch=batch,
        epochs=1,
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.05, clip=1.0),
        schedule=ScheduleConfig(),
        lora=config,
        source="bench/lora.py",
    )


def build_state(arguments: argparse.Namespace, recipe: Recipe) -> TrainState:
    """The state before the first step, on the device."""
    settings: dict[str, Any] = TINY if arguments.device == "cpu" else {}
    model = vitrail.create(arguments.model, num_classes=CLASSES, **settings)
    if recipe.lora is not None:
        lora.add_lora(model, recipe.lora, torch.Generator().manual_seed(0))
    model = model.to(arguments.device)
    if arguments.compile:
        model.compile_blocks()
    return build_train_state(model, recipe, cuda_graph=arguments.device == "cuda")


def measure(arguments: argparse.Namespace, config: LoRAConfig | None) -> dict[str, Any]:
    """The numbers of a row."""
    is_cuda = arguments.device == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    recipe = build_recipe(arguments.batch, config)
    state = build_state(arguments, recipe)
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(arguments.batch, 3, *state.model.config.image_size, generator=generator).to(arguments.device)
    targets = torch.randint(CLASSES, (arguments.batch,), generator=generator).to(arguments.device)

    def run_steps() -> float:
        start = time.perf_counter()
        for _ in range(STEPS):  # each waits for its loss
            train_step(state, [(pixels, targets)], recipe, step_images=arguments.batch, steps=10**6, seed=0)
        return STEPS * arguments.batch / (time.perf_counter() - start)

    run_steps()  # compilation, and the steps before a CUDA graph is recorded
    rates = [run_steps() for _ in range(arguments.rounds)]
    return {
        "images_per_second": statistics.median(rates),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None,
        "trained_parameters": sum(each.numel() for each in state.model.parameters() if each.requires_grad),
        "checkpoint_mib": estimate_size(state)[0] / 2**20,
    }


def main() -> None:
    """Measure all rows and print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--model")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.model = arguments.model or ("ti16" if arguments.device == "cpu" else "l16")
    arguments.batch = arguments.batch or (4 if arguments.device == "cpu" else 64)
    rank = arguments.rank
    contenders = {
        "all layers": None,
        "LoRA, qkv": LoRAConfig(rank=rank),
        "LoRA, all": LoRAConfig(rank=rank, layers="all"),
        "DoRA, qkv": LoRAConfig(rank=rank, dora=True),
    }
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(f"{arguments.model}, batch {arguments.batch}, rank {rank}, {device}, torch {torch.__version__}")
    print(f"{'':12}{'images/s':>10}{'peak GiB':>10}{'trained':>14}{'checkpoint MiB':>16}")
    rows = []
    for name, config in contenders.items():
        row = measure(arguments, config)
        rows.append({"contender": name, **row})
        peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
        numbers = f"{row['trained_parameters']:>14,}{row['checkpoint_mib']:>16.1f}"
        print(f"{name:12}{row['images_per_second']:>10.1f}{peak:>10}{numbers}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
