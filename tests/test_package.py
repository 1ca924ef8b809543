"""The wheel and the source archive: what they hold, and that both work in a clean environment."""

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import vitrail
from tests.conftest import needs_index

ROOT = Path(__file__).parents[1]
PACKAGE_DATA = {  # what is no module: read at run time, or by type checkers
    "vitrail/py.typed",
    "vitrail/report/demo.html",
    "vitrail/report/forward_trace.html",
    "vitrail/report/style.css",
    "vitrail/report/suspects.css",
    "vitrail/report/suspects.html",
    "vitrail/report/suspects.js",
    "vitrail/report/template.html",
    "vitrail/serving/page/icon.svg",
    "vitrail/serving/page/index.html",
    "vitrail/serving/page/script.js",
    "vitrail/serving/page/style.css",
    "vitrail/serving/page/window.svg",
    "vitrail/weights/builtin.md",
    "vitrail/weights/builtin.safetensors",
    "vitrail/weights/imagenet1k.tsv",
}
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    return folder


def find_wheel(archives: Path) -> Path:
    [wheel] = archives.glob("*.whl")
    return wheel


def run(arguments: Sequence[str | Path], folder: Path) -> str:
    """What a command prints outside of the repository, if it ends well."""
    ended = subprocess.run(arguments, env=ENVIRONMENT, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def check_installed(bin_folder: Path, folder: Path) -> None:
    """The command, the class list and every public name of an installed package work."""
    assert run([bin_folder / "vitrail", "--help"], folder).startswith("usage: vitrail")
    assert "5,717,416" in run([bin_folder / "vitrail", "info", "ti16"], folder)
    code = "import vitrail, vitrail.weights.trained as l; print(vitrail.__file__, l.list_imagenet1k_labels()[0])"
    run([bin_folder / "python", "-c", "from vitrail import *; assert serve and finetune"], folder)
    path, _, label = run([bin_folder / "python", "-c", code], folder).strip().partition(" ")
    assert label == "tench, Tinca tinca"
    assert "builtin, inside the package" in run([bin_folder / "vitrail", "info", "builtin"], folder)
    assert Path(path).is_relative_to(bin_folder.parent)


def test_the_wheel_holds_every_module_and_file_of_the_package(archives: Path) -> None:
    with zipfile.ZipFile(find_wheel(archives)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = ROOT / "src"
    modules = {str(path.relative_to(sources)) for path in sources.rglob("*.py")}
    assert names == modules | PACKAGE_DATA


def test_the_source_archive_holds_what_tests_and_docs_need(archives: Path) -> None:
    [path] = archives.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {
        "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "Makefile",
        "Dockerfile", "Dockerfile.train", ".dockerignore", "constraints.txt", "docs/conf.py", "docs/_static/site.css",
        "docs/_templates/redirect.html", "tests/test_package.py", "bench/predict.py",
    }  # fmt: skip
    assert needed <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", ".git/", "build/"))]


def test_the_metadata_is_complete(archives: Path) -> None:
    with zipfile.ZipFile(find_wheel(archives)) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Version"] == vitrail.__version__
    assert metadata["Author"] == "The vitrail authors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Keywords"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert f"\nversion: {vitrail.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {vitrail.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_dev_has_what_every_extra_has() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    developer = set(extras["dev"])
    for name, requirements in extras.items():
        if name != "dev":
            assert set(requirements) <= developer, f"dev lacks a part of {name}"


def find_source_archive(archives: Path) -> Path:
    [archive] = archives.glob("*.tar.gz")
    return archive


def install(bin_folder: Path, *arguments: str | Path) -> None:
    run([bin_folder / "python", "-m", "pip", "install", "--quiet", *arguments], bin_folder)


@pytest.fixture
def clean_environment(tmp_path: Path) -> Iterator[Path]:
    """The bin folder of an environment that has pip alone; it is deleted, as torch may be in it by then."""
    venv.create(tmp_path / "clean", with_pip=True)
    yield tmp_path / "clean" / "bin"
    shutil.rmtree(tmp_path / "clean")


@pytest.mark.parametrize("find_archive", [find_wheel, find_source_archive])
def test_an_archive_works_with_borrowed_dependencies(
    find_archive: Callable[[Path], Path], archives: Path, clean_environment: Path, tmp_path: Path
) -> None:
    """Only vitrail is installed there; torch and the rest are borrowed from the environment of the tests."""
    [packages] = clean_environment.parent.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    install(clean_environment, *options, find_archive(archives))
    check_installed(clean_environment, tmp_path)


@pytest.mark.slow
@needs_index
def test_the_archives_work_with_what_they_ask_for(archives: Path, clean_environment: Path, tmp_path: Path) -> None:
    """From the package index, with nothing borrowed: a missing dependency shows here. One environment serves both."""
    install(clean_environment, "--constraint", ROOT / "constraints.txt", find_wheel(archives))
    check_installed(clean_environment, tmp_path)
    run([clean_environment / "python", "-m", "pip", "check"], tmp_path)
    run([clean_environment / "python", "-m", "pip", "uninstall", "--quiet", "--yes", "vitrail"], tmp_path)
    assert not (clean_environment / "vitrail").exists()
    install(clean_environment, "--constraint", ROOT / "constraints.txt", find_source_archive(archives))
    check_installed(clean_environment, tmp_path)
