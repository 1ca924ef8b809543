"""Tars of any origin: their labels and classes, and the damaged and hostile ones that are refused."""

import io
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.image_files import encode_image, list_names, make_image
from vitrail.data.webdataset import expand_braces, open_tars
from vitrail.errors import DataError


def tar_of(path: Path, *members: tuple[str, bytes] | tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                header = tarfile.TarInfo(member[0])
                header.size = len(member[1])
                tar.addfile(header, io.BytesIO(member[1]))
    return path


IMAGE = encode_image(make_image(0))


def class_tar() -> bytes:
    file, header = io.BytesIO(), tarfile.TarInfo("a.jpg")
    header.size = len(IMAGE)
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(header, io.BytesIO(IMAGE))
    return file.getvalue()


CLASS_TAR = class_tar()


def test_names_numbers_and_json_are_labels(tmp_path: Path) -> None:
    tar_of(
        tmp_path / "train-0.tar",
        ("n/a.jpg", IMAGE),
        ("n/a.json", b'{"label": "rose", "width": 3}'),
        ("n/b.cls", b"tulip\n"),
        ("n/b.seg.png", encode_image(make_image(1), "PNG")),
        ("n/c.txt", b"no image here"),
    )
    tar_of(tmp_path / "val-0.tar", ("n/a.jpg", IMAGE), ("n/a.cls", b"rose"))
    found = open_tars(str(tmp_path / "*.tar"))
    assert found.classes == ("rose", "tulip")
    assert list_names(found) == {
        "train": ["train-0.tar:n/a.jpg", "train-0.tar:n/b.seg.png"],
        "val": ["val-0.tar:n/a.jpg"],
    }
    assert found.splits["train"].read_image(0) == IMAGE
    assert found.splits["train"].get_labels(1) == (1,)


def test_a_number_is_a_place_in_the_head_even_if_others_do_not_occur(tmp_path: Path) -> None:
    tar_of(tmp_path / "train.tar", ("a.jpg", IMAGE), ("a.cls", b"7"), ("b.jpg", IMAGE), ("b.cls", b"003"))
    tar_of(tmp_path / "val.tar", ("a.jpg", IMAGE), ("a.cls", b"0"))
    found = open_tars(str(tmp_path / "*.tar"))
    assert len(found.classes) == 8
    assert [found.splits["train"].get_labels(index) for index in (0, 1)] == [(7,), (3,)]


def test_braces_count(tmp_path: Path) -> None:
    assert expand_braces("s/{08..11}.tar") == ["s/08.tar", "s/09.tar", "s/10.tar", "s/11.tar"]
    assert expand_braces("{0..1}-{0..1}.tar") == ["0-0.tar", "0-1.tar", "1-0.tar", "1-1.tar"]
    for number in range(3):
        tar_of(tmp_path / f"{number:03d}.tar", (f"{number}.jpg", IMAGE), (f"{number}.cls", b"0"))
    assert sum(map(len, open_tars(str(tmp_path / "{000..002}.tar")).splits.values())) == 3
    with pytest.raises(DataError, match=r"003.tar does not exist"):
        open_tars(str(tmp_path / "{000..003}.tar"))
    with pytest.raises(DataError, match="count upwards"):
        expand_braces("{5..1}.tar")


def entry(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.linkname = kind, target
    return header


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([entry("a.jpg", tarfile.SYMTYPE, "/etc/passwd")], "not a regular file"),
        ([entry("a.jpg", tarfile.LNKTYPE, "b.jpg")], "not a regular file"),
        ([entry("a.jpg", tarfile.CHRTYPE)], "not a regular file"),
        ([entry("a.jpg", tarfile.FIFOTYPE)], "not a regular file"),
        ([("../a.jpg", IMAGE)], "leads outside"),
        ([("x/../../a.jpg", IMAGE)], "leads outside"),
        ([("/etc/a.jpg", IMAGE)], "leads outside"),
        ([("a.jpg", IMAGE), ("a.png", IMAGE)], "two images named a"),
        ([("a.jpg", IMAGE), ("a.cls", b"\xff\xfe")], "a.cls cannot be read"),
        ([("a.jpg", IMAGE), ("a.json", b'{"label": {}}')], "is not a label"),
        ([("a.jpg", IMAGE), ("a.json", b"[" * 100_000)], "a.json cannot be read"),
        ([("a.jpg", IMAGE), ("a.cls", b"0"), ("b.jpg", IMAGE)], "b.jpg has neither"),
        ([("a.jpg", IMAGE), ("a.cls", b"99999999999")], "below 1,000,000"),
        ([("1.tar", CLASS_TAR), ("9000000.tar", CLASS_TAR)], "9000000.tar: the label is 9000000; .*below 1,000,000"),
        ([("a.jpg", IMAGE), ("a.json", b" " * 2**21)], "limit for labels is 1 MiB"),
        ([("a.txt", b"x")], "holds no image"),
    ],
)
def test_hostile_and_senseless_tars_are_refused(tmp_path: Path, members: list[Any], message: str) -> None:
    path = tar_of(tmp_path / "x.tar", *members)
    with pytest.raises(DataError, match=message):
        open_tars(str(path))


