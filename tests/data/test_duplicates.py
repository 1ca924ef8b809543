"""Planted duplicates are found and nothing else is: among textures, real photos, empty, tiny and sparse images."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from vitrail.data.decode import decode
from vitrail.data.duplicates import FINGERPRINT_BYTES, compute_fingerprint, find_duplicate_pairs

Prints = NDArray[np.uint8]


def texture(seed: int, width: int = 200, height: int = 150) -> Image.Image:
    """An image with the 1/f spectrum of natural ones and nothing in common with another."""
    random = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3), np.float32)
    for depth, side in enumerate((4, 8, 16, 32, 64)):
        layer = Image.fromarray(random.integers(0, 256, (side, side, 3), np.uint8))
        pixels += np.asarray(layer.resize((width, height), Image.Resampling.BICUBIC), np.float32) * 2.0**-depth
    return Image.fromarray((pixels / 2).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", quality: int = 30) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=quality)
    return Image.open(buffer).convert("RGB")


def cropped(image: Image.Image, share: float, seed: int) -> Image.Image:
    """A part of this share of the area, at a random place."""
    width, height = (round(side * share**0.5) for side in image.size)
    random = np.random.default_rng(seed)
    left, top = random.integers(0, image.width - width + 1), random.integers(0, image.height - height + 1)
    return image.crop((int(left), int(top), int(left) + width, int(top) + height))


def digit(seed: int, side: int) -> Image.Image:
    """A stroke on black: like others of its kind, and different."""
    random = np.random.default_rng(seed)
    image = Image.new("L", (256, 256))
    ends = random.normal((150, 40, 110, 216), 4)
    ImageDraw.Draw(image).line([float(x) for x in ends], fill=255, width=28)
    return image.resize((side, side), Image.Resampling.BILINEAR)


def prints(images: list[Image.Image]) -> Prints:
    return np.stack([compute_fingerprint(decode(image)) for image in images])


def noise(level: int, seed: int) -> Image.Image:
    """A blank page of one tone with the noise of a scanner."""
    random = np.random.default_rng(seed)
    return Image.fromarray((level + random.normal(0, 2, (120, 90, 3))).clip(0, 255).astype(np.uint8))


def linked(indices: NDArray[np.int64], count: int) -> int:
    """How many groups the pairs leave of `count` images."""
    group = list(range(count))
    for i, j in indices.tolist():
        old, new = group[j], group[i]
        group = [new if g == old else g for g in group]
    return len(set(group))


CHANGES: dict[str, Callable[[Image.Image, int], Image.Image]] = {
    "jpeg": lambda image, _: encoded(image, quality=30),
    "webp": lambda image, _: encoded(image, "WEBP", 50),
    "halved": lambda image, _: image.resize((image.width // 2, image.height // 2)),
    "doubled": lambda image, _: image.resize((image.width * 2, image.height * 2)),
    "squashed": lambda image, _: image.resize((96, 96)),
    "brighter": lambda image, _: ImageEnhance.Contrast(ImageEnhance.Brightness(image).enhance(1.2)).enhance(0.8),
    "paler": lambda image, _: ImageEnhance.Color(image).enhance(0.5),
    "grey": lambda image, _: image.convert("L").convert("RGB"),
    "mirrored": lambda image, _: ImageOps.mirror(image),
    "cropped to 90 %": lambda image, seed: cropped(image, 0.9, seed),
    "cropped to 80 %": lambda image, seed: cropped(image, 0.8, seed),
    "cropped to 65 %": lambda image, seed: cropped(image, 0.65, seed),
    "cropped and encoded": lambda image, seed: encoded(cropped(image, 0.8, seed).resize((120, 90)), quality=50),
    "mirrored and cropped": lambda image, seed: cropped(ImageOps.mirror(image), 0.8, seed),
}


@pytest.fixture(scope="module")
def textures() -> list[Image.Image]:
    return [texture(seed) for seed in range(40)]


@pytest.fixture(scope="module")
def photos(data: Path) -> list[Image.Image]:
    """60 photos of ImageNet."""
    images: list[Image.Image] = []
    with tarfile.open(data / "imagenet_samples.tar.xz") as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None:
                images.append(Image.open(file).convert("RGB"))
            if len(images) == 60:
                return images
    raise AssertionError("the archive holds 500 photos")


@pytest.mark.parametrize("change", CHANGES)
def test_every_copy_is_paired_with_its_source_and_nothing_else(change: str, textures: list[Image.Image]) -> None:
    copies = prints([CHANGES[change](image, seed) for seed, image in enumerate(textures)])
    pairs = find_duplicate_pairs(prints(textures), copies)
    assert pairs.indices.tolist() == [[i, i] for i in range(len(textures))]
    assert (pairs.scores > 0.8).all()
    assert (pairs.scores <= 1.0001).all()


@pytest.mark.parametrize(("change", "least"), [("jpeg", 60), ("halved", 60), ("cropped to 80 %", 56), ("mirrored", 60)])
def test_copies_of_real_photos_are_found_without_a_false_pair(
    change: str, least: int, photos: list[Image.Image]
) -> None:
    copies = prints([CHANGES[change](image, seed) for seed, image in enumerate(photos)])
    pairs = find_duplicate_pairs(prints(photos), copies).indices
    assert (pairs[:, 0] == pairs[:, 1]).all()
    assert len(pairs) >= least


def test_cells_of_a_larger_set_lose_no_copy() -> None:
    """1,000 images lie in five cells, of which each window visits four."""
    images = [texture(seed, 64, 64) for seed in range(500)]
    pairs = find_duplicate_pairs(prints(images + [cropped(image, 0.8, seed) for seed, image in enumerate(images)]))
    planted = pairs.indices[:, 1] - pairs.indices[:, 0] == len(images)
    assert planted.all()
    assert planted.sum() >= 0.98 * len(images)


def test_a_set_against_itself_gives_each_pair_in_both_directions(textures: list[Image.Image]) -> None:
    mixed = prints([*textures[:20], *(cropped(image, 0.8, 0) for image in textures[:10]), *textures[:5]])
    inside, across = find_duplicate_pairs(mixed), find_duplicate_pairs(mixed, mixed)
    assert (inside.indices[:, 0] < inside.indices[:, 1]).all()
    both = {(i, j) for i, j in across.indices.tolist() if i != j}
    assert {(j, i) for i, j in both} == both
    assert {(i, j) for i, j in inside.indices.tolist()} <= both
    assert {(i, i) for i in range(20)} <= {(i, j) for i, j in across.indices.tolist()}


def test_empty_pages_are_the_same_only_by_equal_pixels() -> None:
    pages = [noise(level, level + shade) for level in (0, 128, 250) for shade in range(5)]
    flat = [Image.new("RGB", (100, 80), (level,) * 3) for level in (0, 1, 128, 255)]
    assert len(find_duplicate_pairs(prints(pages + flat)).indices) == 0
    assert find_duplicate_pairs(prints([*flat, flat[2]])).indices.tolist() == [[2, 4]]
    larger = Image.new("RGB", (200, 80), (128,) * 3)
    assert len(find_duplicate_pairs(prints([*flat, larger])).indices) == 0, "of another size"


@pytest.mark.parametrize("side", [8, 28, 32, 64])
def test_strokes_that_look_alike_are_not_copies(side: int) -> None:
    strokes = [digit(seed, side) for seed in range(100)]
    assert len(find_duplicate_pairs(prints(strokes)).indices) == 0
    assert find_duplicate_pairs(prints([*strokes, strokes[7].copy()])).indices.tolist() == [[7, 100]]


def test_a_placeholder_copied_often_is_one_group_and_few_pairs(textures: list[Image.Image]) -> None:
    equal = [textures[0]] * 400
    encodings = [encoded(textures[0], quality=quality) for quality in range(30, 95)]
    pairs = find_duplicate_pairs(prints([*equal, *encodings, *textures[1:20]]))
    assert len(pairs.indices) <= 399 + 16 * 66
    assert linked(pairs.indices, 400 + 65 + 19) == 1 + 19
    assert pairs.indices.max() < 465


def test_every_copy_in_either_set_is_named(textures: list[Image.Image]) -> None:
    first = prints([textures[0]] * 30 + textures[1:10] + [encoded(textures[1])] * 7)
    second = prints([textures[1]] * 50 + [cropped(textures[0], 0.8, 0)] * 20 + textures[20:30])
    pairs = find_duplicate_pairs(first, second).indices
    assert set(pairs[:, 0].tolist()) == {*range(31), *range(39, 46)}
    assert set(pairs[:, 1].tolist()) == set(range(70))
    assert len(pairs) == (30 + 20 - 1) + (1 + 50 - 1) + (7 + 50 - 1)


def test_sets_of_none_and_one() -> None:
    none, one = np.empty((0, FINGERPRINT_BYTES), np.uint8), prints([texture(0)])
    for first, second in [(none, None), (one, None), (none, none), (none, one), (one, none)]:
        pairs = find_duplicate_pairs(first, second)
        assert pairs.indices.shape == (0, 2)
        assert pairs.scores.shape == (0,)
    assert find_duplicate_pairs(one, one).indices.tolist() == [[0, 0]]


def test_fingerprints_are_read_from_a_memory_map(tmp_path: Path, textures: list[Image.Image]) -> None:
    fresh = prints([*textures[:5], ImageOps.mirror(textures[3])])
    np.save(tmp_path / "prints.npy", fresh)
    mapped = np.load(tmp_path / "prints.npy", mmap_mode="r")
    assert find_duplicate_pairs(mapped).indices.tolist() == find_duplicate_pairs(fresh).indices.tolist() == [[3, 5]]


def test_a_fingerprint_depends_on_pixels_and_not_on_their_layout() -> None:
    image = decode(texture(0))
    assert compute_fingerprint(image).shape == (FINGERPRINT_BYTES,)
    assert compute_fingerprint(image).dtype == np.uint8
    assert np.array_equal(compute_fingerprint(image), compute_fingerprint(image.contiguous()))
    grey = decode(texture(0).convert("L"), channels=1)
    assert np.array_equal(compute_fingerprint(grey), compute_fingerprint(grey.expand(3, -1, -1)))
    assert not torch.equal(image[:1], grey)
