"""Several processes are one run: the same numbers, one agreed end, and a group that starts again where one was lost."""

import dataclasses
import json
import os
import queue
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from vitrail import recipes
from vitrail.config import OptimizerConfig, ScheduleConfig
from vitrail.data.sources import open_dataset
from vitrail.errors import StoppedError, UsageError
from vitrail.runtime import distributed
from vitrail.runtime.signals import StopRequest
from vitrail.training import checkpoint
from vitrail.training.run_folder import choose_run_folder
from vitrail.training.step import build_train_state
from vitrail.training.trainer import Trainer
from vitrail.training.training_run import TrainingRun
from vitrail.weights.load import load


def build_run(group: distributed.ProcessGroup = distributed.SINGLE_PROCESS, **changes: Any) -> TrainingRun:
    """1,439 digits in batches of 103, of which the last has 100.

    SGD, because Adam and Muon make steps of one size from gradients of nothing but rounding, a key's bias for one.
    """
    named = recipes.get_recipe("digits")
    optimizer = OptimizerConfig(kind="sgd", lr=0.1, weight_decay=0.01, clip=1.0)
    settings = named.settings | {"width": 48, "mlp": 96, "depth": 2}
    recipe = dataclasses.replace(
        named, settings=settings, batch=103, epochs=1, schedule=ScheduleConfig(warmup=3), ema=0.9
    )
    recipe = dataclasses.replace(recipe, optimizer=optimizer)
    fields = {"recipe": recipe, "dataset": open_dataset("digits"), "device": torch.device("cpu"), "group": group}
    return TrainingRun(**(fields | changes))


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ranks(
    world: int, work: Callable[[distributed.ProcessGroup], None], restarts: Sequence[int] = (), **environment: str
) -> list[int]:
    """Fork so many ranks, each of which does the work in one group; their process numbers.

    Where restarts are given, it is as torchrun starts them that counts so many, one on each of as many nodes.
    """
    port, children = str(find_free_port()), []
    for rank in range(world):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            place = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            if restarts:
                place |= {"TORCHELASTIC_RESTART_COUNT": str(restarts[rank]), "TORCHELASTIC_RUN_ID": "test"}
            os.environ.update(place | environment)
            with distributed.join_process_group("cpu") as (group, _):
                work(group)
            code = 0
        except StoppedError as error:
            code = error.exit_code
        finally:
            if code == 1:
                traceback.print_exc()  # which pytest shows if the test fails
            os._exit(code)
    return children


def wait_for_ranks(children: list[int], seconds: float = 60) -> list[int]:
    """The exit codes of processes, of which those that take too long are killed."""
    codes: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(codes) < len(children):
        for child in set(children) - codes.keys():
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [codes[child] for child in children]


def run_training(
    task: TrainingRun, folder: Path, after_step: Callable[[Any], None] = lambda _: None, **options: Any
) -> Any:
    return Trainer(task, folder, after_step=after_step, **options).run()


def read_last_row(folder: Path) -> dict[str, float]:
    lines = (folder / "results.csv").read_text().splitlines()
    found = dict(zip(lines[0].split(","), map(float, lines[-1].split(",")), strict=True))
    found.pop("time")
    return found


def read_weights(folder: Path) -> torch.Tensor:
    model = load(folder / "weights" / "last.safetensors").model
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(("world", "micro_batches"), [(2, 1), (2, 3), (4, 1)])
def test_ranks_compute_what_one_process_computes(tmp_path: Path, world: int, micro_batches: int) -> None:
    run_training(build_run(), tmp_path / "one")

    def work(group: distributed.ProcessGroup) -> None:
        found = run_training(build_run(group, micro_batches=micro_batches), tmp_path / "many")
        assert (found is None) == (group.rank > 0)

    assert wait_for_ranks(start_ranks(world, work)) == [0] * world
    assert read_last_row(tmp_path / "many") == pytest.approx(read_last_row(tmp_path / "one"), rel=1e-5)
    torch.testing.assert_close(read_weights(tmp_path / "many"), read_weights(tmp_path / "one"), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("kind", "lr", "bound"), [("adam", 1e-3, 1e-4), ("muon", 1e-2, 3e-3)])
