"""One step of training: forward and backward over micro-batches, then one move of the weights.

Nothing here knows files, data sets or time. Dropout and stochastic depth draw from torch's generators, which are seeded
from (seed, step, rank, micro-batch) before each forward pass, so that no state is left over from the steps before.
"""

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from vitrail.config import Recipe
from vitrail.data import draws
from vitrail.errors import VitrailError
from vitrail.model.build import Model
from vitrail.train import ema, losses, optimizer, schedule

LOSSES = {"softmax": losses.softmax_cross_entropy, "sigmoid": losses.sigmoid_cross_entropy}


class DivergedError(VitrailError):
    """A loss or gradient that is no number: nothing was updated."""

    exit_code = 6


@dataclasses.dataclass
class State:
    """What training changes."""

    model: Model
    optimizer: Optimizer
    average: ema.Average | None
    step: int = 0
    """The next step."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a step showed."""

    loss: float
    """Of an image on average, of this rank's share of the step."""
    images: int
    norm: float
    """Of all gradients together, before clipping."""
    lr: float


def begin(model: Model, recipe: Recipe) -> State:
    """The state before the first step."""
    average = ema.Average(model) if recipe.ema else None
    return State(model, optimizer.build(model, recipe.optimiser), average)


def advance(
    state: State,
    parts: Iterable[tuple[Tensor, Tensor]],
    recipe: Recipe,
    *,
    size: int,
    steps: int,
    seed: int,
    rank: int = 0,
) -> Outcome:
    """Compute the step's micro-batches, (images, targets) each, and move the weights by their gradient.

    `size` counts the step's images over all ranks: gradients are of the mean over them, however they are divided.
    """
    state.model.train()
    state.optimizer.zero_grad(set_to_none=True)
    total, images = torch.zeros(()), 0
    for number, (pixels, targets) in enumerate(parts):
        if not len(pixels):
            continue
        torch.manual_seed(draws.key(seed, f"dropout {state.step} {rank} {number}") >> 1)
        loss = LOSSES[recipe.loss](_logits(state.model, pixels), targets, recipe.label_smoothing)
        (loss / size).backward()
        total, images = total.to(loss.device) + loss.detach(), images + len(pixels)
    norm = optimizer.clip(state.model.parameters(), recipe.optimiser.clip)
    found = Outcome(float(total) / max(images, 1), images, float(norm), _set_lr(state, recipe, steps))
    if not (abs(found.loss) < float("inf") and found.norm < float("inf")):
        raise DivergedError(
            f"step {state.step}: the loss is {found.loss} and the gradient's norm {found.norm}; nothing was updated."
            f" Try a lower learning rate than {recipe.optimiser.lr}, or a longer warm-up"
        )
    state.optimizer.step()
    state.step += 1
    if state.average is not None:
        state.average.update(ema.warmed(recipe.ema, state.step))
    return found


def _logits(model: Model, pixels: Tensor) -> Tensor:
    """The forward pass: in bf16 on a GPU, whose weights stay float32; in float32 elsewhere."""
    with torch.autocast(pixels.device.type, torch.bfloat16, enabled=pixels.device.type == "cuda"):
        return model(pixels)


def _set_lr(state: State, recipe: Recipe, steps: int) -> float:
    share = schedule.share(recipe.schedule, state.step, steps)
    optimizer.set_lr(state.optimizer, share)
    return share * recipe.optimiser.lr
