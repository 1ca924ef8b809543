"""Many processes as one run: torchrun's environment, sums over ranks, and what all of them agree on.

A rank is one process with one device. torchrun starts them and tells each its number; without it there is one. Every
function here is the identity where there is one rank, so the code that trains does not ask how many there are.
"""

import contextlib
import datetime
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from vitrail.errors import UsageError
from vitrail.evaluate.classify import Counts
from vitrail.model import device as devices

_PATIENCE = datetime.timedelta(minutes=30)  # rank 0 measures alone at the end, while the others wait


class Group(NamedTuple):
    """Which of how many processes this is."""

    rank: int = 0
    world: int = 1
    local: int = 0
    """Its number on this machine."""
    restarts: int = 0
    """How often torchrun has started the group again."""

    @property
    def leads(self) -> bool:
        """Whether this process writes the files and talks to the user."""
        return self.rank == 0


ALONE = Group()


def group() -> Group:
    """What torchrun, or a SLURM script like it, says in the environment."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    try:
        found = Group(*(int(os.environ.get(name, default)) for name, default in zip(names, (0, 1, 0, 0), strict=True)))
    except ValueError as error:
        raise UsageError(f"{', '.join(names)} in the environment are numbers: {error}") from None
    if not 0 <= found.rank < found.world:
        raise UsageError(f"RANK is {found.rank} and WORLD_SIZE {found.world}; a rank lies from 0 to below the size")
    return found


@contextlib.contextmanager
def joined(name: str | None) -> Iterator[tuple[Group, torch.device]]:
    """This process's place in the group and its device; while the block lasts, it may talk to the others."""
    found = group()
    device = devices.named(name)
    if device.type == "cuda":
        if found.world > 1:
            device = torch.device("cuda", found.local)
        torch.cuda.set_device(device)  # graphs are recorded on the current device
    if found.world == 1:
        yield found, device
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(
        backend, store=_store(found), rank=found.rank, world_size=found.world, timeout=_PATIENCE
    )
    try:
        yield found, device
    finally:
        # gloo's thread may still hold the tensors of the last sum, and needs Python's lock to let them go, which the
        # end of the group keeps while it waits for that thread
        time.sleep(0.3)
        distributed.destroy_process_group()


def _store(group: Group) -> Any:
    """Where ranks find each other. torchrun's own lives on when it starts a group again, and would give the new ranks
    the addresses of the dead: each start has its own names in it.
    """
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    leads = group.leads and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    stores: Any = distributed  # it has them, but exports no types of them
    store = stores.TCPStore(address, port, is_master=leads, timeout=_PATIENCE, wait_for_workers=False)
    return stores.PrefixStore(f"vitrail {group.restarts}", store)


def world() -> int:
    """How many ranks there are."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def together() -> bool:
    """Whether there are other ranks."""
    return world() > 1


def summed(tensor: Tensor) -> Tensor:
    """The sum of all ranks' tensors, on each."""
    if together():
        tensor = tensor.clone()
        distributed.all_reduce(tensor)
    return tensor


def agreed(number: int, device: torch.device) -> int:
    """The greatest of all ranks' numbers: what one of them was asked for, all do."""
    if not together():
        return number
    shared = torch.tensor(number, device=device)
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    return int(shared)


def told(text: str) -> str:
    """Rank 0's text, on every rank."""
    if not together():
        return text
    shared = [text]
    distributed.broadcast_object_list(shared)
    return shared[0]


def counted(counts: Counts, device: torch.device) -> Counts:
    """The counts of all ranks' images."""
    if not together():
        return counts
    numbers = torch.tensor([counts.images, counts.right, counts.right_in_five], device=device)
    images, right, five = summed(numbers).tolist()
    loss = float(summed(torch.tensor(counts.loss, dtype=torch.float64, device=device)))
    return Counts(images, right, five, loss, summed(counts.confusion.to(device)).cpu())


def wait() -> None:
    """Return when every rank is here."""
    if together():
        distributed.barrier()
