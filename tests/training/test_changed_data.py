"""Data changed in place between a stop and its resume: refused, or at least no longer promised to be the same run."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.image_files import write_image_folder
from tests.faults.test_workers import end, start
from tests.training.test_resume import digest_weights
from tests.training.test_run_folder import SHORT, wait_for
from vitrail.cli import main

Attacked = Callable[[str, str], None]


def replace_picture(root: Path) -> None:
    """Another picture under the same name, of the same size in bytes and with the same times."""
    path = next((root / "train").rglob("*.bmp"))
    before, shape = path.stat(), np.asarray(Image.open(path)).shape
    Image.fromarray(np.full(shape, 7, dtype=np.uint8)).save(path)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def exchange_labels(root: Path) -> None:
    """Two classes under each other's names."""
    first, second = sorted((root / "train").iterdir())[:2]
    first.rename(root / "aside")
    second.rename(first)
    (root / "aside").rename(second)


def enlarge_picture(root: Path) -> None:
    with next((root / "train").rglob("*.bmp")).open("ab") as file:
        file.write(b"\0")


def photos_of(root: Path) -> Path:
    """Bitmaps, whose size in bytes tells nothing of what they show."""
    write_image_folder(root, "train", "val", each=12)
    for path in [path for path in root.rglob("*.*") if path.is_file()]:
        Image.open(path).convert("RGB").resize((20, 20)).save(path.with_suffix(".bmp"))
        path.unlink() if path.suffix != ".bmp" else None
    return root


@pytest.mark.attack
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replace_picture, "other contents of its images"),
        (exchange_labels, "other contents of its images"),
        (enlarge_picture, "other sizes of its image files"),
    ],
)
def test_a_run_is_not_resumed_with_other_images(
    tmp_path: Path,
    attacked: Attacked,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], None],
    words: str,
) -> None:
    photos, run = photos_of(tmp_path / "photos"), tmp_path / "run"
    command = [*SHORT, "--data", str(photos), "--batch", "8", "--save-every", "0", "--out", str(run)]
    long = ["1000" if part == "1" and command[at - 1] == "--epochs" else part for at, part in enumerate(command)]
    process = start(*long)
    wait_for(run / "checkpoints")
    process.terminate()
    assert "the checkpoint is saved" in end(process)
    kept = digest_weights(run) if (run / "weights").exists() else []
    change(photos)
    assert main([*long, "--resume"]) == 3
    assert f"{photos} is not the dataset that the run started with, {words}" in capsys.readouterr().err
    assert kept == (digest_weights(run) if (run / "weights").exists() else [])
    attacked(f"{change.__name__.replace('_', ' ')} between a stop and --resume", "refused by name, exit 3")
