"""Steps, one after the other, and what is called between them. Saving, drawing and evaluating come in as functions."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from vitrail.config import Recipe
from vitrail.data import loader
from vitrail.data.loader import Batch, Plan, Training
from vitrail.data.loader_workers import DEADLINE, kill_all_workers
from vitrail.train.deadline import PlannedSteps
from vitrail.train.step import Outcome, State, advance
from vitrail.train.verification import Verification

T = TypeVar("T")
_AHEAD = 2  # micro-batches that wait on a GPU


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
    batches: Iterator[Batch],
    training: Training,
    plan: Plan,
    recipe: Recipe,
    *,
    after_step: Callable[[Moment], None],
    planned: PlannedSteps | None = None,
    verification: Verification | None = None,
) -> None:
    """Train from the state's step to the end of the plan; `batches` begin with that step's first micro-batch.

    With `planned` the run ends after as many steps as that says, which `after_step` may change; the plan has enough.
    """
    planned = PlannedSteps(plan.steps) if planned is None else planned
    device = next(state.model.parameters()).device
    prepared = _prepared(batches, training, plan, state.step, device)
    begun = time.perf_counter()
    with contextlib.closing(_ahead(prepared) if device.type == "cuda" else prepared) as parts:
        while state.step < planned.total(state.step):
            step = state.step
            mine = islice(parts, plan.micro_batches)
            outcome = advance(
                state,
                mine,
                recipe,
                size=plan.size(step),
                steps=planned.first,
                position=planned.position(step),
                seed=training.seed,
                rank=plan.rank,
                verification=verification,
            )
            done = step * plan.batch + plan.size(step)
            epoch = done / training.order.count
            after_step(Moment(state.step, planned.total(state.step), epoch, outcome, time.perf_counter() - begun))


def _prepared(
    batches: Iterator[Batch], training: Training, plan: Plan, start: int, device: torch.device
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Micro-batches on the device, as the model takes them."""
    for number, batch in enumerate(batches):
        there = batch._replace(
            pixels=batch.pixels.to(device, non_blocking=True), targets=batch.targets.to(device, non_blocking=True)
        )
        yield loader.prepared(there, training, plan, start + number // plan.micro_batches)


def _ahead(items: Generator[T, None, None]) -> Generator[T, None, None]:
    """The same items, made by a thread: its work for the next step is done while a GPU computes this one."""
    made: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(_AHEAD)
    left = threading.Event()

    def put(*entry: object) -> bool:
        while not left.is_set():
            try:
                made.put(entry, timeout=0.1)  # type: ignore[arg-type]
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(True, item):
                    return
            put(False, None)
        except BaseException as error:  # noqa: BLE001  # raised again where the item is taken
            put(False, error)
        finally:
            items.close()

    thread = threading.Thread(target=work, daemon=True, name="batches ahead")
    thread.start()
    try:
        while True:
            there, item = made.get()
            if isinstance(item, BaseException):
                raise item
            if not there:
                return
            yield item  # type: ignore[misc]
    finally:
        left.set()
        thread.join(DEADLINE)
        if thread.is_alive():  # it waits for a worker that may never answer
            kill_all_workers()
            thread.join()
