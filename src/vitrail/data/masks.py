"""Segmentation masks: PNG files whose pixels are class indices, beside the images that they are of.

    H, W height and width of a mask   R, K rows and columns of patches

A mask is a palette or gray PNG of the size of its image: a pixel's palette index or gray value is its class, and 255 is
ignored. `classes.txt` in the folder may name the classes, one per line.
"""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from vitrail.data.decode import open_image
from vitrail.data.image_headers import wrap_decode_errors
from vitrail.errors import DataError

IGNORED = 255  # the class of pixels that neither train nor count
_MODES = ("L", "P", "1")

Mask = NDArray[np.uint8]


def find_masks(folder: Path, images: Sequence[str]) -> list[Path | None]:
    """The mask of each image, or None where it has none: the PNG with the image's name, without its suffix.

    Where masks have the same name in several folders, the one whose folders agree with the image's is meant.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; --segmentation takes a folder of PNG masks with the images' names")
    masks = {path.relative_to(folder).with_suffix("").parts: path for path in sorted(folder.rglob("*.png"))}
    found, owners = list[Path | None](), dict[Path, str]()
    for image in images:
        parts = PurePosixPath(image.replace(":", "/")).with_suffix("").parts  # a member of a shard follows a colon
        mask = next((masks[parts[start:]] for start in range(len(parts)) if parts[start:] in masks), None)
        if mask is not None and owners.setdefault(mask, image) != image:
            raise DataError(
                f"{mask} has the name of two images, {owners[mask]} and {image}: sort the masks into folders as the"
                " images are"
            )
        found.append(mask)
    return found


def read_mask(path: Path) -> Mask:
    """Read a mask: uint8 (H, W), the class of each pixel."""
    image = open_image(path).image
    if image is None or image.mode not in _MODES:
        kind = "JPEG" if image is None else image.mode
        raise DataError(f"{path} is {kind}; a mask is a palette or gray PNG of 8 bits, whose values are class indices")
    with wrap_decode_errors(str(path)):
        mask = np.array(image, dtype=np.uint8)
    # Pillow scales gray values of 2 and 4 bits to those of 8
    return mask // {2: 85, 4: 17}.get(_read_bit_depth(path), 1) if image.mode == "L" else mask


def _read_bit_depth(path: Path) -> int:
    """Bits of a PNG's sample: the byte after the width and the height."""
    with path.open("rb") as file:
        return file.read(25)[-1]


def compute_patch_classes(mask: Mask, grid: tuple[int, int]) -> Mask:
    """(H, W) -> (R, K): the class of most pixels of each patch, the lowest of equals; ignored where all pixels are."""
    rows, columns = grid
    height, width = mask.shape
    mask = mask.repeat(-(-rows // height), axis=0).repeat(-(-columns // width), axis=1)  # a pixel a patch, at least
    row, column = (
        (2 * np.arange(side) + 1) * count // (2 * side)  # the patch of a pixel's center
        for side, count in zip(mask.shape, grid, strict=True)
    )
    patch = row[:, None] * columns + column[None, :]
    counts = np.bincount((patch * 256 + mask).ravel(), minlength=rows * columns * 256).reshape(rows, columns, 256)
    counts[..., IGNORED] = 0
    classes = counts.argmax(axis=2).astype(np.uint8)
    classes[counts.sum(axis=2) == 0] = IGNORED
    return classes
