"""The 1,797 handwritten digits of 8 x 8 pixels in scikit-learn's wheel (Alpaydin and Kaynak, UCI 1998)."""

import dataclasses

import numpy as np
from PIL import Image

from vitrail.data import holdout
from vitrail.data.dataset import Dataset, build_splits
from vitrail.data.decode import PixelArray
from vitrail.data.sample_table import SampleTable
from vitrail.errors import UsageError


@dataclasses.dataclass(frozen=True)
class InMemoryStore:
    """Gray images held in memory."""

    pixels: PixelArray  # (n, H, W)
    table: SampleTable
    is_remote = False

    def get_name(self, row: int) -> str:
        """Return the image's number in the dataset, as a file name."""
        return f"{row:04d}.png"

    def read(self, row: int) -> Image.Image:
        """Return the image."""
        return Image.fromarray(self.pixels[row])


def open_digits(*, holdout_fraction: float = 0.1) -> Dataset:
    """Open the digits, with their 17 gray levels spread over 0 to 255."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError("digits come with scikit-learn: pip install 'vitrail[demo]'") from error
    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.int32)
    store = InMemoryStore(pixels, SampleTable({"label": labels}))
    unsplit = np.full(len(labels), holdout.NO_SPLIT, dtype=np.int8)
    completed = holdout.complete_splits(
        unsplit, labels, store.get_name, identity="digits", holdout_fraction=holdout_fraction
    )
    return Dataset(
        name="digits",
        classes=tuple("0123456789"),
        splits=build_splits(store, completed.column),
        generated_splits=completed.generated_splits,
        holdout_note=completed.holdout_note,
        notes=completed.notes,
    )
