"""Which patches of an image are masked, and what replaces them: a function of (seed, position), like all randomness.

    B images   N patches of an image   M masked ones

Every image has equally many masked patches, drawn without replacement. A further number decides for each: 80 % are
replaced by the [mask] token, 10 % by another patch, 10 % stay (Dosovitskiy et al. 2021, B.1.2, after BERT). The other
patch comes from the next image of the global batch, mixup's partner, at another place than the masked patch. So a part
of a batch that holds one image more than it computes masks exactly what the whole batch would, however it is split. A
patch never replaces itself, not even where a step has a single image.
"""

import numpy as np

from vitrail.config import MASK_TOKEN, UNCHANGED_PATCH, MaskedConfig
from vitrail.data.counter_rng import CounterRNG, IntArray

MASK_TOKEN_FRACTION, REPLACED_FRACTION = 0.8, 0.1  # of the masked patches; the rest stay
EVAL_SEED = 0  # every evaluation of every run masks the same patches


def draw_masked_patches(rng: CounterRNG, masked: MaskedConfig, num_patches: int) -> IntArray:
    """Draw (B, 2, N): each image's patches, masked ones first, and what replaces each patch, in raster order.

    A replacement is MASK_TOKEN, UNCHANGED_PATCH, or the index of a patch of the next image. For mae, every masked patch
    becomes MASK_TOKEN.
    """
    num_masked = masked.count_masked(num_patches)
    order = rng.bits("hidden", num_patches).argsort(axis=1)
    masked_indices = order[:, :num_masked]
    replacements = np.full_like(order, UNCHANGED_PATCH)
    replacement = MASK_TOKEN if masked.kind == "mae" else _draw_replacements(rng, masked_indices, num_patches)
    np.put_along_axis(replacements, masked_indices, replacement, axis=1)
    return np.stack([order, replacements], axis=1)


def _draw_replacements(rng: CounterRNG, masked_indices: IntArray, num_patches: int) -> IntArray:
    """Draw (B, M): what replaces each masked patch."""
    uniform = rng.uniform("hidden by", masked_indices.shape[1])
    shift = (uniform - MASK_TOKEN_FRACTION) / REPLACED_FRACTION * (num_patches - 1)  # 0 .. N - 2 where replaced
    other_patch = (masked_indices + 1 + shift.astype(np.int64)) % num_patches
    return np.where(
        uniform < MASK_TOKEN_FRACTION,
        MASK_TOKEN,
        np.where(uniform < MASK_TOKEN_FRACTION + REPLACED_FRACTION, other_patch, UNCHANGED_PATCH),
    )
