"""Corrections of labels: what a suspects.csv does to a dataset, and everything that is refused."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from tests.data.image_files import list_names, write_image_folder
from vitrail.data.dataset import Dataset
from vitrail.data.dataset_digest import digest_dataset
from vitrail.data.pack import pack
from vitrail.data.relabel import COLUMNS, relabel_dataset
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError

HEADER = ",".join(COLUMNS)
CHANGES = (
    "train,train/rose/0.jpg,rose,tulip,relabel",
    "train,train/rose/1.jpg,rose,tulip,keep",
    "train,train/rose/2.jpg,rose,tulip,",
    "train,train/tulip/3.jpg,tulip,rose,DROP ",
    "val,val/tulip/0.jpg,tulip,rose,relabel",
)


@pytest.fixture
def flowers(tmp_path: Path) -> Dataset:
    return open_dataset(write_image_folder(tmp_path / "flowers", "train", "val", "test", each=4))


def write_decisions(folder: Path, *rows: str, header: str = HEADER) -> Path:
    path = folder / "suspects.csv"
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def list_labels(dataset: Dataset) -> dict[str, str]:
    """The class of each image, by its name."""
    names = list_names(dataset)
    return {
        name: ",".join(dataset.classes[label] for label in split.get_labels(index))
        for key, split in dataset.splits.items()
        for index, name in enumerate(names[key])
    }


def test_labels_are_changed_and_images_dropped_and_nothing_else(flowers: Dataset, tmp_path: Path) -> None:
    before = list_labels(flowers)
    path = write_decisions(tmp_path, *CHANGES)
    corrected = relabel_dataset(flowers, path)
    expected = before | {"train/rose/0.jpg": "tulip", "val/tulip/0.jpg": "rose"}
    del expected["train/tulip/3.jpg"]
    assert list_labels(corrected) == expected
    assert list_labels(flowers) == before, "the dataset itself is as it was"
    assert corrected.splits["train"].count_per_class(2).tolist() == [3, 4]
    assert corrected.notes[-1] == f"2 labels changed, 1 image dropped, by {path}"
    assert corrected.splits["train"].store is corrected.splits["val"].store, "so that they can be merged"
    assert relabel_dataset(flowers, None) is flowers


def test_workers_get_the_changed_labels(flowers: Dataset, tmp_path: Path) -> None:
    corrected = relabel_dataset(flowers, write_decisions(tmp_path, *CHANGES))
    table = corrected.splits["train"].store.table
    content = pickle.dumps(table)
    np.testing.assert_array_equal(pickle.loads(content)["label"], table["label"])
    assert len(content) < 2000, "the path of the table, and the rows that change"


def test_packed_shards_have_the_changed_labels_and_can_be_corrected_again(flowers: Dataset, tmp_path: Path) -> None:
    corrected = relabel_dataset(flowers, write_decisions(tmp_path, *CHANGES))
    pack(corrected, tmp_path / "shards")
    packed = open_dataset(tmp_path / "shards")
    by_name = {name.rpartition(":")[2]: label for name, label in list_labels(packed).items()}
    assert by_name["train/rose/0.jpg"] == "tulip"
    assert len(by_name) == 23
    name = next(name for name in list_labels(packed) if name.endswith("train/rose/0.jpg"))
    again = relabel_dataset(packed, write_decisions(tmp_path, f"train,{name},tulip,rose,relabel"))
    assert list_labels(again)[name] == "rose"


def test_the_order_of_rows_and_undecided_ones_do_not_change_the_digest(flowers: Dataset, tmp_path: Path) -> None:
    changes = [relabel_dataset(flowers, write_decisions(tmp_path, *rows)).label_changes for rows in (
        CHANGES, CHANGES[::-1], (CHANGES[0], CHANGES[3], CHANGES[4]), CHANGES[:4],
    )]  # fmt: skip
    assert changes[0] == changes[1] == changes[2] != changes[3]
    corrected = relabel_dataset(flowers, write_decisions(tmp_path, *CHANGES))
    assert digest_dataset(corrected).listing != digest_dataset(flowers).listing


def test_a_spreadsheet_may_have_saved_the_file(flowers: Dataset, tmp_path: Path) -> None:
    """With a byte order mark, Windows' ends of lines, columns in another order and more of them."""
    path = tmp_path / "suspects.csv"
    path.write_bytes(
        b"\xef\xbb\xbfrank,action,split,image,label,likely_label,note\r\n"
        b'1,Relabel,train,train/rose/0.jpg,rose,tulip,"surely, a tulip"\r\n'
    )
    assert list_labels(relabel_dataset(flowers, path))["train/rose/0.jpg"] == "tulip"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["train,train/rose/9.jpg,rose,tulip,drop"], "there is no image 'train/rose/9.jpg'; the file is of other data"),
        (["train,train/rose/0.jpg,rose,daisy,relabel"], "line 2: 'daisy' in likely_label is no class of the data (ro"),
        (["train,train/rose/0.jpg,tulip,rose,relabel"], "train/rose/0.jpg is not labeled 'tulip' now"),
        (["train,train/rose/0.jpg,rose,tulip,delete"], "line 2: the action is 'delete'; write relabel, drop or keep"),
        (["extra,train/rose/0.jpg,rose,tulip,drop"], "has no split 'extra'; it has train, val, test"),
        (["train,train/rose/0.jpg,rose,tulip,"], "decides nothing: write relabel or drop into the column action"),
        (["train,train/rose/0.jpg,rose,tulip"], "line 2: 5 cells are needed"),
        (
            ["train,train/rose/0.jpg,rose,tulip,relabel", "train,train/rose/0.jpg,rose,tulip,drop"],
            "line 3: train/rose/0.jpg has another row with another decision",
        ),
        ([f"val,val/{name}/{n}.jpg,{name},rose,drop" for name in ("rose", "tulip") for n in range(4)], "image of val"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_refused(flowers: Dataset, tmp_path: Path, rows: list[str], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        relabel_dataset(flowers, write_decisions(tmp_path, *rows))


def test_other_files_and_other_datasets_are_refused(flowers: Dataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing.csv cannot be read as CSV .*vitrail data suspects writes such a"):
        relabel_dataset(flowers, tmp_path / "nothing.csv")
    with pytest.raises(DataError, match="has no column action; it needs split, image, label"):
        relabel_dataset(flowers, write_decisions(tmp_path, header="split,image,label,likely_label"))
    (tmp_path / "list.csv").write_text("path,labels\nflowers/train/rose/0.jpg,a;b\nflowers/train/rose/1.jpg,b\n")
    with pytest.raises(UsageError, match=r"--relabel corrects .* and those of .* several labels"):
        relabel_dataset(open_dataset(tmp_path / "list.csv"), tmp_path / "suspects.csv")
