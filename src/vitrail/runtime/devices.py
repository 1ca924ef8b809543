"""The device on which models run, and what it computes for the CPU."""

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitrail.errors import UsageError

T = TypeVar("T")


def get_device_memory(device: torch.device) -> int:
    """Bytes of memory of a GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    windows: Any = ctypes
    kilobytes = ctypes.c_ulonglong()
    windows.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kilobytes))
    return kilobytes.value * 1024


def find_best_device() -> torch.device:
    """Return a CUDA device if there is one, else Apple's GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def resolve_device(name: str | torch.device | None) -> torch.device:
    """Return the device of this name, or the best one if it is None."""
    if name is None:
        return find_best_device()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"there is no device {name!r}; try cpu, cuda or mps") from None
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(device.type, True):
        raise UsageError(f"torch sees no {device.type} device here; try cpu")
    return device


def start_copy_to_cpu(*tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Copy tensors of one device to the CPU while a GPU continues; call the result to wait for the copies."""
    if not tensors or tensors[0].device.type != "cuda":
        copies = tuple(tensor.cpu() for tensor in tensors)
        return lambda: copies
    pinned = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors)
    for buffer, tensor in zip(pinned, tensors, strict=True):
        buffer.copy_(tensor, non_blocking=True)
    is_copied = torch.cuda.Event()
    is_copied.record(torch.cuda.current_stream(tensors[0].device))

    def wait() -> tuple[Tensor, ...]:
        is_copied.synchronize()
        return pinned

    return wait


def finish_one_late(pending: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Call each function once the next one is there: a GPU then computes one batch while the last is used."""
    previous: Callable[[], T] | None = None
    for finish in pending:
        if previous is not None:
            yield previous()
        previous = finish
    if previous is not None:
        yield previous()
