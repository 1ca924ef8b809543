"""Measurements of a model in lower precisions, as its file stores them, and the choice of the best precision."""

import dataclasses
import math
from collections.abc import Collection, Sequence

from vitrail.config import Precision
from vitrail.errors import UsageError
from vitrail.formatting import pluralize

__all__ = ["PrecisionMeasurement"]

MIN_IMAGES = 100  # of fewer, one different prediction says too little
MIN_SPEEDUP = 1.1  # over float32; less is not worth different predictions
MIN_BFLOAT16_AGREEMENT = 0.995  # the share of images for which bfloat16 and float16 must predict float32's class
MIN_INT8_AGREEMENT = 0.99  # the same for int8, of images where float32's likeliest class leads by more than 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionMeasurement:
    """A model in one precision compared with its float32, on the same images and the same processor.

    `Trained.precision_measurements` has one for each precision and processor.

        measurements = vitrail.load("model.safetensors").precision_measurements
        print([(measurement.precision, measurement.speedup) for measurement in measurements])
    """

    processor: str
    """The CPU features that speed depends on, or the GPU's name, by which a measurement is looked up."""
    precision: Precision
    threads: int
    speedup: float
    """Speed over that of float32."""
    images: int
    top1_agreement: float
    """The share of images with the same likeliest class."""
    confident_agreement: float | None
    """The same of the images where float32 is confident; None where there are none."""
    confident_images: int
    mean_probability_change: float
    """The mean absolute change of the probability of float32's likeliest class."""
    data: str = ""
    """Which images those are; empty in older files, which do not state it."""

    def __post_init__(self) -> None:
        for name in ("top1_agreement", "confident_agreement", "mean_probability_change"):
            if not 0 <= (getattr(self, name) or 0.0) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")
        if not 0 < self.speedup < math.inf:
            raise UsageError(f"speedup is {self.speedup}; it must be above 0")
        if not self.images >= self.confident_images >= 0:
            images = pluralize(self.images, "image")
            raise UsageError(f"confident_images is {self.confident_images} of {images}; it must be from 0 to that")

    @property
    def is_worthwhile(self) -> bool:
        """Whether it is worth using: faster than float32, with its predictions where that is confident."""
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
        """Describe the measurement in one sentence."""
        confident = ""
        if self.confident_agreement is not None:
            confident = f", {self.confident_agreement:.2%} of the {self.confident_images:,} where float32 is confident"
        data = f" of {self.data}" if self.data else ""
        return (
            f"{self.precision}: {self.speedup:.2f} times float32's speed, the same class for {self.top1_agreement:.2%}"
            f" of {pluralize(self.images, 'image')}{data}{confident}, probabilities {self.mean_probability_change:.4f}"
            f" apart ({self.processor}, {pluralize(self.threads, 'thread')})"
        )


def choose_precision(
    measurements: Sequence[PrecisionMeasurement], processor: str, available: Collection[Precision]
) -> Precision:
    """Choose the fastest worthwhile precision that was measured on such a processor and is available; else float32."""
    candidates = [m for m in measurements if m.processor == processor and m.precision in available and m.is_worthwhile]
    return max(candidates, key=lambda measurement: measurement.speedup).precision if candidates else "float32"
