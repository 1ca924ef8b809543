"""Image bytes to pixels: unusual formats checked by hand, broken files named."""

import io
import sys
import zlib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from tests.data.test_mutations import encode_originals
from vitrail.data import decode as decoding
from vitrail.data import image_headers
from vitrail.data.decode import decode, open_image
from vitrail.data.image_headers import get_readable_formats, read_header
from vitrail.errors import DataError

RED = (200, 30, 40)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(size: tuple[int, int] = (6, 4)) -> Image.Image:
    return Image.new("RGB", size, RED)


@pytest.mark.parametrize("kind", get_readable_formats())
def test_every_format_gives_its_pixels(kind: str) -> None:
    pixels = decode(encoded(picture(), kind))
    assert pixels.shape == (3, 4, 6)
    assert np.abs(pixels.numpy()[:, 0, 0].astype(int) - RED).max() <= 10  # JPEG, WebP and GIF are not exact


def test_path_string_bytes_and_pillow_agree(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(picture()))
    for source in (path, str(path), path.read_bytes(), picture()):
        assert decode(source).tolist() == decode(path).tolist()


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    wide = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    assert decode(encoded(Image.fromarray(wide)))[0].tolist() == [[0, 1, 128, 255]]


@pytest.mark.parametrize("white", [1, 255, 65535])
def test_floats_are_scaled_by_the_range_they_lie_in(white: int) -> None:
    values = np.array([[0, 0.25, 0.5, 1.04, -0.02]], dtype=np.float32) * white
    assert decode(encoded(Image.fromarray(values), "TIFF"))[0].tolist() == [[0, 64, 128, 255, 0]]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([0.0, 3e5], "floats from 0 to 3e.05; 0 to 1, 255 or 65535 are known: save it with 8 or 16 bits"),
        ([-2.0, 0.5], "floats from -2 to 0.5"),
        ([0.5, float("nan")], "not finite"),
    ],
)
def test_floats_of_no_known_range_are_refused(values: list[float], reason: str) -> None:
    with pytest.raises(DataError, match=f"x cannot be decoded: .*{reason}"):
        decode(encoded(Image.fromarray(np.array([values], dtype=np.float32)), "TIFF"), name="x")


def test_32_bit_integers_with_8_bit_values_are_not_black() -> None:
    for values, expected in (([0, 9, 255], [0, 9, 255]), ([0, 257, 65535], [0, 1, 255])):
        content = encoded(Image.fromarray(np.array([values], dtype=np.int32)), "TIFF")
        assert decode(content)[0].tolist() == [expected]


def test_heif_is_read_where_its_decoder_is_installed() -> None:
    pytest.importorskip("pillow_heif", reason="the extra `heif` is not installed")
    content = encoded(picture((64, 48)), "HEIF")
    assert decode(content).shape == (3, 48, 64)
    assert read_header(content, name="x") == ("HEIF", 48, 64)
    assert {".heic", ".heif"} <= set(image_headers.get_image_suffixes())


