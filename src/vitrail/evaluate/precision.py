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

from vitrail import compute
from vitrail.compute import Function
from vitrail.config import Precision
from vitrail.data.transforms import normalise
from vitrail.errors import DataError
from vitrail.evaluate.agreement import agreement
from vitrail.model import count
from vitrail.model.lowered import cpu, ranges
from vitrail.model.vit import ViT
from vitrail.weights.precision import Tried
from vitrail.weights.trained import Trained

SMALL = 5 * 10**8  # multiply-adds an image: a model with fewer gains nothing that anybody would notice
_BATCH = 16  # images at a time, or four for each thread
_FEW = 4  # images of which everything is tried first, or one for each thread
_TRANSLATED = 10.0  # seconds that OpenVINO takes to begin: where there are fewer it is not tried
_HOPELESS = 0.8  # times float32's speed: what is slower of the first few is tried no further


def worthwhile(trained: Trained) -> bool:
    """Whether the model has answers and is large enough to gain."""
    classes = trained.model.config.classes
    return bool(classes) and trained.preprocess is not None and count.multiply_adds(trained.model.config) >= SMALL


def measured(trained: Trained, views: Iterable[Tensor], *, seconds: float, data: str = "") -> Trained:
    """The model with what every precision that is possible here says of batches of views, uint8 (B, C, S, S).

    Batches are computed in all precisions by turns, as many as the time allows; what was measured on other kinds of
    CPUs is kept. `data` says which images they are of.
    """
    end = time.monotonic() + seconds
    threads = torch.get_num_threads()
    few, at_once = max(_FEW, threads), max(_BATCH, 4 * threads)
    parts = (part for batch in views for part in batch.cpu().split(at_once))
    first = next(parts, None)
    if first is None:
        raise DataError("there is no image to measure on")
    trained = _ranged(trained, first)
    possible = [each for each in compute.possible(trained) if each != "openvino-int8" or seconds >= _TRANSLATED]
    ways = {precision: compute.functions(trained, precision).probabilities for precision in possible}
    times: dict[Precision, list[float]] = {precision: [] for precision in ways}
    said: dict[Precision, list[Tensor]] = {precision: [] for precision in ways}
    for part in itertools.chain([first[:few]], [first[few:]] if len(first) > few else [], parts):
        for precision, way in list(ways.items()):
            if not times[precision]:
                way(part)  # a first pass takes longer than those that follow
            taken, answers = _timed(way, part)
            times[precision].append(taken)
            said[precision].append(answers)
            if times["float32"][0] < _HOPELESS * times[precision][0]:
                del ways[precision]
        if time.monotonic() >= end:
            break
    found = tuple(_tried(precision, times, said, data) for precision in times if precision != "float32")
    others = tuple(each for each in trained.tried if each.cpu != cpu())
    return dataclasses.replace(trained, tried=(*others, *found))


def _ranged(trained: Trained, views: Tensor) -> Trained:
    """The model with the ranges that fixed scales need; those it has stay, since all that was measured is of them."""
    if not isinstance(trained.model, ViT) or trained.preprocess is None or trained.ranges:
        return trained
    return dataclasses.replace(trained, ranges=ranges(trained.model, normalise(views, trained.preprocess)))


def _timed(way: Function, views: Tensor) -> tuple[float, Tensor]:
    start = time.perf_counter()
    answers = way(views)
    return time.perf_counter() - start, answers


def _tried(
    precision: Precision, times: dict[Precision, list[float]], said: dict[Precision, list[Tensor]], data: str
) -> Tried:
    """How a precision did in its batches, which are the first of float32's."""
    rounds = len(times[precision])
    pairs = zip(times["float32"], times[precision], strict=False)
    speed = statistics.median(single / taken for single, taken in pairs)
    same = agreement(torch.cat(said["float32"][:rounds]), torch.cat(said[precision]))
    return Tried(
        cpu=cpu(),
        precision=precision,
        threads=torch.get_num_threads(),
        speed=round(speed, 3),
        **same._asdict(),
        data=data,
    )
