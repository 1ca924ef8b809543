"""Datasets of the Hugging Face Hub, from parquet files on disk through the library datasets."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data.image_files import encode_image, make_image, read_contents
from vitrail.data.pack import pack
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError


def write_parquet(root: Path, split: str, rows: dict[str, Any], features: object) -> None:
    datasets = pytest.importorskip("datasets")
    root.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(rows, features=features).to_parquet(root / f"{split}-00000-of-00001.parquet")


def test_a_hugging_face_set_is_read_through_its_own_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog"])})
    images = [encode_image(make_image(seed), "PNG") for seed in range(30)]
    blobs = [{"bytes": image, "path": None} for image in images]
    write_parquet(
        tmp_path / "org/name/data", "train", {"picture": blobs[:20], "kind": [n % 2 for n in range(20)]}, features
    )
    write_parquet(tmp_path / "org/name/data", "test", {"picture": blobs[20:], "kind": [1] * 10}, features)
    found = open_dataset("hf:org/name")
    assert found.classes == ("cat", "dog")
    assert {name: len(split) for name, split in found.splits.items()} == {"train": 18, "val": 2, "test": 10}
    for split, start in (("train", 0), ("test", 20)):
        rows = found.splits[split]
        for index in (0, len(rows) - 1):
            number = int(rows.get_image_name(index).split("/")[1]) + start
            assert rows.read_image(index) == images[number]
            assert rows.get_labels(index) == ((number % 2 if start == 0 else 1),)
    pack(found, tmp_path / "packed")
    assert read_contents(open_dataset(str(tmp_path / "packed")).splits["test"]) == read_contents(found.splits["test"])


def test_a_hugging_face_set_with_several_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    inner = datasets.List(datasets.ClassLabel(names=["sea", "sun"]))
    blobs = [{"bytes": encode_image(make_image(seed), "PNG"), "path": None} for seed in range(3)]
    rows = {"image": blobs, "labels": [[0, 1], [], [1]]}
    for split in ("train", "validation"):
        write_parquet(
            tmp_path / "org/many/data", split, rows, datasets.Features({"image": datasets.Image(), "labels": inner})
        )
    found = open_dataset("hf:org/many")
    assert found.multi_label
    assert [found.splits["val"].get_labels(index) for index in range(3)] == [(0, 1), (), (1,)]


def test_a_hugging_face_name_that_cannot_be_loaded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="write hf:ORG/NAME"):
        open_dataset("hf:name")
    with pytest.raises(DataError, match="hf:org/absent cannot be loaded") as caught:
        open_dataset("hf:org/absent")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "split", "message"),
    [
        (("label",), "train", "has 0 image columns among label; one is needed"),
        (("left", "right"), "train", "has 2 image columns among left, right; one is needed"),
        (("image",), "extra", "has the splits extra, none of which is train, val or test"),
    ],
)
def test_a_hugging_face_set_that_is_no_set_of_images_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: tuple[str, ...], split: str, message: str
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    features = {name: datasets.Value("int64") if name == "label" else datasets.Image() for name in columns}
    blob = {"bytes": encode_image(make_image(0), "PNG"), "path": None}
    rows = {name: [0] if name == "label" else [blob] for name in columns}
    write_parquet(tmp_path / "org/name/data", split, rows, datasets.Features(features))
    with pytest.raises(DataError, match=f"^hf:org/name {message}$"):
        open_dataset("hf:org/name")


def test_images_without_a_label_column_have_no_labels_and_other_splits_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    rows = {"image": [{"bytes": encode_image(make_image(seed), "PNG"), "path": None} for seed in range(3)]}
    for split in ("train", "validation", "extra"):
        write_parquet(tmp_path / "org/bare/data", split, rows, datasets.Features({"image": datasets.Image()}))
    dataset = open_dataset("hf:org/bare")
    assert dataset.classes == ()
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 3, "val": 3}
    assert dataset.notes == ("splits left out: extra",)


def test_without_the_library_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'vitrail\[datasets\]'"):
        open_dataset("hf:org/name")
