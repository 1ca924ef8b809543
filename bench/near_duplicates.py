"""Near-duplicates by embedding beside those by fingerprints: recall by edit, and the pairs of unedited images.

    python bench/near_duplicates.py MODEL FOLDER --cache CACHE --grid pairs.png

Images of FOLDER are drawn with a fixed seed, and some of them edited in ways of which fingerprints miss most. For each
edit, the edited images join those drawn, and duplicates are looked for among all. The columns: by fingerprints, by a
plain cosine of 0.9, and by whitened and normalized features at several thresholds, with the pairs of an edited image
and another than its own after the slash. Pairs of unedited images are real duplicates or false alarms, which only eyes
can tell: they are counted, printed and drawn, the most similar first.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from duplicates import Change, chain_changes, crop_to, encode_as, mirror, resize_by
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageOps

import vitrail
from vitrail.data.decode import decode
from vitrail.data.duplicates import compute_fingerprint, find_duplicate_pairs
from vitrail.evaluation.feature_duplicates import DEFAULT_THRESHOLD, find_feature_duplicates
from vitrail.inference.cosine_search import find_similar_pairs, normalize_rows

PLAIN_COSINE = 0.9
THRESHOLDS = (0.4, 0.45, 0.5, 0.55, 0.6)
BINS = ((0.6, 1.0), (0.55, 0.6), (0.5, 0.55), (0.45, 0.5), (0.4, 0.45))
DRAWN_PAIRS, TILE = 12, 96  # of each bin; pixels


def shift_hue(image: Image.Image, random: np.random.Generator) -> Image.Image:
    hue, saturation, value = image.convert("HSV").split()
    shift = int(random.integers(32, 96)) * int(random.choice((-1, 1)))
    shifted = hue.point([(each + shift) % 256 for each in range(256)])
    return Image.merge("HSV", (shifted, saturation, value)).convert("RGB")


def rotate_by(degrees: float) -> Change:
    def change(image: Image.Image, random: np.random.Generator) -> Image.Image:
        return image.rotate(degrees * int(random.choice((-1, 1))), Image.Resampling.BICUBIC, expand=True)

    return change


def write_text(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """Three lines in white on black bars, a third of the height in all."""
    changed = image.copy()
    draw, height = ImageDraw.Draw(changed), image.height
    for line in range(3):
        top = height * (0.1 + 0.3 * line)
        draw.rectangle((0, top, image.width, top + height * 0.11), fill="black")
        text = "".join(random.choice(list("ABCDEFGHIJKLMNOP "), 24))
        draw.text((image.width * 0.03, top), text, fill="white", font_size=height * 0.09)
    return changed


def add_border(image: Image.Image, random: np.random.Generator) -> Image.Image:
    side = round(0.2 * min(image.size))
    return ImageOps.expand(image, side, fill="white" if random.integers(2) else "black")


def make_collage(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """The image beside a field of noise of its size."""
    noise = random.integers(0, 256, (8, 8, 3), np.uint8)
    collage = Image.new("RGB", (2 * image.width, image.height))
    collage.paste(Image.fromarray(noise).resize(image.size, Image.Resampling.BICUBIC), (image.width, 0))
    collage.paste(image, (0, 0))
    return collage


def remove_color(image: Image.Image, _: np.random.Generator) -> Image.Image:
    return image.convert("L").convert("RGB")


EDITS: dict[str, Change] = {
    "cropped to 70 %": crop_to(0.7),
    "cropped to 50 %": crop_to(0.5),
    "cropped to 30 %": crop_to(0.3),
    "mirrored": mirror,
    "rotated by 10 degrees": rotate_by(10),
    "rotated by 90 degrees": rotate_by(90),
    "half the size, JPEG 10": chain_changes(resize_by(0.5), encode_as("JPEG", 10)),
    "hue shifted by 45 to 135 degrees": shift_hue,
    "gray": remove_color,
    "three lines of text": write_text,
    "border of a fifth": add_border,
    "beside noise of its size": make_collage,
    "mirrored, cropped to 70 %, text": chain_changes(mirror, crop_to(0.7), write_text),
}


def cache_array(path: Path, compute: Callable[[], NDArray]) -> NDArray:
    """The array in a file, computed where there is none."""
    if not path.exists():
        np.save(path, compute())
    return np.load(path)


def draw_pairs(paths: list[Path], pairs: NDArray, similarities: NDArray, out: Path) -> None:
    """A row of pairs for each bin of similarities, drawn with a fixed seed."""
    grid = Image.new("RGB", (DRAWN_PAIRS * (2 * TILE + 8), len(BINS) * (TILE + 8)), "white")
    for row, (low, high) in enumerate(BINS):
        within = np.flatnonzero((similarities >= low) & (similarities < high))
        for column, pair in enumerate(np.random.default_rng(0).permutation(within)[:DRAWN_PAIRS]):
            for side, image in enumerate(pairs[pair]):
                tile = ImageOps.fit(Image.open(paths[image]).convert("RGB"), (TILE, TILE))
                grid.paste(tile, (column * (2 * TILE + 8) + side * TILE, row * (TILE + 8)))
    grid.save(out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--edited", type=int, default=300)
    parser.add_argument("--features", default="default")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--grid", type=Path)
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    suffixes = (".jpg", ".jpeg", ".png", ".webp")
    every = sorted(path for path in arguments.folder.rglob("*") if path.suffix.lower() in suffixes)
    paths = [every[index] for index in np.random.default_rng(0).permutation(len(every))[: arguments.images]]
    edited = range(min(arguments.edited, len(paths)))

    def open_edited(change: Change) -> list[Image.Image]:
        return [change(Image.open(paths[i]).convert("RGB"), np.random.default_rng(i)) for i in edited]

    def embed(images: list) -> NDArray[np.float32]:
        return vitrail.embed(arguments.model, images, features=arguments.features, progress=False)

    def fingerprint(images: list) -> NDArray[np.uint8]:
        return np.stack([compute_fingerprint(decode(image)) for image in images])

    start = time.perf_counter()
    kind, cache, count = arguments.features, arguments.cache, len(paths)
    base = cache_array(cache / f"{kind}.npy", lambda: embed(paths))
    prints = cache_array(cache / "prints.npy", lambda: fingerprint(paths))
    print(f"{count:,} images of {len(every):,}, {len(edited)} edited; {kind} features of {arguments.model}")
    heads = " ".join(f"{each:>10}" for each in THRESHOLDS)
    print(f"{'edit':34} {'fingerprints':>12} {'cosine':>7} {heads}", flush=True)
    for number, (name, change) in enumerate(EDITS.items()):
        features = cache_array(cache / f"{kind}-{number}.npy", lambda c=change: embed(open_edited(c)))
        copies = cache_array(cache / f"prints-{number}.npy", lambda c=change: fingerprint(open_edited(c)))
        pairs = {tuple(pair) for pair in find_duplicate_pairs(prints, copies).indices.tolist()}
        by_print = sum((i, i) in pairs for i in edited) / len(edited)
        cosines = (normalize_rows(base[: len(edited)]) * normalize_rows(features)).sum(axis=1)
        found = find_feature_duplicates(np.concatenate([base, features]), min(THRESHOLDS))
        first, second = found.rows.T
        is_own, is_other = second == first + count, (second >= count) & (second != first + count)
        cells = []
        for threshold in THRESHOLDS:
            within = found.similarities >= threshold
            cells.append(f"{(is_own & within).sum() / len(edited):6.1%}/{(is_other & within).sum():3d}")
        print(f"{name:34} {by_print:12.1%} {(cosines >= PLAIN_COSINE).mean():7.1%} {' '.join(cells)}", flush=True)
    found, by_prints = find_feature_duplicates(base, min(THRESHOLDS)), find_duplicate_pairs(prints)
    plain = len(find_similar_pairs(normalize_rows(base), PLAIN_COSINE).rows)
    counts = " ".join(f"{int((found.similarities >= each).sum()):10d}" for each in THRESHOLDS)
    print(f"{'pairs of unedited images':34} {len(by_prints.indices):12d} {plain:7d} {counts}")
    print(
        f"{time.perf_counter() - start:.0f} s; by features from {DEFAULT_THRESHOLD}, a star where by fingerprints too:"
    )
    known = {tuple(pair) for pair in by_prints.indices.tolist()}
    for (i, j), score in zip(found.rows.tolist(), found.similarities.tolist(), strict=True):
        if score >= DEFAULT_THRESHOLD:
            star = "*" if {(i, j), (j, i)} & known else " "
            print(f"{star} {score:.3f}  {'/'.join(paths[i].parts[-3:])}  {'/'.join(paths[j].parts[-3:])}")
    if arguments.grid:
        draw_pairs(paths, found.rows, found.similarities, arguments.grid)


if __name__ == "__main__":
    main()
