"""Mixup (Zhang et al. 2018) and cutmix (Yun et al. 2019) of a global batch, however it is split.

    M samples of a global batch   m consecutive ones held here   L classes

A sample's partner is the next one of the global batch; the last one's is the first. A global batch has one lambda and
one box, drawn at its first position. So a rank or a micro-batch that holds m samples and the partner of the last mixes
them as the whole batch would be mixed, to the bit.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from vitrail.config import AugmentConfig
from vitrail.data.counter_rng import CounterRNG, FloatArray, IntArray

BETA_ATTEMPTS = 512  # each is accepted with probability 1/6 at alpha 2 and more often below: all fail once in 10^40


class MixParams(NamedTuple):
    """How a global batch is mixed: `lam` weights the sample itself; a box, if any, shows the partner's pixels."""

    lam: float
    box: tuple[int, int, int, int] | None  # top, left, bottom, right


def list_positions_with_partner(first: int, batch_size: int, start: int, count: int) -> IntArray:
    """List (m + 1,) positions: `count` from `start` on, of the global batch that begins at `first`, and one partner."""
    return first + np.arange(start - first, start - first + count + 1) % batch_size


def draw_mix(seed: int, first: int, augment: AugmentConfig, size: tuple[int, int]) -> MixParams | None:
    """Draw the mix of the global batch that begins at position `first`; None where neither kind is enabled."""
    rng = CounterRNG.from_positions(seed, first)
    if augment.mixup and (not augment.cutmix or rng.uniform("mixing", 1)[0, 0] < 0.5):
        lam = float(draw_beta(rng, "mixup", augment.mixup)[0])
        return MixParams(max(lam, 1 - lam), None)
    if not augment.cutmix:
        return None
    relative_side = np.sqrt(1 - draw_beta(rng, "cutmix", augment.cutmix)[0])
    center = (rng.uniform("cutmix-box", 2)[0] * size).astype(np.int64)
    half = (relative_side * np.array(size)).astype(np.int64) // 2
    top, left = np.maximum(center - half, 0).tolist()
    bottom, right = np.minimum(center + half, size).tolist()
    return MixParams(1 - (bottom - top) * (right - left) / (size[0] * size[1]), (top, left, bottom, right))


def draw_beta(rng: CounterRNG, purpose: str, alpha: float) -> FloatArray:
    """Draw (B,) numbers of Beta(alpha, alpha), 0 < alpha <= 2: Jöhnk's method (1964), in logarithms for small alpha."""
    x, y = np.log1p(-rng.uniform(purpose, 2 * BETA_ATTEMPTS)).reshape(-1, BETA_ATTEMPTS, 2).transpose(2, 0, 1) / alpha
    total = np.logaddexp(x, y)
    first = (total <= 0).argmax(axis=1)[:, None]
    return np.exp(np.take_along_axis(x - total, first, axis=1))[:, 0]


def apply_mix(pixels: Tensor, targets: Tensor, mix: MixParams, num_classes: int) -> tuple[Tensor, Tensor]:
    """Mix m + 1 images and targets into m images, float, and m targets, float32 (m, L).

    Targets are class indices (m + 1,) or probabilities (m + 1, L). Pixels may be bytes or normalized: normalization is
    affine and the weights sum to 1, so both orders give the same. Bytes become floats from 0 to 255, not rounded.
    """
    if targets.ndim == 1:
        targets = F.one_hot(targets.clamp(min=0), num_classes) * (targets >= 0)[:, None]  # no label: all zeros
    pixels = pixels if pixels.is_floating_point() else pixels.float()
    mixed_targets = _blend_with_partner(targets.float(), mix.lam)
    if mix.box is None:
        return _blend_with_partner(pixels, mix.lam), mixed_targets
    top, left, bottom, right = mix.box
    mixed = pixels[:-1].clone()
    mixed[..., top:bottom, left:right] = pixels[1:, ..., top:bottom, left:right]
    return mixed, mixed_targets


def _blend_with_partner(values: Tensor, lam: float) -> Tensor:
    """Blend each with its partner. Not `lerp`: its vectorized part and remainder may round differently at the cuts."""
    return lam * values[:-1] + (1 - lam) * values[1:]
