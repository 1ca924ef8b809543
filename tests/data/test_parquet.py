"""Parquet files as DATA: the same images, labels and splits as the files in folders they were made of."""

import os
import pickle
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.image_files import read_contents, write_image_folder
from tests.data.parquet_tables import make_cells, write_hub_files, write_table
from vitrail.config import AugmentConfig, PreprocessConfig
from vitrail.data import parquet, parquet_files
from vitrail.data.dataset import Dataset
from vitrail.data.dataset_digest import digest_dataset
from vitrail.data.image_scan import DECODED, scan_dataset
from vitrail.data.loader import BatchPlan, TrainingData, iter_eval_batches, iter_train_batches
from vitrail.data.pack import pack
from vitrail.data.parquet import ParquetStore
from vitrail.data.randomness import SampleOrder
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'vitrail[parquet]'")
SMALL = PreprocessConfig(size=(16, 16), resize=(18,))


def read_all(dataset: Dataset, name: str) -> list[tuple[str, Any, tuple[int, ...]]]:
    split = dataset.splits[name]
    return [
        (split.get_image_name(index), split.read_image(index), split.get_labels(index)) for index in range(len(split))
    ]


def test_hugging_faces_files_have_their_classes_splits_and_bytes(tmp_path: Path) -> None:
    images = write_hub_files(tmp_path)
    dataset = open_dataset(str(tmp_path))
    assert dataset.classes == ("cat", "dog")
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 14, "val": 2, "test": 6}
    for part in dataset.splits:
        for name, content, labels in read_all(dataset, part):
            file, _, row = name.partition(".parquet#")
            assert content == images[file][int(row)]
            assert labels == (int(row) % 2,)
    one = open_dataset(str(tmp_path / "data" / "train-*.parquet"))
    assert sum(map(len, one.splits.values())) == 16
    assert list(open_dataset(tmp_path / "data" / "test-00000-of-00001.parquet").splits) == ["test"]


def test_pixels_and_labels_are_those_of_the_same_images_as_files(tmp_path: Path) -> None:
    """To the bit, in the order of training and of evaluation, also through processes."""
    root = write_image_folder(tmp_path / "photos", "train", "val", each=6)
    rows: dict[str, list[Any]] = {"image": [], "label": [], "split": []}
    for split in ("train", "val"):
        for path in sorted((root / split).rglob("*.jpg")):
            rows["image"].append(path.read_bytes())
            rows["label"].append(path.parent.name)
            rows["split"].append(split)
    file = write_table(tmp_path / "photos.parquet", rows, rows=5)
    folder, table = open_dataset(str(root)), open_dataset(str(file))
    assert table.classes == folder.classes
    for part in ("train", "val"):
        assert read_contents(table.splits[part]) == read_contents(folder.splits[part])
        for workers in (0, 2):
            batches = [
                list(iter_eval_batches(each.splits[part], SMALL, batch_size=5, num_classes=2, workers=workers))
                for each in (folder, table)
            ]
            for one, two in zip(*batches, strict=True):
                assert torch.equal(one.pixels, two.pixels)
                assert torch.equal(one.targets, two.targets)
    trained = []
    for dataset in (folder, table):
        train = dataset.splits["train"]
        data = TrainingData(
            split=train,
            order=SampleOrder(seed=3, num_samples=len(train)),
            augment=AugmentConfig(),
            preprocess=SMALL,
            seed=3,
            num_classes=2,
        )
        trained.append(list(iter_train_batches(data, BatchPlan(batch_size=4, total_samples=24), workers=2)))
    assert all(torch.equal(one.pixels, two.pixels) for one, two in zip(*trained, strict=True))


@pytest.mark.parametrize(
    ("labels", "classes", "expected"),
    [
        (["b", "a", "b"], ("a", "b"), [(1,), (0,), (1,)]),
        ([10, 9, 10], ("9", "10"), [(1,), (0,), (1,)]),
        ([["a", "b"], [], ["b"]], ("a", "b"), [(0, 1), (), (1,)]),
        ([[7], [3, 7], None], ("3", "7"), [(1,), (0, 1), ()]),
        (pyarrow.array(["b", "a", "b"]).dictionary_encode(), ("a", "b"), [(1,), (0,), (1,)]),
    ],
)
def test_labels_are_text_numbers_or_lists(tmp_path: Path, labels: Any, classes: Any, expected: Any) -> None:
    column = "labels" if isinstance(labels, list) and isinstance(labels[0], list) else "label"
    file = write_table(tmp_path / "test.parquet", {"image": make_cells(3), column: labels}, rows=2)
    dataset = open_dataset(str(file))
    assert dataset.classes == classes
    assert dataset.multi_label == (column == "labels")
    assert [dataset.splits["test"].get_labels(index) for index in range(3)] == expected