def test_adam_and_muon_differ_by_more_than_sgd_in_weights_and_not_in_losses(
    tmp_path: Path, kind: Any, lr: float, bound: float
) -> None:
    """docs/evidence.md and docs/training.md state these bounds."""
    recipe = dataclasses.replace(
        build_run().recipe, optimizer=OptimizerConfig(kind=kind, lr=lr, weight_decay=0.05, clip=1.0)
    )
    run_training(build_run(recipe=recipe), tmp_path / "one")
    assert wait_for_ranks(
        start_ranks(2, lambda group: run_training(build_run(group, recipe=recipe), tmp_path / "two"))
    ) == [0, 0]
    assert read_last_row(tmp_path / "two") == pytest.approx(read_last_row(tmp_path / "one"), rel=1e-3)
    difference = (read_weights(tmp_path / "two") - read_weights(tmp_path / "one")).abs().max().item()
    assert 1e-7 < difference < bound


def test_a_rank_without_an_image_in_the_last_step_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    few = dataclasses.replace(
        build_run().recipe, epochs=104 / 1439, schedule=ScheduleConfig()
    )  # 103 images, and then one
    run_training(build_run(recipe=few), tmp_path / "one")
    assert wait_for_ranks(
        start_ranks(2, lambda group: run_training(build_run(group, recipe=few), tmp_path / "two"))
    ) == [0, 0]
    torch.testing.assert_close(read_weights(tmp_path / "two"), read_weights(tmp_path / "one"), atol=1e-5, rtol=0)


def signal_at_step(step: int, rank: int, *numbers: int) -> Callable[[distributed.ProcessGroup], Callable[[Any], None]]:
    """Something that sends a rank's own process signals after a step."""

    def of(group: distributed.ProcessGroup) -> Callable[[Any], None]:
        def send(moment: Any) -> None:
            if moment.step == step and group.rank == rank:
                for number in numbers:
                    os.kill(os.getpid(), number)

        return send

    return of


def test_what_one_rank_is_asked_all_do_and_the_state_goes_on_at_another_size(tmp_path: Path) -> None:
    run_training(build_run(), tmp_path / "one")
    ask = signal_at_step(5, 1, signal.SIGUSR1)
    assert wait_for_ranks(
        start_ranks(2, lambda group: run_training(build_run(group), tmp_path / "run", ask(group)))
    ) == [75, 75]
    assert (tmp_path / "run" / "stopped").read_text().startswith("SIGUSR1: stopped after step 5 of 14")
    with pytest.raises(StoppedError):  # a group that torchrun starts again leaves at once where it was stopped
        run_training(build_run(distributed.ProcessGroup(restart_count=1)), tmp_path / "run", resume=True)
    told: list[str] = []
    run_training(build_run(), tmp_path / "run", resume=True, notify=told.append)
    assert "after step 5." in told[0]
    assert not (tmp_path / "run" / "stopped").exists()
    torch.testing.assert_close(read_weights(tmp_path / "run"), read_weights(tmp_path / "one"), atol=1e-5, rtol=0)


