"""Images a second and core: a JPEG of 500 x 375 pixels decoded, and cropped at random to 224 x 224.

    python bench/input.py [--folder DIR] [--rounds 15]

Side by side in one process on one core, median of the rounds: Pillow decoding and cropping (what torchvision and timm
do), vitrail with Pillow, and vitrail with simplejpeg (the extra `fast`), and how their pixels differ. Without a folder
the photos are the two of scikit-learn's wheel, cut at random places.
"""

import argparse
import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.config import AugmentConfig, PreprocessConfig
from vitrail.data import augment as augmenting
from vitrail.data import decode as decoding
from vitrail.data.randomness import CounterRNG

COUNT, SIZE, CHUNK = 64, (500, 375), 64
VIEW = PreprocessConfig(size=(224, 224), resize=(256,), interpolation="bilinear")
CROP = AugmentConfig(area=(0.08, 1.0), flip=False)


def load_photos(folder: Path | None) -> list[bytes]:
    """JPEGs of 500 x 375 pixels, quality 90."""
    generator = np.random.default_rng(0)
    if folder is None:
        from sklearn.datasets import load_sample_images

        sources = [Image.fromarray(image) for image in load_sample_images().images]
    else:
        paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
        sources = [Image.open(path).convert("RGB") for path in paths[:COUNT]]
    encoded = []
    for number in range(COUNT):
        image = sources[number % len(sources)]
        if image.width < SIZE[0] or image.height < SIZE[1]:
            image = image.resize(SIZE, Image.Resampling.BICUBIC)
        left, top = (int(generator.integers(0, room + 1)) for room in (image.width - SIZE[0], image.height - SIZE[1]))
        file = io.BytesIO()
        image.crop((left, top, left + SIZE[0], top + SIZE[1])).save(file, "JPEG", quality=90)
        encoded.append(file.getvalue())
    return encoded


def decode_with_pillow(images: list[bytes], draws: CounterRNG) -> Tensor:
    """The same crops by Pillow alone: open, resize from the box, to a tensor."""
    drawn = augmenting.draw_augment_params(
        draws, np.full(len(images), SIZE[1]), np.full(len(images), SIZE[0]), CROP, VIEW
    )
    out = torch.empty((len(images), 3, 224, 224), dtype=torch.uint8)
    for index, content in enumerate(images):
        top, left, height, width = (int(value) for value in drawn.crops.source_box[index])
        image = Image.open(io.BytesIO(content)).convert("RGB")
        view = image.resize((224, 224), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
        out[index] = torch.from_numpy(np.array(view)).permute(2, 0, 1)
    return out


def decode_with_vitrail(images: list[bytes], draws: CounterRNG) -> Tensor:
    """What a loader's worker does."""
    encoded = [decoding.open_image(content) for content in images]
    sizes = np.array([(image.height, image.width) for image in encoded])

    def load(index: int, rows: int) -> Tensor:
        return encoded[index].decode_pixels(3, rows)

    return augmenting.make_train_inputs(load, sizes, draws, CROP, VIEW)


def decode_without_simplejpeg(images: list[bytes], draws: CounterRNG) -> Tensor:
    """What it does where the extra is not installed."""
    load_simplejpeg, decoding._load_simplejpeg = decoding._load_simplejpeg, lambda: None  # type: ignore[assignment]
    try:
        return decode_with_vitrail(images, draws)
    finally:
        decoding._load_simplejpeg = load_simplejpeg


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = load_photos(options.folder)
    chunks = [(images[at : at + CHUNK], CounterRNG(0, np.arange(at, at + CHUNK))) for at in range(0, COUNT, CHUNK)]
    ways: dict[str, Callable[[list[bytes], CounterRNG], Tensor]] = {
        "Pillow alone": decode_with_pillow,
        "vitrail, Pillow decodes": decode_without_simplejpeg,
        f"vitrail, {decoding.get_jpeg_decoder_name()}": decode_with_vitrail,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            start = time.process_time()
            for chunk, draws in chunks:
                way(chunk, draws)
            seconds[name].append(time.process_time() - start)
    print(f"{COUNT} JPEGs of 500 x 375, {sum(map(len, images)) / COUNT / 1e3:.0f} kB on average, one core, CPU time")
    slowest = statistics.median(seconds["Pillow alone"])
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"{name:50} {COUNT / middle:7.0f} images/s   {slowest / middle:.2f}x")
    exact = all(torch.equal(decode_with_vitrail(*chunk), decode_without_simplejpeg(*chunk)) for chunk in chunks)
    apart = torch.cat(
        [(decode_with_vitrail(*chunk).int() - decode_with_pillow(*chunk).int()).abs().float() for chunk in chunks]
    )
    print(f"pixels of simplejpeg and Pillow's decoder: {'equal to the bit' if exact else 'DIFFERENT'}")
    print(f"pixels of the crop and of Pillow's: {apart.mean():.3f} levels apart on average, {apart.max():.0f} at most")


if __name__ == "__main__":
    main()