def test_without_labels_and_with_minus_one_images_are_unlabeled(tmp_path: Path) -> None:
    unlabeled = open_dataset(str(write_table(tmp_path / "a" / "test.parquet", {"image": make_cells(3)})))
    assert unlabeled.classes == ()
    assert any("no labels" in note for note in unlabeled.notes)
    features = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    columns = {"image": make_cells(3), "label": [-1, -1, -1]}
    hidden = open_dataset(str(write_table(tmp_path / "b" / "test.parquet", columns, features=features)))
    assert hidden.splits["test"].get_labels(0) == ()
    assert hidden.classes == ("cat", "dog")


def test_a_column_of_paths_is_relative_to_its_file(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "photos", each=3)
    paths = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "photos").rglob("*.jpg"))
    for split in ("train", "val"):
        columns = {"path": [f"../{path}" for path in paths], "label": [Path(path).parent.name for path in paths]}
        write_table(tmp_path / split / "rows.parquet", columns)
    dataset = open_dataset(str(tmp_path / "*" / "rows.parquet"))
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 6, "val": 6}
    val = dataset.splits["val"]
    for index, path in enumerate(paths):
        image = val.read_image(index)
        assert isinstance(image, Path)
        assert image.resolve() == tmp_path / path
        assert dataset.classes[val.get_labels(index)[0]] == Path(path).parent.name


def test_what_is_ambiguous_names_the_columns_and_how_to_choose(tmp_path: Path) -> None:
    cells = make_cells(3)
    columns = {"scan": cells, "mask": make_cells(3, 50), "fine_label": ["a", "b", "a"], "coarse": ["x", "x", "y"]}
    file = str(write_table(tmp_path / "test.parquet", columns))
    with pytest.raises(DataError, match=r"2 columns that may hold the images: scan, mask; .*test.parquet#image=scan"):
        open_dataset(file)
    dataset = open_dataset(f"{file}#image=mask,label=coarse")
    assert dataset.classes == ("x", "y")
    assert dataset.splits["test"].read_image(0) == make_cells(1, 50)[0]
    with pytest.raises(DataError, match=r"no column masks to be the image; it has scan \(binary\)"):
        open_dataset(f"{file}#image=masks")
    with pytest.raises(UsageError, match="chooses no column; write #image=COLUMN"):
        open_dataset(f"{file}#image=mask,kind=coarse")
    both = str(write_table(tmp_path / "two.parquet", {"image": cells, "label": [0, 1, 0], "class": [1, 1, 0]}))
    with pytest.raises(DataError, match=r"2 columns that may be the label: label, class; .*#label=label"):
        open_dataset(both)
    with pytest.raises(DataError, match=r"no column of images among label \(int64\)"):
        open_dataset(str(write_table(tmp_path / "none.parquet", {"label": [1, 2]})))


def test_what_is_damaged_or_does_not_fit_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.parquet"
    file.write_bytes(b"PAR1 and no footer")
    with pytest.raises(DataError, match=r"x.parquet cannot be read as Parquet"):
        open_dataset(str(file))
    with pytest.raises(DataError, match=r"y.parquet does not exist"):
        open_dataset(str(tmp_path / "y.parquet"))
    columns = {"image": make_cells(3), "label": [0, None, 1]}
    with pytest.raises(DataError, match=r"z.parquet#1: label is empty, while other images have a label"):
        open_dataset(str(write_table(tmp_path / "z.parquet", columns)))
    with pytest.raises(DataError, match=r"label is a column of double"):
        open_dataset(str(write_table(tmp_path / "w.parquet", columns | {"label": [0.5, 1.0, 1.5]})))
    with pytest.raises(DataError, match=r"split is 'holdout'; it must be train, val or test"):
        open_dataset(str(write_table(tmp_path / "v.parquet", columns | {"label": [0, 1, 1], "split": ["holdout"] * 3})))
    write_table(tmp_path / "mixed" / "a.parquet", {"image": make_cells(2), "label": [0, 1]})
    write_table(tmp_path / "mixed" / "b.parquet", {"image": make_cells(2), "kind": [0, 1]})
    with pytest.raises(DataError, match=r"b.parquet has no column label, as other files have"):
        open_dataset(str(tmp_path / "mixed"))
    monkeypatch.setattr(parquet, "_MAX_GROUP_BYTES", 1000)
    with pytest.raises(DataError, match=r"has a row group of .*row_group_size=1000"):
        open_dataset(str(write_table(tmp_path / "u.parquet", {"image": make_cells(9)}, rows=9)))


