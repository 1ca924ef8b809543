"""A benchmark that runs on a GPU is tried on the CPU, with tiny models: it works, whoever is fast."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import model_factory
from vitrail import save

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_throughput_measures_training_and_inference(tmp_path: Path) -> None:
    command = ["bench/throughput.py", "--device", "cpu", "--contenders", "plain", "vitrail", "predict", "--rounds", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.run(
        [sys.executable, *command, "--json", str(tmp_path / "rows.json")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {(row["kind"], row["contender"]) for row in rows} == {
        ("train", "plain"), ("train", "vitrail"), ("train", "vitrail, all tokens"), ("infer", "plain"),
        ("infer", "vitrail"), ("infer", "vitrail, all tokens"), ("infer", "predict, float32"),
        ("infer", "predict, bfloat16"),
    }  # fmt: skip
    assert all(row["images_per_second"] > 0 and row["over_plain"] > 0 for row in rows)


@pytest.mark.slow
def test_lora_is_measured_beside_all_layers(tmp_path: Path) -> None:
    command = ["bench/lora.py", "--device", "cpu", "--rounds", "1", "--json", str(tmp_path / "rows.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    rows = {row.pop("contender"): row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert list(rows) == ["all layers", "LoRA, qkv", "LoRA, all", "DoRA, qkv"]
    assert all(row["images_per_second"] > 0 for row in rows.values())
    sizes = [rows[name]["checkpoint_mib"] for name in ("LoRA, qkv", "LoRA, all", "all layers")]
    assert sizes[0] < sizes[1] < sizes[2] / 4


@pytest.mark.slow
def test_rows_are_the_same_after_kills(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model.safetensors")
    options = ["--rows", "5000", "--kills", "1", "--image-size", "32", "--seconds", "0.2", "--work", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.run(
        [sys.executable, "bench/rows.py", str(tmp_path / "model.safetensors"), *options, "--json", tmp_path / "r.json"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["rows"], len(result["memory_by_tenth"])) == (5000, 9)
    assert result["kills"] <= 1
    assert min(result[f"{name}images_per_second"] for name in ("", "network_", "decoding_")) > 0
