"""What masking patches adds to a training step: corruption, targets, head and loss, forward and backward.

    python bench/masking.py [--device cpu|cuda] [--model b16] [--batch N] [--rounds N]

Side by side in one process, the least of the rounds, since what disturbs only adds, of a ViT at 224 x 224 pixels:

    step     the same ViT learning 1,000 classes from the mean of its tokens, so that all of them are computed
    with     the same ViT masked: its step, and how much longer it is
    masking  masking by itself, on embeddings and tokens of the same shapes: corruption, targets, taking the tokens
    predict  head and loss by themselves
    drawn    what a worker takes to draw which patches are masked, beside the step

On the CPU it is the time of one thread, on a GPU the time of all kernels, in bf16 and recorded as training is. A class
token alone would let the last block compute one token; what predicting patches takes away of that is no cost of
masking, and is printed as "class token".
"""

import argparse
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail import presets
from vitrail.config import MaskedConfig, MaskedTarget, ViTConfig
from vitrail.data.batch_augment import draw_masked_patches
from vitrail.data.randomness import CounterRNG
from vitrail.model.initialize import initialize_weights
from vitrail.model.masked import MaskedViT, compute_masked_losses, corrupt_patches, gather_rows, initialize_masked_heads
from vitrail.model.vit import ViT
from vitrail.training.step import make_autocast

TARGETS: tuple[MaskedTarget, ...] = ("mean-color", "4x4-colors", "pixels")
Work = Callable[[], None]


def build_model(config: ViTConfig, device: torch.device) -> ViT:
    """A model with random weights."""
    return initialize_weights(ViT(config), torch.Generator().manual_seed(0)).to(device)


def build_supervised_step(config: ViTConfig, images: Tensor) -> Work:
    """A step of learning classes, without the optimizer's, which is the same for all."""
    model = build_model(config, images.device)
    classes = torch.arange(len(images), device=images.device) % config.classes

    def compute() -> None:
        with make_autocast(images.device):
            logits = model(images)
        torch.autograd.grad(nn.functional.cross_entropy(logits.float(), classes), list(model.parameters()))

    return compute


def build_masked_step(
    config: ViTConfig, target: MaskedTarget, images: Tensor, masking: Tensor
) -> tuple[MaskedViT, Work]:
    """The same step of a masked model; one image more, the partner, is embedded."""
    view = presets.build_preprocess_config("inception", config.image_size)
    how = MaskedConfig(kind="mpp", mask_ratio=0.5, target=target)
    model = MaskedViT(build_model(dataclasses.replace(config, classes=0), images.device), how, view).to(images.device)
    initialize_masked_heads(model, torch.Generator(images.device).manual_seed(0))

    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def compute() -> None:
        with make_autocast(images.device):
            predictions = model(images, masking)
        torch.autograd.grad(compute_masked_losses(predictions, model.compute_targets(images, masking)).mean(), learned)

    return model, compute


def build_masking_work(model: MaskedViT, images: Tensor, masking: Tensor) -> Work:
    """What masking patches adds by itself: its gradients reach embeddings, tokens and the [mask]."""
    width, patches, device = model.vit.config.width, masking.shape[-1], images.device
    pixels = torch.randn(len(images), patches, model.vit.patch_embed.proj.weight[0].numel(), device=device)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    embeddings = torch.randn(len(masking), patches, width, device=device, dtype=kind, requires_grad=True)
    tokens = torch.randn(len(masking), patches, width, device=device, requires_grad=True)
    gradients = torch.randn_like(embeddings), torch.randn(len(masking), model.num_masked, width, device=device)

    def compute() -> None:
        replaced = corrupt_patches(pixels, masking[:, 1], lambda _: embeddings, model.mask_token)
        read = gather_rows(tokens, masking[:, 0, : model.num_masked])
        model.compute_targets(images, masking)
        torch.autograd.grad((replaced, read), (embeddings, tokens, model.mask_token), gradients)

    return compute


def build_prediction_work(model: MaskedViT, images: Tensor, masking: Tensor) -> Work:
    """What the head and the loss add by themselves."""
    shape = (len(masking), model.num_masked, model.vit.config.width)
    read = torch.randn(shape, device=images.device, requires_grad=True)
    targets = model.compute_targets(images, masking)

    def compute() -> None:
        with make_autocast(images.device):
            predictions = model.head(read)
        torch.autograd.grad(compute_masked_losses(predictions, targets).mean(), (read, *model.head.parameters()))

    return compute


def record_cuda_graph(work: Work, pool: Any) -> Work:
    """The same on a GPU without the time that Python takes to launch it, which training does not take either.

    All recordings share their memory: one of them holds 20 GB.
    """
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph.replay


def measure_seconds(work: Work, device: torch.device) -> float:
    """Of one forward and backward pass."""
    if device.type != "cuda":
        start = time.process_time()
        work()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_works(works: dict[str, Work], rounds: int, device: torch.device) -> dict[str, float]:
    """Seconds of each, in turn: the least of the rounds, of which the first are slower."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(measure_seconds(work, device))
    return {name: min(values) for name, values in times.items()}


def print_table(least: dict[str, float], drawing: float) -> None:
    """Print the table."""
    step, single = least["step"], least["class token"]
    print(f"{'step':20} {1e3 * step:9.2f} ms")
    print(f"{'class token':20} {1e3 * single:9.2f} ms {single / step - 1:+8.2%}")
    for target in TARGETS:
        longer, parts = least[f"with {target}"], (least[f"{part} {target}"] for part in ("masking", "predict"))
        masking, predict = (f"{1e3 * part:7.2f} ms {part / step:6.2%}" for part in parts)
        print(f"{target:20} {1e3 * longer:9.2f} ms {longer / step - 1:+8.2%}   masking {masking}   predict {predict}")
    print(f"{'drawn by a worker':20} {1e3 * drawing:9.2f} ms {drawing / step:8.2%}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="b16")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    device = torch.device(options.device)
    batch = options.batch or (256 if device.type == "cuda" else 4)
    rounds = options.rounds or (30 if device.type == "cuda" else 7)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = presets.get_preset_config(options.model)
    if not isinstance(config, ViTConfig):
        raise SystemExit(f"{options.model} has no patches to mask")
    how = MaskedConfig(kind="mpp", mask_ratio=0.5, target="mean-color")
    drawing = math.inf
    for _ in range(rounds):
        start = time.process_time()
        places = draw_masked_patches(CounterRNG(0, np.arange(batch)), how, math.prod(config.grid))
        drawing = min(drawing, time.process_time() - start)
    masking = torch.from_numpy(places).to(device)
    images = torch.randint(0, 256, (batch + 1, 3, *config.image_size), device=device) / 127.5 - 1
    mean = dataclasses.replace(config, pool="norm-mean")
    works = {
        "step": build_supervised_step(mean, images[:-1]),
        "class token": build_supervised_step(config, images[:-1]),
    }
    for target in TARGETS:
        model, works[f"with {target}"] = build_masked_step(mean, target, images, masking)
        works[f"masking {target}"] = build_masking_work(model, images, masking)
        works[f"predict {target}"] = build_prediction_work(model, images, masking)
    if device.type == "cuda":
        pool = torch.cuda.graph_pool_handle()
        works = {name: record_cuda_graph(work, pool) for name, work in works.items()}
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, one thread"
    print(f"{options.model} at 224 x 224, {batch} images, {machine}, torch {torch.__version__}, {rounds} rounds")
    print_table(measure_works(works, rounds, device), drawing)


if __name__ == "__main__":
    main()
