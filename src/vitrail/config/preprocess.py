"""How an image becomes a model's input."""

import dataclasses
from typing import Literal

from vitrail.config.checks import check_choices
from vitrail.config.model import SIZE_LIMITS
from vitrail.errors import UsageError

Interpolation = Literal["bilinear", "bicubic", "area", "lanczos"]
CropRounding = Literal["nearest", "down"]

NORMALIZATION_RANGE = (1e-6, 1e6)  # of std; also the largest |mean|. Beyond it normalized pixels overflow float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """The preprocessing that evaluation, prediction and serving share: resize, center crop, normalize.

    It is stored with the weights.

        preprocess = vitrail.PreprocessConfig(size=(224, 224), resize=(256,))
    """

    size: tuple[int, int]
    """Height and width of the crop, which is the model's input."""
    resize: tuple[int, ...]
    """One number: the short side before the crop. Two: exact height and width, whatever the image's shape."""
    interpolation: Interpolation = "bicubic"
    crop_rounding: CropRounding = "nearest"
    """Of the crop's corner: torchvision and timm round to the nearest pixel (half to even), transformers down."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        limit = SIZE_LIMITS["image_size"]
        if len(self.resize) not in (1, 2) or not all(0 < side <= limit for side in (*self.size, *self.resize)):
            raise UsageError(f"resize is {self.resize} for a crop of {self.size}; give one or two sides up to {limit}")
        resized = self.resize if len(self.resize) == 2 else self.resize * 2
        if any(crop > side for crop, side in zip(self.size, resized, strict=True)):
            raise UsageError(f"resize {self.resize} is smaller than the crop {self.size} taken from it")
        check_choices(self)
        if len(self.mean) != len(self.std) or not self.mean:
            raise UsageError(f"mean {self.mean} and std {self.std} must name the same channels")
        least, most = NORMALIZATION_RANGE
        mean_fits = all(-most <= value <= most for value in self.mean)
        if not mean_fits or not all(least <= value <= most for value in self.std):
            raise UsageError(
                f"mean is {self.mean} and std {self.std}; std must be from {least:g} to {most:g}, mean at most {most:g}"
            )
