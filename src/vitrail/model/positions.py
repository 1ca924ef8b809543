"""Positions of patches: sin-cos and rotary ones, tables of offsets, and six operators that resample to another grid.

    B batch   N tokens   D width   H heads   K = D/H   G = (rows, columns) of patches   n = rows * columns

Projects resample positions in six ways, which differ by 3 to 4.5 % of the norm from 14 x 14 to 24 x 24, so the operator
belongs to the weights. All of them run on the CPU in float32: a model gets the same positions on any device.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Resample, RotaryConfig, ViTConfig

Grid = tuple[int, int]
_INTERPOLATE_OPTIONS: dict[Resample, dict[str, Any]] = {
    "bilinear-corners": {"mode": "bilinear", "align_corners": True},  # Google's code: scipy.ndimage.zoom(order=1)
    "bilinear": {"mode": "bilinear"},  # timm, reading Google's .npz
    "bicubic-antialias": {"mode": "bicubic", "antialias": True},  # timm's state dicts, open_clip, DINOv2 with registers
    "bicubic": {"mode": "bicubic"},  # transformers
    "bicubic-corners": {"mode": "bicubic", "align_corners": True},  # torchvision
    "bicubic-offset": {"mode": "bicubic"},  # DINO and DINOv2: a scale factor nudged by a tenth of a patch
}


def resample_positions(table: Tensor, old: Grid, new: Grid, operator: Resample) -> Tensor:
    """(..., n, D) on the old grid -> (..., n', D) on the new one; the same tensor if the grids are equal."""
    if old == new:
        return table
    *lead, _, width = table.shape
    image = table.float().cpu().reshape(-1, *old, width).permute(0, 3, 1, 2)  # (-1, D, rows, columns)
    size: dict[str, Any] = {"size": new}
    if operator == "bicubic-offset":
        size = {"scale_factor": [(after + 0.1) / before for after, before in zip(new, old, strict=True)]}
    image = F.interpolate(image, **size, **_INTERPOLATE_OPTIONS[operator])
    return image.permute(0, 2, 3, 1).reshape(*lead, new[0] * new[1], width).to(table)


def resample_offsets(table: Tensor, old: Grid, new: Grid, operator: Resample) -> Tensor:
    """(2n - 1, D) learned raster offsets -> (2n' - 1, D).

    In an image of W columns the raster offset row * W + column stands for that many rows and columns. So the table is
    laid out by rows and columns, resampled like positions, and read back. One raster offset has two such readings
    (k columns to the right, or a row down and W - k to the left); their mean is taken.
    """
    if old == new:
        return table
    laid_out = table[_index_raster_offsets(old).flatten()]
    old_layout, new_layout = ((2 * rows - 1, 2 * columns - 1) for rows, columns in (old, new))
    laid_out = resample_positions(laid_out, old_layout, new_layout, operator)
    index = _index_raster_offsets(new).flatten().to(table.device)
    count = 2 * new[0] * new[1] - 1
    total = laid_out.new_zeros(count, table.shape[-1]).index_add(0, index, laid_out)
    readings = laid_out.new_zeros(count).index_add(0, index, laid_out.new_ones(len(index)))
    return total / readings[:, None]


def _index_raster_offsets(grid: Grid) -> Tensor:
    """(2 rows - 1, 2 columns - 1): the index into the offset table of each step in rows and columns."""
    rows, columns = grid
    down, right = torch.arange(1 - rows, rows), torch.arange(1 - columns, columns)
    return down[:, None] * columns + right[None, :] + rows * columns - 1


@functools.lru_cache(maxsize=16)
def build_sincos_positions(
    grid: Grid, width: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """(n, D) fixed positions (Chen et al. 2021, as big_vision computes them): sin x, cos x, sin y, cos y."""
    with torch.device("cpu"), torch.inference_mode(False):  # whatever mode is current: the result is cached
        rows, columns = (side.flatten() for side in torch.meshgrid(*map(torch.arange, grid), indexing="ij"))
        quarter = width // 4
        frequencies = 10_000.0 ** -(torch.arange(quarter, dtype=torch.float64) / (quarter - 1))
        x, y = (torch.outer(side.double(), frequencies) for side in (columns, rows))
        return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).float().to(device, dtype)


@functools.lru_cache(maxsize=16)
def build_rotary(
    config: RotaryConfig, grid: Grid, prefix: int, head_width: int, device: torch.device | str = "cpu"
) -> Tensor:
    """(2, N, K): the cosine and the sine of each token's angles; prefix tokens are not turned."""
    with torch.device("cpu"), torch.inference_mode(False):
        bands = head_width // 4
        exponents = torch.arange(bands, dtype=torch.float64) / bands
        periods = config.base**exponents
        if config.bfloat16_periods:
            periods = periods.bfloat16().double()
        angles = []
        for axis, side in enumerate(grid):
            place = torch.arange(side, dtype=torch.float64)
            if config.places == "normalized":
                place = 2 * math.pi * (2 * (place + 0.5) / side - 1)
            else:
                place = (place + config.offset) / side * (config.reference[axis] if config.reference else side)
            angles.append(place[:, None] / periods)  # (rows or columns, K/4)
        rows, columns = grid
        y, x = angles[0][:, None].expand(-1, columns, -1), angles[1][None].expand(rows, -1, -1)
        half = torch.cat([y, x] if config.order == "yx" else [x, y], dim=-1).flatten(0, 1)  # (n, K/2)
        turned = half.repeat(1, 2) if config.places == "normalized" else half.repeat_interleave(2, dim=1)
        turned = F.pad(turned, (0, 0, prefix, 0))  # (N, K)
        return torch.stack([turned.cos(), turned.sin()]).float().to(device)


def rotate(x: Tensor, rotary: Tensor, config: RotaryConfig) -> Tensor:
    """(..., N, K) turned by cosines and sines (2, N, K), in float32: pairs of channels are coordinates in a plane.

    A pair is channel t and t + K/2 where places are normalized, and two neighbors otherwise.
    """
    values = x.float()
    if config.places == "normalized":
        first, second = values.chunk(2, dim=-1)
        quarter_turn = torch.cat([-second, first], dim=-1)
    else:
        first, second = values[..., ::2], values[..., 1::2]
        quarter_turn = torch.stack([-second, first], dim=-1).flatten(-2)
    return (values * rotary[0] + quarter_turn * rotary[1]).to(x.dtype)


def rotate_packed(qkv: Tensor, rotary: Tensor | None, config: ViTConfig) -> Tensor:
    """(B, N, 3 D) with queries and keys turned; unchanged without rotary positions."""
    assert (rotary is None) == (config.rotary is None)
    if rotary is None or config.rotary is None:
        return qkv
    queries_keys = qkv[..., : 2 * config.width].unflatten(-1, (2 * config.heads, -1)).transpose(1, 2)
    turned = rotate(queries_keys, rotary, config.rotary).transpose(1, 2).flatten(2)
    return torch.cat([turned, qkv[..., 2 * config.width :]], dim=-1)


def compute_offset_logits(q: Tensor, offsets: Tensor, grid: Grid, config: ViTConfig) -> Tensor:
    """(B, H, N, N): each patch's query times the embedding of the raster offset to each patch; 0 for the prefix."""
    patches, prefix = grid[0] * grid[1], config.num_prefix_tokens
    offsets = resample_offsets(offsets, config.grid, grid, config.resample)
    keys = offsets.unflatten(-1, (config.heads, -1)).permute(1, 2, 0).to(q.dtype)  # (H, K, 2n - 1)
    index = torch.arange(patches, device=q.device)
    index = index[:, None] - index[None, :] + patches - 1  # (n, n): query minus key
    by_offset = q[:, :, prefix:] @ keys  # (B, H, n, 2n - 1)
    by_pair = by_offset.gather(-1, index.expand(*by_offset.shape[:2], -1, -1))
    return F.pad(by_pair, (prefix, 0, prefix, 0))


def count_biases(grid: Grid) -> int:
    """Rows of a table of relative biases: all offsets, then class token to patch, patch to class token, itself."""
    return (2 * grid[0] - 1) * (2 * grid[1] - 1) + 3


def resample_biases(table: Tensor, old: Grid, new: Grid, operator: Resample) -> Tensor:
    """(biases, H) of the old grid -> (biases, H) of the new one; those of the class token stay."""
    if old == new:
        return table
    old_layout, new_layout = ((2 * rows - 1, 2 * columns - 1) for rows, columns in (old, new))
    return torch.cat([resample_positions(table[:-3], old_layout, new_layout, operator), table[-3:]])


def compute_relative_bias(table: Tensor, grid: Grid, config: ViTConfig) -> Tensor:
    """(biases, H) of the model's own grid -> (H, N, N): the bias of each query and key."""
    table, (rows, columns) = resample_biases(table, config.grid, grid, config.resample), grid
    y, x = (side.flatten() for side in torch.meshgrid(*map(torch.arange, grid), indexing="ij"))
    down, right = y[:, None] - y[None, :] + rows - 1, x[:, None] - x[None, :] + columns - 1
    index = down * (2 * columns - 1) + right  # (n, n): query minus key
    if config.class_token:
        index = F.pad(index, (1, 0, 1, 0))
        index[0, :], index[:, 0], index[0, 0] = len(table) - 3, len(table) - 2, len(table) - 1
    return table[index.to(table.device)].permute(2, 0, 1)
