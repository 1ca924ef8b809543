"""What all tests share: one thread, the development data where it exists, the peer libraries where they do, and the
table of `make soak`.

Tests see no GPU: many compare bits with what the CPU computes, or fork. `make cuda` shows it to those that are for one.

A test that measures a promise under faults (docs/reliability.md) asks for the fixture `soaked` and ends with

    soaked(row, promise, asked, reached)   # soaked(1, "a killed run resumes to the same weights", "100 kills", "100")

`make soak` runs every test that asks for it, those of the suite too, and prints a table of their rows at the end. What
takes too long for the suite is marked `soak` besides.

A test that attacks (docs/reliability.md) is marked `attack`, asks for the fixture `attacked` and ends with

    attacked(attack, outcome)   # attacked("a tar header with a negative size", "refused in 0.1 s, exit 3")

`make attack` runs all of them, those that are marked `soak` too, and prints the table of their outcomes.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

if "VITRAIL_TEST_CUDA" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks, and for all that tests start

import torch

import vitrail.export  # noqa: F401  before a test imports OpenVINO, so that it reports to nobody

# Tests fork, which autograd allows while it has no thread. A torch built for CUDA that sees no GPU takes a fake one for
# real once something was exported or compiled, and would begin a thread at its first backward pass: here is the first.
torch.ones((), requires_grad=True).backward()


def forget_helpers() -> None:
    """Let a forked test process start helpers of its own: multiprocessing waits for those of its parent in vain."""
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    server: Any = forkserver._forkserver
    server._forkserver_fd = server._forkserver_alive_fd = server._forkserver_pid = server._forkserver_address = None


os.register_at_fork(after_in_child=forget_helpers)
torch.set_num_threads(1)  # tiny models on a busy machine: one thread is 30 times faster than two

DATA = Path(os.environ.get("VITRAIL_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


def _allow_torchvision() -> None:
    """Let torchvision import beside a build of torch that its compiled operators do not fit.

    Its ViT needs none of them, but registers shapes for two operators at import, which must be declared.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        globals()["_declared"] = library  # the declarations live as long as the library object
        importlib.import_module("torchvision")


_allow_torchvision()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let `pytest -m soak` run the suite's own measurements of promises too; the expression is applied after this."""
    if config.option.markexpr == "soak":
        for item in items:
            if "soaked" in getattr(item, "fixturenames", ()):
                item.add_marker("soak")


@pytest.fixture
def soaked(request: pytest.FixtureRequest) -> Callable[[int, str, str, str], None]:
    """Put down a row for the table of `make soak`: number of the promise, its words, figure asked, figure reached."""

    def put_down(row: int, promise: str, asked: str, reached: str) -> None:
        request.node.user_properties.append(("soaked", (row, promise, asked, reached)))

    return put_down


@pytest.fixture
def attacked(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Add a row to the table of `make attack`: the attack, and its outcome."""

    def add_row(attack: str, outcome: str) -> None:
        request.node.user_properties.append(("attacked", (attack, outcome)))

    return add_row


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the rows that tests put down, where the soak or the attacks were asked for."""
    if config.option.markexpr == "soak":
        rows = sorted((str(row).rjust(2), *rest) for row, *rest in _rows(terminalreporter, "soaked"))
        _print_table(terminalreporter, "promises under faults", ("#", "promise", "asked", "reached", "seconds"), rows)
    if config.option.markexpr == "attack":
        _print_table(
            terminalreporter, "attacks", ("attack", "outcome", "seconds"), list(_rows(terminalreporter, "attacked"))
        )


def _rows(terminalreporter: pytest.TerminalReporter, kind: str) -> Iterator[tuple[str, ...]]:
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, values in report.user_properties:
                if report.when == "call" and name == kind:
                    *cells, last = map(str, values)
                    yield (*cells, last + ("" if report.passed else "  FAILED"), f"{report.duration:.0f}")


def _print_table(
    terminalreporter: pytest.TerminalReporter, title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]
) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    terminalreporter.section(title)
    for cells in (head, *rows):
        terminalreporter.line("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


needs_index = pytest.mark.skipif(
    "VITRAIL_TEST_INSTALL" not in os.environ,
    reason="it installs torch and more from the package index: `make package` does, with VITRAIL_TEST_INSTALL=1",
)


def peer(name: str) -> ModuleType:
    """A library to compare with, or a skip that says how to get it."""
    return pytest.importorskip(name, reason=f"{name} is not installed: `make peers` installs it for comparison")


def require_peer(name: str) -> None:
    """Skip without a library that child processes import: in this one it would leave threads, and tests fork."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: `make peers` installs it for comparison")


@pytest.fixture(autouse=True)
def _own_homes(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from or written to the user's own caches."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))


@pytest.fixture(scope="session")
def data() -> Path:
    """The development data."""
    if not DATA.is_dir():
        pytest.skip(f"the development data is not at {DATA}: set VITRAIL_TEST_DATA")
    return DATA


@pytest.fixture(scope="session")
def deit_tiny(data: Path) -> Path:
    """A real ImageNet-trained ViT in timm's folder layout."""
    return data / "deit_tiny_patch16_224.in1k"