def test_an_empty_cell_is_an_unreadable_image(tmp_path: Path) -> None:
    cells = [*make_cells(3), None]
    dataset = open_dataset(str(write_table(tmp_path / "test.parquet", {"image": cells, "label": [0, 1, 0, 1]})))
    with pytest.raises(DataError, match=r"test.parquet#3 has no image: the cell is empty"):
        dataset.splits["test"].read_image(3)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    reads: Counter[int] = Counter()
    read = parquet_files.read_row_group

    def read_and_count(path: str, group: int, column: str) -> Any:
        reads[group] += 1
        return read(path, group, column)

    monkeypatch.setattr(parquet_files, "read_row_group", read_and_count)
    return reads


def test_an_epoch_reads_each_row_group_once_within_the_memory_of_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random noise of one size: 40 row groups of 5 images, and memory for about 4 of them."""
    cells = [os.urandom(1000) for _ in range(200)]
    file = write_table(tmp_path / "train.parquet", {"image": cells, "label": [0, 1] * 100}, rows=5)
    group_bytes = parquet_files.measure_row_group(str(file), 0)
    monkeypatch.setattr(parquet, "_WINDOW_BYTES", 4 * group_bytes + group_bytes // 2)
    reads = count_reads(monkeypatch)
    train = open_dataset(str(file)).splits["train"]
    assert train.shard_window == 4
    assert sum(train.count_per_shard()) == len(train) == 180
    order = SampleOrder(
        seed=1, num_samples=len(train), shard_sizes=train.count_per_shard(), shard_window=train.shard_window
    )
    indices = order.get_sample_indices(np.arange(len(train))).tolist()
    assert sorted(indices) == list(range(180))
    contents = [train.read_image(index) for index in indices]
    assert all(count == 1 for count in reads.values())
    assert Counter(contents) == Counter(cells[int(train.rows[index])] for index in range(len(train)))
    assert indices != sorted(indices)


def test_a_cache_holds_no_more_than_its_bytes_and_repeats_an_error() -> None:
    cache = parquet_files.RowGroupCache(10)
    loads = []

    def load(key: str) -> Any:
        loads.append(key)
        return key

    for key in ("a", "b", "a", "c", "a", "b"):
        assert cache.get(key, 5, partial(load, key)) == key
    assert loads == ["a", "b", "c", "b"]  # c took the place of b, which was read less lately than a

    def fail() -> Any:
        raise DataError("gone")

    for _ in range(2):
        with pytest.raises(DataError, match="gone"):
            cache.get("d", 5, fail)
    assert cache.get("d", 5, lambda: "here") == "here"


def test_check_pack_and_digest_work_on_rows(tmp_path: Path) -> None:
    write_hub_files(tmp_path / "hub")
    dataset = open_dataset(str(tmp_path / "hub"))
    scan = scan_dataset(dataset)
    assert (scan.image_facts["status"] == DECODED).all()
    assert scan_dataset(dataset).cached_count == 22
    pack(dataset, tmp_path / "packed")
    packed = open_dataset(str(tmp_path / "packed"))
    for split in dataset.splits:
        assert read_contents(packed.splits[split]) == read_contents(dataset.splits[split])
    assert digest_dataset(dataset) == digest_dataset(open_dataset(str(tmp_path / "hub")))
    write_hub_files(tmp_path / "hub")
    assert digest_dataset(open_dataset(str(tmp_path / "hub"))).contents == digest_dataset(dataset).contents


def test_a_store_travels_without_what_it_has_read(tmp_path: Path) -> None:
    file = write_table(tmp_path / "test.parquet", {"image": make_cells(50), "label": [0, 1] * 25})
    split = open_dataset(str(file)).splits["test"]
    content = split.read_image(7)
    assert isinstance(split.store, ParquetStore)
    packet = pickle.dumps(split.store)
    assert len(packet) < 1000
    assert pickle.loads(packet).read(7) == content


def test_held_out_rows_stay_held_out_when_a_file_is_added(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", {"image": make_cells(40), "label": [0, 1] * 20})
    before = open_dataset(str(tmp_path))
    write_table(tmp_path / "b.parquet", {"image": make_cells(40, 40), "label": [0, 1] * 20})
    after = open_dataset(str(tmp_path))
    for name in ("val", "test"):
        held_out = {row[0] for row in read_all(before, name)}
        assert held_out
        assert held_out <= {row[0] for row in read_all(after, name)}
