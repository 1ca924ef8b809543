"""Where to compute."""

import torch


def best() -> torch.device:
    """CUDA where there is one, then Apple's GPU, then the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")
