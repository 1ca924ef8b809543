"""torchrun loses processes and whole nodes, and the run ends as if it had not: every position is trained once.

Started by torchrun, this file is `vitrail` with a small recipe, which writes down the positions that it trains.
"""

import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vitrail import recipes
from vitrail.cli import main
from vitrail.config import OptimizerConfig
from vitrail.data import loader

EPOCHS, BATCH = 4, 64
POSITIONS = EPOCHS * 1439
STEPS = -(-POSITIONS // BATCH)  # the last is short
PATIENCE = 180.0  # seconds for anything to happen; what hangs fails, and its words are shown
Soaked = Callable[[int, str, str, str], None]


# --- in a process of the group ---------------------------------------------------------------------------------------


def worker(folder: Path, dropout: float) -> int:
    """`vitrail train` into a folder, with the positions of each step written down, at the pace that a file says.

    SGD, because Muon makes steps of one size from gradients of nothing but rounding.
    """
    named = recipes.RECIPES["digits"]
    optimizer = OptimizerConfig(kind="sgd", lr=0.1, weight_decay=0.01, clip=1.0)
    settings = named.settings | {"width": 48, "mlp": 96, "depth": 2}
    recipes.RECIPES["digits"] = dataclasses.replace(named, settings=settings, optimizer=optimizer, dropout=dropout)
    prepared = loader.prepare_train_batch

    def recorded(batch: loader.Batch, training_data: loader.TrainingData, plan: loader.BatchPlan, step: int) -> Any:
        time.sleep(float((folder / "pace").read_text()))
        images, targets = prepared(batch, training_data, plan, step)
        mine = batch.positions[: len(images)].tolist()  # without the partner of the last, which is mixed into it
        entry = {"at": time.time(), "step": step, "rank": plan.rank, "world": plan.world_size, "positions": mine}
        with (folder / f"positions-{os.getpid()}").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return images, targets

    loader.prepare_train_batch = recorded
    options = ("--epochs", str(EPOCHS), "--workers", "0", "--device", "cpu", "--save-every", "0")
    return main(["train", "digits", "--data", "digits", *options, "--out", str(folder / "run")])


# --- around the group ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def launched(
    folder: Path, name: str, *arguments: str, dropout: float, **place: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs this file, or torchrun with it; at the end of the block all that it started is gone."""
    script = [str(Path(__file__)), str(folder), str(dropout)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | place
    with (folder / f"log-{name}").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments, *script], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        lose(process)


def lose(process: subprocess.Popen[bytes]) -> None:
    """Kill a torchrun and its workers at once, as when their machine fails."""
    for one in [process.pid, *workers(process)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    process.wait()


def workers(torchrun: subprocess.Popen[bytes]) -> list[int]:
    """The processes that a torchrun runs now."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(pid) for pid in Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()]
    return []


def until(found: Callable[[], bool], what: str, folder: Path) -> None:
    """Wait for something; what takes too long fails with all that was said."""
    end = time.monotonic() + PATIENCE
    while not found():
        if time.monotonic() > end:
            pytest.fail(f"{what} did not happen within {PATIENCE:.0f} s\n{said(folder)}")
        time.sleep(0.02)


def said(folder: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-6000:]}" for log in sorted(folder.glob("log-*")))


