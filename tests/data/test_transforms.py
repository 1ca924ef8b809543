"""The evaluation crop by hand and against torchvision, and normalization by hand."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.conftest import peer
from vitrail.config import PreprocessConfig
from vitrail.data.transforms import PIL_RESAMPLING, compute_resize_size, make_eval_input, normalize
from vitrail.errors import DataError


def noise(height: int, width: int) -> Tensor:
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [(300, 400), (401, 300), (256, 256), (100, 333), (257, 512), (259, 259)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_short_side_and_center_crop_are_torchvisions_to_the_bit(size: tuple[int, int], interpolation: str) -> None:
    peer("torchvision")
    from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

    image = noise(*size)
    theirs = Compose([Resize(256, InterpolationMode(interpolation)), CenterCrop(224)])
    expected = np.array(theirs(Image.fromarray(image.permute(1, 2, 0).numpy())))
    preprocess = PreprocessConfig(
        size=(224, 224), resize=(256,), interpolation="bicubic" if interpolation == "bicubic" else "bilinear"
    )
    assert np.array_equal(make_eval_input(image, preprocess).permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("interpolation", list(PIL_RESAMPLING))
def test_rows_are_resized_first_with_any_pillow(interpolation: str) -> None:
    """Pillow 13 begins with columns for some of these shapes, and its pixels differ."""
    draw = np.random.default_rng(0)
    for number in range(60):
        height, width, short = (int(side) for side in draw.integers(1, 90, 3))
        size = (int(draw.integers(1, short + 1)), int(draw.integers(1, short + 1)))
        resize = (short,) if number % 2 else (short, size[1])
        preprocess = PreprocessConfig(size=size, resize=resize, interpolation=cast(Any, interpolation))
        image = noise(height, width)
        rows, columns = compute_resize_size(height, width, preprocess)
        wide = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((columns, height), PIL_RESAMPLING[interpolation])
        whole = wide.resize((columns, rows), PIL_RESAMPLING[interpolation])
        top, left = round((rows - size[0]) / 2), round((columns - size[1]) / 2)
        expected = np.array(whole)[top : top + size[0], left : left + size[1]]
        assert np.array_equal(make_eval_input(image, preprocess).permute(1, 2, 0).numpy(), expected)


def test_two_numbers_ignore_the_shape() -> None:
    image = noise(50, 70)
    preprocess = PreprocessConfig(size=(32, 40), resize=(32, 40), interpolation="bilinear")
    expected = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((40, 32), Image.Resampling.BILINEAR)
    assert np.array_equal(make_eval_input(image, preprocess).permute(1, 2, 0).numpy(), np.array(expected))


def test_an_image_of_the_right_size_is_not_touched() -> None:
    image = noise(32, 32)
    assert torch.equal(make_eval_input(image, PreprocessConfig(size=(32, 32), resize=(32,))), image)
    assert torch.equal(make_eval_input(image, PreprocessConfig(size=(16, 20), resize=(32, 32))), image[:, 8:24, 6:26])


def test_a_thin_strip_is_cropped_where_its_long_side_is_long() -> None:
    assert make_eval_input(noise(3, 4000), PreprocessConfig(size=(16, 16), resize=(16,))).shape == (3, 16, 16)
    assert make_eval_input(noise(1, 1), PreprocessConfig(size=(16, 16), resize=(18,))).shape == (3, 16, 16)


def test_an_image_too_thin_to_resize_is_refused_before_it_takes_the_memory() -> None:
    with pytest.raises(DataError, match="20000 x 1 pixels is too thin"):
        make_eval_input(noise(20_000, 1), PreprocessConfig(size=(224, 224), resize=(256,)))


def test_one_channel_stays_one() -> None:
    assert (
        make_eval_input(
            noise(40, 30)[:1], PreprocessConfig(size=(16, 16), resize=(18,), mean=(0.5,), std=(0.5,))
        ).shape[0]
        == 1
    )


def test_normalize_by_hand() -> None:
    preprocess = PreprocessConfig(size=(1, 1), resize=(1,), mean=(0.5, 0.0, 0.25), std=(0.5, 1.0, 0.25))
    pixels = torch.tensor([255, 51, 0], dtype=torch.uint8).reshape(1, 3, 1, 1)
    torch.testing.assert_close(normalize(pixels, preprocess).flatten(), torch.tensor([1.0, 0.2, -1.0]))
