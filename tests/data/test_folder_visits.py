"""Folders that link to each other: a walk ends, says what it left out, and follows what a sensible layout has."""

import glob
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.pictures import encoded, folder, picture
from vitrail.data import image_paths
from vitrail.data.folder import VISIT_LIMIT, open_folder

Attacked = Callable[[str, str], None]
WALKED = """
import sys
from pathlib import Path
from vitrail.data import image_paths
from vitrail.data.folder import open_folder
root = sys.argv[1]
for argument in (root, root + "/**", root + "/**/*.jpg"):
    found = list(image_paths.iter_image_refs([argument]))
    print(len(found), found[-1].error)
dataset = open_folder(Path(root))
print(sum(map(len, dataset.splits.values())), *dataset.notes)
"""


def link_mutually(root: Path, count: int) -> Path:
    names = [f"class{number}" for number in range(count)]
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        (root / name / "0.jpg").write_bytes(encoded(picture(number)))
    for name in names:
        for other in names:
            if other != name:
                (root / name / other).symlink_to(f"../{other}")
    return root


@pytest.mark.attack
def test_folders_that_link_to_each_other_do_not_multiply(tmp_path: Path, attacked: Attacked) -> None:
    root = link_mutually(tmp_path, 8)
    command = [sys.executable, "-c", WALKED, str(root)]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    most = 8 * (1 + VISIT_LIMIT)
    said = "links left out, to folders already listed 16 times through other links, such as"
    for line in lines[:3]:
        assert line.startswith(f"{most + 1} {tmp_path}")
        assert said in line
    assert lines[3].startswith(f"{most} ")
    assert said in lines[3]
    attacked("8 folders, each with links to all others (109,600 paths)", f"{most} images listed, the rest noted")


@pytest.mark.attack
def test_doubled_links_in_a_row_of_folders_do_not_multiply(tmp_path: Path, attacked: Attacked) -> None:
    for number in range(30):
        (tmp_path / f"{number:02d}").mkdir()
        (tmp_path / f"{number:02d}" / "0.jpg").write_bytes(encoded(picture(number)))
        for name in ("one", "two") if number < 29 else ():
            (tmp_path / f"{number:02d}" / name).symlink_to(f"../{number + 1:02d}")
    command = [sys.executable, "-c", WALKED, str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    assert [int(line.split()[0]) for line in lines[:3]] == [int(lines[3].split()[0]) + 1] * 3
    assert int(lines[3].split()[0]) <= 30 * (1 + VISIT_LIMIT)
    attacked("30 folders, each with two links to the next (2^30 paths)", f"{lines[3].split()[0]} images listed")


def test_links_of_sensible_layouts_are_followed(tmp_path: Path) -> None:
    """Class folders that lead to one pool, a split that is another's, and links within links."""
    pool = folder(tmp_path / "pool", each=10)
    root = tmp_path / "set"
    for split in ("train", "val"):
        (root / split).mkdir(parents=True)
        for name in ("rose", "tulip"):
            (root / split / name).symlink_to(pool / name)
    (root / "test").symlink_to("val")
    dataset = open_folder(root)
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 20, "val": 20, "test": 20}
    assert not dataset.notes
    assert len(list(image_paths.iter_image_refs([str(root)]))) == 60
    assert len(list(image_paths.iter_image_refs([str(root), str(root)]))) == 120


def test_what_a_pattern_names_is_what_pythons_glob_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "a[1]", "train", "val", each=2)
    folder(tmp_path / "b", "train", each=1)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "0.jpg").write_bytes(b"")
    (tmp_path / "top.jpg").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    for base in ("", "./", f"{glob.escape(str(tmp_path))}/"):
        for pattern in (
            "**",
            "**/*.jpg",
            "*/**/0.jpg",
            "**/train/**",
            "b/**/rose/*",
            "**/**/1.jpg",
            "[ab]*/**/tulip/?.jpg",
        ):
            expected = sorted(set(glob.glob(base + pattern, recursive=True)))  # noqa: PTH207
            names = [name for name in expected if not os.path.isdir(name)]  # noqa: PTH112
            assert [found.name for found in image_paths.iter_image_refs([base + pattern])] == names, base + pattern


@pytest.mark.attack
def test_folders_a_thousand_deep_are_walked(tmp_path: Path, attacked: Attacked) -> None:
    root = str(tmp_path)
    for _ in range(1500):
        root += "/d"
        os.mkdir(root)  # noqa: PTH102
    Path(root, "0.jpg").write_bytes(encoded(picture(0)))
    [image] = image_paths.iter_image_refs([str(tmp_path)])
    assert image.name == f"{root}/0.jpg"
    subprocess.run(["rm", "-r", tmp_path / "d"], check=True)  # pytest would remove it by recursion, and fail
    attacked("folders 1,500 deep", "walked to the end")
