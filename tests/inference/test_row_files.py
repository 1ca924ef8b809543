"""Files of rows: their lines, and what of an interrupted one is kept (whole commands: tests/cli/test_predict.py)."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.inference.test_bulk_prediction import make_row_file
from vitrail import presets
from vitrail.config import to_json
from vitrail.data.image_paths import ImageRef
from vitrail.errors import UsageError
from vitrail.inference.prediction_rows import PredictionItem, PredictionRow, WrittenRows
from vitrail.inference.row_files import FINISHED, FileFormat, RowFile, find_file_format, read_record

ITEMS = [PredictionItem(ImageRef(f"{letter}.jpg", f"{letter}.jpg")) for letter in "abcde"]


def make_row(item: PredictionItem, row_format: FileFormat) -> PredictionRow:
    name = item.image.name
    if name == "b.jpg":
        return PredictionRow(name, error="is not an image")
    if row_format in ("npy", "partitions"):
        return PredictionRow(name, features=np.full(3, ord(name[0]), dtype=np.float32))
    return PredictionRow(name, labels=[("rose", 0.75), ("=tulip", 0.25)])


def make_file(path: Path, row_format: FileFormat, **changes: Any) -> RowFile:
    settings = {"command": {"vitrail": "test"}, "batch": 2, "ranks": 2, "features": 3} | changes
    return RowFile(path=path, row_format=row_format, **settings)


@pytest.mark.parametrize("row_format", ["csv", "jsonl", "npy"])
def test_an_incomplete_batch_is_written_again(row_format: FileFormat, tmp_path: Path) -> None:
    file = make_file(tmp_path / f"rows.{row_format}", row_format)
    written, again = file.find_written(iter(ITEMS))
    assert (written, again) == (WrittenRows(), [])
    with file.open_writer(written) as write:
        write([make_row(item, row_format) for item in ITEMS])
    text_path = file.store.list_files()[0]
    whole = {path: path.read_bytes() for path in {file.path, text_path}}
    written, again = file.find_written(iter(ITEMS))
    assert (written.images, written.failed, again) == (4, 1, ITEMS[4:])
    text_path.write_bytes(whole[text_path][:-1])  # its last line is cut short
    written, again = file.find_written(iter(ITEMS))
    assert (written.images, again) == (4, [])
    with file.open_writer(written) as write:
        write([make_row(ITEMS[4], row_format)])
    assert {path: path.read_bytes() for path in whole} == whole
    if row_format == "npy":
        features = np.load(file.path)
        assert np.isnan(features[1]).all()
        assert features[[0, 2, 3, 4], 0].tolist() == [97, 99, 100, 101]


@pytest.mark.parametrize("row_format", ["csv", "jsonl", "npy", "parquet", "partitions"])
def test_a_record_says_when_all_rows_are_written(row_format: FileFormat, tmp_path: Path) -> None:
    if row_format in ("parquet", "partitions"):
        pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    columns = 3 if row_format in ("npy", "partitions") else 0
    file = make_file(tmp_path / "rows", row_format, features=columns)
    written, _ = file.find_written(iter(ITEMS))
    with contextlib.suppress(KeyboardInterrupt), file.open_writer(written) as write:
        write([make_row(item, row_format) for item in ITEMS[:2]])
        raise KeyboardInterrupt
    assert FINISHED not in (read_record(file.record_path) or {})
    written, again = file.find_written(iter(ITEMS))
    with file.open_writer(written) as write:
        write([make_row(item, row_format) for item in [*again, *ITEMS[written.images + len(again) :]]])
    counts = {"images": 5, "failed": 1, "ranks": 2, "features": columns}
    assert (read_record(file.record_path) or {})[FINISHED] == counts
    written, again = file.find_written(iter(ITEMS))
    assert (written.images + len(again), written.images >= 4) == (5, True)
    with contextlib.suppress(KeyboardInterrupt), file.open_writer(written) as write:
        write([make_row(item, row_format) for item in ITEMS[4:]])
        raise KeyboardInterrupt
    assert FINISHED not in (read_record(file.record_path) or {})


def test_the_format_is_that_of_the_suffix() -> None:
    names = ("a.csv", "a.NDJSON", "a.npy", "s3://b/a.parquet", "features/", "a.txt", "features")
    formats = ["csv", "jsonl", "npy", "parquet", "partitions", None, None]
    assert [find_file_format(name) for name in names] == formats


def test_rows_of_any_number_of_labels_are_continued(tmp_path: Path) -> None:
    """Cut anywhere, the file is the same in the end; an image ends where the next one begins, also of one name."""
    items = [*ITEMS, ITEMS[4]]
    labels = [[("rose", 0.9)], [], [("tulip", 0.8), ("rose", 0.7), ("iris", 0.6)], [("a\nb", 0.9)], [], [("rose", 0.7)]]
    rows = [PredictionRow(item.image.name, own) for item, own in zip(items, labels, strict=True)]
    file = make_file(tmp_path / "rows.csv", "csv", ranks=None)
    with file.open_writer(file.find_written(iter(items))[0]) as write:
        write(rows)
    whole = file.path.read_bytes()
    assert b"\r\nb.jpg,,,,\r\n" in whole
    for length in range(len(whole) + 1):
        file.path.write_bytes(whole[:length])
        left = iter(items)
        written, again = file.find_written(left)
        assert written.images % 2 == 0
        assert [*again, *left] == items[written.images :]
        with file.open_writer(written) as write:
            write(rows[written.images :])
        assert file.path.read_bytes() == whole, length


def test_other_images_and_other_commands_are_refused(tmp_path: Path) -> None:
    file = make_file(tmp_path / "rows.csv", "csv")
    with file.open_writer(file.find_written(iter(ITEMS))[0]) as write:
        write([make_row(item, "csv") for item in ITEMS])
    with pytest.raises(UsageError, match=r"image 2 of .*rows.csv is b.jpg, and now it is c.jpg"):
        file.find_written(iter([ITEMS[0], *ITEMS[2:]]))
    with pytest.raises(UsageError, match="there are fewer images"):
        file.find_written(iter(ITEMS[:3]))
    other = make_file(file.path, "csv", command={"vitrail": "test", "--top": 2})
    with pytest.raises(UsageError, match="was begun with --top None, not 2"):
        other.find_written(iter(ITEMS))
    file.record_path.unlink()
    with pytest.raises(UsageError, match=r"no rows.csv.json records its command"):
        file.find_written(iter(ITEMS))


def test_the_record_of_an_earlier_version_is_still_read(tmp_path: Path) -> None:
    """It had `several` for `multi_label`, and other names for the fields of a hybrid's stem."""
    config = to_json(presets.get_preset_config("r50-b16"))
    stem = {name.replace("standardization", "standardise"): value for name, value in config["stem"].items()}
    assert stem != config["stem"]
    new = make_row_file(tmp_path / "rows.csv", model={"multi_label": False, "config": config})
    old = make_row_file(tmp_path / "rows.csv", model={"several": False, "config": config | {"stem": stem}})
    assert old.find_written(iter(())) == (WrittenRows(), [])
    old.path.touch()
    assert new.find_written(iter(())) == (WrittenRows(), [])
    with pytest.raises(UsageError, match="was begun with another model"):
        make_row_file(tmp_path / "rows.csv", model={"multi_label": True}).find_written(iter(()))


