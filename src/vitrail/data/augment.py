"""Training augmentation: the random parameters of each position, and their application to single images on the CPU.

    B images   C channels   S sides of the crop (height and width may differ)   R operations an image

Parameters are drawn in one pass of NumPy over the B positions; `batch_augment` applies the same parameters to whole
batches on any device. Each kind of parameter has its own purpose string, so enabling one leaves the others unchanged.
The order is crop and resize, flip, RandAugment, color jitter, erase. torchvision's transforms draw from global state,
one image at a time; hence these.

RandAugment is that of the ViT authors, who rewrote Pillow's operations in TensorFlow; so most are Pillow's here.
As there and not as in Pillow: contrast blends with gray 196 whatever the image (the pixels of 224 x 224 over 256, where
a mean was meant), shears are about the corner, and pixels lie at whole coordinates. As in Pillow, and a level or two
off there: the gray of `color`, the smoothed image of `sharpness`, autocontrast. The authors' 100 pixels of translation
and 40 of cutout belong to crops of 224 pixels, and scale with other sides.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor
from torch.nn import functional as F

from vitrail.config import AugmentConfig, PreprocessConfig
from vitrail.data.decode import PixelArray, convert_to_pillow
from vitrail.data.randomness import CounterRNG, FloatArray, IntArray
from vitrail.data.transforms import compute_resize_size

RANDAUGMENT_OPS = (
    "autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "color", "contrast", "brightness",
    "sharpness", "shear-x", "shear-y", "translate-x", "translate-y", "cutout", "solarize-add",
)  # fmt: skip
FILL_LEVEL = 128  # fills what a rotation, shear, translation or cutout leaves empty
BOX_ATTEMPTS = 10
CROP_ASPECT_RATIO = (3 / 4, 4 / 3)  # width over height of an inception crop
ERASE_AREA = (0.02, 0.33)  # Zhong et al. 2017
ERASE_ASPECT_RATIO = (0.3, 3.3)  # height over width


class CropParams(NamedTuple):
    """Which pixels a crop shows: a box of the image is resized, and a window of the final size is cut from that."""

    source_box: IntArray  # (B, 4) top, left, height, width
    resize_size: IntArray  # (B, 2) height and width the box is resized to
    crop_offset: IntArray  # (B, 2) top and left of the window; beyond the resized box its pixels are reflected
    flip: NDArray[np.bool_]  # (B,)


class RandAugmentParams(NamedTuple):
    """RandAugment's choices; `affine` and `cutout_box` are used only where `op_index` is such an operation."""

    op_index: IntArray  # (B, R) index into RANDAUGMENT_OPS
    affine: IntArray  # (B, R, 6) pixel (x, y) shows (a x + b y + c, d x + e y + f) / 65536, rounded down
    cutout_box: IntArray  # (B, R, 4) top, left, height, width


class ColorJitterParams(NamedTuple):
    """Factors of brightness, contrast and saturation, and the order they are applied in."""

    order: IntArray  # (B, 3)
    factor: FloatArray  # (B, 3)


class AugmentParams(NamedTuple):
    """All random parameters of B training crops; None for what is disabled."""

    crops: CropParams
    randaugment: RandAugmentParams | None
    color_jitter: ColorJitterParams | None
    erase_boxes: IntArray | None  # (B, 4) top, left, height, width; empty boxes where nothing is erased


# --- drawing the parameters ------------------------------------------------------------------------------------------


def draw_augment_params(
    rng: CounterRNG, heights: IntArray, widths: IntArray, augment: AugmentConfig, preprocess: PreprocessConfig
) -> AugmentParams:
    """Draw the parameters of B training crops of images of these sizes, (B,) each."""
    return AugmentParams(
        _draw_crops(rng, heights, widths, augment, preprocess),
        _draw_randaugment(rng, augment.randaugment, preprocess.size) if augment.randaugment else None,
        _draw_color_jitter(rng, augment.jitter) if augment.jitter else None,
        _draw_erase_boxes(rng, augment.erase, preprocess.size) if augment.erase else None,
    )


def _draw_crops(
    rng: CounterRNG, heights: IntArray, widths: IntArray, augment: AugmentConfig, preprocess: PreprocessConfig
) -> CropParams:
    sizes = np.stack([heights, widths], axis=1)  # (B, 2)
    source_box = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
    resize_size = np.broadcast_to(np.array(preprocess.size), sizes.shape)
    crop_offset = np.zeros_like(sizes)
    if augment.crop == "inception":
        source_box = _draw_inception_boxes(rng, sizes, augment.area)
    elif augment.crop == "window":
        resized = [compute_resize_size(height, width, preprocess) for height, width in sizes.tolist()]
        resize_size = np.array(resized, dtype=np.int64)
        crop_offset = _scale_to_integers(rng.uniform("crop", 2), resize_size - np.array(preprocess.size))
    elif augment.crop == "pad":
        padding = np.array(preprocess.size) // 8
        crop_offset = _scale_to_integers(rng.uniform("crop", 2), 2 * padding) - padding
    flip = (rng.uniform("flip", 1)[:, 0] < 0.5) & augment.flip
    return CropParams(source_box, resize_size, crop_offset, flip)


