"""The wheel, installed into a clean environment from the package index, works."""

import os
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment(tmp_path: Path) -> None:
    if f"torch=={version('torch').split('+')[0]}" not in (ROOT / "constraints.txt").read_text():
        pytest.skip("this environment was not made by `make`, so the package index may be out of reach")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    venv.create(tmp_path / "clean", with_pip=True)
    python = tmp_path / "clean" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel]
    subprocess.run(install, check=True, env=environment, capture_output=True)
    command = tmp_path / "clean" / "bin" / "vitrail"
    found = subprocess.run([command, "info", "b16"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "86,567,656" in found.stdout
    names = "from vitrail.weights.labels import list_imagenet1k_labels; print(list_imagenet1k_labels()[0])"
    found = subprocess.run([python, "-c", names], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout == "tench, Tinca tinca\n", found.stderr
