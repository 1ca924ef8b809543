"""A folder as a set: what is found, how it is split, and that a second look is quick and never stale."""

import glob
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.image_files import encode_image, list_names, make_image, write_image_folder
from vitrail.data import image_paths
from vitrail.data.decode import decode
from vitrail.data.folder import VISIT_LIMIT, open_folder
from vitrail.errors import DataError
from vitrail.files import get_cache_home


def test_given_splits_and_classes_are_taken(tmp_path: Path) -> None:
    found = open_folder(write_image_folder(tmp_path, "train", "validation", "test", each=3))
    assert {name: len(split) for name, split in found.splits.items()} == {"train": 6, "val": 6, "test": 6}
    assert found.classes == ("rose", "tulip")
    train = found.splits["train"]
    assert [train.get_labels(number) for number in range(6)] == [(0,)] * 3 + [(1,)] * 3
    assert train.get_image_name(4) == "train/tulip/1.jpg"
    assert train.read_image(4) == tmp_path / "train/tulip/1.jpg"
    assert found.notes == ()


def test_files_below_a_class_belong_to_it_and_others_are_reported(tmp_path: Path) -> None:
    write_image_folder(tmp_path, "train", "val", each=2)
    deep = tmp_path / "train" / "rose" / "garden" / "bed"
    deep.mkdir(parents=True)
    (deep / "x.PNG").write_bytes(encode_image(make_image(1), "PNG"))
    (tmp_path / "train" / "rose" / "notes.txt").write_text("x")
    (tmp_path / "train" / "rose" / ".hidden.jpg").write_text("x")
    (tmp_path / "train" / "orchid").mkdir()
    found = open_folder(tmp_path)
    assert "train/rose/garden/bed/x.PNG" in list_names(found)["train"]
    assert len(found.splits["train"]) == 5
    assert found.classes == ("rose", "tulip")
    assert found.empty_classes == ("orchid",)
    assert found.splits["train"].count_per_class(2).tolist() == [3, 2]
    assert any("notes.txt" in note for note in found.notes)
    assert "1 class folder without an image left out: orchid" in found.notes


@pytest.mark.parametrize(
    ("train", "test"),
    [("training_set", "test_set"), ("Train-Images", "Test-Images"), ("my train", "my test"), ("trainset", "testset")],
)
def test_folders_named_after_splits_are_splits(tmp_path: Path, train: str, test: str) -> None:
    found = open_folder(write_image_folder(tmp_path, train, test, each=10))
    assert found.classes == ("rose", "tulip")
    assert {name: len(split) for name, split in found.splits.items()} == {"train": 18, "val": 2, "test": 20}
    assert found.layout_warning == ""


@pytest.mark.parametrize(
    "classes", [("valid", "invalid"), ("test positive", "test negative"), ("test tube", "flask"), ("n01443537", "n02")]
)
def test_classes_that_speak_of_splits_or_have_numbers_stay_classes(tmp_path: Path, classes: tuple[str, ...]) -> None:
    for name in classes:
        write_image_folder(tmp_path / name, classes=("images",), each=3)
    found = open_folder(tmp_path)
    assert found.classes == tuple(sorted(classes))
    assert found.layout_warning == ""


@pytest.mark.parametrize("classes", [("training_shoe", "test_tube"), ("dev kit", "test kit")])
def test_classes_with_the_names_of_splits_keep_their_labels_and_are_asked_about(
    tmp_path: Path, classes: tuple[str, ...]
) -> None:
    flat = open_folder(write_image_folder(tmp_path / "flat", classes=classes))
    for name in classes:
        write_image_folder(tmp_path / "deep" / name, classes=tuple(f"{name} {number}" for number in range(2)))
    for found in (flat, open_folder(tmp_path / "deep")):
        assert found.classes == tuple(sorted(classes))
        assert found.generated_splits == ("val", "test")
        assert "which have names of splits and share no class: are these the classes?" in found.layout_warning