def test_class_tars_named_by_numbers_are_classes_whatever_zeros_they_begin_with(tmp_path: Path) -> None:
    found = open_tars(str(tar_of(tmp_path / "x.tar", ("000.tar", CLASS_TAR), ("002.tar", CLASS_TAR))))
    assert found.classes == ("0", "1", "2")
    labels = {
        name: split.get_labels(row)
        for key, split in found.splits.items()
        for row, name in enumerate(list_names(found)[key])
    }
    assert labels == {"x.tar:000/a.jpg": (0,), "x.tar:002/a.jpg": (2,)}


def test_damaged_tars_are_refused(tmp_path: Path) -> None:
    whole = tar_of(tmp_path / "x.tar", ("a.jpg", IMAGE), ("a.cls", b"0")).read_bytes()
    for broken in (b"", b"x" * 2000, whole[:700], whole[:100], b"\x1f\x8b" + bytes(3000)):
        (tmp_path / "x.tar").write_bytes(broken)
        with pytest.raises(DataError, match=r"x\.tar"):
            open_tars(str(tmp_path / "x.tar"))


def test_damage_in_the_middle_of_a_tar_is_not_its_end(tmp_path: Path) -> None:
    """Python's tarfile stops there without a word, and the rest of the set would be missing."""
    members = [
        (f"{number}.{suffix}", content) for number in range(6) for suffix, content in (("jpg", IMAGE), ("cls", b"0"))
    ]
    whole = tar_of(tmp_path / "x.tar", *members).read_bytes()
    header = whole.index(b"3.jpg")
    flipped = whole[: header + 150] + bytes([whole[header + 150] ^ 1]) + whole[header + 151 :]
    for broken in (flipped, whole[:header], whole[: header + 200]):
        (tmp_path / "x.tar").write_bytes(broken)
        with pytest.raises(DataError, match="truncated or damaged at byte"):
            open_tars(str(tmp_path / "x.tar"))


def test_a_size_that_lies_is_refused(tmp_path: Path) -> None:
    header = tarfile.TarInfo("a.jpg")
    header.size = 10**12
    (tmp_path / "x.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + IMAGE)
    with pytest.raises(DataError, match="truncated or damaged"):
        open_tars(str(tmp_path / "x.tar"))


def test_mutated_tars_are_read_or_refused_and_nothing_is_written(tmp_path: Path) -> None:
    """300 tars with flipped bytes: an index or one DataError, and no new file anywhere."""
    generator = np.random.default_rng(0)
    path = tar_of(tmp_path / "x.tar", ("a.jpg", IMAGE), ("a.cls", b"0"), ("b.jpg", IMAGE), ("b.cls", b"1"))
    whole = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    for _ in range(300):
        broken = whole.copy()
        places = generator.integers(0, len(broken), 8)
        places[:4] %= 512  # half of the harm in the first header
        broken[places] = generator.integers(0, 256, 8)
        path.write_bytes(broken.tobytes())
        try:
            found = open_tars(str(path))
            for split in found.splits.values():
                for index in range(len(split)):
                    split.read_image(index)
        except DataError:
            pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.tar"]


@pytest.mark.attack
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.cls", b"9999999"),
        ("a.cls", b"9" * 5_000),
        ("a.cls", b"0" * 100_000 + b"7" * 100_000),
        ("a.json", b'{"label": 9999999}'),
        ("a.json", b'{"label": "' + b"9" * 5_000 + b'"}'),
        ("a.json", b'{"labels": [1, ' + b"9" * 4_000 + b"]}"),
        ("a.json", b'{"label": ' + b"9" * 5_000 + b"}"),
    ],
)
def test_a_label_that_no_set_has_is_refused_before_classes_are_counted_to_it(
    name: str, content: bytes, tmp_path: Path, attacked: Callable[[str, str], None]
) -> None:
    tar_of(tmp_path / "x.tar", ("a.jpg", IMAGE), (name, content))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"x\.tar:a\.\w+") as caught:
        open_tars(str(tmp_path / "x.tar"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000
    assert len(str(caught.value)) < 400
    attacked(f"a label of {len(content):,} bytes in a {name[1:]}, {content[:20]!r}", "refused by its length")


def test_the_zeros_of_a_label_do_not_count(tmp_path: Path) -> None:
    tar_of(tmp_path / "train.tar", ("a.jpg", IMAGE), ("a.cls", b"0" * 100 + b"3"), ("b.jpg", IMAGE), ("b.cls", b"000"))
    assert open_tars(str(tmp_path / "train.tar")).classes == ("0", "1", "2", "3")
