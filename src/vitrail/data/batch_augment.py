"""Augmentation of whole batches on any device: that of `augment`, mixup and cutmix, and the choice of masked patches.

    B images   C channels   H, W sides of the stored images   S sides of the crop   b images an operation applies to
    M samples of a global batch, of which m consecutive ones are held here   L classes   N patches of an image

For datasets held on the device as bytes, the parameters are those of `augment`, drawn on the host and copied over in a
few small tensors. So nothing here waits for the device, and nothing loops over images. Every operation equals that of
`augment.make_train_inputs` to the bit, except the resize. Here it is two products with matrices of the same filter's
weights, not rounded; the CPU's kernel rounds them to 16 bits. So up to a tenth of the levels differ by 1 (where sums
fall on halves), and very few by 2.

A sample's partner is the next one of the global batch; the last one's is the first. Mixup (Zhang et al. 2018) and
cutmix (Yun et al. 2019) draw one lambda and one box for a global batch, at its first position. So a rank or a
micro-batch that holds m samples and the partner of the last mixes them as the whole batch would be, to the bit.

Every image has equally many masked patches, drawn without replacement. A further number decides for each: 80 % are
replaced by the [mask] token, 10 % by another patch, 10 % stay (Dosovitskiy et al. 2021, B.1.2, after BERT). The other
patch is of the partner, at another place than the masked one, so it never replaces itself, even in a step of one image.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.config import AugmentConfig, MaskedConfig, PreprocessConfig
from vitrail.config.training import MASK_TOKEN, UNCHANGED_PATCH
from vitrail.data.augment import (
    FILL_LEVEL,
    RANDAUGMENT_OPS,
    ColorJitterParams,
    CropParams,
    RandAugmentParams,
    build_level_table,
    choose_resize_filter,
    compute_blend_factor,
    compute_window_indices,
    draw_augment_params,
)
from vitrail.data.randomness import (
    SPLITMIX_CONSTANTS,
    CounterRNG,
    FloatArray,
    IntArray,
    derive_key,
    hash_counters,
)

_AFFINE_OPS = ("rotate", "shear-x", "shear-y", "translate-x", "translate-y")
_SEPARATE_OPS = ("color", "sharpness", "cutout")
_OP_GROUPS = np.array(
    ["move" if name in _AFFINE_OPS else name if name in _SEPARATE_OPS else "levels" for name in RANDAUGMENT_OPS]
)
BETA_ATTEMPTS = 512  # each is accepted with probability 1/6 at alpha 2 and more often below: all fail once in 10^40
MASK_TOKEN_FRACTION, REPLACED_FRACTION = 0.8, 0.1  # of the masked patches; the rest stay
EVAL_SEED = 0  # every evaluation of every run masks the same patches


def make_train_inputs(pixels: Tensor, rng: CounterRNG, augment: AugmentConfig, preprocess: PreprocessConfig) -> Tensor:
    """Augment uint8 (B, C, H, W) at B positions to uint8 (B, C, S, S), a new tensor on the same device."""
    if not len(pixels):
        return pixels.new_empty((0, pixels.shape[1], *preprocess.size))
    heights, widths = (np.full(len(pixels), side) for side in pixels.shape[2:])
    params = draw_augment_params(rng, heights, widths, augment, preprocess)
    inputs = crop_batch(pixels, params.crops, preprocess)
    if params.randaugment and augment.randaugment:
        apply_randaugment(inputs, params.randaugment, augment.randaugment[1])
    if params.color_jitter:
        inputs = apply_color_jitter(inputs, params.color_jitter)
    if params.erase_boxes is not None:
        erase_boxes(inputs, params.erase_boxes, rng)
    return inputs


def crop_batch(pixels: Tensor, crops: CropParams, preprocess: PreprocessConfig) -> Tensor:
    """Resize, crop, reflect and flip uint8 (B, C, H, W) to uint8 (B, C, S, S), all at once."""
    shape, device = pixels.shape, pixels.device
    window = compute_window_indices(crops, preprocess.size)
    rows, columns = (_copy_to_device(indices, device) for indices in window)  # (B, S) each
    whole_image = (crops.source_box == (0, 0, *shape[2:])).all()
    if whole_image and (crops.resize_size == shape[2:]).all():  # the host knows: no resize
        indices = rows[:, :, None] * shape[3] + columns[:, None]  # (B, S, S)
        return _gather_pixels(pixels, indices.flatten(1)).reshape(*shape[:2], *preprocess.size)
    resize_filter = choose_resize_filter(preprocess)
    across = _compute_resize_weights(columns, crops, 1, shape[3], resize_filter)
    down = _compute_resize_weights(rows, crops, 0, shape[2], resize_filter)
    wide = torch.einsum("bchw,bsw->bchs", pixels.float(), across)
    wide = _round_to_levels(wide)  # rounded in between, as on the CPU
    return _round_to_levels(torch.einsum("bchs,brh->bcrs", wide, down)).to(torch.uint8).contiguous()


def _round_to_levels(values: Tensor) -> Tensor:
    return values.add_(0.5).floor_().clamp_(0, 255)


def _compute_resize_weights(
    target_indices: Tensor, crops: CropParams, axis: int, side: int, interpolation: str
) -> Tensor:
    """Compute (B, S, side) float32: the weight of each of the image's rows (axis 0) or columns in each target one."""
    device = target_indices.device
    start, length, resized = crops.source_box[:, axis], crops.source_box[:, 2 + axis], crops.resize_size[:, axis]
    packed = _copy_to_device(np.stack([start, start + length, length / resized], axis=1).astype(np.float32), device)
    start, end, scale = packed.T[:, :, None, None]  # (B, 1, 1) each
    centers = torch.arange(side, device=device) + 0.5
    offset = (centers - start - (target_indices[:, :, None] + 0.5) * scale).abs() / scale.clamp(min=1)
    weights = _compute_cubic_weights(offset) if interpolation == "bicubic" else (1 - offset).clamp(min=0)
    weights = weights * ((centers > start) & (centers < end))
    return weights / weights.sum(dim=2, keepdim=True)


