"""A folder with a small model, a folder of PNG pictures in two classes, and one short run of the digits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vitrail
from tests import model_factory
from tests.data.image_files import make_image
from vitrail.weights.load import save
from vitrail.weights.trained import Trained

FAST: dict[str, Any] = {"workers": 0, "device": "cpu"}
SHORT: dict[str, Any] = {"epochs": 2, "batch": 4, **FAST}
HERE = ("--workers", "0", "--device", "cpu")
SHORT_HERE = ("--epochs", "2", "--batch", "4", *HERE)


def make_trained(**changes: Any) -> Trained:
    """A small model of the two classes of `write_pictures`."""
    return model_factory.build_trained(model_factory.build_vit(classes=2), **({"labels": ("rose", "tulip")} | changes))


def write_pictures(root: Path, classes: tuple[str, ...] = ("rose", "tulip"), each: int = 5) -> Path:
    """`root`/SPLIT/CLASS/0.png ..., whose pixels a decoder returns as they are."""
    seed = 0
    for split in ("train", "val", "test"):
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for number in range(each):
                make_image(seed, (32, 32)).save(root / split / name / f"{number}.png")
                seed += 1
    return root


@pytest.fixture(scope="session", autouse=True)
def _session_homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The runs that all tests share keep out of the user's own folders too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of a few steps."""
    return vitrail.train("digits", "digits", epochs=0.2, out=tmp_path_factory.mktemp("runs") / "digits", **FAST).folder


@pytest.fixture(scope="session")
def tuned_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fine-tuned run, on a dataset whose name HTML must escape."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_pictures(folder / "fl<b>wers")
    return vitrail.finetune(data, make_trained(), out=folder / "tuned", **SHORT).folder


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test in a folder of its own, with model.safetensors and photos/."""
    monkeypatch.chdir(tmp_path)
    save(make_trained(), tmp_path / "model.safetensors")
    write_pictures(tmp_path / "photos")
