"""An index holds the readable rows, scaled; it is written whole or not at all, and belongs to one model."""

import dataclasses
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests import model_factory
from tests.inference.feature_rows import make_features, make_record, write_matrix
from vitrail.errors import DataError, UsageError
from vitrail.inference import feature_files
from vitrail.inference.cosine_search import normalize_rows
from vitrail.inference.feature_files import list_feature_files
from vitrail.inference.feature_index import (
    FeatureIndex,
    IndexDtype,
    choose_feature_kind,
    is_model_of,
    open_index,
    write_index,
)

NAMES = ["a.jpg", "b.jpg", "ab.jpg", "grün.jpg", "\udcff.jpg", "b.jpg", "", "a.jp"]


def make_index(path: Path, names: list[str], features: np.ndarray, dtype: IndexDtype = "float16") -> FeatureIndex:
    source = write_matrix(path.with_suffix(".npy"), names, features)
    return write_index(list_feature_files([source]), path, version="test", dtype=dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("block", [1, 3, 4096])
def test_rows_are_scaled_and_names_found(
    tmp_path: Path, dtype: IndexDtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_files, "BLOCK_ROWS", block)
    features = make_features(0, len(NAMES))
    index = make_index(tmp_path / "index", NAMES, features, dtype)
    assert index.rows.dtype == dtype
    assert isinstance(index.rows, np.memmap)
    assert np.array_equal(index.rows, normalize_rows(features).astype(dtype))
    assert [index.get_name(row) for row in range(len(NAMES))] == NAMES
    assert [index.find_row(name) for name in NAMES] == [0, 1, 2, 3, 4, 1, None, 7]
    assert [index.find_row(name) for name in (".jpg", "a.jpgb", "c.jpg", "jpga")] == [None] * 4
    assert index.find_nearest(features[[2]], 1).rows.tolist() == [[2]]


def test_rows_without_features_are_left_out_and_counted(tmp_path: Path) -> None:
    features = make_features(0, 6)
    features[2], features[4] = np.nan, 0
    source = write_matrix(tmp_path / "f.npy", list("abcdef"), features, ["", "", "truncated", "", "", "gone"])
    index = write_index(list_feature_files([source]), tmp_path / "index", version="test")
    assert [index.get_name(row) for row in range(len(index.rows))] == ["a", "b", "d"]
    assert (index.record["images"], index.record["left_out"]) == (3, 3)
    assert "labels" not in index.record["model"]
    write_matrix(tmp_path / "f.npy", ["a"], features[2:3], ["truncated"])
    with pytest.raises(DataError, match="no image that could be read"):
        write_index(list_feature_files([source]), tmp_path / "other", version="test")
    assert not (tmp_path / "other").exists()


def test_an_index_is_whole_or_not_there(tmp_path: Path) -> None:
    sources = [write_matrix(tmp_path / f"{n}.npy", [str(n)], make_features(n, 1, 12 + n)) for n in (0, 1)]
    with pytest.raises(DataError, match="rows of 13 features, not 12"):
        write_index(list_feature_files(sources), tmp_path / "index", version="test")
    assert {path.suffix for path in tmp_path.iterdir()} == {".npy", ".csv", ".json"}
    index = write_index(list_feature_files(sources[:1]), tmp_path / "index", version="test")
    with pytest.raises(UsageError, match="exists already"):
        write_index(list_feature_files(sources[:1]), index.path, version="test")
    again = write_index(list_feature_files(sources[1:]), index.path, version="test", overwrite=True)
    assert again.rows.shape == (1, 13)
    (tmp_path / "photos").mkdir()
    with pytest.raises(UsageError, match="no index, so it is not overwritten"):
        write_index(list_feature_files(sources[:1]), tmp_path / "photos", version="test", overwrite=True)


def test_memory_does_not_grow_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's and NumPy's own allocations: eight times the rows take no more of them."""
    monkeypatch.setattr(feature_files, "BLOCK_ROWS", 256)
    peaks = []
    for count in (2_000, 16_000):
        source = write_matrix(tmp_path / f"{count}.npy", [f"{n}" for n in range(count)], make_features(0, count, 64))
        sources = list_feature_files([source])
        tracemalloc.start()
        write_index(sources, tmp_path / f"index-{count}", version="test")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist.*vitrail index FEATURES --out INDEX writes one"):
        open_index(tmp_path / "index")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="is no index"):
        open_index(tmp_path / "folder")
    index = make_index(tmp_path / "index", NAMES, make_features(0, len(NAMES)))
    names = (index.path / "names.bin").read_bytes()
    (index.path / "names.bin").write_bytes(names[:-1])
    with pytest.raises(DataError, match="damaged"):
        open_index(index.path)
    (index.path / "names.bin").write_bytes(names)
    assert open_index(index.path).find_row("grün.jpg") == 3
    rows = (index.path / "features.npy").read_bytes()
    (index.path / "features.npy").write_bytes(rows[:-10])
    with pytest.raises(DataError, match="is no index"):
        open_index(index.path)


def test_an_index_belongs_to_one_model_its_preprocessing_and_its_features() -> None:
    trained = model_factory.build_trained(model_factory.build_vit())
    record = json.loads(json.dumps(make_record(trained))) | {"features": "class"}
    assert is_model_of(record, trained)
    assert not is_model_of(record, model_factory.build_trained(model_factory.build_vit(1)))
    assert trained.preprocess is not None
    preprocess = dataclasses.replace(trained.preprocess, mean=(0.5, 0.5, 0.5))
    assert not is_model_of(record, dataclasses.replace(trained, preprocess=preprocess))
    assert not is_model_of(record, model_factory.build_trained(model_factory.build_vit(gelu="erf")))
    assert choose_feature_kind(record, trained) == "default"
    assert choose_feature_kind(record | {"features": "mean"}, trained) == "mean"
    with pytest.raises(DataError, match="map features, which its model does not have"):
        choose_feature_kind(record | {"features": "map"}, trained)
