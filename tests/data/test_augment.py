"""Training augmentation: the laws of its parameters, and each operation by hand, formula, Pillow or torchvision."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from tests.conftest import peer
from vitrail.config import AugmentConfig, PreprocessConfig
from vitrail.data import augment as module
from vitrail.data.augment import (
    RANDAUGMENT_OPS,
    AugmentParams,
    RandAugmentParams,
    build_level_table,
    draw_augment_params,
    make_train_inputs,
)
from vitrail.data.randomness import CounterRNG
from vitrail.data.transforms import make_eval_input
from vitrail.errors import DataError

PREPROCESS = PreprocessConfig(size=(32, 32), resize=(36,))
LARGE = PreprocessConfig(size=(224, 224), resize=(256,))


def augment_images(
    images: Sequence[Tensor], rng: CounterRNG, augment: AugmentConfig, preprocess: PreprocessConfig
) -> Tensor:
    """Augment images that are loaded already; rows below a crop must not matter, so they are corrupted."""

    def load(index: int, rows: int) -> Tensor:
        image = images[index].clone()
        image[:, rows:] = 255 - image[:, rows:]
        return image

    sizes = np.array([image.shape[1:] for image in images], dtype=np.int64)
    return make_train_inputs(load, sizes, rng, augment, preprocess)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def make_rng(count: int, seed: int = 5) -> CounterRNG:
    return CounterRNG(seed, np.arange(count))


def draw_params(
    count: int, augment: AugmentConfig, preprocess: PreprocessConfig = PREPROCESS, height: int = 1000, width: int = 1000
) -> AugmentParams:
    return draw_augment_params(make_rng(count), np.full(count, height), np.full(count, width), augment, preprocess)


def assert_uniform(values: ArrayLike) -> None:
    """Kolmogorov's distance from the uniform law on [0, 1] is one that chance exceeds once in a thousand."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    distance = np.abs(ordered - (np.arange(len(ordered)) + 0.5) / len(ordered)).max()
    assert distance < 1.95 / math.sqrt(len(ordered)), distance


