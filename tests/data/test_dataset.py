"""Merged splits."""

from pathlib import Path

import pytest

from tests.data.image_files import read_contents, write_image_folder
from vitrail.data import shards
from vitrail.data.file_list import open_file_list
from vitrail.data.folder import open_folder
from vitrail.data.pack import pack
from vitrail.data.shards import open_shards
from vitrail.errors import DataError


def test_merged_splits_hold_the_images_of_both_in_the_order_of_their_store(tmp_path: Path) -> None:
    """Val is held out of every class, so its rows lie between those of train."""
    splits = open_folder(write_image_folder(tmp_path / "set", each=20)).splits
    both = splits["train"].merge(splits["val"])
    names = [both.get_image_name(index) for index in range(len(both))]
    rows = {
        split.get_image_name(index): (int(split.rows[index]), split.get_labels(index), split.read_image(index))
        for split in (splits["train"], splits["val"])
        for index in range(len(split))
    }
    assert names == sorted(rows, key=lambda name: rows[name][0])
    assert sorted(names) == sorted(rows)
    assert [both.get_labels(index) for index in range(len(both))] == [rows[name][1] for name in names]
    assert [both.read_image(index) for index in range(len(both))] == [rows[name][2] for name in names]
    assert both.count_per_class(2).tolist() == [18, 18]
    assert read_contents(splits["val"].merge(splits["train"])) == read_contents(both)


def test_merged_splits_of_several_labels_keep_them(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path, each=3)
    image_labels = {
        "rose/0.jpg": "a;c",
        "rose/1.jpg": "b",
        "rose/2.jpg": "",
        "tulip/0.jpg": "c",
        "tulip/1.jpg": "a;b;c",
    }
    parts = ("train", "val", "train", "test", "val")
    lines = [f"{name},{labels},{part}" for (name, labels), part in zip(image_labels.items(), parts, strict=True)]
    (root / "list.csv").write_text("\n".join(["path,labels,split", *lines]) + "\n")
    dataset = open_file_list(root / "list.csv")
    both = dataset.splits["train"].merge(dataset.splits["val"])
    named = {
        both.get_image_name(index): ";".join(dataset.classes[label] for label in both.get_labels(index))
        for index in range(4)
    }
    assert named == {name: labels for name, labels in image_labels.items() if name != "tulip/0.jpg"}
    assert both.count_per_class(3).tolist() == [2, 2, 2]


def test_merged_splits_count_the_samples_of_all_their_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 6000)
    pack(open_folder(write_image_folder(tmp_path / "set", "train", "val", "test", each=12)), tmp_path / "out")
    splits = open_shards(tmp_path / "out").splits
    both = splits["train"].merge(splits["val"])
    assert len(splits["train"].count_per_shard()) > 1 < sum(count > 0 for count in splits["val"].count_per_shard())
    assert sum(both.count_per_shard()) == len(both) == 48
    members = [both.get_image_name(index).split(":")[0] for index in range(48)]
    counted = [count for count in both.count_per_shard() if count]
    assert counted == [members.count(shard) for shard in dict.fromkeys(members)]
    assert read_contents(both) == sorted(read_contents(splits["train"]) + read_contents(splits["val"]))


def test_splits_of_two_stores_are_not_merged(tmp_path: Path) -> None:
    one, two = (open_folder(write_image_folder(tmp_path / name, "train", "val", each=2)) for name in ("one", "two"))
    with pytest.raises(DataError, match="two stores and cannot be merged"):
        one.splits["train"].merge(two.splits["val"])
