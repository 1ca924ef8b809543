"""Grids, masked patches and overlays of images, read back from their pixels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageColor

from vitrail.config.training import MASK_TOKEN, UNCHANGED_PATCH
from vitrail.visualization.crops import Box
from vitrail.visualization.image_grids import (
    MASK_GRAY,
    draw_reconstruction,
    make_panels,
    overlay_attention,
    paint_patch_colors,
    resize_image,
    write_image_grid,
    write_panels,
)
from vitrail.visualization.plots import BLUE, ORANGE, get_heat_colormap

TILE, GAP = 144, 14
COLOURS = [(255, 0, 0), (0, 200, 0), (0, 0, 255), (250, 250, 0), (90, 90, 90)]
ORDER = (3, 0, 5, 1, 2, 4)  # of a picture of two rows and three columns; the first three are masked


def flat(side: int, colours: list[tuple[int, int, int]] = COLOURS) -> torch.Tensor:
    """(B, 3, S, S): one colour each."""
    return torch.tensor(colours, dtype=torch.uint8)[:, :, None, None].expand(-1, -1, side, side)


def pixels(path: Path) -> NDArray[np.int64]:
    with Image.open(path) as picture:
        assert picture.format == "JPEG"
        return np.array(picture, dtype=np.int64)  # (H, W, 3)


def near(values: NDArray[np.int64], wanted: Any) -> bool:
    return bool((abs(values - np.array(wanted)) <= 8).all())  # JPEG's error


@pytest.mark.parametrize("side", [8, 32, 144, 224])
def test_images_stand_in_rows_with_their_colours(tmp_path: Path, side: int) -> None:
    write_image_grid(flat(side), [""] * 5, tmp_path / "g.jpg", columns=3)
    picture = pixels(tmp_path / "g.jpg")
    shown = {8: 144, 32: 128, 144: 144, 224: 144}[side]  # enlarged 18 and 4 times, kept, reduced
    height = shown + 40
    assert picture.shape == (2 * height + GAP, 3 * (TILE + GAP) + GAP, 3)
    for place, colour in enumerate(COLOURS):
        top, left = GAP + place // 3 * height, GAP + place % 3 * (TILE + GAP) + (TILE - shown) // 2
        assert near(picture[top + 8 : top + shown - 8, left + 8 : left + shown - 8], colour)
        for inside, outside in [(top, top - 1), (top + shown - 1, top + shown)]:
            assert abs(picture[inside, left + 50] - colour).max() < 60
            assert picture[outside, left + 50].min() > 195
        for inside, outside in [(left, left - 1), (left + shown - 1, left + shown)]:
            assert abs(picture[top + 50, inside] - colour).max() < 60
            assert picture[top + 50, outside].min() > 195


def test_small_images_are_enlarged_without_smoothing(tmp_path: Path) -> None:
    board = np.indices((8, 8)).sum(axis=0) % 2 * 255  # black and white
    write_image_grid(board[None, None].astype(np.uint8), ["board"], tmp_path / "g.jpg")
    shown = pixels(tmp_path / "g.jpg")[GAP : GAP + TILE, GAP : GAP + TILE, 0].reshape(8, 18, 8, 18)
    assert (abs(shown - board[:, None, :, None])[:, 1:-1, :, 1:-1] < 90).all()  # JPEG rings; smooth would be 127
    assert abs(shown - board[:, None, :, None]).mean() < 5


@pytest.mark.parametrize(("channels", "wanted"), [(1, (10, 10, 10)), (2, (10, 10, 10)), (4, (10, 120, 230))])
def test_other_channels_than_three(tmp_path: Path, channels: int, wanted: tuple[int, int, int]) -> None:
    values = np.array([10, 120, 230, 77], dtype=np.uint8)[:channels]
    write_image_grid(np.tile(values[None, :, None, None], (1, 1, 16, 16)), ["x"], tmp_path / "g.jpg")
    assert near(pixels(tmp_path / "g.jpg")[GAP + 10 : GAP + 100, GAP + 10 : GAP + 100], wanted)


def test_a_wrong_answer_has_a_strong_frame_and_a_right_one_a_calm(tmp_path: Path) -> None:
    write_image_grid(flat(144), [""] * 5, tmp_path / "g.jpg", correct=[True, False, True, True, False])
    picture = pixels(tmp_path / "g.jpg")
    for place, right in enumerate([True, False, True, True, False]):
        left = GAP + place * (TILE + GAP)
        wanted = np.array(ImageColor.getrgb(BLUE if right else ORANGE))
        assert abs(picture[60:100, left - 1].mean(axis=0) - wanted).max() < 40  # beside the picture's own colour
        assert (abs(picture[60:100, left - 4] - wanted).max() < 40) != right  # only the strong one is that wide
        assert near(picture[60:100, left + 8], COLOURS[place])  # nothing of the image is covered


def test_no_more_than_sixty_four_are_shown(tmp_path: Path) -> None:
    images = np.zeros((70, 1, 8, 8), dtype=np.uint8)
    images[64:] = 255
    write_image_grid(images, [str(number) for number in range(70)], tmp_path / "all.jpg", correct=[True] * 70)
    write_image_grid(images[:64], [str(number) for number in range(64)], tmp_path / "first.jpg", correct=[True] * 64)
    assert (tmp_path / "all.jpg").read_bytes() == (tmp_path / "first.jpg").read_bytes()


def test_a_caption_too_few_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shorter"):
        write_image_grid(flat(8), ["a", "b"], tmp_path / "g.jpg")
    assert not list(tmp_path.iterdir())


def test_captions_stay_under_their_own_image(tmp_path: Path) -> None:
    write_image_grid(flat(8), ["W" * 300, "a name that goes on " * 9, "猫" * 50, "", "short"], tmp_path / "g.jpg")
    captions = pixels(tmp_path / "g.jpg")[GAP + TILE + 4 :]
    for place in range(6):
        assert near(captions[:, place * (TILE + GAP) + 2 : place * (TILE + GAP) + GAP - 2], (255, 255, 255))
    written = [(captions[:, GAP + place * (TILE + GAP) :][:, :TILE] < 128).any() for place in range(5)]
    assert written == [True, True, True, False, True]
    assert near(captions[-8:], (255, 255, 255))


def test_letters_of_other_languages_are_letters_not_boxes(tmp_path: Path) -> None:
    contents = set()
    for number, name in enumerate(["é", "è", "ß", "ж", "λ", "→"]):
        write_image_grid(flat(8)[:1], [name], tmp_path / f"{number}.jpg")
        contents.add((tmp_path / f"{number}.jpg").read_bytes())
    assert len(contents) == 6


@pytest.mark.parametrize("caption", ["猫", "\udc80", "a\nb", "\x00\x07", "قطة", "👩‍🚀"])
def test_no_caption_breaks_a_picture(tmp_path: Path, caption: str) -> None:
    for name in ("one.jpg", "two.jpg"):
        write_image_grid(flat(8)[:1], [caption], tmp_path / name)
    assert (tmp_path / "one.jpg").read_bytes() == (tmp_path / "two.jpg").read_bytes()
    assert pixels(tmp_path / "one.jpg").shape == (TILE + 40 + GAP, TILE + 2 * GAP, 3)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(picture: Image.Image, path: Path, *arguments: Any, **options: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match="no space"):
        write_image_grid(flat(8), [""] * 5, tmp_path / "g.jpg")
    assert not list(tmp_path.iterdir())


def photo(height: int = 60, width: int = 80) -> NDArray[np.uint8]:
    """(3, H, W): grey, lighter to the right."""
    return np.broadcast_to(np.linspace(40, 200, width).astype(np.uint8), (3, height, width))


def test_attention_is_laid_where_the_model_looked_and_the_rest_is_dim() -> None:
    image = photo()
    attention = np.zeros((4, 4), dtype=np.float32)
    attention[1, 2] = 0.7
    shown = overlay_attention(image, attention, Box(10, 0, 70, 60)).astype(int)
    assert shown.shape == (60, 80, 3)
    outside = np.concatenate([shown[:, :10], shown[:, 70:]], axis=1)
    before = np.concatenate([image[0, :, :10], image[0, :, 70:]], axis=1)[..., None]
    assert (abs(outside - 0.4 * before) <= 1).all()
    middle = shown[22, 47]  # of the patch, whose rows are 15 to 30 and columns 40 to 55
    assert (abs(middle - 0.3 * image[:, 22, 47] - 0.7 * get_heat_colormap()[255]) < 12).all()
    least = shown[52, 15]
    assert (abs(least - 0.7 * image[:, 52, 15] - 0.3 * get_heat_colormap()[0]) <= 1).all()
    row, column = divmod(int(shown[..., 0][:, 10:70].argmax()), 60)
    assert (15 <= row < 30, 40 <= column + 10 < 55) == (True, True)


def test_the_object_can_still_be_seen_under_the_greatest_attention() -> None:
    board = np.broadcast_to((np.indices((32, 32)).sum(axis=0) % 2 * 255).astype(np.uint8), (3, 32, 32))
    shown = overlay_attention(board, np.eye(2, dtype=np.float32)).astype(int)
    assert np.ptp(shown[4:8, 4:8].mean(axis=2)) > 60  # of 255 between black and white


def test_attention_without_differences_is_one_colour() -> None:
    shown = overlay_attention(np.full((1, 8, 8), 100, dtype=np.uint8), np.full((2, 2), 0.25, dtype=np.float32))
    assert (shown == shown[0, 0]).all()


def test_a_part_that_rounds_to_nothing_keeps_a_pixel() -> None:
    assert overlay_attention(photo(3, 600), np.ones((2, 2), dtype=np.float32), Box(299.6, 0, 300.1, 3)).shape == (
        3,
        600,
        3,
    )


def test_colours_stand_in_the_places_of_their_patches() -> None:
    colours = np.array([[[1, 0, 0], [0, 1, 0]], [[0, 0, 1], [1, 1, 1]]], dtype=np.float32)
    shown = paint_patch_colors(photo(20, 30), colours, Box(5, 0, 25, 20))
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
        part = shown[10 * row : 10 * row + 10, 5 + 10 * column : 15 + 10 * column]
        assert (part == (255 * colours[row, column]).astype(int)).all()
    assert (abs(shown[:, :5].astype(int) - 0.4 * photo(20, 30)[0, :, :5, None]) <= 1).all()


@pytest.mark.parametrize(("factor", "size"), [(1, (60, 80)), (4, (240, 320)), (0.5, (30, 40)), (0.001, (1, 1))])
def test_scaled_images_keep_their_shape_and_squares_stay_squares(factor: float, size: tuple[int, int]) -> None:
    image = photo()
    resized = resize_image(image, factor)
    assert resized.shape == (3, *size)
    if factor >= 1:
        assert np.array_equal(resized, image.repeat(int(factor), axis=1).repeat(int(factor), axis=2))


def test_panels_are_unscaled_pixels_with_captions(tmp_path: Path) -> None:
    """PNG for print: five pictures in rows of three, each with its exact pixels and something written under it."""
    shown = [np.full((50, 70, 3), colour, dtype=np.uint8) for colour in COLOURS]
    write_panels(
        shown, ["one", "a caption far too long for its picture", "", "кот", "$x"], tmp_path / "p.png", columns=3
    )
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.info["dpi"]) > 299
        sheet = np.array(picture)
    assert sheet.shape == (2 * (50 + 36) + 12, 3 * (70 + 12) + 12, 3)
    for place, colour in enumerate(COLOURS):
        top, left = 12 + place // 3 * 86, 12 + place % 3 * 82
        assert (sheet[top : top + 50, left : left + 70] == colour).all()
        caption = sheet[top + 50 : top + 74, left : left + 70]
        assert ((caption < 200).any()) == (place != 2)
        assert (sheet[:, left + 70 : left + 82] == 255).all() or place % 3 == 2


def make_picture(base: int) -> NDArray[np.uint8]:
    """(3, 8, 12): squares of four pixels, each of its own brightness."""
    squares = (base + np.arange(6)).reshape(2, 3).astype(np.uint8)
    return np.broadcast_to(squares.repeat(4, axis=0).repeat(4, axis=1), (3, 8, 12)).copy()


def split_patches(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The first channel's squares in raster order: (6, 4, 4)."""
    return image[0].reshape(2, 4, 3, 4).transpose(0, 2, 1, 3).reshape(6, 4, 4)