def assert_same_law(ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> None:
    """The two samples' distributions are no farther apart than chance takes them once in a thousand."""
    both = np.union1d(ours, theirs)
    fractions = [np.searchsorted(np.sort(sample), both, side="right") / len(sample) for sample in (ours, theirs)]
    assert np.abs(fractions[0] - fractions[1]).max() < 1.95 * math.sqrt(1 / len(ours) + 1 / len(theirs))


def to_pillow(image: Tensor) -> Image.Image:
    pixels = image.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(pixels[..., 0] if len(image) == 1 else pixels)


def apply_op(image: Tensor, name: str, magnitude: int, sign: int = 1) -> Tensor:
    """The image after one operation, as it is drawn at the first position that has it with this sign."""
    rng, size = make_rng(1000), (image.shape[1], image.shape[2])
    operations = module._draw_randaugment(rng, (1, magnitude), size)
    negative = rng.integers("randaugment-sign", 1, 2)[:, 0] == 1
    index = np.flatnonzero((operations.op_index[:, 0] == RANDAUGMENT_OPS.index(name)) & (negative == (sign < 0)))[0]
    result = np.array(module.apply_randaugment(to_pillow(image), operations, int(index), magnitude))
    return torch.from_numpy(result.reshape(*size, -1)).permute(2, 0, 1)


def test_an_inception_crop_has_a_uniform_area_a_log_uniform_shape_and_a_uniform_place() -> None:
    """Up to half of a square image, every first try fits, so nothing is conditioned on fitting."""
    part = draw_params(4000, AugmentConfig(area=(0.05, 0.5)), height=4000, width=4000).crops.source_box
    top, left, height, width = part.T
    area, shape = (height * width / 4000**2 - 0.05) / 0.45, np.log(width / height) / np.log(4 / 3)
    assert_uniform(area)
    assert_uniform((shape + 1) / 2)
    assert_uniform((top + 0.5) / (4001 - height))
    assert_uniform((left + 0.5) / (4001 - width))
    correlation = np.corrcoef([area, shape, top / (4000 - height), left / (4000 - width)])
    assert np.abs(correlation - np.eye(4)).max() < 0.06


def test_inception_crops_have_torchvisions_law() -> None:
    peer("torchvision")
    from torchvision.transforms import RandomResizedCrop

    torch.manual_seed(0)
    image = torch.zeros(1, 300, 500)
    theirs = [RandomResizedCrop.get_params(image, [0.05, 1.0], [3 / 4, 4 / 3]) for _ in range(3000)]
    ours = draw_params(3000, AugmentConfig(), height=300, width=500).crops.source_box
    for axis in range(4):
        assert_same_law(ours[:, axis], np.array(theirs)[:, axis])


@pytest.mark.parametrize(
    ("size", "part"),
    [((300, 900), (0, 250, 300, 400)), ((900, 300), (250, 0, 400, 300)), ((300, 350), (0, 0, 300, 350))],
)
def test_where_no_crop_fits_the_largest_middle_one_of_a_fair_shape_is_taken(
    size: tuple[int, int], part: tuple[int, ...]
) -> None:
    crops = draw_params(50, AugmentConfig(area=(1.0, 1.0)), height=size[0], width=size[1]).crops.source_box
    assert (crops == part).all()


def test_a_try_that_fills_a_side_fits() -> None:
    part = draw_params(100, AugmentConfig(area=(0.5, 0.5)), height=1, width=2).crops.source_box
    assert (part[:, 2:] == 1).all()
    assert 30 < part[:, 1].sum() < 70  # placed at random, where the middle crop stands always on the left


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1), (2, 3)])
def test_a_tiny_image_has_a_crop(size: tuple[int, int]) -> None:
    part = draw_params(200, AugmentConfig(), height=size[0], width=size[1]).crops.source_box
    assert (part[:, :2] >= 0).all()
    assert (part[:, 2:] >= 1).all()
    assert (part[:, :2] + part[:, 2:] <= size).all()
    assert augment_images([noise(3, *size)], make_rng(1), AugmentConfig(), PREPROCESS).shape == (1, 3, 32, 32)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_crop_is_resized_as_by_pillow(interpolation: Literal["bilinear", "bicubic"]) -> None:
    """Across, then down, to within two levels and mostly the same: both round their weights, and in between."""
    preprocess, filtering = (
        PreprocessConfig(size=(24, 40), resize=(48,), interpolation=interpolation),
        interpolation.upper(),
    )
    images = [noise(3, 60 + 7 * index, 90 - 5 * index, seed=index) for index in range(8)]
    sizes = np.array([image.shape[1:] for image in images])
    parts = draw_augment_params(
        make_rng(8), sizes[:, 0], sizes[:, 1], AugmentConfig(flip=False), preprocess
    ).crops.source_box
    inputs = augment_images(images, make_rng(8), AugmentConfig(flip=False), preprocess)
    for image, (top, left, height, width), ours in zip(images, parts, inputs, strict=True):
        cut, resampling = to_pillow(image).crop((left, top, left + width, top + height)), Image.Resampling[filtering]
        theirs = np.array(cut.resize((40, int(height)), resampling).resize((40, 24), resampling)).transpose(2, 0, 1)
        difference = np.abs(ours.numpy().astype(int) - theirs)
        assert difference.max() <= 2
        assert difference.mean() < 0.05


def test_overshoot_at_an_edge_is_clamped() -> None:
    edge = torch.zeros(3, 8, 8, dtype=torch.uint8)
    edge[:, :, 4:] = 255
    row = augment_images([edge], make_rng(1), AugmentConfig(crop="squash", flip=False), PREPROCESS)[0, 0, 16].int()
    assert (row.diff() >= 0).all()
    assert row[0] == 0
    assert row[-1] == 255


