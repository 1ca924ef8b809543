"""Where to compute."""

import torch

from vitrail.errors import UsageError


def find_best_device() -> torch.device:
    """CUDA where there is one, then Apple's GPU, then the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def resolve_device(name: str | torch.device | None) -> torch.device:
    """The device of that name, or the best one."""
    if name is None:
        return find_best_device()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"there is no device {name!r}; try cpu, cuda or mps") from None
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(device.type, True):
        raise UsageError(f"torch sees no {device.type} device here; try cpu")
    return device
