"""Files of features as `vitrail predict --embed` writes them, from made-up numbers."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests import model_factory
from vitrail.config import to_json
from vitrail.formatting import quote_cell
from vitrail.weights.tensor_files import digest_tensors
from vitrail.weights.trained import Trained


def make_record(trained: Trained | None = None, **changes: Any) -> dict[str, Any]:
    """The record of a command that embedded images with a model, by default a small one."""
    trained = trained or model_factory.build_trained(model_factory.build_vit())
    assert trained.preprocess is not None
    model = {
        "weights": digest_tensors(trained.model.state_dict()),
        "config": to_json(trained.model.config),
        "preprocess": to_json(trained.preprocess),
        "labels": trained.labels,
    }
    record = {"vitrail": "test", "model_name": None, "model": model, "--features": "class", "--precision": "float32"}
    return record | changes


def make_features(seed: int, count: int, width: int = 12) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def write_matrix(
    path: Path,
    names: Sequence[str],
    features: NDArray[Any],
    errors: Sequence[str] = (),
    trained: Trained | None = None,
    **changes: Any,
) -> Path:
    np.save(path, features)
    with path.with_suffix(".csv").open("w", newline="", encoding="utf-8", errors="surrogateescape") as text:
        rows = csv.writer(text)
        rows.writerow(["image", "error"])
        rows.writerows(zip(map(quote_cell, names), errors or [""] * len(names), strict=True))
    path.with_name(f"{path.name}.json").write_text(json.dumps(make_record(trained, **changes)))
    return path


def write_parquet(
    path: Path, names: Sequence[str], features: NDArray[Any], errors: Sequence[str] = (), **changes: Any
) -> Path:
    """The shared columns; images with an error have no features."""
    import pyarrow as pa
    from pyarrow import parquet

    errors = errors or [""] * len(names)
    rows = [None if error else row for row, error in zip(features, errors, strict=True)]
    kind = pa.list_(pa.float16() if features.dtype == np.float16 else pa.float32(), features.shape[1])
    columns = {
        "image": pa.array(list(names), pa.string()),
        "error": pa.array([error or None for error in errors], pa.string()),
        "features": pa.array(rows, kind),
    }
    table = pa.table(columns).replace_schema_metadata({"vitrail": json.dumps(make_record(**changes))})
    parquet.write_table(table, path, row_group_size=7)
    return path
