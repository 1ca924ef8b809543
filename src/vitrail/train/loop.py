"""Steps, one after the other, and what is called between them. Saving, drawing and evaluating come in as functions."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from vitrail.config import Recipe
from vitrail.data import loader
from vitrail.data.loader import Batch, Plan, Training
from vitrail.train.step import Outcome, State, advance


class Moment(NamedTuple):
    """Where a run stands after a step."""

    step: int
    """Steps done."""
    steps: int
    epoch: float
    outcome: Outcome
    seconds: float
    """Since the loop began."""


def run(
    state: State,
    training: Training,
    plan: Plan,
    recipe: Recipe,
    *,
    workers: int = 0,
    after_step: Callable[[Moment], None],
) -> None:
    """Train from the state's step to the end of the plan."""
    device = next(state.model.parameters()).device
    batches = loader.training_batches(training, plan, start=state.step, workers=workers)
    begun = time.perf_counter()
    while state.step < plan.steps:
        step = state.step
        parts = _parts(batches, training, plan, step, device)
        outcome = advance(
            state, parts, recipe, size=plan.size(step), steps=plan.steps, seed=training.seed, rank=plan.rank
        )
        done = step * plan.batch + plan.size(step)
        epoch = done / training.order.count
        after_step(Moment(state.step, plan.steps, epoch, outcome, time.perf_counter() - begun))


def _parts(
    batches: Iterator[Batch], training: Training, plan: Plan, step: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This step's micro-batches, on the device."""
    for _ in range(plan.micro_batches):
        batch = next(batches)
        there = batch._replace(
            pixels=batch.pixels.to(device, non_blocking=True), targets=batch.targets.to(device, non_blocking=True)
        )
        yield loader.prepared(there, training, plan, step)
