"""Partitions of features: the layout, and that a stopped command continues after the last complete one."""

from pathlib import Path

import numpy as np
import pytest

from vitrail.inference import partition_rows
from vitrail.inference.partition_rows import PartitionRows
from vitrail.inference.prediction_rows import PredictionRow, WrittenRows

parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `parquet` is not installed")


def make_rows(count: int) -> list[PredictionRow]:
    values = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
    return [
        PredictionRow(f"{number}.jpg", error="is not an image")
        if number == 2
        else PredictionRow(f"{number}.jpg", features=row)
        for number, row in enumerate(values)
    ]


def read_folder(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_partitions_have_a_matrix_and_a_table_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_rows, "PARTITION_IMAGES", 3)
    rows = make_rows(10)
    store = PartitionRows(folder=tmp_path / "features", features=3, batch=2, dtype="<f2")
    assert store.unit == 4
    with store.open_writer(WrittenRows()) as write:
        write(rows[:7])
        write(rows[7:])
    expected = read_folder(store.folder)
    assert sorted(expected) == [
        "img_emb/img_emb_00000.npy", "img_emb/img_emb_00001.npy", "img_emb/img_emb_00002.npy",
        "metadata/metadata_00000.parquet", "metadata/metadata_00001.parquet", "metadata/metadata_00002.parquet",
    ]  # fmt: skip
    tables = [parquet.read_table(path).to_pydict() for path in sorted((store.folder / "metadata").iterdir())]
    assert [name for table in tables for name in table["image_path"]] == [row.image for row in rows]
    assert tables[0]["error"] == [None, None, "is not an image", None]
    matrix = np.concatenate([np.load(path) for path in sorted((store.folder / "img_emb").iterdir())])
    assert (str(matrix.dtype), matrix.shape) == ("float16", (10, 3))
    values = [row.features for row in rows if row.features is not None]
    assert np.array_equal(np.delete(matrix, 2, axis=0), np.stack(values).astype(np.float16))
    assert np.isnan(matrix[2]).all()
    assert [image.failed for image in store.iterate_stored()] == [number == 2 for number in range(10)]
    (store.folder / "metadata/metadata_00001.parquet").unlink()  # killed between a matrix and its table
    assert len(list(store.iterate_stored())) == 4
    with store.open_writer(WrittenRows(4)) as write:
        write(rows[4:])
    assert read_folder(store.folder) == expected


def test_parts_are_numbered_anew(tmp_path: Path) -> None:
    rows = make_rows(5)
    parts = [PartitionRows(folder=tmp_path / name, features=3, batch=2) for name in "ab"]
    for part, own in zip(parts, (rows[:3], rows[3:]), strict=True):
        with part.open_writer(WrittenRows()) as write:
            write(own)
    merged = PartitionRows(folder=tmp_path / "merged", features=3, batch=2)
    merged.write_merged(parts)
    assert [image.image for image in merged.iterate_stored()] == [row.image for row in rows]
    assert len(np.load(merged.get_paths(1)[0])) == 2
