"""The training loop: steps, and a function called after each. Saving and evaluating are the caller's."""

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
from vitrail.data.loader import Batch, BatchPlan, TrainingData
from vitrail.data.loader_workers import WORKER_EXIT_SECONDS, kill_all_workers
from vitrail.train.deadline import PlannedSteps
from vitrail.train.step import StepResult, TrainState, train_step
from vitrail.train.step_verification import StepVerification

T = TypeVar("T")
_PREFETCHED_BATCHES = 2  # micro-batches prepared ahead on a GPU


class StepEnd(NamedTuple):
    """The progress of a run after a step."""

    step: int
    """Steps done."""
    steps: int
    epoch: float
    result: StepResult
    seconds: float
    """Since the loop started."""


def train_steps(
    state: TrainState,
    batches: Iterator[Batch],
    training_data: TrainingData,
    plan: BatchPlan,
    recipe: Recipe,
    *,
    after_step: Callable[[StepEnd], None],
    planned_steps: PlannedSteps | None = None,
    verification: StepVerification | None = None,
) -> None:
    """Train from the state's step to the end of the plan; `batches` start with that step's first micro-batch.

    With `planned_steps` the run ends after as many steps as that says, which `after_step` may change; the plan must
    have enough.
    """
    planned_steps = PlannedSteps(plan.total_steps) if planned_steps is None else planned_steps
    device = next(state.model.parameters()).device
    prepared = _prepare_batches(batches, training_data, plan, state.step, device)
    start = time.perf_counter()
    with contextlib.closing(_prefetch(prepared) if device.type == "cuda" else prepared) as micro_batches:
        while state.step < planned_steps.get_total(state.step):
            step = state.step
            result = train_step(
                state,
                islice(micro_batches, plan.micro_batches),
                recipe,
                step_images=plan.get_step_size(step),
                steps=planned_steps.initial_steps,
                schedule_position=planned_steps.get_schedule_position(step),
                seed=training_data.seed,
                rank=plan.rank,
                verification=verification,
            )
            positions = step * plan.batch_size + plan.get_step_size(step)
            epoch = positions / training_data.order.num_samples
            after_step(
                StepEnd(state.step, planned_steps.get_total(state.step), epoch, result, time.perf_counter() - start)
            )


def _prepare_batches(
    batches: Iterator[Batch], training_data: TrainingData, plan: BatchPlan, start: int, device: torch.device
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """The micro-batches on the device, augmented and normalized for the model."""
    for number, batch in enumerate(batches):
        on_device = batch._replace(
            pixels=batch.pixels.to(device, non_blocking=True), targets=batch.targets.to(device, non_blocking=True)
        )
        yield loader.prepare_train_batch(on_device, training_data, plan, start + number // plan.micro_batches)


def _prefetch(items: Generator[T, None, None]) -> Generator[T, None, None]:
    """The same items, made by a thread: it works on the next step while a GPU computes this one."""
    ready: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(_PREFETCHED_BATCHES)
    closed = threading.Event()

    def put_entry(*entry: object) -> bool:
        while not closed.is_set():
            try:
                ready.put(entry, timeout=0.1)  # type: ignore[arg-type]
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for item in items:
                if not put_entry(True, item):
                    return
            put_entry(False, None)
        except BaseException as error:  # noqa: BLE001  # raised again by the consumer
            put_entry(False, error)
        finally:
            items.close()

    thread = threading.Thread(target=work, daemon=True, name="batches ahead")
    thread.start()
    try:
        while True:
            has_item, item = ready.get()
            if isinstance(item, BaseException):
                raise item
            if not has_item:
                return
            yield item  # type: ignore[misc]
    finally:
        closed.set()
        thread.join(WORKER_EXIT_SECONDS)
        if thread.is_alive():  # it waits for a worker that may never respond
            kill_all_workers()
            thread.join()