def _draw_inception_boxes(rng: CounterRNG, sizes: IntArray, area: tuple[float, float]) -> IntArray:
    """Draw (B, 4) boxes of random area, shape and place; where no attempt fits, the largest allowed center box."""
    uniform = rng.uniform("crop", 2 + 2 * BOX_ATTEMPTS)
    box_size = _pick_first_fitting_size(uniform[:, 2:], sizes, area, CROP_ASPECT_RATIO)
    corner = _scale_to_integers(uniform[:, :2], sizes - box_size)
    height, width = sizes.T
    largest_height = np.minimum(height, np.rint(width / CROP_ASPECT_RATIO[0]))
    largest_width = np.minimum(width, np.rint(height * CROP_ASPECT_RATIO[1]))
    largest = np.stack([largest_height, largest_width], 1).astype(np.int64)
    unfit = box_size[:, :1] == 0
    box_size = np.where(unfit, largest, box_size)
    return np.concatenate([np.where(unfit, (sizes - box_size) // 2, corner), box_size], axis=1)


def _pick_first_fitting_size(
    uniform: FloatArray, sizes: IntArray, area: tuple[float, float], ratio: tuple[float, float]
) -> IntArray:
    """Pick (B, 2) the height and width of the first attempt that fits into `sizes`; 0 where none fits.

    The fraction of the area is uniform, and the ratio of width to height log-uniform.
    """
    area_uniform, ratio_uniform = uniform.reshape(len(sizes), -1, 2).transpose(2, 0, 1)  # (B, attempts) each
    pixels = sizes.prod(axis=1, keepdims=True) * (area[0] + (area[1] - area[0]) * area_uniform)
    ratios = np.exp(math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * ratio_uniform)
    attempts = np.rint(np.sqrt(np.stack([pixels / ratios, pixels * ratios], axis=2))).astype(np.int64)  # (B, a, 2)
    fits = ((attempts > 0) & (attempts <= sizes[:, None])).all(axis=2)
    first = fits.argmax(axis=1)
    return np.where(fits.any(axis=1)[:, None], attempts[np.arange(len(sizes)), first], 0)


def _scale_to_integers(uniform: FloatArray, maximum: IntArray) -> IntArray:
    """Scale numbers of [0, 1) to integers from 0 to `maximum`, both included."""
    return (uniform * (maximum + 1)).astype(np.int64)


def _draw_randaugment(rng: CounterRNG, randaugment: tuple[int, int], size: tuple[int, int]) -> RandAugmentParams:
    count, magnitude = randaugment
    op_index = rng.integers("randaugment", count, len(RANDAUGMENT_OPS))
    is_negative = rng.integers("randaugment-sign", count, 2)
    levels = (magnitude / 10, -magnitude / 10)
    matrices = np.array([[_build_affine_matrix(op, level, size) for level in levels] for op in RANDAUGMENT_OPS])
    affine = np.floor(matrices * 65536 + 0.5).astype(np.int64)
    half = np.array([int(levels[0] * 40 * side / 224) for side in size])
    uniform = rng.uniform("randaugment-place", 2 * count).reshape(-1, count, 2)
    centers = _scale_to_integers(uniform, np.array(size) - 1)
    start, end = np.maximum(centers - half, 0), np.minimum(centers + half, size)
    cutout_box = np.concatenate([start, end - start], axis=2)
    return RandAugmentParams(op_index, affine[op_index, is_negative], cutout_box)


def _build_affine_matrix(name: str, level: float, size: tuple[int, int]) -> tuple[float, ...]:
    """Build the map from pixel (x, y) to its source (a x + b y + c, d x + e y + f), with the half that rounds added."""
    bottom, right = size[0] - 1, size[1] - 1
    match name:
        case "rotate":  # about the center, by up to 30 degrees at magnitude 10
            cosine, sine = math.cos(math.radians(30 * level)), math.sin(math.radians(30 * level))
            x, y = (right - cosine * right + sine * bottom) / 2, (bottom - sine * right - cosine * bottom) / 2
            return cosine, -sine, x + 0.5, sine, cosine, y + 0.5
        case "shear-x":
            return 1, 0.3 * level, 0.5, 0, 1, 0.5
        case "shear-y":
            return 1, 0, 0.5, 0.3 * level, 1, 0.5
        case "translate-x":
            return 1, 0, round(100 * level * size[1] / 224) + 0.5, 0, 1, 0.5
        case "translate-y":
            return 1, 0, 0.5, 0, 1, round(100 * level * size[0] / 224) + 0.5
    return 1, 0, 0.5, 0, 1, 0.5


def _draw_color_jitter(rng: CounterRNG, strength: float) -> ColorJitterParams:
    uniform = rng.uniform("jitter", 6)
    return ColorJitterParams(uniform[:, :3].argsort(axis=1), 1 + strength * (2 * uniform[:, 3:] - 1))


def _draw_erase_boxes(rng: CounterRNG, probability: float, size: tuple[int, int]) -> IntArray:
    uniform = rng.uniform("erase", 3 + 2 * BOX_ATTEMPTS)
    sizes = np.broadcast_to(np.array(size), (len(uniform), 2))
    ratio = (1 / ERASE_ASPECT_RATIO[1], 1 / ERASE_ASPECT_RATIO[0])
    box_size = _pick_first_fitting_size(uniform[:, 3:], sizes, ERASE_AREA, ratio)
    box_size = np.where(uniform[:, :1] < probability, box_size, 0)
    return np.concatenate([_scale_to_integers(uniform[:, 1:3], sizes - box_size), box_size], axis=1)


# --- applying them to single images ----------------------------------------------------------------------------------


def make_train_inputs(
    load_image: Callable[[int, int], Tensor],
    sizes: IntArray,
    rng: CounterRNG,
    augment: AugmentConfig,
    preprocess: PreprocessConfig,
) -> Tensor:
    """Augment B images, uint8 (C, H, W) of these heights and widths (B, 2), to uint8 (B, C, S, S).

    `load_image(index, min_rows)` returns an image, or at least its first rows: what lies below a crop need not be
    decoded. Each image is cropped before the next is loaded, while it is still in the CPU's cache.
    """
    params = draw_augment_params(rng, sizes[:, 0], sizes[:, 1], augment, preprocess)
    magnitude = augment.randaugment[1] if augment.randaugment else 0
    crops = []
    for index, (top, _, height, _) in enumerate(params.crops.source_box.tolist()):
        crop = crop_image(load_image(index, top + height), params.crops, index, preprocess)
        has_pillow_ops = params.randaugment or params.color_jitter
        crops.append(_apply_pillow_ops(crop, params, index, magnitude) if has_pillow_ops else crop)
    # Channels stay interleaved in memory, as they come: separating them here costs a sixth of the resize.
    inputs = torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2)
    if params.erase_boxes is not None:
        for index in np.flatnonzero(params.erase_boxes[:, 2:].all(axis=1)).tolist():
            top, left, height, width = params.erase_boxes[index]
            box = (slice(None), slice(top, top + height), slice(left, left + width))
            inputs[index][box] = _make_erase_noise(rng, index, inputs.shape[1:])[box]
    return inputs


def crop_image(image: Tensor, crops: CropParams, index: int, preprocess: PreprocessConfig) -> PixelArray:
    """Crop uint8 (C, H, W) to uint8 (S, S, C): a box, resized with antialiasing, and a window of that."""
    top, left, height, width = crops.source_box[index].tolist()
    resize_size = crops.resize_size[index].tolist()
    pixels = image.permute(1, 2, 0).numpy()[top : top + height, left : left + width]  # (H, W, C)
    if resize_size != [height, width]:
        # Packed, and channels-last to torch, which neither a slice nor a later [None] is: a third less time.
        packed = torch.from_numpy(np.ascontiguousarray(pixels[None])).permute(0, 3, 1, 2)
        resized = F.interpolate(packed, resize_size, mode=choose_resize_filter(preprocess), antialias=True)
        pixels = resized[0].permute(1, 2, 0).numpy()
    (top, left), (height, width) = crops.crop_offset[index].tolist(), preprocess.size
    is_inside = 0 <= top <= resize_size[0] - height and 0 <= left <= resize_size[1] - width
    if is_inside:  # nothing is reflected: slices are ten times cheaper
        window = pixels[top : top + height, left : left + width]
    else:
        window = pixels[_reflect_indices(top + np.arange(height), resize_size[0])]
        window = window[:, _reflect_indices(left + np.arange(width), resize_size[1])]
    return window[:, ::-1] if crops.flip[index] else window


def choose_resize_filter(preprocess: PreprocessConfig) -> str:
    """Choose the filter of training crops: of the two that torch has for bytes, the one nearer to evaluation's."""
    return "bicubic" if preprocess.interpolation in ("bicubic", "lanczos") else "bilinear"


def compute_window_indices(crops: CropParams, size: tuple[int, int]) -> tuple[IntArray, IntArray]:
    """Compute (B, S) rows and (B, S) columns of the resized box that a crop shows, reflected and flipped."""
    rows, columns = (
        _reflect_indices(crops.crop_offset[:, axis, None] + np.arange(size[axis]), crops.resize_size[:, axis, None])
        for axis in (0, 1)
    )
    return rows, np.where(crops.flip[:, None], columns[:, ::-1], columns)


def _reflect_indices(indices: IntArray, side: IntArray | int) -> IntArray:
    return (side - 1) - np.abs((side - 1) - np.abs(indices))


def _make_erase_noise(rng: CounterRNG, index: int, shape: torch.Size) -> Tensor:
    """Make uint8 (C, S, S): the random bytes that fill an erased box of this position."""
    words = -(-shape.numel() // 8)
    bits = CounterRNG(rng.seed, rng.positions[index : index + 1]).bits("erase-noise", words)
    return torch.from_numpy(bits.astype("<u8").view(np.uint8).reshape(-1)[: shape.numel()]).reshape(shape)


# --- operations by Pillow --------------------------------------------------------------------------------------------


def _apply_pillow_ops(crop: PixelArray, params: AugmentParams, index: int, magnitude: int) -> PixelArray:
    """Apply RandAugment, then color jitter, to uint8 (S, S, C)."""
    image = convert_to_pillow(crop)
    if params.randaugment:
        image = apply_randaugment(image, params.randaugment, index, magnitude)
    if params.color_jitter:
        image = apply_color_jitter(image, params.color_jitter, index)
    return np.array(image).reshape(crop.shape)


def apply_randaugment(image: Image.Image, params: RandAugmentParams, index: int, magnitude: int) -> Image.Image:
    """Apply an image's RandAugment operations."""
    for step, op_index in enumerate(params.op_index[index].tolist()):
        name, table = RANDAUGMENT_OPS[op_index], build_level_table(RANDAUGMENT_OPS[op_index], magnitude)
        if table is not None:
            image = image.point(table.tolist() * len(image.getbands()))
        elif name in ("autocontrast", "equalize"):
            image = ImageOps.autocontrast(image) if name == "autocontrast" else ImageOps.equalize(image)
        elif name in ("color", "sharpness"):
            enhancer = ImageEnhance.Color if name == "color" else ImageEnhance.Sharpness
            image = enhancer(image).enhance(compute_blend_factor(magnitude))
        elif name == "cutout":
            top, left, height, width = params.cutout_box[index, step].tolist()
            image.paste(_get_fill_color(image), (left, top, left + width, top + height))
        else:
            image = _apply_affine(image, params.affine[index, step] / 65536)
    return image


def apply_color_jitter(image: Image.Image, params: ColorJitterParams, index: int) -> Image.Image:
    """Change brightness, contrast and saturation by an image's factors, in its order."""
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for kind in params.order[index].tolist():
        image = enhancers[kind](image).enhance(float(params.factor[index, kind]))
    return image


@lru_cache(maxsize=64)
def build_level_table(name: str, magnitude: int) -> PixelArray | None:
    """Build the table (256,) from old to new levels of an operation; None where the level alone does not decide."""
    levels, strength = np.arange(256), magnitude / 10
    table: NDArray[Any]
    match name:
        case "invert":
            table = 255 - levels
        case "posterize":  # in the authors' code bits grow with the magnitude; at least one is left
            shift = 8 - min(max(int(strength * 4), 1), 8)
            table = levels >> shift << shift
        case "solarize":
            table = np.where(levels < int(strength * 256), levels, 255 - levels)
        case "solarize-add":
            table = np.where(levels < 128, levels + int(strength * 110), levels)
        case "brightness":
            table = np.float32(compute_blend_factor(magnitude)) * levels.astype(np.float32)
        case "contrast":
            table = 196 + np.float32(compute_blend_factor(magnitude)) * (levels - 196).astype(np.float32)
        case _:
            return None
    return table.clip(0, 255).astype(np.uint8)


def compute_blend_factor(magnitude: int) -> float:
    """Compute the factor of the operations that blend: color, contrast, brightness, sharpness."""
    return magnitude / 10 * 1.8 + 0.1


def _apply_affine(image: Image.Image, affine: FloatArray) -> Image.Image:
    """Take each pixel from its affine source. The half pixel that Pillow adds to x and y is subtracted first."""
    a, b, c, d, e, f = affine.tolist()
    data = (a, b, c - (a + b) / 2, d, e, f - (d + e) / 2)
    fill = _get_fill_color(image)
    return image.transform(image.size, Image.Transform.AFFINE, data, Image.Resampling.NEAREST, fillcolor=fill)


def _get_fill_color(image: Image.Image) -> tuple[int, ...]:
    return (FILL_LEVEL,) * len(image.getbands())
