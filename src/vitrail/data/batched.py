"""Training views of whole batches on any device, for data sets that live there as bytes.

    B images   C channels   H, W sides of the stored images   S sides of the view   b images an operation applies to

The draws are those of `augment`, made on the host and sent over in a few small tensors, so nothing here waits for the
device and nothing loops over images. Every operation equals that of `augment.training_views` to the bit, but for
resizing: here it is two products with matrices of the same filter's weights, not rounded, where the CPU's kernel rounds
them to 16 bits. So up to a tenth of the levels differ by 1 (where sums fall on halves), and very few by 2.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.config import Augment, Preprocess
from vitrail.data.augment import (
    FILL,
    OPERATIONS,
    Integers,
    Jitter,
    Operations,
    Views,
    blend_factor,
    draw,
    levels,
    resize_filter,
    window,
)
from vitrail.data.draws import FIRST, GOLDEN, SECOND, Draws, hashed, key

_MOVES = ("rotate", "shear-x", "shear-y", "translate-x", "translate-y")
_ALONE = ("color", "sharpness", "cutout")
_GROUPS = np.array(["move" if name in _MOVES else name if name in _ALONE else "levels" for name in OPERATIONS])


def training_views(pixels: Tensor, draws: Draws, augment: Augment, preprocess: Preprocess) -> Tensor:
    """uint8 (B, C, H, W) at B positions -> uint8 (B, C, S, S), a new tensor on the same device."""
    if not len(pixels):
        return pixels.new_empty((0, pixels.shape[1], *preprocess.size))
    heights, widths = (np.full(len(pixels), side) for side in pixels.shape[2:])
    drawn = draw(draws, heights, widths, augment, preprocess)
    result = cropped(pixels, drawn.views, preprocess)
    if drawn.operations and augment.randaugment:
        operate(result, drawn.operations, augment.randaugment[1])
    if drawn.jitter:
        result = jittered(result, drawn.jitter)
    if drawn.erased is not None:
        erase(result, drawn.erased, draws)
    return result


def cropped(pixels: Tensor, views: Views, preprocess: Preprocess) -> Tensor:
    """uint8 (B, C, H, W) -> uint8 (B, C, S, S): resized, cut, reflected and flipped, all at once."""
    shape, device = pixels.shape, pixels.device
    taken = window(views.grid, views.corner, views.flip, preprocess.size)
    rows, columns = (_sent(places, device) for places in taken)  # (B, S) each
    if (views.part == (0, 0, *shape[2:])).all() and (views.grid == shape[2:]).all():  # the host knows: no resize
        places = rows[:, :, None] * shape[3] + columns[:, None]  # (B, S, S)
        return _gathered(pixels, places.flatten(1)).reshape(*shape[:2], *preprocess.size)
    across, down = (
        _resize_weights(places, views, axis, shape[2 + axis], resize_filter(preprocess))
        for places, axis in ((columns, 1), (rows, 0))
    )
    halfway = _rounded(torch.einsum("bchw,bsw->bchs", pixels.float(), across))  # rounded in between, as on the CPU
    return _rounded(torch.einsum("bchs,brh->bcrs", halfway, down)).to(torch.uint8).contiguous()


def _rounded(values: Tensor) -> Tensor:
    return values.add_(0.5).floor_().clamp_(0, 255)


def _resize_weights(taken: Tensor, views: Views, axis: int, side: int, filtering: str) -> Tensor:
    """(B, S, side) float32: how much of each of the image's rows (axis 0) or columns is in each one taken."""
    start, length, grid = views.part[:, axis], views.part[:, 2 + axis], views.grid[:, axis]
    packed = _sent(np.stack([start, start + length, length / grid], axis=1).astype(np.float32), taken.device)
    start, end, scale = packed.T[:, :, None, None]  # (B, 1, 1) each
    place = torch.arange(side, device=taken.device) + 0.5
    offset = (place - start - (taken[:, :, None] + 0.5) * scale).abs() / scale.clamp(min=1)
    weights = _cubic(offset) if filtering == "bicubic" else (1 - offset).clamp(min=0)
    weights = weights * ((place > start) & (place < end))
    return weights / weights.sum(dim=2, keepdim=True)


