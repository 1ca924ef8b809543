"""Time the kernels of our own beside torch's, on an NVIDIA GPU.

    python bench/kernels.py --seconds 170

The ways to divide the work that are worth measuring on another GPU are compiled first, in parallel processes, then
timed, and printed with the relative errors of outputs and gradients against float64. Torch's attention starts from
packed queries, keys and values too, compiled, so its backward pass includes packing the gradients.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.model.kernels.attention import attend, attend_with_torch, can_use_kernel
from vitrail.model.kernels.attention_config import (
    ForwardConfig,
    KeyConfig,
    QueryConfig,
    choose_key_config,
    compute_exponent_scale,
    list_forward_arguments,
    list_key_arguments,
    list_query_arguments,
)
from vitrail.model.kernels.gelu import apply_linear_gelu


class Shape(NamedTuple):
    """Of an attention layer."""

    images: int
    heads: int
    tokens: int
    size: int


SHAPES = (Shape(256, 12, 197, 64), Shape(128, 16, 257, 80), Shape(256, 16, 197, 64), Shape(1024, 6, 197, 64))
FORWARDS = (ForwardConfig(), ForwardConfig(stages=2), ForwardConfig(registers=168))
QUERIES = (QueryConfig(), QueryConfig(64, 2))
KEYS = (KeyConfig(), KeyConfig(small_last=True), KeyConfig(64, 1))
BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
GELU_SECONDS = 35  # kept for it
Row = dict[str, Any]
Config = ForwardConfig | QueryConfig | KeyConfig


# --- compiling -------------------------------------------------------------------------------------------------------


def compile_config(shape: Shape, config: Config) -> str:
    """Compile into Triton's cache; returns why that failed, or nothing."""
    from vitrail.model.kernels import triton_attention as kernels

    half, single, scale = torch.bfloat16, torch.float32, compute_exponent_scale(shape.size)
    sides = (shape.tokens, shape.heads, shape.size)
    try:
        if isinstance(config, ForwardConfig):
            constants = list_forward_arguments(*sides, config)
            kernels.attend_forward_kernel.warmup(half, half, single, scale, grid=(1,), **constants)
        elif isinstance(config, QueryConfig):
            constants = list_query_arguments(*sides, config)
            types = (half, half, single, half, half, single, scale)
            kernels.differentiate_queries_kernel.warmup(*types, grid=(1,), **constants)
        else:
            constants = list_key_arguments(*sides, config)
            kernels.differentiate_keys_kernel.warmup(half, single, half, half, single, scale, grid=(1,), **constants)
    except Exception as error:  # noqa: BLE001  a way that does not compile is one result of many
        return f"{type(error).__name__}: {error}"
    return ""


def compile_all(workers: int, deadline: float) -> None:
    """Compile every way for every shape in parallel; what fails is compiled, or fails, again where it is timed."""
    jobs = [(shape, config) for shape in SHAPES for config in (*FORWARDS, *QUERIES, *KEYS)]
    start = time.perf_counter()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(compile_config, *job): job for job in jobs}
        failures = []
        for future, job in futures.items():
            try:
                if failure := future.result(timeout=max(deadline - time.perf_counter(), 0.1)):
                    failures.append((job, failure))
            except (TimeoutError, BrokenProcessPool) as error:
                pool.shutdown(wait=False, cancel_futures=True)
                print(f"compiling stopped: {type(error).__name__}", flush=True)
                break
    print(f"compiled {len(jobs)} ways in {time.perf_counter() - start:.0f} s, {len(failures)} failed", flush=True)
    for (shape, config), failure in failures[:4]:
        print(f"  {tuple(shape)} {config}: {failure.splitlines()[0][:150]}", flush=True)


# --- measuring -------------------------------------------------------------------------------------------------------


def time_calls(function: Callable[[], object], calls: int = 10, rounds: int = 5) -> float:
    """Milliseconds of a call, the median of rounds."""
    for _ in range(2):
        function()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times)


