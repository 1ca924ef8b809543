"""How long a run takes: estimated by timing a few images, and kept to where it must end on time.

A run with a time limit plans its number of steps again as it goes, from the time of a step and the time left.
`loop.PlannedSteps` computes, and only `Deadline` reads the clock. The weights that a trial updates are thrown away.
"""

import contextlib
import dataclasses
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from vitrail import files
from vitrail.config import Recipe
from vitrail.data.loader import Batch
from vitrail.model.cost import count_training_flops
from vitrail.model.masked import get_encoder
from vitrail.runtime import distributed
from vitrail.runtime.devices import get_device_memory
from vitrail.training.fsdp import to_local
from vitrail.training.loop import iterate_train_batches, prepare_batch
from vitrail.training.step import TrainableModel, TrainState, make_autocast, select_inputs, train_step
from vitrail.training.training_run import TrainingRun
from vitrail.weights import tensor_files

_TRIAL_FLOPS = {"cpu": 1e11, "cuda": 2e14, "mps": 2e13}  # of a trial step: seconds on a CPU, less on a GPU
_MAX_TRIAL_IMAGES = 512
_MAX_TRIAL_SECONDS = 4.0  # of timing, at most
_MAX_TRIAL_SHARE = 0.02  # of a time limit, at most
_UNTIMED_STEPS = {"cpu": 1, "cuda": 4}  # steps that are not timed: slower on a GPU, or prepared before
_REPORT_WRITING_SECONDS = 4.0  # seconds of drawing, writing and importing at a run's end, on an idle core
_REPORT_FORWARD_IMAGES = 300  # the report's figures cost about as much as this many forward passes
_RECENT_SHARE = 0.05  # share of the budget over which the speed of the last steps is averaged
_MIN_RECENT_STEPS = 2  # at least
_HYSTERESIS = 0.1  # a new plan differs by this share of the steps left from the one before
_END_MARGIN = 1.5  # times the time after the last step is reserved: it cannot be shortened if the machine gets busy
_RESERVE_SHARE = 0.03  # of the budget: to end a little early is fine, to end late is not
_FORWARD_COST = 1 / 3  # of a training image's time is that of a forward pass, until one is timed
MAX_PRECISION_SECONDS = 30.0  # of comparing precisions, at most: enough for a hundred images of a ViT-B/16
_MIN_PRECISION_SECONDS = 1.0  # less shows nothing
MAX_PRECISION_SHARE = 0.05  # of the seconds of training, at most


@dataclasses.dataclass
class Deadline:
    """The time that a whole command may take, and how many steps fit into what is left of it."""

    budget_seconds: float
    """From `start_time` until the report is written."""
    max_steps: int
    """More would not help."""
    seconds_per_image: float
    """Of a training image; from a trial until steps are timed."""
    batch_size: int
    train_images: int
    val_images: int
    test_images: int
    """Images that the result is measured on; 0 where it is measured on val."""
    eval_every_epochs: int
    """Epochs from one evaluation to the next."""
    world_size: int = 1
    """Ranks that train together."""
    start_time: float = dataclasses.field(default_factory=time.monotonic)
    clock: Callable[[], float] = time.monotonic

    _step_seconds: list[float] = dataclasses.field(default_factory=list)
    """Seconds of each step."""
    _step_start: float | None = None
    """When the step that is timed began."""
    _uncached_eval_cost: float = _FORWARD_COST
    """The cost of evaluating an image that must be decoded, in training images."""
    _cached_eval_cost: float | None = None
    """The same for an image in memory, as the validation images are after the first time."""

    @property
    def elapsed(self) -> float:
        """Seconds since the command started, the time before an interruption included."""
        return self.clock() - self.start_time

    @property
    def seconds_left(self) -> float:
        """Seconds until everything must be done."""
        return self.budget_seconds * (1 - _RESERVE_SHARE) - self.elapsed

    def scale_image_cost(self, cost: float) -> "Deadline":
        """The deadline of a run whose images cost `cost` times as much."""
        return dataclasses.replace(self, seconds_per_image=self.seconds_per_image * cost)

    def resume(self, elapsed: float) -> None:
        """Count the seconds before an interruption, too."""
        self.start_time -= elapsed

    def begin_step(self) -> None:
        """Start timing a step."""
        self._step_start = self.clock()

    def end_step(self) -> None:
        """Record the time of the step."""
        if self._step_start is None:
            return
        self._step_seconds.append(self.clock() - self._step_start)
        if len(self._step_seconds) == 1:  # it may have waited for the workers to start
            self.seconds_per_image = min(self.seconds_per_image, self._step_seconds[0] / self.batch_size)
            return
        recent: list[float] = []
        for seconds in reversed(self._step_seconds[1:]):
            recent.append(seconds)
            if len(recent) >= _MIN_RECENT_STEPS and sum(recent) >= _RECENT_SHARE * self.budget_seconds:
                break
        self.seconds_per_image = max(sum(recent) / len(recent) / self.batch_size, 1e-9)

    def end_evaluation(self, seconds: float) -> None:
        """Record the time of evaluating the validation images; the first time includes decoding."""
        cost = seconds / max(self.val_images, 1) / self.seconds_per_image
        if self._cached_eval_cost is None:
            self._uncached_eval_cost = min(cost, 1.0)  # of few images it is mostly the start of the workers
        self._cached_eval_cost = cost

    def fit_steps(self, step: int) -> int:
        """The steps in all that fit, after `step` of them, with evaluations and everything after the last step."""
        evaluations = min(1.0, self.batch_size / (self.eval_every_epochs * self.train_images))  # of a step
        seconds = self.seconds_per_image * (self.batch_size + self._val_cost * evaluations)
        after = _END_MARGIN * self.estimate_seconds_after(is_evaluated=False) + min(
            MAX_PRECISION_SECONDS, MAX_PRECISION_SHARE * self.budget_seconds
        )
        return min(step + max(0, int((self.seconds_left - after) / seconds)), self.max_steps)

    def replan(self, step: int, steps: int) -> int:
        """The steps in all, after `step` of them; those planned before where they would change little.

        A run at its last step is not prolonged: its learning rate has reached its end, too.
        """
        if step >= steps:
            return steps
        fitting = self.fit_steps(step)
        change = abs(fitting - steps)
        return fitting if change >= max(1, _HYSTERESIS * (steps - step)) or fitting == step else steps

    @property
    def _val_cost(self) -> float:
        """The cost of evaluating the validation images, in training images."""
        return (
            self._uncached_eval_cost if self._cached_eval_cost is None else self._cached_eval_cost
        ) * self.val_images

    def estimate_seconds_after(self, *, is_evaluated: bool) -> float:
        """Seconds after the last step: test, report, and unless `is_evaluated` the last evaluation and temperature.

        All ranks evaluate together; rank 0 does the rest alone.
        """
        alone = self._uncached_eval_cost * self.test_images if self.test_images else self._val_cost
        images = (
            self.world_size * alone if is_evaluated else self._val_cost + self.world_size * (self._val_cost + alone)
        )
        return _REPORT_WRITING_SECONDS + self.seconds_per_image * images + self.figure_seconds

    @property
    def figure_seconds(self) -> float:
        """Seconds of the report's figures of the model; the report can be written without them."""
        return self.seconds_per_image * self.world_size * _FORWARD_COST * _REPORT_FORWARD_IMAGES

    @property
    def precision_seconds(self) -> float:
        """Seconds left to compare precisions, before test and report."""
        return self.seconds_left - self.estimate_seconds_after(is_evaluated=True)


