"""What hiding patches adds to a training step: corruption, targets, head and loss, forward and backward.

    python bench/masking.py [--device cpu|cuda] [--model b16] [--batch N] [--rounds N]

Side by side in one process, the least of the rounds, since what disturbs only adds, of a ViT at 224 x 224 pixels:

    step     the same ViT learning 1,000 classes from the mean of its tokens, so that all of them are computed
    with     the same ViT masked: its step, and how much longer it is
    alone    the masking by itself on embeddings and tokens of the same shapes, as a share of the step
    drawn    what a worker takes to draw which patches are hidden, beside the step

On the CPU it is the time of one thread, on a GPU the time until all is computed, in bf16 as training is. A class token
alone would let the last block compute one token; what telling patches takes away of that is no cost of masking, and is
printed as "class token".
"""

import argparse
import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from vitrail import presets
from vitrail.config import Masked, Target, ViTConfig
from vitrail.data.draws import Draws
from vitrail.data.masking import drawn
from vitrail.model.initialise import initialise
from vitrail.model.masked import MaskedViT, corrupted, initialise_heads, losses, taken
from vitrail.model.vit import ViT
from vitrail.train.step import precision

TARGETS: tuple[Target, ...] = ("mean-colour", "4x4-colours", "pixels")
Work = Callable[[], Tensor]


def learner(config: ViTConfig, device: torch.device) -> ViT:
    """A model with random weights."""
    return initialise(ViT(config), torch.Generator().manual_seed(0)).to(device)


def supervised(config: ViTConfig, images: Tensor) -> tuple[nn.Module, Work]:
    """A step of learning classes, without the optimizer's, which is the same for all."""
    model = learner(config, images.device)
    classes = torch.arange(len(images), device=images.device) % config.classes

    def loss() -> Tensor:
        with precision(images.device):
            logits = model(images)
        return nn.functional.cross_entropy(logits.float(), classes)

    return model, loss


def masked(config: ViTConfig, target: Target, images: Tensor, hiding: Tensor) -> tuple[MaskedViT, Work]:
    """The same step of a masked model; one image more, the partner, is embedded."""
    view = presets.preprocess("inception", config.image_size)
    how = Masked(kind="mpp", share=0.5, target=target)
    model = MaskedViT(learner(dataclasses.replace(config, classes=0), images.device), how, view).to(images.device)
    initialise_heads(model, torch.Generator(images.device).manual_seed(0))

    def loss() -> Tensor:
        with precision(images.device):
            told = model(images, hiding)
        return losses(told, model.targets(images, hiding)).mean()

    return model, loss


def alone(model: MaskedViT, images: Tensor, hiding: Tensor) -> Work:
    """What masking adds by itself: its gradients reach embeddings, tokens, the [mask] and the head."""
    width, patches, device = model.vit.config.width, hiding.shape[-1], images.device
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    embeddings = torch.randn(len(images), patches, width, device=device, dtype=kind, requires_grad=True)
    tokens = torch.randn(len(hiding), patches, width, device=device, requires_grad=True)
    gradient = torch.randn(len(hiding), patches, width, device=device, dtype=kind)

    def loss() -> Tensor:
        replaced = corrupted(embeddings, hiding[:, 1], model.mask_token)
        with precision(device):
            told = model.head(taken(tokens, hiding[:, 0, : model.hidden]))
        total = losses(told, model.targets(images, hiding)).mean()
        replaced.backward(gradient)
        return total

    return loss


def seconds(work: Work, device: torch.device) -> float:
    """Of one forward and backward pass."""
    if device.type != "cuda":
        begun = time.process_time()
        work().backward()
        return time.process_time() - begun
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work().backward()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def measured(works: dict[str, Work], rounds: int, device: torch.device) -> dict[str, float]:
    """Seconds of each, in turn: the least of the rounds, of which the first are slower."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(seconds(work, device))
    return {name: min(values) for name, values in found.items()}


def report(least: dict[str, float], drawing: float) -> None:
    """Print the table."""
    step, single = least["step"], least["class token"]
    print(f"{'step':20} {1e3 * step:9.2f} ms")
    print(f"{'class token':20} {1e3 * single:9.2f} ms {single / step - 1:+8.2%}")
    for target in TARGETS:
        longer, itself = least[f"with {target}"], least[f"alone {target}"]
        print(f"{target:20} {1e3 * longer:9.2f} ms {longer / step - 1:+8.2%}", end="   ")
        print(f"alone {1e3 * itself:8.2f} ms {itself / step:7.2%}")
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
    config = presets.config(options.model)
    if not isinstance(config, ViTConfig):
        raise SystemExit(f"{options.model} has no patches to hide")
    how = Masked(kind="mpp", share=0.5, target="mean-colour")
    begun = time.process_time()
    hiding = torch.from_numpy(drawn(Draws(0, np.arange(batch)), how, math.prod(config.grid))).to(device)
    drawing = time.process_time() - begun
    images = torch.randint(0, 256, (batch + 1, 3, *config.image_size), device=device) / 127.5 - 1
    mean = dataclasses.replace(config, pool="norm-mean")
    works = {"step": supervised(mean, images[:-1])[1], "class token": supervised(config, images[:-1])[1]}
    for target in TARGETS:
        model, works[f"with {target}"] = masked(mean, target, images, hiding)
        works[f"alone {target}"] = alone(model, images, hiding)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, one thread"
    print(f"{options.model} at 224 x 224, {batch} images, {machine}, torch {torch.__version__}, {rounds} rounds")
    report(measured(works, rounds, device), drawing)


if __name__ == "__main__":
    main()
