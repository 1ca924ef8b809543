"""A model divided over ranks computes what a whole one computes, and its state goes on at any number of them."""

import dataclasses
import json
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
from vitrail import recipes
from vitrail.cli import main
from vitrail.config import OptimizerConfig, ScheduleConfig
from vitrail.data.sources import open_dataset
from vitrail.files import compute_sha256
from vitrail.model.vit import Model
from vitrail.runtime import distributed
from vitrail.runtime.distributed import SINGLE_PROCESS, ProcessGroup
from vitrail.training import checkpoint, fsdp, loop
from vitrail.training.step import TrainState, build_train_state, train_step
from vitrail.training.training_run import TrainingRun

CPU = torch.device("cpu")
OPTIMISERS = {
    "adam": OptimizerConfig(kind="adam", lr=1e-3, weight_decay=0.1, clip=1.0, eps=1e-4),
    "muon": OptimizerConfig(kind="muon", lr=3e-3, weight_decay=0.1, clip=1.0, eps=1e-4),
    "sgd": OptimizerConfig(kind="sgd", lr=0.1, weight_decay=0.01, clip=1.0),
}


def task(group: ProcessGroup = SINGLE_PROCESS, kind: str = "adam", **changes: Any) -> TrainingRun:
    """Six steps of 103 digits with an average of weights, and an evaluation of shares that differ by a batch.

    A key's bias has gradients of nothing but rounding, of which Adam with a small eps would make whole steps.
    """
    named = recipes.get_recipe("digits")
    settings = named.settings | {"width": 48, "mlp": 96, "depth": 2}
    recipe = dataclasses.replace(named, settings=settings, batch=103, epochs=618 / 1439, ema=0.9)
    recipe = dataclasses.replace(recipe, schedule=ScheduleConfig(warmup=3), optimizer=OPTIMISERS[kind])
    fields = {"recipe": recipe, "dataset": open_dataset("digits"), "device": CPU, "group": group, "shard": True}
    return TrainingRun(**(fields | changes))


@pytest.fixture(autouse=True)
def _shares_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_EVAL_BATCH_SIZE", len(open_dataset("digits").splits["val"]) // 2)


def losses(folder: Path) -> Callable[[Any], None]:
    """What writes down the loss and gradient of each step."""

    def note(moment: Any) -> None:
        with (folder.with_suffix(".losses")).open("a") as file:
            file.write(f"{moment.result.loss!r} {moment.result.grad_norm!r}\n")

    return note


def noted(folder: Path) -> list[float]:
    return [float(number) for number in folder.with_suffix(".losses").read_text().split()]


@pytest.mark.parametrize(("kind", "micro_batches"), [("adam", 3), ("muon", 2)])
def test_sharded_ranks_compute_what_one_process_computes(tmp_path: Path, kind: str, micro_batches: int) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run_training(task(kind=kind), one, losses(one))

    def work(group: ProcessGroup) -> None:
        mine = task(group, kind, micro_batches=micro_batches)
        assert run_training(mine, two, losses(two) if group.is_rank0 else lambda _: None) is None or group.is_rank0

    assert wait_for_ranks(start_ranks(2, work)) == [0, 0]
    assert noted(two) == pytest.approx(noted(one), rel=1e-5)
    assert read_last_row(two) == pytest.approx(read_last_row(one), rel=1e-5)
    torch.testing.assert_close(read_weights(two), read_weights(one), atol=1e-5, rtol=0)


def test_a_rank_without_an_image_in_a_part_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    few = dataclasses.replace(
        task(kind="sgd").recipe, epochs=104 / 1439, schedule=ScheduleConfig()
    )  # 103 images, then one
    run_training(task(recipe=few), tmp_path / "one")
    assert wait_for_ranks(
        start_ranks(2, lambda group: run_training(task(group, recipe=few, micro_batches=2), tmp_path / "two"))
    ) == [
        0,
        0,
    ]
    torch.testing.assert_close(read_weights(tmp_path / "two"), read_weights(tmp_path / "one"), atol=1e-5, rtol=0)


# --- models ----------------------------------------------------------------------------------------------------------