def ended_well(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    set_pace(folder, 0)
    until(lambda: all(process.poll() is not None for process in processes), "the end", folder)
    assert [process.returncode for process in processes] == [0] * len(processes), said(folder)


def made(folder: Path, pace: float) -> Path:
    folder.mkdir()
    set_pace(folder, pace)
    return folder


def set_pace(folder: Path, seconds: float) -> None:
    (folder / "fresh").write_text(str(seconds))
    (folder / "fresh").replace(folder / "pace")


def saved(folder: Path) -> int:
    """The step of the newest checkpoint."""
    return max((int(path.name[5:]) for path in folder.glob("run/checkpoints/step-????????")), default=0)


@contextlib.contextmanager
def uninterrupted(folder: Path, dropout: float) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The same run in two processes that nothing happens to, started without torchrun."""
    from tests.runtime.test_distributed import find_free_port

    made(folder, 0)
    common = {"WORLD_SIZE": "2", "MASTER_PORT": str(find_free_port())}
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(launched(folder, str(rank), dropout=dropout, RANK=str(rank), **common))
            for rank in range(2)
        ]


# --- what it came to -------------------------------------------------------------------------------------------------


def history(folder: Path) -> list[dict[str, Any]]:
    """The steps of the run as events.jsonl tells them in the end: the loss of each, and the weights after it."""
    lines = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines if line["event"] not in ("checkpoint", "epoch")] == ["end"]
    return [line for line in lines if line["event"] == "checkpoint"]


def entries(folder: Path) -> list[dict[str, Any]]:
    """What workers have written down so far; a last line without an end was not finished."""
    lines = [line for path in folder.glob("positions-*") for line in path.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def worlds(folder: Path) -> list[int]:
    """Among how many ranks each step was divided, after it was seen that they trained each of its positions once.

    Of a step that was computed more than once the last time counts: what came before was not saved.
    """
    last: dict[tuple[int, int], dict[str, Any]] = {}
    for entry in sorted(entries(folder), key=lambda entry: entry["at"]):
        last[entry["step"], entry["rank"]] = entry
    found = []
    for step in range(STEPS):
        ranks = [last[step, rank] for rank in range(2) if (step, rank) in last]
        world = max(ranks, key=lambda entry: entry["at"])["world"]
        positions = [position for entry in ranks[:world] for position in entry["positions"]]
        assert positions == list(range(step * BATCH, min((step + 1) * BATCH, POSITIONS)))
        found.append(world)
    return found


def sums(folder: Path) -> list[bytes]:
    return [(folder / "run" / "weights" / f"{name}.safetensors").read_bytes() for name in ("last", "best")]


# --- promises --------------------------------------------------------------------------------------------------------


def killed(count: int, root: Path, seed: int) -> None:
    """Kill one of two ranks so many times: after a random step, or a random time after its start, in turn."""
    with uninterrupted(root / "whole", 0.1) as whole:
        ended_well(whole, root / "whole")
    folder, draws, before = made(root / "killed", 0.02), random.Random(seed), set[int]()
    restarts = ("--max-restarts", str(count))  # so that nothing else may fail
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *restarts)
    with launched(folder, "torchrun", *torchrun, dropout=0.1) as group:
        for number in range(count):
            until(lambda: len(set(workers(group)) - before) == 2, f"start {number}", folder)  # noqa: B023
            before = set(workers(group))
            step = (number + draws.random()) * STEPS / (count + 1)
            moment = time.monotonic() + (draws.uniform(0, 10) if number % 2 else PATIENCE)
            until(lambda: saved(folder) > step or time.monotonic() > moment, f"step {step}", folder)  # noqa: B023
            os.kill(draws.choice(sorted(before)), signal.SIGKILL)
        ended_well([group], folder)
    assert [(step["step"], step["loss"], step["weights"]) for step in history(folder)] == [
        (step["step"], step["loss"], step["weights"]) for step in history(root / "whole")
    ]
    assert sums(folder) == sums(root / "whole")
    assert worlds(folder) == [2] * STEPS


def test_a_group_that_loses_a_rank_twice_ends_with_the_same_weights(tmp_path: Path) -> None:
    killed(2, tmp_path, seed=0)


@pytest.mark.soak
def test_a_group_that_loses_a_rank_twenty_times_ends_with_the_same_weights(tmp_path: Path, soaked: Soaked) -> None:
    killed(20, tmp_path, seed=1)
    soaked(7, "ranks may die: killed, the group goes on to the same weights", "20 kills", "20 kills")


@pytest.mark.soak
def test_a_node_that_is_lost_and_comes_back_trains_nothing_twice(tmp_path: Path, soaked: Soaked) -> None:
    from tests.runtime.test_distributed import find_free_port

    with uninterrupted(tmp_path / "whole", 0.0) as whole:
        ended_well(whole, tmp_path / "whole")
    folder = made(tmp_path / "run", 0.05)
    brief = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=3,join_timeout=60"
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{find_free_port()}", "--rdzv-conf", brief)
    torchrun = ("-m", "torch.distributed.run", "--nnodes", "1:2", "--max-restarts", "1", *where)
    with launched(folder, "stays", *torchrun, dropout=0.0) as stays:
        until(lambda: listening(where[3]), "the first node's start", folder)
        with launched(folder, "goes", *torchrun, dropout=0.0):
            until(lambda: seen(folder, 2) > 5, "training on two nodes", folder)
        until(lambda: seen(folder, 1) > seen(folder, 2), "training on one node", folder)
        set_pace(folder, 1)  # so that it does not come to its end alone
        with launched(folder, "returns", *torchrun, dropout=0.0) as returns:
            until(lambda: seen(folder, 2) > seen(folder, 1), "training on two nodes again", folder)
            ended_well([stays, returns], folder)
    losses = [[step["loss"] for step in history(place)] for place in (folder, tmp_path / "whole")]
    assert len(losses[0]) == STEPS
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    divided = worlds(folder)
    assert [world for world, after in zip(divided, [*divided[1:], 0], strict=True) if world != after] == [2, 1, 2]
    soaked(7, "a node is lost and comes back, every position is trained once", "2 -> 1 -> 2", "2 -> 1 -> 2")


def listening(endpoint: str) -> bool:
    """Whether the torchrun that holds the others together can be reached."""
    host, port = endpoint.split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
        return True
    return False


def seen(folder: Path, world: int) -> int:
    """The last step that so many ranks have begun together."""
    return max((entry["step"] for entry in entries(folder) if entry["world"] == world), default=0)


if __name__ == "__main__":
    sys.exit(worker(Path(sys.argv[1]), float(sys.argv[2])))
