"""What a model lost and gained in fewer bits, as its file tells it, and which precision that makes the best."""

import dataclasses
import math
from collections.abc import Collection, Sequence

from vitrail.config import Precision
from vitrail.errors import UsageError
from vitrail.formatting import pluralize

MIN_IMAGES = 100  # of fewer, one that is answered otherwise says too little
MIN_SPEEDUP = 1.1  # than float32: less is not worth another answer
MIN_BFLOAT16_AGREEMENT = 0.995  # the share of images that bfloat16 must answer as float32 does
MIN_INT8_AGREEMENT = 0.99  # the share of those that int8 must, where float32's likeliest class leads by more than 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionMeasurement:
    """A model in one precision against its float32, on the same images and the same CPU."""

    cpu: str
    """The features that speed depends on, by which a measurement is looked up."""
    precision: Precision
    threads: int
    speedup: float
    """Times float32's."""
    images: int
    top1_agreement: float
    """The share with the same likeliest class."""
    confident_agreement: float | None
    """The same of the images of which float32 is sure; None where there is none."""
    confident_images: int
    mean_probability_change: float
    """By how much the probability of float32's likeliest class is another, on average."""
    data: str = ""
    """Which images those are; nothing in files of before this was kept."""

    def __post_init__(self) -> None:
        for name in ("top1_agreement", "confident_agreement", "mean_probability_change"):
            if not 0 <= (getattr(self, name) or 0.0) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")
        if not 0 < self.speedup < math.inf:
            raise UsageError(f"speed is {self.speedup}; it must be above 0")
        if not self.images >= self.confident_images >= 0:
            raise UsageError(f"{self.confident_images} of {pluralize(self.images, 'image')} cannot be")

    @property
    def is_worthwhile(self) -> bool:
        """Whether it is worth its answers: faster, and the same as float32's where that is sure."""
        if self.speedup < MIN_SPEEDUP:
            return False
        if self.precision == "bfloat16":
            return self.images >= MIN_IMAGES and self.top1_agreement >= MIN_BFLOAT16_AGREEMENT
        return (
            self.confident_agreement is not None
            and self.confident_images >= MIN_IMAGES
            and self.confident_agreement >= MIN_INT8_AGREEMENT
        )

    def describe(self) -> str:
        """The same as a sentence."""
        sure = (
            ""
            if self.confident_agreement is None
            else f", to {self.confident_agreement:.2%} of the {self.confident_images:,} that float32 is sure of"
        )
        which = f" of {self.data}" if self.data else ""
        return (
            f"{self.precision}: {self.speedup:.2f} times float32's speed, its answer to {self.top1_agreement:.2%} of"
            f" {pluralize(self.images, 'image')}{which}{sure}, probabilities {self.mean_probability_change:.4f} apart"
            f" ({self.cpu}, {self.threads} threads)"
        )


def choose_precision(
    measurements: Sequence[PrecisionMeasurement], cpu: str, available: Collection[Precision]
) -> Precision:
    """The fastest good precision of those measured on such a CPU and possible here; float32 where there is none."""
    good = [each for each in measurements if each.cpu == cpu and each.precision in available and each.is_worthwhile]
    return max(good, key=lambda each: each.speedup).precision if good else "float32"
