"""Resampling of positions, each operator against the library it belongs to."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import zoom
from torch import Tensor

from tests.conftest import peer
from vitrail.config import Resample
from vitrail.model.positions import build_sincos_positions, resample_offsets, resample_positions

OPERATORS: tuple[Resample, ...] = (
    "bilinear-corners",
    "bilinear",
    "bilinear-antialias",
    "bicubic-antialias",
    "bicubic",
    "bicubic-corners",
    "bicubic-offset",
)
SIDES = st.integers(2, 9)


def grid_of(rows: int, columns: int, width: int = 8) -> Tensor:
    return torch.randn(1, rows * columns, width, generator=torch.Generator().manual_seed(rows * 100 + columns))


@pytest.mark.parametrize(("old", "new"), [((14, 14), (24, 24)), ((24, 24), (14, 14)), ((14, 14), (10, 31))])
def test_bilinear_corners_is_scipys_zoom(old: tuple[int, int], new: tuple[int, int]) -> None:
    table = grid_of(*old)
    expected = zoom(table.reshape(*old, 8).numpy(), (new[0] / old[0], new[1] / old[1], 1), order=1)
    ours = resample_positions(table, old, new, "bilinear-corners").reshape(*new, 8).numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("new", [(24, 24), (9, 20)])
def test_bicubic_antialias_is_timms(new: tuple[int, int]) -> None:
    peer("timm")
    from timm.layers import resample_abs_pos_embed

    table = grid_of(14, 14)
    theirs = resample_abs_pos_embed(table, new_size=list(new), old_size=[14, 14], num_prefix_tokens=0)
    torch.testing.assert_close(resample_positions(table, (14, 14), new, "bicubic-antialias"), theirs)


def test_bicubic_is_transformers() -> None:
    from transformers import ViTConfig
    from transformers.models.vit.modeling_vit import ViTEmbeddings

    embeddings = ViTEmbeddings(ViTConfig(hidden_size=8, image_size=224, patch_size=16))
    with torch.no_grad():
        embeddings.position_embeddings.normal_(generator=torch.Generator().manual_seed(0))
        theirs = embeddings.interpolate_pos_encoding(torch.zeros(1, 1 + 24 * 20, 8), 384, 320)[:, 1:]
        ours = resample_positions(embeddings.position_embeddings[:, 1:], (14, 14), (24, 20), "bicubic")
    torch.testing.assert_close(ours, theirs)


def test_bicubic_corners_is_torchvisions() -> None:
    peer("torchvision")
    from torchvision.models.vision_transformer import interpolate_embeddings

    table = torch.cat([torch.zeros(1, 1, 8), grid_of(14, 14)], dim=1)
    theirs = interpolate_embeddings(384, 16, {"encoder.pos_embedding": table})["encoder.pos_embedding"]
    torch.testing.assert_close(resample_positions(table[:, 1:], (14, 14), (24, 24), "bicubic-corners"), theirs[:, 1:])


def test_bicubic_offset_reads_where_dinos_scale_factor_puts_it() -> None:
    """Output i is the cubic convolution (a = -0.75) around the input coordinate (i + 0.5) * old / (new + 0.1) - 0.5."""
    old, new, a = 14, 24, -0.75
    signal = torch.randn(old, generator=torch.Generator().manual_seed(0)).double()

    def kernel(distance: float) -> float:
        d = abs(distance)
        near = (a + 2) * d**3 - (a + 3) * d**2 + 1
        return near if d <= 1 else a * (d**3 - 5 * d**2 + 8 * d - 4) if d < 2 else 0.0

    expected = torch.zeros(new, dtype=torch.float64)
    for i in range(new):
        at = (i + 0.5) * old / (new + 0.1) - 0.5
        for tap in range(int(np.floor(at)) - 1, int(np.floor(at)) + 3):
            expected[i] += kernel(at - tap) * signal[min(max(tap, 0), old - 1)]
    table = signal.float().repeat(old, 1).reshape(1, old * old, 1)
    for row in resample_positions(table, (old, old), (new, new), "bicubic-offset").reshape(new, new):
        torch.testing.assert_close(row, expected.float(), atol=1e-5, rtol=1e-5)


@given(operator=st.sampled_from(OPERATORS), old=st.tuples(SIDES, SIDES), new=st.tuples(SIDES, SIDES))
@settings(max_examples=100, deadline=None)
def test_every_operator_gives_the_grid_asked_for_and_keeps_a_constant(
    operator: Resample, old: tuple[int, int], new: tuple[int, int]
) -> None:
    table = grid_of(*old)
    assert resample_positions(table, old, new, operator).shape == (1, new[0] * new[1], 8)
    assert resample_positions(table, old, old, operator) is table
    constant = resample_positions(torch.full((1, old[0] * old[1], 8), 3.0), old, new, operator)
    torch.testing.assert_close(constant, torch.full_like(constant, 3.0), atol=1e-4, rtol=1e-4)


def test_the_operators_differ() -> None:
    tables = {name: resample_positions(grid_of(24, 24), (24, 24), (14, 14), name) for name in OPERATORS}
    for i, first in enumerate(OPERATORS):
        for second in OPERATORS[i + 1 :]:
            assert (tables[first] - tables[second]).abs().max() > 1e-3, (first, second)


def test_gradients_reach_the_stored_positions_through_resampling() -> None:
    table = grid_of(4, 4).requires_grad_()
    resample_positions(table, (4, 4), (6, 6), "bicubic").sum().backward()
    assert table.grad is not None
    assert (table.grad != 0).all()


def test_raster_offsets_by_hand() -> None:
    """A row of three patches becomes one of five: five offsets laid on a line, nine read from it, ends aligned."""
    table = torch.tensor([[0.0], [10.0], [20.0], [30.0], [50.0]])  # key two to the right ... query two to the right
    finer = resample_offsets(table, (1, 3), (1, 5), "bilinear-corners")
    assert finer.flatten().tolist() == pytest.approx([0, 5, 10, 15, 20, 25, 30, 40, 50])


def test_a_raster_offset_with_two_readings_gets_their_mean() -> None:
    """Two rows of two: the offset 1 is a step right, or a row down and a step left."""
    table = torch.arange(7.0)[:, None]  # offsets -3 ... 3 of a 2 x 2 grid
    wider = resample_offsets(table, (2, 2), (2, 3), "bilinear-corners").flatten()
    by_step = {  # rows, columns -> value: columns are stretched from -1..1 to -2..2, rows stay
        (row, column): 3.0 + 2 * row + column / 2 for row in (-1, 0, 1) for column in (-2, -1, 0, 1, 2)
    }
    for offset in range(-5, 6):
        readings = [value for (row, column), value in by_step.items() if row * 3 + column == offset]
        assert wider[offset + 5].item() == pytest.approx(sum(readings) / len(readings))


@given(old=st.tuples(SIDES, SIDES), new=st.tuples(SIDES, SIDES))
@settings(max_examples=50, deadline=None)
def test_a_constant_table_of_offsets_stays_constant(old: tuple[int, int], new: tuple[int, int]) -> None:
    table = torch.full((2 * old[0] * old[1] - 1, 3), 2.0)
    finer = resample_offsets(table, old, new, "bilinear")
    torch.testing.assert_close(finer, torch.full((2 * new[0] * new[1] - 1, 3), 2.0))


def test_sincos_by_hand() -> None:
    """Row 2, column 1 of width 8: two frequencies, 1 and 1e-4, for x then y."""
    table = build_sincos_positions((3, 4), 8)
    x, y = torch.tensor([1.0, 1e-4]), torch.tensor([2.0, 2e-4])
    torch.testing.assert_close(table[2 * 4 + 1], torch.cat([x.sin(), x.cos(), y.sin(), y.cos()]))
    assert table.shape == (12, 8)


def test_sincos_comes_on_the_device_and_in_the_numbers_asked_for() -> None:
    """Computed on the CPU in float64 whatever the default device is, and only then rounded."""
    plain = build_sincos_positions((3, 5), 8)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        positions = build_sincos_positions((3, 5), 8, "cpu", dtype)
        assert positions.dtype == dtype
        assert torch.equal(positions, plain.to(dtype))
    assert build_sincos_positions((3, 5), 8, torch.device("meta"), torch.bfloat16).device.type == "meta"
    with torch.device("meta"):
        under = build_sincos_positions((5, 3), 8)
    assert under.device.type == "cpu"
    assert torch.equal(under, build_sincos_positions.__wrapped__((5, 3), 8))


def test_sincos_kept_from_inference_serves_training() -> None:
    """A tensor made in inference mode could not be saved for a backward pass."""
    with torch.inference_mode():
        table = build_sincos_positions((7, 3), 8)
    assert build_sincos_positions((7, 3), 8) is table
    scale = torch.ones((), requires_grad=True)
    (scale * table).sum().backward()
    torch.testing.assert_close(scale.grad, table.sum())


def test_resampling_is_the_same_for_any_lead_and_dtype() -> None:
    table = torch.cat([grid_of(4, 4), grid_of(4, 4) * 2])
    both = resample_positions(table, (4, 4), (6, 5), "bicubic-antialias")
    torch.testing.assert_close(both[1], both[0] * 2)
    half = resample_positions(table.bfloat16(), (4, 4), (6, 5), "bicubic-antialias")
    assert half.dtype == torch.bfloat16
    assert F.cosine_similarity(half.float().flatten(), both.flatten(), dim=0) > 0.999
