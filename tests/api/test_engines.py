"""`vitrail.Scorer` in Ray Data, Spark and multiprocessing, and the Python of docs/large-collections.md.

A worker is killed in the middle, and no row is lost or changed.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vitrail
from tests.api.conftest import write_pictures
from tests.conftest import require_peer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "large-collections.md"
BAD = 7  # the row without a readable image


def read_blocks(imported: str, folder: Path) -> list[str]:
    """The page's Python of one engine, with its folders in another place, and without a GPU."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    chosen = [block for block in blocks if re.search(rf"\b{imported}\b", block)]
    changes = {
        '"/data/': f'"{folder}/',
        "/models/flowers": f"{folder}/model",
        "num_gpus=1,": "",
        "min_size=1, max_size=2": "size=1",
    }
    return [functools.reduce(lambda text, change: text.replace(*change), changes.items(), block) for block in chosen]


def write_rows(folder: Path) -> dict[str, list[Any]]:
    """60 images in five Parquet files, one of them no image."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write_pictures(folder / "pictures", each=10)
    files = sorted((folder / "pictures").rglob("*.png"))
    cells = [file.read_bytes() for file in files]
    cells[BAD] = b"no image"
    columns: dict[str, list[Any]] = {
        "bytes": cells,
        "path": [str(file) for file in files],
        "number": list(range(len(files))),
    }
    (folder / "images").mkdir()
    table = pyarrow.table(columns)
    for part in range(5):
        parquet.write_table(table.slice(12 * part, 12), folder / "images" / f"{part}.parquet", row_group_size=4)
    return columns


def check_rows(rows: list[dict[str, Any]], columns: dict[str, list[Any]], model: str, *, exact: bool) -> None:
    """Each image is there once, with what `vitrail.predict` says of its batch; `exact` to the bit."""
    assert sorted(row["path"] for row in rows) == sorted(columns["path"])
    contents = dict(zip(columns["path"], columns["bytes"], strict=True))
    batches: dict[Any, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["path"]):
        batches.setdefault(row.get("batch"), []).append(row)
    for batch in batches.values():
        expected = vitrail.predict(model, [contents[row["path"]] for row in batch], top=2)
        for row, prediction in zip(batch, expected, strict=True):
            is_bad = row["path"] == columns["path"][BAD]
            assert (row["error"] != "") == is_bad == bool(prediction.error)
            if is_bad:
                assert row["error"].startswith(row["path"])
                assert row["labels"] is None
                continue
            assert list(row["labels"]) == [label for label, _ in prediction.labels]
            values = [value for _, value in prediction.labels]
            np.testing.assert_allclose(row["probabilities"], values, rtol=0 if exact else 1e-5)


def run_ray(name: str, folder: Path) -> None:
    """Run one of tests/api/ray_runs.py."""
    require_peer("ray")
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.api.ray_runs", name, str(folder)]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.slow
def test_ray_loses_no_row_when_a_worker_is_killed(tmp_path: Path) -> None:
    """Decoded by one process, scored by two, of which one dies; the numbers are those of predict to the bit."""
    parquet = pytest.importorskip("pyarrow.parquet")
    columns, model = write_rows(tmp_path), str(tmp_path / "model.safetensors")
    run_ray("kill_a_worker", tmp_path)
    assert (tmp_path / "calls" / "marker").exists()
    assert len({path.name.split("-")[2] for path in (tmp_path / "calls").glob("batch-*")}) >= 2  # processes
    check_rows(parquet.read_table(tmp_path / "labels").to_pylist(), columns, model, exact=True)


@pytest.mark.slow
def test_the_ray_of_the_page_labels_and_embeds(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    columns, model = write_rows(tmp_path), str(tmp_path / "model.safetensors")
    blocks = read_blocks("ray", tmp_path)
    assert len(blocks) == 2
    (tmp_path / "page.py").write_text("\n".join(blocks), encoding="utf-8")
    run_ray("run_page", tmp_path)
    check_rows(parquet.read_table(tmp_path / "labels").to_pylist(), columns, model, exact=False)  # in whatever batches
    features = {row["path"]: row["features"] for row in parquet.read_table(tmp_path / "features").to_pylist()}
    good = [path for number, path in enumerate(columns["path"]) if number != BAD]
    np.testing.assert_allclose([features[path] for path in good], vitrail.embed(model, good), atol=1e-5)
    assert np.isnan(features[columns["path"][BAD]]).all()


@pytest.mark.slow
def test_the_spark_of_the_page_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_peer("pyspark")
    parquet = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("pandas", reason="pandas is not installed: mapInPandas needs it")
    if shutil.which("java") is None:
        pytest.skip("java is not installed, on which Spark runs")
    columns, model = write_rows(tmp_path), str(tmp_path / "model.safetensors")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    [block] = read_blocks("pyspark", tmp_path)
    options = '.master("local[2]").config("spark.ui.enabled", False).config("spark.driver.host", "127.0.0.1")'
    script = block.replace('.appName("labels")', f'.appName("labels"){options}')
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    check_rows(parquet.read_table(tmp_path / "labels").to_pylist(), columns, model, exact=False)


def test_the_multiprocessing_of_the_page_labels(tmp_path: Path) -> None:
    [block] = read_blocks("multiprocessing", tmp_path)
    model = str(tmp_path / "model.safetensors")
    script = block.replace("*.jpg", "*.png").replace("64", "10")
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    firsts = sorted(map(str, (tmp_path / "photos").rglob("*.png")))[::10]
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert [path for path, _, _ in lines] == firsts
    expected = vitrail.predict(model, firsts)
    for (_, label, probability), prediction in zip(lines, expected, strict=True):
        assert label == prediction.label
        assert float(probability) == pytest.approx(prediction.probability, abs=1e-5)
