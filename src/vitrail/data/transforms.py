"""Pixels to a model's input: the resize and center crop of evaluation, and normalization."""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.config import PreprocessConfig
from vitrail.data.decode import PixelArray, convert_to_pillow
from vitrail.data.image_headers import PIXEL_LIMIT
from vitrail.errors import DataError

PIL_RESAMPLING = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "area": Image.Resampling.BOX,
    "lanczos": Image.Resampling.LANCZOS,
}


class EvalCrop(NamedTuple):
    """Where the evaluation crop of an image lies: the image is resized, then cut at `top` and `left`."""

    resize_size: tuple[int, int]
    """Height and width of the whole image after the resize."""
    top: int
    left: int


def make_eval_input(image: Tensor, preprocess: PreprocessConfig) -> Tensor:
    """Resize uint8 (C, H, W) with Pillow, which filters before it shrinks, and center-crop it to uint8 (C, S, S)."""
    crop = compute_eval_crop(image.shape[1], image.shape[2], preprocess)
    rows = slice(crop.top, crop.top + preprocess.size[0])
    columns = slice(crop.left, crop.left + preprocess.size[1])
    pixels = image.permute(1, 2, 0).numpy()  # (H, W, C)
    if crop.resize_size == image.shape[1:]:
        cropped = pixels[rows, columns]
    else:
        cropped = _resize_columns(pixels, crop.resize_size, columns, PIL_RESAMPLING[preprocess.interpolation])[rows]
    # NumPy's copy: torch would wake all its threads for this.
    return torch.from_numpy(np.ascontiguousarray(cropped.transpose(2, 0, 1)))


def compute_eval_crop(height: int, width: int, preprocess: PreprocessConfig) -> EvalCrop:
    """Compute the resize and the center crop with which `make_eval_input` treats an image of this size."""
    resize_size = compute_resize_size(height, width, preprocess)
    margins = [(side - crop) / 2 for side, crop in zip(resize_size, preprocess.size, strict=True)]
    top, left = (round(margin) if preprocess.crop_rounding == "nearest" else int(margin) for margin in margins)
    return EvalCrop(resize_size, top, left)


def compute_resize_size(height: int, width: int, preprocess: PreprocessConfig) -> tuple[int, int]:
    """Compute the height and width before the crop; the long side is rounded down, as other projects round it."""
    if len(preprocess.resize) == 2:
        return preprocess.resize[0], preprocess.resize[1]
    short = preprocess.resize[0]
    resized = (int(short * height / width), short) if width <= height else (short, int(short * width / height))
    if math.prod(resized) > PIXEL_LIMIT:
        size = f"{resized[0]} x {resized[1]}"
        raise DataError(f"an image of {height} x {width} pixels is too thin: resized it has {size}")
    return resized


def _resize_columns(
    pixels: PixelArray, resize_size: tuple[int, int], columns: slice, resampling: Image.Resampling
) -> PixelArray:
    """Resize (H, W, C) to a height and a width, and return only these columns of the result.

    Rows are resized first, then columns, as Pillow long did; newer versions begin with columns for some shapes. So the
    pixels are those with which weights were trained and measured, and only the columns that are kept are resized.
    """
    height, width = resize_size
    image = convert_to_pillow(pixels)
    wide = image.resize((width, image.height), resampling)
    cropped = wide.crop((columns.start, 0, columns.stop, wide.height))
    return np.array(cropped.resize((cropped.width, height), resampling)).reshape(height, cropped.width, -1)


def normalize(pixels: Tensor, preprocess: PreprocessConfig) -> Tensor:
    """Normalize uint8 (..., C, S, S) to float32: scale to [0, 1], subtract the mean, divide by the std."""
    mean, std = (_make_channel_tensor(pixels.device, values) for values in (preprocess.mean, preprocess.std))
    return (pixels.float() / 255 - mean) / std


@functools.lru_cache(maxsize=64)
def _make_channel_tensor(device: torch.device, values: tuple[float, ...]) -> Tensor:
    """Make a tensor (C, 1, 1), cached: sending it again would make the host wait for a GPU at every batch."""
    with torch.inference_mode(False):  # training uses it too
        return torch.tensor(values, device=device).reshape(-1, 1, 1)
