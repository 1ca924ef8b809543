"""What a model sees of an image, against the view itself; energies in boxes by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail.config import PreprocessConfig
from vitrail.data.transforms import make_eval_input
from vitrail.errors import DataError
from vitrail.visualization.crops import (
    Box,
    BoxAttention,
    compute_crop_box,
    measure_box_attention,
    read_boxes,
    summarize_box_attention,
)

WHOLE = Box(0, 0, 64, 64)


@pytest.mark.parametrize("size", [(200, 300), (300, 200), (64, 64), (201, 333), (1000, 240)])
@pytest.mark.parametrize(
    "preprocess",
    [
        PreprocessConfig(size=(56, 56), resize=(64,), interpolation="bilinear"),
        PreprocessConfig(size=(56, 56), resize=(64,), interpolation="bilinear", crop_rounding="down"),
        PreprocessConfig(size=(40, 80), resize=(48, 96), interpolation="bilinear"),
        PreprocessConfig(size=(64, 64), resize=(64,), interpolation="bilinear"),
    ],
)
def test_the_part_seen_is_what_the_view_shows(size: tuple[int, int], preprocess: PreprocessConfig) -> None:
    """In an image whose pixels say where they are, the view's mean is the middle of the part, its range the extent."""
    height, width = size
    rows = torch.linspace(0, 255, height).round()[:, None].expand(height, width)
    columns = torch.linspace(0, 255, width).round()[None].expand(height, width)
    image = torch.stack([rows, columns, rows]).to(torch.uint8)
    view = make_eval_input(image, preprocess).float()
    part = compute_crop_box(height, width, preprocess)
    down, right = view[0].mean(dim=1), view[1].mean(dim=0)
    for across, low, high, length in ((down, part.top, part.bottom, height), (right, part.left, part.right, width)):
        scale = 255 / length
        assert float(across.mean()) == pytest.approx((low + high) / 2 * scale, abs=1.5)
        steps = (len(across) - 1) / len(across)  # from the middle of the first pixel to that of the last
        assert float(across[-1] - across[0]) == pytest.approx((high - low) * scale * steps, abs=4)


def test_even_attention_has_the_boxes_area() -> None:
    even = np.full((4, 8), 1 / 32, dtype=np.float32)
    for box in (Box(3, 5, 40, 21), WHOLE, Box(10.5, 0, 11, 64)):
        share = measure_box_attention(even, box, WHOLE)
        assert share.energy == pytest.approx(share.area)
        assert share.area == pytest.approx((box.right - box.left) * (box.bottom - box.top) / 64**2)
    assert measure_box_attention(even, WHOLE, WHOLE) == BoxAttention(pytest.approx(1), 1, pytest.approx(1))


def test_energy_by_hand() -> None:
    """One patch of 2 x 2 has all of it: a box over its right half and lower quarter has an eighth."""
    one = np.array([[0, 1], [0, 0]], dtype=np.float32)
    assert measure_box_attention(one, Box(48, 24, 64, 64), WHOLE).energy == pytest.approx(1 / 8)
    assert measure_box_attention(one, Box(0, 0, 32, 64), WHOLE).energy == 0


def test_a_box_is_cut_as_the_image_is() -> None:
    """Of an image 100 wide the model sees columns 20 to 80; a box that begins before counts from there."""
    rollout = np.array([[0.5, 0.3, 0.2]], dtype=np.float32)
    within = Box(20, 0, 80, 10)
    share = measure_box_attention(rollout, Box(0, -5, 50, 10), within)
    assert share.energy == pytest.approx(0.5 + 0.3 / 2)
    assert share.area == pytest.approx(0.5)
    outside = measure_box_attention(rollout, Box(85, 0, 100, 10), within)
    assert (outside.energy, outside.area, outside.center) == (0, 0, 0)


def test_the_bell_is_a_normal_distribution_of_a_quarter() -> None:
    share = measure_box_attention(np.ones((2, 2), dtype=np.float32) / 4, Box(16, 16, 48, 48), WHOLE)
    within_one = math.erf(1 / math.sqrt(2)) / math.erf(2 / math.sqrt(2))  # one deviation of at most two
    assert share.center == pytest.approx(within_one**2)


def test_the_summary_leaves_out_boxes_that_were_cut_off() -> None:
    measurements = [BoxAttention(0.5, 0.25, 0.6), BoxAttention(0.3, 0.35, 0.2), BoxAttention(0, 0, 0)]
    assert summarize_box_attention(measurements) == {
        "images": 2,
        "cut_off": 1,
        "energy": pytest.approx(0.4),
        "area": pytest.approx(0.3),
        "center": pytest.approx(0.4),
        "more_than_area": 0.5,
        "more_than_center": 0.5,
    }


def test_boxes_are_read_with_their_last_pixel(tmp_path: Path) -> None:
    file = tmp_path / "boxes.txt"
    file.write_text(
        "val_0.JPEG\tn03444034\t0\t32\t44\t62\nval 1.JPEG\tn04067472\t52\t55\t52\t59\n\na.jpg b 1 2 3.5 4\n"
    )
    assert read_boxes(file) == {
        "val_0.JPEG": Box(0, 32, 45, 63),
        "val 1.JPEG": Box(52, 55, 53, 60),
        "a.jpg": Box(1, 2, 4.5, 5),
    }


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("a.jpg\tcat\t1\t2\t3", "line 2: 'a.jpg.*is not a name, a class and x0 y0 x1 y1"),
        ("a.jpg\tcat\t1\t2\t3\tx", "line 2"),
        ("a.jpg\tcat\t1\t2\t0\t4", "line 2.*is empty"),
        ("a.jpg\tcat\tnan\t2\t3\t4", "line 2.*is empty"),
        ("a.jpg", "line 2"),
        ("\udcff\x00", "line 2"),
    ],
)
def test_a_line_that_is_no_box_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    file = tmp_path / "boxes.txt"
    file.write_bytes(b"b.jpg c 1 2 3 4\n" + line.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=sentence):
        read_boxes(file)


def test_a_file_without_boxes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "boxes.txt").write_text("\n")
    with pytest.raises(DataError, match="holds no box"):
        read_boxes(tmp_path / "boxes.txt")


def test_tiny_imagenets_boxes_are_all_read(data: Path) -> None:
    file = data / "tinyimagenet200_val_boxes.txt"
    if not file.exists():
        pytest.skip(f"{file} is not there")
    boxes = read_boxes(file)
    assert len(boxes) == 10_000
    assert boxes["val_0.JPEG"] == Box(0, 32, 45, 63)
    assert max(box.right for box in boxes.values()) == 64
