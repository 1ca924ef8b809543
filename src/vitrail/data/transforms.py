"""Pixels to a model's input."""

import functools

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.config import PreprocessConfig
from vitrail.data.decode import PIXEL_LIMIT, PixelArray
from vitrail.errors import DataError

PIL_RESAMPLING = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "area": Image.Resampling.BOX,
    "lanczos": Image.Resampling.LANCZOS,
}


def make_eval_input(image: Tensor, preprocess: PreprocessConfig) -> Tensor:
    """uint8 (C, H, W) -> uint8 (C, S, S): resized by Pillow, which filters before it shrinks, then centre-cropped."""
    target = compute_resize_size(image.shape[1], image.shape[2], preprocess)
    middle = [(side - crop) / 2 for side, crop in zip(target, preprocess.size, strict=True)]
    top, left = (round(corner) if preprocess.crop_rounding == "nearest" else int(corner) for corner in middle)
    rows, columns = slice(top, top + preprocess.size[0]), slice(left, left + preprocess.size[1])
    pixels = image.permute(1, 2, 0).numpy()  # (H, W, C)
    if target == image.shape[1:]:
        kept = pixels[rows, columns]
    else:
        kept = _resize_columns(pixels, target, columns, PIL_RESAMPLING[preprocess.interpolation])[rows]
    return torch.from_numpy(np.ascontiguousarray(kept.transpose(2, 0, 1)))  # torch would wake all its threads for this


def compute_resize_size(height: int, width: int, preprocess: PreprocessConfig) -> tuple[int, int]:
    """Height and width before the crop; the long side is rounded down, as every project rounds it."""
    if len(preprocess.resize) == 2:
        return preprocess.resize[0], preprocess.resize[1]
    short = preprocess.resize[0]
    target = (int(short * height / width), short) if width <= height else (short, int(short * width / height))
    if target[0] * target[1] > PIXEL_LIMIT:
        raise DataError(f"an image of {height} x {width} pixels is too thin: resized it has {target[0]} x {target[1]}")
    return target


def _resize_columns(
    pixels: PixelArray, target: tuple[int, int], columns: slice, resampling: Image.Resampling
) -> PixelArray:
    """(H, W, C) -> some columns of the image resized to a height and a width.

    Rows first, then columns of what that gave, as Pillow long did both; newer ones begin with columns for some shapes.
    So the pixels are those with which weights were trained and measured, and only columns that are kept are resized.
    """
    height, width = target
    picture = Image.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))
    wide = picture.resize((width, picture.height), resampling)
    kept = wide.crop((columns.start, 0, columns.stop, wide.height))
    return np.array(kept.resize((kept.width, height), resampling)).reshape(height, kept.width, -1)


def normalize(pixels: Tensor, preprocess: PreprocessConfig) -> Tensor:
    """uint8 (..., C, S, S) -> float32: to [0, 1], minus mean, over std."""
    mean, std = (_make_channel_tensor(pixels.device, values) for values in (preprocess.mean, preprocess.std))
    return (pixels.float() / 255 - mean) / std


@functools.lru_cache(maxsize=64)
def _make_channel_tensor(device: torch.device, values: tuple[float, ...]) -> Tensor:
    """(C, 1, 1), kept: to send it anew would make the host wait for a GPU at every batch."""
    with torch.inference_mode(False):  # it is used in training too
        return torch.tensor(values, device=device).reshape(-1, 1, 1)
