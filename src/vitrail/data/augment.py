"""Training views: what is drawn for each position of training, and its application to single images on the CPU.

    B images   C channels   S sides of the view (height and width may differ)   R operations an image

Drawing is one pass of NumPy over the B positions; `batched` applies the same draws to whole batches on any device. Each
kind of draw has a purpose of its own, so switching one on leaves the others as they were. The order is crop and resize,
flip, RandAugment, jitter, erase. torchvision's transforms draw from global state, one image at a time; hence these.

RandAugment is that of the ViT authors' code, Pillow's operations rewritten in TensorFlow; so most are Pillow's here.
As there and not as in Pillow: contrast blends with grey 196 whatever the image (the pixels of 224 x 224 over 256, where
a mean was meant), shears are about the corner, and pixels lie at whole coordinates. As in Pillow, and there a level or
two off: the grey of colour, the smoothed image of sharpness, autocontrast. The authors' 100 pixels of translation and
40 of cutout belong to views of 224 pixels, and scale with the side of others.
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
from vitrail.data.counter_rng import CounterRNG
from vitrail.data.transforms import compute_resize_size

RANDAUGMENT_OPS = (
    "autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "color", "contrast", "brightness",
    "sharpness", "shear-x", "shear-y", "translate-x", "translate-y", "cutout", "solarize-add",
)  # fmt: skip
FILL_LEVEL = 128  # what a rotation, shear, translation or cutout leaves empty
BOX_ATTEMPTS = 10
CROP_ASPECT_RATIO = (3 / 4, 4 / 3)  # width over height of an inception crop
ERASE_AREA = (0.02, 0.33)  # Zhong et al. 2017
ERASE_ASPECT_RATIO = (0.3, 3.3)  # height over width

IntArray = NDArray[np.int64]
PixelArray = NDArray[np.uint8]
FloatArray = NDArray[np.float64]


class CropParams(NamedTuple):
    """Which pixels a view shows: a part of the image, resized to a grid, of which a window of the final size is cut."""

    source_box: IntArray  # (B, 4) top, left, height, width
    resize_size: IntArray  # (B, 2) height and width the part is resized to
    crop_offset: IntArray  # (B, 2) top and left of the window; beyond the grid its pixels are reflected
    flip: NDArray[np.bool_]  # (B,)


class RandAugmentParams(NamedTuple):
    """RandAugment's choices; `affine` and `cutout` are read where `kind` is such an operation."""

    op_index: IntArray  # (B, R) index into OPERATIONS
    affine: IntArray  # (B, R, 6) pixel (x, y) shows (a x + b y + c, d x + e y + f) / 65536, rounded down
    cutout_box: IntArray  # (B, R, 4) top, left, height, width


class ColorJitterParams(NamedTuple):
    """Factors of brightness, contrast and saturation, and the order they are applied in."""

    order: IntArray  # (B, 3)
    factor: FloatArray  # (B, 3)


class AugmentParams(NamedTuple):
    """Everything random about B training views; None for what is switched off."""

    crops: CropParams
    randaugment: RandAugmentParams | None
    color_jitter: ColorJitterParams | None
    erase_boxes: IntArray | None  # (B, 4) top, left, height, width; no pixels for most


def draw_augment_params(
    rng: CounterRNG, heights: IntArray, widths: IntArray, augment: AugmentConfig, preprocess: PreprocessConfig
) -> AugmentParams:
    """The parameters of B training views of images of the given sizes, (B,) each."""
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
    part = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
    grid = np.broadcast_to(np.array(preprocess.size), sizes.shape)
    corner = np.zeros_like(sizes)
    if augment.crop == "inception":
        part = _draw_inception_boxes(rng, sizes, augment.area)
    elif augment.crop == "window":
        grid = np.array(
            [compute_resize_size(height, width, preprocess) for height, width in sizes.tolist()], dtype=np.int64
        )
        corner = _scale_to_integers(rng.uniform("crop", 2), grid - np.array(preprocess.size))
    elif augment.crop == "pad":
        padding = np.array(preprocess.size) // 8
        corner = _scale_to_integers(rng.uniform("crop", 2), 2 * padding) - padding
    return CropParams(part, grid, corner, (rng.uniform("flip", 1)[:, 0] < 0.5) & augment.flip)


