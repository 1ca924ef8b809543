"""A run with LoRA: what it stores, what it leaves, and that it resumes, divides and shards like any other."""

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import model_factory
from tests.runtime.test_distributed import read_last_row, read_weights, run_training, start_ranks, wait_for_ranks
from tests.training.test_resume import digest_weights, kill_run
from vitrail.config import LoRAConfig, OptimizerConfig, Recipe, ScheduleConfig
from vitrail.data.sources import open_dataset
from vitrail.errors import ModelError, UsageError
from vitrail.files import compute_sha256
from vitrail.recipes import build_finetune_recipe
from vitrail.runtime.distributed import SINGLE_PROCESS, ProcessGroup
from vitrail.training import checkpoint, fsdp
from vitrail.training.step import TrainState
from vitrail.training.training_run import TrainingRun, adapt_to_dataset
from vitrail.weights.load import load, save
from vitrail.weights.tensor_files import read_tensors
from vitrail.weights.trained import Trained

CPU = torch.device("cpu")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
SGD = OptimizerConfig(kind="sgd", lr=0.1, clip=1.0)  # Adam makes steps of one size from gradients of mere rounding


def build_base(**changes: Any) -> Trained:
    """A model for digits, with random weights."""
    fields = {"image_size": (16, 16), "channels": 1, "width": 48, "depth": 2, "mlp": 96} | changes
    return model_factory.build_trained(model_factory.build_vit(**fields))


def build_recipe(config: LoRAConfig, **changes: Any) -> Recipe:
    recipe = build_finetune_recipe("default", 1439, 8)
    fields = {"lora": config, "batch": 103, "epochs": 618 / 1439, "ema": 0.9, "schedule": ScheduleConfig(warmup=3)}
    return dataclasses.replace(recipe, **(fields | changes))


def build_run(group: ProcessGroup = SINGLE_PROCESS, config: LoRAConfig | None = None, **changes: Any) -> TrainingRun:
    """Six steps of 103 digits with an average of weights and all that is drawn at random."""
    dataset = open_dataset("digits")
    recipe = changes.pop("recipe", None) or build_recipe(
        config or LoRAConfig(rank=4, layers="all", dora=True), dropout=0.1
    )
    initial = adapt_to_dataset(changes.pop("base", None) or build_base(), dataset, recipe)
    fields = {"recipe": recipe, "dataset": dataset, "device": CPU, "group": group, "initial_model": initial}
    return TrainingRun(**(fields | changes))


def digest_adapter(folder: Path) -> list[str]:
    return [compute_sha256(folder / "weights" / "adapter" / name) for name in ADAPTER_FILES]


def read_model(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load(path).model.state_dict()
    return tensors


# --- what it leaves ---------------------------------------------------------------------------------------------------


def test_best_is_the_base_with_the_adapter_beside_it(tmp_path: Path) -> None:
    run = build_run()
    save(build_base(), tmp_path / "base.safetensors")
    base = read_model(tmp_path / "base.safetensors")
    run_training(run, tmp_path / "run")
    best = load(tmp_path / "run" / "weights" / "best.safetensors")
    merged = load(tmp_path / "base.safetensors", tmp_path / "run" / "weights" / "adapter")
    found = merged.model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in best.model.state_dict().items())
    assert (merged.labels, merged.preprocess) == (best.labels, best.preprocess)
    assert "fine-tuned with DoRA of rank 4, alpha 4, in all on digits" in best.origin.name
    moved = {
        name for name, tensor in best.model.state_dict().items() if name in base and not torch.equal(base[name], tensor)
    }
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert moved == {f"blocks.{i}.{layer}.weight" for i in range(2) for layer in layers} | {"head.weight", "head.bias"}
    initial = run.initial_model
    assert initial is not None
    assert all(torch.equal(initial.model.state_dict()[name], base[name]) for name in base if "head" not in name)


def test_adapter_and_checkpoint_hold_only_what_is_trained(tmp_path: Path) -> None:
    run = build_run(config=LoRAConfig(rank=4))
    run_training(run, tmp_path / "run")
    trained = 2 * (4 * 48 + 4 * 3 * 48) + 10 * 48 + 10  # A, B of two layers, and the head
    stored = checkpoint.read_newest_checkpoint(tmp_path / "run" / "checkpoints", print)
    assert stored is not None
    assert {"model", "optimizer", "average"} == stored.tensors.keys()
    for kind, factor in (("model", 1), ("average", 1), ("optimizer", 2)):
        assert sum(tensor.numel() for tensor in stored.tensors[kind].values() if tensor.ndim) == factor * trained
    adapter = read_tensors(tmp_path / "run" / "weights" / "adapter" / "adapter_model.safetensors").tensors
    copies_of_a = 2 * 2 * 4 * 48  # transformers has three layers for queries, keys and values
    assert sum(tensor.numel() for tensor in adapter.values()) == trained + copies_of_a
    with_layers = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, lora=None))
    sizes = [checkpoint.estimate_size(each.build_state()) for each in (run, with_layers)]
    assert sizes[0][0] == 4 * trained * 4
    assert sizes[1][0] > 20 * sizes[0][0]
    assert sizes[0][1] > sizes[1][1]  # the weights: of the whole model, and the updates


