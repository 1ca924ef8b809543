"""Many processes as one run: torchrun's environment, and collectives over ranks.

A rank is one process with one device. torchrun starts them and gives each its number; without torchrun there is one.
Every collective here is the identity for one rank, so the code that trains need not ask how many there are.
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
_ROWS_AT_ONCE = 2**16  # so that a device need not hold all rows
_TIMEOUT = datetime.timedelta(minutes=30)  # rank 0 measures alone at the end, while the others wait


class ProcessGroup(NamedTuple):
    """The place of this process among all."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Its number on this machine, which selects its GPU."""
    restart_count: int = 0
    """How often torchrun has restarted the group because a process failed."""
    agents: tuple[str, ...] = ()
    """The torchrun agents of all ranks, by names that stay the same when they restart the group."""

    @property
    def is_rank0(self) -> bool:
        """Whether this process writes the files and talks to the user."""
        return self.rank == 0


SINGLE_PROCESS = ProcessGroup()


def read_process_group() -> ProcessGroup:
    """Read this process's place from the environment, as torchrun or a SLURM script sets it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    try:
        numbers = [int(os.environ.get(name, default)) for name, default in zip(names, (0, 1, 0, 0), strict=True)]
    except ValueError as error:
        raise UsageError(f"{', '.join(names)} in the environment are numbers: {error}") from None
    group = ProcessGroup(numbers[0], numbers[1], numbers[2], numbers[3])
    if not 0 <= group.rank < group.world_size:
        raise UsageError(
            f"RANK is {group.rank} and WORLD_SIZE {group.world_size}; a rank is from 0 to below the world size"
        )
    if run := os.environ.get("TORCHELASTIC_RUN_ID"):
        group = group._replace(agents=(f"{run} {socket.gethostname()} {_identify_parent()}",))
    return group


def read_task_position() -> tuple[int, int]:
    """The place of this process among tasks that work apart, from 0, and how many there are.

    The environment of a SLURM array job numbers its jobs, and torchrun's, or that of srun, the processes of one.
    """
    environment = os.environ
    position, count = 0, 1
    try:
        if "SLURM_ARRAY_TASK_ID" in environment:
            first, step = (int(environment.get(f"SLURM_ARRAY_TASK_{name}", 1)) for name in ("MIN", "STEP"))
            position = (int(environment["SLURM_ARRAY_TASK_ID"]) - first) // step
            count = int(environment["SLURM_ARRAY_TASK_COUNT"])
        for rank, world_size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
            if world_size in environment:
                size = int(environment[world_size])
                return position * size + int(environment[rank]), count * size
    except (KeyError, ValueError) as error:
        raise UsageError(f"the environment of SLURM or torchrun is incomplete or no numbers: {error}") from None
    return position, count


def leave_process_group() -> None:
    """Make this process one that works alone, on its own GPU, though torchrun or srun started others beside it."""
    local_rank = os.environ.get("SLURM_LOCALID", "0")
    os.environ.setdefault("LOCAL_RANK", local_rank)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


def _identify_parent() -> str:
    """The parent process and, where it is known, when it started, since process numbers are reused."""
    number = os.getppid()
    try:
        start_time = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return str(number)
    return f"{number}@{start_time}"


@contextlib.contextmanager
def join_process_group(device_name: str | None) -> Iterator[tuple[ProcessGroup, torch.device]]:
    """Join the group within the block; yield this process's place in it and its device."""
    group = read_process_group()
    device = devices.resolve_device(device_name)
    if device.type == "cuda":
        alone = group.local_rank % torch.cuda.device_count() if device.index is None else device.index
        device = torch.device("cuda", group.local_rank if group.world_size > 1 else alone)
        torch.cuda.set_device(device)  # graphs are recorded on the current device
    if group.world_size == 1:
        yield group, device
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(
        backend, store=_open_store(group), rank=group.rank, world_size=group.world_size, timeout=_TIMEOUT
    )
    try:
        yield _merge_ranks(group), device
    finally:
        # gloo's thread may still hold the tensors of the last sum and needs Python's lock to free them, while
        # destroy_process_group holds that lock and waits for the thread
        time.sleep(0.3)
        distributed.destroy_process_group()


