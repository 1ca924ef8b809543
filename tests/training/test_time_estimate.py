"""What a run will take, and that one with a time limit ends on time, with weights that follow from its decisions."""

import dataclasses
import gc
import itertools
import json
import os
import random
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import model_factory
from tests.data.image_files import write_image_folder
from tests.runtime.test_distributed import start_ranks, wait_for_ranks
from tests.training.test_resume import build_run, digest_weights, run_training
from tests.training.test_trainer import build_finetune_run
from tests.training.test_training_run import build_digits_run
from vitrail.cli import main
from vitrail.config import AugmentConfig, OptimizerConfig, ScheduleConfig
from vitrail.errors import StoppedError, UsageError
from vitrail.runtime.distributed import ProcessGroup
from vitrail.training import schedule, time_estimate
from vitrail.training.finetune import parse_decisions
from vitrail.training.loop import PlannedSteps
from vitrail.training.step import TrainableModel
from vitrail.training.time_estimate import Deadline, estimate_run
from vitrail.training.training_run import TrainingRun
from vitrail.weights.load import save


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
    task = build_digits_run(changes)
    state = state_bytes(task, moments, average)
    kept = estimate_run(task).memory_bytes - state
    config = task.config
    inputs = 64 * 4 * 17 * config.width * config.depth  # at least what enters each block: 16 patches and a class token
    assert kept > 4 * inputs
    assert kept < 100 * inputs
    double = build_digits_run(changes | {"batch": 128})
    assert estimate_run(double).memory_bytes - state == pytest.approx(2 * kept, rel=0.01)
    assert estimate_run(dataclasses.replace(double, micro_batches=2)).memory_bytes - state == pytest.approx(
        kept, rel=0.01
    )
    assert estimate_run(dataclasses.replace(task, micro_batches=4)).memory_bytes - state == pytest.approx(
        kept / 4, rel=0.01
    )


def test_what_does_not_learn_has_no_gradient_and_no_moments(tmp_path: Path) -> None:
    whole = build_finetune_run(tmp_path, changes={"trainable_layers": None})
    head = build_finetune_run(tmp_path, changes={"trainable_layers": 0})
    parameters = sum(parameter.numel() for parameter in head.build_model().parameters())
    images = 8 * 3 * 32 * 32 * 4
    assert estimate_run(head).memory_bytes < 4 * (parameters + 3 * (32 * 2 + 2)) + 2 * images
    assert estimate_run(whole).memory_bytes > state_bytes(whole, 2)


def test_activations_that_are_computed_again_are_not_counted() -> None:
    task = build_digits_run({"settings": {"width": 32, "depth": 6, "mlp": 64, "heads": 2, "channels": 1}})
    state = state_bytes(task, 2)
    kept, recomputed = (
        estimate_run(one).memory_bytes - state for one in (task, dataclasses.replace(task, recompute=True))
    )
    config = task.config
    entering = 64 * 4 * 17 * config.width * (config.depth - 1)  # what enters each block is kept, of the first at least
    assert entering <= recomputed < kept / 2


def test_time_adds_up_and_is_of_this_machine() -> None:
    task = build_digits_run({"epochs": 10, "augment": AugmentConfig(crop="pad", mixup=0.2)})
    estimate = estimate_run(task)
    assert estimate.available_bytes > estimate.memory_bytes > 0
    assert estimate.evaluations == 10
    training = task.plan.total_samples / estimate.images_per_second
    assert training < estimate.seconds < 2 * training + 11 * estimate.evaluation_seconds
    assert 50 < estimate.images_per_second < 1e6
    assert 179 / 1e6 < estimate.evaluation_seconds < 179 / 50


