"""Parquet files of rows: what other readers find in them, and that a kill at any byte leaves what is continued."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitrail.errors import DataError
from vitrail.inference.parquet_rows import GROUP_IMAGES, ParquetRows
from vitrail.inference.prediction_rows import PredictionRow, WrittenRows

pyarrow = pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
parquet = pytest.importorskip("pyarrow.parquet")
GROUP = 2050  # whole batches of 10


def make_store(path: Path, **changes: Any) -> ParquetRows:
    return ParquetRows(**{"path": path, "batch": 10, "metadata": '{"vitrail": "test"}'} | changes)


def make_rows(count: int, features: int = 0) -> list[PredictionRow]:
    values = np.random.default_rng(0).normal(size=(count, max(1, features))).astype(np.float32)
    rows = []
    for number, row in enumerate(values):
        name = f"photos/{number}.jpg"
        if number % 7 == 3:
            rows.append(PredictionRow(name, error="is not an image"))
        elif features:
            rows.append(PredictionRow(name, features=row))
        else:
            rows.append(PredictionRow(name, labels=[("rose", 0.75), (f"kind {number % 3}", float(row[0]))]))
    return rows


def write_rows(store: ParquetRows, rows: Sequence[PredictionRow], written: int = 0) -> None:
    with store.open_writer(WrittenRows(written)) as write:
        for start in range(written, len(rows), store.batch):
            write(rows[start : start + store.batch])


def count_stored(store: ParquetRows) -> int:
    return len(list(store.iterate_stored())) // store.unit * store.unit


def test_a_row_group_holds_whole_batches() -> None:
    units = [make_store(Path("x"), batch=batch).unit for batch in (1, 64, 256, 10, 3000)]
    assert units == [GROUP_IMAGES, GROUP_IMAGES, GROUP_IMAGES, GROUP, 3000]


@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
def test_features_are_lists_of_one_length_and_nulls_where_images_cannot_be_read(dtype: str, tmp_path: Path) -> None:
    store, rows = make_store(tmp_path / "rows.parquet", features=5, dtype=dtype), make_rows(4200, features=5)
    write_rows(store, rows)
    table = parquet.read_table(store.path)
    assert table.column_names == ["image", "error", "features"]
    assert table.schema.field("features").type == pyarrow.list_(pyarrow.from_numpy_dtype(np.dtype(dtype)), 5)
    assert json.loads(table.schema.metadata[b"vitrail"]) == {"vitrail": "test"}
    assert table.column("image").to_pylist() == [row.image for row in rows]
    assert table.column("error").to_pylist() == [row.error or None for row in rows]
    expected = [None if row.features is None else row.features.astype(dtype).tolist() for row in rows]
    assert table.column("features").to_pylist() == expected
    groups = parquet.read_metadata(store.path)
    assert [groups.row_group(number).num_rows for number in range(groups.num_row_groups)] == [GROUP, GROUP, 100]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.parquet"]


def test_labels_are_lists_the_likeliest_first(tmp_path: Path) -> None:
    rows = [*make_rows(4), PredictionRow("caf\udce9.jpg", labels=[("rose", 1.0)], attention="a.png")]
    store = make_store(tmp_path / "rows.parquet", attention=True)
    write_rows(store, rows)
    table = parquet.read_table(store.path).to_pydict()
    assert table["labels"] == [["rose", "kind 0"], ["rose", "kind 1"], ["rose", "kind 2"], None, ["rose"]]
    assert table["probabilities"][3:] == [None, [1.0]]
    assert table["probabilities"][0] == [0.75, np.float32(rows[0].labels[1][1])]
    assert table["error"] == [None, None, None, "is not an image", None]
    assert table["image"][4] == "caf\\udce9.jpg"  # Parquet's text is UTF-8
    assert table["attention"] == [None, None, None, None, "a.png"]


def test_killed_at_any_byte_it_is_continued_to_the_same_file(tmp_path: Path) -> None:
    """What a kill leaves: the file and the journal as they were, each perhaps with a part of what follows."""
    rows = make_rows(2 * GROUP + 500)
    whole = make_store(tmp_path / "whole.parquet")
    write_rows(whole, rows)
    expected = whole.path.read_bytes()
    store = make_store(tmp_path / "rows.parquet")
    with contextlib.suppress(KeyboardInterrupt), store.open_writer(WrittenRows()) as write:
        for start in range(0, 2 * GROUP + 300, 10):
            write(rows[start : start + 10])
        raise KeyboardInterrupt
    journal, content = store.journal_path.read_bytes(), store.path.read_bytes()
    assert expected.startswith(content)
    with pytest.raises(pyarrow.ArrowInvalid):  # no reader takes it for a whole one
        parquet.read_metadata(store.path)
    first_line = journal.index(b"\n") + 1
    for journal_bytes, file_bytes in [
        (len(journal), len(content)), (len(journal) - 1, len(content)), (first_line, len(content)),
        (first_line, len(content) - 9), (first_line // 2, len(content) // 3), (0, 4), (0, 0), (len(journal), 0),
    ]:  # fmt: skip
        store.journal_path.write_bytes(journal[:journal_bytes])
        store.path.write_bytes(content[:file_bytes])
        images = count_stored(store)
        assert images in (0, GROUP, 2 * GROUP)
        assert images >= (2 * GROUP if journal_bytes == len(journal) and file_bytes == len(content) else 0)
        write_rows(store, rows, images)
        assert store.path.read_bytes() == expected
        assert not store.journal_path.exists()
    store.journal_path.write_bytes(journal)  # killed between the footer and the end
    assert count_stored(store) == 2 * GROUP
    write_rows(store, rows, 2 * GROUP)
    assert store.path.read_bytes() == expected


def test_a_finished_file_stays_as_it_is_or_takes_more_images(tmp_path: Path) -> None:
    rows = make_rows(2 * GROUP + 30)
    store, whole = make_store(tmp_path / "rows.parquet"), make_store(tmp_path / "whole.parquet")
    write_rows(whole, rows)
    write_rows(store, rows[: GROUP + 20])
    before = store.path.read_bytes()
    with store.open_writer(WrittenRows(GROUP + 20)):
        pass
    assert store.path.read_bytes() == before
    write_rows(store, rows, GROUP)
    assert store.path.read_bytes() == whole.path.read_bytes()


def test_an_empty_file_is_a_whole_one(tmp_path: Path) -> None:
    store = make_store(tmp_path / "rows.parquet", features=3)
    write_rows(store, [])
    assert parquet.read_table(store.path).num_rows == 0
    assert list(store.iterate_stored()) == []


def test_a_file_without_footer_and_journal_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "rows.parquet")
    write_rows(store, make_rows(100))
    content = store.path.read_bytes()
    store.path.write_bytes(content[:-5])
    with pytest.raises(DataError, match=r"rows\.parquet is damaged: it has no footer"):
        list(store.iterate_stored())
    with pytest.raises(DataError, match="is damaged"), store.open_writer(WrittenRows()):
        pass
    assert store.path.read_bytes() == content[:-5]


def test_merged_parts_are_the_file_of_one_command(tmp_path: Path) -> None:
    rows = make_rows(3 * GROUP + 7, features=4)
    whole, merged = (make_store(tmp_path / f"{name}.parquet", features=4) for name in ("whole", "merged"))
    write_rows(whole, rows)
    parts = [make_store(tmp_path / f"part{number}.parquet", features=4) for number in range(4)]
    for part, (start, end) in zip(parts, [(0, 2500), (2500, 2500), (2500, 5000), (5000, len(rows))], strict=True):
        write_rows(part, rows[start:end])
    merged.write_merged(parts)
    assert merged.path.read_bytes() == whole.path.read_bytes()