def _merge_ranks(group: ProcessGroup) -> ProcessGroup:
    """The group with what its ranks know together: each torchrun counts its own restarts, and one may be new."""
    values: list[Any] = [None] * group.world_size
    distributed.all_gather_object(values, (group.restart_count, group.agents))
    agents = {agent for _, rank_agents in values for agent in rank_agents}
    return group._replace(restart_count=max(restarts for restarts, _ in values), agents=tuple(sorted(agents)))


def _open_store(group: ProcessGroup) -> Any:
    """The store where ranks find each other: torchrun's, which outlives a restarted group, or else rank 0's."""
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    is_master = group.is_rank0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    stores: Any = distributed  # it has them, but exports no types
    store = stores.TCPStore(address, port, is_master=is_master, timeout=_TIMEOUT, wait_for_workers=False)
    return stores.PrefixStore(_agree_on_start_name(store, group), store)


def _agree_on_start_name(store: Any, group: ProcessGroup) -> str:
    """A name for this start of the group, the same on every rank, that no earlier start has used.

    The environment has none: each torchrun counts its own restarts, and none where a node joins or leaves. So every
    rank writes a mark of its own, and rank 0 answers the marks until all current ones have acknowledged its answer.
    """
    own_mark = secrets.token_hex(8)
    if not group.is_rank0:
        store.set(f"vitrail {group.rank}", own_mark)
        start = str(store.get(f"vitrail answer {own_mark}").decode())
        store.set(f"vitrail thanks {own_mark} {start}", "")
        return start
    while True:
        marks = [store.get(f"vitrail {rank}").decode() for rank in range(1, group.world_size)]
        for mark in marks:  # a dead rank's may be among them, until its successor overwrites it
            store.set(f"vitrail answer {mark}", own_mark)
        if store.check([f"vitrail thanks {mark} {own_mark}" for mark in marks]):
            return own_mark
        time.sleep(0.05)


def get_world_size() -> int:
    """The number of ranks."""
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
    """The maximum of all ranks' numbers, on each: what one rank is asked to do, all do."""
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


@contextlib.contextmanager
def silence_other_ranks() -> Iterator[None]:
    """Within the block, discard what ranks other than 0 print."""
    with contextlib.ExitStack() as stack:
        if not read_process_group().is_rank0:
            null = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(contextlib.redirect_stdout(null))
            stack.enter_context(contextlib.redirect_stderr(null))
        yield


def run_on_rank0(work: Callable[[], T]) -> T:
    """Do the work on rank 0; return its result, or raise its error, on every rank, so that none waits in vain."""
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
    result: T = shared[0]
    return result


def all_gather_rows(rows: Tensor, device: torch.device) -> Tensor:
    """The rows of all ranks' tensors, in the order of ranks, on the CPU; ranks may have different numbers of rows."""
    if not is_distributed():
        return rows
    local = rows.to(device)
    counts = [int(count) for count in all_reduce_sum(_fill_rank_slot(len(rows), device))]
    padded = local.new_zeros(max(counts), *local.shape[1:])
    padded[: len(local)] = local
    gathered = [torch.empty_like(padded) for _ in counts]
    distributed.all_gather(gathered, padded)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)]).cpu()


def all_reduce_rows(rows: Tensor, device: torch.device) -> Tensor:
    """Sum rows over ranks, in place; each rank has zeros where others have values."""
    if is_distributed():
        for part in rows.split(_ROWS_AT_ONCE):
            part.copy_(all_reduce_sum(part.to(device)))
    return rows


def _fill_rank_slot(number: int, device: torch.device) -> Tensor:
    """A vector with a slot for every rank, and the number in this rank's."""
    slots = torch.zeros(get_world_size(), dtype=torch.int64, device=device)
    slots[distributed.get_rank()] = number
    return slots


def barrier() -> None:
    """Return when every rank has called this."""
    if is_distributed():
        distributed.barrier()


def make_all_gather() -> Callable[[Any], list[Any]]:
    """A function that takes one rank's value and returns those of all ranks, in their order.

    One thread of each rank may call it while others compute: it uses a group of its own, on the CPU.
    """
    cpu_group = distributed.new_group(backend="gloo", timeout=_TIMEOUT)

    def all_gather(value: Any) -> list[Any]:
        values = [None] * get_world_size()
        distributed.all_gather_object(values, value, group=cpu_group)
        return values

    return all_gather
