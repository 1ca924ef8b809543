"""Triton's interpreter, which runs kernels on the CPU: it is chosen when triton is imported, so in another process."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: builds of torch for CUDA have it"
)
Errors = dict[str, dict[str, float]]


def run_interpreted(module: str) -> Errors:
    """What a module beside this one prints in the interpreter: the relative errors of every case."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"tests.model.kernels.{module}"]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)
