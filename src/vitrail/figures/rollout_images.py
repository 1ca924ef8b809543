"""Attention rollouts drawn over whole images, a PNG for each: `vitrail predict --attention`."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail import files
from vitrail.data.decode import decode
from vitrail.data.image_paths import ImageRef
from vitrail.data.transforms import normalize
from vitrail.figures import attention, crops, image_grids
from vitrail.figures.attention_images import make_file_name
from vitrail.inference.classifier import Classifier
from vitrail.runtime import workers

_MIN_SIDE, _MAX_SIDE = 224, 1024  # pixels: an image with a shorter side is enlarged, one with a longer side reduced


def iterate_picture_paths(images: Iterator[ImageRef], folder: Path) -> Iterator[tuple[ImageRef, Path]]:
    """Name a picture for each image; the names are remembered, since no two may be the same."""
    taken: set[str] = set()
    for image in images:
        taken.add(name := make_file_name(image.name, taken))
        yield image, folder / f"{name}.png"


def draw_rollouts(
    classifier: Classifier, images: Sequence[tuple[ImageRef, Path]], inputs: Sequence[Tensor], threads: int
) -> None:
    """Draw what the model attends to: each image, decoded once more, in gray under its rollout in color."""
    batch = normalize(torch.stack(list(inputs)), classifier.preprocess)
    rollouts = attention.compute_rollout(classifier.model, batch)
    pictures = [(image, path, rollout) for (image, path), rollout in zip(images, rollouts, strict=True)]
    for _ in workers.prefetch_batches(lambda picture: _draw_overlay(classifier, *picture), [pictures], threads):
        pass


def _draw_overlay(classifier: Classifier, image: ImageRef, path: Path, rollout: NDArray[np.float32]) -> None:
    whole = decode(image.read(), classifier.model.config.channels, name=image.name)
    height, width = whole.shape[1:]
    factor = min(math.ceil(max(1, _MIN_SIDE / min(height, width))), _MAX_SIDE / max(height, width))
    crop = crops.compute_crop_box(height, width, classifier.preprocess).scale(factor)
    overlay = image_grids.overlay_attention(image_grids.resize_image(whole, factor), rollout, crop)
    with files.write_atomically(path, overwrite=True) as fresh:
        Image.fromarray(overlay).save(fresh, "PNG")
