"""What is checked of a dataset before it is trained on."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.data.image_files import write_image_folder
from tests.training.test_trainer import build_finetune_run
from tests.training.test_training_run import build_digits_run
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError
from vitrail.training import dataset_checks
from vitrail.training.dataset_checks import check_classes, check_images, list_dataset_notes, warn_about_imbalance
from vitrail.training.run_execution import SILENT


def check(root: Path, notes: list[str], **options: Any) -> Any:
    dataset = open_dataset(str(root))
    return check_images(dataset, "DATA", notify=notes.append, show_progress=SILENT.show_progress, **options)


def test_classes_in_the_order_of_their_names_are_warned_of(tmp_path: Path) -> None:
    names = ("1", "2", "10")
    dataset = open_dataset(str(write_image_folder(tmp_path / "set", "train", "val", classes=names, each=1)))
    (note,) = list_dataset_notes(dataset)
    assert note == "warning: classes are in the order of their names (1, 10, 2, ...), so output 2 is not class 2"
    (note,) = list_dataset_notes(open_dataset("digits"))  # 0 to 9, in their order
    assert note.startswith("note: no val and test given")


def test_a_split_without_images_of_a_class_is_noted(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "set", "train", "val", "test", each=1)
    assert not list(list_dataset_notes(open_dataset(str(root))))
    write_image_folder(root, "train", "val", classes=("lily",), each=1, start=100)
    (note,) = list_dataset_notes(open_dataset(str(root)))
    assert note == "note: test has no image of 1 class, such as 'lily', so it says nothing about that"


def test_a_class_without_a_training_image_is_refused_unless_val_is_trained_on(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "set", "train", "val", each=2)
    write_image_folder(root, "val", classes=("orchid",), each=1)
    dataset = open_dataset(str(root))
    with pytest.raises(DataError, match=r"1 class of .* without a training image, such as orchid"):
        check_classes(dataset)
    check_classes(dataset, train_on_val=True)


def test_a_single_class_is_refused_with_the_folder_that_may_be_meant(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    lines = [f"flowers/{name}/{number}.jpg,flowers" for name in ("rose", "tulip") for number in range(5)]
    write_image_folder(tmp_path / "set" / "flowers")
    (tmp_path / "set" / "list.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    with pytest.raises(DataError, match=r"has one class, flowers, .*; flowers holds the folders rose, tulip: did you"):
        check_classes(open_dataset(str(tmp_path / "set" / "list.csv")))


def test_empty_class_folders_are_refused_where_that_is_asked_for(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "set", "train", "val", each=2)
    for top in ("train", "val"):
        (root / top / "orchid").mkdir()
    dataset = open_dataset(str(root))
    check_classes(dataset)
    with pytest.raises(DataError, match=r"1 class folder of .* without an image, such as .*orchid"):
        check_classes(dataset, strict=True)


def test_imbalance_is_warned_of_with_both_numbers(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "set", "train", "val", "test", classes=("rose",), each=20)
    write_image_folder(root, "train", "val", "test", classes=("tulip",), each=1, start=100)
    notes: list[str] = []
    run = build_finetune_run(tmp_path, open_dataset(str(root)))
    warn_about_imbalance(run, notes.append)
    assert len(notes) == 1
    assert "rose has 20 training images and tulip 1" in notes[0]
    assert notes[0].endswith("; --balanced gives every class the same weight")
    balanced = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, logit_adjustment=True))
    warn_about_imbalance(balanced, notes.append)
    assert notes[1] == notes[0].partition(";")[0]
    warn_about_imbalance(build_digits_run({}), notes.append)
    assert len(notes) == 2


def test_unreadable_images_are_left_out_or_refused(tmp_path: Path) -> None:
    root, notes = write_image_folder(tmp_path / "set", "train", "val", each=6), list[str]()
    (root / "train" / "rose" / "1.jpg").write_bytes(b"<html>")
    dataset, audit = check(root, notes)
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 11, "val": 12}
    assert [image["name"] for image in audit["bad"]] == ["train/rose/1.jpg"]
    assert len(notes) == 1
    assert notes[0].startswith("warning: 1 image of 24 cannot be read, such as train/rose/1.jpg: ")
    with pytest.raises(DataError, match=r"--strict accepts none. `vitrail data check DATA` names every bad image"):
        check(root, notes, strict=True)
    for number in (2, 3):
        (root / "train" / "rose" / f"{number}.jpg").write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"3 images of 24 cannot be read, .* more than 10% are too many"):
        check(root, notes)


@pytest.mark.parametrize("strict", [False, True])
def test_images_that_are_too_many_to_read_are_left_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    monkeypatch.setattr(dataset_checks, "_MAX_SCANNED_IMAGES", 7)
    root, notes = write_image_folder(tmp_path / "set", "train", "val", each=2), list[str]()
    dataset, audit = check(root, notes, strict=strict)
    assert (dataset.skip_bad, audit) == (not strict, None)
    assert notes == ["note: 8 images are not checked one by one before training: vitrail data check DATA"]
