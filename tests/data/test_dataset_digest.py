"""Digests of a dataset: equal for a copy, different after any change that can be seen."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_changed_data import photos_of, replace_picture
from vitrail.data import dataset_digest
from vitrail.data.dataset_digest import DataDigest, check_unchanged, digest_dataset
from vitrail.data.pack import pack
from vitrail.data.sources import open_dataset
from vitrail.errors import ChangedDataError


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


def test_a_large_dataset_is_compared_by_its_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_digest, "MAX_CONTENT_BYTES", 0)
    photos = photos_of(tmp_path / "photos")
    before = digest_dataset(open_dataset(str(photos)))
    assert before.contents == ""
    assert digest_dataset(open_dataset(str(photos)), "known").contents == "known"
    replace_picture(photos)
    assert digest_dataset(open_dataset(str(photos))) == before, "only its contents differ"
    os.utime(next(photos.rglob("*.bmp")), (1, 1))
    assert "modification times" in check_unchanged(before, digest_dataset(open_dataset(str(photos))), "photos")


@pytest.mark.parametrize("limit", [10**6, 8])
def test_a_packed_dataset_is_identified_by_its_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(dataset_digest, "MAX_STAMPED_IMAGES", limit)
    photos = photos_of(tmp_path / "photos")
    pack(open_dataset(str(photos)), tmp_path / "shards")
    before = digest_dataset(open_dataset(str(tmp_path / "shards")))
    shutil.copytree(tmp_path / "shards", tmp_path / "copy")
    assert digest_dataset(open_dataset(str(tmp_path / "copy")))._replace(times="") == before._replace(times="")
    shard = next((tmp_path / "shards").glob("*.tar"))
    os.utime(shard, (1, 1))
    assert digest_dataset(open_dataset(str(tmp_path / "shards"))).times != before.times


def test_digits_are_identified_by_their_pixels() -> None:
    dataset = open_dataset("digits")
    assert digest_dataset(dataset) == digest_dataset(open_dataset("digits"))
    store: Any = dataset.splits["train"].store
    store.sources[0].images[0] += 1
    assert digest_dataset(dataset).contents != digest_dataset(open_dataset("digits")).contents


def test_any_changed_digest_refuses_the_dataset() -> None:
    before = DataDigest("a", "b", "c", "d")
    assert check_unchanged(before, before, "x") == ""
    for field in ("listing", "sizes", "contents"):
        with pytest.raises(ChangedDataError, match="x is not the dataset"):
            check_unchanged(before, before._replace(**{field: "z"}), "x")