def test_a_window_is_one_of_the_image_resized_as_for_evaluation() -> None:
    image = noise(3, 80, 50)
    whole = make_eval_input(image, PreprocessConfig(size=(57, 36), resize=(57, 36))).int()
    inputs = augment_images([image] * 300, make_rng(300), AugmentConfig(crop="window", flip=False), PREPROCESS).int()
    corners = draw_params(300, AugmentConfig(crop="window"), height=80, width=50).crops.crop_offset
    assert set(corners[:, 0]) == set(range(26))
    assert set(corners[:, 1]) == set(range(5))
    for crop, (top, left) in zip(inputs, corners, strict=True):
        assert (crop - whole[:, top : top + 32, left : left + 32]).abs().max() <= 1


def test_an_image_too_thin_for_a_window_is_refused_before_it_takes_the_memory() -> None:
    with pytest.raises(DataError, match="20000 x 1 pixels is too thin: resized it has 5120000 x 256"):
        augment_images([noise(3, 20_000, 1)], make_rng(1), AugmentConfig(crop="window"), LARGE)


def test_padding_reflects_an_eighth_and_shifts_by_up_to_as_much() -> None:
    image = noise(3, 32, 32)
    padded = np.pad(image.numpy(), ((0, 0), (4, 4), (4, 4)), mode="reflect")
    corners = draw_params(400, AugmentConfig(crop="pad"), height=32, width=32).crops.crop_offset
    assert set(corners[:, 0]) == set(corners[:, 1]) == set(range(-4, 5))
    inputs = augment_images([image] * 400, make_rng(400), AugmentConfig(crop="pad", flip=False), PREPROCESS)
    for pixels, (top, left) in zip(inputs.numpy(), corners + 4, strict=True):
        assert np.array_equal(pixels, padded[:, top : top + 32, left : left + 32])


def test_half_of_the_crops_are_flipped_and_otherwise_unchanged() -> None:
    images, flipped = [noise(3, 40, 50)] * 200, draw_params(200, AugmentConfig(), height=40, width=50).crops.flip
    assert 70 < flipped.sum() < 130
    for crop in ("inception", "window", "pad", "squash"):
        plain = augment_images(images, make_rng(200), AugmentConfig(crop=crop, flip=False), PREPROCESS)
        mirrored = augment_images(images, make_rng(200), AugmentConfig(crop=crop), PREPROCESS)
        chosen = torch.from_numpy(flipped)
        assert torch.equal(mirrored[~chosen], plain[~chosen])
        assert torch.equal(mirrored[chosen], plain[chosen].flip(3))


def test_enabling_one_augmentation_changes_no_other() -> None:
    everything = draw_params(50, AugmentConfig(randaugment=(2, 10), jitter=0.4, erase=0.5))
    assert np.array_equal(everything.crops.source_box, draw_params(50, AugmentConfig()).crops.source_box)
    assert np.array_equal(everything.crops.flip, draw_params(50, AugmentConfig(crop="pad")).crops.flip)
    alone, more = (draw_params(50, AugmentConfig(randaugment=(count, 10))).randaugment for count in (2, 3))
    assert everything.randaugment is not None
    for both, single, longer in zip(everything.randaugment, alone or (), more or (), strict=True):
        assert np.array_equal(both, single)
        assert np.array_equal(both, longer[:, :2])
    jitter = draw_params(50, AugmentConfig(jitter=0.4)).color_jitter
    assert everything.color_jitter is not None
    assert jitter is not None
    assert np.array_equal(everything.color_jitter.order, jitter.order)
    assert np.array_equal(everything.color_jitter.factor, jitter.factor)
    assert np.array_equal(everything.erase_boxes, draw_params(50, AugmentConfig(erase=0.5)).erase_boxes)


