"""What a DATA argument names, and which of two meanings wins."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data.image_files import encode_image, list_names, make_image, read_contents, write_image_folder
from vitrail.data import public_datasets, shards
from vitrail.data.folder import open_folder
from vitrail.data.pack import pack
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError


def test_a_folder_a_list_a_packed_set_and_bare_tars_are_told_apart(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "set", "train", "val", each=4)
    (root / "list.csv").write_text("path,label,split\ntrain/rose/0.jpg,rose,train\nval/rose/0.jpg,rose,val\n")
    pack(open_folder(root), tmp_path / "packed")
    (tmp_path / "bare").mkdir()
    for tar in (tmp_path / "packed").glob("*.tar"):
        (tmp_path / "bare" / tar.name).write_bytes(tar.read_bytes())
    expected = read_contents(open_dataset(str(root)).splits["train"])
    assert len(expected) == 8
    assert read_contents(open_dataset(str(tmp_path / "packed")).splits["train"]) == expected
    assert read_contents(open_dataset(str(tmp_path / "bare")).splits["train"]) == expected
    assert read_contents(open_dataset(str(tmp_path / "bare" / "train-{000000..000000}.tar")).splits["train"])
    assert list_names(open_dataset(str(root / "list.csv")))["train"] == ["train/rose/0.jpg"]


def test_a_known_name_wins_over_a_folder_here_and_a_path_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_image_folder(tmp_path / "digits", each=5)
    assert len(open_dataset("digits").classes) == 10
    assert open_dataset("./digits").classes == ("rose", "tulip")
    write_image_folder(tmp_path / "mine", each=5)
    assert open_dataset("mine").classes == ("rose", "tulip")
    with pytest.raises(DataError, match="vitrail data get cifar10"):
        open_dataset("cifar10")


def test_a_folder_of_images_that_holds_its_archive_is_a_folder(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "br[1]", "train", "val", each=2)
    pack(open_folder(root), tmp_path / "out")
    (root / "original.tar").write_bytes((tmp_path / "out" / "train-000000.tar").read_bytes())
    found = open_dataset(str(root))
    assert found.classes == ("rose", "tulip")
    assert "original.tar" in found.notes[0]
    shutil.rmtree(root / "train")
    shutil.rmtree(root / "val")
    assert len(open_dataset(str(root)).classes) == 2


def test_a_stored_set_is_opened_by_name() -> None:
    samples = [shards.Sample(split, "a.png", encode_image(make_image(0), "PNG"), (3,)) for split in ("train", "test")]
    shards.write_shards(
        public_datasets.get_dataset_folder("cifar10"), samples, classes=[str(n) for n in range(10)], origin={}
    )
    assert open_dataset("cifar10").splits["train"].get_labels(0) == (3,)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "does not exist. A dataset is"),
        ("no/where", "does not exist"),
        ("x.zip", "is a file; a dataset is"),
        ("x.tar", "x.tar"),
        ("./", "holds no image"),
    ],
)
def test_what_is_no_set_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.zip").write_bytes(b"")
    with pytest.raises(DataError, match=message):
        open_dataset(name)
    with pytest.raises(UsageError, match="fraction to hold out"):
        open_dataset("digits", holdout_fraction=0.7)


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    found = open_dataset("digits")
    assert {name: len(split) for name, split in found.splits.items()} == {"train": 1439, "val": 179, "test": 179}
    bunch = load_digits()
    split = found.splits["val"]
    row = int(split.get_image_name(0).removesuffix(".png"))
    image = split.read_image(0)
    assert np.array_equal(np.asarray(image), np.round(bunch.images[row] * 255 / 16))
    assert split.get_labels(0) == (int(bunch.target[row]),)
