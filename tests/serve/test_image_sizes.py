"""Sizes by a look."""

import io
import math

import pytest
from PIL import Image

from tests.serve import attacks
from tests.serve.serving import picture
from vitrail.serve.image_sizes import estimate_pixels


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
@pytest.mark.parametrize("size", [(500, 375), (33, 1000), (16, 16)])
def test_the_size_is_seen_in_the_first_bytes(format: str, size: tuple[int, int]) -> None:  # noqa: A002
    assert estimate_pixels(memoryview(picture(0, size, format))) == size[0] * size[1]


@pytest.mark.parametrize("settings", [{"lossless": True}, {"lossless": True, "exact": True}, {"quality": 30}])
def test_webp_has_three_kinds_of_heads(settings: dict[str, int]) -> None:
    for mode in ("RGB", "RGBA"):
        file = io.BytesIO()
        Image.new(mode, (300, 200)).save(file, "WEBP", **settings)
        assert estimate_pixels(memoryview(file.getvalue())) == 60_000


def test_what_is_not_seen_at_once_is_taken_for_large() -> None:
    markers = attacks.make_jpeg_of_markers(1000)
    for file in (picture(format="TIFF"), markers, b"x" * 100, b"\xff\xd8" * 50, b"RIFF" * 10):
        assert estimate_pixels(memoryview(file)) == math.inf
    assert estimate_pixels(memoryview(b"")) == 0
    assert estimate_pixels(memoryview(attacks.make_slow_jpeg(3000, 1))) == 9e6