def test_photos_that_need_a_decoder_are_named_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.data.image_headers.get_readable_formats", lambda: ("JPEG",))
    monkeypatch.setattr("vitrail.data.folder.get_image_suffixes", lambda: (".jpg",))
    (write_image_folder(tmp_path / "set") / "rose" / "a.HEIC").write_bytes(b"x")
    note = "1 file without an image suffix left out: rose/a.HEIC; pip install 'vitrail[heif]' reads .heic"
    assert note in open_folder(tmp_path / "set").notes
    with pytest.raises(DataError, match=r"not an image of a known format .*heif.* reads \.heic"):
        decode(tmp_path / "set" / "rose" / "a.HEIC")


def test_folders_that_may_be_no_classes_are_asked_about(tmp_path: Path) -> None:
    years = open_folder(write_image_folder(tmp_path / "a", "2023", "2024", each=1))
    warning = "holds the folders 2023, 2024, each of which holds rose, tulip: are these the classes?"
    assert warning in years.layout_warning
    assert "a/2023; if they are classes, list the images in a .csv with path and label" in years.layout_warning
    assert (
        ", which look like dates: "
        in open_folder(write_image_folder(tmp_path / "b", classes=("2023-05", "2023-06"))).layout_warning
    )
    batches = open_folder(write_image_folder(tmp_path / "c", "batch1", "batch2"))
    assert "batch1, batch2, each of which holds" in batches.layout_warning
    write_image_folder(tmp_path / "d", "test set")
    mixed = open_folder(write_image_folder(tmp_path / "d"))
    assert "rose, test set, tulip, and test set has the name of a split and holds rose" in mixed.layout_warning


def test_a_second_name_for_a_folder_is_a_folder_too(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path, "train", "val", each=3)
    (root / "test").symlink_to(root / "val", target_is_directory=True)
    (root / "train" / "rose" / "self").symlink_to("self")
    found = open_folder(root)
    assert {name: len(split) for name, split in found.splits.items()} == {"train": 6, "val": 6, "test": 6}
    assert found.notes == ("1 file without an image suffix left out: train/rose/self",)


def test_images_beside_a_folder_without_any_have_no_labels(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.jpg").write_bytes(encode_image(make_image(number)))
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "0.txt").write_text("x")
    assert open_folder(tmp_path).classes == ()


def test_images_without_classes_have_no_labels(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.jpg").write_bytes(encode_image(make_image(number)))
    found = open_folder(tmp_path)
    assert found.classes == ()
    assert found.splits["train"].get_labels(0) == ()
    assert len(found.splits["train"]) == 24


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root, "holds no image"),
        (lambda root: (root / "a.txt").write_text("x"), "1 other file, such as a.txt"),
        (lambda root: (write_image_folder(root), (root / "x.jpg").write_bytes(b"")), "x.jpg is in no class folder"),
        (lambda root: write_image_folder(root, "train", "extra"), "in train and in extra"),
        (
            lambda root: [
                (root / place).mkdir(exist_ok=True) or (root / place / "x.png").write_bytes(b"")
                for place in ("train", "test", ".")
            ],
            "x.png is in no class folder",
        ),
    ],
)
def test_a_folder_that_makes_no_set_says_why(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path)
    with pytest.raises(DataError, match=message):
        open_folder(tmp_path)


def test_links_are_followed_and_never_in_circles(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "set", "train", "val", each=2)
    (root / "train" / "rose" / "again").symlink_to(root, target_is_directory=True)
    elsewhere = write_image_folder(tmp_path / "elsewhere", classes=("lily",), each=3)
    (root / "train" / "lily").symlink_to(elsewhere / "lily", target_is_directory=True)
    found = open_folder(root)
    assert found.splits["train"].count_per_class(3).tolist() == [3, 2, 2]


def aged(root: Path) -> None:
    """Let every folder look as if it had not changed for a minute."""
    past = time.time() - 60
    for path in [root, *root.rglob("*")]:
        if path.is_dir():
            os.utime(path, (past, past))