def test_a_record_without_the_fields_that_a_config_gained_is_of_the_same_model(tmp_path: Path) -> None:
    config = to_json(presets.get_preset_config("b16"))
    earlier = {name: value for name, value in config.items() if name not in ("rotary", "gated_mlp", "projection")}
    old = make_row_file(tmp_path / "rows.csv", model={"config": earlier})
    assert old.find_written(iter(())) == (WrittenRows(), [])
    old.path.touch()
    assert make_row_file(tmp_path / "rows.csv", model={"config": config}).find_written(iter(())) == (WrittenRows(), [])
    other = config | {"gated_mlp": True}
    with pytest.raises(UsageError, match="was begun with another model"):
        make_row_file(tmp_path / "rows.csv", model={"config": other}).find_written(iter(()))


def test_a_record_of_features_without_their_kind_has_those_of_the_models_head(tmp_path: Path) -> None:
    model = {"config": to_json(presets.get_preset_config("b16"))}
    earlier = make_row_file(tmp_path / "rows.csv", model=model, **{"--embed": True})
    assert earlier.find_written(iter(())) == (WrittenRows(), [])
    earlier.path.touch()
    settings = {"--embed": True, "--normalize": False}
    own = make_row_file(tmp_path / "rows.csv", model=model, **settings, **{"--features": "class"})
    assert own.find_written(iter(())) == (WrittenRows(), [])
    with pytest.raises(UsageError, match="was begun with --features class, not mean"):
        make_row_file(tmp_path / "rows.csv", model=model, **settings, **{"--features": "mean"}).find_written(iter(()))
