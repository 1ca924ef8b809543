"""What a run will take: seconds by timing a few of its images, bytes by counting what one keeps.

Nothing of it stays: the weights that a trial moves are thrown away.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from vitrail import files
from vitrail.config import Recipe
from vitrail.data import loader
from vitrail.data.loader import Batch
from vitrail.model.masked import encoder
from vitrail.train import distributed
from vitrail.train.deadline import Deadline
from vitrail.train.run import feed
from vitrail.train.sharding import local
from vitrail.train.step import Learner, State, advance, begin, inputs, precision
from vitrail.train.task import Task
from vitrail.weights import storage

_TRIAL_FLOPS = {"cpu": 1e11, "cuda": 2e14, "mps": 2e13}  # of a trial step: seconds on a CPU, less on a GPU
_TRIAL_IMAGES = 512
_SECONDS = 4.0  # of timing, at most
_TRIAL_SHARE = 0.02  # of a time limit, at most
_FIRST = {"cuda": 4}  # steps that are not timed: they are slower on a GPU, or have been prepared before
_FIRST_ELSEWHERE = 1


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a run will take, about."""

    images_per_second: float
    evaluation: float
    """Seconds of one evaluation."""
    evaluations: int
    start: float
    """Seconds until the first images are there."""
    seconds: float
    """Of the whole run."""
    memory: int
    """Bytes on the device."""
    available: int
    """Bytes that the device has."""


def estimate(task: Task) -> Estimate:
    """Time a few steps of the run and count what they keep."""
    trial = _trial(task)
    begun = time.perf_counter()
    batches = feed(trial)
    first = next(batches)
    start = _now(trial) - begun
    part = _prepared(first, trial, 0)
    model = dataclasses.replace(trial, shard=False).model()
    kept = _kept_bytes(model, *inputs(model, *part))
    state = begin(trial.model() if trial.sharded else model, trial.recipe, trial.counts, recorded=trial.recorded)
    each = _seconds_per_image(state, trial, itertools.chain([first], batches))
    images, val = task.plan.total, len(task.dataset.splits["val"])
    evaluations = max(1, int(task.recipe.epochs) // task.every)
    at_once = -(-task.recipe.batch // task.micro_batches)
    memory = _state_bytes(state, task.recipe) + kept * at_once // len(part[1])
    evaluation = val * each / 3 + _saving(model)  # a forward pass is a third of a step; images are read once
    seconds = start + images * each + evaluations * evaluation
    return Estimate(1 / each, evaluation, evaluations, start, seconds, memory, _available(task.device))


def build_deadline(task: Task, seconds: float, began: float, *, most_epochs: float) -> Deadline:
    """By when the run must have ended: `seconds` after `began`; a few steps are timed, which is corrected later."""
    splits, images = task.dataset.splits, len(task.split)
    here = task if task.device.type == "cuda" else dataclasses.replace(task, workers=0)  # to start some takes a while
    trial = _trial(here)
    state = begin(trial.model(), trial.recipe, trial.counts, recorded=trial.recorded)
    with contextlib.closing(feed(trial)) as batches:
        each = _seconds_per_image(state, trial, batches, min(_SECONDS, _TRIAL_SHARE * seconds))
    return Deadline(
        seconds=seconds,
        most_steps=math.ceil(most_epochs * images / task.recipe.batch),
        image_seconds=each,
        batch=task.recipe.batch,
        images=images,
        val=len(splits["val"]),
        test=len(splits["test"]) if task.measured is None and "test" in splits else 0,
        every=task.every,
        world=task.group.world,
        began=began,
    )


def _trial(task: Task) -> Task:
    """The same run with so few images in a step that one takes seconds at most; not compiled, which takes longer."""
    flops = task.flops / task.plan.total
    part = -(-task.recipe.batch // task.micro_batches)
    few = max(2, task.group.world, min(part, _TRIAL_IMAGES, int(_TRIAL_FLOPS.get(task.device.type, 4e11) / flops)))
    schedule = dataclasses.replace(task.recipe.schedule, warmup=0, cooldown=0)
    epochs = max(task.recipe.epochs, few * (max(_FIRST.values()) + 4) / len(task.split))
    recipe = dataclasses.replace(task.recipe, batch=few, schedule=schedule, epochs=epochs)
    return dataclasses.replace(task, recipe=recipe, micro_batches=1, compiled=False)


def _prepared(batch: Batch, trial: Task, step: int) -> tuple[Tensor, Tensor]:
    there = batch._replace(pixels=batch.pixels.to(trial.device), targets=batch.targets.to(trial.device))
    return loader.prepared(there, trial.training, trial.plan, step)


def _now(trial: Task) -> float:
    """The time, when the device has done all that it was given."""
    if trial.device.type == "cuda":
        torch.cuda.synchronize(trial.device)
    return time.perf_counter()


def _seconds_per_image(state: State, trial: Task, batches: Iterable[Batch], seconds: float = _SECONDS) -> float:
    """Seconds of a training image with all that is done for it: what is beside something else is not counted twice.

    Where the images are too few for that, those of the steps that there are.
    """
    images, begun = 0, time.perf_counter()
    first = _FIRST.get(trial.device.type, _FIRST_ELSEWHERE)
    whole = trial.plan.total // trial.recipe.batch  # of a last, short step some ranks might have no images
    for step, batch in enumerate(itertools.islice(batches, whole)):
        if step == first:
            images, begun = 0, _now(trial)
        part = _prepared(batch, trial, step)
        advance(state, [part], trial.recipe, size=len(part[1]), steps=trial.plan.steps, seed=trial.seed)
        images += len(part[1])
        late = step >= first and time.perf_counter() - begun > seconds
        if distributed.agreed(int(late), trial.device):
            break
    return (_now(trial) - begun) / images


def _saving(model: Learner) -> float:
    """Seconds that it takes to write the weights twice, as the last and as the best of a run."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        for name in ("last", "best"):
            with files.replacing(Path(folder) / f"{name}.safetensors") as fresh:
                storage.write(fresh, encoder(model).state_dict(), {})
        return time.perf_counter() - begun


def _kept_bytes(model: Learner, images: Tensor, *hiding: Tensor) -> int:
    """Bytes that the forward pass keeps for the backward pass, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # alive, so that no address is given twice

    def keep(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage

    def never(_: object) -> Tensor:
        raise AssertionError("there is no backward pass")

    model.train()
    # What is kept must not be the tensor itself, which knows the graph that would then keep it: a cycle.
    with torch.autograd.graph.saved_tensors_hooks(keep, never), precision(images.device):
        model(images, *hiding)
    return sum(storage.nbytes() for storage in kept.values()) + images.nbytes


def _state_bytes(state: State, recipe: Recipe) -> int:
    """Bytes of weights, gradients, the optimizer's averages and the average of the weights."""
    weights = sum(local(parameter).nbytes for parameter in state.model.parameters())
    trained = sum(local(parameter).nbytes for parameter in state.model.parameters() if parameter.requires_grad)
    moments = 2 if recipe.optimiser.kind == "adam" else 1  # muon leaves little to adam
    return weights + trained * (1 + moments) + (weights if state.average else 0)


def _available(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
