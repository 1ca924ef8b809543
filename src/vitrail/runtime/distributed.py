"""Many processes as one run: torchrun's environment, sums over ranks, and what all of them agree on.

A rank is one process with one device. torchrun starts them and tells each its number; without it there is one. Every
function here is the identity where there is one rank, so the code that trains does not ask how many there are.
"""

import contextlib
import datetime
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed

from vitrail.errors import UsageError, VitrailError
from vitrail.runtime import devices

T = TypeVar("T")
_ROWS_AT_ONCE = 2**16  # at a time, so that a device need not hold all
_TIMEOUT = datetime.timedelta(minutes=30)  # rank 0 measures alone at the end, while the others wait


class ProcessGroup(NamedTuple):
    """Which of how many processes this is."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Its number on this machine."""
    restart_count: int = 0
    """How often torchrun has started the group again because a process failed."""
    agents: tuple[str, ...] = ()
    """The torchruns of all ranks, by names that stay the same when they start the group again."""

    @property
    def is_rank0(self) -> bool:
        """Whether this process writes the files and talks to the user."""
        return self.rank == 0


SINGLE_PROCESS = ProcessGroup()


def read_process_group() -> ProcessGroup:
    """What torchrun, or a SLURM script like it, says in the environment."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    try:
        numbers = [int(os.environ.get(name, default)) for name, default in zip(names, (0, 1, 0, 0), strict=True)]
    except ValueError as error:
        raise UsageError(f"{', '.join(names)} in the environment are numbers: {error}") from None
    found = ProcessGroup(numbers[0], numbers[1], numbers[2], numbers[3])
    if not 0 <= found.rank < found.world_size:
        raise UsageError(
            f"RANK is {found.rank} and WORLD_SIZE {found.world_size}; a rank lies from 0 to below the size"
        )
    if run := os.environ.get("TORCHELASTIC_RUN_ID"):
        found = found._replace(agents=(f"{run} {socket.gethostname()} {_identify_parent()}",))
    return found


def _identify_parent() -> str:
    """The process that started this one; where it can be known, also when it began, since numbers are used again."""
    number = os.getppid()
    try:
        began = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return str(number)
    return f"{number}@{began}"


@contextlib.contextmanager
def join_process_group(device_name: str | None) -> Iterator[tuple[ProcessGroup, torch.device]]:
    """This process's place in the group and its device; while the block lasts, it may talk to the others."""
    found = read_process_group()
    device = devices.resolve_device(device_name)
    if device.type == "cuda":
        device = torch.device("cuda", found.local_rank if found.world_size > 1 else device.index or 0)
        torch.cuda.set_device(device)  # graphs are recorded on the current device
    if found.world_size == 1:
        yield found, device
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(
        backend, store=_open_store(found), rank=found.rank, world_size=found.world_size, timeout=_TIMEOUT
    )
    try:
        yield _merge_ranks(found), device
    finally:
        # gloo's thread may still hold the tensors of the last sum, and needs Python's lock to let them go, which the
        # end of the group keeps while it waits for that thread
        time.sleep(0.3)
        distributed.destroy_process_group()


def _merge_ranks(group: ProcessGroup) -> ProcessGroup:
    """The group with what only some of its ranks know: a torchrun counts its own restarts, and one may be new."""
    found: list[Any] = [None] * group.world_size
    distributed.all_gather_object(found, (group.restart_count, group.agents))
    agents = {agent for _, some in found for agent in some}
    return group._replace(restart_count=max(restarts for restarts, _ in found), agents=tuple(sorted(agents)))


def _open_store(group: ProcessGroup) -> Any:
    """Where ranks find each other: torchrun's own, which lives on when it starts a group again, or else rank 0's."""
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    leads = group.is_rank0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    stores: Any = distributed  # it has them, but exports no types of them
    store = stores.TCPStore(address, port, is_master=leads, timeout=_TIMEOUT, wait_for_workers=False)
    return stores.PrefixStore(_agree_on_start_name(store, group), store)


