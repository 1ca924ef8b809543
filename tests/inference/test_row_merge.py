"""Parts merged: the file of a single command, or a refusal that names the part."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import s3_server
from tests.inference.test_row_files import make_row
from vitrail.data.image_parts import Part, name_part
from vitrail.data.image_paths import ImageRef
from vitrail.errors import DataError, UsageError
from vitrail.inference.prediction_rows import PredictionItem
from vitrail.inference.row_files import FileFormat, RowFile
from vitrail.inference.row_merge import download_parts, find_parts, merge_parts

ITEMS = [PredictionItem(ImageRef(f"{letter}.jpg", f"{letter}.jpg")) for letter in "abcdefghij"]


def write_file(path: Path, row_format: FileFormat, items: list[PredictionItem], **command: Any) -> RowFile:
    columns = 3 if row_format in ("npy", "partitions") else 0
    options = {"--batch": 2, "--float16": False, "--attention": None, "--top": 2}
    settings = {"vitrail": "test", "model": "abc", "format": row_format} | options | command
    file = RowFile(path=path, row_format=row_format, command=settings, batch=2, ranks=2, features=columns)
    with file.open_writer(file.find_written(iter(items))[0]) as write:
        write([make_row(item, row_format) for item in items])
    return file


def write_parts(out: Path, row_format: FileFormat, **command: Any) -> list[Path]:
    paths = []
    for number, items in enumerate((ITEMS[:4], [], ITEMS[4:]), 1):
        part = Part(number, 3)
        path = Path(name_part(f"{out}/" if row_format == "partitions" else str(out), part))
        write_file(path, row_format, items, **{"--part": str(part), "listing": "digest"} | command)
        paths.append(path)
    return paths


def read_files(path: Path) -> dict[str, bytes]:
    files = [path, *path.rglob("*"), *path.parent.glob(f"{path.stem}.*")]
    return {each.name: each.read_bytes() for each in files if each.is_file()}


@pytest.mark.parametrize("row_format", ["csv", "jsonl", "npy", "parquet"])
def test_merged_parts_are_what_one_command_writes(row_format: FileFormat, tmp_path: Path) -> None:
    if row_format == "parquet":
        pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    (tmp_path / "whole").mkdir()
    whole = write_file(tmp_path / "whole" / f"rows.{row_format}", row_format, ITEMS)
    out = tmp_path / f"rows.{row_format}"
    parts = write_parts(out, row_format)
    assert find_parts(out) == parts
    assert merge_parts(out, list(reversed(parts))) == (3, 10, 1)
    assert read_files(out) == read_files(whole.path)
    with pytest.raises(UsageError, match="exists already"):
        merge_parts(out, parts)
    merge_parts(out, parts, overwrite=True)
    assert read_files(out) == read_files(whole.path)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_folders_of_partitions_are_merged(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    parts = write_parts(tmp_path / "features", "partitions")
    assert merge_parts(tmp_path / "features", parts) == (3, 10, 1)
    matrices = [np.load(path) for path in sorted((tmp_path / "features" / "img_emb").iterdir())]
    assert [len(matrix) for matrix in matrices] == [4, 0, 6]
    assert np.concatenate(matrices)[:, 0].tolist()[2:] == [ord(letter) for letter in "cdefghij"]


def test_what_is_missing_unfinished_or_different_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    with pytest.raises(UsageError, match=r"has no parts of rows\.csv, such as rows-00001-of-00128\.csv"):
        find_parts(out)
    parts = write_parts(out, "csv")
    with pytest.raises(UsageError, match=r"1 part of 3 missing: run --part 2/3"):
        merge_parts(out, [parts[0], parts[2]])
    with pytest.raises(UsageError, match=r"are both part 1/3"):
        merge_parts(out, [parts[0], *parts])
    for change, message in (
        ({"model": "other"}, "another model"), ({"listing": "other"}, "another list of images"),
        ({"--top": 1}, "another --top"),
    ):  # fmt: skip
        other = tmp_path / "other" / parts[1].name
        other.parent.mkdir(exist_ok=True)
        write_file(other, "csv", [], **{"--part": "2/3", "listing": "digest"} | change)
        with pytest.raises(UsageError, match=f"was made with {message} than .*00001-of"):
            merge_parts(out, [parts[0], other, parts[2]])
        for path in other.parent.iterdir():
            path.unlink()
    record_path = parts[2].with_name(f"{parts[2].name}.json")
    record = json.loads(record_path.read_text())
    record_path.write_text(json.dumps({key: value for key, value in record.items() if key != "finished"}))
    with pytest.raises(UsageError, match=r"rows-00003-of-00003\.csv is unfinished: repeat its command"):
        merge_parts(out, parts)
    record_path.write_text(json.dumps(record))
    lines = parts[2].read_bytes().splitlines(keepends=True)
    parts[2].write_bytes(b"".join(lines[:-2]))  # an image less
    with pytest.raises(DataError, match=r"00003-of-00003\.csv has 5 images, and its record says 6: it is damaged"):
        merge_parts(out, parts)
    (tmp_path / "rows-00001-of-00002.csv").touch()
    with pytest.raises(UsageError, match=r"parts of rows\.csv of several counts, \[2, 3\]"):
        find_parts(out)
    write_file(tmp_path / "alone.csv", "csv", ITEMS)
    with pytest.raises(UsageError, match=r"alone\.csv is no part"):
        merge_parts(out, [tmp_path / "alone.csv"])
    assert not out.exists()


@pytest.mark.parametrize("row_format", ["npy", "partitions"])
def test_parts_on_an_object_store_are_merged_there(
    row_format: FileFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part comes from a machine of its own, and another one merges them."""
    pytest.importorskip("s3fs", reason="the extra `remote` is not installed")
    if row_format == "partitions":
        pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    bucket, name = f"merge-{row_format}", "rows" if row_format == "partitions" else "rows.npy"  # a client has one store
    with s3_server.run_server() as store:
        for variable, value in store.environment().items():
            monkeypatch.setenv(variable, value)
        for path in write_parts(tmp_path / "machine" / name, row_format):
            RowFile(
                path=path, row_format=row_format, command={}, batch=2, ranks=2, features=3,
                url=f"s3://{bucket}/scores/{path.name}",
            ).upload()  # fmt: skip
        store.objects[f"{bucket}/scores/other.txt"] = b"of somebody else"
        folder = tmp_path / "merging"
        download_parts(f"s3://{bucket}/scores/{name}", folder)
        assert not (folder / "other.txt").exists()
        url = f"s3://{bucket}/scores/{name}"
        assert merge_parts(folder / name, find_parts(folder / name), url=url) == (3, 10, 1)
        uploaded = store.below(f"{bucket}/scores/")
        merged = folder / name
        for path in [merged] if merged.is_file() else [path for path in merged.rglob("*") if path.is_file()]:
            assert uploaded[path.relative_to(folder).as_posix()] == path.read_bytes()
        assert json.loads(uploaded[f"{name}.json"])["finished"]["images"] == 10
        with pytest.raises(UsageError, match="exists, and no"):
            merge_parts(tmp_path / "again" / name, find_parts(folder / name), url=url)
