"""The package's core where nothing of Unix is there and processes are spawned; the names of the files it writes.

This is no run on Windows: `sitecustomize.py` says what it imitates.
"""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.conftest import write_pictures
from vitrail.files import compute_sha256
from vitrail.locks import hold_lock

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
UNIX_MODULES = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "posix", "syslog", "crypt"}
RESERVED = {"con", "prn", "aux", "nul", *(f"{name}{number}" for name in ("com", "lpt") for number in range(10))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `tour.py` was run, while this process held a lock."""
    pytest.importorskip("fastapi", reason="serving needs fastapi: pip install 'vitrail[serve]'")
    folder, lock = tmp_path_factory.mktemp("tour"), tmp_path_factory.mktemp("lock") / "lock"
    write_pictures(folder / "photos", each=12)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, SOURCE))),
        "OMP_NUM_THREADS": "1",
        "XDG_DATA_HOME": str(folder / "data"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    with hold_lock(lock, "the folder of the test"):
        completed = subprocess.run(
            [sys.executable, HERE / "tour.py", lock],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    return folder


def test_a_run_by_spawned_workers_stops_and_resumes_to_the_same_bits_without_unix(folder: Path) -> None:
    for name in ("weights/last.safetensors", "weights/best.safetensors"):
        assert compute_sha256(folder / "whole" / name) == compute_sha256(folder / "stopped" / name)
    assert '"event": "checkpoint", "step": 3,' in (folder / "stopped" / "events.jsonl").read_text()
    assert len((folder / "predictions.csv").read_text().splitlines()) == 25


def test_written_names_are_valid_on_windows_and_differ_in_more_than_case(folder: Path) -> None:
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    assert len(paths) > 80
    assert not [path for path, count in Counter(path.casefold() for path in paths).items() if count > 1]
    assert not [path for path in paths if any(not is_valid_on_windows(part) for part in path.split("/"))]
    assert max(map(len, paths)) < 160, "of 260 that Windows allows by default, with the folder's own path"


@pytest.mark.parametrize("name", ["a:b", "a?", "nul", "NUL.txt", "end.", "end ", "a\\b", "a\nb", "com1.json", "<a>"])
def test_the_check_of_names_finds_what_windows_refuses(name: str) -> None:
    assert not is_valid_on_windows(name)


def is_valid_on_windows(name: str) -> bool:
    """As Microsoft's naming rules for files have it."""
    stem = name.partition(".")[0].rstrip().casefold()
    return not re.search(r'[<>:"/\\|?*\x00-\x1f]|[. ]$', name) and stem not in RESERVED


def test_no_module_imports_what_only_unix_has_while_it_is_imported() -> None:
    """But in a `try` that handles its absence."""
    found = [
        f"{path.relative_to(SOURCE)}: {name}"
        for path in SOURCE.rglob("*.py")
        for name in list_import_time_modules(ast.parse(path.read_text()))
        if name in UNIX_MODULES or name == "multiprocessing.forkserver"
    ]
    assert found == []
    assert list(list_import_time_modules(ast.parse("import fcntl\ndef f():\n import pwd\n"))) == ["fcntl"]


def list_import_time_modules(tree: ast.AST) -> Iterator[str]:
    """What a module imports outside of functions and of `try ... except ImportError`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Try) and any("ImportError" in ast.dump(handler) for handler in node.handlers):
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from list_import_time_modules(node)
