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

from vitrail.config import Augment
from vitrail.data.draws import Draws

TRIES = 512  # each is accepted with probability 1/6 at alpha 2 and more often below: all fail once in 10^40


class Mix(NamedTuple):
    """How a global batch is mixed: `share` is the sample's own part; with a box, the partner's pixels stand in it."""

    share: float
    box: tuple[int, int, int, int] | None  # top, left, bottom, right


def partnered(first: int, batch: int, start: int, count: int) -> NDArray[np.int64]:
    """(m + 1,) positions: `count` from `start` on, of the global batch of `batch` from `first` on, and one partner."""
    return first + np.arange(start - first, start - first + count + 1) % batch


def drawn_mix(seed: int, first: int, augment: Augment, size: tuple[int, int]) -> Mix | None:
    """How the global batch that begins at position `first` is mixed, or None where neither is switched on."""
    draws = Draws.at(seed, first)
    if augment.mixup and (not augment.cutmix or draws.uniform("mixing", 1)[0, 0] < 0.5):
        share = float(beta(draws, "mixup", augment.mixup)[0])
        return Mix(max(share, 1 - share), None)
    if not augment.cutmix:
        return None
    side = np.sqrt(1 - beta(draws, "cutmix", augment.cutmix)[0])
    centre = (draws.uniform("cutmix-box", 2)[0] * size).astype(np.int64)
    half = (side * np.array(size)).astype(np.int64) // 2
    top, left = np.maximum(centre - half, 0).tolist()
    bottom, right = np.minimum(centre + half, size).tolist()
    return Mix(1 - (bottom - top) * (right - left) / (size[0] * size[1]), (top, left, bottom, right))


def beta(draws: Draws, purpose: str, alpha: float) -> NDArray[np.float64]:
    """(B,) numbers of Beta(alpha, alpha) for 0 < alpha <= 2: Jöhnk's method (1964), in logarithms for small alpha."""
    x, y = np.log1p(-draws.uniform(purpose, 2 * TRIES)).reshape(-1, TRIES, 2).transpose(2, 0, 1) / alpha
    total = np.logaddexp(x, y)
    first = (total <= 0).argmax(axis=1)[:, None]
    return np.exp(np.take_along_axis(x - total, first, axis=1))[:, 0]


def mixed(pixels: Tensor, targets: Tensor, mix: Mix, classes: int) -> tuple[Tensor, Tensor]:
    """m mixed images, float, and their targets, float32 (m, L), of m + 1 images and m + 1 targets.

    Targets are class indices (m + 1,) or shares (m + 1, L). Pixels may be bytes or normalised: normalisation is affine
    and the shares sum to 1, so either order gives the same. Bytes come out as floats from 0 to 255, not rounded.
    """
    if targets.ndim == 1:
        targets = F.one_hot(targets.clamp(min=0), classes) * (targets >= 0)[:, None]  # no label: no share
    pixels = pixels if pixels.is_floating_point() else pixels.float()
    soft = _blended(targets.float(), mix.share)
    if mix.box is None:
        return _blended(pixels, mix.share), soft
    top, left, bottom, right = mix.box
    result = pixels[:-1].clone()
    result[..., top:bottom, left:right] = pixels[1:, ..., top:bottom, left:right]
    return result, soft


def _blended(values: Tensor, share: float) -> Tensor:
    """Each with its partner; not `lerp`, whose vectors and remainders may round differently, and so the cuts."""
    return share * values[:-1] + (1 - share) * values[1:]
