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

from tests.data.image_files import encode_image
from vitrail.data import decode as decoding
from vitrail.data.decode import decode
from vitrail.data.folder import open_folder
from vitrail.data.image_headers import MARKER_LIMIT, SCAN_LIMIT, read_header, read_image_file
from vitrail.data.pack import pack
from vitrail.errors import DataError
from vitrail.files import open_regular_file

Attacked = Callable[[str, str], None]


def run_python(code: str, *arguments: object, timeout: float = 20) -> str:
    """Return what a program prints; one that hangs fails the test instead of hanging it."""
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True).stdout


def build_segment(kind: int, content: bytes = b"") -> bytes:
    return bytes((0xFF, kind)) + struct.pack(">H", len(content) + 2) + content


def insert_after_start(jpeg: bytes, content: bytes) -> bytes:
    return jpeg[:2] + content + jpeg[2:]


def build_progressive_jpeg(side: int, scans: int) -> bytes:
    """Build a gray progressive JPEG of this many scans, each of which states in a few bytes that nothing changes."""
    tables = build_segment(0xC4, b"\x00\x01" + bytes(16)) + build_segment(0xC4, b"\x10\x01" + bytes(15) + b"\xe0")
    frame = build_segment(0xDB, b"\0" + b"\x10" * 64) + build_segment(
        0xC2, struct.pack(">BHHB", 8, side, side, 1) + b"\1\x11\0"
    )
    blocks = (-(-side // 8)) ** 2
    first = build_segment(0xDA, b"\1\1\0\0\0\0") + bytes(-(-blocks // 8))
    bits = "011111111111111" * -(-blocks // 32767)  # a run of 32,767 blocks that end at once
    bits += "1" * (-len(bits) % 8)
    entropy = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    return (
        b"\xff\xd8"
        + frame
        + tables
        + first
        + (build_segment(0xDA, b"\1\1\0\1\x3f\0") + entropy) * (scans - 1)
        + b"\xff\xd9"
    )


# --- slow files ------------------------------------------------------------------------------------------------------


@pytest.mark.attack
def test_a_jpeg_of_8000_scans_is_refused_at_once(attacked: Attacked) -> None:
    content = build_progressive_jpeg(7000, 8000)
    assert 690_000 < len(content) < 710_000
    start = time.monotonic()
    with pytest.raises(DataError, match="over 100 scans"):
        decode(content)
    seconds = time.monotonic() - start
    assert seconds < 1
    assert decode(build_progressive_jpeg(64, SCAN_LIMIT)).shape == (3, 64, 64)
    with pytest.raises(DataError, match="over 100 scans"):
        decode(build_progressive_jpeg(64, SCAN_LIMIT + 1))
    attacked("a 704-kB JPEG, 7000 x 7000, of 8,000 scans", f"refused in {1000 * seconds:.1f} ms")


def test_a_jpeg_beyond_the_pixel_limit_may_have_fewer_scans() -> None:
    """100 passes over 205 megapixels would take longer than over the largest image of another kind."""
    for scans, reason in ((41, "has over 40 scans"), (2, "")):
        content = build_progressive_jpeg(9_500, scans)
        if reason:
            with pytest.raises(DataError, match=reason):
                decoding.open_image(content)
        else:
            assert decoding.open_image(content).height == 4_750


def test_scans_of_a_preview_or_behind_the_image_are_not_the_images() -> None:
    """Cameras embed JPEGs in a JPEG's segments, and phones append a film, whose bytes are as good as random."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))
    for options in ({}, {"progressive": True}):
        plain = encode_image(image, "JPEG", **options)
        preview = build_segment(0xE2, b"MPF\0" + b"\xff\xda\0\x02" * 500)
        for content in (insert_after_start(plain, preview), plain + b"\xff\xda\0\x02" * 500):
            assert decode(content).tolist() == decode(plain).tolist()
            assert read_header(content, name="x") == ("JPEG", 20, 30)


def test_a_sequential_jpeg_cannot_repeat_its_scan() -> None:
    """Scans of a frame whose first holds all components are not counted: the decoder takes no second."""
    content = encode_image(Image.new("RGB", (2000, 2000)), "JPEG")
    scan = content[content.index(b"\xff\xda") : -2]
    start = time.monotonic()
    with contextlib.suppress(DataError):
        decode(content[:-2] + scan * 500 + b"\xff\xd9")
    assert time.monotonic() - start < 2


@pytest.mark.attack
@pytest.mark.parametrize(
    ("kind", "filling"),
    [
        ("comments", build_segment(0xFE) * 2_000_000),
        ("profiles", build_segment(0xE2, b"ICC_PROFILE\0\1\1") * 400_000),
        ("EXIF blocks", build_segment(0xE1, b"Exif\0\0a") * 700_000),
        ("fill bytes", b"\xff" * 8_000_000),
        ("escaped bytes", b"\xff\0" * 4_000_000),
        ("markers that are reserved", b"\xff\xf0" * 4_000_000),
        ("markers within reserved ones", (b"\xff\xf0\xff\xff" + build_segment(0xFE) * 16_000) * 100),
        ("plain junk", b"a" * 8_000_000),
    ],
)
def test_a_jpeg_of_millions_of_markers_is_refused_at_once(
    kind: str, filling: bytes, attacked: Attacked, tmp_path: Path
) -> None:
    content = insert_after_start(encode_image(Image.new("RGB", (16, 16)), "JPEG"), filling)
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
    plain = encode_image(Image.new("RGB", (16, 16), "red"), "JPEG")
    many = insert_after_start(plain, build_segment(0xFE, b"x" * 200) * (MARKER_LIMIT - 100) + b"\xff" * 100)
    assert decode(many).tolist() == decode(plain).tolist()


@pytest.mark.attack
def test_a_png_of_many_profiles_is_refused_at_once(attacked: Attacked) -> None:
    plain = encode_image(Image.new("RGB", (16, 16), "red"), "PNG")
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


def build_tiled_tiff(side: int) -> bytes:
    """Build a TIFF of 16 x 16 pixels in one tile of side x side."""
    tile = zlib.compress(bytes(side) * side, 9)
    entries = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side)]
    start = 8 + 2 + 12 * 10 + 4
    entries += [(324, start), (325, len(tile))]
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", 10) + directory + bytes(4) + tile


@pytest.mark.attack
def test_a_tiff_with_a_tile_far_larger_than_itself_is_refused(attacked: Attacked) -> None:
    assert decode(build_tiled_tiff(2048)).shape == (3, 16, 16)
    content = build_tiled_tiff(8_000)
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
Image.init(), decoding.get_jpeg_decoder_name()
content = Path(sys.argv[1]).read_bytes()
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = peak()
pixels = decoding.decode(content)
print((peak() - before) / (pixels.shape[1] * pixels.shape[2]))
"""
MAX_BYTES_PER_PIXEL = 18  # WebP takes 17 in Pillow's own decoder


@pytest.mark.attack
def test_a_16_bit_png_of_50_megapixels_takes_little_more_than_itself(tmp_path: Path, attacked: Attacked) -> None:
    path = tmp_path / "wide.png"
    Image.fromarray(np.zeros((7071, 7071), dtype=np.uint16)).save(path, compress_level=9)
    assert path.stat().st_size < 120_000
    bytes_per_pixel = float(run_python(PEAK, path, timeout=60))
    assert bytes_per_pixel < 7  # 2 of the image, 3 of the result
    attacked(
        "a 97-kB 16-bit PNG, 7071 x 7071",
        f"decoded in {bytes_per_pixel * 50e6 / 1e6:.0f} MB, {bytes_per_pixel:.1f} bytes a pixel",
    )


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
    bytes_per_pixel = float(run_python(PEAK, tmp_path / "image", timeout=60))
    assert bytes_per_pixel < MAX_BYTES_PER_PIXEL
    attacked(f"25 megapixels, {kind} {mode}{', turned' if turned else ''}", f"{bytes_per_pixel:.1f} bytes a pixel")


# --- not regular files -----------------------------------------------------------------------------------------------

REFUSED = """
import sys, resource
from pathlib import Path
from vitrail.data.decode import decode
from vitrail.data.image_headers import read_header
from vitrail.errors import DataError
resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30,) * 2)
for path in map(Path, sys.argv[1:]):
    for read in (decode, lambda path: read_header(path, name=str(path))):
        try:
            read(path)
        except DataError as error:
            print(error)
"""


def make_hostile_folder(root: Path) -> Path:
    """Make a folder of six images with a pipe and two devices among them."""
    for name in ("rose", "tulip"):
        (root / name).mkdir(parents=True)
        for number in range(3):
            (root / name / f"{number}.png").write_bytes(encode_image(Image.new("RGB", (9, 9), (number, 0, 0)), "PNG"))
    os.mkfifo(root / "rose" / "pipe.png")
    (root / "rose" / "zero.jpg").symlink_to("/dev/zero")
    (root / "tulip" / "terminal.jpg").symlink_to("/dev/null")
    return root


@pytest.mark.attack
def test_pipes_and_devices_named_like_images_are_refused_at_once(tmp_path: Path, attacked: Attacked) -> None:
    root = make_hostile_folder(tmp_path)
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
    root = make_hostile_folder(tmp_path)
    lines = run_python(CHECKED, root, timeout=60).splitlines()
    reason = "is a folder, pipe, socket or device: pass a regular file"
    assert lines == [f"{name} {reason}" for name in ("rose/pipe.png", "rose/zero.jpg", "tulip/terminal.jpg")] * 2
    attacked("a dataset with a pipe and devices among its images", "data check names 3, and reads the others")


def test_packing_refuses_what_is_not_a_regular_file(tmp_path: Path) -> None:
    root = make_hostile_folder(tmp_path / "data")
    (root / "rose" / "pipe.png").unlink()
    with pytest.raises(DataError, match=r"zero\.jpg is a folder, pipe, socket or device"):
        pack(open_folder(root), tmp_path / "out")


def test_a_file_that_grows_is_read_to_the_size_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encode_image(Image.new("RGB", (4, 4)), "PNG"))
    honest, sizes = os.fstat, []

    def grow(descriptor: int) -> os.stat_result:
        status = honest(descriptor)
        sizes.append(status.st_size)
        with path.open("ab") as file:
            file.write(bytes(1000))
        return status

    monkeypatch.setattr(os, "fstat", grow)
    assert len(read_image_file(path, name="a")) == sizes[-1]


def test_a_descriptor_is_closed_after_a_refusal(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(10):
        with pytest.raises(DataError), open_regular_file(tmp_path):
            pass
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
