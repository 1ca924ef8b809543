"""What all tests share: one thread, the development data where it exists, and the peer libraries where they do."""

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch

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


def peer(name: str) -> ModuleType:
    """A library to compare with, or a skip that says how to get it."""
    return pytest.importorskip(name, reason=f"{name} is not installed: `make peers` installs it for comparison")


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