def test_a_settled_folder_is_listed_once_and_a_change_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_image_folder(tmp_path / "set", "train", "val", each=3)
    aged(root)
    first = list_names(open_folder(root))
    with monkeypatch.context() as patched:
        patched.setattr("vitrail.data.folder._list_local_files", lambda _: pytest.fail("listed again"))
        assert list_names(open_folder(root)) == first
    (root / "train" / "rose" / "new.jpg").write_bytes(encode_image(make_image(77)))
    assert "train/rose/new.jpg" in list_names(open_folder(root))["train"]
    (root / "train" / "rose" / "new.jpg").unlink()
    assert list_names(open_folder(root)) == first


def test_a_folder_that_changed_a_moment_ago_is_not_trusted(tmp_path: Path) -> None:
    """The clock of a file system is coarse: a second change within one tick would not show."""
    root = write_image_folder(tmp_path / "set", "train", "val", each=3)
    open_folder(root)
    before = (root / "train" / "rose").stat()
    (root / "train" / "rose" / "late.jpg").write_bytes(encode_image(make_image(5)))
    os.utime(root / "train" / "rose", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "train/rose/late.jpg" in list_names(open_folder(root))["train"]


def test_a_damaged_cache_is_built_again(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "set", "train", "val", each=3)
    aged(root)
    first = list_names(open_folder(root))
    [facts] = (get_cache_home() / "index").glob("*/facts.json")
    for file, broken in ((facts, "{"), (facts.parent / "label.npy", "x"), (facts, '{"version": 1}')):
        file.write_text(broken)
        assert list_names(open_folder(root)) == first


def test_a_home_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_image_folder(tmp_path / "set", each=10)
    expected = list_names(open_folder(root))
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(blocked / "data"))
    found = open_folder(root)
    assert list_names(found) == expected
    assert "could not be stored" in found.notes[0]


def test_a_split_travels_to_a_process_as_a_path_and_not_as_rows(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "set", "train", "val", each=30)
    aged(root)
    split = open_folder(root).splits["train"]
    packed = pickle.dumps(split)
    assert len(packed) < 3000
    again = pickle.loads(packed)
    for number in range(60):
        assert again.get_image_name(number) == split.get_image_name(number)


def test_a_name_that_is_no_utf8_survives(tmp_path: Path) -> None:
    write_image_folder(tmp_path, "train", "val", each=1)
    odd = os.fsdecode(b"\xff\xfe.jpg")
    try:
        (tmp_path / "train" / "rose" / odd).write_bytes(encode_image(make_image(3)))
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    found = open_folder(tmp_path)
    assert f"train/rose/{odd}" in list_names(found)["train"]


# --- folders that link to each other ---------------------------------------------------------------------------------

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
        (root / name / "0.jpg").write_bytes(encode_image(make_image(number)))
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
        (tmp_path / f"{number:02d}" / "0.jpg").write_bytes(encode_image(make_image(number)))
        for name in ("one", "two") if number < 29 else ():
            (tmp_path / f"{number:02d}" / name).symlink_to(f"../{number + 1:02d}")
    command = [sys.executable, "-c", WALKED, str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    assert [int(line.split()[0]) for line in lines[:3]] == [int(lines[3].split()[0]) + 1] * 3
    assert int(lines[3].split()[0]) <= 30 * (1 + VISIT_LIMIT)
    attacked("30 folders, each with two links to the next (2^30 paths)", f"{lines[3].split()[0]} images listed")


def test_links_of_sensible_layouts_are_followed(tmp_path: Path) -> None:
    """Class folders that lead to one pool, a split that is another's, and links within links."""
    pool = write_image_folder(tmp_path / "pool", each=10)
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
    write_image_folder(tmp_path / "a[1]", "train", "val", each=2)
    write_image_folder(tmp_path / "b", "train", each=1)
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
    Path(root, "0.jpg").write_bytes(encode_image(make_image(0)))
    [image] = image_paths.iter_image_refs([str(tmp_path)])
    assert image.name == f"{root}/0.jpg"
    subprocess.run(["rm", "-r", tmp_path / "d"], check=True)  # pytest would remove it by recursion, and fail
    attacked("folders 1,500 deep", "walked to the end")
