"""What a run will take: memory by hand, time in proportion, and nothing of the trial left."""

import dataclasses
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.test_trainer import tuned
from tests.train.test_training_run import learning
from vitrail.config import AugmentConfig, OptimizerConfig
from vitrail.train import time_estimate
from vitrail.train.step import TrainableModel
from vitrail.train.time_estimate import estimate_run
from vitrail.train.training_run import TrainingRun


def state_bytes(task: TrainingRun, moments: int, average: bool = False) -> int:
    """Weights, gradients and moments, and an average of the weights, four bytes each."""
    parameters = sum(parameter.numel() for parameter in task.build_model().parameters())
    return 4 * parameters * (2 + moments + average)


@pytest.mark.parametrize(
    ("changes", "moments", "average"),
    [
        ({}, 2, False),
        ({"ema": 0.9}, 2, True),
        ({"optimizer": OptimizerConfig(kind="sgd", lr=0.1)}, 1, False),
    ],
)
def test_memory_is_the_state_and_what_each_image_keeps(changes: dict[str, Any], moments: int, average: bool) -> None:
    """Twice the images of a step keep twice as much, and half of the step in memory half as much."""
    task = learning(changes)
    state = state_bytes(task, moments, average)
    kept = estimate_run(task).memory_bytes - state
    config = task.config
    inputs = 64 * 4 * 17 * config.width * config.depth  # at least what enters each block: 16 patches and a class token
    assert kept > 4 * inputs
    assert kept < 100 * inputs
    double = learning(changes | {"batch": 128})
    assert estimate_run(double).memory_bytes - state == pytest.approx(2 * kept, rel=0.01)
    assert estimate_run(dataclasses.replace(double, micro_batches=2)).memory_bytes - state == pytest.approx(
        kept, rel=0.01
    )
    assert estimate_run(dataclasses.replace(task, micro_batches=4)).memory_bytes - state == pytest.approx(
        kept / 4, rel=0.01
    )


def test_what_does_not_learn_has_no_gradient_and_no_moments(tmp_path: Path) -> None:
    whole = tuned(tmp_path, changes={"trainable_layers": None})
    head = tuned(tmp_path, changes={"trainable_layers": 0})
    parameters = sum(parameter.numel() for parameter in head.build_model().parameters())
    images = 8 * 3 * 32 * 32 * 4
    assert estimate_run(head).memory_bytes < 4 * (parameters + 3 * (32 * 2 + 2)) + 2 * images
    assert estimate_run(whole).memory_bytes > state_bytes(whole, 2)


def test_activations_that_are_computed_again_are_not_counted() -> None:
    task = learning({"settings": {"width": 32, "depth": 6, "mlp": 64, "heads": 2, "channels": 1}})
    state = state_bytes(task, 2)
    kept, recomputed = (
        estimate_run(one).memory_bytes - state for one in (task, dataclasses.replace(task, recompute=True))
    )
    config = task.config
    entering = 64 * 4 * 17 * config.width * (config.depth - 1)  # what enters each block is kept, of the first at least
    assert entering <= recomputed < kept / 2


def test_time_adds_up_and_is_of_this_machine() -> None:
    task = learning({"epochs": 10, "augment": AugmentConfig(crop="pad", mixup=0.2)})
    found = estimate_run(task)
    assert found.available_bytes > found.memory_bytes > 0
    assert found.evaluations == 10
    training = task.plan.total_positions / found.images_per_second
    assert training < found.seconds < 2 * training + 11 * found.evaluation_seconds
    assert 50 < found.images_per_second < 1e6
    assert 179 / 1e6 < found.evaluation_seconds < 179 / 50


def test_a_slow_first_step_ends_the_trial_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not spend a time limit on timing it: two steps of 20 s each would."""
    run, clock, steps = learning({"epochs": 10}), [0.0], []

    def take_long(state: Any, parts: Any, *_: object, **__: object) -> None:
        clock[0] += 20.0
        steps.append(len(parts[0][1]))

    monkeypatch.setattr(time_estimate, "train_step", take_long)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    deadline = time_estimate.build_deadline(run, 60.0, 0.0, max_epochs=10)
    assert len(steps) == 1
    assert deadline.seconds_per_image == pytest.approx(20.0 / steps[0])


def graphs() -> int:
    """Tensors that know how they were computed, and so keep what that took."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    return sum(type(thing) in kinds and thing.grad_fn is not None for thing in gc.get_objects())


def test_nothing_of_a_trial_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the model nor a graph that would keep its activations; for those nobody must collect cycles."""
    made: list[weakref.ref[TrainableModel]] = []
    real = TrainingRun.build_model

    def remembered(task: TrainingRun) -> TrainableModel:
        model = real(task)
        made.append(weakref.ref(model))
        return model

    monkeypatch.setattr(TrainingRun, "build_model", remembered)
    gc.collect()
    gc.disable()
    try:
        before = graphs()
        estimate_run(learning({}))
        assert graphs() == before
    finally:
        gc.enable()
    gc.collect()
    assert [model() for model in made] == [None]


def test_an_estimate_moves_no_weights_of_the_model_that_is_given(tmp_path: Path) -> None:
    task = tuned(tmp_path)
    assert task.initial_model is not None
    before = {name: value.clone() for name, value in task.initial_model.model.state_dict().items()}
    estimate_run(task)
    assert all(torch.equal(before[name], value) for name, value in task.initial_model.model.state_dict().items())
