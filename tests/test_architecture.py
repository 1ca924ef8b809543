"""The shape of the project itself: its public names, its layers, its size."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import vitrail

ROOT = Path(__file__).parents[1]


def test_the_public_names_are_these() -> None:
    names = ["Classifier", "PreprocessConfig", "Trained", "adapt", "attention_maps", "create", "load", "save"]
    assert vitrail.__all__ == names
    for name in names:
        assert getattr(vitrail, name).__name__ == name
    assert vitrail.Preprocess is vitrail.PreprocessConfig  # the name of version 0.1.0
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vitrail.nothing


def test_importing_the_package_imports_no_torch() -> None:
    script = "import sys, vitrail, vitrail.config, vitrail.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_the_layers_hold() -> None:
    """`make lint` prints the contract; this keeps it with whoever runs only the tests."""
    tool = Path(sys.executable).with_name("lint-imports")
    if not tool.exists():
        pytest.skip("import-linter is not installed beside this python: `make test` installs it")
    found = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_a_warning_raised_in_vitrail_is_an_error() -> None:
    with pytest.raises(UserWarning, match="planted"):
        warnings.warn_explicit("planted", UserWarning, "vit.py", 1, module="vitrail.model.vit")


def test_every_module_says_what_it_is() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        assert path.read_text(encoding="utf-8").startswith('"""'), path


def test_the_repository_stays_small() -> None:
    found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if found.returncode:
        pytest.skip("this is no git checkout")
    files = [ROOT / name for name in found.stdout.decode().split("\0") if name]
    assert sum(path.stat().st_size for path in files if path.is_file()) < 24 * 2**20