def gradients(model: Model, images: Tensor) -> dict[str, Tensor]:
    model.train()
    model(images).square().sum().backward()
    return {
        name: fsdp.to_full_tensor(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def half_frozen() -> Model:
    model = model_factory.build_vit(depth=3)
    for parameter in (
        *model.patch_embed.parameters(),
        *model.blocks[0].parameters(),
        *model.blocks[1].attn.parameters(),
    ):
        parameter.requires_grad_(False)
    return model


def recomputing() -> Model:
    model = model_factory.build_vit(depth=3)
    model.recompute = True
    return model


MODELS: dict[str, Callable[[], Model]] = {
    "a class token, read alone by the last block": model_factory.build_vit,
    "relative positions": lambda: model_factory.build_vit(positions="relative"),
    "rotary positions, gated MLPs and a projection": lambda: model_factory.build_vit(
        **model_factory.VARIANTS["gated-normed"] | model_factory.VARIANTS["rotary-index"], norm_pre=True, projection=24
    ),
    "a table of biases": lambda: model_factory.build_vit(positions="relative-bias"),
    "activations computed again": recomputing,
    "some parameters frozen": half_frozen,
    "a hybrid": lambda: model_factory.build_vit(stem=model_factory.STEM, patch=1, image_size=(64, 64)),
    "a ResNet": lambda: model_factory.build_bit(image_size=(64, 64)),
}


def test_every_kind_of_model_has_its_gradients_and_copies(tmp_path: Path) -> None:
    """Each of three ranks has the same images, so the mean of their gradients is the gradient of a whole model."""

    def work(group: ProcessGroup) -> None:
        for make in MODELS.values():
            model, other = make(), make()
            images = model_factory.draw_images(model.config, 2)
            wanted = gradients(model, images)
            fsdp.shard_model(other, CPU)
            found = gradients(other, images)
            assert found.keys() == wanted.keys()
            for name, gradient in wanted.items():
                torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
            copied = fsdp.copy_full_model(other)
            assert (copied is None) == (group.rank > 0)
            for name, tensor in model.state_dict().items() if copied else ():
                assert torch.equal(copied.state_dict()[name], tensor)
            units = [module for module in other.modules() if isinstance(module, fsdp.SHARDED_UNITS)]
            assert units
            assert all(map(fsdp.is_sharded, units))

    assert wait_for_ranks(start_ranks(3, work)) == [0] * 3


def test_compiled_blocks_stay_compiled_in_a_sharded_model() -> None:
    def work(_: ProcessGroup) -> None:
        graphs = []

        def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        model, other = model_factory.build_vit(depth=3), model_factory.build_vit(depth=3)
        for block in other.blocks:
            block.compile(backend=counting)  # as ViT.compile_blocks does, with a compiler that counts
        fsdp.shard_model(other, CPU)
        images = model_factory.draw_images(model.config, 2)
        wanted, found = gradients(model, images), gradients(other, images)
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], atol=1e-5, rtol=1e-4)
        assert len(graphs) == 2  # a block, and the last one with its single query

    assert wait_for_ranks(start_ranks(2, work)) == [0, 0]


# --- the state -------------------------------------------------------------------------------------------------------


def stepped(mine: TrainingRun, steps: int = 3) -> TrainState:
    """The state after some steps of the same images on every rank."""
    state = build_train_state(mine.build_model(), mine.recipe)
    images = model_factory.draw_images(mine.config, 4)
    for _ in range(steps):
        train_step(
            state, [(images, torch.arange(4))], mine.recipe, step_images=4 * mine.group.world_size, steps=9, seed=0
        )
    return state


def everything(state: TrainState) -> dict[str, Tensor]:
    """All tensors of a state, whole."""
    found = {f"model {name}": tensor for name, tensor in state.model.state_dict().items()}
    for group in state.optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            found |= {f"{name} {kind}": tensor for kind, tensor in state.optimizer.state[parameter].items()}
    assert state.ema is not None
    found |= {f"average {name}": tensor for name, tensor in state.ema.tensors.items()}
    return {name: fsdp.to_full_tensor(tensor.detach()).clone() for name, tensor in found.items()}


