"""The training loop: the batches that a run reads, its steps, and a function called after each."""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from vitrail.config import Recipe
from vitrail.data import loader
from vitrail.data.dataset import MAX_BAD_FRACTION, Split
from vitrail.data.loader import Batch, BatchPlan, TrainingData
from vitrail.data.loader_workers import WORKER_EXIT_SECONDS, kill_all_workers
from vitrail.errors import DataError
from vitrail.formatting import pluralize
from vitrail.runtime import distributed
from vitrail.runtime.distributed import SINGLE_PROCESS, ProcessGroup
from vitrail.training.step import StepResult, TrainableModel, TrainState, select_inputs, train_step
from vitrail.training.step_verification import StepVerification
from vitrail.training.training_run import TrainingRun

__all__ = ["StepEnd"]

UNREADABLE_FILE = "unreadable.txt"
"""The images that a run could not read and left out, one a line."""
_EVAL_BATCH_SIZE = 256
T = TypeVar("T")
_PREFETCHED_BATCHES = 2  # micro-batches prepared ahead on a GPU


class StepEnd(NamedTuple):
    """The progress of a run after a step.

    `on_step` gets one.

        vitrail.train("digits", data="digits", epochs=5, on_step=lambda end: print(end.step, end.result.loss))
    """

    step: int
    """Steps done."""
    steps: int
    epoch: float
    result: StepResult
    seconds: float
    """Since the loop started."""


@dataclasses.dataclass
class PlannedSteps:
    """How many steps a run takes: those of the first plan, until a decision changes them."""

    initial_steps: int
    decisions: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(step, steps): after `step` steps, `steps` in all are planned; in the order of the steps."""

    def get_total(self, step: int) -> int:
        """Steps in all, as planned after `step` of them."""
        return next((steps for at, steps in reversed(self.decisions) if at <= step), self.initial_steps)

    def get_schedule_position(self, step: int) -> float:
        """The position of a step in the first plan, which decides its learning rate: from 0 to `initial_steps`."""
        start, position, total = 0, 0.0, self.initial_steps
        for at, steps in self.decisions:
            if at > step:
                break
            position += (self.initial_steps - position) * (at - start) / (total - start)
            start, total = at, steps
        return position + (self.initial_steps - position) * (step - start) / (total - start)

    def set_total(self, step: int, steps: int) -> None:
        """Plan `steps` in all, after `step` steps."""
        if steps != self.get_total(step):
            self.decisions.append((step, steps))


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
                step_images=plan.get_batch_size(step),
                steps=planned_steps.initial_steps,
                schedule_position=planned_steps.get_schedule_position(step),
                seed=training_data.seed,
                rank=plan.rank,
                verification=verification,
            )
            positions = step * plan.batch_size + plan.get_batch_size(step)
            epoch = positions / training_data.order.num_samples
            after_step(
                StepEnd(state.step, planned_steps.get_total(state.step), epoch, result, time.perf_counter() - start)
            )


def _prepare_batches(
    batches: Iterator[Batch], training_data: TrainingData, plan: BatchPlan, start: int, device: torch.device
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """The micro-batches from step `start` on, prepared."""
    for number, batch in enumerate(batches):
        yield prepare_batch(batch, training_data, plan, start + number // plan.micro_batches, device)


def prepare_batch(
    batch: Batch, training_data: TrainingData, plan: BatchPlan, step: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A micro-batch of a step on the device, augmented and normalized for the model."""
    pixels, targets = (tensor.to(device, non_blocking=True) for tensor in (batch.pixels, batch.targets))
    return loader.prepare_train_batch(batch._replace(pixels=pixels, targets=targets), training_data, plan, step)


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


def iterate_train_batches(
    run: TrainingRun, start: int = 0, plan: BatchPlan | None = None
) -> Generator[Batch, None, None]:
    """The run's micro-batches: from images resident on the GPU where they are small, else from worker processes."""
    training, plan = run.training_data, plan or run.plan
    if run.device.type == "cuda":
        resident_images = loader.load_resident_images(
            training.split,
            channels=len(run.preprocess.mean),
            num_classes=training.num_classes,
            device=run.device,
            workers=run.workers,
            skip_bad=training.skip_bad,
        )
        if resident_images is not None:
            return loader.iter_resident_train_batches(training, plan, *resident_images, start_step=start)
    return loader.iter_train_batches(training, plan, start_step=start, workers=run.workers)


def iterate_split_batches(
    run: TrainingRun, split: str | Split, group: ProcessGroup = SINGLE_PROCESS
) -> Iterator[Batch]:
    """The images of a split, or a rank's share of them; for a masked run with their masks."""
    split = run.dataset.splits[split] if isinstance(split, str) else split
    return loader.iter_eval_batches(
        split,
        run.preprocess,
        batch_size=_EVAL_BATCH_SIZE,
        num_classes=len(run.dataset.classes),
        masked=run.recipe.masked,
        num_patches=run.num_patches,
        rank=group.rank,
        world_size=group.world_size,
        workers=run.workers,
        skip_bad=run.dataset.skip_bad,
    )


def pad_to_slowest_rank(model: TrainableModel, batches: Iterator[Batch], run: TrainingRun) -> Iterator[Batch]:
    """The batches, then blank forward passes for as long as another rank has batches left.

    Every forward pass of a sharded model needs all ranks, and their numbers of batches may differ.
    """
    for batch in batches:
        if len(batch.targets):  # an empty batch is not computed
            distributed.all_reduce_max(1, run.device)
            yield batch
    pixels = torch.zeros(1, len(run.preprocess.mean), *run.preprocess.size, device=run.device)
    masking = torch.zeros(1, 2, run.num_patches, dtype=torch.int64, device=run.device)
    while distributed.all_reduce_max(0, run.device):
        model(*select_inputs(model, pixels, masking))


@dataclasses.dataclass
class UnreadableImages:
    """The images that a run left out because they cannot be read, listed in its folder."""

    folder: Path
    total_images: int
    names: dict[str, None] = dataclasses.field(default_factory=dict)
    """In the order in which they were met."""

    def load(self) -> None:
        """Read the images that were left out before an interruption."""
        path = self.folder / UNREADABLE_FILE
        self.names = dict.fromkeys(path.read_text("utf-8").splitlines() if path.is_file() else ())

    def watch(self, batches: Iterator[Batch]) -> Generator[Batch, None, None]:
        """The batches; list the images left out of them, and raise a DataError when they are too many."""
        with contextlib.closing(batches) if isinstance(batches, Generator) else contextlib.nullcontext():
            for batch in batches:
                if batch.skipped_images:
                    self._add(batch.skipped_images)
                yield batch

    def _add(self, names: Iterable[str]) -> None:
        lines = (repr(name)[1:-1] if "\n" in name else name for name in names)
        new_names = [line for line in dict.fromkeys(lines) if line not in self.names]
        self.names |= dict.fromkeys(new_names)
        if new_names and self.folder.is_dir():  # on another machine than rank 0's it may not exist
            with (self.folder / UNREADABLE_FILE).open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(f"{line}\n" for line in new_names)
        if len(self.names) > MAX_BAD_FRACTION * self.total_images:
            raise DataError(
                f"{pluralize(len(self.names), 'image')} of {self.total_images:,} cannot be read, such as"
                f" {next(iter(self.names))}: more than {MAX_BAD_FRACTION:.0%} are too many"
            )
