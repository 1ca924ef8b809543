"""Several processes are one run: the same numbers, one agreed end, and a group that starts again where one was lost."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitrail import recipes
from vitrail.config import Optimiser, Schedule
from vitrail.data.sources import open_data
from vitrail.errors import UsageError
from vitrail.train import distributed
from vitrail.train.run import run
from vitrail.train.signals import StoppedError
from vitrail.train.step import begin
from vitrail.train.task import Task
from vitrail.weights.load import load


def task(group: distributed.Group = distributed.ALONE, **changes: Any) -> Task:
    """1,439 digits in batches of 103, of which the last has 100.

    SGD, because Adam and Muon make steps of one size from gradients of nothing but rounding, a key's bias for one.
    """
    named = recipes.named("digits")
    optimiser = Optimiser(kind="sgd", lr=0.1, weight_decay=0.01, clip=1.0)
    settings = named.settings | {"width": 48, "mlp": 96, "depth": 2}
    recipe = dataclasses.replace(named, settings=settings, batch=103, epochs=1, schedule=Schedule(warmup=3), ema=0.9)
    recipe = dataclasses.replace(recipe, optimiser=optimiser)
    fields = {"recipe": recipe, "dataset": open_data("digits"), "device": torch.device("cpu"), "group": group}
    return Task(**(fields | changes))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def started(world: int, work: Callable[[distributed.Group], None]) -> list[int]:
    """Fork so many ranks, each of which does the work in one group; their process numbers."""
    port, children = free_port(), []
    for rank in range(world):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
            with distributed.joined("cpu") as (group, _):
                work(group)
            code = 0
        except StoppedError as error:
            code = error.exit_code
        finally:
            os._exit(code)
    return children


def ended(children: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def trained(task: Task, folder: Path, after_step: Callable[[Any], None] = lambda _: None, **options: Any) -> Any:
    return run(task, folder, after_step=after_step, after_epoch=lambda _: None, **options)


def last_row(folder: Path) -> dict[str, float]:
    lines = (folder / "results.csv").read_text().splitlines()
    found = dict(zip(lines[0].split(","), map(float, lines[-1].split(",")), strict=True))
    found.pop("time")
    return found


def weights(folder: Path) -> torch.Tensor:
    model = load(folder / "weights" / "last.safetensors").model
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(("world", "micro_batches"), [(2, 1), (2, 3), (4, 1)])
def test_ranks_compute_what_one_process_computes(tmp_path: Path, world: int, micro_batches: int) -> None:
    trained(task(), tmp_path / "one")

    def work(group: distributed.Group) -> None:
        found = trained(task(group, micro_batches=micro_batches), tmp_path / "many")
        assert (found is None) == (group.rank > 0)

    assert ended(started(world, work)) == [0] * world
    assert last_row(tmp_path / "many") == pytest.approx(last_row(tmp_path / "one"), rel=1e-5)
    torch.testing.assert_close(weights(tmp_path / "many"), weights(tmp_path / "one"), atol=1e-5, rtol=0)


def test_a_rank_without_an_image_in_the_last_step_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    few = dataclasses.replace(task().recipe, epochs=104 / 1439, schedule=Schedule())  # 103 images, and then one
    trained(task(recipe=few), tmp_path / "one")
    assert ended(started(2, lambda group: trained(task(group, recipe=few), tmp_path / "two"))) == [0, 0]
    torch.testing.assert_close(weights(tmp_path / "two"), weights(tmp_path / "one"), atol=1e-5, rtol=0)


def test_what_one_rank_is_asked_all_do_and_the_state_goes_on_at_another_size(tmp_path: Path) -> None:
    trained(task(), tmp_path / "one")

    def work(group: distributed.Group) -> None:
        def ask(moment: Any) -> None:
            if moment.step == 5 and group.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        trained(task(group), tmp_path / "run", ask)

    assert ended(started(2, work)) == [75, 75]
    assert (tmp_path / "run" / "stopped").read_text().startswith("SIGTERM: stopped after step 5 of 14")
    told: list[str] = []
    trained(task(), tmp_path / "run", resume=True, tell=told.append)
    assert "after step 5." in told[0]
    assert not (tmp_path / "run" / "stopped").exists()
    torch.testing.assert_close(weights(tmp_path / "run"), weights(tmp_path / "one"), atol=1e-5, rtol=0)
    (tmp_path / "run" / "stopped").write_text("")
    with pytest.raises(StoppedError):  # a group that torchrun starts again leaves at once where it was stopped
        trained(task(distributed.Group(restarts=1)), tmp_path / "run", resume=True)


def test_a_lost_rank_starts_the_group_again_from_its_checkpoint(tmp_path: Path) -> None:
    """With torchrun itself: a worker is killed once it has saved, and the run ends as if nothing had been."""
    code, err = bereaved(tmp_path)
    assert code == 0, err
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    steps = [event["step"] for event in events if event["event"] == "checkpoint"]
    assert steps == list(range(1, 46))  # every step once in the final history
    assert "resumed after step" in (tmp_path / "run" / "run.log").read_text()
    assert events[-1]["event"] == "end"


def bereaved(folder: Path) -> tuple[int, str]:
    """Start two ranks by torchrun and kill one after its third checkpoint; how it ended, and what was said."""
    recipe = ("train", "digits", "--data", "digits", "--epochs", "2", "--warmup", "5", "--workers", "0")
    command = [*recipe, "--device", "cpu", "--out", "run", "--save-every", "0"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [*launcher, "--max-restarts", "3", "-m", "vitrail", *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    group = subprocess.Popen(arguments, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    end = time.monotonic() + 120
    while not list(folder.glob("run/checkpoints/step-0000000[3-9]")) and time.monotonic() < end:
        time.sleep(0.05)
    workers = [int(line) for line in children(group.pid) if b"vitrail" in Path(f"/proc/{line}/cmdline").read_bytes()]
    os.kill(workers[-1], signal.SIGKILL)
    _, err = group.communicate(timeout=240)
    return group.returncode, err.decode()


def children(parent: int) -> list[str]:
    """The processes that a process started, and those that they started."""
    found: list[str] = []
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in path.read_text().split():
            found += [child, *children(int(child))]
    return found


def test_alone_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert distributed.group() == distributed.ALONE
    assert distributed.agreed(15, torch.device("cpu")) == 15
    assert distributed.told("here") == "here"
    made = task()
    assert begin(made.model(), made.recipe).network is not None
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="RANK is 2 and WORLD_SIZE 2"):
        distributed.group()