def compute_reference(qkv: Tensor, dout: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Outputs and gradient in float64."""
    inputs = qkv.double().requires_grad_()
    q, k, v = inputs.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    out = ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
    return out.detach(), torch.autograd.grad(out, inputs, dout.double())[0]


class Problem:
    """Inputs of a shape, and the results of its first and last images in float64."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        width = shape.heads * shape.size
        sides = (shape.images, shape.tokens)
        self.shape = shape
        self.qkv = torch.randn(*sides, 3 * width, device="cuda", dtype=torch.bfloat16, generator=generator)
        self.dout = torch.randn(*sides, width, device="cuda", dtype=torch.bfloat16, generator=generator)
        self.ends = [0, 1, shape.images - 1]
        self.reference = compute_reference(self.qkv[self.ends], self.dout[self.ends], shape.heads)

    def measure_error(self, value: Tensor, which: int) -> float:
        """Relative to float64, in the norm: of outputs (0) or gradients (1)."""
        expected = self.reference[which]
        return float((value[self.ends].double() - expected).norm() / expected.norm())

    def poison(self) -> None:
        """Leave no memory from which a kernel that writes nothing could take right values."""
        torch.empty_like(self.qkv).fill_(float("nan"))


def measure_function(problem: Problem, function: Callable[[Tensor, int], Tensor]) -> Row:
    """Time a differentiable function's forward pass, and its backward pass as what both take more."""
    qkv, heads = problem.qkv.detach().requires_grad_(), problem.shape.heads

    def run_both() -> Tensor:
        return torch.autograd.grad(function(qkv, heads), qkv, problem.dout)[0]

    forward = time_calls(lambda: function(qkv, heads))
    both = time_calls(run_both)
    return {
        "forward": forward, "backward": both - forward,
        "error": [problem.measure_error(function(qkv, heads).detach(), 0), problem.measure_error(run_both(), 1)],
    }  # fmt: skip


def measure_backends(problem: Problem) -> Iterator[Row]:
    """Torch's attention by each of its kernels, and ours as one operator, all compiled."""
    for name in BACKENDS:
        torch._dynamo.reset()
        # The cache of compiled graphs does not tell torch's kernels apart: it would return the first one's each time.
        with sdpa_kernel(getattr(SDPBackend, name)), torch._functorch.config.patch(enable_autograd_cache=False):
            compiled = torch.compile(attend_with_torch, dynamic=False)
            yield try_measure(name, partial(measure_function, problem, compiled))
    torch._dynamo.reset()
    assert can_use_kernel(problem.qkv, problem.shape.heads)
    yield try_measure("attend", partial(measure_function, problem, torch.compile(attend, dynamic=False)))


def measure_forward(problem: Problem, config: ForwardConfig) -> Row:
    from vitrail.model.kernels.triton_attention import launch_forward

    problem.poison()
    out, _ = launch_forward(problem.qkv, problem.shape.heads, config)
    error = problem.measure_error(out, 0)
    seconds = time_calls(lambda: launch_forward(problem.qkv, problem.shape.heads, config))
    return {"forward": seconds, "error": [error]}


def measure_backward(problem: Problem, config: QueryConfig | KeyConfig, saved: tuple[Tensor, Tensor]) -> Row:
    """Time one launch; the error is that of the whole pass, its other launch being the usual one."""
    from vitrail.model.kernels.triton_attention import launch_backward, launch_keys, launch_queries

    queries, keys = QueryConfig(), choose_key_config(problem.shape.size)
    configs = (config, keys) if isinstance(config, QueryConfig) else (queries, config)
    dout, qkv, (out, lse) = problem.dout, problem.qkv, saved
    problem.poison()
    gradient = launch_backward(dout, qkv, out, lse, *configs)
    error = problem.measure_error(gradient, 1)
    if not torch.equal(gradient, launch_backward(dout, qkv, out, lse, *configs)):
        return {"failure": "two runs differ"}
    delta = torch.zeros_like(lse)
    if isinstance(config, QueryConfig):
        milliseconds = time_calls(lambda: launch_queries(dout, qkv, out, lse, gradient, delta, config))
    else:
        milliseconds = time_calls(lambda: launch_keys(dout, qkv, lse, gradient, delta, config))
    return {"backward": milliseconds, "error": [error]}


def try_measure(name: str, measure: Callable[[], Row]) -> Row:
    """The row, or one that says why there is none."""
    try:
        return {"name": name, **measure()}
    except Exception as error:  # noqa: BLE001  such as too much shared memory: one result of many
        torch.cuda.synchronize()
        return {"name": name, "failure": f"{type(error).__name__}: {error}".splitlines()[0][:90]}


def measure_configs(problem: Problem, deadline: float) -> Iterator[tuple[str, Row]]:
    """A row for each way to divide each pass."""
    from vitrail.model.kernels.triton_attention import launch_forward

    for forward in FORWARDS:
        if time.perf_counter() < deadline:
            yield "forward", try_measure(str(forward), partial(measure_forward, problem, forward))
    saved = launch_forward(problem.qkv, problem.shape.heads, ForwardConfig())
    for backward in (*QUERIES, *KEYS):
        if time.perf_counter() < deadline:
            part = "queries" if isinstance(backward, QueryConfig) else "keys"
            yield part, try_measure(str(backward), partial(measure_backward, problem, backward, saved))


# --- GELU ------------------------------------------------------------------------------------------------------------


def compute_gelu_backward(dout: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What torch computes: the gradient before GELU and that of the bias."""
    dhidden = torch.ops.aten.gelu_backward(dout, hidden, approximate="tanh")
    return dhidden, dhidden.sum(0)


def compute_exact_sum(dout: Tensor, hidden: Tensor) -> Tensor:
    """The gradient of the bias in float64, some rows at a time."""
    parts = zip(dout.split(8192), hidden.split(8192), strict=True)
    return torch.stack([compute_gelu_backward(*(x.double() for x in pair))[1] for pair in parts]).sum(0)


def compute_layers(x: Tensor, linear: nn.Linear, gelu: nn.GELU) -> Tensor:
    """The layers one by one."""
    return gelu(linear(x))


def measure_layer(x: Tensor, linear: nn.Linear, function: Callable[..., Tensor]) -> Row:
    """Time a linear layer and GELU, compiled, as training computes them."""
    torch._dynamo.reset()
    compiled, gelu = torch.compile(function, dynamic=False), nn.GELU("tanh")

    def run() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return compiled(x, linear, gelu)

    dout = torch.randn_like(run())
    forward = time_calls(run)
    both = time_calls(lambda: torch.autograd.grad(run(), (x, linear.weight, linear.bias), dout))
    return {"forward": forward, "backward": both - forward, "error": []}


def measure_gelu_config(
    dout: Tensor, hidden: Tensor, exact: Tensor, function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> Row:
    """Time GELU's backward pass with the sum for the bias; the error is that of the sum."""
    error = float((function(dout, hidden)[1].double() - exact).norm() / exact.norm())
    return {"backward": time_calls(lambda: function(dout, hidden)), "error": [error]}


def measure_gelu(deadline: float) -> list[Row]:
    """Print and return the rows of GELU's backward pass alone, then those of a whole layer."""
    from vitrail.model.kernels.triton_gelu import GeluConfig, launch_backward

    configs = [GeluConfig(), GeluConfig(stages=1), GeluConfig(tiles=8), GeluConfig(32, 128)]
    rows: list[Row] = []
    for inputs, channels in ((768, 3072), (1024, 4096)):
        print(f"GELU, 50432 rows, {inputs} -> {channels}: ms forward, backward; error of the bias's gradient")
        hidden, dout = (torch.randn(50432, channels, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        exact = compute_exact_sum(dout, hidden)
        ways: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
            str(config): partial(launch_backward, approximate="tanh", config=config) for config in configs
        }
        ways["torch.compile"] = torch.compile(compute_gelu_backward, dynamic=False)
        measured = [
            try_measure(name, partial(measure_gelu_config, dout, hidden, exact, way)) for name, way in ways.items()
        ]
        del hidden, dout
        x = torch.randn(256, 197, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        linear = nn.Linear(inputs, channels, device="cuda")
        for function in (compute_layers, apply_linear_gelu):
            if time.perf_counter() < deadline:
                measured.append(try_measure(function.__name__, partial(measure_layer, x, linear, function)))
        for row in measured:
            print_row(row, "gelu")
        rows += [{"shape": (inputs, channels), "part": "gelu", **row} for row in measured]
    return rows


# --- printing --------------------------------------------------------------------------------------------------------


def print_row(row: Row, part: str = "") -> None:
    """A line of the table."""
    if "failure" in row:
        print(f"  {part:8} failed  {row['name']}: {row['failure']}", flush=True)
        return
    times = " ".join(f"{row[key]:7.3f}" if key in row else " " * 7 for key in ("forward", "backward"))
    errors = " ".join(f"{error:.1e}" for error in row["error"])
    print(f"  {part:8} {times}  {errors:15} {row['name']}", flush=True)


def measure_attention(deadline: float) -> list[Row]:
    """Print and return the rows of every shape."""
    rows: list[Row] = []
    for shape in SHAPES:
        if time.perf_counter() > deadline:
            print(f"{tuple(shape)} left out: out of time")
            continue
        print(f"attention B{shape.images} H{shape.heads} N{shape.tokens} K{shape.size}: ms forward, backward; errors")
        problem = Problem(shape)
        for part, row in measure_configs(problem, deadline):
            print_row(row, part)
            rows.append({"shape": shape, "part": part, **row})
        for row in measure_backends(problem):
            print_row(row, "compiled")
            rows.append({"shape": shape, "part": "compiled", **row})
            if time.perf_counter() > deadline:
                break
        del problem
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=170.0, help="stop then, and print what is measured")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds
    compile_all(options.workers, deadline - options.seconds / 2)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows = measure_attention(deadline - GELU_SECONDS)
    rows += measure_gelu(deadline)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