def test_heif_is_decoded_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are decoded side by side already. Its decoder is rarely installed, so its options are checked."""
    options: dict[str, object] = {}
    decoder = SimpleNamespace(register_heif_opener=lambda **keywords: options.update(keywords))
    monkeypatch.setitem(sys.modules, "pillow_heif", decoder)
    assert "HEIF" in image_headers.get_readable_formats.__wrapped__()
    assert options["decode_threads"] == 1


TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@pytest.mark.parametrize("strip", [50, 2**20])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "jpeg"}),
        ("TIFF", {"xmp": True}),
    ],
)
def test_every_orientation_is_applied_once_in_every_format_that_states_it(
    kind: str, options: dict[str, Any], orientation: int, strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_STRIP_PIXELS", strip)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 16, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    metadata: dict[str, Any] = {"exif": exif}
    if options.get("xmp"):
        options, metadata = {}, {"tiffinfo": {700: b'<x tiff:Orientation="%d"/>' % orientation}}
    stored = Image.open(io.BytesIO(encoded(image, kind, **options))).convert("RGB")
    upright = np.asarray(stored if orientation == 1 else stored.transpose(TRANSPOSES[orientation]))
    content = encoded(image, kind, **options, **metadata)
    loaded = Image.open(io.BytesIO(content))
    loaded.load()
    for fast in (True, False):
        if not fast:
            monkeypatch.setattr(decoding, "_load_simplejpeg", lambda: None)
        for source in (content, Image.open(io.BytesIO(content)), loaded):
            opened = open_image(source)
            assert (opened.height, opened.width) == upright.shape[:2]
            assert np.array_equal(opened.decode_pixels().permute(1, 2, 0), upright)
            assert np.array_equal(opened.decode_pixels(min_rows=3)[:, :3].permute(1, 2, 0), upright[:3])
        assert read_header(content, name="x") == (kind, *upright.shape[:2])


def test_a_jpeg_with_others_behind_it_is_a_jpeg(tmp_path: Path) -> None:
    """Phones write them; Pillow calls them MPO."""
    content = encoded(picture(), "MPO", save_all=True, append_images=[picture()])
    assert read_header(content, name="x") == ("JPEG", 4, 6)
    assert decode(content).shape == (3, 4, 6)


def test_transparency_is_laid_on_white() -> None:
    half = Image.new("RGBA", (1, 1), (0, 0, 0, 128))
    assert decode(encoded(half)).flatten().tolist() == [127, 127, 127]
    palette = Image.new("P", (1, 1))
    palette.putpalette([10, 20, 30])
    assert decode(encoded(palette, transparency=0)).flatten().tolist() == [255, 255, 255]


def test_cmyk_grey_and_animations_become_plain_pictures() -> None:
    assert decode(encoded(picture().convert("CMYK"), "JPEG")).shape == (3, 4, 6)
    assert decode(encoded(picture().convert("L"))).unique().numel() == 1
    moving = encoded(picture(), "GIF", save_all=True, append_images=[Image.new("RGB", (6, 4), "blue")])
    assert decode(moving)[0].float().mean() > 150  # the first frame, which is red
    assert decode(picture(), channels=1).shape == (1, 4, 6)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"", "not an image of a known format"),
        (b"<html><body>404</body></html>", "not an image of a known format"),
        (encoded(picture((64, 64)), "JPEG")[:-60], "cannot be decoded: image file is truncated|cannot be decoded"),
        (encoded(Image.effect_noise((64, 64), 50))[:600], "cannot be decoded"),
        (encoded(picture(), "PPM"), "not an image of a known format"),
        ("/nowhere/a.png", "/nowhere/a.png does not exist"),
    ],
)
def test_a_broken_image_is_named_with_its_reason(source: bytes | str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        decode(source)


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    for side, reason in ((60_000, "too many pixels"), (10_000, "10000 x 10000 pixels; from 1 to 89,478,485")):
        bomb = bytearray(encoded(Image.new("1", (8, 8))))
        bomb[16:24] = side.to_bytes(4, "big") * 2  # the header's width and height
        bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
        expected_warning = pytest.warns(Image.DecompressionBombWarning) if side == 10_000 else nullcontext()
        with expected_warning, pytest.raises(DataError, match=reason):
            decode(bytes(bomb))


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
@pytest.mark.parametrize("orientation", [1, 6])
def test_a_jpeg_of_more_pixels_than_fit_is_decoded_at_half_its_sides(
    options: dict[str, Any], orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    content = encoded(Image.effect_noise((101, 80), 50).convert("RGB"), "JPEG", exif=exif, **options)
    half = Image.open(io.BytesIO(content))
    half.draft(None, (50, 40))
    expected = np.asarray(ImageOps.exif_transpose(half))
    monkeypatch.setattr(image_headers, "PIXEL_LIMIT", 8_079)
    monkeypatch.setattr(image_headers, "JPEG_PIXEL_LIMIT", 8_080)
    assert np.array_equal(decode(content).permute(1, 2, 0).numpy(), expected)
    assert expected.shape == ((51, 40, 3) if orientation == 6 else (40, 51, 3))
    opened = decoding.open_image(content)
    assert (opened.height, opened.width, opened.reduction) == (*expected.shape[:2], 2)
    assert read_header(content, name="x") == ("JPEG", *((101, 80) if orientation == 6 else (80, 101)))
    with pytest.raises(DataError, match="x has 101 x 80 pixels; from 1 to 8,079 are decoded, of a JPEG 205,000,000"):
        decode(encoded(Image.open(io.BytesIO(content)), "PNG"), name="x")
    monkeypatch.setattr(image_headers, "JPEG_PIXEL_LIMIT", 8_079)
    with pytest.raises(DataError, match=r"x has 101 x 80 pixels; from 1 to 8,079 are decoded$"):
        decode(content, name="x")


def test_a_photo_of_200_megapixels_is_decoded() -> None:
    content = encoded(Image.new("L", (16_320, 12_240), 99), "JPEG")
    assert read_header(content, name="x") == ("JPEG", 12_240, 16_320)
    pixels = decode(content, channels=1)
    assert pixels.shape == (1, 6_120, 8_160)
    assert bool((pixels == 99).all())


def test_four_channels_are_not_read_from_a_file() -> None:
    with pytest.raises(DataError, match="1 or 3 channels and the model takes 4"):
        decode(picture(), channels=4)


@pytest.mark.parametrize("strip", [1, 7, 64, 2**20])
def test_strips_give_the_pixels_of_the_whole(strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mode, against the same conversions of the whole image at once."""
    generator = np.random.default_rng(0)
    colors = Image.fromarray(generator.integers(0, 256, (23, 31, 4), dtype=np.uint8), "RGBA")
    deep = generator.integers(-70_000, 140_000, (23, 31), dtype=np.int32)
    palette = colors.convert("RGB").quantize(16)
    clear = palette.copy()
    clear.info["transparency"] = 3
    keyed = colors.convert("RGB")
    keyed.info["transparency"] = keyed.getpixel((0, 0))
    short = deep.clip(0, 65535)
    images = [
        *(colors.convert("RGB").convert(mode) for mode in ("RGB", "L", "1", "CMYK", "YCbCr", "HSV", "F")),
        *(colors, colors.convert("LA"), palette, clear, keyed),
        *(Image.fromarray(deep), Image.fromarray(short.astype("<u2")), Image.fromarray(short.astype(">u2"))),
    ]
    monkeypatch.setattr(decoding, "_STRIP_PIXELS", strip)
    for image in images:
        for channels, mode in ((3, "RGB"), (1, "L")):
            expected = np.asarray(convert_whole(image).convert(mode)).reshape(23, 31, channels)
            assert np.array_equal(decode(image, channels).permute(1, 2, 0).numpy(), expected), image.mode