def test_an_input_does_not_depend_on_its_chunk() -> None:
    augment = AugmentConfig(randaugment=(2, 15), jitter=0.4, erase=0.5)
    images = [noise(3, 40 + index, 60 - index, seed=index) for index in range(12)]
    whole = augment_images(images, CounterRNG(1, np.arange(100, 112)), augment, PREPROCESS)
    for index in torch.randperm(12, generator=torch.Generator().manual_seed(0)).tolist():
        single = augment_images([images[index]], CounterRNG(1, np.array([100 + index])), augment, PREPROCESS)
        assert torch.equal(single[0], whole[index])
    assert not torch.equal(augment_images(images, CounterRNG(2, np.arange(100, 112)), augment, PREPROCESS), whole)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_original_images_are_not_changed(channels: int) -> None:
    images = [noise(channels, 32, 32, seed=index) for index in range(40)]
    before = [image.clone() for image in images]
    preprocess = PreprocessConfig(size=(32, 32), resize=(32,), mean=(0.5,) * channels, std=(0.5,) * channels)
    augment = AugmentConfig(crop="squash", randaugment=(3, 10), jitter=0.4, erase=1.0)
    inputs = augment_images(images, make_rng(40), augment, preprocess)
    assert inputs.shape == (40, channels, 32, 32)
    assert all(torch.equal(image, old) for image, old in zip(images, before, strict=True))


@pytest.mark.parametrize(
    ("name", "magnitude", "expected"),
    [
        ("invert", 10, {0: 255, 1: 254, 200: 55, 255: 0}),
        ("posterize", 10, {0: 0, 15: 0, 16: 16, 200: 192, 255: 240}),  # 4 bits
        ("posterize", 15, {3: 0, 4: 4, 255: 252}),  # 6 bits
        ("posterize", 20, {3: 3, 255: 255}),  # 8 bits
        ("posterize", 0, {127: 0, 128: 128, 255: 128}),
        ("posterize", 30, {3: 3, 255: 255}),
        ("solarize", 5, {0: 0, 127: 127, 128: 127, 200: 55, 255: 0}),
        ("solarize", 0, {0: 255, 255: 0}),
        ("solarize", 10, {0: 0, 128: 128, 255: 255}),
        ("solarize", 15, {0: 0, 255: 255}),
        ("solarize-add", 10, {0: 110, 127: 237, 128: 128, 255: 255}),
        ("solarize-add", 15, {0: 165, 90: 255, 127: 255, 128: 128}),
        ("brightness", 10, {0: 0, 100: 190, 134: 254, 135: 255, 255: 255}),  # times 1.9
        ("brightness", 0, {100: 10, 255: 25}),
        ("contrast", 10, {196: 196, 100: 13, 92: 0, 220: 241, 255: 255}),  # 196 + 1.9 (level - 196)
        ("contrast", 5, {0: 0, 100: 100, 255: 255}),  # times 1
    ],
)
def test_levels_by_hand(name: str, magnitude: int, expected: dict[int, int]) -> None:
    table = build_level_table(name, magnitude)
    assert table is not None
    assert {level: int(table[level]) for level in expected} == expected
    image = noise(3, 8, 9)
    assert np.array_equal(apply_op(image, name, magnitude).numpy(), table[image.numpy()])


