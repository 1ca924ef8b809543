"""Batched views against the single ones: to the bit, but for the resize, whose weights are rounded on the CPU."""

from typing import Literal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from tests.data.test_augment import views_of
from vitrail.config import AugmentConfig, PreprocessConfig
from vitrail.data import augment as single
from vitrail.data import gpu_augment
from vitrail.data.augment import RANDAUGMENT_OPS, RandAugmentParams
from vitrail.data.counter_rng import CounterRNG

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NO_RESIZE = PreprocessConfig(size=(40, 48), resize=(40, 48))


def noise(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def photos(count: int, channels: int = 3, height: int = 40, width: int = 48) -> Tensor:
    """Half noise, half smooth images of few levels, whose histograms have gaps and whose channels are not full."""
    coarse = noise(count, channels, 6, 7).float() * torch.linspace(0, 1, count)[:, None, None, None]
    smooth = F.interpolate(coarse, (height, width), mode="bilinear").byte()
    return torch.cat([smooth[::2], noise(count, channels, height, width)[1::2]])


def draws(count: int) -> CounterRNG:
    return CounterRNG(3, np.arange(count))


def with_channels(view: PreprocessConfig, channels: int) -> PreprocessConfig:
    return PreprocessConfig(
        size=view.size,
        resize=view.resize,
        interpolation=view.interpolation,
        mean=(0.5,) * channels,
        std=(1,) * channels,
    )


def singly(pixels: Tensor, augment: AugmentConfig, view: PreprocessConfig) -> Tensor:
    images = [image.permute(1, 2, 0).contiguous().permute(2, 0, 1) for image in pixels]  # as `decode` lays them out
    return views_of(images, draws(len(pixels)), augment, view)


@pytest.mark.parametrize("magnitude", [0, 3, 10, 15, 30])
@pytest.mark.parametrize("name", RANDAUGMENT_OPS)
@pytest.mark.parametrize("device", DEVICES)
def test_every_operation_is_that_of_single_images(device: str, name: str, magnitude: int) -> None:
    for channels in (1, 3):
        pixels = photos(24, channels)
        many = single._draw_randaugment(CounterRNG(1, np.arange(4000)), (1, magnitude), (40, 48))
        rows = np.flatnonzero(many.op_index[:, 0] == RANDAUGMENT_OPS.index(name))[:24]
        operations = RandAugmentParams(*(field[rows] for field in many))
        result = pixels.to(device, copy=True)
        gpu_augment.apply_randaugment(result, operations, magnitude)
        for index, image in enumerate(pixels):
            picture = Image.fromarray(image.permute(1, 2, 0).squeeze(2).contiguous().numpy())
            expected = np.array(single.apply_randaugment(picture, operations, index, magnitude)).reshape(
                40, 48, channels
            )
            assert np.array_equal(result[index].cpu().permute(1, 2, 0).numpy(), expected), index


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_without_a_resize_everything_together_is_equal_to_the_bit(device: str, channels: int) -> None:
    pixels, view = photos(64, channels), with_channels(NO_RESIZE, channels)
    for augment in (
        AugmentConfig(crop="pad"),
        AugmentConfig(crop="squash"),
        AugmentConfig(crop="pad", jitter=0.5),
        AugmentConfig(crop="pad", erase=0.5),
        AugmentConfig(crop="pad", randaugment=(3, 15), jitter=0.5, erase=0.5),
    ):
        ours = gpu_augment.make_train_inputs(pixels.to(device), draws(64), augment, view)
        assert ours.dtype == torch.uint8
        assert torch.equal(ours.cpu(), singly(pixels, augment, view)), augment


def test_a_window_without_a_resize_is_equal_to_the_bit() -> None:
    pixels, view = photos(64), PreprocessConfig(size=(32, 40), resize=(40, 48))
    augment = AugmentConfig(crop="window")
    assert torch.equal(gpu_augment.make_train_inputs(pixels, draws(64), augment, view), singly(pixels, augment, view))


@pytest.mark.parametrize("size", [(24, 32), (64, 56)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop", ["inception", "window", "pad", "squash"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_resize_is_that_of_single_images_up_to_rounding(
    device: str,
    crop: Literal["inception", "window", "pad", "squash"],
    interpolation: Literal["bilinear", "bicubic"],
    size: tuple[int, int],
) -> None:
    """Never more than two levels off, and on average a tenth of one at most: the same filter at the same place."""
    pixels = photos(48)
    view = PreprocessConfig(size=size, resize=(72, 70), interpolation=interpolation)
    augment = AugmentConfig(crop=crop)
    ours = gpu_augment.make_train_inputs(pixels.to(device), draws(48), augment, view).cpu().int()
    difference = (ours - singly(pixels, augment, view).int()).abs()
    assert difference.max() <= 2
    assert difference.float().mean() < 0.1


def test_jitter_by_formula() -> None:
    """Brightness blends with black, contrast with the mean grey, saturation with the grey of each pixel."""
    pixels = photos(30)
    jitter = single._draw_color_jitter(draws(30), 0.5)
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)[:, None, None]
    for kind in range(3):
        alone = single.ColorJitterParams(np.full((30, 1), kind), jitter.factor)
        ours = gpu_augment.apply_color_jitter(pixels, alone).double()
        factor = torch.from_numpy(jitter.factor[:, kind])[:, None, None, None]
        grey = (pixels * weights).sum(dim=1, keepdim=True)
        blank = [torch.zeros(1), grey.mean(dim=(2, 3), keepdim=True), grey][kind]
        expected = (blank + factor * (pixels - blank)).clamp(0, 255)
        assert (ours - expected).abs().max() < 1.6  # rounded down, from a grey that is rounded too


def test_the_noise_hashed_on_the_device_is_that_of_the_draws() -> None:
    for count in (8, 13, 3072):
        expected = draws(5).bits("erase-noise", -(-count // 8)).astype("<u8").view(np.uint8)[:, :count]
        assert np.array_equal(gpu_augment._generate_erase_noise(draws(5), count, torch.device("cpu")).numpy(), expected)


def test_the_pixels_given_stay_as_they_are() -> None:
    pixels = photos(32)
    before = pixels.clone()
    augment = AugmentConfig(crop="squash", flip=False, randaugment=(2, 10), jitter=0.5, erase=1.0)
    gpu_augment.make_train_inputs(pixels, draws(32), augment, NO_RESIZE)
    assert torch.equal(pixels, before)


def test_a_view_does_not_depend_on_the_batch_it_is_in() -> None:
    pixels, view = photos(32), PreprocessConfig(size=(32, 32), resize=(36,))
    augment = AugmentConfig(crop="pad", randaugment=(2, 15), jitter=0.5, erase=0.5)
    whole = gpu_augment.make_train_inputs(pixels, draws(32), augment, view)
    parts = [
        gpu_augment.make_train_inputs(pixels[start:end], CounterRNG(3, np.arange(start, end)), augment, view)
        for start, end in ((0, 1), (1, 14), (14, 32))
    ]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("crop", ["inception", "window", "pad", "squash"])
def test_no_images_give_no_views(crop: Literal["inception", "window", "pad", "squash"]) -> None:
    augment = AugmentConfig(crop=crop, randaugment=(2, 15), jitter=0.5, erase=0.5)
    found = gpu_augment.make_train_inputs(
        photos(4)[:0], draws(0), augment, PreprocessConfig(size=(32, 36), resize=(36, 40))
    )
    assert found.shape == (0, 3, 32, 36)
    assert found.dtype == torch.uint8
