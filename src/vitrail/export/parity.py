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

from vitrail.data.transforms import normalise
from vitrail.errors import ModelError
from vitrail.export.graph import Run, outputs, prepared
from vitrail.model.resnet import BiT
from vitrail.weights.trained import Trained

LIMIT = 1e-5
BATCHES = (1, 3)


class Parity(NamedTuple):
    """How far a file is from vitrail, over the largest value of an output where that is above 1."""

    difference: float
    allowed: float
    """LIMIT; of deep ResNets, in which float32 itself is further from the truth, three times that."""


def check(run: Run, trained: Trained) -> Parity:
    """How far an opened file is from vitrail's own float32; an error where that is too far."""
    batches = [pictures(batch, trained) for batch in BATCHES]
    float32 = [own(trained, pixels) for pixels in batches]
    difference = _largest(zip(float32, map(run, batches), strict=True))
    allowed = LIMIT
    if not difference <= LIMIT and isinstance(trained.model, BiT):
        exact = dataclasses.replace(trained, model=copy.deepcopy(trained.model).double())
        allowed = max(LIMIT, 3 * _largest(zip(float32, (own(exact, pixels) for pixels in batches), strict=True)))
    if not difference <= allowed:
        raise ModelError(
            f"nothing was written: the exported file differs from vitrail's own float32 by {difference:.1e}, and"
            f" {allowed:.1e} is allowed. Another format (--to) may do better"
        )
    return Parity(difference, allowed)


def _largest(pairs: Iterable[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> float:
    """Of all outputs of all batches; NaN where one is."""
    found = [
        (there[name] - values).abs().max().double() / values.abs().max().clamp(min=1)
        for here, there in pairs
        for name, values in here.items()
    ]
    return float(torch.stack(found).max())


@torch.inference_mode()
def own(trained: Trained, pixels: Tensor) -> dict[str, Tensor]:
    """What vitrail says, in the precision of its weights and by the code that answers everywhere else."""
    images = normalise(pixels, prepared(trained)).to(next(trained.model.parameters()).dtype)
    found = trained.model(images)
    if len(outputs(trained)) == 1:
        return {"features": found}
    logits = found / trained.temperature
    return {"logits": logits, "probabilities": logits.sigmoid() if trained.several else logits.softmax(dim=-1)}


def pictures(batch: int, trained: Trained) -> Tensor:
    """uint8 (B, C, S, S): smooth shapes and noise by turns, the same in every call."""
    channels, size = trained.model.config.channels, prepared(trained).size
    generator = torch.Generator().manual_seed(batch)
    noise = torch.rand(batch, channels, *size, generator=generator)
    coarse = torch.rand(batch, channels, 4, 4, generator=generator)
    smooth = F.interpolate(coarse, size, mode="bicubic").clamp(0, 1)
    mixed = torch.where(torch.arange(batch)[:, None, None, None] % 2 == 0, smooth, noise)
    return (mixed * 255).round().to(torch.uint8)
