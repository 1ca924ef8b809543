"""Print the errors of the GELU kernel in Triton's interpreter on the CPU, as JSON: run with TRITON_INTERPRET=1."""

import json
import sys

import torch
from torch import Tensor

from vitrail.model.kernels.triton_gelu import GeluConfig, gelu_backward, launch_backward

SHAPES = [(1, 64), (5, 48), (197, 256), (130, 320), (2, 3, 100)]


def compute_error(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected).norm() / expected.norm())


def measure_errors(shape: tuple[int, ...], approximate: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of the gradient and its sum, and how far apart two passes are."""
    generator = torch.Generator().manual_seed(sum(shape))
    hidden = (3 * torch.randn(shape, generator=generator)).to(dtype)
    hidden.view(-1)[:2] = torch.tensor([60.0, -60.0])  # where exponentials overflow
    dout = torch.randn(shape, generator=generator).to(dtype)
    exact = hidden.double().requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.gelu(exact, approximate=approximate), exact, dout.double())
    dhidden, sums = gelu_backward(dout, hidden, approximate)
    other = launch_backward(dout, hidden, approximate, GeluConfig(rows=4, columns=64, tiles=2))
    return {
        "gradient": compute_error(dhidden, expected),
        "sums": compute_error(sums, expected.flatten(0, -2).sum(0)),
        "other": compute_error(other[1], expected.flatten(0, -2).sum(0)),
        "repeat": float((sums - gelu_backward(dout, hidden, approximate)[1]).abs().max()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    kinds = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    results = {
        f"{name} {approximate} {shape}": measure_errors(shape, approximate, kind)
        for name, kind in kinds.items()
        for approximate in ("tanh", "none")
        for shape in SHAPES
    }
    json.dump(results, sys.stdout)
