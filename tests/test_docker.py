"""The Dockerfiles, as far as they can be checked without Docker: what they copy, install and run exists.

`make package` also runs their commands, in a folder with a clean environment instead of an image.
"""

import fnmatch
import importlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import vitrail
from tests.conftest import needs_index
from tests.data.image_files import write_image_folder
from vitrail import cli
from vitrail.api.serve import API_KEY_VARIABLE
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


ROOT_FOLDERS = re.compile(r"(?<![\w:./])/(?=(build|home|models|opt|work)\b)")
NEEDS_ROOT = ("apt-get", "chown", "mkdir", "rm", "useradd")  # what a RUN does to the system, beside what it installs
STARTING_SECONDS, PATIENCE_SECONDS = 0.2, 60


class Container(NamedTuple):
    """A folder in which the commands of a Dockerfile were run."""

    folder: Path
    environment: dict[str, str]
    instructions: dict[str, str]

    def run(self, *command: str) -> str:
        """What a command prints in it, if it ends well."""
        return run_in(self.folder, self.environment, *command)


def run_in(folder: Path, environment: dict[str, str], *command: str) -> str:
    """What a command prints, if it ends well."""
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, (command, ended.stdout, ended.stderr)
    return ended.stdout


def move_paths(text: str, root: Path) -> str:
    """A command whose absolute folders are below `root`."""
    return ROOT_FOLDERS.sub(f"{root}/", text)


def build_container(name: str, root: Path) -> Container:
    """Run the instructions of a Dockerfile below `root`; its base image is an environment with Python and pip alone."""
    venv.create(root / "base", with_pip=True)
    kept = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", API_KEY_VARIABLE)
    }
    environment = kept | {"PATH": f"{root}/base/bin:/usr/bin:/bin"}
    folder = root
    for word, rest in read_instructions(name):
        text = move_paths(rest, root)
        if word in ("ARG", "ENV"):
            key, _, value = text.partition("=")
            environment[key] = value.replace("$PATH", environment["PATH"])
        elif word == "WORKDIR":
            folder = Path(text)
            folder.mkdir(parents=True, exist_ok=True)
        elif word == "COPY" and not text.startswith("--from"):
            *sources, target = shlex.split(text)
            for source in sources:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, folder / target / (source if target == "./" else ""))
        elif word == "RUN":
            for command in text.split(" && "):
                if not command.startswith(NEEDS_ROOT):
                    run_in(folder, environment, "sh", "-c", command)
    return Container(folder, environment, {word: move_paths(rest, root) for word, rest in read_instructions(name)})


@pytest.fixture
def container_root(tmp_path: Path) -> Iterator[Path]:
    """A folder for the commands of a Dockerfile, with a model in it; it is deleted, since torch is in it by then."""
    root = tmp_path / "root"
    (root / "models").mkdir(parents=True)
    model = vitrail.create("ti16", image_size=32, num_classes=2, depth=1, width=32, heads=1, mlp=64)
    preprocess = vitrail.PreprocessConfig(size=(32, 32), resize=(36,))
    vitrail.save(vitrail.Trained(model, preprocess, ("rose", "tulip")), root / "models" / "model.safetensors")
    write_image_folder(root / "photos", "train", "val", "test", each=4)
    yield root
    shutil.rmtree(root)


def find_free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def wait_until_healthy(container: Container, check: list[str]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while subprocess.run(check, env=container.environment, capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, "the server did not become ready"
        time.sleep(STARTING_SECONDS)


@pytest.mark.slow
@needs_index
def test_the_commands_of_the_serving_image_install_and_serve(container_root: Path) -> None:
    """The health check succeeds, an image gets labels, SIGTERM ends it well. Only the port is another."""
    container = build_container("Dockerfile", container_root)
    port = find_free_port()
    words = [*json.loads(container.instructions["ENTRYPOINT"]), *json.loads(container.instructions["CMD"])]
    command = [port if word == container.instructions["EXPOSE"] else word for word in words]
    check = container.instructions["HEALTHCHECK"].partition(" CMD ")[2]
    assert f":{container.instructions['EXPOSE']}/" in check
    check = check.replace(f":{container.instructions['EXPOSE']}/", f":{port}/")
    assert subprocess.run(json.loads(check), env=container.environment, capture_output=True, check=False).returncode
    with subprocess.Popen(command, cwd=container.folder, env=container.environment) as server:
        try:
            wait_until_healthy(container, json.loads(check))
            image = next((container_root / "photos").rglob("*.jpg")).read_bytes()
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/predict", image)
            with urllib.request.urlopen(request) as response:
                assert {"rose", "tulip"} >= {item["label"] for item in json.load(response)["results"][0]["predictions"]}
        finally:
            server.terminate()
    assert server.returncode == 0


@pytest.mark.slow
@needs_index
def test_the_commands_of_the_training_image_install_and_train(container_root: Path) -> None:
    container = build_container("Dockerfile.train", container_root)
    entrypoint = json.loads(container.instructions["ENTRYPOINT"])
    assert container.run(*entrypoint, *json.loads(container.instructions["CMD"])).startswith("usage: vitrail")
    assert container.run(*entrypoint, "--version").split()[-1] == vitrail.__version__
    model = f"{container_root}/models/model.safetensors"
    options = ["--epochs", "1", "--batch", "4", "--device", "cpu", "--workers", "0", "--track", "tensorboard"]
    container.run(*entrypoint, "finetune", f"{container_root}/photos", "--model", model, "--out", "run", *options)
    assert (container.folder / "run" / "weights" / "best.safetensors").is_file()
    container.run("python", "-m", "pip", "check")