def test_a_run_without_lora_writes_no_adapter(tmp_path: Path) -> None:
    run_training(build_run(recipe=build_recipe(LoRAConfig(rank=1), lora=None)), tmp_path / "run")
    assert not (tmp_path / "run" / "weights" / "adapter").exists()


# --- resumed, on several ranks, sharded -------------------------------------------------------------------------------


def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    run = build_run()
    run_training(run, tmp_path / "whole", save_every_seconds=0.0)
    child = os.fork()
    if not child:
        run_training(run, tmp_path / "killed", die_after(3), save_every_seconds=0.0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert os.waitstatus_to_exitcode(kill_run(run, tmp_path / "killed", 60)) == 0
    assert digest_weights(tmp_path / "killed") == digest_weights(tmp_path / "whole")
    assert digest_adapter(tmp_path / "killed") == digest_adapter(tmp_path / "whole")


def die_after(step: int) -> Callable[[Any], None]:
    def die(step_end: Any) -> None:
        if step_end.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def stop_after(step: int) -> Callable[[Any], None]:
    def stop(step_end: Any) -> None:
        if step_end.step == step:
            raise KeyboardInterrupt

    return stop


def test_another_base_is_refused_when_a_run_is_resumed(tmp_path: Path) -> None:
    """Frozen weights are not in the checkpoint: those of the model that is given must be the same."""
    with pytest.raises(KeyboardInterrupt):
        run_training(build_run(), tmp_path / "run", stop_after(4), save_every_seconds=0.0)
    other = build_base()
    with torch.no_grad():
        other.model.state_dict()["blocks.1.mlp.fc1.weight"][3, 3] += 1e-6
    with pytest.raises(ModelError, match="the model to start from is not the one that this run was started with"):
        run_training(build_run(base=other), tmp_path / "run", resume=True)
    run_training(build_run(), tmp_path / "run", resume=True)


def test_ranks_compute_what_one_process_computes(tmp_path: Path) -> None:
    recipe = build_recipe(LoRAConfig(rank=4, layers="all", dora=True), optimizer=SGD)
    run_training(build_run(recipe=recipe), tmp_path / "one")
    for name, shard in (("two", False), ("sharded", True)):

        def work(group: ProcessGroup, name: str = name, *, shard: bool = shard) -> None:
            run_training(build_run(group, recipe=recipe, shard=shard, micro_batches=2), tmp_path / name)

        assert wait_for_ranks(start_ranks(2, work)) == [0, 0]
        assert read_last_row(tmp_path / name) == pytest.approx(read_last_row(tmp_path / "one"), rel=1e-5)
        torch.testing.assert_close(read_weights(tmp_path / name), read_weights(tmp_path / "one"), atol=1e-5, rtol=0)
        adapters = [
            read_tensors(tmp_path / folder / "weights" / "adapter" / ADAPTER_FILES[1]).tensors
            for folder in (name, "one")
        ]
        assert adapters[0].keys() == adapters[1].keys()
        for key, tensor in adapters[1].items():
            torch.testing.assert_close(adapters[0][key], tensor, atol=1e-4, rtol=0)


def test_a_state_saved_by_sharded_ranks_is_loaded_by_any_number(tmp_path: Path) -> None:
    """The same tensors, at two ranks, at three and in one process."""
    recipe = build_recipe(LoRAConfig(rank=5, layers="all", dora=True))

    def save_state(group: ProcessGroup) -> None:
        run = build_run(group, recipe=recipe, shard=True)
        with pytest.raises(KeyboardInterrupt):
            run_training(run, tmp_path / "run", stop_after(4), save_every_seconds=0.0)

    def load_state(group: ProcessGroup) -> None:
        run = build_run(group, recipe=recipe, shard=group.world_size > 1)
        state = run.build_state()
        stored = checkpoint.read_newest_checkpoint(tmp_path / "run" / "checkpoints", print)
        assert stored is not None
        checkpoint.restore_state(state, stored)
        digest = checkpoint.digest_weights(state.model.state_dict())
        assert digest == stored.facts["weights"]
        assert_same_optimizer(state, stored)

    assert wait_for_ranks(start_ranks(2, save_state)) == [0, 0]
    for ranks in (2, 3):
        assert wait_for_ranks(start_ranks(ranks, load_state)) == [0] * ranks
    load_state(SINGLE_PROCESS)


def assert_same_optimizer(state: TrainState, stored: checkpoint.Checkpoint) -> None:
    """Its moments are of the trained parameters alone, and those of the checkpoint."""
    trained = {name for name, parameter in state.model.named_parameters() if parameter.requires_grad}
    moments = stored.get_pieces("optimizer")
    assert {name.partition("/")[0] for name in moments} == trained
    for group in state.optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            wanted = torch.cat([piece for _, piece in sorted(moments[f"{name}/exp_avg"], key=lambda pair: pair[0])])
            assert torch.equal(fsdp.to_full_tensor(state.optimizer.state[parameter]["exp_avg"]), wanted)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_muon_moves_whole_matrices_and_not_updates_of_them() -> None:
    with pytest.raises(UsageError, match="lora adds small ones to them: choose adam or sgd"):
        build_recipe(LoRAConfig(rank=4), optimizer=OptimizerConfig(kind="muon", lr=1e-3))
