"""Pixels to a model's input."""

import functools

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.config import Preprocess
from vitrail.data.decode import PIXEL_LIMIT
from vitrail.errors import DataError

RESAMPLING = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "area": Image.Resampling.BOX,
    "lanczos": Image.Resampling.LANCZOS,
}


def evaluation_view(image: Tensor, preprocess: Preprocess) -> Tensor:
    """uint8 (C, H, W) -> uint8 (C, S, S): resized by Pillow, which filters before it shrinks, then centre-cropped."""
    height, width = image.shape[1:]
    target = resized_size(height, width, preprocess)
    if target != (height, width):
        image = _resized(image, target[0], target[1], RESAMPLING[preprocess.interpolation])
    middle = [(side - crop) / 2 for side, crop in zip(target, preprocess.size, strict=True)]
    top, left = (round(corner) if preprocess.crop_rounding == "nearest" else int(corner) for corner in middle)
    kept = image[:, top : top + preprocess.size[0], left : left + preprocess.size[1]]
    return torch.from_numpy(np.ascontiguousarray(kept.numpy()))  # torch would wake all its threads for so few bytes


def resized_size(height: int, width: int, preprocess: Preprocess) -> tuple[int, int]:
    """Height and width before the crop; the long side is rounded down, as every project rounds it."""
    if len(preprocess.resize) == 2:
        return preprocess.resize[0], preprocess.resize[1]
    short = preprocess.resize[0]
    target = (int(short * height / width), short) if width <= height else (short, int(short * width / height))
    if target[0] * target[1] > PIXEL_LIMIT:
        raise DataError(f"an image of {height} x {width} pixels is too thin: resized it has {target[0]} x {target[1]}")
    return target


def _resized(image: Tensor, height: int, width: int, resampling: Image.Resampling) -> Tensor:
    pixels = image.permute(1, 2, 0).numpy()  # (H, W, C)
    picture = Image.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))
    resized = np.array(picture.resize((width, height), resampling))
    return torch.from_numpy(resized.reshape(height, width, -1)).permute(2, 0, 1)


def normalise(pixels: Tensor, preprocess: Preprocess) -> Tensor:
    """uint8 (..., C, S, S) -> float32: to [0, 1], minus mean, over std."""
    mean, std = (_on(pixels.device, values) for values in (preprocess.mean, preprocess.std))
    return (pixels.float() / 255 - mean) / std


@functools.lru_cache(maxsize=64)
def _on(device: torch.device, values: tuple[float, ...]) -> Tensor:
    """(C, 1, 1), kept: to send it anew would make the host wait for a GPU at every batch."""
    with torch.inference_mode(False):  # it is used in training too
        return torch.tensor(values, device=device).reshape(-1, 1, 1)