def _cubic(offset: Tensor) -> Tensor:
    """Keys' (1981) kernel with a = -1/2, which is Pillow's and torch's where they filter before shrinking."""
    near = (1.5 * offset - 2.5) * offset * offset + 1
    far = ((-0.5 * offset + 2.5) * offset - 4) * offset + 2
    return torch.where(offset < 1, near, torch.where(offset < 2, far, 0))


def operate(pixels: Tensor, operations: Operations, magnitude: int) -> None:
    """Apply RandAugment's operations to uint8 (B, C, S, S) in place, one group of alike operations at a time."""
    for step in range(operations.kind.shape[1]):
        groups = _GROUPS[operations.kind[:, step]]
        for group in np.unique(groups):
            selected = np.flatnonzero(groups == group)
            chosen = Operations(*(field[selected, step] for field in operations))
            index = _sent(selected, pixels.device)
            pixels[index] = _operated(pixels[index], group, chosen, magnitude)


def _operated(pixels: Tensor, group: str, chosen: Operations, magnitude: int) -> Tensor:
    """uint8 (b, C, S, S) after one operation of this group each; the fields of `chosen` are (b,), (b, 6) and (b, 4)."""
    match group:
        case "move":
            return _moved(pixels, chosen.affine)
        case "color":
            return _blended(_luma(pixels), pixels, blend_factor(magnitude))
        case "sharpness":
            return _blended(_smooth(pixels), pixels, blend_factor(magnitude))
        case "cutout":
            return pixels.masked_fill(_inside(chosen.cutout, pixels), FILL)
    return _levelled(pixels, chosen.kind, magnitude)


def _moved(pixels: Tensor, affine: Integers) -> Tensor:
    height, width = pixels.shape[2:]
    a, b, c, d, e, f = _sent(affine, pixels.device).T[:, :, None, None]  # (b, 1, 1) each
    y, x = torch.arange(height, device=pixels.device)[:, None], torch.arange(width, device=pixels.device)
    column, row = (a * x + b * y + c) >> 16, (d * x + e * y + f) >> 16  # (b, S, S), Pillow's own arithmetic
    outside = (column < 0) | (column >= width) | (row < 0) | (row >= height)
    places = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    return _gathered(pixels, places.flatten(1)).reshape(pixels.shape).masked_fill(outside[:, None], FILL)


def _gathered(pixels: Tensor, places: Tensor) -> Tensor:
    """(b, C, H, W) and (b, n) places in raster order -> (b, C, n)."""
    return pixels.flatten(2).gather(2, places[:, None].expand(-1, pixels.shape[1], -1))


def _levelled(pixels: Tensor, kinds: Integers, magnitude: int) -> Tensor:
    """Operations that replace each level by another: looked up in a table of 256 for each image and channel."""
    fixed = [levels(name, magnitude) for name in OPERATIONS]
    table = np.stack([np.zeros(256, dtype=np.uint8) if each is None else each for each in fixed])[kinds]
    tables = _sent(table, pixels.device)[:, None].repeat(1, pixels.shape[1], 1)  # (b, C, 256)
    for name, tabulate in (("autocontrast", _autocontrast_levels), ("equalize", _equalize_levels)):
        selected = np.flatnonzero(kinds == OPERATIONS.index(name))
        if len(selected):
            index = _sent(selected, pixels.device)
            tables[index] = tabulate(pixels[index])
    return tables.gather(2, pixels.flatten(2).long()).reshape(pixels.shape)


def _autocontrast_levels(pixels: Tensor) -> Tensor:
    """uint8 (b, C, 256): from the darkest level to 0, from the brightest to 255, in doubles that round as Pillow's."""
    low, high = pixels.flatten(2).double().aminmax(dim=2, keepdim=True)
    level = torch.arange(256, device=pixels.device, dtype=torch.float64)
    scale = level[255] / (high - low).clamp(min=1)  # 255 / tensor would multiply by the reciprocal
    return torch.where(high > low, level * scale + -low * scale, level).clamp(0, 255).to(torch.uint8)


