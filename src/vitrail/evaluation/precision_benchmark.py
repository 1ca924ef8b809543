"""Measure what a model loses and gains in lower precision on its device; its file keeps the result for later use.

B images of a batch   C channels   S image side
"""

import copy
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from vitrail.config import Precision
from vitrail.data.transforms import normalize
from vitrail.errors import DataError
from vitrail.evaluation.statistics import measure_agreement
from vitrail.inference.precision import InferenceFunction, build_inference_functions, list_available_precisions
from vitrail.model import cost
from vitrail.model.quantized import describe_processor, measure_activation_ranges
from vitrail.model.vit import ViT
from vitrail.weights.precision_measurements import PrecisionMeasurement
from vitrail.weights.trained import Trained

MIN_MULTIPLY_ADDS = 5 * 10**8  # an image: smaller models gain nothing noticeable
_BATCH_IMAGES = 16  # images of a batch on a CPU, or four for each thread
_FIRST_IMAGES = 4  # images of the first batch there, or one for each thread
_GPU_BATCH_IMAGES = 64
_MAX_GPU_SECONDS = 3.0
_OPENVINO_MIN_SECONDS = 10.0  # OpenVINO takes about as long to start: with less time it is not measured
_MIN_SPEED = 0.8  # times float32's: a precision slower on the first batch is measured no further


def is_worth_measuring(trained: Trained) -> bool:
    """Whether the model has a head and is large enough to gain."""
    config = trained.model.config
    can_predict = config.classes > 0 and trained.preprocess is not None
    return can_predict and cost.count_multiply_adds(config) >= MIN_MULTIPLY_ADDS


def measure_on_devices(
    trained: Trained,
    device: torch.device,
    iterate_inputs: Callable[[], Iterable[Tensor]],
    *,
    seconds: float,
    data: str = "",
) -> Trained:
    """The model with measurements of every available precision on the CPU, and on `device` if that is a GPU."""
    gpu_seconds = min(_MAX_GPU_SECONDS, seconds / 4) if device.type == "cuda" else 0.0
    on_cpu = dataclasses.replace(trained, model=copy.deepcopy(trained.model).cpu())
    measured = measure_precisions(on_cpu, iterate_inputs(), seconds=seconds - gpu_seconds, data=data)
    if gpu_seconds:
        on_gpu = dataclasses.replace(measured, model=copy.deepcopy(trained.model).to(device))
        measured = measure_precisions(on_gpu, iterate_inputs(), seconds=gpu_seconds, data=data)
    return dataclasses.replace(measured, model=trained.model)


def measure_precisions(trained: Trained, inputs: Iterable[Tensor], *, seconds: float, data: str = "") -> Trained:
    """The model with measurements of every available precision on batches of inputs, uint8 (B, C, S, S).

    Each batch is computed in all precisions in turn, as many batches as the time allows. Measurements on other
    processors are kept. `data` names the images.
    """
    end = time.monotonic() + seconds
    threads, device = torch.get_num_threads(), next(trained.model.parameters()).device
    first_images, batch_images = max(_FIRST_IMAGES, threads), max(_BATCH_IMAGES, 4 * threads)
    if device.type != "cpu":
        first_images = batch_images = _GPU_BATCH_IMAGES
    batches = (part.to(device) for batch in inputs for part in batch.split(batch_images))
    first = next(batches, None)
    if first is None:
        raise DataError("there is no image to measure on")
    trained = _add_activation_ranges(trained, first)
    functions = {
        precision: build_inference_functions(trained, precision).probabilities
        for precision in list_available_precisions(trained)
        if precision != "openvino-int8" or seconds >= _OPENVINO_MIN_SECONDS
    }
    first_batches = [first[:first_images]] + ([first[first_images:]] if len(first) > first_images else [])
    times, probabilities = _run_in_turn(functions, itertools.chain(first_batches, batches), end)
    processor = describe_processor(device)
    measurements = tuple(
        _summarize_precision(precision, times, probabilities, processor, data)
        for precision in times
        if precision != "float32"
    )
    others = tuple(known for known in trained.precision_measurements if known.processor != processor)
    return dataclasses.replace(trained, precision_measurements=(*others, *measurements))


def _run_in_turn(
    functions: dict[Precision, InferenceFunction], batches: Iterable[Tensor], end: float
) -> tuple[dict[Precision, list[float]], dict[Precision, list[Tensor]]]:
    """Compute batches in all precisions until `end`: the seconds and the probabilities of each precision's batches.

    A precision much slower than float32 on the first batch is dropped after it.
    """
    times: dict[Precision, list[float]] = {precision: [] for precision in functions}
    probabilities: dict[Precision, list[Tensor]] = {precision: [] for precision in functions}
    running = dict(functions)
    for batch in batches:
        for precision, function in list(running.items()):
            if not times[precision]:
                function(batch)  # the first pass takes longer than those that follow
            elapsed, rows = _time_batch(function, batch)
            times[precision].append(elapsed)
            probabilities[precision].append(rows)
            if times["float32"][0] < _MIN_SPEED * times[precision][0]:
                del running[precision]
        if time.monotonic() >= end:
            break
    return times, probabilities


def _add_activation_ranges(trained: Trained, inputs: Tensor) -> Trained:
    """The model with the ranges that fixed scales need; existing ones stay, since measurements refer to them."""
    if not isinstance(trained.model, ViT) or trained.preprocess is None or trained.activation_ranges:
        return trained
    return dataclasses.replace(
        trained, activation_ranges=measure_activation_ranges(trained.model, normalize(inputs, trained.preprocess))
    )


def _time_batch(function: InferenceFunction, inputs: Tensor) -> tuple[float, Tensor]:
    start = time.perf_counter()
    rows = function(inputs).cpu()  # which waits for a GPU
    return time.perf_counter() - start, rows


def _summarize_precision(
    precision: Precision,
    times: dict[Precision, list[float]],
    probabilities: dict[Precision, list[Tensor]],
    processor: str,
    data: str,
) -> PrecisionMeasurement:
    """The measurement of a precision over its batches, which are the first of float32's."""
    batches = len(times[precision])
    pairs = zip(times["float32"], times[precision], strict=False)
    speedup = statistics.median(float32 / elapsed for float32, elapsed in pairs)
    agreement = measure_agreement(torch.cat(probabilities["float32"][:batches]), torch.cat(probabilities[precision]))
    return PrecisionMeasurement(
        processor=processor,
        precision=precision,
        threads=torch.get_num_threads(),
        speedup=round(speedup, 3),
        **agreement._asdict(),
        data=data,
    )