def test_each_panel_by_hand() -> None:
    replacements = np.full(6, UNCHANGED_PATCH)
    replacements[[3, 0]] = MASK_TOKEN, 4  # patch 5 is kept
    predicted = np.arange(3 * 3 * 4).reshape(3, 3, 2, 2).astype(np.uint8)  # of 2 x 2 places, each of two pixels
    target = np.full((3, 3, 1, 1), 200, dtype=np.uint8)
    mask = np.stack([np.array(ORDER), replacements])
    panels = make_panels(make_picture(10), make_picture(50), mask, predicted, target)
    plain = split_patches(make_picture(10))[:, 0, 0].tolist()
    assert np.array_equal(panels[0], make_picture(10))
    corrupted = [54, plain[1], plain[2], MASK_GRAY, plain[4], plain[5]]
    assert split_patches(panels[1]).reshape(6, -1).max(axis=1).tolist() == corrupted
    assert split_patches(panels[2])[3].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]
    assert split_patches(panels[2])[5, 0, 0] == predicted[2, 0, 0, 0]
    for panel in panels[2:]:
        visible = split_patches(panel)[[1, 2, 4]].reshape(3, -1)
        assert visible.max(axis=1).tolist() == [plain[index] for index in (1, 2, 4)]
    assert (split_patches(panels[3])[[0, 3, 5]] == 200).all()


def test_a_row_for_each_image_is_written(tmp_path: Path) -> None:
    pixels = np.stack([make_picture(base) for base in (10, 60, 110)])  # two and a partner
    masks = np.stack([np.stack([np.array(ORDER), np.full(6, UNCHANGED_PATCH)])] * 2)
    patches = np.zeros((2, 3, 3, 4, 4), dtype=np.uint8)
    draw_reconstruction(pixels, masks, patches, patches, tmp_path / "reconstruction.jpg")
    with Image.open(tmp_path / "reconstruction.jpg") as sheet:
        assert sheet.size == (4 * 158 + 14, 2 * (96 + 40) + 14)  # tiles of 144 x 96 pixels
