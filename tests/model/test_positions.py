"""Resampling of positions, each operator against the library it belongs to."""

import inspect
import math
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import zoom
from torch import Tensor

from tests import model_factory
from tests.conftest import peer
from vitrail.config import Resample, RotaryConfig
from vitrail.model.positions import (
    Grid,
    build_rotary,
    build_sincos_positions,
    compute_relative_bias,
    count_biases,
    resample_biases,
    resample_offsets,
    resample_positions,
    rotate,
    rotate_packed,
)

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
    assert torch.equal(under, inspect.unwrap(build_sincos_positions)((5, 3), 8))


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


# --- rotary positions ------------------------------------------------------------------------------------------------


def read_angles(config: RotaryConfig, grid: Grid, prefix: int = 0, head_width: int = 8) -> Tensor:
    """(N, K): the angles from 0 to 2 pi of the cosines and sines."""
    cosines, sines = build_rotary(config, grid, prefix, head_width)
    return torch.atan2(sines, cosines) % (2 * math.pi)


def check_angles(angles: Tensor, expected: list[float]) -> None:
    """Check angles up to whole turns."""
    turns = (angles.double() - torch.tensor(expected, dtype=torch.float64)) / (2 * math.pi)
    torch.testing.assert_close(turns, turns.round(), atol=1e-6, rtol=0)


def test_angles_of_normalized_places_by_hand() -> None:
    """Of 2 x 3 patches: rows are at -1/2 and 1/2 of half the image, columns at -2/3, 0 and 2/3; periods are 1 and 10.

    A head of 8 channels has both periods of the row, both of the column, and all four again.
    """
    angles = read_angles(RotaryConfig(places="normalized"), (2, 3))
    for row, y in enumerate((-1 / 2, 1 / 2)):
        for column, x in enumerate((-2 / 3, 0.0, 2 / 3)):
            half = [2 * math.pi * place / period for place in (y, x) for period in (1, 10)]
            check_angles(angles[row * 3 + column], half + half)


def test_angles_of_indices_by_hand() -> None:
    """Of 2 x 3 patches: the index is the angle at period 1, a hundredth of it at 100; neighbors share an angle."""
    angles = read_angles(RotaryConfig(places="index", base=10_000.0), (2, 3))
    for row in range(2):
        for column in range(3):
            quarters = (row, row / 100, column, column / 100)
            check_angles(angles[row * 3 + column], [angle for angle in quarters for _ in range(2)])


def test_a_reference_grid_stretches_indices_after_the_offset() -> None:
    """Of 2 x 3 patches on a reference of 8 x 6, counted from 1: rows are at 4 and 8, columns at 2, 4 and 6."""
    config = RotaryConfig(places="index", base=10_000.0, reference=(8, 6), offset=1)
    angles = read_angles(config, (2, 3))
    for row, y in enumerate((4, 8)):
        for column, x in enumerate((2, 4, 6)):
            check_angles(angles[row * 3 + column], [y, y, y / 100, y / 100, x, x, x / 100, x / 100])


def test_the_order_swaps_rows_and_columns() -> None:
    for places in ("normalized", "index"):
        rows_first = build_rotary(RotaryConfig(places=places), (2, 3), 0, 8)
        columns_first = build_rotary(RotaryConfig(places=places, order="xy"), (3, 2), 0, 8)
        transposed = columns_first.unflatten(1, (3, 2)).transpose(1, 2).flatten(1, 2)
        assert torch.equal(transposed, rows_first), places


def test_normalized_places_do_not_depend_on_the_size() -> None:
    """The middle patch of three is at that of five, and the outer ones of nine are nearer to the edge than of three."""
    config = RotaryConfig(places="normalized")
    three, five = build_rotary(config, (3, 3), 0, 8), build_rotary(config, (5, 5), 0, 8)
    assert torch.equal(three[:, 4], five[:, 12])
    assert not torch.equal(three[:, 0], five[:, 0])


def test_periods_in_bfloat16_differ_by_its_rounding() -> None:
    """At a head of 64, three periods of sixteen are whole powers of ten's roots that bfloat16 rounds by up to 0.2 %."""
    exact, rounded = (
        read_angles(RotaryConfig(places="normalized", bfloat16_periods=each), (2, 2), head_width=64)
        for each in (False, True)
    )
    periods = (100 ** (torch.arange(16) / 16)).bfloat16().double()
    check_angles(rounded[0, :16], (2 * math.pi * -0.5 / periods).tolist())
    assert 0 < (exact - rounded).abs().max() < 0.01


