"""Training on a GPU: recorded steps are the same steps, small sets live there, and what a run needs is foreseen."""

import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_factory import build_trained, build_vit
from vitrail import recipes
from vitrail.config import AugmentConfig, DistillationConfig, MaskedConfig, OptimizerConfig, Recipe, ScheduleConfig
from vitrail.data.sources import open_dataset
from vitrail.files import compute_sha256
from vitrail.training import loop
from vitrail.training.checkpoint import list_checkpoints
from vitrail.training.loop import iterate_train_batches
from vitrail.training.step import CudaGraphStep, build_train_state
from vitrail.training.time_estimate import estimate_run
from vitrail.training.trainer import Trainer
from vitrail.training.training_run import TrainingRun, adapt_to_dataset
from vitrail.weights.load import load

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here: `make cuda`")


def recipe(kind: str = "adam", **changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "model": "ti2",
        "settings": {"width": 64, "depth": 3, "mlp": 128, "heads": 2, "channels": 1},
        "image_size": 8,
        "batch": 64,
        "epochs": 1.0,
        "optimizer": OptimizerConfig(kind=kind, lr=1e-3, weight_decay=0.05, clip=1.0),
        "schedule": ScheduleConfig(warmup=4),
        "augment": AugmentConfig(crop="pad", mixup=0.2),
        "dropout": 0.1,
        "source": "test",
    }
    return Recipe(**(fields | changes))