@pytest.mark.parametrize("magnitude", [3, 5, 10, 15])
def test_levels_are_pillows_where_pillow_has_the_operation(magnitude: int) -> None:
    image, strength = noise(3, 16, 16), magnitude / 10
    for name, theirs in {
        "invert": ImageOps.invert(to_pillow(image)),
        "posterize": ImageOps.posterize(to_pillow(image), max(int(4 * strength), 1)),
        "solarize": ImageOps.solarize(to_pillow(image), int(256 * strength)),
        "brightness": ImageEnhance.Brightness(to_pillow(image)).enhance(strength * 1.8 + 0.1),
    }.items():
        assert np.array_equal(apply_op(image, name, magnitude).permute(1, 2, 0).numpy(), np.array(theirs)), name


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("magnitude", [3, 10, 15])
@pytest.mark.parametrize("name", ["rotate", "shear-x", "shear-y", "translate-x", "translate-y"])
def test_moves_by_formula(name: str, magnitude: int, sign: int) -> None:
    """Pixel (x, y) shows the nearest one to where the authors' matrices send it, or gray 128 outside of the image."""
    image, level = noise(3, 56, 112), sign * magnitude / 10
    y, x = np.mgrid[:56, :112].astype(float)
    if name == "rotate":  # about the middle; complex numbers turn
        turned = (x - 55.5 + 1j * (y - 27.5)) * np.exp(1j * math.radians(30 * level))
        x, y = turned.real + 55.5, turned.imag + 27.5
    elif name == "shear-x":
        x = x + 0.3 * level * y
    elif name == "shear-y":
        y = y + 0.3 * level * x
    elif name == "translate-x":
        x = x + round(100 * level / 2)  # 112 pixels are half of the authors' 224
    else:
        y = y + round(100 * level / 4)
    column, row = np.floor(x + 0.5).astype(int), np.floor(y + 0.5).astype(int)
    inside = (column >= 0) & (column < 112) & (row >= 0) & (row < 56)
    expected = np.where(inside, image.numpy()[:, row.clip(0, 55), column.clip(0, 111)], 128)
    clear = np.maximum(np.abs(x - column), np.abs(y - row)) < 0.495  # not on the line between two pixels
    assert clear.mean() > 0.8
    ours = apply_op(image, name, magnitude, sign).numpy()
    assert np.array_equal(ours[:, clear], expected[:, clear])


def test_the_authors_pixels_at_224_and_half_of_them_at_112() -> None:
    for side, shift, half in ((224, 100, 40), (112, 50, 20)):
        image = noise(1, side, side)
        moved = apply_op(image, "translate-x", 10)
        assert torch.equal(moved[:, :, :-shift], image[:, :, shift:])
        assert (moved[:, :, -shift:] == 128).all()
        cutout = module._draw_randaugment(make_rng(300), (1, 10), (side, side)).cutout_box[:, 0]
        assert cutout[:, 2:].max() == 2 * half
        assert cutout[:, 2:].min() >= half  # a center in the corner keeps a quarter of the square
        assert (cutout[:, :2] + cutout[:, 2:] <= side).all()


def test_cutout_by_hand() -> None:
    image = noise(3, 9, 9)
    operations = RandAugmentParams(
        np.array([[RANDAUGMENT_OPS.index("cutout")]]), np.zeros((1, 1, 6)), np.array([[[0, 3, 2, 4]]])
    )
    expected = image.clone()
    expected[:, 0:2, 3:7] = 128
    ours = np.array(module.apply_randaugment(to_pillow(image), operations, 0, 10)).transpose(2, 0, 1)
    assert np.array_equal(ours, expected.numpy())


def test_a_cutouts_center_is_any_pixel() -> None:
    """Ends that the border does not clip give the center away: it is uniform over the whole image."""
    cutout = module._draw_randaugment(make_rng(4000), (1, 5), (224, 224)).cutout_box[:, 0]
    top, height = cutout[:, 0], cutout[:, 2]
    center = np.where(top > 0, top + 20, height - 20)
    assert center.min() == 0
    assert center.max() == 223
    assert_uniform((center + 0.5) / 224)


def test_operations_and_their_signs_are_drawn_evenly() -> None:
    operations = module._draw_randaugment(make_rng(8000), (2, 10), (32, 32))
    counts = np.bincount(operations.op_index.ravel(), minlength=16)
    assert ((counts - 1000) ** 2 / 1000).sum() < 37.7  # chi-square of 15 degrees: once in a thousand
    shear = operations.affine[operations.op_index == RANDAUGMENT_OPS.index("shear-x")][:, 1]
    assert set(shear) == {round(0.3 * 65536), -round(0.3 * 65536)}
    assert abs((shear > 0).mean() - 0.5) < 0.06


