"""Features are read as they were written, from matrices and from Parquet, in blocks of any size."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.inference.feature_rows import make_features, write_matrix, write_parquet
from vitrail.errors import DataError, UsageError
from vitrail.inference import feature_files
from vitrail.inference.feature_files import list_feature_files

NAMES = [f"photos/{number}.jpg" for number in range(18)] + ["=1+1.jpg", 'grün, "quoted"\nand in two lines.png']
ERRORS = ["" if number % 6 else "truncated" for number in range(20)]


@pytest.mark.parametrize("block", [1, 3, 20, 4096])
@pytest.mark.parametrize(("write", "name"), [(write_matrix, "f.npy"), (write_parquet, "f.parquet")])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_come_back_in_their_order(
    write: Callable[..., Path], name: str, block: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if write is write_parquet:
        pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[parquet]'")
    monkeypatch.setattr(feature_files, "BLOCK_ROWS", block)
    features = make_features(0, 20).astype(dtype)
    [file] = list_feature_files([write(tmp_path / name, NAMES, features, ERRORS)])
    assert (file.num_rows, file.width, file.record["--features"]) == (20, 12, "class")
    blocks = list(file.iterate_blocks())
    assert max(len(each.names) for each in blocks) <= block
    assert [image for each in blocks for image in each.names] == NAMES
    readable = np.concatenate([each.readable for each in blocks])
    assert readable.tolist() == [not error for error in ERRORS]
    assert np.array_equal(np.concatenate([each.features for each in blocks])[readable], features[readable])


def test_a_folder_is_its_parts_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        write_matrix(tmp_path / f"part-{number}.npy", [f"{number}.jpg"], make_features(number, 1))
    names = [name for file in list_feature_files([tmp_path]) for block in file.iterate_blocks() for name in block.names]
    assert names == ["0.jpg", "1.jpg", "2.jpg"]


def test_parts_of_two_models_or_two_kinds_of_features_are_refused(tmp_path: Path) -> None:
    first = write_matrix(tmp_path / "a.npy", ["a"], make_features(0, 1))
    mean = write_matrix(tmp_path / "b.npy", ["b"], make_features(1, 1), **{"--features": "mean"})
    other = write_matrix(tmp_path / "c.npy", ["c"], make_features(1, 1))
    record = json.loads(other.with_name("c.npy.json").read_text())
    other.with_name("c.npy.json").write_text(json.dumps(record | {"model": record["model"] | {"weights": "1234"}}))
    with pytest.raises(DataError, match=r"b\.npy has the features of mean features, not those of .*a\.npy"):
        list_feature_files([first, mean])
    with pytest.raises(DataError, match="another model"):
        list_feature_files([first, other])


def test_a_file_without_its_record_its_names_or_its_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        list_feature_files([tmp_path / "none.npy"])
    with pytest.raises(UsageError, match="name the files of features"):
        list_feature_files([])
    with pytest.raises(DataError, match=r"has no \.npy or \.parquet file"):
        list_feature_files([tmp_path])
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(UsageError, match="no file of features"):
        list_feature_files([tmp_path / "x.txt"])
    path = write_matrix(tmp_path / "f.npy", ["a", "b"], make_features(0, 2))
    for names, rows in ((["a"], 2), (["a", "b"], 1)):
        write_matrix(path, names, make_features(0, len(names)))
        np.save(path, make_features(0, rows))
        with pytest.raises(DataError, match=r"has \d rows and f\.csv names \d: repeat the command"):
            list(list_feature_files([path])[0].iterate_blocks())
    path.with_suffix(".csv").write_text("image\na\n")
    with pytest.raises(DataError, match="a line without its image and error"):
        list(list_feature_files([path])[0].iterate_blocks())
    path.with_suffix(".csv").unlink()
    with pytest.raises(DataError, match=r"f\.csv is missing"):
        list(list_feature_files([path])[0].iterate_blocks())
    path.with_name("f.npy.json").write_text("{}")
    with pytest.raises(DataError, match="does not state the model"):
        list_feature_files([path])
    path.with_name("f.npy.json").unlink()
    with pytest.raises(DataError, match=r"cannot be read with its f\.npy\.json"):
        list_feature_files([path])


def test_a_parquet_file_of_something_else_is_refused(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[parquet]'")
    from pyarrow import parquet

    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="no Parquet file that can be read"):
        list_feature_files([tmp_path / "damaged.parquet"])
    parquet.write_table(pa.table({"image": ["a"]}), tmp_path / "labels.parquet")
    with pytest.raises(DataError, match="has no columns image, error and features"):
        list_feature_files([tmp_path / "labels.parquet"])
    parquet.write_table(
        parquet.read_table(write_parquet(tmp_path / "f.parquet", ["a"], make_features(0, 1))).replace_schema_metadata(
            {}
        ),
        tmp_path / "bare.parquet",
    )
    with pytest.raises(DataError, match="does not state the model"):
        list_feature_files([tmp_path / "bare.parquet"])
