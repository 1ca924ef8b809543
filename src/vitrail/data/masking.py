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

from vitrail.config import MASK, OWN, Masked
from vitrail.data.draws import Draws

MASKED, REPLACED = 0.8, 0.1  # shares of the hidden patches; the rest are kept
EVALUATION_SEED = 0  # every evaluation of every run hides the same


def drawn(draws: Draws, masked: Masked, patches: int) -> NDArray[np.int64]:
    """(B, 2, N): the patches of each image in an order whose first M are the hidden ones; and what stands in the place
    of each patch, in raster order: MASK, OWN, or the number of a patch of the next image. All are masked for mae.
    """
    hidden = masked.hidden(patches)
    order = draws.bits("hidden", patches).argsort(axis=1)
    places = order[:, :hidden]
    stands = np.full_like(order, OWN)
    np.put_along_axis(stands, places, MASK if masked.kind == "mae" else _replaced(draws, places, patches), axis=1)
    return np.stack([order, stands], axis=1)


def _replaced(draws: Draws, places: NDArray[np.int64], patches: int) -> NDArray[np.int64]:
    """(B, M): what stands in these places."""
    number = draws.uniform("hidden by", places.shape[1])
    away = ((number - MASKED) / REPLACED * (patches - 1)).astype(np.int64)  # of those that are replaced 0 .. N - 2
    other = (places + 1 + away) % patches
    return np.where(number < MASKED, MASK, np.where(number < MASKED + REPLACED, other, OWN))
