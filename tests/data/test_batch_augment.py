"""Batched augmentation against that of single images: equal to the bit, but for the rounding of the resize."""

from typing import Literal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from tests.data.test_augment import augment_images
from vitrail.config import AugmentConfig, PreprocessConfig
from vitrail.data import augment as single
from vitrail.data import batch_augment
from vitrail.data.augment import RANDAUGMENT_OPS, RandAugmentParams
from vitrail.data.randomness import CounterRNG

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NO_RESIZE = PreprocessConfig(size=(40, 48), resize=(40, 48))


def noise(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def make_images(count: int, channels: int = 3, height: int = 40, width: int = 48) -> Tensor:
    """Half noise, half smooth images of few levels, whose histograms have gaps and whose channels are not full."""
    coarse = noise(count, channels, 6, 7).float() * torch.linspace(0, 1, count)[:, None, None, None]
    smooth = F.interpolate(coarse, (height, width), mode="bilinear").byte()
    return torch.cat([smooth[::2], noise(count, channels, height, width)[1::2]])


def make_rng(count: int) -> CounterRNG:
    return CounterRNG(3, np.arange(count))


def with_channels(preprocess: PreprocessConfig, channels: int) -> PreprocessConfig:
    return PreprocessConfig(
        size=preprocess.size,
        resize=preprocess.resize,
        interpolation=preprocess.interpolation,
        mean=(0.5,) * channels,
        std=(1,) * channels,
    )


def augment_singly(pixels: Tensor, augment: AugmentConfig, preprocess: PreprocessConfig) -> Tensor:
    images = [image.permute(1, 2, 0).contiguous().permute(2, 0, 1) for image in pixels]  # as `decode` lays them out
    return augment_images(images, make_rng(len(pixels)), augment, preprocess)


@pytest.mark.parametrize("magnitude", [0, 3, 10, 15, 30])
@pytest.mark.parametrize("name", RANDAUGMENT_OPS)
@pytest.mark.parametrize("device", DEVICES)
def test_every_operation_is_that_of_single_images(device: str, name: str, magnitude: int) -> None:
    for channels in (1, 3):
        pixels = make_images(24, channels)
        many = single._draw_randaugment(CounterRNG(1, np.arange(4000)), (1, magnitude), (40, 48))
        rows = np.flatnonzero(many.op_index[:, 0] == RANDAUGMENT_OPS.index(name))[:24]
        operations = RandAugmentParams(*(field[rows] for field in many))
        result = pixels.to(device, copy=True)
        batch_augment.apply_randaugment(result, operations, magnitude)
        for index, image in enumerate(pixels):
            picture = Image.fromarray(image.permute(1, 2, 0).squeeze(2).contiguous().numpy())
            expected = np.array(single.apply_randaugment(picture, operations, index, magnitude)).reshape(
                40, 48, channels
            )
            assert np.array_equal(result[index].cpu().permute(1, 2, 0).numpy(), expected), index


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_without_a_resize_everything_together_is_equal_to_the_bit(device: str, channels: int) -> None:
    pixels, preprocess = make_images(64, channels), with_channels(NO_RESIZE, channels)
    for augment in (
        AugmentConfig(crop="pad"),
        AugmentConfig(crop="squash"),
        AugmentConfig(crop="pad", jitter=0.5),
        AugmentConfig(crop="pad", erase=0.5),
        AugmentConfig(crop="pad", randaugment=(3, 15), jitter=0.5, erase=0.5),
    ):
        ours = batch_augment.make_train_inputs(pixels.to(device), make_rng(64), augment, preprocess)
        assert ours.dtype == torch.uint8
        assert torch.equal(ours.cpu(), augment_singly(pixels, augment, preprocess)), augment


def test_a_window_without_a_resize_is_equal_to_the_bit() -> None:
    pixels, preprocess = make_images(64), PreprocessConfig(size=(32, 40), resize=(40, 48))
    augment = AugmentConfig(crop="window")
    assert torch.equal(
        batch_augment.make_train_inputs(pixels, make_rng(64), augment, preprocess),
        augment_singly(pixels, augment, preprocess),
    )


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
    pixels = make_images(48)
    preprocess = PreprocessConfig(size=size, resize=(72, 70), interpolation=interpolation)
    augment = AugmentConfig(crop=crop)
    ours = batch_augment.make_train_inputs(pixels.to(device), make_rng(48), augment, preprocess).cpu().int()
    difference = (ours - augment_singly(pixels, augment, preprocess).int()).abs()
    assert difference.max() <= 2
    assert difference.float().mean() < 0.1


def test_jitter_by_formula() -> None:
    """Brightness blends with black, contrast with the mean gray, saturation with the gray of each pixel."""
    pixels = make_images(30)
    jitter = single._draw_color_jitter(make_rng(30), 0.5)
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)[:, None, None]
    for kind in range(3):
        alone = single.ColorJitterParams(np.full((30, 1), kind), jitter.factor)
        ours = batch_augment.apply_color_jitter(pixels, alone).double()
        factor = torch.from_numpy(jitter.factor[:, kind])[:, None, None, None]
        gray = (pixels * weights).sum(dim=1, keepdim=True)
        blank = [torch.zeros(1), gray.mean(dim=(2, 3), keepdim=True), gray][kind]
        expected = (blank + factor * (pixels - blank)).clamp(0, 255)
        assert (ours - expected).abs().max() < 1.6  # rounded down, from a gray that is rounded too


def test_the_noise_hashed_on_the_device_is_that_of_the_rng() -> None:
    for count in (8, 13, 3072):
        expected = make_rng(5).bits("erase-noise", -(-count // 8)).astype("<u8").view(np.uint8)[:, :count]
        assert np.array_equal(
            batch_augment._generate_erase_noise(make_rng(5), count, torch.device("cpu")).numpy(), expected
        )


def test_the_original_pixels_are_not_changed() -> None:
    pixels = make_images(32)
    before = pixels.clone()
    augment = AugmentConfig(crop="squash", flip=False, randaugment=(2, 10), jitter=0.5, erase=1.0)
    batch_augment.make_train_inputs(pixels, make_rng(32), augment, NO_RESIZE)
    assert torch.equal(pixels, before)


def test_an_input_does_not_depend_on_its_batch() -> None:
    pixels, preprocess = make_images(32), PreprocessConfig(size=(32, 32), resize=(36,))
    augment = AugmentConfig(crop="pad", randaugment=(2, 15), jitter=0.5, erase=0.5)
    whole = batch_augment.make_train_inputs(pixels, make_rng(32), augment, preprocess)
    parts = [
        batch_augment.make_train_inputs(pixels[start:end], CounterRNG(3, np.arange(start, end)), augment, preprocess)
        for start, end in ((0, 1), (1, 14), (14, 32))
    ]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("crop", ["inception", "window", "pad", "squash"])
def test_no_images_give_no_inputs(crop: Literal["inception", "window", "pad", "squash"]) -> None:
    augment = AugmentConfig(crop=crop, randaugment=(2, 15), jitter=0.5, erase=0.5)
    inputs = batch_augment.make_train_inputs(
        make_images(4)[:0], make_rng(0), augment, PreprocessConfig(size=(32, 36), resize=(36, 40))
    )
    assert inputs.shape == (0, 3, 32, 36)
    assert inputs.dtype == torch.uint8