def convert_whole(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        image = Image.fromarray((values.clip(0, 65535) * 255 // 65535).astype(np.uint8))
    if image.mode == "F":
        image = Image.fromarray(np.rint(np.asarray(image)).astype(np.uint8))
    if image.has_transparency_data:
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image


# --- the fast decoder ------------------------------------------------------------------------------------------------


def decode_without_simplejpeg(content: bytes, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patched:
        patched.setattr(decoding, "_load_simplejpeg", lambda: None)
        return decode(content)


@pytest.mark.parametrize("quality", [30, 75, 95])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"optimize": True}, {"restart_marker_rows": 1}])
def test_simplejpegs_pixels_are_pillows_to_the_bit(
    quality: int, subsampling: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("simplejpeg", reason="the extra `fast` is not installed")
    assert decoding.get_jpeg_decoder_name() == "simplejpeg, bit-equal to Pillow"
    generator = np.random.default_rng(quality)
    for size in [(1, 1), (7, 9), (16, 16), (61, 83)]:
        noise = generator.integers(0, 256, (*size, 3), dtype=np.uint8)
        for mode in ("RGB", "L"):
            image = Image.fromarray(noise).convert(mode)
            content = encoded(image, "JPEG", quality=quality, subsampling=subsampling, **options)
            assert decode(content).tolist() == decode_without_simplejpeg(content, monkeypatch).tolist()


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}])
def test_the_first_rows_alone_are_those_of_the_whole(subsampling: int, options: dict[str, Any]) -> None:
    generator = np.random.default_rng(7)
    noise = Image.fromarray(generator.integers(0, 256, (157, 83, 3), dtype=np.uint8))
    content = encoded(noise, "JPEG", quality=85, subsampling=subsampling, **options)
    whole = decode(content)
    for rows in range(1, 158):
        part = open_image(content).decode_pixels(3, rows)
        assert part.shape[1] >= rows
        assert torch.equal(part[:, :rows], whole[:, :rows])
    if not options and decoding.get_jpeg_decoder_name() != "Pillow":
        assert open_image(content).decode_pixels(3, 10).shape[1] == 32  # the rest was not decoded
    assert open_image(content)[1:3] == (157, 83)


