"""Data changed in place between a stop and its resume: refused, or at least no longer promised to be the same run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.pictures import folder
from tests.faults.test_workers import end, start
from tests.train.test_resume import sums
from tests.train.test_run_folder import SHORT, wait_for
from vitrail.cli import main
from vitrail.data import dataset_digest
from vitrail.data.dataset_digest import ChangedDataError, DataDigest, check_unchanged, digest_dataset
from vitrail.data.pack import pack
from vitrail.data.sources import open_dataset

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
    folder(root, "train", "val", each=12)
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
    kept = sums(run) if (run / "weights").exists() else []
    change(photos)
    assert main([*long, "--resume"]) == 3
    assert f"{photos} is not the dataset that the run was begun with, {words}" in capsys.readouterr().err
    assert kept == (sums(run) if (run / "weights").exists() else [])
    attacked(f"{change.__name__.replace('_', ' ')} between a stop and --resume", "refused by name, exit 3")


def test_a_copy_of_the_data_with_other_times_is_the_same_data(tmp_path: Path) -> None:
    """As when it is brought to another machine's disk."""
    photos = photos_of(tmp_path / "photos")
    before = digest_dataset(open_dataset(str(photos)))
    for path in photos.rglob("*.bmp"):
        os.utime(path, (1, 1))
    now = digest_dataset(open_dataset(str(photos)))
    assert before.times != now.times
    assert before._replace(times="") == now._replace(times="")
    assert check_unchanged(before, now, "photos") == ""


def test_what_is_too_large_to_be_read_is_told_by_its_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_digest, "MAX_CONTENT_BYTES", 0)
    photos = photos_of(tmp_path / "photos")
    before = digest_dataset(open_dataset(str(photos)))
    assert before.contents == ""
    assert digest_dataset(open_dataset(str(photos)), "known").contents == "known"
    replace_picture(photos)
    assert digest_dataset(open_dataset(str(photos))) == before, "nothing tells it but its contents"
    os.utime(next(photos.rglob("*.bmp")), (1, 1))
    assert "time of change" in check_unchanged(before, digest_dataset(open_dataset(str(photos))), "photos")


@pytest.mark.parametrize("limit", [10**6, 8])
def test_a_packed_set_is_known_by_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(dataset_digest, "MAX_STAMPED_IMAGES", limit)
    photos = photos_of(tmp_path / "photos")
    pack(open_dataset(str(photos)), tmp_path / "shards")
    before = digest_dataset(open_dataset(str(tmp_path / "shards")))
    shutil.copytree(tmp_path / "shards", tmp_path / "copy")
    assert digest_dataset(open_dataset(str(tmp_path / "copy")))._replace(times="") == before._replace(times="")
    shard = next((tmp_path / "shards").glob("*.tar"))
    os.utime(shard, (1, 1))
    assert digest_dataset(open_dataset(str(tmp_path / "shards"))).times != before.times


def test_digits_are_known_by_their_pixels() -> None:
    dataset = open_dataset("digits")
    assert digest_dataset(dataset) == digest_dataset(open_dataset("digits"))
    store: Any = dataset.splits["train"].store
    store.pixels[0] += 1
    assert digest_dataset(dataset).contents != digest_dataset(open_dataset("digits")).contents


def test_a_change_is_named_by_what_tells_it() -> None:
    before = DataDigest("a", "b", "c", "d")
    assert check_unchanged(before, before, "x") == ""
    for field in ("listing", "sizes", "contents"):
        with pytest.raises(ChangedDataError, match="x is not the dataset"):
            check_unchanged(before, before._replace(**{field: "z"}), "x")
