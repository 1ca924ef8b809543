"""Packing a dataset: the shards hold what the dataset holds, and an interrupted packing resumes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.data.image_files import list_names, read_contents, write_image_folder
from vitrail.data import shards
from vitrail.data.audit import read_excluded_images
from vitrail.data.dataset import without_images
from vitrail.data.file_list import open_file_list
from vitrail.data.folder import open_folder
from vitrail.data.pack import pack
from vitrail.data.shards import open_shards
from vitrail.data.webdataset import open_tars
from vitrail.errors import DataError, UsageError


def packed(tmp_path: Path, **options: Any) -> Path:
    pack(open_folder(write_image_folder(tmp_path / "set", "train", "val", "test", **options)), tmp_path / "out")
    return tmp_path / "out"


def test_shards_equal_the_folder_they_came_from(tmp_path: Path) -> None:
    out = packed(tmp_path, each=7)
    source, found, foreign = open_folder(tmp_path / "set"), open_shards(out), open_tars(str(out / "*.tar"))
    assert found.classes == source.classes
    assert foreign.classes == ("0", "1")  # anyone's reader knows the numbers alone
    for name, split in source.splits.items():
        assert read_contents(found.splits[name]) == read_contents(split)
        assert read_contents(foreign.splits[name]) == read_contents(split)
        inside = {found.splits[name].get_image_name(index).split(":")[1] for index in range(len(split))}
        assert inside == {split.get_image_name(index) for index in range(len(split))}


def test_classes_are_mixed_and_shards_cut_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 6000)
    out = packed(tmp_path, each=40)
    train = open_shards(out).splits["train"]
    assert len(train.count_per_shard()) > 3
    assert sum(train.count_per_shard()) == 80
    first = [train.get_labels(index)[0] for index in range(train.count_per_shard()[0])]
    assert len(set(first)) == 2


def test_equal_sets_give_equal_bytes(tmp_path: Path) -> None:
    one, two = packed(tmp_path / "a"), packed(tmp_path / "b")
    for file in sorted(one.glob("*.tar")):
        assert file.read_bytes() == (two / file.name).read_bytes()


def test_several_labels_and_none_survive(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "set", classes=("x",), each=4)
    rows = [("x/0.jpg", ["sun", "sea"]), ("x/1.jpg", []), ("x/2.jpg", ["sea"]), ("x/3.jpg", ["sun"])]
    lines = [json.dumps({"path": path, "labels": labels, "split": "train"}) for path, labels in rows]
    lines.append(json.dumps({"path": "x/0.jpg", "labels": ["sea"], "split": "val"}))
    (root / "list.jsonl").write_text("\n".join(lines))
    pack(open_file_list(root / "list.jsonl"), tmp_path / "out")
    found, foreign = open_shards(tmp_path / "out"), open_tars(str(tmp_path / "out" / "*.tar"))
    expected = read_contents(open_file_list(root / "list.jsonl").splits["train"])
    assert found.multi_label
    assert found.classes == ("sea", "sun")
    for split in (found.splits["train"], foreign.splits["train"]):
        assert read_contents(split) == expected
    (root / "flat").mkdir()
    for path in (root / "x").iterdir():
        path.rename(root / "flat" / path.name)
    pack(open_folder(root / "flat"), tmp_path / "unlabelled")
    assert open_shards(tmp_path / "unlabelled").splits["train"].get_labels(0) == ()
    assert not open_shards(tmp_path / "unlabelled").multi_label


def test_packing_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 3000)
    dataset = open_folder(write_image_folder(tmp_path / "set", "train", "val", "test", each=10))

    def interrupted(done: int, total: int) -> None:
        if done >= total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(dataset, tmp_path / "out", progress=interrupted)
    assert not (tmp_path / "out").exists()
    gathering = tmp_path / "out.packing"
    before = {path.name: path.stat().st_mtime_ns for path in gathering.glob("*.tar")}
    assert before
    steps: list[tuple[int, int]] = []
    pack(dataset, tmp_path / "out", progress=lambda done, total: steps.append((done, total)))
    assert steps[0][0] >= len(before) > 0
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")}
    assert all(after[name] == time for name, time in before.items())
    assert not gathering.exists()
    assert read_contents(open_shards(tmp_path / "out").splits["train"]) == read_contents(dataset.splits["train"])


def test_a_changed_set_does_not_go_on_with_another_ones_shards(tmp_path: Path) -> None:
    dataset = open_folder(write_image_folder(tmp_path / "set", each=10))
    with pytest.raises(KeyboardInterrupt):
        pack(dataset, tmp_path / "out", progress=lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    (tmp_path / "set" / "rose" / "0.jpg").unlink()
    with pytest.raises(UsageError, match="another packing"):
        pack(open_folder(tmp_path / "set"), tmp_path / "out")


def test_changed_labels_do_not_go_on_with_the_old_ones(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "set", classes=("x",), each=6)
    rows = [(f"x/{number}.jpg", "ab"[number % 2]) for number in range(6)]

    def written(rows: list[tuple[str, str]]) -> Path:
        lines = "\n".join(f"{path},{label},train" for path, label in rows)
        (root / "list.csv").write_text(f"path,label,split\n{lines}\n")
        return root / "list.csv"

    with pytest.raises(KeyboardInterrupt):
        pack(
            open_file_list(written(rows)),
            tmp_path / "out",
            progress=lambda *_: (_ for _ in ()).throw(KeyboardInterrupt),
        )
    swapped = [(path, "ba"["ab".index(label)]) for path, label in rows]
    with pytest.raises(UsageError, match="another packing"):
        pack(open_file_list(written(swapped)), tmp_path / "out")


def test_the_kind_of_labels_survives(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "set", classes=("x",), each=3)
    lines = [json.dumps({"path": f"x/{number}.jpg", "labels": ["a"], "split": "train"}) for number in range(3)]
    (root / "several.jsonl").write_text("\n".join(lines))
    pack(open_file_list(root / "several.jsonl"), tmp_path / "several")
    assert open_shards(tmp_path / "several").multi_label
    partly = [{"path": "x/0.jpg", "label": "a", "split": "train"}, {"path": "x/1.jpg", "split": "train"}]
    (root / "partly.jsonl").write_text("\n".join(map(json.dumps, partly)))
    pack(open_file_list(root / "partly.jsonl"), tmp_path / "partly")
    found = open_shards(tmp_path / "partly")
    assert not found.multi_label
    assert read_contents(found.splits["train"]) == read_contents(open_file_list(root / "partly.jsonl").splits["train"])


def test_class_names_that_are_no_utf8_survive(tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9")
    try:
        root = write_image_folder(tmp_path / "set", "train", "val", classes=("a", odd), each=2)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    pack(open_folder(root), tmp_path / "out")
    assert open_shards(tmp_path / "out").classes == ("a", odd)


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    dataset = open_folder(write_image_folder(tmp_path / "set", each=10))
    (tmp_path / "set" / "rose" / "3.jpg").unlink()
    with pytest.raises(DataError, match=r"rose/3.jpg cannot be read"):
        pack(dataset, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_report_says_is_left_out(tmp_path: Path) -> None:
    dataset = open_folder(write_image_folder(tmp_path / "set", "train", "val", each=3))
    report = tmp_path / "data_report.json"
    unwanted = [{"split": "train", "name": "train/rose/1.jpg"}, {"split": "val", "name": "val/tulip/0.jpg"}]
    report.write_text(json.dumps({"data": dataset.name, "leave_out": unwanted}))
    left = list_names(without_images(dataset, read_excluded_images(report, dataset)))
    assert "train/rose/1.jpg" not in left["train"]
    assert (len(left["train"]), len(left["val"])) == (5, 5)
    report.write_text("{}")
    with pytest.raises(DataError, match=r"not a data_report.json"):
        read_excluded_images(report, dataset)
    report.write_text(json.dumps({"data": "/another", "leave_out": []}))
    with pytest.raises(UsageError, match="is the report of /another"):
        read_excluded_images(report, dataset)
    with pytest.raises(UsageError, match="which would then contain itself"):
        pack(dataset, tmp_path / "set" / "out")
    every = {(key, name) for key, part in list_names(dataset).items() for name in part}
    with pytest.raises(DataError, match="no image is left without"):
        without_images(dataset, every)
