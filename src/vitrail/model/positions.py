"""Positions of patches: fixed sin-cos ones, and the six operators that resample learned ones to another grid.

    G = (rows, columns) of patches   n = rows * columns   D width

Projects resample positions in six ways, which differ by 3 to 4.5 % of the norm from 14 x 14 to 24 x 24, so the operator
belongs to the weights. All of them run on the CPU in float32: a model gets the same positions on any device.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Resample

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