@pytest.mark.parametrize("grid", [(14, 14), (3, 5)])
def test_normalized_places_are_timms_of_dinov3(grid: Grid) -> None:
    peer("timm")
    from timm.layers import RotaryEmbeddingDinoV3

    sines, cosines = RotaryEmbeddingDinoV3(64, rotate_half=True).eval().get_embed(list(grid)).chunk(2, dim=-1)
    ours = build_rotary(RotaryConfig(places="normalized"), grid, 0, 64)
    torch.testing.assert_close(ours, torch.stack([cosines, sines]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("grid", [(14, 14), (3, 5)])
@pytest.mark.parametrize(("order", "offset"), [("yx", 0), ("xy", 1)])
def test_indices_are_timms_of_eva02_and_of_pe(order: Literal["yx", "xy"], offset: int, grid: Grid) -> None:
    peer("timm")
    from timm.layers import RotaryEmbeddingCat

    indexing = "ij" if order == "yx" else "xy"
    theirs = RotaryEmbeddingCat(
        64, in_pixels=False, feat_shape=grid, ref_feat_shape=(16, 16), grid_offset=offset, grid_indexing=indexing
    )
    sines, cosines = theirs.get_embed(list(grid)).chunk(2, dim=-1)
    config = RotaryConfig(places="index", base=10_000.0, reference=(16, 16), offset=offset, order=order)
    torch.testing.assert_close(build_rotary(config, grid, 0, 64), torch.stack([cosines, sines]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("places", ["normalized", "index"])
def test_turning_is_a_complex_product_and_leaves_the_prefix(places: str) -> None:
    """Of channels t and t + K/2, or of two neighbors, as the real and imaginary part."""
    config = model_factory.build_config(rotary=RotaryConfig(places=places), registers=2)
    rotary = build_rotary(config.rotary, (2, 3), 3, 8)
    values = torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(0))
    turned = rotate(values, rotary, config)
    assert torch.equal(turned[:, :, :3], values[:, :, :3])
    for token in range(9):
        for pair in range(4):
            first, second = (pair, pair + 4) if places == "normalized" else (2 * pair, 2 * pair + 1)
            angle = math.atan2(float(rotary[1, token, first]), float(rotary[0, token, first]))
            turn = complex(math.cos(angle), math.sin(angle))
            product = torch.complex(values[:, :, token, first], values[:, :, token, second]) * turn
            torch.testing.assert_close(turned[:, :, token, first], product.real)
            torch.testing.assert_close(turned[:, :, token, second], product.imag)


@pytest.mark.parametrize("places", ["normalized", "index"])
def test_a_product_of_turned_vectors_depends_on_their_distance_alone(places: str) -> None:
    """The same query and key everywhere: patches one row and two columns apart have one product."""
    config = model_factory.build_config(rotary=RotaryConfig(places=places), class_token=False, pool="norm-mean")
    rotary = build_rotary(config.rotary, (4, 5), 0, 8)
    generator = torch.Generator().manual_seed(0)
    query, key = (rotate(torch.randn(8, generator=generator).expand(20, 8), rotary, config) for _ in range(2))
    products = (query @ key.T).reshape(4, 5, 4, 5)
    same = torch.stack([products[row, column, row + 1, column + 2] for row in range(3) for column in range(3)])
    torch.testing.assert_close(same, same[:1].expand(9), atol=1e-5, rtol=1e-4)
    assert (products[0, 0, 1, 2] - products[0, 0, 2, 1]).abs() > 1e-3
    torch.testing.assert_close(query.norm(dim=-1), query.norm(dim=-1)[:1].expand(20))


def test_packed_queries_and_keys_are_turned_and_values_are_not() -> None:
    config = model_factory.build_config(rotary=RotaryConfig(places="normalized"))
    rotary = build_rotary(config.rotary, (4, 4), 1, 8)
    qkv = torch.randn(2, 17, 96, generator=torch.Generator().manual_seed(0))
    q, k, v = qkv.unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    parts = (rotate(q, rotary, config), rotate(k, rotary, config), v)
    expected = torch.stack(parts).permute(1, 3, 0, 2, 4).flatten(2)
    torch.testing.assert_close(rotate_packed(qkv, rotary, config), expected)
    plain = model_factory.build_config()
    assert rotate_packed(qkv, None, plain) is qkv
    assert rotate(q, None, plain) is q


def test_half_precision_is_turned_in_float32_and_double_in_double() -> None:
    config = model_factory.build_config(rotary=RotaryConfig(places="index"))
    rotary = build_rotary(config.rotary, (4, 4), 1, 8)
    values = torch.randn(17, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        rotate(values.bfloat16(), rotary, config), rotate(values.bfloat16().float(), rotary, config).bfloat16()
    )
    assert rotate(values.double(), rotary, config).dtype == torch.float64
    values = values.double().requires_grad_()
    torch.autograd.gradcheck(lambda x: rotate(x, rotary, config), values)


def test_angles_kept_from_inference_serve_training_on_any_device() -> None:
    config = RotaryConfig(places="normalized")
    with torch.inference_mode(), torch.device("meta"):
        kept = build_rotary(config, (7, 3), 1, 8)
    assert build_rotary(config, (7, 3), 1, 8) is kept
    assert kept.device.type == "cpu"
    assert not kept.is_inference()
    assert build_rotary(config, (7, 3), 1, 8, torch.device("meta")).device.type == "meta"


# --- tables of relative biases ---------------------------------------------------------------------------------------


def expect_biases(table: Tensor, grid: Grid, *, class_token: bool) -> Tensor:
    """(H, N, N) one by one: a row of steps down, each of which has as many steps to the right."""
    rows, columns = grid
    places = [(row, column) for row in range(rows) for column in range(columns)]
    first = int(class_token)
    expected = torch.zeros(table.shape[1], first + len(places), first + len(places))
    for i, (row, column) in enumerate(places):
        for j, (other_row, other_column) in enumerate(places):
            down, right = row - other_row + rows - 1, column - other_column + columns - 1
            expected[:, first + i, first + j] = table[down * (2 * columns - 1) + right]
    if class_token:
        expected[:, 0, 1:], expected[:, 1:, 0] = table[-3][:, None], table[-2][:, None]
        expected[:, 0, 0] = table[-1]
    return expected


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("grid", [(2, 3), (4, 1), (1, 1), (3, 3)])
def test_biases_are_those_of_a_double_loop(grid: Grid, class_token: bool) -> None:
    size = (8 * grid[0], 8 * grid[1])
    pool = "class" if class_token else "norm-mean"
    config = model_factory.build_config(positions="relative-bias", image_size=size, class_token=class_token, pool=pool)
    table = torch.randn(count_biases(grid), 4, generator=torch.Generator().manual_seed(0))
    biases = compute_relative_bias(table, grid, config)
    assert torch.equal(biases, expect_biases(table, grid, class_token=class_token))


def test_biases_of_another_grid_are_resampled_by_steps_and_those_of_the_class_token_stay() -> None:
    """One row of two patches has the steps -1, 0 and 1; of three patches they are -2 to 2, ends aligned."""
    table = torch.tensor([[0.0], [10.0], [30.0], [1.0], [2.0], [3.0]])
    finer = resample_biases(table, (1, 2), (1, 3), "bilinear-corners")
    assert finer.flatten().tolist() == pytest.approx([0, 5, 10, 20, 30, 1, 2, 3])
    assert resample_biases(table, (1, 2), (1, 2), "bicubic") is table
    config = model_factory.build_config(positions="relative-bias", image_size=(8, 16))
    table = table.expand(6, 4)
    wider = compute_relative_bias(table, (1, 3), config)
    torch.testing.assert_close(wider, expect_biases(finer.expand(8, 4), (1, 3), class_token=True))


def test_every_bias_has_a_gradient_as_often_as_it_is_used() -> None:
    config = model_factory.build_config(positions="relative-bias", image_size=(16, 24))
    table = torch.zeros(count_biases((2, 3)), 4, requires_grad=True)
    compute_relative_bias(table, (2, 3), config).sum().backward()
    assert table.grad is not None
    steps = [(2 - abs(down)) * (3 - abs(right)) for down in (-1, 0, 1) for right in (-2, -1, 0, 1, 2)]
    assert table.grad[:, 0].tolist() == [*steps, 6, 6, 1]
