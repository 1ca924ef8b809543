"""Image files made to do harm: each is refused in one line, or decoded at the cost of its pixels."""

import contextlib
import os
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.pictures import encoded
from vitrail.data import decode as decoding
from vitrail.data.decode import MARKER_LIMIT, SCAN_LIMIT, decode, read_header
from vitrail.data.folder import open_folder
from vitrail.data.pack import pack
from vitrail.errors import DataError
from vitrail.files import open_regular_file

Attacked = Callable[[str, str], None]


def run_python(code: str, *arguments: object, timeout: float = 20) -> str:
    """What a program prints; one that hangs fails the test instead of hanging it."""
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True).stdout


def segment(kind: int, content: bytes = b"") -> bytes:
    return bytes((0xFF, kind)) + struct.pack(">H", len(content) + 2) + content


def after_start(jpeg: bytes, content: bytes) -> bytes:
    return jpeg[:2] + content + jpeg[2:]


def progressive(side: int, scans: int) -> bytes:
    """A grey progressive JPEG of so many scans, each of which says in a few bytes that nothing changes."""
    tables = segment(0xC4, b"\x00\x01" + bytes(16)) + segment(0xC4, b"\x10\x01" + bytes(15) + b"\xe0")
    frame = segment(0xDB, b"\0" + b"\x10" * 64) + segment(0xC2, struct.pack(">BHHB", 8, side, side, 1) + b"\1\x11\0")
    blocks = (-(-side // 8)) ** 2
    first = segment(0xDA, b"\1\1\0\0\0\0") + bytes(-(-blocks // 8))
    bits = "011111111111111" * -(-blocks // 32767)  # a run of 32,767 blocks that end at once
    bits += "1" * (-len(bits) % 8)
    entropy = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    return (
        b"\xff\xd8" + frame + tables + first + (segment(0xDA, b"\1\1\0\1\x3f\0") + entropy) * (scans - 1) + b"\xff\xd9"
    )


# --- slow files ------------------------------------------------------------------------------------------------------


@pytest.mark.attack
def test_a_jpeg_of_8000_scans_is_refused_at_once(attacked: Attacked) -> None:
    content = progressive(7000, 8000)
    assert 690_000 < len(content) < 710_000
    start = time.monotonic()
    with pytest.raises(DataError, match="over 100 scans"):
        decode(content)
    seconds = time.monotonic() - start
    assert seconds < 1
    assert decode(progressive(64, SCAN_LIMIT)).shape == (3, 64, 64)
    with pytest.raises(DataError, match="over 100 scans"):
        decode(progressive(64, SCAN_LIMIT + 1))
    attacked("a 704-kB JPEG, 7000 x 7000, of 8,000 scans", f"refused in {1000 * seconds:.1f} ms")


def test_a_jpeg_beyond_the_pixel_limit_may_have_fewer_scans() -> None:
    """100 passes over 205 megapixels would take longer than over the largest image of another kind."""
    for scans, reason in ((41, "has over 40 scans"), (2, "")):
        content = progressive(9_500, scans)
        if reason:
            with pytest.raises(DataError, match=reason):
                decoding.open_image(content)
        else:
            assert decoding.open_image(content).height == 4_750


def test_scans_of_a_preview_or_behind_the_image_are_not_the_images() -> None:
    """Cameras embed JPEGs in a JPEG's segments, and phones append a film, whose bytes are as good as random."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))
    for options in ({}, {"progressive": True}):
        plain = encoded(image, "JPEG", **options)
        preview = segment(0xE2, b"MPF\0" + b"\xff\xda\0\x02" * 500)
        for content in (after_start(plain, preview), plain + b"\xff\xda\0\x02" * 500):
            assert decode(content).tolist() == decode(plain).tolist()
            assert read_header(content, name="x") == ("JPEG", 20, 30)


def test_a_sequential_jpeg_cannot_repeat_its_scan() -> None:
    """Scans of a frame whose first holds all components are not counted: the decoder takes no second."""
    content = encoded(Image.new("RGB", (2000, 2000)), "JPEG")
    scan = content[content.index(b"\xff\xda") : -2]
    start = time.monotonic()
    with contextlib.suppress(DataError):
        decode(content[:-2] + scan * 500 + b"\xff\xd9")
    assert time.monotonic() - start < 2


@pytest.mark.attack
@pytest.mark.parametrize(
    ("kind", "filling"),
    [
        ("comments", segment(0xFE) * 2_000_000),
        ("profiles", segment(0xE2, b"ICC_PROFILE\0\1\1") * 400_000),
        ("EXIF blocks", segment(0xE1, b"Exif\0\0a") * 700_000),
        ("fill bytes", b"\xff" * 8_000_000),
        ("escaped bytes", b"\xff\0" * 4_000_000),
        ("markers that are reserved", b"\xff\xf0" * 4_000_000),
        ("markers within reserved ones", (b"\xff\xf0\xff\xff" + segment(0xFE) * 16_000) * 100),
        ("plain junk", b"a" * 8_000_000),
    ],
)
def test_a_jpeg_of_millions_of_markers_is_refused_at_once(
    kind: str, filling: bytes, attacked: Attacked, tmp_path: Path
) -> None:
    content = after_start(encoded(Image.new("RGB", (16, 16)), "JPEG"), filling)
    path = tmp_path / "a.jpg"
    path.write_bytes(content)
    start = time.monotonic()
    for read in (lambda: decode(content), lambda: read_header(content, name="x"), lambda: read_header(path, name="x")):
        with pytest.raises(DataError, match="before its pixels"):
            read()
    seconds = time.monotonic() - start
    assert seconds < 1
    attacked(f"a JPEG of millions of markers: {kind}", f"refused in {1000 * seconds / 3:.1f} ms")


def test_as_many_markers_as_a_camera_may_write_are_read() -> None:
    plain = encoded(Image.new("RGB", (16, 16), "red"), "JPEG")
    many = after_start(plain, segment(0xFE, b"x" * 200) * (MARKER_LIMIT - 100) + b"\xff" * 100)
    assert decode(many).tolist() == decode(plain).tolist()


@pytest.mark.attack
def test_a_png_of_many_profiles_is_refused_at_once(attacked: Attacked) -> None:
    plain = encoded(Image.new("RGB", (16, 16), "red"), "PNG")
    data = b"iCCPp\0\0" + zlib.compress(bytes(2**20), 9)
    profile = struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))
    for place in (33, len(plain) - 12):  # before the pixels, and behind them
        content = plain[:place] + profile * 900 + plain[place:]
        start = time.monotonic()
        with pytest.raises(DataError, match="over 16 color profiles"):
            decode(content)
        seconds = time.monotonic() - start
        assert seconds < 0.5
        assert decode(plain[:place] + profile + plain[place:]).tolist() == decode(plain).tolist()
    attacked("a 950-kB PNG of 900 color profiles, 1 MB each", f"refused in {1000 * seconds:.1f} ms")


def tile_tiff(side: int) -> bytes:
    """A TIFF of 16 x 16 pixels in one tile of side x side."""
    tile = zlib.compress(bytes(side) * side, 9)
    entries = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side)]
    start = 8 + 2 + 12 * 10 + 4
    entries += [(324, start), (325, len(tile))]
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", 10) + directory + bytes(4) + tile


@pytest.mark.attack
def test_a_tiff_with_a_tile_far_larger_than_itself_is_refused(attacked: Attacked) -> None:
    assert decode(tile_tiff(2048)).shape == (3, 16, 16)
    content = tile_tiff(8_000)
    start = time.monotonic()
    with pytest.raises(DataError, match="tiles of 8000 x 8000 pixels"):
        decode(content)
    seconds = time.monotonic() - start
    assert seconds < 1
    attacked("a TIFF of 16 x 16 pixels in a tile of 64 megapixels", f"refused in {1000 * seconds:.1f} ms")


# --- memory ----------------------------------------------------------------------------------------------------------

PEAK = """
import sys
from pathlib import Path
from PIL import Image
from vitrail.data import decode as decoding
Image.init(), decoding.decoder()
content = Path(sys.argv[1]).read_bytes()
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = peak()
pixels = decoding.decode(content)
print((peak() - before) / (pixels.shape[1] * pixels.shape[2]))
"""
WORST = 18  # bytes a pixel; WebP takes 17 in Pillow's own decoder


@pytest.mark.attack
def test_a_16_bit_png_of_50_megapixels_takes_little_more_than_itself(tmp_path: Path, attacked: Attacked) -> None:
    path = tmp_path / "wide.png"
    Image.fromarray(np.zeros((7071, 7071), dtype=np.uint16)).save(path, compress_level=9)
    assert path.stat().st_size < 120_000
    each = float(run_python(PEAK, path, timeout=60))
    assert each < 7  # 2 of the image, 3 of the result
    attacked("a 97-kB 16-bit PNG, 7071 x 7071", f"decoded in {each * 50e6 / 1e6:.0f} MB, {each:.1f} bytes a pixel")


@pytest.mark.attack
@pytest.mark.soak
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        *(("JPEG", mode, {"progressive": True, "subsampling": 0}) for mode in ("RGB", "L", "CMYK")),
        *(("PNG", mode, {"compress_level": 1}) for mode in ("RGB", "RGBA", "LA", "P", "1")),
        *(("WEBP", mode, {"lossless": True, "method": 0, "quality": 0}) for mode in ("RGB", "RGBA")),
        ("BMP", "RGB", {}),
        ("GIF", "P", {}),
        *(("TIFF", mode, {"compression": "tiff_lzw", "strip_size": 2**40}) for mode in ("RGB", "RGBA", "CMYK", "I")),
        ("TIFF", "F", {}),
        *(("AVIF", mode, {"speed": 10, "subsampling": "4:4:4"}) for mode in ("RGB", "RGBA")),
    ],
)
def test_no_kind_of_image_takes_more_than_the_stated_bytes_a_pixel(
    kind: str, mode: str, options: dict[str, object], turned: bool, tmp_path: Path, attacked: Attacked
) -> None:
    gradient = Image.linear_gradient("L").resize((5000, 5000))
    exif = Image.Exif()
    exif[0x0112] = 6 if turned else 1
    if kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF"):
        options = options | {"exif": exif}
    gradient.convert("RGB" if mode in ("RGBA", "CMYK") else mode).convert(mode).save(
        tmp_path / "image", kind, **options
    )
    each = float(run_python(PEAK, tmp_path / "image", timeout=60))
    assert each < WORST
    attacked(f"25 megapixels, {kind} {mode}{', turned' if turned else ''}", f"{each:.1f} bytes a pixel")


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


# --- what is no file -------------------------------------------------------------------------------------------------

REFUSED = """
import sys, resource
from pathlib import Path
from vitrail.data.decode import decode, read_header
from vitrail.errors import DataError
resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30,) * 2)
for path in map(Path, sys.argv[1:]):
    for read in (decode, lambda path: read_header(path, name=str(path))):
        try:
            read(path)
        except DataError as error:
            print(error)
"""


def hostile_folder(root: Path) -> Path:
    """Six images and a pipe, an endless device and a socket among them."""
    for name in ("rose", "tulip"):
        (root / name).mkdir(parents=True)
        for number in range(3):
            (root / name / f"{number}.png").write_bytes(encoded(Image.new("RGB", (9, 9), (number, 0, 0)), "PNG"))
    os.mkfifo(root / "rose" / "pipe.png")
    (root / "rose" / "zero.jpg").symlink_to("/dev/zero")
    (root / "tulip" / "terminal.jpg").symlink_to("/dev/null")
    return root


@pytest.mark.attack
def test_pipes_and_devices_named_like_images_are_refused_at_once(tmp_path: Path, attacked: Attacked) -> None:
    root = hostile_folder(tmp_path)
    paths = [root / name for name in ("rose/pipe.png", "rose/zero.jpg", "tulip/terminal.jpg", "rose")]
    lines = run_python(REFUSED, *paths).splitlines()
    assert lines == [f"{path} is a folder, pipe, socket or device: pass a regular file" for path in paths for _ in "12"]
    attacked("a pipe and links to /dev/zero and /dev/null named .png and .jpg", "each refused in one line")


CHECKED = """
import sys
from pathlib import Path
from vitrail.data.image_scan import scan_dataset
from vitrail.data.folder import open_folder
for limit in (200_000, 1):
    scan = scan_dataset(open_folder(Path(sys.argv[1])), max_decoded=limit)
    print(*sorted(f"{scan.get_image_name(image)} {reason}" for image, reason in scan.bad_reasons.items()), sep="\\n")
"""


@pytest.mark.attack
def test_a_check_names_pipes_and_devices_and_goes_on(tmp_path: Path, attacked: Attacked) -> None:
    root = hostile_folder(tmp_path)
    lines = run_python(CHECKED, root, timeout=60).splitlines()
    reason = "is a folder, pipe, socket or device: pass a regular file"
    assert lines == [f"{name} {reason}" for name in ("rose/pipe.png", "rose/zero.jpg", "tulip/terminal.jpg")] * 2
    attacked("a dataset with a pipe and devices among its images", "data check names 3, and reads the others")


def test_a_packing_refuses_what_is_no_file(tmp_path: Path) -> None:
    root = hostile_folder(tmp_path / "data")
    (root / "rose" / "pipe.png").unlink()
    with pytest.raises(DataError, match=r"zero\.jpg is a folder, pipe, socket or device"):
        pack(open_folder(root), tmp_path / "out")


def test_a_file_that_grows_is_read_to_the_size_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(Image.new("RGB", (4, 4)), "PNG"))
    honest, sizes = os.fstat, []

    def grow(descriptor: int) -> os.stat_result:
        status = honest(descriptor)
        sizes.append(status.st_size)
        with path.open("ab") as file:
            file.write(bytes(1000))
        return status

    monkeypatch.setattr(os, "fstat", grow)
    assert len(decoding.read_image_file(path, name="a")) == sizes[-1]


def test_a_descriptor_is_closed_after_a_refusal(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(10):
        with pytest.raises(DataError), open_regular_file(tmp_path):
            pass
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
