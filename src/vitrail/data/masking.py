"""Which patches of an image are hidden, and by what: a function of (seed, position), as all that training draws.

    B images   N patches of an image   M hidden ones

Every image hides equally many patches, drawn without replacement. Of each hidden one a further number decides: 80 % are
replaced by the [mask], 10 % by another patch, 10 % are kept (Dosovitskiy et al. 2021, B.1.2, after BERT). The other
patch is one of the next image of the global batch, mixup's partner, at another place than the hidden patch's. So a part
of a batch that has one image more than it computes hides just what the whole batch would, however it is cut, and a
patch never replaces itself, not even where a step has a single image.
"""

import numpy as np
from numpy.typing import NDArray

from vitrail.config import MASK_TOKEN, UNCHANGED_PATCH, MaskedConfig
from vitrail.data.counter_rng import CounterRNG

MASK_TOKEN_FRACTION, REPLACED_FRACTION = 0.8, 0.1  # shares of the hidden patches; the rest are kept
EVAL_SEED = 0  # every evaluation of every run hides the same


def draw_masked_patches(rng: CounterRNG, masked: MaskedConfig, num_patches: int) -> NDArray[np.int64]:
    """(B, 2, N): the patches of each image in an order whose first M are the hidden ones; and what stands in the place
    of each patch, in raster order: MASK, OWN, or the number of a patch of the next image. All are masked for mae.
    """
    hidden = masked.count_masked(num_patches)
    order = rng.bits("hidden", num_patches).argsort(axis=1)
    places = order[:, :hidden]
    stands = np.full_like(order, UNCHANGED_PATCH)
    np.put_along_axis(
        stands, places, MASK_TOKEN if masked.kind == "mae" else _choose_replacements(rng, places, num_patches), axis=1
    )
    return np.stack([order, stands], axis=1)


def _choose_replacements(rng: CounterRNG, masked_indices: NDArray[np.int64], num_patches: int) -> NDArray[np.int64]:
    """(B, M): what stands in these places."""
    number = rng.uniform("hidden by", masked_indices.shape[1])
    away = ((number - MASK_TOKEN_FRACTION) / REPLACED_FRACTION * (num_patches - 1)).astype(
        np.int64
    )  # of those that are replaced 0 .. N - 2
    other = (masked_indices + 1 + away) % num_patches
    return np.where(
        number < MASK_TOKEN_FRACTION,
        MASK_TOKEN,
        np.where(number < MASK_TOKEN_FRACTION + REPLACED_FRACTION, other, UNCHANGED_PATCH),
    )
