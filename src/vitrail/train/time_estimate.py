"""Estimate a run: its time by timing a few images, its memory by counting what their forward pass keeps.

The weights that a trial updates are thrown away.
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
from vitrail.model.masked import get_encoder
from vitrail.runtime import distributed
from vitrail.train.deadline import Deadline
from vitrail.train.fsdp import to_local
from vitrail.train.run_batches import iterate_train_batches
from vitrail.train.step import TrainableModel, TrainState, build_train_state, make_autocast, select_inputs, train_step
from vitrail.train.training_run import TrainingRun
from vitrail.weights import tensor_files

_TRIAL_FLOPS = {"cpu": 1e11, "cuda": 2e14, "mps": 2e13}  # of a trial step: seconds on a CPU, less on a GPU
_MAX_TRIAL_IMAGES = 512
_MAX_TRIAL_SECONDS = 4.0  # of timing, at most
_MAX_TRIAL_SHARE = 0.02  # of a time limit, at most
_UNTIMED_STEPS = {"cuda": 4}  # steps that are not timed: they are slower on a GPU, or have been prepared before
_DEFAULT_UNTIMED_STEPS = 1


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
    part = _prepare_batch(first, trial, 0)
    model = dataclasses.replace(trial, shard=False).build_model()
    kept = _measure_activation_bytes(model, *select_inputs(model, *part))
    state = build_train_state(
        trial.build_model() if trial.is_sharded else model,
        trial.recipe,
        trial.class_counts,
        cuda_graph=trial.can_use_cuda_graph,
    )
    image_seconds = _time_image(state, trial, itertools.chain([first], batches))
    images, val = run.plan.total_positions, len(run.dataset.splits["val"])
    evaluations = max(1, int(run.recipe.epochs) // run.eval_every_epochs)
    at_once = -(-run.recipe.batch // run.micro_batches)
    memory = _compute_state_bytes(state, run.recipe) + kept * at_once // len(part[1])
    evaluation = val * image_seconds / 3 + _time_saving(model)  # a forward pass is a third of a step; read once
    seconds = startup + images * image_seconds + evaluations * evaluation
    available = _get_device_memory(run.device)
    return RunEstimate(1 / image_seconds, evaluation, evaluations, startup, seconds, memory, available)


def build_deadline(run: TrainingRun, seconds: float, start_time: float, *, max_epochs: float) -> Deadline:
    """The deadline of a run: `seconds` after `start_time`. It times a few steps, which is corrected during the run."""
    splits, images = run.dataset.splits, len(run.train_split)
    here = run if run.device.type == "cuda" else dataclasses.replace(run, workers=0)  # to start some takes a while
    trial = _make_trial_run(here)
    state = build_train_state(
        trial.build_model(), trial.recipe, trial.class_counts, cuda_graph=trial.can_use_cuda_graph
    )
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


def _make_trial_run(run: TrainingRun) -> TrainingRun:
    """The run with so few images in a step that one takes seconds at most; not compiled, which takes longer."""
    flops = run.flops / run.plan.total_positions
    part = -(-run.recipe.batch // run.micro_batches)
    few = max(
        2, run.group.world_size, min(part, _MAX_TRIAL_IMAGES, int(_TRIAL_FLOPS.get(run.device.type, 4e11) / flops))
    )
    schedule = dataclasses.replace(run.recipe.schedule, warmup=0, cooldown=0)
    epochs = max(run.recipe.epochs, few * (max(_UNTIMED_STEPS.values()) + 4) / len(run.train_split))
    recipe = dataclasses.replace(run.recipe, batch=few, schedule=schedule, epochs=epochs)
    return dataclasses.replace(run, recipe=recipe, micro_batches=1, compile_blocks=False)


def _prepare_batch(batch: Batch, trial: TrainingRun, step: int) -> tuple[Tensor, Tensor]:
    on_device = batch._replace(pixels=batch.pixels.to(trial.device), targets=batch.targets.to(trial.device))
    return loader.prepare_train_batch(on_device, trial.training_data, trial.plan, step)


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
    first = _UNTIMED_STEPS.get(trial.device.type, _DEFAULT_UNTIMED_STEPS)
    whole = trial.plan.total_positions // trial.recipe.batch  # of a last, short step some ranks might have no images
    for step, batch in enumerate(itertools.islice(batches, whole)):
        if step == first:
            images, start = 0, _read_synchronized_clock(trial)
        part = _prepare_batch(batch, trial, step)
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
    """Bytes of weights, gradients, the optimizer's averages and the average of the weights."""
    weights = sum(to_local(parameter).nbytes for parameter in state.model.parameters())
    trained = sum(to_local(parameter).nbytes for parameter in state.model.parameters() if parameter.requires_grad)
    moments = 2 if recipe.optimizer.kind == "adam" else 1  # muon leaves little to adam
    return weights + trained * (1 + moments) + (weights if state.ema else 0)


def _get_device_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
