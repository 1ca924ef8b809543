"""How many planted copies `vitrail.data.duplicates` finds, of each kind, and what it finds among the images themselves.

    python bench/duplicates.py FOLDER          # every image below it
    python bench/duplicates.py                 # 300 synthetic textures

Copies of 500 images, drawn with a fixed seed, are searched for among 10,000. The pairs found inside the whole folder,
where nothing was planted, are real copies or false alarms: they are printed, and only eyes can tell.
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

COPIES, AMONG, TEXTURES = 500, 10_000, 300
Change = Callable[[Image.Image, np.random.Generator], Image.Image]


def encoded(kind: str, quality: int) -> Change:
    def change(image: Image.Image, _: np.random.Generator) -> Image.Image:
        buffer = io.BytesIO()
        image.save(buffer, kind, quality=quality)
        return Image.open(buffer).convert("RGB")

    return change


def resized(factor: float) -> Change:
    return lambda image, _: image.resize(
        (round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC
    )


def cropped(area: float) -> Change:
    """A part of this area anywhere, its proportions changed by up to 1.25."""

    def change(image: Image.Image, random: np.random.Generator) -> Image.Image:
        ratio = np.exp(random.uniform(-np.log(1.25), np.log(1.25))) ** 0.5
        across = np.clip(area**0.5 * ratio, area, 1)
        width, height = round(image.width * across), round(image.height * area / across)
        left, top = (int(random.integers(0, n + 1)) for n in (image.width - width, image.height - height))
        return image.crop((left, top, left + width, top + height))

    return change


def relit(image: Image.Image, random: np.random.Generator) -> Image.Image:
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast):
        image = enhance(image).enhance(random.uniform(0.8, 1.25))
    return image


def recoloured(image: Image.Image, random: np.random.Generator) -> Image.Image:
    return ImageEnhance.Color(image).enhance(random.uniform(0.5, 1.5))


def mirrored(image: Image.Image, _: np.random.Generator) -> Image.Image:
    return ImageOps.mirror(image)


def after(*changes: Change) -> Change:
    def change(image: Image.Image, random: np.random.Generator) -> Image.Image:
        for each in changes:
            image = each(image, random)
        return image

    return change


KINDS: dict[str, Change] = {
    **{f"JPEG, quality {q}": encoded("JPEG", q) for q in (30, 50, 75, 90)},
    "WebP, quality 50": encoded("WEBP", 50),
    **{f"resized x {f}": resized(f) for f in (0.5, 0.75, 1.5, 2)},
    "brightness and contrast +-25 %": relit,
    "saturation +-50 %": recoloured,
    **{f"cropped to {a} %": cropped(a / 100) for a in (90, 80, 70, 60)},
    "cropped to 80 %, x 0.75, JPEG 50": after(cropped(0.8), resized(0.75), encoded("JPEG", 50)),
    "mirrored": mirrored,
    "mirrored, cropped to 80 %": after(mirrored, cropped(0.8)),
}


def texture(seed: int) -> Image.Image:
    """An image with the 1/f spectrum of natural ones and nothing in common with another."""
    random = np.random.default_rng(seed)
    layers = [
        Image.fromarray(random.integers(0, 256, (n, n, 3), np.uint8)).resize((256, 192), Image.Resampling.BICUBIC)
        for n in (4, 8, 16, 32, 64)
    ]
    pixels = sum(np.asarray(layer, np.float32) * 2.0**-depth for depth, layer in enumerate(layers))
    return Image.fromarray((np.asarray(pixels) / 2).astype(np.uint8))


def opened(source: Path | int) -> Image.Image:
    return texture(source) if isinstance(source, int) else Image.open(source).convert("RGB")


def original(source: Path | int) -> NDArray[np.uint8]:
    return compute_fingerprint(decode(opened(source)))


def planted(source: tuple[int, Path | int]) -> list[NDArray[np.uint8]]:
    """The fingerprints of one image's copies, kind after kind."""
    random = np.random.default_rng(source[0])
    image = opened(source[1])
    return [compute_fingerprint(decode(change(image, random))) for change in KINDS.values()]


def images(folder: str | None) -> Iterator[Path | int]:
    if folder is None:
        yield from range(TEXTURES)
        return
    suffixes = {suffix for suffix, kind in Image.registered_extensions().items() if kind in FORMATS}
    yield from sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in suffixes)


def main() -> None:
    sources = list(images(sys.argv[1] if len(sys.argv) > 1 else None))
    picked = np.random.default_rng(0).permutation(len(sources))[:AMONG]
    chosen = picked[:COPIES]
    with Pool(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        start = time.perf_counter()
        prints = np.stack(pool.map(original, sources, chunksize=64))
        print(f"{len(sources):,} images read and fingerprinted in {time.perf_counter() - start:.1f} s")
        copies = np.stack(pool.map(planted, [(int(i), sources[i]) for i in chosen], chunksize=16))  # (n, kinds, 1032)
    print(f"\nrecall of n = {len(chosen)} copies of each kind among {len(picked):,} images")
    for kind, name in enumerate(KINDS):
        found = {tuple(pair) for pair in find_duplicate_pairs(prints[picked], copies[:, kind]).indices.tolist()}
        print(f"{name:34} {sum((i, i) in found for i in range(len(chosen))) / len(chosen):7.1%}")
    start = time.perf_counter()
    found = find_duplicate_pairs(prints)
    million = len(sources) * (len(sources) - 1) / 2e6
    print(
        f"\n{len(found.indices)} pairs inside the folder, {len(found.indices) / million:.2g} a million pairs, ", end=""
    )
    print(f"in {time.perf_counter() - start:.1f} s on {torch.get_num_threads()} threads")
    for (i, j), score in zip(found.indices, found.scores, strict=True):
        print(f"{score:.3f}  {sources[i]}  {sources[j]}")


if __name__ == "__main__":
    main()