def trained(task: TrainingRun, *, recorded: bool) -> tuple[list[float], torch.Tensor]:
    """The losses of all steps, and the weights after them."""
    torch.backends.cudnn.deterministic = True
    losses: list[float] = []
    state = build_train_state(
        task.build_model(),
        task.recipe,
        task.class_counts,
        distillation=task.build_state().distillation,
        cuda_graph=recorded,
    )
    loop.train_steps(
        state,
        iterate_train_batches(task),
        task.training_data,
        task.plan,
        task.recipe,
        after_step=lambda m: losses.append(m.result.loss),
    )
    return losses, torch.cat([parameter.detach().flatten().cpu() for parameter in state.model.parameters()])


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_recorded_steps_are_the_steps_that_were_not(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout, schedule and the short last step included."""
    task = TrainingRun(recipe=recipe(kind), dataset=open_dataset("digits"), device=torch.device("cuda"))
    assert task.can_use_cuda_graph
    assert task.plan.get_batch_size(task.plan.total_steps - 1) < 64
    losses, weights = trained(task, recorded=True)
    monkeypatch.setattr(CudaGraphStep, "EAGER_STEPS", 10**9)
    plain, expected = trained(task, recorded=True)
    assert losses == pytest.approx(plain, rel=1e-4)
    torch.testing.assert_close(weights, expected, atol=1e-4, rtol=0)
    assert plain[-1] < plain[0]


@pytest.mark.parametrize("target", ["mean-color", "pixels"])
@pytest.mark.parametrize("kind", ["mpp", "mae"])
def test_recorded_masked_steps_are_the_steps_that_were_not(
    kind: Any, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked = MaskedConfig(kind=kind, mask_ratio=0.5, target=target)
    made = recipe(masked=masked, augment=AugmentConfig(crop="pad"))
    task = TrainingRun(recipe=made, dataset=open_dataset("digits"), device=torch.device("cuda"))
    assert task.can_use_cuda_graph
    losses, weights = trained(task, recorded=True)
    monkeypatch.setattr(CudaGraphStep, "EAGER_STEPS", 10**9)
    expected = trained(task, recorded=True)
    assert losses == pytest.approx(expected[0], rel=1e-4)
    torch.testing.assert_close(weights, expected[1], atol=1e-4, rtol=0)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", ["soft", "token", "features"])
def test_recorded_steps_with_a_teacher_are_the_steps_that_were_not(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled teacher of another size, normalization and order of classes, and the short last step included."""
    teacher = build_trained(build_vit(seed=1, channels=1, classes=10), labels=tuple("9876543210"))
    made = recipe(distillation=DistillationConfig(kind=kind))
    if kind == "token":
        tokens = {"distillation_token": True, "distillation_head": True}
        made = dataclasses.replace(made, settings=made.settings | tokens)
    task = TrainingRun(
        recipe=made, dataset=open_dataset("digits"), device=torch.device("cuda"), teacher=teacher, compile_blocks=True
    )
    assert task.can_use_cuda_graph
    losses, weights = trained(task, recorded=True)
    monkeypatch.setattr(CudaGraphStep, "EAGER_STEPS", 10**9)
    plain, expected = trained(task, recorded=True)
    assert losses == pytest.approx(plain, rel=1e-3)
    torch.testing.assert_close(weights, expected, atol=1e-3, rtol=0)
    assert plain[-1] < plain[0]


def test_a_masked_run_on_a_gpu_leaves_a_model_and_what_was_told(tmp_path: Path) -> None:
    masked = MaskedConfig(kind="mpp", mask_ratio=0.5, target="mean-color")
    made = recipe(masked=masked, augment=AugmentConfig(crop="pad"), epochs=3.0)
    for compiled in (False, True):
        seen: list[Any] = []
        task = TrainingRun(
            recipe=made, dataset=open_dataset("digits"), device=torch.device("cuda"), compile_blocks=compiled
        )
        Trainer(task, tmp_path / str(compiled), after_evaluation=seen.append).run()
        assert load(tmp_path / str(compiled) / "weights" / "best.safetensors").model.config.classes == 0
        assert all(found.val.examples.masking.device.type == "cpu" for found in seen)
        assert seen[-1].val.mean_loss < seen[0].val.mean_loss


def test_what_waits_for_the_host_is_not_recorded() -> None:
    dataset, device = open_dataset("digits"), torch.device("cuda")
    for changes in ({"stochastic_depth": 0.1}, {"optimizer": OptimizerConfig(kind="sgd", lr=0.1)}):
        assert not TrainingRun(recipe=recipe(**changes), dataset=dataset, device=device).can_use_cuda_graph
    assert not TrainingRun(recipe=recipe(), dataset=dataset, device=device, micro_batches=2).can_use_cuda_graph


def test_an_estimate_leaves_a_run_as_it_is_and_foresees_its_memory(tmp_path: Path) -> None:
    made = recipe(batch=1024, epochs=10.0)
    task = TrainingRun(recipe=made, dataset=open_dataset("digits"), device=torch.device("cuda"))
    found = estimate_run(task)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    Trainer(task, tmp_path / "run").run()
    used = torch.cuda.max_memory_allocated() - before
    assert found.memory_bytes == pytest.approx(used, rel=0.6)
    assert 0 < found.seconds < 120


def test_a_compiled_run_learns_as_one_that_is_not(tmp_path: Path) -> None:
    tasks = [
        TrainingRun(recipe=recipe(), dataset=open_dataset("digits"), device=torch.device("cuda"), compile_blocks=c)
        for c in (0, 1)
    ]
    losses = [trained(dataclasses.replace(task), recorded=True)[0] for task in tasks]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def test_a_deterministic_run_that_was_stopped_ends_with_the_same_bits(tmp_path: Path) -> None:
    """In processes of their own: determinism is set before a GPU is touched."""

    def train(name: str, *options: str, after: int | None = None) -> int:
        command = [sys.executable, "-m", "vitrail", "train", "digits", "--data", "digits", "--epochs", "6"]
        command += ["--deterministic", "--save-every", "0", "--workers", "0", "--out", str(tmp_path / name), *options]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        checkpoints = tmp_path / name / "checkpoints"
        while after is not None and process.poll() is None and len(list_checkpoints(checkpoints)) < 2:
            time.sleep(0.01)
        if after is not None:
            process.send_signal(after)
        return process.wait()

    assert train("whole") == 0
    assert train("stopped", after=signal.SIGTERM) == 75
    assert train("stopped", "--resume", after=signal.SIGKILL) == -signal.SIGKILL
    assert train("stopped", "--resume") == 0
    for name in ("last", "best"):
        sums = {compute_sha256(tmp_path / run / "weights" / f"{name}.safetensors") for run in ("whole", "stopped")}
        assert len(sums) == 1


def test_a_real_vit_is_fine_tuned_at_another_resolution(deit_tiny: Path, tmp_path: Path) -> None:
    dataset, model = open_dataset("digits"), load(deit_tiny)
    made = dataclasses.replace(
        recipes.build_finetune_recipe("default", len(dataset.splits["train"]), 16), image_size=64, epochs=8
    )
    made = dataclasses.replace(made, schedule=ScheduleConfig(warmup=18), augment=AugmentConfig(crop="pad", flip=False))
    start = adapt_to_dataset(model, dataset, made)
    task = TrainingRun(recipe=made, dataset=dataset, initial_model=start, device=torch.device("cuda"))
    estimate_run(task)
    result = Trainer(task, tmp_path / "run").run()
    assert result.counts.top1 > 0.8
