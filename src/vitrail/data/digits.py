"""The 1,797 handwritten digits of 8 x 8 pixels that scikit-learn's wheel carries (Alpaydin and Kaynak, UCI 1998)."""

import dataclasses

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data import holdout
from vitrail.data.dataset import Dataset, build_splits
from vitrail.data.sample_table import SampleTable
from vitrail.errors import UsageError


@dataclasses.dataclass(frozen=True)
class InMemoryStore:
    """Grey images held in memory."""

    pixels: NDArray[np.uint8]  # (n, H, W)
    table: SampleTable
    is_remote = False

    def get_name(self, row: int) -> str:
        """The number in the set, as a file would be called."""
        return f"{row:04d}.png"

    def read(self, row: int) -> Image.Image:
        """The picture."""
        return Image.fromarray(self.pixels[row])


def open_digits(*, holdout_fraction: float = 0.1) -> Dataset:
    """The digits, their 17 levels of grey spread over 0 to 255."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError("digits come with scikit-learn: pip install 'vitrail[demo]'") from error
    bunch = load_digits()
    pixels = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    label = bunch.target.astype(np.int32)
    store = InMemoryStore(pixels, SampleTable({"label": label}))
    none = np.full(len(label), holdout.NO_SPLIT, dtype=np.int8)
    split = holdout.complete_splits(none, label, store.get_name, identity="digits", holdout_fraction=holdout_fraction)
    return Dataset(
        name="digits",
        classes=tuple("0123456789"),
        splits=build_splits(store, split.column),
        generated_splits=split.generated_splits,
        holdout_note=split.holdout_note,
        notes=split.notes,
    )
