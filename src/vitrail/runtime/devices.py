"""The device on which models run."""

import torch

from vitrail.errors import UsageError


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
