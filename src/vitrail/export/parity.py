"""Compare an exported file, run in its own runtime, with vitrail before it is handed out.

B images   C channels   S image side
"""

import copy
import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.transforms import normalize
from vitrail.errors import ModelError
from vitrail.export.graph import GraphRunner, name_head_outputs
from vitrail.model.resnet import BiT
from vitrail.weights.trained import Trained, require_preprocess

MAX_DIFFERENCE = 1e-5
BATCH_SIZES = (1, 3)


class Parity(NamedTuple):
    """The largest difference of a file from vitrail, relative to an output's largest value where that is above 1."""

    difference: float
    allowed: float
    """MAX_DIFFERENCE; for deep ResNets, whose float32 itself is less exact, three times their distance from float64."""


def check_parity(run: GraphRunner, trained: Trained) -> Parity:
    """Measure the difference of an opened file from vitrail's own float32; raise an error where it is too large."""
    batches = [make_test_pixels(batch, trained) for batch in BATCH_SIZES]
    float32 = [compute_reference_outputs(trained, pixels) for pixels in batches]
    difference = _compute_max_difference(zip(float32, map(run, batches), strict=True))
    allowed = MAX_DIFFERENCE
    if not difference <= MAX_DIFFERENCE and isinstance(trained.model, BiT):
        double = dataclasses.replace(trained, model=copy.deepcopy(trained.model).double())
        float64 = (compute_reference_outputs(double, pixels) for pixels in batches)
        allowed = max(MAX_DIFFERENCE, 3 * _compute_max_difference(zip(float32, float64, strict=True)))
    if not difference <= allowed:
        raise ModelError(
            f"nothing was written: the exported file differs from vitrail's own float32 by {difference:.1e}, and"
            f" {allowed:.1e} is allowed. Another format (--to) may do better"
        )
    return Parity(difference, allowed)


def _compute_max_difference(pairs: Iterable[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> float:
    """The largest difference over all outputs of all batches; NaN where one is."""
    differences = [
        (outputs[name] - values).abs().max().double() / values.abs().max().clamp(min=1)
        for reference, outputs in pairs
        for name, values in reference.items()
    ]
    return float(torch.stack(differences).max())


@torch.inference_mode()
def compute_reference_outputs(trained: Trained, pixels: Tensor) -> dict[str, Tensor]:
    """Compute vitrail's own outputs, in the precision of its weights."""
    images = normalize(pixels, require_preprocess(trained)).to(next(trained.model.parameters()).dtype)
    outputs = trained.model(images)
    if not trained.model.config.classes:
        return {"features": outputs}
    return name_head_outputs(outputs, trained.temperature, trained.multi_label)


def make_test_pixels(batch: int, trained: Trained) -> Tensor:
    """Make pixels, uint8 (B, C, S, S): smooth shapes and noise in turn, the same in every call."""
    channels, size = trained.model.config.channels, require_preprocess(trained).size
    generator = torch.Generator().manual_seed(batch)
    noise = torch.rand(batch, channels, *size, generator=generator)
    coarse = torch.rand(batch, channels, 4, 4, generator=generator)
    smooth = F.interpolate(coarse, size, mode="bicubic").clamp(0, 1)
    mixed = torch.where(torch.arange(batch)[:, None, None, None] % 2 == 0, smooth, noise)
    return (mixed * 255).round().to(torch.uint8)