def test_a_file_cut_short_is_refused_even_where_its_first_rows_are_whole() -> None:
    noise = Image.fromarray(np.random.default_rng(7).integers(0, 256, (157, 83, 3), dtype=np.uint8))
    content = encoded(noise, "JPEG")
    for broken in (content[:-2], content[:-1000], content[: len(content) // 2]):
        with pytest.raises(DataError, match="truncated"):
            open_image(broken).decode_pixels(3, 10)


def test_sizes_are_those_of_the_pixels_for_every_kind() -> None:
    for content in encode_originals():
        assert open_image(content)[1:3] == tuple(decode(content).shape[1:])
    assert open_image(picture((5, 9)))[1:3] == (9, 5)
    with pytest.raises(DataError, match=r"^thing is not an image"):
        open_image(b"x", name="thing")
    with pytest.raises(DataError, match="600 times"):
        open_image(encoded(picture((1, 3000)), "JPEG"))


def test_pillow_decodes_what_simplejpeg_would_decode_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotated, CMYK and grey-wanted JPEGs, and ones with a flaw: the same pixels or the same refusal."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 8
    whole = encoded(image, "JPEG")
    flawed = [whole + b"trailing", whole[:-2], whole[:300], whole[:-200] + b"\xff" * 50 + whole[-150:]]
    for content in [encoded(image, "JPEG", exif=exif), encoded(image.convert("CMYK"), "JPEG"), *flawed]:
        results = [decode_or_error(content, channels) for channels in (3, 1)]
        with monkeypatch.context() as patched:
            patched.setattr(decoding, "_load_simplejpeg", lambda: None)
            expected = [decode_or_error(content, channels) for channels in (3, 1)]
        assert results == expected


def decode_or_error(content: bytes, channels: int) -> object:
    try:
        return decode(content, channels).tolist()
    except DataError as error:
        return str(error)


def test_a_decoder_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    simplejpeg = pytest.importorskip("simplejpeg", reason="the extra `fast` is not installed")
    honest = simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *arguments: honest(*arguments) ^ 1)
    decoding._load_simplejpeg.cache_clear()
    try:
        assert decoding.get_jpeg_decoder_name() == "Pillow"
    finally:
        decoding._load_simplejpeg.cache_clear()


@pytest.mark.parametrize("size", [(1, 3000), (3000, 1), (2, 1300)])
def test_a_line_of_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(DataError, match="600 times the other"):
        decode(encoded(picture(size)))


def test_a_damaged_exif_block_costs_the_image_nothing() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010F] = "camera"
    plain = decode(encoded(picture(), "JPEG")).tolist()
    whole = encoded(picture(), "JPEG", exif=exif)
    start = whole.index(b"Exif")
    end = start - 2 + int.from_bytes(whole[start - 2 : start], "big")
    generator = np.random.default_rng(0)
    for _ in range(500):
        broken = bytearray(whole)
        for place in generator.integers(start + 6, end, 4).tolist():
            broken[place] = int(generator.integers(0, 256))
        pixels = decode(bytes(broken))
        assert pixels.shape in ((3, 4, 6), (3, 6, 4))
    assert decode(whole.replace(b"Exif", b"Nope")).tolist() == plain


def test_an_error_calls_the_image_by_the_name_given() -> None:
    with pytest.raises(DataError, match=r"^train/7 is not an image"):
        decode(b"x", name="train/7")
