"""Hostile and damaged archives of public datasets are refused, and nothing is stored."""

import io
import tarfile
import zipfile
from collections.abc import Callable
from typing import Any

import pytest

from tests.data.public_files import FLOWER_SPLITS, Get, flowers, jpeg, loose_files, nothing_stored, tar, tiny_imagenet
from vitrail.data import archives
from vitrail.errors import DataError


def hostile_tar(change: Callable[[tarfile.TarInfo], None]) -> bytes:
    """The flowers' archive with its third image changed."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number in range(1, 8):
            header = tarfile.TarInfo(f"jpg/image_{number:05d}.jpg")
            header.size = len(jpeg(number))
            if number == 3:
                change(header)
            archive.addfile(header, io.BytesIO(jpeg(number)) if header.isreg() else None)
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

    files = {**flowers(), "102flowers.tgz": hostile_tar(change)}
    with pytest.raises(DataError, match=reason):
        get_dataset("flowers102", files, splits=FLOWER_SPLITS)
    assert nothing_stored()


def test_a_list_that_names_a_path_outside_does_not_make_it_readable(get_dataset: Get) -> None:
    members = {
        "food-101/images/../../evil.jpg": jpeg(1),
        "food-101/meta/classes.txt": b"..\n",
        "food-101/meta/train.txt": b"../../evil\n",
        "food-101/meta/test.txt": b"../../evil\n",
    }
    with pytest.raises(DataError, match="leads outside"):
        get_dataset("food101", {"food-101.tar.gz": tar(members)}, classes=1, splits={"train": 1, "test": 1})
    assert nothing_stored()


def test_a_link_in_a_zip_is_not_taken(get_dataset: Get) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in tiny_imagenet().items():
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
        get_dataset("flowers102", flowers(), splits=FLOWER_SPLITS)
    with pytest.raises(DataError, match="unpacks to more than 10 bytes"):
        get_dataset("mnist", loose_files())


def test_archives_cut_short_or_of_no_kind_are_refused(get_dataset: Get) -> None:
    whole, plain = flowers()["102flowers.tgz"], hostile_tar(lambda _: None)
    for content in (b"", b"no archive", b"!<arch>\nodd", b"PK\3\4 no zip", whole[: len(whole) // 2], plain[:6000]):
        with pytest.raises(DataError, match=r"cannot be read as an archive|its files hold"):
            get_dataset("flowers102", {**flowers(), "102flowers.tgz": content}, splits=FLOWER_SPLITS)
        assert nothing_stored()
