"""What was hidden and told, painted into the right squares."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.config import MASK_TOKEN, UNCHANGED_PATCH
from vitrail.figures.reconstruction_images import MASK_GRAY, draw_reconstruction, make_panels

ORDER = (3, 0, 5, 1, 2, 4)  # of a picture of two rows and three columns; the first three are hidden


def picture(base: int) -> NDArray[np.uint8]:
    """(3, 8, 12): squares of four pixels, each of its own brightness."""
    squares = (base + np.arange(6)).reshape(2, 3).astype(np.uint8)
    return np.broadcast_to(squares.repeat(4, axis=0).repeat(4, axis=1), (3, 8, 12)).copy()


def squares(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The first channel's squares in raster order: (6, 4, 4)."""
    return image[0].reshape(2, 4, 3, 4).transpose(0, 2, 1, 3).reshape(6, 4, 4)


def test_each_panel_by_hand() -> None:
    stands = np.full(6, UNCHANGED_PATCH)
    stands[[3, 0]] = MASK_TOKEN, 4  # patch 5 is kept
    told = np.arange(3 * 3 * 4).reshape(3, 3, 2, 2).astype(np.uint8)  # of 2 x 2 places, each of two pixels
    true = np.full((3, 3, 1, 1), 200, dtype=np.uint8)
    shown = make_panels(picture(10), picture(50), np.stack([np.array(ORDER), stands]), told, true)
    plain = squares(picture(10))[:, 0, 0].tolist()
    assert np.array_equal(shown[0], picture(10))
    assert squares(shown[1]).reshape(6, -1).max(axis=1).tolist() == [
        54,
        plain[1],
        plain[2],
        MASK_GRAY,
        plain[4],
        plain[5],
    ]
    assert squares(shown[2])[3].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]
    assert squares(shown[2])[5, 0, 0] == told[2, 0, 0, 0]
    for painted in shown[2:]:
        assert squares(painted)[[1, 2, 4]].reshape(3, -1).max(axis=1).tolist() == [plain[place] for place in (1, 2, 4)]
    assert (squares(shown[3])[[0, 3, 5]] == 200).all()


def test_a_row_for_each_image_is_written(tmp_path: Path) -> None:
    pixels = np.stack([picture(base) for base in (10, 60, 110)])  # two and a partner
    hiding = np.stack([np.stack([np.array(ORDER), np.full(6, UNCHANGED_PATCH)])] * 2)
    patches = np.zeros((2, 3, 3, 4, 4), dtype=np.uint8)
    draw_reconstruction(pixels, hiding, patches, patches, tmp_path / "reconstruction.jpg")
    with Image.open(tmp_path / "reconstruction.jpg") as sheet:
        assert sheet.size == (4 * 158 + 14, 2 * (96 + 40) + 14)  # tiles of 144 x 96 pixels
