"""Damaged images of every format: each is decoded or refused with one reason, none crashes or hangs the process."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.image_files import encode_image, make_image, write_image_folder
from vitrail.data.audit import audit_dataset
from vitrail.data.decode import decode
from vitrail.data.folder import open_folder
from vitrail.data.image_headers import get_readable_formats
from vitrail.data.image_scan import scan_dataset
from vitrail.errors import DataError


def encode_originals() -> list[bytes]:
    """Every format, in several of its kinds."""
    image = make_image(0, (40, 56))
    wide = Image.fromarray(np.random.default_rng(0).integers(0, 65536, (20, 30), dtype=np.uint16))
    exif = Image.Exif()
    exif[0x0112] = 6
    clear = image.convert("RGBA")
    clear.putalpha(90)
    frames = [make_image(seed, (16, 16)) for seed in range(3)]
    return [
        *(encode_image(image, kind) for kind in get_readable_formats()),
        encode_image(image, "JPEG", progressive=True, exif=exif),
        encode_image(image.convert("CMYK"), "JPEG"),
        encode_image(image.convert("L"), "JPEG"),
        encode_image(wide, "PNG"),
        encode_image(clear, "PNG"),
        encode_image(clear.quantize(16), "PNG", transparency=0),
        encode_image(clear, "WEBP", lossless=True),
        encode_image(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        encode_image(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        encode_image(image, "TIFF", compression="tiff_lzw"),
        encode_image(image, "TIFF", compression="jpeg"),
        encode_image(wide, "TIFF"),
        encode_image(image.convert("1"), "TIFF", compression="group4"),
        encode_image(image.convert("P"), "BMP"),
    ]


def mutate(original: bytes, generator: np.random.Generator) -> bytes:
    """Bytes flipped, cut, doubled, zeroed or from elsewhere; half of the harm near the front, where headers are."""
    content = bytearray(original)
    for _ in range(int(generator.integers(1, 6))):
        limit = len(content) if generator.random() < 0.5 else min(len(content), 200)
        at = int(generator.integers(0, max(limit, 1)))
        length = int(generator.integers(1, 40))
        match int(generator.integers(0, 6)):
            case 0:
                content[at : at + 1] = bytes([int(generator.integers(0, 256))])
            case 1:
                del content[at:]
            case 2:
                content[at:at] = content[at : at + length]
            case 3:
                content[at : at + length] = bytes(length)
            case 4:
                content[at : at + 4] = b"\xff" * 4
            case 5:
                del content[at : at + length]
    return bytes(content)


def decode_mutants(count: int, seed: int) -> tuple[int, int]:
    """How many of `count` mutants were decoded and how many refused; anything else fails."""
    generator = np.random.default_rng(seed)
    kinds = encode_originals()
    decoded, reasons = 0, []
    for number in range(count):
        content = mutate(kinds[number % len(kinds)], generator)
        start = time.monotonic()
        try:
            pixels = decode(content)
            assert pixels.shape[0] == 3
            decoded += 1
        except DataError as error:
            reasons.append(str(error))
        assert time.monotonic() - start < 20, f"mutant {number} took too long"
    assert all(reason.startswith("the image ") and "\n" not in reason for reason in reasons)
    return decoded, len(reasons)


def test_six_hundred_mutants_are_decoded_or_refused() -> None:
    decoded, refused = decode_mutants(600, seed=1)
    assert refused > 100
    assert decoded > 10


@pytest.mark.soak
def test_ten_thousand_mutants_are_decoded_or_refused(soaked: Callable[[int, str, str, str], None]) -> None:
    decoded, refused = decode_mutants(10_000, seed=2)
    assert decoded + refused == 10_000
    soaked(11, "bad images are refused, none crashes", "10,000 mutants", f"{refused:,} refused, {decoded:,} decoded")


@pytest.mark.soak
def test_a_check_names_each_of_ten_thousand_mutants_or_decodes_it(
    tmp_path: Path, soaked: Callable[[int, str, str, str], None]
) -> None:
    audit_mutants(tmp_path, 10_000)
    soaked(11, "bad images are named before training", "10,000 mutants", "each bad one named, with its reason")


def test_a_check_names_each_of_two_hundred_mutants_or_decodes_it(tmp_path: Path) -> None:
    audit_mutants(tmp_path, 200)


def audit_mutants(root: Path, count: int) -> None:
    generator = np.random.default_rng(3)
    kinds = encode_originals()
    place = write_image_folder(root, "train", "val", each=1) / "train" / "rose"
    bad = set()
    for number in range(count):
        content = mutate(kinds[number % len(kinds)], generator)
        (place / f"m{number:05d}.jpg").write_bytes(content)
        try:
            decode(content)
        except DataError:
            bad.add(f"train/rose/m{number:05d}.jpg")
    report = audit_dataset(scan_dataset(open_folder(root)))
    assert {row["name"] for row in report["bad"]} == bad
    assert all(row["reason"] for row in report["bad"])
    assert report["decoded"] == count + 4 - len(bad)