def _compute_cubic_weights(offset: Tensor) -> Tensor:
    """Evaluate Keys' (1981) kernel with a = -1/2, which Pillow and torch use where they filter before shrinking."""
    near = (1.5 * offset - 2.5) * offset * offset + 1
    far = ((-0.5 * offset + 2.5) * offset - 4) * offset + 2
    return torch.where(offset < 1, near, torch.where(offset < 2, far, 0))


def apply_randaugment(pixels: Tensor, params: RandAugmentParams, magnitude: int) -> None:
    """Apply RandAugment's operations to uint8 (B, C, S, S) in place, one group of similar operations at a time."""
    for step in range(params.op_index.shape[1]):
        groups = _OP_GROUPS[params.op_index[:, step]]
        for group in np.unique(groups):
            selected = np.flatnonzero(groups == group)
            group_params = RandAugmentParams(*(field[selected, step] for field in params))
            index = _copy_to_device(selected, pixels.device)
            pixels[index] = _apply_op_group(pixels[index], group, group_params, magnitude)


def _apply_op_group(pixels: Tensor, group: str, params: RandAugmentParams, magnitude: int) -> Tensor:
    """Apply one operation of this group to each of uint8 (b, C, S, S); `params` are (b,), (b, 6) and (b, 4)."""
    match group:
        case "move":
            return _apply_affine(pixels, params.affine)
        case "color":
            return _blend_pixels(_compute_luma(pixels), pixels, compute_blend_factor(magnitude))
        case "sharpness":
            return _blend_pixels(_smooth_pixels(pixels), pixels, compute_blend_factor(magnitude))
        case "cutout":
            return pixels.masked_fill(_make_box_mask(params.cutout_box, pixels), FILL_LEVEL)
    return _apply_level_tables(pixels, params.op_index, magnitude)


