"""What a model lost and gained in fewer bits, as its file tells it, and which precision that makes the best."""

import dataclasses
import math
from collections.abc import Collection, Sequence

from vitrail.config import Precision
from vitrail.errors import UsageError
from vitrail.plurals import plural

IMAGES = 100  # of fewer, one that is answered otherwise says too little
FASTER = 1.1  # than float32: less is not worth another answer
AGREEING = 0.995  # the share of images that bfloat16 must answer as float32 does
SURE = 0.99  # the share of those that int8 must, where float32's likeliest class leads by more than 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
    """A model in one precision against its float32, on the same images and the same CPU."""

    cpu: str
    """The features that speed depends on, by which a measurement is looked up."""
    precision: Precision
    threads: int
    speed: float
    """Times float32's."""
    images: int
    top1: float
    """The share with the same likeliest class."""
    sure: float | None
    """The same of the images of which float32 is sure; None where there is none."""
    sure_images: int
    change: float
    """By how much the probability of float32's likeliest class is another, on average."""
    data: str = ""
    """Which images those are; nothing in files of before this was kept."""

    def __post_init__(self) -> None:
        for name in ("top1", "sure", "change"):
            if not 0 <= (getattr(self, name) or 0.0) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")
        if not 0 < self.speed < math.inf:
            raise UsageError(f"speed is {self.speed}; it must be above 0")
        if not self.images >= self.sure_images >= 0:
            raise UsageError(f"{self.sure_images} of {plural(self.images, 'image')} cannot be")

    @property
    def good(self) -> bool:
        """Whether it is worth its answers: faster, and the same as float32's where that is sure."""
        if self.speed < FASTER:
            return False
        if self.precision == "bfloat16":
            return self.images >= IMAGES and self.top1 >= AGREEING
        return self.sure is not None and self.sure_images >= IMAGES and self.sure >= SURE

    def told(self) -> str:
        """The same as a sentence."""
        sure = "" if self.sure is None else f", to {self.sure:.2%} of the {self.sure_images:,} that float32 is sure of"
        which = f" of {self.data}" if self.data else ""
        return (
            f"{self.precision}: {self.speed:.2f} times float32's speed, its answer to {self.top1:.2%} of"
            f" {plural(self.images, 'image')}{which}{sure}, probabilities {self.change:.4f} apart"
            f" ({self.cpu}, {self.threads} threads)"
        )


def chosen(tried: Sequence[Tried], cpu: str, possible: Collection[Precision]) -> Precision:
    """The fastest good precision of those measured on such a CPU and possible here; float32 where there is none."""
    good = [each for each in tried if each.cpu == cpu and each.precision in possible and each.good]
    return max(good, key=lambda each: each.speed).precision if good else "float32"
