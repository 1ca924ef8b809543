"""How many planted duplicates `vitrail.data.duplicates` finds, and of which kind.

    python bench/duplicates.py FOLDER          # every image below it
    python bench/duplicates.py                 # 300 synthetic textures

Duplicates of 500 images, drawn with a fixed seed, are searched for among 10,000. The pairs found inside the whole
folder, where nothing was planted, are real duplicates or false alarms: they are printed, and only eyes can tell.
"""

import io
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from vitrail.data.decode import decode
from vitrail.data.duplicates import compute_fingerprint, find_duplicate_pairs
from vitrail.data.image_headers import FORMATS

DUPLICATES, AMONG, TEXTURES = 500, 10_000, 300
Change = Callable[[Image.Image, np.random.Generator], Image.Image]


def encode_as(kind: str, quality: int) -> Change:
    def change(image: Image.Image, _: np.random.Generator) -> Image.Image:
        buffer = io.BytesIO()
        image.save(buffer, kind, quality=quality)
        return Image.open(buffer).convert("RGB")

    return change


def resize_by(factor: float) -> Change:
    return lambda image, _: image.resize(
        (round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC
    )


def crop_to(area: float) -> Change:
    """A part of this area anywhere, its proportions changed by up to 1.25."""

    def change(image: Image.Image, random: np.random.Generator) -> Image.Image:
        ratio = np.exp(random.uniform(-np.log(1.25), np.log(1.25))) ** 0.5
        across = np.clip(area**0.5 * ratio, area, 1)
        width, height = round(image.width * across), round(image.height * area / across)
        left, top = (int(random.integers(0, n + 1)) for n in (image.width - width, image.height - height))
        return image.crop((left, top, left + width, top + height))

    return change


def change_light(image: Image.Image, random: np.random.Generator) -> Image.Image:
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast):
        image = enhance(image).enhance(random.uniform(0.8, 1.25))
    return image


def change_saturation(image: Image.Image, random: np.random.Generator) -> Image.Image:
    return ImageEnhance.Color(image).enhance(random.uniform(0.5, 1.5))


def mirror(image: Image.Image, _: np.random.Generator) -> Image.Image:
    return ImageOps.mirror(image)


def chain_changes(*changes: Change) -> Change:
    def change(image: Image.Image, random: np.random.Generator) -> Image.Image:
        for each in changes:
            image = each(image, random)
        return image

    return change


KINDS: dict[str, Change] = {
    **{f"JPEG, quality {q}": encode_as("JPEG", q) for q in (30, 50, 75, 90)},
    "WebP, quality 50": encode_as("WEBP", 50),
    **{f"resized x {f}": resize_by(f) for f in (0.5, 0.75, 1.5, 2)},
    "brightness and contrast +-25 %": change_light,
    "saturation +-50 %": change_saturation,
    **{f"cropped to {a} %": crop_to(a / 100) for a in (90, 80, 70, 60)},
    "cropped to 80 %, x 0.75, JPEG 50": chain_changes(crop_to(0.8), resize_by(0.75), encode_as("JPEG", 50)),
    "mirrored": mirror,
    "mirrored, cropped to 80 %": chain_changes(mirror, crop_to(0.8)),
}


def draw_texture(seed: int) -> Image.Image:
    """An image with the 1/f spectrum of natural ones and nothing in common with another."""
    random = np.random.default_rng(seed)
    layers = [
        Image.fromarray(random.integers(0, 256, (n, n, 3), np.uint8)).resize((256, 192), Image.Resampling.BICUBIC)
        for n in (4, 8, 16, 32, 64)
    ]
    pixels = sum(np.asarray(layer, np.float32) * 2.0**-depth for depth, layer in enumerate(layers))
    return Image.fromarray((np.asarray(pixels) / 2).astype(np.uint8))


def open_source(source: Path | int) -> Image.Image:
    return draw_texture(source) if isinstance(source, int) else Image.open(source).convert("RGB")


def fingerprint_source(source: Path | int) -> NDArray[np.uint8]:
    return compute_fingerprint(decode(open_source(source)))


def fingerprint_duplicates(source: tuple[int, Path | int]) -> list[NDArray[np.uint8]]:
    """The fingerprints of one image's duplicates, kind after kind."""
    random = np.random.default_rng(source[0])
    image = open_source(source[1])
    return [compute_fingerprint(decode(change(image, random))) for change in KINDS.values()]


def list_sources(folder: str | None) -> Iterator[Path | int]:
    if folder is None:
        yield from range(TEXTURES)
        return
    suffixes = {suffix for suffix, kind in Image.registered_extensions().items() if kind in FORMATS}
    yield from sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in suffixes)


def main() -> None:
    sources = list(list_sources(sys.argv[1] if len(sys.argv) > 1 else None))
    picked = np.random.default_rng(0).permutation(len(sources))[:AMONG]
    chosen = picked[:DUPLICATES]
    with Pool(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        start = time.perf_counter()
        prints = np.stack(pool.map(fingerprint_source, sources, chunksize=64))
        print(f"{len(sources):,} images read and fingerprinted in {time.perf_counter() - start:.1f} s")
        duplicates = np.stack(
            pool.map(fingerprint_duplicates, [(int(i), sources[i]) for i in chosen], chunksize=16)
        )  # (n, kinds, 1032)
    print(f"\nrecall of n = {len(chosen)} duplicates of each kind among {len(picked):,} images")
    for kind, name in enumerate(KINDS):
        pairs = {tuple(pair) for pair in find_duplicate_pairs(prints[picked], duplicates[:, kind]).indices.tolist()}
        print(f"{name:34} {sum((i, i) in pairs for i in range(len(chosen))) / len(chosen):7.1%}")
    start = time.perf_counter()
    own_pairs = find_duplicate_pairs(prints)
    million = len(sources) * (len(sources) - 1) / 2e6
    print(
        f"\n{len(own_pairs.indices)} pairs inside the folder, {len(own_pairs.indices) / million:.2g} a million pairs, ",
        end="",
    )
    print(f"in {time.perf_counter() - start:.1f} s on {torch.get_num_threads()} threads")
    for (i, j), score in zip(own_pairs.indices, own_pairs.scores, strict=True):
        print(f"{score:.3f}  {sources[i]}  {sources[j]}")


if __name__ == "__main__":
    main()