def _equalize_levels(pixels: Tensor) -> Tensor:
    """uint8 (b, C, 256): each level by the share of darker pixels, in Pillow's whole numbers."""
    index = pixels.flatten(2).long()
    counts = torch.zeros(*index.shape[:2], 256, dtype=torch.int32, device=pixels.device)
    counts.scatter_add_(2, index, torch.ones((), dtype=torch.int32, device=pixels.device).expand(index.shape))
    brightest = counts.gather(2, index.amax(dim=2, keepdim=True))
    step = (index.shape[2] - brightest) // 255  # (b, C, 1)
    darker = counts.cumsum(dim=2) - counts
    table = ((darker + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, table, torch.arange(256, device=pixels.device)).to(torch.uint8)


def _blended(degenerate: Tensor, pixels: Tensor, factor: float | Tensor) -> Tensor:
    """uint8: `degenerate` at factor 0, the image at 1, and the same way on beyond; rounded down."""
    degenerate = degenerate.float()
    return (degenerate + factor * (pixels.float() - degenerate)).clamp(0, 255).to(torch.uint8)


def _luma(pixels: Tensor) -> Tensor:
    """int32 (b, 1, S, S): ITU-R 601 grey in Pillow's fixed point; a grey image itself."""
    if pixels.shape[1] == 1:
        return pixels.int()
    red, green, blue = pixels.int().split(1, dim=1)
    return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16


def _smooth(pixels: Tensor) -> Tensor:
    """int32 (b, C, S, S): the mean of 3 x 3 pixels with the middle one weighing 5, rounded; the edge as it is."""
    kernel = torch.ones(1, 1, 3, 3, device=pixels.device)
    kernel[0, 0, 1, 1] = 5
    sums = F.conv2d(pixels.float().flatten(0, 1)[:, None], kernel).int()  # whole numbers, exact in floats
    result = pixels.int()
    result[:, :, 1:-1, 1:-1] = ((2 * sums + 13) // 26).reshape(*pixels.shape[:2], *sums.shape[2:])
    return result


def jittered(pixels: Tensor, jitter: Jitter) -> Tensor:
    """uint8 (B, C, S, S) with brightness, contrast and saturation changed, in each image's own order."""
    factor = np.take_along_axis(jitter.factor, jitter.order, axis=1)
    packed = _sent(np.stack([jitter.order, factor]).astype(np.float32), pixels.device)  # (2, B, 3)
    for kind, amount in packed.permute(2, 0, 1)[..., None, None, None]:  # (B, 1, 1, 1) each
        luma = _luma(pixels)
        count = luma[0].numel()
        mean = (2 * luma.sum(dim=(1, 2, 3), keepdim=True) + count) // (2 * count)
        pixels = _blended(torch.where(kind == 0, 0, torch.where(kind == 1, mean, luma)), pixels, amount)
    return pixels


def erase(pixels: Tensor, boxes: Integers, draws: Draws) -> None:
    """Fill each image's box with the random bytes of its position, in place."""
    selected = np.flatnonzero(boxes[:, 2:].all(axis=1))
    if len(selected):
        index = _sent(selected, pixels.device)
        noise = _noise(Draws(draws.seed, draws.positions[selected]), pixels[0].numel(), pixels.device)
        noise = noise.reshape(-1, *pixels.shape[1:])
        pixels[index] = torch.where(_inside(boxes[selected], pixels), noise, pixels[index])


def _noise(draws: Draws, count: int, device: torch.device) -> Tensor:
    """uint8 (b, count): the bytes of draws.bits("erase-noise"), hashed on the device to spare their transfer."""
    state = _sent(hashed(key(draws.seed, "erase-noise"), draws.positions).view(np.int64), device)[:, None]
    golden, first, second = np.array([GOLDEN, FIRST, SECOND]).view(np.int64).tolist()
    state = state + torch.arange(1, -(-count // 8) + 1, device=device) * golden
    state = (state ^ _shifted(state, 30)) * first
    state = (state ^ _shifted(state, 27)) * second
    return (state ^ _shifted(state, 31)).view(torch.uint8)[:, :count]


def _shifted(state: Tensor, places: int) -> Tensor:
    """Bits moved to the right with zeros after them; torch's shift of signed numbers repeats the sign."""
    return (state >> places) & ((1 << (64 - places)) - 1)


def _inside(boxes: Integers, pixels: Tensor) -> Tensor:
    """bool (b, 1, S, S): the pixels in each image's box."""
    top, left, height, width = _sent(boxes, pixels.device).T[:, :, None, None, None]  # (b, 1, 1, 1) each
    y = torch.arange(pixels.shape[2], device=pixels.device)[:, None]
    x = torch.arange(pixels.shape[3], device=pixels.device)
    return (y >= top) & (y < top + height) & (x >= left) & (x < left + width)


def _sent(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on the device; from pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
