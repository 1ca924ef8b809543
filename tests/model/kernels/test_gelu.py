"""A linear layer and GELU, with a backward pass of their own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitrail.model.kernels import gelu
from vitrail.model.kernels.gelu import GeluWithBiasGradient, apply_linear_gelu


def compute_backward(dout: Tensor, hidden: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """What the kernel computes."""
    dhidden = torch.ops.aten.gelu_backward(dout, hidden, approximate=approximate)
    return dhidden, dhidden.flatten(0, -2).sum(0, dtype=torch.float32)


class Operators:
    """The kernel's operator without the kernel."""

    gelu_backward = staticmethod(compute_backward)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("compiled", [False, True])
def test_all_gradients_are_those_of_two_layers(
    approximate: Any, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops, "vitrail", Operators, raising=False)
    torch.manual_seed(0)
    linear, x = nn.Linear(6, 10), torch.randn(2, 3, 6, requires_grad=True)

    def compute(x: Tensor) -> Tensor:
        hidden = torch.nn.functional.linear(x, linear.weight, linear.bias.detach())
        return GeluWithBiasGradient.apply(hidden, linear.bias, approximate)  # type: ignore[no-untyped-call]

    out = (torch.compile(compute, backend="aot_eager", fullgraph=True) if compiled else compute)(x)
    expected = nn.GELU(approximate)(linear(x))
    inputs = (x, linear.weight, linear.bias)
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, dout), torch.autograd.grad(expected, inputs, dout), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_on_the_cpu_modules_compute_it() -> None:
    linear, x = nn.Linear(6, 10), torch.randn(2, 6)
    seen = []
    linear.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(apply_linear_gelu(x, linear, nn.GELU()), nn.GELU()(linear(x)))
    assert len(seen) == 2


def test_float32_is_left_to_torch() -> None:
    assert not gelu.can_use_kernel(torch.zeros(1))
