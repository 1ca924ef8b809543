"""Where the kernels of our own can be used: on a Hopper GPU, in half precision, beside an installed triton."""

import functools
import importlib
import importlib.util
import logging

import torch

_CAPABILITY = (9, 0)  # where the kernels were tuned and measured
_logger = logging.getLogger("vitrail")
_noted: set[str] = set()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def find_obstacle(module: str, device: int, dtype: torch.dtype) -> str | None:
    """Why a module's kernels cannot be used on this GPU in this precision; None if they can, and it is imported."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the precision is {dtype}"
    if torch.cuda.get_device_capability(device) != _CAPABILITY:
        return f"the GPU's compute capability is {torch.cuda.get_device_capability(device)}, not {_CAPABILITY}"
    return None if _import_kernels(module) else "triton is not installed"


@functools.cache
def _import_kernels(module: str) -> bool:
    """Define a module's operator; False without triton."""
    if importlib.util.find_spec("triton") is None:
        return False
    importlib.import_module(f"vitrail.model.kernels.{module}")
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_fallback(operation: str, reason: str) -> bool:
    """Log why torch's kernels compute an operation, the first time; returns False."""
    message = f"{operation} by torch's kernels: {reason}"
    if message not in _noted:
        _noted.add(message)
        _logger.info(message)
    return False
