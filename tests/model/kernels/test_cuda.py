"""The kernels on the GPU they are for."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model.kernels.attention_reference import attend_exactly, draw_qkv
from vitrail.model.kernels.attention import attend, attend_with_torch, can_use_kernel
from vitrail.model.kernels.gelu import apply_linear_gelu

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="torch sees no Hopper GPU here: `make cuda`",
)
SHAPES = [
    (3, 197, 2, 64),
    (2, 257, 2, 80),
    (1, 5, 1, 64),
    (2, 64, 3, 72),
    (2, 65, 1, 88),
    (1, 320, 2, 64),
    (2, 1, 2, 64),
]


def measure_errors(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Relative errors of the outputs and of the gradient, whose norm is at least 1e-3 of the outputs' gradient."""
    inputs, exact = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    assert can_use_kernel(inputs, heads)
    out, (expected, _) = attend(inputs, heads), attend_exactly(exact, heads)
    dout = torch.randn_like(out)
    out.backward(dout)
    expected.backward(dout.double())
    assert inputs.grad is not None
    assert exact.grad is not None
    floor = 1e-3 * dout.double().norm()
    return (
        (out.double() - expected).norm() / expected.norm(),
        (inputs.grad.double() - exact.grad).norm() / exact.grad.norm().clamp(min=floor),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_attention_and_its_gradient_are_those_of_float64(shape: tuple[int, int, int, int], kind: torch.dtype) -> None:
    tolerance = 8e-3 if kind == torch.bfloat16 else 1e-3
    out, gradient = measure_errors(draw_qkv(*shape).to("cuda", kind), shape[2])
    assert out < tolerance
    assert gradient < tolerance


def test_large_logits_leave_finite_gradients() -> None:
    """Where cuDNN's gradients are NaN."""
    qkv = draw_qkv(2, 197, 2, 64, largest_logit=500.0).to("cuda", torch.bfloat16)
    out, gradient = measure_errors(qkv, 2)
    assert out < 1e-2
    assert gradient < 5e-2


def test_a_slice_is_attended_to_as_its_copy() -> None:
    wide = draw_qkv(2, 197, 2, 128).to("cuda", torch.bfloat16)
    part = wide[..., : 3 * 128]
    assert torch.equal(attend(part, 2), attend(part.clone(), 2))


def test_two_passes_and_a_compiled_one_give_the_same_bits() -> None:
    qkv = draw_qkv(4, 197, 3, 64).to("cuda", torch.bfloat16).requires_grad_()
    compiled = torch.compile(attend, fullgraph=True)
    results = []
    for function in (attend, attend, compiled):
        out = function(qkv, 3)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), qkv)))
    for result in results[1:]:
        assert torch.equal(result[0], results[0][0])
        torch.testing.assert_close(result[1], results[0][1], atol=0, rtol=0 if result is results[1] else 1e-2)


def test_a_cuda_graph_replays_attention_and_its_gradient() -> None:
    qkv = draw_qkv(4, 197, 3, 64).to("cuda", torch.bfloat16).requires_grad_()
    stream = torch.cuda.Stream()

    def compute() -> tuple[Tensor, Tensor]:
        out = attend(qkv, 3)
        return out.detach(), torch.autograd.grad(out, qkv, torch.ones_like(out))[0]

    with torch.cuda.stream(stream):  # autograd waits for the stream where `qkv` was first used, which must be captured
        expected = compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        recorded = compute()
    graph.replay()
    torch.cuda.synchronize()
    for value, correct in zip(recorded, expected, strict=True):
        assert torch.equal(value, correct)


def test_what_the_kernel_cannot_is_computed_by_torch_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    qkv = draw_qkv(1, 330, 1, 64).to("cuda", torch.bfloat16)
    with caplog.at_level(logging.INFO, "vitrail"):
        for _ in range(2):
            assert torch.equal(attend(qkv, 1), attend_with_torch(qkv, 1))
    assert [record.message for record in caplog.records] == [
        "attention by torch's kernels: there are more than 320 tokens"
    ]


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_linear_layer_and_gelu_have_the_gradients_of_float64(approximate: Any, compiled: bool) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(256, 320, device="cuda"), torch.randn(5, 197, 256, device="cuda", requires_grad=True)
    function = torch.compile(apply_linear_gelu, fullgraph=True) if compiled else apply_linear_gelu
    with torch.autocast("cuda", torch.bfloat16):
        out = function(x, linear, nn.GELU(approximate))
    assert out.dtype == torch.bfloat16
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, linear.weight, linear.bias), dout)
    exact = x.detach().double().requires_grad_()
    linear.double()
    expected = nn.GELU(approximate)(linear(exact))
    exact_gradients = torch.autograd.grad(expected, (exact, linear.weight, linear.bias), dout.double())
    for ours, theirs in zip(found, exact_gradients, strict=True):
        assert ours.dtype == torch.float32
        assert (ours.double() - theirs).norm() < 1e-2 * theirs.norm()