def _apply_affine(pixels: Tensor, affine: IntArray) -> Tensor:
    height, width = pixels.shape[2:]
    a, b, c, d, e, f = _copy_to_device(affine, pixels.device).T[:, :, None, None]  # (b, 1, 1) each
    y, x = torch.arange(height, device=pixels.device)[:, None], torch.arange(width, device=pixels.device)
    column, row = (a * x + b * y + c) >> 16, (d * x + e * y + f) >> 16  # (b, S, S), Pillow's own arithmetic
    outside = (column < 0) | (column >= width) | (row < 0) | (row >= height)
    indices = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    return _gather_pixels(pixels, indices.flatten(1)).reshape(pixels.shape).masked_fill(outside[:, None], FILL_LEVEL)


def _gather_pixels(pixels: Tensor, indices: Tensor) -> Tensor:
    """Gather (b, C, n) from (b, C, H, W) at (b, n) indices in raster order."""
    return pixels.flatten(2).gather(2, indices[:, None].expand(-1, pixels.shape[1], -1))


def _apply_level_tables(pixels: Tensor, op_indices: IntArray, magnitude: int) -> Tensor:
    """Apply operations that replace each level by another, from a table of 256 for each image and channel."""
    fixed = [build_level_table(name, magnitude) for name in RANDAUGMENT_OPS]
    op_tables = np.stack([np.zeros(256, dtype=np.uint8) if table is None else table for table in fixed])
    tables = _copy_to_device(op_tables[op_indices], pixels.device)[:, None].repeat(1, pixels.shape[1], 1)  # (b, C, 256)
    for name, build_tables in (("autocontrast", _build_autocontrast_tables), ("equalize", _build_equalize_tables)):
        selected = np.flatnonzero(op_indices == RANDAUGMENT_OPS.index(name))
        if len(selected):
            index = _copy_to_device(selected, pixels.device)
            tables[index] = build_tables(pixels[index])
    return tables.gather(2, pixels.flatten(2).long()).reshape(pixels.shape)


def _build_autocontrast_tables(pixels: Tensor) -> Tensor:
    """Build uint8 (b, C, 256): the darkest level to 0, the brightest to 255, in doubles that round as Pillow's."""
    low, high = pixels.flatten(2).double().aminmax(dim=2, keepdim=True)
    level = torch.arange(256, device=pixels.device, dtype=torch.float64)
    scale = level[255] / (high - low).clamp(min=1)  # 255 / tensor would multiply by the reciprocal
    return torch.where(high > low, level * scale + -low * scale, level).clamp(0, 255).to(torch.uint8)


