"""Splits for datasets that have none: a part of each class, the same everywhere and for good."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.data.image_files import encode_image, list_names, make_image, write_image_folder
from vitrail.data import holdout
from vitrail.data.file_list import open_file_list
from vitrail.data.folder import open_folder
from vitrail.errors import DataError
from vitrail.files import get_data_home


def test_without_splits_a_tenth_of_each_class_is_held_out_twice(tmp_path: Path) -> None:
    found = open_folder(write_image_folder(tmp_path / "set", each=20))
    assert {name: len(split) for name, split in found.splits.items()} == {"train": 32, "val": 4, "test": 4}
    for split in found.splits.values():
        assert len(set(split.count_per_class(2).tolist())) == 1
    parts = list_names(found)
    assert len({name for part in parts.values() for name in part}) == 40
    assert "10% of each class held out for each" in found.notes[0]


def test_the_split_is_the_same_elsewhere_and_what_was_held_out_stays_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_image_folder(tmp_path / "set", each=20)
    first = list_names(open_folder(root))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another home"))
    other = write_image_folder(tmp_path / "elsewhere", each=20)
    assert list_names(open_folder(other)) == first
    for number in range(20, 60):
        (other / "rose" / f"{number}.jpg").write_bytes(encode_image(make_image(number)))
    write_image_folder(other, classes=("new",), each=20, start=900)
    grown = list_names(open_folder(other))
    assert [name for name in grown["test"] if "new" not in name] == first["test"]
    assert [name for name in grown["val"] if "new" not in name] == first["val"]
    assert sum("new" in name for name in grown["test"]) == 2


def test_train_without_val_gives_a_tenth_and_leaves_test_alone(tmp_path: Path) -> None:
    found = open_folder(write_image_folder(tmp_path, "train", "test", each=10))
    assert {name: len(split) for name, split in found.splits.items()} == {"train": 18, "val": 2, "test": 20}
    assert all(name.startswith("train/") for name in list_names(found)["val"])


def test_a_class_of_two_is_never_held_out(tmp_path: Path) -> None:
    found = open_folder(write_image_folder(tmp_path / "a", classes=("rare", "common"), each=2))
    assert {name: len(split) for name, split in found.splits.items()} == {"train": 4}
    found = open_folder(write_image_folder(tmp_path / "b", "train", "test", classes=("rare", "common"), each=2))
    assert {name: len(split) for name, split in found.splits.items()} == {"train": 4, "test": 4}


def test_a_path_listed_twice_stands_on_one_side(tmp_path: Path) -> None:
    rows = [f"{number % 10}.jpg,x" for number in range(30)]
    (tmp_path / "l.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    found = open_file_list(tmp_path / "l.csv")
    sides = [set(part) for part in list_names(found).values()]
    assert len(sides) == 3
    assert sum(map(len, sides)) == 10
    assert list_names(open_file_list(tmp_path / "l.csv")) == list_names(found)


def build_column(*counts: int) -> holdout.SplitColumn:
    """Rows of no split, of train, of val and of test, in that order."""
    return np.repeat(np.arange(-1, 3, dtype=np.int8), counts)


def complete_splits(
    column: holdout.SplitColumn, fraction: float = 0.1, identity: str = "a set"
) -> holdout.CompletedSplits:
    columns = {"label": np.zeros(len(column), dtype=np.int32)}
    return holdout.complete_splits(column, columns, "{}.png".format, identity=identity, holdout_fraction=fraction)


def test_splits_that_are_given_stay_as_they_are() -> None:
    column = build_column(0, 10, 5, 5)
    completed = complete_splits(column)
    assert completed.column is column
    assert (completed.generated_splits, completed.notes) == ((), ())
    assert not (get_data_home() / "splits").exists()


def test_the_note_is_found_among_others_only_where_there_was_no_split() -> None:
    without_splits = complete_splits(build_column(20, 0, 0, 0))
    without_val = complete_splits(build_column(0, 20, 0, 5), identity="another set")
    assert without_val.notes[0].startswith("no val given: 10% of each class held out for it (2 images, listed in ")
    assert holdout.find_holdout_note(without_val.notes) == ""
    assert holdout.find_holdout_note(["other", *without_splits.notes]) == without_splits.notes[0]
    assert without_splits.build_metadata(("rose",), ["other"]) == {
        "classes": ["rose"],
        "generated_splits": ("val", "test"),
        "holdout_note": without_splits.notes[0],
        "notes": [without_splits.notes[0], "other"],
    }


def test_each_fraction_has_a_list_of_its_own_and_half_leaves_train_an_image() -> None:
    counts = [
        np.bincount(complete_splits(build_column(9, 0, 0, 0), fraction).column, minlength=3).tolist()
        for fraction in (0.1, 0.2, 0.5)
    ]
    assert counts == [[7, 1, 1], [5, 2, 2], [1, 4, 4]]
    assert len(list((get_data_home() / "splits").iterdir())) == 3


@pytest.mark.parametrize("text", ["name,split\n1.png,elsewhere\n", "path\n1.png\n"])
def test_a_damaged_list_is_named_and_never_replaced(text: str) -> None:
    complete_splits(build_column(20, 0, 0, 0))
    (path,) = (get_data_home() / "splits").iterdir()
    path.write_text(text)
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}, which lists the held-out images, is damaged"):
        complete_splits(build_column(20, 0, 0, 0))
    assert path.read_text() == text
