"""A model as functions of views, in a precision; on a CPU, few images at a time on each core.

Threads that divide one matrix product wait for each other hundreds of times a pass, and each time for whatever else the
machine does, such as decoding the next images. Here every thread computes images of its own, so few that what one layer
leaves is still in the core's cache when the next one reads it. Only fewer images than threads are divided.

B images   C channels   S image side   L classes   D features
"""

import ctypes
import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from vitrail.config import ModelConfig, Precision, ViTConfig
from vitrail.data.transforms import normalize
from vitrail.errors import UsageError
from vitrail.model.quantized import convert_precision, explain_unsupported, has_uint8_input
from vitrail.model.vit import ViT
from vitrail.weights.trained import Trained

InferenceFunction = Callable[[Tensor], Tensor]
"""Views, uint8 (B, C, S, S), on the model's device -> a row for each, on the CPU."""

_MIN_CHUNK_SIZE = (
    8  # images: of fewer the weights are read too often, of more activations leave the cache (measured, S and B)
)
_CACHE_BYTES = 3 * 2**20  # bytes of a block's widest activations, of which small models may have more images
_NICENESS = 5  # a third of the time that another thread gets
_POOL_LOCK = threading.Lock()
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's malloc.h


class InferenceFunctions(NamedTuple):
    """What can be computed of views."""

    probabilities: InferenceFunction
    """(B, L); where several labels may be right, each has a probability of its own."""
    features: InferenceFunction
    """What the head reads, float32 (B, D)."""


def build_inference_functions(trained: Trained, precision: Precision = "float32") -> InferenceFunctions:
    """What a model says, computed in a precision. OpenVINO gives answers alone: features are float32 beside it."""
    if reason := _explain_unavailable(trained, precision):
        raise UsageError(f"{precision} cannot be: {reason}. --precision float32 always can")
    preprocess = trained.preprocess
    assert preprocess is not None
    model = convert_precision(trained.model, "float32" if precision == "openvino-int8" else precision, preprocess)

    def prepare_inputs(views: Tensor) -> Tensor:
        return views if has_uint8_input(model) else normalize(views, preprocess)

    @torch.inference_mode()
    def compute_probabilities(views: Tensor) -> Tensor:
        logits = model(prepare_inputs(views)).float() / trained.temperature
        return (logits.sigmoid() if trained.multi_label else logits.softmax(dim=-1)).cpu()

    @torch.inference_mode()
    def compute_features(views: Tensor) -> Tensor:
        found: Tensor = model.compute_features(prepare_inputs(views)).float().cpu()
        return found

    answers: InferenceFunction = compute_probabilities
    if precision == "openvino-int8":
        from vitrail.export import openvino_int8

        answers = openvino_int8.build_probability_function(trained, torch.get_num_threads())
    few = _choose_chunk_size(model.config)
    _get_thread_pool(torch.get_num_threads(), os.getpid())  # here, where nobody computes yet
    return InferenceFunctions(_split_over_threads(answers, few), _split_over_threads(compute_features, few))


def list_available_precisions(trained: Trained) -> tuple[Precision, ...]:
    """The precisions in which a model can be computed on this machine."""
    return tuple(precision for precision in get_args(Precision) if _explain_unavailable(trained, precision) is None)


def _explain_unavailable(trained: Trained, precision: Precision) -> str | None:
    """Why a model cannot be computed so on this machine, or None."""
    if precision != "openvino-int8":
        return explain_unsupported(trained.model, precision)
    if not isinstance(trained.model, ViT) or not trained.model.config.classes:
        return "it is for the answers of ViTs and hybrids"
    if next(trained.model.parameters()).device.type != "cpu":
        return "it is for the CPU (--device cpu)"
    if importlib.util.find_spec("openvino") is None:
        return "openvino is not installed: pip install 'vitrail[openvino]'"
    if not trained.activation_ranges:
        return "its scales were never measured: vitrail convert MODEL OUT.safetensors --measure DATA"
    return None


def keep_freed_memory() -> None:
    """Let this process keep freed memory, up to some hundred megabytes: for commands, since it concerns all that runs.

    glibc returns what a layer leaves to the system at once and gets it anew for the next, which clears it page by page:
    a tenth of int8's time and more. What other threads than the first allocate it keeps in pieces of 64 MB of their
    own, which it returns when they are empty whatever it is told, so all share the first one's memory. Other systems
    have other allocators, and nothing happens there.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if adjust is not None:
        adjust(_MMAP_THRESHOLD, 2**25)  # the largest it takes
        adjust(_TRIM_THRESHOLD, 2**28)
        adjust(_ARENA_MAX, 1)


def lower_thread_priority() -> None:
    """Let threads that compute come after all others, for a server: who is refused, or asks how it is, hears at once.

    On Linux, where every thread has a priority of its own.
    """
    if sys.platform == "linux":
        count = torch.get_num_threads()
        _run_in_each_thread(_get_thread_pool(count, os.getpid()), count, lambda: os.nice(_NICENESS))


# --- few images at a time on each core -------------------------------------------------------------------------------


def _choose_chunk_size(config: ModelConfig) -> int:
    """How many images a core computes at a time."""
    if not isinstance(config, ViTConfig):
        return _MIN_CHUNK_SIZE
    tokens = config.num_prefix_tokens + config.grid[0] * config.grid[1]
    return max(_MIN_CHUNK_SIZE, _CACHE_BYTES // (4 * tokens * config.mlp))


def _split_over_threads(function: InferenceFunction, chunk_size: int) -> InferenceFunction:
    """The same function; on the CPU `few` images at a time, by as many threads as torch may use."""

    def compute_in_chunks(views: Tensor) -> Tensor:
        threads = torch.get_num_threads()
        if views.device.type != "cpu" or len(views) < max(2, threads):
            return function(views)
        rounds = -(-len(views) // (chunk_size * threads))
        parts = views.split(-(-len(views) // (rounds * threads)))  # as equal as can be
        if threads == 1:
            return torch.cat([function(part) for part in parts])
        return torch.cat(list(_get_thread_pool(threads, os.getpid()).map(function, parts)))

    return compute_in_chunks


def _get_thread_pool(count: int, process: int) -> ThreadPoolExecutor:
    """Threads of this process, each of which computes on its own; a fork has none of its parent's."""
    with _POOL_LOCK:
        return _create_thread_pool(count, process)


@functools.cache
def _create_thread_pool(count: int, _process: int) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(count, thread_name_prefix="compute")

    def use_one_thread() -> None:
        torch.get_num_threads()  # a thread's first question sets it to the number of all
        torch.set_num_threads(1)  # of this thread, and of any that begins later

    _run_in_each_thread(pool, count, use_one_thread)
    torch.set_num_threads(count)
    return pool


def _run_in_each_thread(pool: ThreadPoolExecutor, count: int, work: Callable[[], object]) -> None:
    """Let each of a pool's threads do the work once."""
    met = threading.Barrier(count)

    def run_once() -> None:
        work()
        met.wait()

    for each in [pool.submit(run_once) for _ in range(count)]:
        each.result()
