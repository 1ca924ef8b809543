"""Archives: what other programs write is read as they meant it; hostile and damaged ones are refused."""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.image_files import encode_image, make_image
from tests.data.public_files import (
    FLOWER_SPLITS,
    Get,
    is_cache_empty,
    make_flowers,
    make_jpeg,
    make_loose_files,
    make_tar,
    make_tiny_imagenet,
)
from vitrail.data import archives, webdataset
from vitrail.data.archives import CHAIN_LIMIT, EXTENSION_LIMIT, TarError, iter_members, walk_members
from vitrail.data.webdataset import open_tars
from vitrail.errors import DataError

Attacked = Callable[[str, str], None]
END = bytes(1024)


def octal(number: int) -> bytes:
    return b"%011o\0" % number


def header(name: bytes = b"a.jpg", size: bytes = octal(0), kind: bytes = b"0", prefix: bytes = b"") -> bytes:
    content = bytearray(512)
    for place, field in (
        (0, name),
        (100, b"0000644\0"),
        (124, size),
        (156, kind),
        (257, b"ustar\x0000"),
        (345, prefix),
    ):
        content[place : place + len(field)] = field
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content)
    return bytes(content)


def filled(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def extension(kind: bytes, content: bytes) -> bytes:
    return header(b"././@LongLink", octal(len(content)), kind) + filled(content)


def record(key: bytes, value: bytes) -> bytes:
    length = len(key) + len(value) + 3
    length += len(str(length + len(str(length))))
    return b"%d %s=%s\n" % (length, key, value)


def binary(number: int) -> bytes:
    return (b"\xff" if number < 0 else b"\x80") + number.to_bytes(11, "big", signed=number < 0)


IMAGE = encode_image(make_image(0))
GOOD = header(size=octal(len(IMAGE))) + filled(IMAGE) + END
SPARSE = record(b"GNU.sparse.major", b"1") + record(b"GNU.sparse.minor", b"0") + record(b"GNU.sparse.realsize", b"999")
HOSTILE = {
    "a negative size in binary": header(size=binary(-512)) + END,
    "a large negative size in binary": header(size=binary(-(2**80))) + END,
    "a negative size in octal": header(size=b"-1000      \0") + END,
    "a size of 2^88": header(size=b"\x80" + b"\xff" * 11) + END,
    "a size with an underscore": header(size=b"1_0000000  \0") + END,
    "a size one byte past the end": header(size=octal(1025)) + END,
    "a negative size in a pax header": extension(b"x", record(b"size", b"-512")) + header() + END,
    "a pax size of 200,000 digits": extension(b"x", record(b"size", b"9" * 200_000)) + header() + END,
    "a pax record's length of 200,000 digits": extension(b"x", b"9" * 200_000 + b" path=a\n") + header() + END,
    "a pax record that ends before it begins": extension(b"x", b"1 path=a\n") + header() + END,
    "a pax record of no length": extension(b"x", b"0 path=a\n") + header() + END,
    "a pax size beyond the file": extension(b"x", record(b"size", b"99999")) + header() + END,
    "a pax header for all with a size": extension(b"g", record(b"size", b"512")) + header() + END,
    "a pax header for all with a path": extension(b"g", record(b"path", b"b.jpg")) + header() + END,
    "a sparse file, as pax has it": extension(b"x", SPARSE) + header() + END,
    "a sparse file, as GNU has it": header(kind=b"S") + END,
    "400 long names one after another": extension(b"L", b"x.jpg\0") * 400 + header() + END,
    "400 long links one after another": extension(b"K", b"x.jpg\0") * 400 + header() + END,
    "400 pax headers one after another": extension(b"x", record(b"path", b"x.jpg")) * 400 + header() + END,
    "400 pax headers for all": extension(b"g", record(b"comment", b"x")) * 400 + header() + END,
    "a long name of 2 MiB": extension(b"L", b"x" * 2**21) + header() + END,
    "a pax header of 2 MiB": extension(b"x", record(b"comment", b"x" * 2**21)) + header() + END,
    "a long name that claims 1 TiB": header(b"l", binary(2**40), b"L") + b"x.jpg\0" + END,
    "a long name and nothing after it": extension(b"L", b"x.jpg\0"),
    "a checksum that is none": header()[:148] + b"\xff" * 8 + header()[156:] + END,
}
PREDICTED = """
import sys
from vitrail.data import image_paths
for image in image_paths.iter_image_refs([sys.argv[1] + "/*.tar"]):
    print(image.error.replace("\\n", "NEWLINE") or "good " + image.name)
"""


@pytest.mark.attack
def test_hostile_headers_are_refused_and_the_tars_beside_them_read(tmp_path: Path, attacked: Attacked) -> None:
    """In a process of its own, with a time limit: what loops for ever must fail."""
    for number, content in enumerate(HOSTILE.values()):
        (tmp_path / f"{2 * number:03d}.tar").write_bytes(content)
        (tmp_path / f"{2 * number + 1:03d}.tar").write_bytes(GOOD)
    command = [sys.executable, "-c", PREDICTED, str(tmp_path)]
    start = time.monotonic()
    lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    seconds = time.monotonic() - start
    assert len(lines) == 2 * len(HOSTILE)
    for number, attack in enumerate(HOSTILE):
        assert lines[2 * number].startswith(f"{tmp_path}/{2 * number:03d}.tar "), attack
        assert "NEWLINE" not in lines[2 * number], attack
        assert lines[2 * number + 1] == f"good {tmp_path}/{2 * number + 1:03d}.tar:a.jpg"
    attacked(
        f"{len(HOSTILE)} tars: negative and endless sizes, chains of 400 headers, numbers of 200,000 digits",
        f"each refused in one line, the tars between them read, {seconds:.1f} s in all with Python's start",
    )


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_headers_are_refused_as_a_dataset_and_as_an_archive(attack: str, tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(HOSTILE[attack])
    with pytest.raises(DataError, match=r"x\.tar "):
        open_tars(str(path))
    with pytest.raises(DataError, match=r"x\.tar "):
        dict(iter_members(path, lambda _: True))


def test_names_and_sizes_are_those_that_tarfile_reads(tmp_path: Path) -> None:
    """In every format that Python and GNU tar write, with long names, odd names, folders and links."""
    root = tmp_path / "in"
    names = ["a.jpg", "ü/ö.png", f"{'long/' * 60}b.jpg", f"{'c' * 120}.gif", "d/e/empty.txt", f"{'p' * 90}/{'q' * 90}"]
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(number * 300))
    (root / "link").symlink_to("a.jpg" * 40)
    paths = []
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        paths.append(tmp_path / f"{kind}.tar")
        with tarfile.open(paths[-1], "w", format=kind) as archive:
            for path in sorted(root.rglob("*")):
                with contextlib.suppress(ValueError):  # a name too long for the oldest
                    archive.add(path, str(path.relative_to(root)), recursive=False)
    if shutil.which("tar"):
        for style in ("v7", "oldgnu", "gnu", "pax"):
            paths.append(tmp_path / f"{style}.tar")
            inner = names[:2] if style == "v7" else ["."]
            subprocess.run(["tar", f"--format={style}", "-cf", paths[-1], *inner], cwd=root, check=True)
    for path in paths:
        with path.open("rb") as file:
            members = [
                (m.name, m.offset_data, m.size if m.is_file else 0, m.is_file, m.is_folder) for m in walk_members(file)
            ]
        with tarfile.open(path) as archive:
            expected = [(m.name, m.offset_data, m.size if m.isreg() else 0, m.isreg(), m.isdir()) for m in archive]
        assert members == expected, path


def test_large_and_old_numbers_are_read() -> None:
    for size in (binary(5), b"5          \0", b"         5 \0", b"00000000005 ", b"5" + bytes(11)):
        [member] = walk_members(io.BytesIO(header(size=size) + filled(b"12345") + END))
        assert member[1:3] == (512, 5)
    big = header(size=binary(2**40)) + END
    [member] = walk_members(_Endless(big, 2**40))
    assert member.size == 2**40
    [member] = walk_members(io.BytesIO(extension(b"x", record(b"size", b"5")) + header() + filled(b"12345") + END))
    assert member.size == 5


class _Endless(io.BytesIO):
    """A file whose second half begins so many bytes later."""

    def __init__(self, content: bytes, gap: int) -> None:
        super().__init__(content)
        self.gap = gap

    def seek(self, place: int, whence: int = 0) -> int:
        return super().seek(place if place < 512 else max(512, place - self.gap), whence)


def test_chains_and_extensions_up_to_the_limit_are_read() -> None:
    comment = record(b"comment", b"x" * (EXTENSION_LIMIT - 100))
    content = extension(b"x", comment) + extension(b"K", b"y\0") * (CHAIN_LIMIT - 2) + extension(b"L", b"b.jpg\0")
    [member] = walk_members(io.BytesIO(content + header() + END))
    assert member.name == "b.jpg"
    with pytest.raises(TarError, match="at most 16 extended headers"):
        list(walk_members(io.BytesIO(extension(b"K", b"y\0") + content + header() + END)))


@pytest.mark.attack
def test_a_tar_of_very_many_members_is_walked_in_time_that_grows_with_it(tmp_path: Path, attacked: Attacked) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(header() * 100_000 + END)  # 51 MB of empty files of one name
    start = time.monotonic()
    with pytest.raises(DataError, match="two images named a"):
        open_tars(str(path))
    assert sum(1 for _ in webdataset.iter_files(path)) == 100_000
    seconds = time.monotonic() - start
    assert seconds < 10
    attacked("a tar of 100,000 empty members", f"walked in {seconds:.1f} s")


def test_a_pipe_named_tar_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.tar")
    command: list[Any] = [sys.executable, "-c", PREDICTED.replace('"/*.tar"', '""')]
    done = subprocess.run([*command, tmp_path / "*.tar"], capture_output=True, text=True, timeout=20, check=True)
    assert "is a folder, pipe, socket or device" in done.stdout


# --- archives of public datasets -----------------------------------------------------------------------------------


def hostile_tar(change: Callable[[tarfile.TarInfo], None]) -> bytes:
    """The flowers' archive with its third image changed."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number in range(1, 8):
            header = tarfile.TarInfo(f"jpg/image_{number:05d}.jpg")
            header.size = len(make_jpeg(number))
            if number == 3:
                change(header)
            archive.addfile(header, io.BytesIO(make_jpeg(number)) if header.isreg() else None)
    return file.getvalue()


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("type", tarfile.SYMTYPE, "not a regular file"),
        ("type", tarfile.LNKTYPE, "not a regular file"),
        ("type", tarfile.CHRTYPE, "not a regular file"),
        ("type", tarfile.FIFOTYPE, "not a regular file"),
        ("type", tarfile.DIRTYPE, "not a regular file"),
        ("name", "../jpg/image_00003.jpg", "its files hold 2 train, 1 val, 2 test"),
        ("name", "/jpg/image_00003.jpg", "its files hold 2 train, 1 val, 2 test"),
        ("name", "jpg/../jpg/image_00003.jpg", "its files hold 2 train, 1 val, 2 test"),
        ("name", "jpg/image_00001.jpg", "its files hold 3 train, 1 val, 2 test"),
    ],
)
def test_a_member_that_is_no_plain_file_of_its_name_is_not_taken(
    get_dataset: Get, field: str, value: Any, reason: str
) -> None:
    def change(header: tarfile.TarInfo) -> None:
        setattr(header, field, value)
        header.linkname = "/etc/passwd" if field == "type" else ""
        header.size = header.size if header.isreg() else 0

    files = {**make_flowers(), "102flowers.tgz": hostile_tar(change)}
    with pytest.raises(DataError, match=reason):
        get_dataset("flowers102", files, splits=FLOWER_SPLITS)
    assert is_cache_empty()


def test_a_list_that_names_a_path_outside_does_not_make_it_readable(get_dataset: Get) -> None:
    members = {
        "food-101/images/../../evil.jpg": make_jpeg(1),
        "food-101/meta/classes.txt": b"..\n",
        "food-101/meta/train.txt": b"../../evil\n",
        "food-101/meta/test.txt": b"../../evil\n",
    }
    with pytest.raises(DataError, match="leads outside"):
        get_dataset("food101", {"food-101.tar.gz": make_tar(members)}, classes=1, splits={"train": 1, "test": 1})
    assert is_cache_empty()


def test_a_link_in_a_zip_is_not_taken(get_dataset: Get) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in make_tiny_imagenet().items():
            header = zipfile.ZipInfo(name)
            header.external_attr = (0o120777 if name.endswith("val_0.JPEG") else 0o100644) << 16
            archive.writestr(header, content)
    with pytest.raises(DataError, match=r"val_0\.JPEG', which is not a regular file"):
        get_dataset(
            "tiny-imagenet", {"tiny-imagenet-200.zip": file.getvalue()}, classes=2, splits={"train": 2, "val": 2}
        )


def test_a_member_too_large_is_not_read(get_dataset: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MEMBER_LIMIT", 10)
    with pytest.raises(DataError, match=r"image_00001\.jpg' with \d+ bytes; the limit is 10"):
        get_dataset("flowers102", make_flowers(), splits=FLOWER_SPLITS)
    with pytest.raises(DataError, match="unpacks to more than 10 bytes"):
        get_dataset("mnist", make_loose_files())


def test_archives_cut_short_or_of_no_kind_are_refused(get_dataset: Get) -> None:
    whole, plain = make_flowers()["102flowers.tgz"], hostile_tar(lambda _: None)
    for content in (b"", b"no archive", b"!<arch>\nodd", b"PK\3\4 no zip", whole[: len(whole) // 2], plain[:6000]):
        with pytest.raises(DataError, match=r"cannot be read as an archive|its files hold"):
            get_dataset("flowers102", {**make_flowers(), "102flowers.tgz": content}, splits=FLOWER_SPLITS)
        assert is_cache_empty()
