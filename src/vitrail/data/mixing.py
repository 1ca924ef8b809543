"""Mixup (Zhang et al. 2018) and cutmix (Yun et al. 2019) of a global batch, however it is cut.

    M samples of a global batch   m consecutive ones held here   L classes

The partner of a sample is the next one of the global batch, and of the last one the first. There is one lambda and one
box a global batch, drawn at its first position. So whoever holds m samples and the partner of the last of them (a rank,
a micro-batch) mixes them as the whole batch would be mixed, to the bit.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.config import AugmentConfig
from vitrail.data.counter_rng import CounterRNG

BETA_ATTEMPTS = 512  # each is accepted with probability 1/6 at alpha 2 and more often below: all fail once in 10^40


class MixParams(NamedTuple):
    """How a global batch is mixed: `share` is the sample's own part; with a box, the partner's pixels stand in it."""

    lam: float
    box: tuple[int, int, int, int] | None  # top, left, bottom, right


def list_positions_with_partner(first: int, batch_size: int, start: int, count: int) -> NDArray[np.int64]:
    """(m + 1,) positions: `count` from `start` on, of the global batch of `batch` from `first` on, and one partner."""
    return first + np.arange(start - first, start - first + count + 1) % batch_size


def draw_mix(seed: int, first: int, augment: AugmentConfig, size: tuple[int, int]) -> MixParams | None:
    """How the global batch that begins at position `first` is mixed, or None where neither is switched on."""
    draws = CounterRNG.from_positions(seed, first)
    if augment.mixup and (not augment.cutmix or draws.uniform("mixing", 1)[0, 0] < 0.5):
        share = float(draw_beta(draws, "mixup", augment.mixup)[0])
        return MixParams(max(share, 1 - share), None)
    if not augment.cutmix:
        return None
    side = np.sqrt(1 - draw_beta(draws, "cutmix", augment.cutmix)[0])
    centre = (draws.uniform("cutmix-box", 2)[0] * size).astype(np.int64)
    half = (side * np.array(size)).astype(np.int64) // 2
    top, left = np.maximum(centre - half, 0).tolist()
    bottom, right = np.minimum(centre + half, size).tolist()
    return MixParams(1 - (bottom - top) * (right - left) / (size[0] * size[1]), (top, left, bottom, right))


def draw_beta(rng: CounterRNG, purpose: str, alpha: float) -> NDArray[np.float64]:
    """(B,) numbers of Beta(alpha, alpha) for 0 < alpha <= 2: Jöhnk's method (1964), in logarithms for small alpha."""
    x, y = np.log1p(-rng.uniform(purpose, 2 * BETA_ATTEMPTS)).reshape(-1, BETA_ATTEMPTS, 2).transpose(2, 0, 1) / alpha
    total = np.logaddexp(x, y)
    first = (total <= 0).argmax(axis=1)[:, None]
    return np.exp(np.take_along_axis(x - total, first, axis=1))[:, 0]


def apply_mix(pixels: Tensor, targets: Tensor, mix: MixParams, num_classes: int) -> tuple[Tensor, Tensor]:
    """m mixed images, float, and their targets, float32 (m, L), of m + 1 images and m + 1 targets.

    Targets are class indices (m + 1,) or shares (m + 1, L). Pixels may be bytes or normalised: normalisation is affine
    and the shares sum to 1, so either order gives the same. Bytes come out as floats from 0 to 255, not rounded.
    """
    if targets.ndim == 1:
        targets = F.one_hot(targets.clamp(min=0), num_classes) * (targets >= 0)[:, None]  # no label: no share
    pixels = pixels if pixels.is_floating_point() else pixels.float()
    soft = _blend_with_partner(targets.float(), mix.lam)
    if mix.box is None:
        return _blend_with_partner(pixels, mix.lam), soft
    top, left, bottom, right = mix.box
    result = pixels[:-1].clone()
    result[..., top:bottom, left:right] = pixels[1:, ..., top:bottom, left:right]
    return result, soft


def _blend_with_partner(values: Tensor, lam: float) -> Tensor:
    """Each with its partner; not `lerp`, whose vectors and remainders may round differently, and so the cuts."""
    return lam * values[:-1] + (1 - lam) * values[1:]
