"""Folders of small, textured images, each one different, for tests of everything that reads datasets."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.dataset import Dataset, Split


def make_image(seed: int, size: tuple[int, int] = (20, 24), mode: str = "RGB") -> Image.Image:
    """Smooth noise, like no other seed's."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((size[1], size[0]), Image.Resampling.BICUBIC).convert(mode)


def encode_image(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def write_image_folder(
    root: Path, *tops: str, classes: tuple[str, ...] = ("rose", "tulip"), each: int = 5, start: int = 0
) -> Path:
    """`root`/top/class/0.jpg ..., `each` a class."""
    seed = start
    for top in tops or ("",):
        for name in classes:
            class_folder = root / top / name
            class_folder.mkdir(parents=True, exist_ok=True)
            for number in range(each):
                (class_folder / f"{number}.jpg").write_bytes(encode_image(make_image(seed)))
                seed += 1
    return root


def read_contents(split: Split) -> list[tuple[bytes, tuple[int, ...]]]:
    """Each image's bytes and labels, in an order that does not depend on the dataset's."""
    images = [split.read_image(index) for index in range(len(split))]
    raw = [image.read_bytes() if isinstance(image, Path) else image for image in images]
    return sorted((item, split.get_labels(index)) for index, item in enumerate(raw) if isinstance(item, bytes))


def list_names(dataset: Dataset) -> dict[str, list[str]]:
    return {key: [split.get_image_name(index) for index in range(len(split))] for key, split in dataset.splits.items()}