def test_a_slow_first_step_ends_the_trial_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not spend a time limit on timing it: two steps of 20 s each would."""
    run, clock, steps = build_digits_run({"epochs": 10}), [0.0], []

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
        estimate_run(build_digits_run({}))
        assert graphs() == before
    finally:
        gc.enable()
    gc.collect()
    assert [model() for model in made] == [None]


def test_an_estimate_moves_no_weights_of_the_model_that_is_given(tmp_path: Path) -> None:
    task = build_finetune_run(tmp_path)
    assert task.initial_model is not None
    before = {name: value.clone() for name, value in task.initial_model.model.state_dict().items()}
    estimate_run(task)
    assert all(torch.equal(before[name], value) for name, value in task.initial_model.model.state_dict().items())


BATCH = 64


@dataclasses.dataclass
class Machine:
    """A clock that only work moves: an image takes so many seconds, more after the machine is shared."""

    image: float = 0.05
    now: float = 0.0
    shared_after: float = float("inf")
    slowdown: float = 2.0
    noise: random.Random | None = None

    def work(self, images: float) -> None:
        images *= 1.0 if self.noise is None else self.noise.uniform(0.7, 1.3)
        self.now += images * self.image * (self.slowdown if self.now >= self.shared_after else 1.0)

    def __call__(self) -> float:
        return self.now


def limit(machine: Machine, **changes: Any) -> Deadline:
    sizes = {"train_images": 1000, "val_images": 100, "test_images": 200, "eval_every_epochs": 1, "batch_size": BATCH}
    times = {"budget_seconds": 600.0, "max_steps": 10_000, "seconds_per_image": 0.05, "start_time": 0.0}
    return Deadline(**(sizes | times | changes), clock=machine)


def simulate(machine: Machine, deadline: Deadline) -> tuple[PlannedSteps, float]:
    """A run of which the machine does the work, as `Keeper` reports it; the plan, and when all of it has ended."""
    machine.work(100)  # reading the images
    planned, step = PlannedSteps(max(1, deadline.fit_steps(0))), 0
    evaluated = 0
    while step < planned.get_total(step):
        machine.work(BATCH)
        step += 1
        deadline.end_step()
        planned.set_total(step, deadline.replan(step, planned.get_total(step)))
        epoch = step * BATCH // deadline.train_images // deadline.eval_every_epochs
        if epoch > evaluated or step == planned.get_total(step):
            evaluated, before = epoch, machine.now
            machine.work(deadline.val_images / 3)
            deadline.end_evaluation(machine.now - before)
        deadline.begin_step()
    machine.work(deadline.val_images / 3)  # the temperature
    machine.now += min(30, 0.05 * machine.now, max(0.0, deadline.precision_seconds))
    machine.work((deadline.test_images + 300) / 3)
    machine.now += 4 * (machine.slowdown if machine.now >= machine.shared_after else 1.0)
    return planned, machine.now


@pytest.mark.parametrize("minutes", [1, 3, 10])
@pytest.mark.parametrize("shared_after", [0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 2.0])
def test_a_machine_of_which_half_is_taken_away_ends_within_a_tenth(minutes: int, shared_after: float) -> None:
    """Whenever it happens, until the last steps; and while nothing happens the time is used."""
    seconds = minutes * 60.0
    machine = Machine(image=0.01, shared_after=shared_after * seconds)
    _, ended = simulate(machine, limit(machine, budget_seconds=seconds, seconds_per_image=0.01))
    assert 0.85 * seconds < ended <= 1.1 * seconds


def test_a_trial_that_was_wrong_is_corrected_by_the_first_steps() -> None:
    for wrong in (0.2, 5.0):
        machine = Machine(image=0.02)
        planned, ended = simulate(machine, limit(machine, seconds_per_image=0.02 * wrong))
        assert 0.9 * 600 < ended <= 600
        assert planned.decisions
        assert planned.decisions[0][0] <= 3


def test_what_starting_an_evaluation_takes_is_not_taken_for_each_test_image() -> None:
    """A GPU: 2,000 images a second, but a second and a half before the hundred validation images are evaluated."""
    machine = Machine(image=1 / 2000)
    deadline = limit(machine, budget_seconds=60.0, seconds_per_image=1 / 2000, test_images=10_000, eval_every_epochs=4)
    real = Deadline.end_evaluation

    def started(seconds: float) -> None:
        machine.now += 1.5
        real(deadline, seconds + 1.5)

    deadline.end_evaluation = started  # type: ignore[method-assign]
    _, ended = simulate(machine, deadline)
    assert 0.7 * 60 < ended <= 60


def test_a_first_step_that_waited_for_workers_ends_no_run() -> None:
    machine = Machine(image=0.02)
    deadline = limit(machine, budget_seconds=120.0, seconds_per_image=0.02)
    deadline.begin_step()
    machine.now += 20.0
    planned, ended = simulate(machine, deadline)
    assert planned.get_total(10_000) > 20
    assert ended <= 120


def test_a_run_that_has_come_to_its_end_is_not_prolonged() -> None:
    """The learning rate has come to its end too; and the decisions of noisy steps are such as --replan takes."""
    draws = random.Random(3)
    for _ in range(50):
        machine = Machine(image=0.02)
        deadline = limit(machine, budget_seconds=120.0, seconds_per_image=0.02)
        machine.noise = draws
        planned, _ = simulate(machine, deadline)
        if planned.decisions:
            written = ",".join(f"{step}:{steps}" for step, steps in planned.decisions)
            assert parse_decisions(written) == tuple(planned.decisions)
            assert all(after[0] < before[1] for before, after in itertools.pairwise(planned.decisions))


def test_what_one_rank_does_alone_is_counted_at_its_own_speed() -> None:
    """By hand: 0.05 s of a training image on 8 ranks, 0.4 s on one; a third of it for an image that is evaluated."""
    alone, eight = limit(Machine()), limit(Machine(), world_size=8)
    assert alone.estimate_seconds_after(is_evaluated=False) == pytest.approx(4 + 0.05 / 3 * (100 + 100 + 200 + 300))
    assert eight.estimate_seconds_after(is_evaluated=False) == pytest.approx(
        4 + 0.05 / 3 * (100 + 8 * (100 + 200 + 300))
    )
    assert eight.estimate_seconds_after(is_evaluated=True) == pytest.approx(4 + 0.05 / 3 * 8 * (200 + 300))


def test_a_step_of_few_images_has_one_evaluation_at_most() -> None:
    """By hand: 6 training images, steps of 64: after each step 100 images are evaluated, not ten times as many."""
    deadline = limit(Machine(), train_images=6)
    left = 600 * 0.97 - 1.5 * deadline.estimate_seconds_after(is_evaluated=False) - 30
    assert deadline.fit_steps(0) == int(left / (0.05 * (64 + 100 / 3)))


def test_no_more_steps_than_help() -> None:
    machine = Machine(image=0.001)
    planned, ended = simulate(machine, limit(machine, seconds_per_image=0.001, max_steps=300))
    assert planned.get_total(10_000) == 300
    assert ended < 600


def test_small_changes_of_speed_change_no_plan() -> None:
    machine, draws = Machine(), random.Random(0)
    deadline = limit(machine)
    planned, step = PlannedSteps(deadline.fit_steps(0)), 0
    while step < planned.get_total(step) // 2:
        machine.image = 0.05 * draws.uniform(0.98, 1.02)
        machine.work(BATCH * (1 + 100 / 3000))  # its share of evaluations included
        step += 1
        deadline.end_step()
        planned.set_total(step, deadline.replan(step, planned.get_total(step)))
        deadline.begin_step()
    assert len(planned.decisions) <= 1


# --- the learning rate -----------------------------------------------------------------------------------------------


def test_without_a_decision_a_step_lies_where_it_is() -> None:
    planned = PlannedSteps(977)
    assert [planned.get_schedule_position(step) for step in range(978)] == list(range(978))


def test_a_decision_walks_the_rest_of_the_curve_in_the_steps_that_are_left() -> None:
    """By hand: 100 steps planned; after 40 of them 20 are left, so each counts 3; after 50 again 30, each 1."""
    planned = PlannedSteps(100, [(40, 60), (50, 80)])
    assert [planned.get_total(step) for step in (0, 39, 40, 49, 50, 80)] == [100, 100, 60, 60, 80, 80]
    assert [planned.get_schedule_position(step) for step in (0, 40, 41, 50, 51, 80)] == [0, 40, 43, 70, 71, 100]


def test_the_rate_is_continuous_and_ends_at_its_end_whatever_is_decided() -> None:
    draws = random.Random(1)
    for _ in range(100):
        planned, step = PlannedSteps(draws.randint(20, 400)), 0
        rates = []
        while step < planned.get_total(step):
            rates.append(
                schedule.lr_scale(ScheduleConfig(warmup=10), planned.get_schedule_position(step), planned.initial_steps)
            )
            step += 1
            if draws.random() < 0.05:
                planned.set_total(step, step + draws.randint(1, 2 * max(1, planned.get_total(step) - step)))
        assert planned.get_schedule_position(step) == pytest.approx(planned.initial_steps)
        top = rates.index(max(rates))
        assert rates[top:] == sorted(rates[top:], reverse=True)
        assert all(0 <= rate <= 1 for rate in rates)


# --- the whole run ---------------------------------------------------------------------------------------------------


class Ticking:
    """A clock that goes on by a given time whenever it is looked at: the same decisions in every run."""

    def __init__(self, slow_after: int) -> None:
        self.looks, self.now, self.slow_after = 0, 0.0, slow_after

    def __call__(self) -> float:
        self.looks += 1
        self.now += 1.0 if self.looks < self.slow_after else 3.0
        return self.now


def timed(chosen: TrainingRun, seconds: float, slow_after: int) -> Deadline:
    """A limit by which a step takes about four looks at the clock."""
    return Deadline(
        budget_seconds=seconds,
        max_steps=200,
        seconds_per_image=1 / 64,
        batch_size=chosen.recipe.batch,
        train_images=len(chosen.train_split),
        val_images=0,
        test_images=0,
        eval_every_epochs=1,
        start_time=0.0,
        clock=Ticking(slow_after),
    )


def decisions(folder: Path) -> tuple[tuple[int, int], ...]:
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return tuple((event["step"], event["steps"]) for event in events if event["event"] == "plan")


def test_a_run_is_repeated_to_the_bit_by_its_decisions_and_can_be_interrupted(tmp_path: Path) -> None:
    whole = build_run()
    result = run_training(whole, tmp_path / "timed", deadline=timed(whole, 260.0, slow_after=60))
    made = decisions(tmp_path / "timed")
    assert len(made) >= 2
    assert made[-1][1] < whole.plan.total_steps
    assert result.epochs == made[-1][1] * whole.recipe.batch / len(whole.train_split)
    again = dataclasses.replace(whole, decisions=made)

    def stop(moment: Any) -> None:
        if moment.step == (made[0][0] + made[-1][0]) // 2:
            raise StoppedError("here")

    with pytest.raises(StoppedError):
        run_training(again, tmp_path / "again", stop)
    run_training(again, tmp_path / "again", resume=True)
    assert digest_weights(tmp_path / "again") == digest_weights(tmp_path / "timed")
    with pytest.raises(UsageError, match="started with another decisions"):
        run_training(whole, tmp_path / "again", resume=True)


def test_a_resumed_run_goes_on_with_its_decisions_and_the_time_that_is_left(tmp_path: Path) -> None:
    whole = build_run()
    seen: list[int] = []

    def stop(moment: Any) -> None:
        seen.append(moment.steps)
        if moment.step == 12:
            raise StoppedError("here")

    with pytest.raises(StoppedError):
        run_training(whole, tmp_path / "run", stop, deadline=timed(whole, 260.0, slow_after=30))
    before = [each for each in decisions(tmp_path / "run") if each[0] <= 11]
    assert before
    left = timed(whole, 260.0, slow_after=0)
    run_training(whole, tmp_path / "run", resume=True, deadline=left)
    assert left.start_time < 0
    made = decisions(tmp_path / "run")
    assert list(made[: len(before)]) == before
    run_training(dataclasses.replace(whole, decisions=made), tmp_path / "again")
    assert digest_weights(tmp_path / "again") == digest_weights(tmp_path / "run")


def test_ranks_whose_clocks_differ_take_the_steps_that_the_first_decides(tmp_path: Path) -> None:
    def work(group: ProcessGroup) -> None:
        whole = build_run(group=group)
        slow_after = 20 if group.rank == 0 else 10_000
        run_training(whole, tmp_path / "two", deadline=timed(whole, 260.0, slow_after=slow_after))

    assert wait_for_ranks(start_ranks(2, work)) == [0, 0]
    made = decisions(tmp_path / "two")
    assert made
    assert wait_for_ranks(
        start_ranks(2, lambda group: run_training(build_run(group=group, decisions=made), tmp_path / "again"))
    ) == [0, 0]
    assert digest_weights(tmp_path / "again") == digest_weights(tmp_path / "two")


def test_the_command_with_a_time_limit_runs_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_image_folder(tmp_path / "set", "train", "val", "test", each=4)
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model.safetensors")
    command = [
        "finetune",
        "./set",
        "--model",
        "model.safetensors",
        "--minutes",
        "0.1",
        "--batch",
        "4",
        "--workers",
        "0",
    ]

    def work(_: ProcessGroup) -> None:
        torch.distributed.destroy_process_group()  # the command joins by itself
        os._exit(main([*command, "--workers", "0", "--device", "cpu", "--out", "two"]))

    assert wait_for_ranks(start_ranks(2, work)) == [0, 0]
    assert (tmp_path / "two" / "report.html").exists()
