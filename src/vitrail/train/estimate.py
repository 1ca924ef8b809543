"""What a run will take: seconds by timing a few of its images, bytes by counting what one keeps.

Nothing of it stays: the weights that a trial moves are thrown away.
"""

import dataclasses
import itertools
import os
import statistics
import time

import torch
from torch import Tensor

from vitrail.config import Recipe
from vitrail.data import loader
from vitrail.model import count
from vitrail.model.build import Model
from vitrail.train import distributed
from vitrail.train.run import feed
from vitrail.train.sharding import local
from vitrail.train.step import State, advance, begin, precision
from vitrail.train.task import Task

_TRIAL_FLOPS = {"cpu": 1e11, "cuda": 2e14, "mps": 2e13}  # of a trial step: seconds on a CPU, less on a GPU
_TRIAL_IMAGES = 512
_SECONDS = 3.0  # of timing, at most, for each of computing and loading
_STEPS = 8  # of them the first few are slower on a GPU
_KEPT_BACK = 0.08  # of the time to fit into: to end a little early is what was asked for, to end late is not


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a run will take, about."""

    images_per_second: float
    evaluation: float
    """Seconds of one evaluation."""
    evaluations: int
    seconds: float
    """Of the whole run."""
    memory: int
    """Bytes on the device."""
    available: int
    """Bytes that the device has."""


def estimate(task: Task) -> Estimate:
    """Time a few steps of the run and count what they keep."""
    trial = _trial(task)
    parts, loading, aside = _loaded(trial)
    model = dataclasses.replace(trial, shard=False).model()
    kept = _kept_bytes(model, parts[0][0])
    state = begin(trial.model() if trial.sharded else model, trial.recipe, trial.counts, recorded=trial.recorded)
    computing = _seconds_per_image(state, trial, parts)
    each = max(computing, loading) if aside else computing + loading
    images, val = task.plan.total, len(task.dataset.splits["val"])
    evaluations = max(1, int(task.recipe.epochs) // task.every)
    evaluation = val * max(computing / 3, loading)
    part = -(-task.recipe.batch // task.micro_batches)
    memory = _state_bytes(state, task.recipe) + kept * part // len(parts[0][0])
    seconds = images * each + evaluations * val * computing / 3 + evaluation
    return Estimate(1 / each, evaluation, evaluations, seconds, memory, _available(task.device))


def fit_epochs(task: Task, seconds: float) -> float:
    """The epochs that fit into so many seconds, evaluations included."""
    epochs = task.recipe.epochs * seconds * (1 - _KEPT_BACK) / estimate(task).seconds
    return max(epochs, task.recipe.batch / len(task.split))


def _trial(task: Task) -> Task:
    """The same run with so few images in a step that one takes seconds at most; not compiled, which takes longer."""
    flops = count.training_flops(task.config, 1)
    part = -(-task.recipe.batch // task.micro_batches)
    few = max(2, task.group.world, min(part, _TRIAL_IMAGES, int(_TRIAL_FLOPS.get(task.device.type, 4e11) / flops)))
    schedule = dataclasses.replace(task.recipe.schedule, warmup=0, cooldown=0)
    epochs = max(task.recipe.epochs, few * (_STEPS + 1) / len(task.split))
    recipe = dataclasses.replace(task.recipe, batch=few, schedule=schedule, epochs=epochs)
    return dataclasses.replace(task, recipe=recipe, micro_batches=1, compiled=False)


def _loaded(trial: Task) -> tuple[list[tuple[Tensor, Tensor]], float, bool]:
    """A few prepared batches, the seconds that loading an image takes, and whether that is done beside computing.

    Images that live on a GPU are not: it makes their views, which take from the time that it has for the steps.
    """
    training, plan = trial.training, trial.plan
    parts: list[tuple[Tensor, Tensor]] = []
    images, aside = 0, trial.workers > 0
    begun = 0.0
    for step, batch in enumerate(itertools.islice(feed(trial), 4 * _STEPS)):
        if len(batch.pixels) == 0:
            break
        aside = aside and batch.pixels.device.type == "cpu"
        there = batch._replace(pixels=batch.pixels.to(trial.device), targets=batch.targets.to(trial.device))
        if len(parts) < _STEPS:
            parts.append(loader.prepared(there, training, plan, step))
        if not step:  # the first waits for processes to start
            begun = _now(trial)
            continue
        images += len(batch.positions)
        if time.perf_counter() - begun > _SECONDS:
            break
    return parts, (_now(trial) - begun) / max(images, 1), aside


def _now(trial: Task) -> float:
    """The time, when the device has done all that it was given."""
    if trial.device.type == "cuda":
        torch.cuda.synchronize(trial.device)
    return time.perf_counter()


def _seconds_per_image(state: State, trial: Task, parts: list[tuple[Tensor, Tensor]]) -> float:
    """Seconds of computing a training image: the median of a few steps after the first."""
    seconds: list[float] = []
    begun = time.perf_counter()
    for number in range(_STEPS + 1):
        part = parts[number % len(parts)]
        before = time.perf_counter()
        advance(state, [part], trial.recipe, size=len(part[0]), steps=trial.plan.steps, seed=trial.seed)
        if number or len(parts) == 1:
            seconds.append((_now(trial) - before) / len(part[0]))
        if number and time.perf_counter() - begun > _SECONDS and not distributed.together():
            break  # several ranks make equally many steps, or one would wait for the others without end
    return statistics.median(seconds)


def _kept_bytes(model: Model, images: Tensor) -> int:
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
        model(images)
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