def _agree_on_start_name(store: Any, group: ProcessGroup) -> str:
    """A name for this start of the group, the same on every rank, under which the addresses of the dead do not stand.

    Nothing in the environment is one: torchruns count restarts each for itself, and none where a node comes or goes.
    So every rank leaves a mark of its own, and rank 0 answers the marks until those that stand there have all thanked.
    """
    mine = secrets.token_hex(8)
    if not group.is_rank0:
        store.set(f"vitrail {group.rank}", mine)
        start = str(store.get(f"vitrail answer {mine}").decode())
        store.set(f"vitrail thanks {mine} {start}", "")
        return start
    while True:
        marks = [store.get(f"vitrail {rank}").decode() for rank in range(1, group.world_size)]
        for mark in marks:  # a dead rank's may be among them, until its successor writes over it
            store.set(f"vitrail answer {mark}", mine)
        if store.check([f"vitrail thanks {mark} {mine}" for mark in marks]):
            return mine
        time.sleep(0.05)


def get_world_size() -> int:
    """How many ranks there are."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def is_distributed() -> bool:
    """Whether there are other ranks."""
    return get_world_size() > 1


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """The sum of all ranks' tensors, on each."""
    if is_distributed():
        tensor = tensor.clone()
        distributed.all_reduce(tensor)
    return tensor


def all_reduce_max(number: int, device: torch.device) -> int:
    """The greatest of all ranks' numbers: what one of them was asked for, all do."""
    if not is_distributed():
        return number
    shared = torch.tensor(number, device=device)
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    return int(shared)


def broadcast(text: str) -> str:
    """Rank 0's text, on every rank."""
    if not is_distributed():
        return text
    shared = [text]
    distributed.broadcast_object_list(shared)
    return shared[0]


def run_on_rank0(work: Callable[[], T]) -> T:
    """What rank 0's work gives, on every rank. What it refuses is raised on all: nobody waits for the one that left."""
    if not is_distributed():
        return work()
    shared: list[Any] = [None]
    if distributed.get_rank() == 0:
        try:
            shared = [work()]
        except (VitrailError, OSError) as error:
            shared = [error]
    distributed.broadcast_object_list(shared)
    if isinstance(shared[0], VitrailError | OSError):
        raise shared[0]
    found: T = shared[0]
    return found


def all_gather_rows(rows: Tensor, device: torch.device) -> Tensor:
    """The rows of all ranks' tensors, in the order of the ranks and on the CPU; each may have its own number."""
    if not is_distributed():
        return rows
    mine = rows.to(device)
    counts = [int(count) for count in all_reduce_sum(_fill_rank_slot(len(rows), device))]
    padded = mine.new_zeros(max(counts), *mine.shape[1:])
    padded[: len(mine)] = mine
    found = [torch.empty_like(padded) for _ in counts]
    distributed.all_gather(found, padded)
    return torch.cat([some[:count] for some, count in zip(found, counts, strict=True)]).cpu()


def all_reduce_rows(rows: Tensor, device: torch.device) -> Tensor:
    """The rows of all ranks, each of which has zeros in place of the others'; in place."""
    if is_distributed():
        for some in rows.split(_ROWS_AT_ONCE):
            some.copy_(all_reduce_sum(some.to(device)))
    return rows


def _fill_rank_slot(number: int, device: torch.device) -> Tensor:
    """A place for every rank, and the number in this rank's."""
    places = torch.zeros(get_world_size(), dtype=torch.int64, device=device)
    places[distributed.get_rank()] = number
    return places


def barrier() -> None:
    """Return when every rank is here."""
    if is_distributed():
        distributed.barrier()


def make_all_gather() -> Callable[[Any], list[Any]]:
    """A function that gives what each rank has to say to all of them, in their order.

    One thread a rank may call it while others compute: it speaks through a group of its own, on the CPU.
    """
    apart = distributed.new_group(backend="gloo", timeout=_TIMEOUT)

    def all_gather(mine: Any) -> list[Any]:
        found = [None] * get_world_size()
        distributed.all_gather_object(found, mine, group=apart)
        return found

    return all_gather
