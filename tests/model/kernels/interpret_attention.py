"""Print the errors of the attention kernels in Triton's interpreter on the CPU, as JSON: run with TRITON_INTERPRET=1.

The interpreter multiplies bfloat16 wrongly, so the cases are float32 and float16.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor

from tests.model.kernels.attention_reference import attend_exactly, draw_qkv
from vitrail.model.kernels import triton_attention
from vitrail.model.kernels.attention_config import ForwardConfig, KeyConfig, QueryConfig

KEY_CONFIGS = (KeyConfig(), KeyConfig(small_last=True), KeyConfig(64, 1))


def compute_error(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def measure_errors(qkv: Tensor, heads: int, keys: KeyConfig) -> dict[str, float]:
    """Relative errors of the outputs, the logsumexp and the gradient."""
    exact = qkv.detach().double().requires_grad_()
    expected, expected_lse = attend_exactly(exact, heads)
    dout = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(qkv.dtype)
    expected.backward(dout.double())
    out, lse = triton_attention.launch_forward(qkv, heads, ForwardConfig())
    gradient = triton_attention.launch_backward(dout, qkv, out, lse, QueryConfig(), keys)
    assert exact.grad is not None
    again = triton_attention.launch_backward(dout, qkv, out, lse, QueryConfig(), keys)
    return {
        "out": compute_error(out, expected.detach()),
        "lse": compute_error(lse, expected_lse.detach()),
        "gradient": compute_error(gradient, exact.grad),
        "repeat": float((gradient.float() - again.float()).abs().max()),
    }


def measure_operator(qkv: Tensor, heads: int) -> dict[str, float]:
    """The same through autograd."""
    inputs, exact = qkv.clone().requires_grad_(), qkv.detach().double().requires_grad_()
    expected, _ = attend_exactly(exact, heads)
    out, _ = triton_attention.attend(inputs, heads)
    (out.double().square().sum()).backward()
    expected.square().sum().backward()
    assert inputs.grad is not None
    assert exact.grad is not None
    return {"out": compute_error(out.detach(), expected.detach()), "gradient": compute_error(inputs.grad, exact.grad)}


def measure_all() -> dict[str, Any]:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for tokens in (1, 5, 17, 64, 65, 197, 257, 320):
        qkv = draw_qkv(1, tokens, 2, 64)
        results[f"float32 N={tokens}"] = measure_errors(qkv, 2, KeyConfig(small_last=True))
        results[f"float16 N={tokens}"] = measure_errors(qkv.half(), 2, KeyConfig(small_last=True))
    for size in (72, 80, 88):
        results[f"float32 K={size}"] = measure_errors(draw_qkv(2, 65, 1, size), 1, KeyConfig(64, 1))
    for config in KEY_CONFIGS:
        for tokens, size in ((65, 64), (197, 64), (81, 80)):
            qkv = draw_qkv(1, tokens, 1, size)
            results[f"float32 {config} N={tokens} K={size}"] = measure_errors(qkv, 1, config)
    for tokens in (20, 197):
        qkv = draw_qkv(1, tokens, 2, 64, largest_logit=500.0)
        results[f"float32 logits of 500 N={tokens}"] = measure_errors(qkv, 2, KeyConfig(small_last=True))
        results[f"float16 logits of 500 N={tokens}"] = measure_errors(qkv.half(), 2, KeyConfig(64, 1))
    results["float32 operator"] = measure_operator(draw_qkv(2, 33, 3, 64), 3)
    return results


if __name__ == "__main__":
    json.dump(measure_all(), sys.stdout)