@pytest.mark.parametrize("name", RANDAUGMENT_OPS)
def test_a_gray_image_is_treated_as_an_rgb_one_of_equal_channels(name: str) -> None:
    gray = noise(1, 20, 24) // 2 + 30
    assert torch.equal(apply_op(gray, name, 8).expand(3, -1, -1), apply_op(gray.expand(3, -1, -1), name, 8))


def test_jitter_factors_are_uniform_and_their_orders_even() -> None:
    jitter = draw_params(3000, AugmentConfig(jitter=0.3)).color_jitter
    assert jitter is not None
    for factor in jitter.factor.T:
        assert_uniform((factor - 0.7) / 0.6)
    orders, counts = np.unique(jitter.order, axis=0, return_counts=True)
    assert len(orders) == 6
    assert ((counts - 500) ** 2 / 500).sum() < 20.5  # chi-square of 5 degrees


def test_jitter_is_torchvisions_at_the_same_factors() -> None:
    peer("torchvision")
    from torchvision.transforms import functional

    steps = (functional.adjust_brightness, functional.adjust_contrast, functional.adjust_saturation)
    preprocess, augment = (
        PreprocessConfig(size=(20, 20), resize=(20,)),
        AugmentConfig(crop="squash", flip=False, jitter=0.5),
    )
    images = [noise(3, 20, 20, seed=index) for index in range(10)]
    jitter = draw_params(10, augment).color_jitter
    assert jitter is not None
    for index, ours in enumerate(augment_images(images, make_rng(10), augment, preprocess)):
        theirs = to_pillow(images[index])
        for kind in jitter.order[index]:
            theirs = steps[kind](theirs, float(jitter.factor[index, kind]))
        assert np.array_equal(ours.permute(1, 2, 0).numpy(), np.array(theirs))


def test_erased_rectangles_follow_their_law() -> None:
    erased = draw_params(6000, AugmentConfig(erase=0.5), LARGE).erase_boxes
    assert erased is not None
    height, width = erased[erased[:, 2] > 0, 2:].T
    assert abs(len(height) / 6000 - 0.5) < 0.03
    assert ((erased[:, :2] >= 0) & (erased[:, :2] + erased[:, 2:] <= 224)).all()
    small = height * width / 224**2 < 0.28  # below sqrt(0.28 * 3.3) < 1 of a side every shape fits: no conditioning
    assert_uniform((height * width / 224**2 - 0.02)[small] / 0.26)
    assert_uniform((np.log(height / width)[small] - np.log(1 / 3.3)) / np.log(3.3 / (1 / 3.3)))


def test_an_erased_part_shows_the_bytes_of_its_position_and_the_rest_is_untouched() -> None:
    image, preprocess = noise(3, 32, 32), PreprocessConfig(size=(32, 32), resize=(32,))
    augment = AugmentConfig(crop="squash", flip=False, erase=1.0)
    inputs = augment_images([image] * 50, make_rng(50), augment, preprocess)
    boxes = draw_params(50, augment, preprocess, 32, 32).erase_boxes
    assert boxes is not None
    content = []
    for index, (top, left, height, width) in enumerate(boxes):
        inside = torch.zeros(32, 32, dtype=torch.bool)
        inside[top : top + height, left : left + width] = True
        assert torch.equal(inputs[index][:, ~inside], image[:, ~inside])
        stream = CounterRNG(5, np.array([index])).bits("erase-noise", 3 * 32 * 32 // 8)[0].tobytes()
        expected = torch.frombuffer(bytearray(stream), dtype=torch.uint8).reshape(3, 32, 32)
        assert torch.equal(inputs[index][:, inside], expected[:, inside])
        content.append(expected[:, inside].flatten())
    assert_uniform((torch.cat(content).numpy() + 0.5) / 256)