def test_a_state_saved_by_two_ranks_is_loaded_by_any_number(tmp_path: Path) -> None:
    """Sharded at 2 to sharded at 4, DDP at 2 and one process, and from there to sharded at 3: the same tensors.

    With Muon, which leaves some parameters to AdamW and so has both kinds of state.
    """
    path = tmp_path / checkpoint.format_checkpoint_name(3)

    def save(group: ProcessGroup) -> None:
        state = stepped(task(group, "muon"))
        whole = everything(state)
        checkpoint.write_checkpoint(
            tmp_path, checkpoint.copy_state(state, {"seen": group.rank}), distributed.make_all_gather()
        )
        if group.is_rank0:
            torch.save(whole, tmp_path / "expected.pt")

    def load(group: ProcessGroup, *, shard: bool = True) -> TrainState:
        state = build_train_state((mine := task(group, "muon", shard=shard)).build_model(), mine.recipe)
        assert fsdp.is_sharded(state.model) == (shard and group.world_size > 1)
        snapshot = checkpoint.read_checkpoint(path)
        assert snapshot.facts == {"seen": 0}
        checkpoint.restore_state(state, snapshot)
        found, expected = everything(state), torch.load(tmp_path / "expected.pt")
        assert state.step == 3
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        return state

    assert wait_for_ranks(start_ranks(2, save)) == [0, 0]
    files = {f"{kind}-0000{rank}.safetensors" for kind in ("model", "optimizer", "average") for rank in (0, 1)}
    assert {file.name for file in path.iterdir()} == files | {"state.json", "manifest.json"}
    sizes = [sum(file.stat().st_size for file in path.glob(f"*-0000{rank}.safetensors")) for rank in (0, 1)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.2)  # each has its half
    assert wait_for_ranks(start_ranks(4, load)) == [0] * 4
    assert wait_for_ranks(start_ranks(2, lambda group: load(group, shard=False))) == [0, 0]
    checkpoint.write_checkpoint(tmp_path, checkpoint.copy_state(load(SINGLE_PROCESS), {"seen": 0}))
    assert (path / "model.safetensors").exists()
    assert wait_for_ranks(start_ranks(3, load)) == [0] * 3


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_group_that_lost_a_rank_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    def dropping(group: ProcessGroup) -> TrainingRun:
        mine = task(group)
        return dataclasses.replace(mine, recipe=dataclasses.replace(mine.recipe, dropout=0.1))

    def work(folder: str, lost: int | None) -> Callable[[ProcessGroup], None]:
        def die(moment: Any) -> None:
            if moment.step == lost:
                os.kill(os.getpid(), signal.SIGKILL)

        def run(group: ProcessGroup) -> None:
            after = die if group.rank == 1 else lambda _: None
            run_training(dropping(group), tmp_path / folder, after, save_every_seconds=0.0, resume=True)

        return run

    assert wait_for_ranks(start_ranks(2, work("whole", None))) == [0, 0]
    assert wait_for_ranks(start_ranks(2, work("run", 4))) == [1, -signal.SIGKILL]
    assert checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")[0].name in (
        checkpoint.format_checkpoint_name(2),
        checkpoint.format_checkpoint_name(3),
    )
    assert wait_for_ranks(start_ranks(2, work("run", None))) == [0, 0]
    for name in ("best", "last"):
        one, other = (tmp_path / folder / "weights" / f"{name}.safetensors" for folder in ("whole", "run"))
        assert compute_sha256(one) == compute_sha256(other)
    digests = [
        [json.loads(line).get("weights") for line in (tmp_path / folder / "events.jsonl").read_text().splitlines()]
        for folder in ("whole", "run")
    ]
    assert digests[0] == digests[1]


def test_what_one_rank_is_asked_all_do_and_the_state_goes_on_in_one_process(tmp_path: Path) -> None:
    run_training(task(), tmp_path / "one")

    def work(group: ProcessGroup) -> None:
        def ask(moment: Any) -> None:
            if moment.step == 3 and group.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        run_training(task(group), tmp_path / "run", ask)

    assert wait_for_ranks(start_ranks(2, work)) == [75, 75]
    told: list[str] = []
    run_training(task(), tmp_path / "run", resume=True, notify=told.append)
    assert "after step 3. Not bit-identical to an uninterrupted run: processes 2 -> 1, sharded True -> False" in told[0]
    torch.testing.assert_close(read_weights(tmp_path / "run"), read_weights(tmp_path / "one"), atol=1e-5, rtol=0)


def test_the_command_shards_over_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["train", "digits", "--data", "digits", "--epochs", "0.2", "--warmup", "1", "--workers", "0", "--shard"]

    def work(_: ProcessGroup) -> None:
        torch.distributed.destroy_process_group()  # the command joins by itself
        os._exit(main([*command, "--device", "cpu", "--out", "two"]))

    assert wait_for_ranks(start_ranks(2, work)) == [0, 0]
    assert json.loads(Path("two/config.json").read_text())["sharded"] is True
    assert list(Path("two/checkpoints").glob("*/model-00001.safetensors"))
    monkeypatch.setattr("vitrail.training.trainer.Trainer.run", lambda _: None)
    assert main([*command, "--device", "cpu", "--out", "one"]) == 0
    assert "--shard changes nothing in one process" in capsys.readouterr().err


def test_sharded_steps_are_not_recorded() -> None:
    cuda = torch.device("cuda")
    assert task(device=cuda).can_use_cuda_graph
    assert not task(ProcessGroup(world_size=2), device=cuda).can_use_cuda_graph
