"""Masks: which one is an image's, what a file may be, and the class of each patch, by hand."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data.masks import IGNORED, compute_patch_classes, find_masks, read_mask
from vitrail.errors import DataError


def write_mask(path: Path, mask: Image.Image | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (mask or Image.new("L", (4, 4))).save(path)
    return path


def test_a_mask_has_its_images_name_in_one_folder_or_in_folders_like_the_images(tmp_path: Path) -> None:
    flat, nested = write_mask(tmp_path / "a.png"), write_mask(tmp_path / "train" / "cat" / "b.png")
    names = ["photos/train/cat/a.jpg", "photos/train/cat/b.jpeg", "photos/val/cat/b.jpeg", "shards/x-0.tar:cat/a.b.jpg"]
    assert find_masks(tmp_path, names) == [flat, nested, None, None]
    member = write_mask(tmp_path / "a.b.png")
    assert find_masks(tmp_path, names)[3] == member
    top = write_mask(tmp_path / "b.png")
    assert find_masks(tmp_path, names)[1:3] == [nested, top]  # the one whose folders agree


def test_a_mask_of_two_images_is_refused_and_so_is_what_is_no_folder(tmp_path: Path) -> None:
    write_mask(tmp_path / "0.png")
    with pytest.raises(DataError, match=r"0.png has the name of two images, set/cat/0.jpg and set/dog/0.jpg: sort the"):
        find_masks(tmp_path, ["set/cat/0.jpg", "set/dog/0.jpg"])
    with pytest.raises(DataError, match="nowhere is no folder"):
        find_masks(tmp_path / "nowhere", ["0.jpg"])


def test_gray_and_palette_values_are_the_classes(tmp_path: Path) -> None:
    values = np.array([[0, 1, 2], [255, 20, 7]], dtype=np.uint8)
    palette = Image.fromarray(values, mode="P")
    palette.putpalette([255 - value // 3 for value in range(768)])
    for name, image in (("gray", Image.fromarray(values)), ("palette", palette)):
        assert np.array_equal(read_mask(write_mask(tmp_path / f"{name}.png", image)), values)
    binary = Image.fromarray(values > 1)
    assert np.array_equal(read_mask(write_mask(tmp_path / "binary.png", binary)), values > 1)


@pytest.mark.parametrize("bits", [2, 4])
def test_gray_values_of_few_bits_are_not_scaled(bits: int, tmp_path: Path) -> None:
    """Written by hand: Pillow writes 8 bits, but optimizers of PNG files write as few as the values need."""
    values = np.arange(2**bits, dtype=np.uint8)[None]
    row = np.packbits(np.unpackbits(values[0][:, None], axis=1)[:, 8 - bits :].ravel()).tobytes()
    header = struct.pack(">IIBBBBB", 2**bits, 1, bits, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b""))
    content = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    (tmp_path / "mask.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    assert np.array_equal(read_mask(tmp_path / "mask.png"), values)


def test_colors_and_broken_files_are_no_masks(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"colors.png is RGB; a mask is a palette or gray PNG of 8 bits"):
        read_mask(write_mask(tmp_path / "colors.png", Image.new("RGB", (4, 4))))
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 30), dtype=np.uint8))
    (tmp_path / "broken.png").write_bytes(write_mask(tmp_path / "whole.png", noise).read_bytes()[:500])
    with pytest.raises(DataError, match=r"broken\.png"):
        read_mask(tmp_path / "broken.png")


def test_a_patch_has_the_class_of_most_of_its_pixels() -> None:
    mask = np.array(
        [
            [1, 1, 2, 2, 255, 255],
            [1, 3, 2, 0, 255, 255],
            [4, 4, 255, 5, 0, 6],
            [3, 3, 255, 255, 6, 0],
        ],
        dtype=np.uint8,
    )
    expected = [[1, 2, IGNORED], [3, 5, 0]]  # of equals the lowest; ignored pixels do not vote
    assert compute_patch_classes(mask, (2, 3)).tolist() == expected


def test_sides_that_no_grid_divides_are_cut_at_the_nearest_pixel_and_small_masks_are_enlarged() -> None:
    row = np.array([[1, 1, 2, 2, 2]], dtype=np.uint8)  # of a patch: pixels whose centers are below 2.5, and above
    assert compute_patch_classes(row, (1, 2)).tolist() == [[1, 2]]
    assert compute_patch_classes(np.array([[1, 2]], dtype=np.uint8), (3, 4)).tolist() == [[1, 1, 2, 2]] * 3
