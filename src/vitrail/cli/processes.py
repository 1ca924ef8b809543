"""The processes of a command: those that torchrun started, and those that load images."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from vitrail.runtime import distributed
from vitrail.runtime.distributed import ProcessGroup
from vitrail.runtime.workers import count_available_cores


@contextlib.contextmanager
def join_processes(device_name: str | None) -> Iterator[tuple[ProcessGroup, torch.device]]:
    """Join the processes that torchrun started, and choose this one's device; only rank 0 prints."""
    with silence_other_ranks(), distributed.join_process_group(device_name) as (group, device):
        yield group, device


@contextlib.contextmanager
def silence_other_ranks() -> Iterator[None]:
    """Within the block, discard what ranks other than 0 print."""
    with contextlib.ExitStack() as stack:
        if not distributed.read_process_group().is_rank0:
            null = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(contextlib.redirect_stdout(null))
            stack.enter_context(contextlib.redirect_stderr(null))
        yield


def count_workers(requested: int | None) -> int:
    """The processes that load images: those requested, or one per core, less one."""
    return max(0, count_available_cores() - 1) if requested is None else requested
