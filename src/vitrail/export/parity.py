"""Whether an exported file says what vitrail says: it is run in its own runtime before anyone gets it.

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
from vitrail.export.graph import GraphRunner, get_output_names, require_preprocess
from vitrail.model.resnet import BiT
from vitrail.weights.trained import Trained

MAX_DIFFERENCE = 1e-5
BATCH_SIZES = (1, 3)


class Parity(NamedTuple):
    """How far a file is from vitrail, over the largest value of an output where that is above 1."""

    difference: float
    allowed: float
    """LIMIT; of deep ResNets, in which float32 itself is further from the truth, three times that."""


def check_parity(run: GraphRunner, trained: Trained) -> Parity:
    """How far an opened file is from vitrail's own float32; an error where that is too far."""
    batches = [make_test_pixels(batch, trained) for batch in BATCH_SIZES]
    float32 = [compute_reference_outputs(trained, pixels) for pixels in batches]
    difference = _compute_max_difference(zip(float32, map(run, batches), strict=True))
    allowed = MAX_DIFFERENCE
    if not difference <= MAX_DIFFERENCE and isinstance(trained.model, BiT):
        exact = dataclasses.replace(trained, model=copy.deepcopy(trained.model).double())
        allowed = max(
            MAX_DIFFERENCE,
            3
            * _compute_max_difference(
                zip(float32, (compute_reference_outputs(exact, pixels) for pixels in batches), strict=True)
            ),
        )
    if not difference <= allowed:
        raise ModelError(
            f"nothing was written: the exported file differs from vitrail's own float32 by {difference:.1e}, and"
            f" {allowed:.1e} is allowed. Another format (--to) may do better"
        )
    return Parity(difference, allowed)


def _compute_max_difference(pairs: Iterable[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> float:
    """Of all outputs of all batches; NaN where one is."""
    found = [
        (there[name] - values).abs().max().double() / values.abs().max().clamp(min=1)
        for here, there in pairs
        for name, values in here.items()
    ]
    return float(torch.stack(found).max())


@torch.inference_mode()
def compute_reference_outputs(trained: Trained, pixels: Tensor) -> dict[str, Tensor]:
    """What vitrail says, in the precision of its weights and by the code that answers everywhere else."""
    images = normalize(pixels, require_preprocess(trained)).to(next(trained.model.parameters()).dtype)
    found = trained.model(images)
    if len(get_output_names(trained)) == 1:
        return {"features": found}
    logits = found / trained.temperature
    return {"logits": logits, "probabilities": logits.sigmoid() if trained.multi_label else logits.softmax(dim=-1)}


def make_test_pixels(batch: int, trained: Trained) -> Tensor:
    """uint8 (B, C, S, S): smooth shapes and noise by turns, the same in every call."""
    channels, size = trained.model.config.channels, require_preprocess(trained).size
    generator = torch.Generator().manual_seed(batch)
    noise = torch.rand(batch, channels, *size, generator=generator)
    coarse = torch.rand(batch, channels, 4, 4, generator=generator)
    smooth = F.interpolate(coarse, size, mode="bicubic").clamp(0, 1)
    mixed = torch.where(torch.arange(batch)[:, None, None, None] % 2 == 0, smooth, noise)
    return (mixed * 255).round().to(torch.uint8)
