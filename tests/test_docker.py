"""The Dockerfiles, as far as they can be checked without Docker: what they copy, install and run exists."""

import fnmatch
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from vitrail import cli
from vitrail.cli import parsing

ROOT = Path(__file__).parents[1]
DOCKERFILES = ("Dockerfile", "Dockerfile.train")
SECRET_NAMES = re.compile("key|token|password|secret|credential", re.IGNORECASE)


def read_instructions(name: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions and their arguments, in order."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1].strip()) for line in text.splitlines() if line.strip()]


def list_copied_files(name: str) -> list[str]:
    """What is copied from the repository."""
    copies = [shlex.split(rest) for word, rest in read_instructions(name) if word == "COPY"]
    return [source for words in copies if not words[0].startswith("--from") for source in words[:-1]]


def is_ignored(path: str) -> bool:
    """Whether .dockerignore keeps a file of the root out of the build; the last pattern that fits decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and fnmatch.fnmatch(path, pattern):
            ignored = not line.startswith("!")
    return ignored


@pytest.mark.parametrize("name", DOCKERFILES)
def test_copied_files_exist_and_are_part_of_the_build(name: str) -> None:
    sources = list_copied_files(name)
    assert "src" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not is_ignored(source), source
    for other in (".git", ".venv", "tests", "runs", "secrets.env"):
        assert is_ignored(other), other


@pytest.mark.parametrize("name", DOCKERFILES)
def test_installed_extras_exist_and_versions_are_constrained(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installs = [rest for word, rest in read_instructions(name) if word == "RUN" and "pip install" in rest]
    assert all("--constraint constraints.txt" in install and "--no-cache-dir" in install for install in installs)
    [requested] = [found for install in installs for found in re.findall(r"'\.\[([\w,]+)\]'", install)]
    assert set(requested.split(",")) <= extras.keys()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_user_has_no_rights_and_no_secret_is_named(name: str) -> None:
    instructions = read_instructions(name)
    users = [rest for word, rest in instructions if word == "USER"]
    assert users
    assert users[-1] not in ("root", "0")
    added = [rest for word, rest in instructions if word == "RUN" and f"useradd --uid {users[-1]}" in rest]
    assert added, "the user is made before it is used"
    named = " ".join(rest for word, rest in instructions if word in ("ARG", "ENV", "LABEL"))
    assert not SECRET_NAMES.search(named)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_command_parses(name: str) -> None:
    instructions = dict(read_instructions(name))
    assert json.loads(instructions["ENTRYPOINT"]) == ["vitrail"]
    verb, *rest = json.loads(instructions["CMD"])
    if verb == "--help":
        assert cli.main([verb]) == 0
        return
    module, _, group = cli.COMMANDS[verb].arguments.partition(".")
    arguments = parsing.parse_arguments(
        verb, getattr(importlib.import_module(f"vitrail.cli.arguments.{module}"), group), rest
    )
    assert arguments.host == "0.0.0.0"
    assert str(arguments.port) == instructions["EXPOSE"]
    assert f":{arguments.port}/readyz" in instructions["HEALTHCHECK"]


def test_the_copied_files_suffice_to_build_the_package(tmp_path: Path) -> None:
    for source in list_copied_files("Dockerfile"):
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, tmp_path / source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "."]
    subprocess.run(build, check=True, capture_output=True, cwd=tmp_path)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "vitrail/serving/page/index.html" in archive.namelist()