def test_a_group_of_another_size_goes_on_where_torchrun_ended_the_one_before(tmp_path: Path) -> None:
    """As nodes come and go: torchrun sends SIGTERM, and gives the command that began the run to other ranks."""
    run_training(build_run(), tmp_path / "one", save_every_seconds=0.0)
    story = []
    for world, last in ((2, 5), (1, 9), (2, 99)):
        ask = signal_at_step(last, world - 1, signal.SIGTERM)
        children = start_ranks(
            world,
            lambda group: run_training(build_run(group), tmp_path / "run", ask(group), save_every_seconds=0.0),  # noqa: B023
            restarts=[0] * world,
        )
        story.append(wait_for_ranks(children))
    assert story == [[75, 75], [75], [0, 0]]
    both = [read_steps(tmp_path / name) for name in ("run", "one")]
    assert [step for step, _ in both[0]] == list(range(1, 15))  # each once in the final history
    assert [loss for _, loss in both[0]] == pytest.approx([loss for _, loss in both[1]], abs=1e-5)
    with pytest.raises(UsageError, match="exists already"):  # whoever did not begin the run is not let in
        run_training(build_run(distributed.ProcessGroup(agents=("test elsewhere 1",))), tmp_path / "run")


def read_steps(folder: Path) -> list[tuple[int, float]]:
    """The number and loss of each step in the final history of a run that saved them all."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [(event["step"], event["loss"]) for event in events if event["event"] == "checkpoint"]


def test_a_rank_whose_peer_is_dead_ends_soon_and_saves_nothing(tmp_path: Path) -> None:
    """Even where it is asked to stop and save, as torchrun asks the others when it has found one dead."""

    def work(group: distributed.ProcessGroup) -> None:
        def fail(moment: Any) -> None:
            if moment.step == 5:
                time.sleep(0.5 * (1 - group.rank))
                os.kill(os.getpid(), signal.SIGKILL if group.rank else signal.SIGTERM)

        run_training(build_run(group), tmp_path / "run", fail, save_every_seconds=0.0)

    assert wait_for_ranks(start_ranks(2, work), seconds=20) == [1, -signal.SIGKILL]
    newest = checkpoint.read_newest_checkpoint(tmp_path / "run" / "checkpoints", print)
    assert newest is not None
    assert newest.step == 4
    assert not (tmp_path / "run" / "stopped").exists()


def test_ranks_find_each_other_among_what_the_dead_have_left(tmp_path: Path) -> None:
    """In the store of a torchrun, which outlives its groups, and with torchruns that count restarts differently."""
    stores: Any = torch.distributed
    store = stores.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("vitrail 1", "of one that died before it was answered")
    place = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def work(group: distributed.ProcessGroup) -> None:
        assert group.restart_count == 3  # what any of them counts
        assert distributed.all_reduce_sum(torch.tensor(group.rank)) == 3

    for _ in range(2):
        assert wait_for_ranks(start_ranks(3, work, restarts=[1, 0, 3], **place)) == [0, 0, 0]


def test_a_command_that_torchrun_gives_again_neither_refuses_nor_removes_its_run(tmp_path: Path) -> None:
    ours, others = distributed.ProcessGroup(agents=("a", "b")), distributed.ProcessGroup(agents=("c",))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "torchrun").write_text("b\nd\n")
    for overwrite in (False, True):
        options: Any = {"resume": False, "overwrite": overwrite, "notify": pytest.fail}
        assert choose_run_folder("train", tmp_path / "run", ours, **options) == (tmp_path / "run", True)
        with pytest.raises(UsageError, match=r"run exists already|run is no run to overwrite"):
            choose_run_folder("train", tmp_path / "run", others, **options)


def test_a_ctrl_c_that_torchrun_passes_on_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    announced: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    asked = StopRequest(announced.put)
    for _ in range(2):
        asked.receive(signal.SIGINT, None)
    assert asked.signal == signal.SIGINT
    assert announced.get(timeout=30) == signal.SIGINT
    assert announced.empty()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    with pytest.raises(KeyboardInterrupt):
        asked.receive(signal.SIGINT, None)


def test_alone_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert distributed.read_process_group() == distributed.SINGLE_PROCESS
    assert distributed.all_reduce_max(15, torch.device("cpu")) == 15
    assert distributed.broadcast("here") == "here"
    made = build_run()
    assert build_train_state(made.build_model(), made.recipe).network is not None
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="RANK is 2 and WORLD_SIZE 2"):
        distributed.read_process_group()
