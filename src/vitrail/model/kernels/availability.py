"""Where the kernels of our own can be used: on a Hopper GPU, in half precision, beside an installed triton."""

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
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    importlib.import_module(f"vitrail.model.kernels.{module}")  # which defines an operator
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_fallback(operation: str, reason: str) -> bool:
    """Log why torch's kernels compute an operation, the first time; returns False."""
    message = f"{operation} by torch's kernels: {reason}"
    if message not in _noted:
        _noted.add(message)
        _logger.info(message)
    return False