def _draw_inception_boxes(rng: CounterRNG, sizes: IntArray, area: tuple[float, float]) -> IntArray:
    """(B, 4) parts of random area and shape, placed anywhere; where no try fits, the largest middle one that may be."""
    uniform = rng.uniform("crop", 2 + 2 * BOX_ATTEMPTS)
    shape = _pick_first_fitting_size(uniform[:, 2:], sizes, area, CROP_ASPECT_RATIO)
    corner = _scale_to_integers(uniform[:, :2], sizes - shape)
    height, width = sizes.T
    widest = np.stack(
        [
            np.minimum(height, np.rint(width / CROP_ASPECT_RATIO[0])),
            np.minimum(width, np.rint(height * CROP_ASPECT_RATIO[1])),
        ],
        1,
    )
    unfit = shape[:, :1] == 0
    shape = np.where(unfit, widest.astype(np.int64), shape)
    return np.concatenate([np.where(unfit, (sizes - shape) // 2, corner), shape], axis=1)


def _pick_first_fitting_size(
    uniform: FloatArray, sizes: IntArray, area: tuple[float, float], ratio: tuple[float, float]
) -> IntArray:
    """(B, 2) height and width of the first try that fits into `sizes`, of a uniform share of its area and a log-uniform
    ratio of width to height; 0 where none fits."""
    share, shape = uniform.reshape(len(sizes), -1, 2).transpose(2, 0, 1)  # (B, tries) each
    pixels = sizes.prod(axis=1, keepdims=True) * (area[0] + (area[1] - area[0]) * share)
    across = np.exp(math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * shape)
    tries = np.rint(np.sqrt(np.stack([pixels / across, pixels * across], axis=2))).astype(np.int64)  # (B, tries, 2)
    fits = ((tries > 0) & (tries <= sizes[:, None])).all(axis=2)
    first = fits.argmax(axis=1)
    return np.where(fits.any(axis=1)[:, None], tries[np.arange(len(sizes)), first], 0)


def _scale_to_integers(uniform: FloatArray, maximum: IntArray) -> IntArray:
    """Whole numbers from 0 to `room`, both included."""
    return (uniform * (maximum + 1)).astype(np.int64)


def _draw_randaugment(rng: CounterRNG, randaugment: tuple[int, int], size: tuple[int, int]) -> RandAugmentParams:
    count, magnitude = randaugment
    kind = rng.integers("randaugment", count, len(RANDAUGMENT_OPS))
    sign = 1 - 2 * rng.integers("randaugment-sign", count, 2)
    matrices = np.array(
        [
            _build_affine_matrix(name, direction * magnitude / 10, size)
            for name in RANDAUGMENT_OPS
            for direction in (1, -1)
        ]
    )
    affine = np.floor(matrices.reshape(len(RANDAUGMENT_OPS), 2, 6) * 65536 + 0.5).astype(np.int64)
    half = np.array([int(magnitude / 10 * 40 * side / 224) for side in size])
    centre = _scale_to_integers(rng.uniform("randaugment-place", 2 * count), np.tile(size, count) - 1).reshape(
        -1, count, 2
    )
    start, end = np.maximum(centre - half, 0), np.minimum(centre + half, size)
    return RandAugmentParams(
        kind, affine[kind, (sign < 0).astype(np.int64)], np.concatenate([start, end - start], axis=2)
    )


def _build_affine_matrix(name: str, level: float, size: tuple[int, int]) -> tuple[float, ...]:
    """Where pixel (x, y) comes from: a, b, c, d, e, f of (a x + b y + c, d x + e y + f), the half that rounds added."""
    bottom, right = size[0] - 1, size[1] - 1
    match name:
        case "rotate":  # about the middle, by up to 30 degrees on the scale of 10
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
    shape = _pick_first_fitting_size(
        uniform[:, 3:], sizes, ERASE_AREA, (1 / ERASE_ASPECT_RATIO[1], 1 / ERASE_ASPECT_RATIO[0])
    )
    shape = np.where(uniform[:, :1] < probability, shape, 0)
    return np.concatenate([_scale_to_integers(uniform[:, 1:3], sizes - shape), shape], axis=1)


@lru_cache(maxsize=64)
def build_level_table(name: str, magnitude: int) -> NDArray[np.uint8] | None:
    """(256,) what an operation makes of each level, or None where the level alone does not decide it."""
    level, share = np.arange(256), magnitude / 10
    table: NDArray[Any]
    match name:
        case "invert":
            table = 255 - level
        case "posterize":  # the authors' bits grow with the magnitude; one is left at least
            shift = 8 - min(max(int(share * 4), 1), 8)
            table = level >> shift << shift
        case "solarize":
            table = np.where(level < int(share * 256), level, 255 - level)
        case "solarize-add":
            table = np.where(level < 128, level + int(share * 110), level)
        case "brightness":
            table = np.float32(compute_blend_factor(magnitude)) * level.astype(np.float32)
        case "contrast":
            table = 196 + np.float32(compute_blend_factor(magnitude)) * (level - 196).astype(np.float32)
        case _:
            return None
    return table.clip(0, 255).astype(np.uint8)


def compute_blend_factor(magnitude: int) -> float:
    """The factor of the operations that blend: colour, contrast, brightness, sharpness."""
    return magnitude / 10 * 1.8 + 0.1


def make_train_inputs(
    load_image: Callable[[int, int], Tensor],
    sizes: IntArray,
    rng: CounterRNG,
    augment: AugmentConfig,
    preprocess: PreprocessConfig,
) -> Tensor:
    """B images, uint8 (C, H, W), of these heights and widths (B, 2), at B positions -> uint8 (B, C, S, S).

    `load(index, rows)` gives an image, or at least its first rows: what lies below a crop need not be decoded. Each is
    cut down before the next is loaded, while it is still in the cache.
    """
    drawn = draw_augment_params(rng, sizes[:, 0], sizes[:, 1], augment, preprocess)
    magnitude = augment.randaugment[1] if augment.randaugment else 0
    views = []
    for index, (top, _, height, _) in enumerate(drawn.crops.source_box.tolist()):
        view = crop_image(load_image(index, top + height), drawn.crops, index, preprocess)
        recolour = drawn.randaugment or drawn.color_jitter
        views.append(_apply_pillow_ops(view, drawn, index, magnitude) if recolour else view)
    # Colours stay side by side in memory, as they come: to part them here costs a sixth of the resize.
    result = torch.from_numpy(np.stack(views)).permute(0, 3, 1, 2)
    if drawn.erase_boxes is not None:
        for index in np.flatnonzero(drawn.erase_boxes[:, 2:].all(axis=1)).tolist():
            top, left, height, width = drawn.erase_boxes[index]
            part = (slice(None), slice(top, top + height), slice(left, left + width))
            result[index][part] = _make_erase_noise(rng, index, result.shape[1:])[part]
    return result


def crop_image(image: Tensor, crops: CropParams, index: int, preprocess: PreprocessConfig) -> PixelArray:
    """uint8 (C, H, W) -> uint8 (S, S, C): the part, resized with a filter that covers what a pixel shrinks from."""
    top, left, height, width = crops.source_box[index].tolist()
    grid = crops.resize_size[index].tolist()
    view = image.permute(1, 2, 0).numpy()[top : top + height, left : left + width]  # (H, W, C)
    if grid != [height, width]:
        # Packed, and channels-last to torch's eyes, which neither a slice nor a later [None] is: a third less time.
        packed = torch.from_numpy(np.ascontiguousarray(view[None])).permute(0, 3, 1, 2)
        view = (
            F.interpolate(packed, grid, mode=choose_resize_filter(preprocess), antialias=True)[0]
            .permute(1, 2, 0)
            .numpy()
        )
    (top, left), (height, width) = crops.crop_offset[index].tolist(), preprocess.size
    if 0 <= top <= grid[0] - height and 0 <= left <= grid[1] - width:  # no reflection: slices are ten times cheaper
        part = view[top : top + height, left : left + width]
        return part[:, ::-1] if crops.flip[index] else part
    here = slice(index, index + 1)
    rows, columns = compute_window_indices(
        crops.resize_size[here], crops.crop_offset[here], crops.flip[here], preprocess.size
    )
    return view[rows[0]][:, columns[0]]


def choose_resize_filter(preprocess: PreprocessConfig) -> str:
    """The filter of training views: of the two that torch has for bytes, the one nearer to the evaluation's."""
    return "bicubic" if preprocess.interpolation in ("bicubic", "lanczos") else "bilinear"


def compute_window_indices(
    resize_size: IntArray, crop_offset: IntArray, flip: NDArray[np.bool_], size: tuple[int, int]
) -> tuple[IntArray, IntArray]:
    """(B, S) the rows and (B, S) the columns of the grid that a view shows, reflected at its edges and flipped."""
    rows, columns = (
        _reflect_indices(crop_offset[:, axis, None] + np.arange(size[axis]), resize_size[:, axis, None])
        for axis in (0, 1)
    )
    return rows, np.where(flip[:, None], columns[:, ::-1], columns)


def _reflect_indices(place: IntArray, side: IntArray) -> IntArray:
    last = side - 1
    return last - np.abs(last - np.abs(place))


def _apply_pillow_ops(crop: PixelArray, params: AugmentParams, index: int, magnitude: int) -> PixelArray:
    """uint8 (S, S, C) after what Pillow does: RandAugment, then jitter."""
    pixels = np.ascontiguousarray(crop)
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    if params.randaugment:
        picture = apply_randaugment(picture, params.randaugment, index, magnitude)
    if params.color_jitter:
        picture = apply_color_jitter(picture, params.color_jitter, index)
    return np.array(picture).reshape(pixels.shape)


def apply_randaugment(image: Image.Image, params: RandAugmentParams, index: int, magnitude: int) -> Image.Image:
    """The image after its RandAugment operations."""
    for step, kind in enumerate(params.op_index[index].tolist()):
        name, table = RANDAUGMENT_OPS[kind], build_level_table(RANDAUGMENT_OPS[kind], magnitude)
        if table is not None:
            image = image.point(table.tolist() * len(image.getbands()))
        elif name == "autocontrast":
            image = ImageOps.autocontrast(image)
        elif name == "equalize":
            image = ImageOps.equalize(image)
        elif name == "color":
            image = ImageEnhance.Color(image).enhance(compute_blend_factor(magnitude))
        elif name == "sharpness":
            image = ImageEnhance.Sharpness(image).enhance(compute_blend_factor(magnitude))
        elif name == "cutout":
            top, left, height, width = params.cutout_box[index, step].tolist()
            image.paste(_get_fill_color(image), (left, top, left + width, top + height))
        else:
            image = _apply_affine(image, params.affine[index, step] / 65536)
    return image


def _apply_affine(image: Image.Image, affine: FloatArray) -> Image.Image:
    """The image with its pixels taken from elsewhere; the half pixel that Pillow adds to x and y is taken off first."""
    a, b, c, d, e, f = affine.tolist()
    data = (a, b, c - (a + b) / 2, d, e, f - (d + e) / 2)
    return image.transform(
        image.size, Image.Transform.AFFINE, data, Image.Resampling.NEAREST, fillcolor=_get_fill_color(image)
    )


def _get_fill_color(image: Image.Image) -> tuple[int, ...]:
    return (FILL_LEVEL,) * len(image.getbands())


def apply_color_jitter(image: Image.Image, params: ColorJitterParams, index: int) -> Image.Image:
    """The image with its brightness, contrast and saturation changed, in the order drawn."""
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for kind in params.order[index].tolist():
        image = enhancers[kind](image).enhance(float(params.factor[index, kind]))
    return image


def _make_erase_noise(rng: CounterRNG, index: int, shape: torch.Size) -> Tensor:
    """uint8 (C, S, S): the bytes an erased part of the image shows."""
    words = -(-shape.numel() // 8)
    bits = CounterRNG(rng.seed, rng.positions[index : index + 1]).bits("erase-noise", words)
    return torch.from_numpy(bits.astype("<u8").view(np.uint8).reshape(-1)[: shape.numel()]).reshape(shape)
