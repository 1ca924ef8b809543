"""What a model loses and gains in fewer bits on this CPU: measured once, kept in its file, looked up when it is used.

n images   C channels   S image side   L classes
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterable

import torch
from torch import Tensor

from vitrail.config import Precision
from vitrail.data.transforms import normalize
from vitrail.errors import DataError
from vitrail.evaluate.agreement import measure_agreement
from vitrail.inference import compute
from vitrail.inference.compute import InferenceFunction
from vitrail.model import cost
from vitrail.model.quantized import describe_cpu, measure_activation_ranges
from vitrail.model.vit import ViT
from vitrail.weights.precision_measurements import PrecisionMeasurement
from vitrail.weights.trained import Trained

MIN_MULTIPLY_ADDS = 5 * 10**8  # multiply-adds an image: a model with fewer gains nothing that anybody would notice
_BATCH_IMAGES = 16  # images at a time, or four for each thread
_FIRST_IMAGES = 4  # images of which everything is tried first, or one for each thread
_OPENVINO_MIN_SECONDS = 10.0  # seconds that OpenVINO takes to begin: where there are fewer it is not tried
_MIN_SPEED = 0.8  # times float32's speed: what is slower of the first few is tried no further


def is_worth_measuring(trained: Trained) -> bool:
    """Whether the model has answers and is large enough to gain."""
    classes = trained.model.config.classes
    return (
        bool(classes)
        and trained.preprocess is not None
        and cost.count_multiply_adds(trained.model.config) >= MIN_MULTIPLY_ADDS
    )


def measure_precisions(trained: Trained, inputs: Iterable[Tensor], *, seconds: float, data: str = "") -> Trained:
    """The model with what every precision that is possible here says of batches of views, uint8 (B, C, S, S).

    Batches are computed in all precisions by turns, as many as the time allows; what was measured on other kinds of
    CPUs is kept. `data` says which images they are of.
    """
    end = time.monotonic() + seconds
    threads = torch.get_num_threads()
    few, at_once = max(_FIRST_IMAGES, threads), max(_BATCH_IMAGES, 4 * threads)
    parts = (part for batch in inputs for part in batch.cpu().split(at_once))
    first = next(parts, None)
    if first is None:
        raise DataError("there is no image to measure on")
    trained = _add_activation_ranges(trained, first)
    possible = [
        each
        for each in compute.list_available_precisions(trained)
        if each != "openvino-int8" or seconds >= _OPENVINO_MIN_SECONDS
    ]
    ways = {precision: compute.build_inference_functions(trained, precision).probabilities for precision in possible}
    times: dict[Precision, list[float]] = {precision: [] for precision in ways}
    said: dict[Precision, list[Tensor]] = {precision: [] for precision in ways}
    for part in itertools.chain([first[:few]], [first[few:]] if len(first) > few else [], parts):
        for precision, way in list(ways.items()):
            if not times[precision]:
                way(part)  # a first pass takes longer than those that follow
            taken, answers = _time_batch(way, part)
            times[precision].append(taken)
            said[precision].append(answers)
            if times["float32"][0] < _MIN_SPEED * times[precision][0]:
                del ways[precision]
        if time.monotonic() >= end:
            break
    found = tuple(_summarize_precision(precision, times, said, data) for precision in times if precision != "float32")
    others = tuple(each for each in trained.precision_measurements if each.cpu != describe_cpu())
    return dataclasses.replace(trained, precision_measurements=(*others, *found))


def _add_activation_ranges(trained: Trained, inputs: Tensor) -> Trained:
    """The model with the ranges that fixed scales need; those it has stay, since all that was measured is of them."""
    if not isinstance(trained.model, ViT) or trained.preprocess is None or trained.activation_ranges:
        return trained
    return dataclasses.replace(
        trained, activation_ranges=measure_activation_ranges(trained.model, normalize(inputs, trained.preprocess))
    )


def _time_batch(function: InferenceFunction, inputs: Tensor) -> tuple[float, Tensor]:
    start = time.perf_counter()
    answers = function(inputs)
    return time.perf_counter() - start, answers


def _summarize_precision(
    precision: Precision, times: dict[Precision, list[float]], probabilities: dict[Precision, list[Tensor]], data: str
) -> PrecisionMeasurement:
    """How a precision did in its batches, which are the first of float32's."""
    rounds = len(times[precision])
    pairs = zip(times["float32"], times[precision], strict=False)
    speed = statistics.median(single / taken for single, taken in pairs)
    same = measure_agreement(torch.cat(probabilities["float32"][:rounds]), torch.cat(probabilities[precision]))
    return PrecisionMeasurement(
        cpu=describe_cpu(),
        precision=precision,
        threads=torch.get_num_threads(),
        speedup=round(speed, 3),
        **same._asdict(),
        data=data,
    )
