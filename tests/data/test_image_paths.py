"""What arguments on a command line mean: files, folders, globs, shards, lists and standard input, in a fixed order."""

import io
import itertools
import json
import os
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from tests.data.image_files import encode_image, make_image
from vitrail.data import image_paths
from vitrail.data.decode import decode
from vitrail.errors import DataError


def touched(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def tar(path: Path, *names: str) -> None:
    with tarfile.open(path, "w") as file:
        for number, name in enumerate(names):
            content = encode_image(make_image(number)) if name.endswith("jpg") else b"3"
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))


def names(*arguments: str | Path) -> list[str]:
    return [image.name for image in image_paths.iter_image_refs(map(str, arguments))]


def test_a_folder_is_walked_in_the_order_of_its_sorted_paths(tmp_path: Path) -> None:
    """Folders and files together, as `sort` has them: - and . come before the / of a folder, letters after it."""
    odd = ("a/b.jpg", "a/b/c.png", "a-b.jpg", "a.jpg", "a b/c.jpg", "ab/c.GIF", "é/ü.webp", "a/B.jpeg", "Z.tif")
    touched(tmp_path, *odd, "a/notes.txt", ".hidden.jpg", ".git/x.jpg", "a/._b.jpg")
    assert names(tmp_path) == sorted(str(tmp_path / name) for name in odd)


def test_links_are_followed_but_never_in_circles(tmp_path: Path) -> None:
    touched(tmp_path, "in/a.jpg", "elsewhere/b.jpg")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "self.jpg").symlink_to("self.jpg")
    paths = [Path(name).relative_to(tmp_path).as_posix() for name in names(tmp_path / "in")]
    assert paths == ["in/a.jpg", "in/more/b.jpg", "in/self.jpg"]


def test_arguments_keep_their_order_and_globs_are_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    touched(tmp_path, "b/2.jpg", "b/1.jpg", "a/x/3.jpg", "a/4.jpg", "odd[1].jpg", "odd1.jpg")
    assert names("b/2.jpg", "a/**/*.jpg", "?/1.jpg", "b/2.jpg") == [
        "b/2.jpg", "a/4.jpg", "a/x/3.jpg", "b/1.jpg", "b/2.jpg",
    ]  # fmt: skip
    assert names("odd[1].jpg") == ["odd[1].jpg"]  # a file of that name comes before the pattern
    assert names("a/**") == ["a/4.jpg", "a/x/3.jpg"]


def test_shards_give_their_images_in_place_and_in_order(tmp_path: Path) -> None:
    tar(tmp_path / "s-1.tar", "b.jpg", "b.cls", "x/a.jpg")
    tar(tmp_path / "s-0.tar", "c.jpg", "._c.jpg")
    (first, second, third) = image_paths.iter_image_refs([str(tmp_path / "s-{0..1}.tar")])
    assert [first.name, second.name, third.name] == [
        f"{tmp_path}/s-0.tar:c.jpg", f"{tmp_path}/s-1.tar:b.jpg", f"{tmp_path}/s-1.tar:x/a.jpg",
    ]  # fmt: skip
    content = third.read()
    assert content == encode_image(make_image(2))
    assert decode(content).shape == (3, 20, 24)
    (tmp_path / "s-1.tar").write_bytes((tmp_path / "s-1.tar").read_bytes()[: third.offset + 10])
    with pytest.raises(DataError, match=r"s-1\.tar:x/a\.jpg: the shard ends before the image does"):
        third.read()


def test_lists_name_images_beside_themselves(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('path,label\n"x, y.jpg",rose\nb.jpg,\n')
    (tmp_path / "rows.jsonl").write_text(json.dumps({"image": "c.jpg", "labels": ["a", "b"]}) + "\n")
    expected = [str(tmp_path / name) for name in ("x, y.jpg", "b.jpg", "c.jpg")]
    assert names(tmp_path / "rows.csv", tmp_path / "rows.jsonl") == expected


def test_what_lies_elsewhere_is_found_like_what_lies_here(tmp_path: Path) -> None:
    """By fsspec's name for this very disk."""
    for number, name in enumerate(("in/b.jpg", "in/x/a.jpg", "in/notes.txt")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encode_image(make_image(number)))
    tar(tmp_path / "s-0.tar", "c.jpg")
    (tmp_path / "rows.csv").write_text("path\nin/b.jpg\n")
    for argument in ("in", "in/*.jpg", "in/b.jpg", "s-{0..0}.tar", "rows.csv"):
        here, there = (
            list(image_paths.iter_image_refs([f"{root}/{argument}"])) for root in (tmp_path, f"file://{tmp_path}")
        )
        assert [image.name for image in there] == [f"file://{image.name}" for image in here]
        assert all(torch.equal(decode(far.read()), decode(near.read())) for far, near in zip(there, here, strict=True))
    for argument in ("nothing", "in/*.gif", "nothing.csv", "nothing.tar"):
        (bad,) = image_paths.iter_image_refs([f"file://{tmp_path}/{argument}"])
        assert bad.error


def test_standard_input_is_read_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched(tmp_path, "in/a.jpg")
    odd = os.fsdecode(b"\xff.jpg")
    text = f"x.jpg\r\n\n  \n{odd}\n{tmp_path}/in\n-\nlast.jpg".encode(errors="surrogateescape")
    reader = io.TextIOWrapper(io.BytesIO(text), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", reader)
    assert names("first.jpg", "-") == ["first.jpg", "x.jpg", odd, f"{tmp_path}/in/a.jpg", "-", "last.jpg"]


def test_no_more_is_listed_than_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that never ends: were it read to its end, this would not return."""
    monkeypatch.setattr(sys, "stdin", itertools.repeat("a.jpg\n"))
    assert [image.name for image in itertools.islice(image_paths.iter_image_refs(["-"]), 3)] == ["a.jpg"] * 3


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("empty", "empty holds no image: .jpg"),
        ("photos", "known; 2 images skipped for lack of a decoder: .jxl 2"),
        ("*.webp", "no file matches *.webp"),
        ("nowhere.tar", "nowhere.tar does not exist"),
        ("bad.tar", "bad.tar is not a readable tar"),
        ("labels.tar", "labels.tar holds no image"),
        ("wrong.csv", "wrong.csv has the columns label"),
        ("nowhere.csv", "No such file"),
    ],
)
def test_what_cannot_be_listed_is_named_and_the_rest_goes_on(
    argument: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    touched(tmp_path, "photos/a.JXL", "photos/in/b.jxl")
    tar(tmp_path / "labels.tar", "a.cls")
    (tmp_path / "bad.tar").write_bytes(b"nothing" * 200)
    (tmp_path / "wrong.csv").write_text("label\nrose\n")
    touched(tmp_path, "good.jpg")
    bad, good = image_paths.iter_image_refs([argument, "good.jpg"])
    assert reason in bad.error
    assert good == image_paths.ImageRef("good.jpg", "good.jpg")
    with pytest.raises(DataError):
        bad.read()


def test_a_shard_that_is_damaged_gives_what_stands_before_that(tmp_path: Path) -> None:
    tar(tmp_path / "s.tar", "a.jpg", "b.jpg")
    whole = (tmp_path / "s.tar").read_bytes()
    _, second = image_paths.iter_image_refs([str(tmp_path / "s.tar")])
    (tmp_path / "s.tar").write_bytes(whole[: second.offset + 7])
    first, bad = image_paths.iter_image_refs([str(tmp_path / "s.tar")])
    assert first.name.endswith("a.jpg")
    assert "s.tar is truncated or damaged at 'b.jpg'" in bad.error