def limit_precision_seconds(training_seconds: float, deadline: Deadline | None) -> float | None:
    """Seconds to compare precisions for, after training; None when the time limit leaves none."""
    seconds = min(MAX_PRECISION_SECONDS, MAX_PRECISION_SHARE * training_seconds)
    if deadline is None:
        return seconds
    seconds = min(seconds, deadline.precision_seconds)
    return seconds if seconds >= _MIN_PRECISION_SECONDS else None


@dataclasses.dataclass(frozen=True)
class RunEstimate:
    """The approximate time and memory of a run."""

    images_per_second: float
    evaluation_seconds: float
    """Seconds of one evaluation."""
    evaluations: int
    startup_seconds: float
    """Seconds until the first images are ready."""
    seconds: float
    """Of the whole run."""
    memory_bytes: int
    """Bytes needed on the device."""
    available_bytes: int
    """Bytes that the device has."""


def estimate_run(run: TrainingRun) -> RunEstimate:
    """Time a few steps of the run and count the memory they keep."""
    trial = _make_trial_run(run)
    start = time.perf_counter()
    batches = iterate_train_batches(trial)
    first = next(batches)
    startup = _read_synchronized_clock(trial) - start
    part = prepare_batch(first, trial.training_data, trial.plan, 0, trial.device)
    model = dataclasses.replace(trial, shard=False).build_model()
    kept = _measure_activation_bytes(model, *select_inputs(model, *part))
    state = trial.build_state(None if trial.is_sharded else model)
    image_seconds = _time_image(state, trial, itertools.chain([first], batches))
    images, val = run.plan.total_samples, len(run.dataset.splits["val"])
    evaluations = max(1, int(run.recipe.epochs) // run.eval_every_epochs)
    at_once = -(-run.recipe.batch // run.micro_batches)
    memory = _compute_state_bytes(state, run.recipe) + kept * at_once // len(part[1])
    share = run.flops / (run.flops + _count_teacher_flops(run))  # of the student in a step
    evaluation = share * val * image_seconds / 3 + _time_saving(model)  # a forward pass is a third of it; read once
    seconds = startup + images * image_seconds + evaluations * evaluation
    available = get_device_memory(run.device)
    return RunEstimate(1 / image_seconds, evaluation, evaluations, startup, seconds, memory, available)


def build_deadline(run: TrainingRun, seconds: float, start_time: float, *, max_epochs: float) -> Deadline:
    """The deadline of a run: `seconds` after `start_time`. It times a few steps, which is corrected during the run."""
    splits, images = run.dataset.splits, len(run.train_split)
    here = run if run.device.type == "cuda" else dataclasses.replace(run, workers=0)  # to start some takes a while
    trial = _make_trial_run(here)
    state = trial.build_state()
    with contextlib.closing(iterate_train_batches(trial)) as batches:
        image_seconds = _time_image(state, trial, batches, min(_MAX_TRIAL_SECONDS, _MAX_TRIAL_SHARE * seconds))
    return Deadline(
        budget_seconds=seconds,
        max_steps=math.ceil(max_epochs * images / run.recipe.batch),
        seconds_per_image=image_seconds,
        batch_size=run.recipe.batch,
        train_images=images,
        val_images=len(splits["val"]),
        test_images=len(splits["test"]) if run.eval_split is None and "test" in splits else 0,
        eval_every_epochs=run.eval_every_epochs,
        world_size=run.group.world_size,
        start_time=start_time,
    )


def _count_teacher_flops(run: TrainingRun) -> int:
    """The operations of the teacher's forward passes; 0 without one."""
    if run.teacher is None:
        return 0
    return count_training_flops(run.teacher.model.config, run.plan.total_samples) // 3


def _make_trial_run(run: TrainingRun) -> TrainingRun:
    """The run with so few images in a step that one takes seconds at most; not compiled, which takes longer."""
    flops = (run.flops + _count_teacher_flops(run)) / run.plan.total_samples
    part = -(-run.recipe.batch // run.micro_batches)
    few = max(
        2, run.group.world_size, min(part, _MAX_TRIAL_IMAGES, int(_TRIAL_FLOPS.get(run.device.type, 4e11) / flops))
    )
    schedule = dataclasses.replace(run.recipe.schedule, warmup=0, cooldown=0)
    epochs = max(run.recipe.epochs, few * (max(_UNTIMED_STEPS.values()) + 4) / len(run.train_split))
    recipe = dataclasses.replace(run.recipe, batch=few, schedule=schedule, epochs=epochs)
    return dataclasses.replace(run, recipe=recipe, micro_batches=1, compile_blocks=False)


def _read_synchronized_clock(trial: TrainingRun) -> float:
    """The time, once the device has finished its work."""
    if trial.device.type == "cuda":
        torch.cuda.synchronize(trial.device)
    return time.perf_counter()


def _time_image(
    state: TrainState, trial: TrainingRun, batches: Iterable[Batch], seconds: float = _MAX_TRIAL_SECONDS
) -> float:
    """Seconds per training image, preparation included; work done in parallel is not counted twice.

    With too few images to skip the first steps, all steps are timed. So is a first step that takes too long on a CPU: a
    busy machine must not spend a time limit on being timed.
    """
    images, start = 0, time.perf_counter()
    first = _UNTIMED_STEPS.get(trial.device.type, 1)
    whole = trial.plan.total_samples // trial.recipe.batch  # of a last, short step some ranks might have no images
    for step, batch in enumerate(itertools.islice(batches, whole)):
        if step == first:
            images, start = 0, _read_synchronized_clock(trial)
        part = prepare_batch(batch, trial.training_data, trial.plan, step, trial.device)
        train_step(state, [part], trial.recipe, step_images=len(part[1]), steps=trial.plan.total_steps, seed=trial.seed)
        images += len(part[1])
        late = (step >= first or trial.device.type != "cuda") and time.perf_counter() - start > seconds
        if distributed.all_reduce_max(int(late), trial.device):
            break
    return (_read_synchronized_clock(trial) - start) / images


def _time_saving(model: TrainableModel) -> float:
    """Seconds to write the weights twice, as the last and as the best of a run."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        for name in ("last", "best"):
            with files.write_atomically(Path(folder) / f"{name}.safetensors") as fresh:
                tensor_files.write_tensors(fresh, get_encoder(model).state_dict(), {})
        return time.perf_counter() - start


def _measure_activation_bytes(model: TrainableModel, images: Tensor, *masking: Tensor) -> int:
    """Bytes that the forward pass keeps for the backward pass, without weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # alive, so that no address is given twice

    def record_storage(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage

    def refuse_unpack(_: object) -> Tensor:
        raise AssertionError("there is no backward pass")

    model.train()
    # Keep the storage and not the tensor, which refers to the graph that would keep it: a cycle.
    with torch.autograd.graph.saved_tensors_hooks(record_storage, refuse_unpack), make_autocast(images.device):
        model(images, *masking)
    return sum(storage.nbytes() for storage in kept.values()) + images.nbytes


def _compute_state_bytes(state: TrainState, recipe: Recipe) -> int:
    """Bytes of weights, the teacher's included, gradients, the optimizer's averages and the average of the weights."""
    weights = sum(to_local(parameter).nbytes for parameter in state.model.parameters())
    trained = sum(to_local(parameter).nbytes for parameter in state.model.parameters() if parameter.requires_grad)
    moments = 2 if recipe.optimizer.kind == "adam" else 1  # muon leaves little to adam
    teacher = () if state.distillation is None else state.distillation.model.parameters()
    weights += sum(parameter.nbytes for parameter in teacher)
    return weights + trained * (1 + moments) + (trained if state.ema else 0)