def _build_equalize_tables(pixels: Tensor) -> Tensor:
    """Build uint8 (b, C, 256): each level by the fraction of darker pixels, in Pillow's integers."""
    index = pixels.flatten(2).long()
    counts = torch.zeros(*index.shape[:2], 256, dtype=torch.int32, device=pixels.device)
    counts.scatter_add_(2, index, torch.ones((), dtype=torch.int32, device=pixels.device).expand(index.shape))
    brightest = counts.gather(2, index.amax(dim=2, keepdim=True))
    step = (index.shape[2] - brightest) // 255  # (b, C, 1)
    darker = counts.cumsum(dim=2) - counts
    table = ((darker + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, table, torch.arange(256, device=pixels.device)).to(torch.uint8)


def _blend_pixels(degenerate: Tensor, pixels: Tensor, factor: float | Tensor) -> Tensor:
    """Blend to uint8: `degenerate` at factor 0, the image at 1, extrapolated beyond; rounded down."""
    degenerate = degenerate.float()
    return (degenerate + factor * (pixels.float() - degenerate)).clamp(0, 255).to(torch.uint8)


def _compute_luma(pixels: Tensor) -> Tensor:
    """Compute int32 (b, 1, S, S): ITU-R 601 gray in Pillow's fixed point; a gray image itself."""
    if pixels.shape[1] == 1:
        return pixels.int()
    red, green, blue = pixels.int().split(1, dim=1)
    return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16


def _smooth_pixels(pixels: Tensor) -> Tensor:
    """Compute int32 (b, C, S, S): the rounded mean of 3 x 3 pixels, the center weighing 5; the edge is unchanged."""
    kernel = torch.ones(1, 1, 3, 3, device=pixels.device)
    kernel[0, 0, 1, 1] = 5
    sums = F.conv2d(pixels.float().flatten(0, 1)[:, None], kernel).int()  # integers, exact in floats
    smoothed = pixels.int()
    smoothed[:, :, 1:-1, 1:-1] = ((2 * sums + 13) // 26).reshape(*pixels.shape[:2], *sums.shape[2:])
    return smoothed


def apply_color_jitter(pixels: Tensor, params: ColorJitterParams) -> Tensor:
    """Change brightness, contrast and saturation of uint8 (B, C, S, S), in each image's own order."""
    factor = np.take_along_axis(params.factor, params.order, axis=1)
    packed = _copy_to_device(np.stack([params.order, factor]).astype(np.float32), pixels.device)  # (2, B, 3)
    for kind, strength in packed.permute(2, 0, 1)[..., None, None, None]:  # (B, 1, 1, 1) each
        luma = _compute_luma(pixels)
        count = luma[0].numel()
        mean = (2 * luma.sum(dim=(1, 2, 3), keepdim=True) + count) // (2 * count)
        pixels = _blend_pixels(torch.where(kind == 0, 0, torch.where(kind == 1, mean, luma)), pixels, strength)
    return pixels


def erase_boxes(pixels: Tensor, boxes: IntArray, rng: CounterRNG) -> None:
    """Fill each image's box with the random bytes of its position, in place."""
    selected = np.flatnonzero(boxes[:, 2:].all(axis=1))
    if len(selected):
        index = _copy_to_device(selected, pixels.device)
        noise = _generate_erase_noise(CounterRNG(rng.seed, rng.positions[selected]), pixels[0].numel(), pixels.device)
        noise = noise.reshape(-1, *pixels.shape[1:])
        pixels[index] = torch.where(_make_box_mask(boxes[selected], pixels), noise, pixels[index])


def _generate_erase_noise(rng: CounterRNG, count: int, device: torch.device) -> Tensor:
    """Generate uint8 (b, count): the bytes of rng.bits("erase-noise"), hashed on the device to spare their transfer."""
    keys = hash_counters(derive_key(rng.seed, "erase-noise"), rng.positions).view(np.int64)
    state = _copy_to_device(keys, device)[:, None]
    gamma, first, second = SPLITMIX_CONSTANTS.view(np.int64).tolist()
    state = state + torch.arange(1, -(-count // 8) + 1, device=device) * gamma
    state = (state ^ _shift_right_logical(state, 30)) * first
    state = (state ^ _shift_right_logical(state, 27)) * second
    return (state ^ _shift_right_logical(state, 31)).view(torch.uint8)[:, :count]


def _shift_right_logical(state: Tensor, bits: int) -> Tensor:
    """Shift bits to the right and fill with zeros; torch's shift of signed integers repeats the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _make_box_mask(boxes: IntArray, pixels: Tensor) -> Tensor:
    """Make bool (b, 1, S, S): the pixels in each image's box."""
    top, left, height, width = _copy_to_device(boxes, pixels.device).T[:, :, None, None, None]  # (b, 1, 1, 1) each
    y = torch.arange(pixels.shape[2], device=pixels.device)[:, None]
    x = torch.arange(pixels.shape[3], device=pixels.device)
    return (y >= top) & (y < top + height) & (x >= left) & (x < left + width)


def _copy_to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy an array to the device, from pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


# --- mixup and cutmix ------------------------------------------------------------------------------------------------


class MixParams(NamedTuple):
    """How a global batch is mixed: `lam` weights the sample itself; a box, if any, shows the partner's pixels."""

    lam: float
    box: tuple[int, int, int, int] | None  # top, left, bottom, right


def draw_mix(seed: int, first: int, augment: AugmentConfig, size: tuple[int, int]) -> MixParams | None:
    """Draw the mix of the global batch that begins at position `first`; None where neither kind is enabled."""
    rng = CounterRNG(seed, np.array([first]))
    if augment.mixup and (not augment.cutmix or rng.uniform("mixing", 1)[0, 0] < 0.5):
        lam = float(draw_beta(rng, "mixup", augment.mixup)[0])
        return MixParams(max(lam, 1 - lam), None)
    if not augment.cutmix:
        return None
    relative_side = np.sqrt(1 - draw_beta(rng, "cutmix", augment.cutmix)[0])
    center = (rng.uniform("cutmix-box", 2)[0] * size).astype(np.int64)
    half = (relative_side * np.array(size)).astype(np.int64) // 2
    top, left = np.maximum(center - half, 0).tolist()
    bottom, right = np.minimum(center + half, size).tolist()
    return MixParams(1 - (bottom - top) * (right - left) / (size[0] * size[1]), (top, left, bottom, right))


def draw_beta(rng: CounterRNG, purpose: str, alpha: float) -> FloatArray:
    """Draw (B,) numbers of Beta(alpha, alpha), 0 < alpha <= 2: Jöhnk's method (1964), in logarithms for small alpha."""
    x, y = np.log1p(-rng.uniform(purpose, 2 * BETA_ATTEMPTS)).reshape(-1, BETA_ATTEMPTS, 2).transpose(2, 0, 1) / alpha
    total = np.logaddexp(x, y)
    first = (total <= 0).argmax(axis=1)[:, None]
    return np.exp(np.take_along_axis(x - total, first, axis=1))[:, 0]


def apply_mix(pixels: Tensor, targets: Tensor, mix: MixParams, num_classes: int) -> tuple[Tensor, Tensor]:
    """Mix m + 1 images and targets into m images, float, and m targets, float32 (m, L).

    Targets are class indices (m + 1,) or probabilities (m + 1, L). Pixels may be bytes or normalized: normalization is
    affine and the weights sum to 1, so both orders give the same. Bytes become floats from 0 to 255, not rounded.
    """
    if targets.ndim == 1:
        targets = F.one_hot(targets.clamp(min=0), num_classes) * (targets >= 0)[:, None]  # no label: all zeros
    pixels = pixels if pixels.is_floating_point() else pixels.float()
    mixed_targets = _blend_with_partner(targets.float(), mix.lam)
    if mix.box is None:
        return _blend_with_partner(pixels, mix.lam), mixed_targets
    top, left, bottom, right = mix.box
    mixed = pixels[:-1].clone()
    mixed[..., top:bottom, left:right] = pixels[1:, ..., top:bottom, left:right]
    return mixed, mixed_targets


def _blend_with_partner(values: Tensor, lam: float) -> Tensor:
    """Blend each with its partner. Not `lerp`: its vectorized part and remainder may round differently at the cuts."""
    return lam * values[:-1] + (1 - lam) * values[1:]


# --- masked patches --------------------------------------------------------------------------------------------------


def draw_masked_patches(rng: CounterRNG, masked: MaskedConfig, num_patches: int) -> IntArray:
    """Draw (B, 2, N): each image's patches, masked ones first, and what replaces each patch, in raster order.

    A replacement is MASK_TOKEN, UNCHANGED_PATCH, or the index of a patch of the next image. For mae, every masked patch
    becomes MASK_TOKEN.
    """
    num_masked = masked.count_masked(num_patches)
    order = rng.bits("hidden", num_patches).argsort(axis=1)
    masked_indices = order[:, :num_masked]
    replacements = np.full_like(order, UNCHANGED_PATCH)
    replacement = MASK_TOKEN if masked.kind == "mae" else _draw_replacements(rng, masked_indices, num_patches)
    np.put_along_axis(replacements, masked_indices, replacement, axis=1)
    return np.stack([order, replacements], axis=1)


def _draw_replacements(rng: CounterRNG, masked_indices: IntArray, num_patches: int) -> IntArray:
    """Draw (B, M): what replaces each masked patch."""
    uniform = rng.uniform("hidden by", masked_indices.shape[1])
    shift = (uniform - MASK_TOKEN_FRACTION) / REPLACED_FRACTION * (num_patches - 1)  # 0 .. N - 2 where replaced
    other_patch = (masked_indices + 1 + shift.astype(np.int64)) % num_patches
    return np.where(
        uniform < MASK_TOKEN_FRACTION,
        MASK_TOKEN,
        np.where(uniform < MASK_TOKEN_FRACTION + REPLACED_FRACTION, other_patch, UNCHANGED_PATCH),
    )
