"""Estimate what predicting many images takes before it starts: time, decoding and the size of the rows."""

import dataclasses
from typing import Any

from vitrail.config import ModelConfig
from vitrail.config.features import count_features
from vitrail.errors import UsageError
from vitrail.model import cost
from vitrail.training.plan import GPUS, PlannedMachine

IMAGES_PER_CORE = 600  # JPEGs of 256 pixels that a core decodes and resizes in a second: docs/performance.md
NAME_BYTES = 100  # of an image's path
LABEL_BYTES = 20  # of a label and its probability


def plan_prediction(
    config: ModelConfig, images: int, machine: PlannedMachine, *, embed: bool = False, float16: bool = False
) -> dict[str, Any]:
    """Estimate what the prediction takes; the keys are those of `vitrail plan --predict --json`."""
    if images < 1:
        raise UsageError(f"--predict is {images}; it is the number of images, at least 1")
    if float16 and not embed:
        raise UsageError("--float16 is for features: add --embed")
    if not embed and not config.classes:
        raise UsageError("the model has no head, so it gives features and no labels: --embed")
    flops = 2 * cost.count_multiply_adds(config)
    flops_per_second = machine.devices * machine.efficiency * GPUS[machine.gpu].peak_flops
    seconds = flops * images / flops_per_second
    features = count_features(config, "default") if embed else 0
    row_bytes = NAME_BYTES + (features * (2 if float16 else 4) if embed else LABEL_BYTES)
    return {
        "machine": dataclasses.asdict(machine) | {"devices": machine.devices, "peak": GPUS[machine.gpu].peak_flops},
        "parameters": cost.count_parameters(config),
        "flops_per_image": flops,
        "images": images,
        "images_per_second": images / seconds,
        "seconds": seconds,
        "gpu_hours": seconds * machine.devices / 3600,
        "decoding_cores": images / seconds / IMAGES_PER_CORE,
        "features": features,
        "row_bytes": row_bytes,
        "bytes": row_bytes * images,
    }
