"""Parquet files as PATHS: their images in order, under the names of their columns, in little memory."""

import contextlib
import os
import random
import threading
from pathlib import Path

import pytest

import vitrail
from tests import model_factory
from tests.cli.test_cli import Capture, run
from tests.data.image_files import encode_image, make_image, write_image_folder
from tests.data.parquet_tables import make_cells, write_hub_files, write_table
from vitrail.data import parquet_files
from vitrail.data.image_paths import ImageRef, iter_image_refs
from vitrail.data.sources import open_dataset
from vitrail.errors import VitrailError

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'vitrail[parquet]'")


def list_refs(*arguments: str | Path) -> list[ImageRef]:
    return list(iter_image_refs(map(str, arguments)))


def test_rows_come_in_order_with_their_bytes(tmp_path: Path) -> None:
    cells = make_cells(11)
    file = write_table(tmp_path / "x.parquet", {"image": cells, "other": list(range(11))}, rows=4)
    refs = list_refs(file)
    assert [ref.name for ref in refs] == [f"{file}#{row}" for row in range(11)]
    assert [ref.read() for ref in refs] == cells
    assert [ref.read() for ref in reversed(refs)] == cells[::-1]


def test_names_are_those_of_a_column_or_of_the_struct(tmp_path: Path) -> None:
    cells = make_cells(3)
    named = write_table(tmp_path / "a.parquet", {"image": cells, "file_name": ["a.jpg", None, "c.jpg"]})
    assert [ref.name for ref in list_refs(named)] == ["a.jpg", f"{named}#1", "c.jpg"]
    structs = [{"bytes": cell, "path": f"{row}.jpg"} for row, cell in enumerate(cells)]
    file = write_table(tmp_path / "b.parquet", {"image": structs, "id": ["x", "y", "z"]})
    assert [ref.name for ref in list_refs(file)] == ["0.jpg", "1.jpg", "2.jpg"]
    chosen = list_refs(f"{file}#name=id")
    assert [(ref.name, ref.read()) for ref in chosen] == list(zip("xyz", cells, strict=True))


def test_a_struct_without_bytes_names_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "0.jpg").write_bytes(encode_image(make_image(0)))
    structs = [{"bytes": None, "path": "0.jpg"}, {"bytes": encode_image(make_image(1)), "path": None}]
    [first, second] = list_refs(write_table(tmp_path / "x.parquet", {"image": structs}))
    assert (first.name, first.read()) == ("0.jpg", tmp_path / "0.jpg")
    assert second.read() == structs[1]["bytes"]


def test_a_column_of_paths_a_folder_and_a_glob(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "photos", each=2)
    paths = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "photos").rglob("*.jpg"))
    file = write_table(tmp_path / "list.parquet", {"path": [*paths, None]})
    refs = list_refs(file)
    assert [ref.name for ref in refs[:-1]] == [str(tmp_path / path) for path in paths]
    assert "has no path in path" in refs[-1].error
    images = write_hub_files(tmp_path / "hub")
    expected = [image for name in sorted(images) for image in images[name]]
    for argument in (tmp_path / "hub" / "data", tmp_path / "hub", f"{tmp_path}/hub/data/*.parquet"):
        assert [ref.read() for ref in list_refs(argument)] == expected


def test_a_folder_named_as_a_file_is_one_dataset_as_spark_writes_it(tmp_path: Path) -> None:
    for part in range(2):
        write_table(tmp_path / "rows.parquet" / f"part-{part}.parquet", {"image": make_cells(2, 10 * part)})
    assert [ref.read() for ref in list_refs(tmp_path / "rows.parquet")] == make_cells(2) + make_cells(2, 10)


def test_a_damaged_file_is_an_image_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    write_table(tmp_path / "b.parquet", {"image": make_cells(1)})
    damaged, good = list_refs(tmp_path / "*.parquet")
    assert "a.parquet cannot be read as Parquet" in damaged.error
    assert good.read() == make_cells(1)[0]


def test_damage_anywhere_is_an_error_of_vitrail(tmp_path: Path) -> None:
    """Bytes are changed at random, mostly in the footer: what pyarrow reports is named, and nothing else is raised."""
    columns = {"image": make_cells(8), "label": ["a", "b"] * 4}
    content = write_table(tmp_path / "test.parquet", columns, rows=4).read_bytes()
    rng, refused = random.Random(7), 0
    for number in range(40):
        damaged = bytearray(content)
        for _ in range(4):
            start = len(content) - 800 if rng.random() < 0.7 else 0
            damaged[rng.randrange(start, len(content))] = rng.randrange(256)
        file = tmp_path / f"{number}-test.parquet"
        file.write_bytes(damaged)
        try:
            split = open_dataset(str(file)).splits["test"]
            for index in range(len(split)):
                split.read_image(index)
        except VitrailError:
            refused += 1
        for ref in list_refs(file):
            with contextlib.suppress(VitrailError):
                ref.read()
    assert refused >= 20


def test_a_large_row_group_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """600 kB in one row group, and blocks of 50 kB: all rows are right in order, backwards and from several threads."""
    monkeypatch.setattr(parquet_files, "_BLOCK_BYTES", 50_000)
    cells = [os.urandom(3000) for _ in range(200)]
    file = write_table(tmp_path / "x.parquet", {"image": cells}, rows=200)
    sizes = []
    read = parquet_files._BlockReader.read

    def read_and_measure(self: parquet_files._BlockReader, block: parquet_files._RowBlock) -> object:
        found = read(self, block)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(parquet_files._BlockReader, "read", read_and_measure)
    refs = list_refs(file)
    assert [ref.read() for ref in refs] == cells
    assert max(sizes) <= 17  # rows of 3 kB
    assert sum(sizes) == 200  # each block once
    assert [ref.read() for ref in refs[150:100:-10]] == cells[150:100:-10]
    results: dict[int, list[object]] = {}
    threads = [
        threading.Thread(target=lambda n=number: results.update({n: [ref.read() for ref in refs[n::4]]}))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[number] == cells[number::4] for number in range(4))


def test_an_interrupted_prediction_of_rows_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The rows of a file that was cut off are completed to the same bytes, and only the missing images are read."""
    model = model_factory.build_trained(model_factory.build_vit(classes=2), labels=("rose", "tulip"))
    vitrail.save(model, tmp_path / "model.safetensors")
    file = write_table(tmp_path / "x.parquet", {"image": [*make_cells(10), b"no image"]}, rows=3)
    command = ["predict", str(tmp_path / "model.safetensors"), str(file), "--batch", "4", "--out"]
    assert run(*command, str(tmp_path / "whole.csv"), capsys=capsys)[0] == 3  # one image cannot be read
    assert run(*command, str(tmp_path / "part.csv"), capsys=capsys)[0] == 3
    whole = (tmp_path / "whole.csv").read_bytes()
    assert whole.count(b"x.parquet#") >= 11
    (tmp_path / "part.csv").write_bytes(b"".join(whole.splitlines(keepends=True)[:7]))
    rows = []
    read = parquet_files.read_row

    def read_and_note(path: str, column: str, row: int, name: str) -> Path | bytes:
        rows.append(row)
        return read(path, column, row, name)

    monkeypatch.setattr(parquet_files, "read_row", read_and_note)
    assert run(*command, str(tmp_path / "part.csv"), capsys=capsys)[0] == 3
    assert (tmp_path / "part.csv").read_bytes() == whole
    assert sorted(rows) == list(range(4, 11))
