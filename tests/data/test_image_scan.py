"""What a look at every image finds, and what it costs the second time; large sets by their headers and a sample."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.data.pictures import encoded, folder, picture
from vitrail.data import image_scan
from vitrail.data.decode import decode
from vitrail.data.folder import open_folder
from vitrail.data.image_scan import BAD, DECODED, HEADER_ONLY, scan_dataset
from vitrail.data.pack import pack
from vitrail.data.shards import open_shards
from vitrail.files import get_cache_home


def test_facts_are_those_of_the_pixels(tmp_path: Path) -> None:
    seen = scan_dataset(open_folder(folder(tmp_path, "train", "val", each=3)))
    for image in range(12):
        split = list(seen.dataset.splits.values())[seen.split_index[image]]
        pixels = decode(split.read_image(int(seen.index_in_split[image]))).double() / 255
        facts = seen.image_facts[image]
        assert facts["status"] == DECODED
        assert (facts["height"], facts["width"]) == pixels.shape[1:]
        assert np.allclose(facts["mean"], pixels.mean(dim=(1, 2)), atol=1e-6)
        assert np.allclose(facts["square"], (pixels**2).mean(dim=(1, 2)), atol=1e-6)
    assert len({facts["digest"].tobytes() for facts in seen.image_facts}) == 12


def test_of_a_large_set_a_stated_sample_is_decoded_and_the_rest_known_by_headers(tmp_path: Path) -> None:
    root = folder(tmp_path, "train", "val", each=10)
    (root / "train" / "rose" / "3.jpg").write_bytes(b"<html>")
    whole = (root / "train" / "rose" / "4.jpg").read_bytes()
    (root / "train" / "rose" / "4.jpg").write_bytes(whole[:-40])
    seen = scan_dataset(open_folder(root), max_decoded=15)
    status = seen.image_facts["status"]
    assert len(seen.fingerprinted_images) == 15
    assert (status == DECODED).sum() + (status == BAD).sum() >= 15
    assert (status == HEADER_ONLY).sum() >= 40 - 15 - 2
    assert seen.bad_reasons[3].startswith("is not an image of a known format (JPEG, PNG, ")  # even by its header
    cut = 4 in seen.fingerprinted_images
    assert (status[4] == BAD) == cut  # a header does not show that the rest is missing
    again = scan_dataset(open_folder(root), max_decoded=15)
    assert again.cached_count == 40 - len(seen.bad_reasons)  # what was bad is looked at again
    assert np.array_equal(again.image_facts, seen.image_facts)
    assert np.array_equal(again.fingerprints, seen.fingerprints)
    assert again.bad_reasons == seen.bad_reasons
    deeper = scan_dataset(open_folder(root))
    assert deeper.cached_count == 15
    assert deeper.image_facts["status"][4] == BAD


def test_a_change_of_size_or_time_is_looked_at_again_and_shards_too(tmp_path: Path) -> None:
    root = folder(tmp_path / "set", "train", "val", each=4)
    path = root / "train" / "rose" / "2.jpg"
    first = scan_dataset(open_folder(root))
    os.utime(path, (1, 1))
    assert scan_dataset(open_folder(root)).cached_count == 15
    path.write_bytes(encoded(picture(500)))
    third = scan_dataset(open_folder(root))
    assert third.cached_count == 15
    assert third.image_facts[2]["digest"] != first.image_facts[2]["digest"]
    pack(open_folder(root), tmp_path / "packed")
    assert scan_dataset(open_shards(tmp_path / "packed")).cached_count == 0
    assert scan_dataset(open_shards(tmp_path / "packed")).cached_count == 16


def test_what_was_seen_before_ctrl_c_is_not_seen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_scan, "_CHUNK_IMAGES", 4)
    root = folder(tmp_path / "set", "train", "val", each=10)

    def interrupted(done: int, total: int) -> None:
        if done >= total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan_dataset(open_folder(root), progress=interrupted)
    assert 20 <= scan_dataset(open_folder(root)).cached_count < 40


def test_a_damaged_cache_is_looked_past(tmp_path: Path) -> None:
    root = folder(tmp_path / "set", "train", "val", each=2)
    scan_dataset(open_folder(root))
    [facts] = (get_cache_home() / "examined").glob("*/facts.npy")
    facts.write_bytes(b"\x93NUMPY")
    assert scan_dataset(open_folder(root)).cached_count == 0
    assert scan_dataset(open_folder(root)).cached_count == 8


def test_a_crash_of_the_decoder_is_pinned_on_its_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool dies with the process; the images it held are looked at one by one."""
    root = folder(tmp_path / "set", "train", "val", each=4)
    (root / "train" / "tulip" / "1.jpg").write_bytes(b"killer")
    monkeypatch.setattr(image_scan, "_scan_images", killed_by_one)
    seen = scan_dataset(open_folder(root))
    assert seen.bad_reasons == {5: "the process that decoded it died (a crash, or out of memory)"}
    assert (seen.image_facts["status"] == DECODED).sum() == 15


LOOK = image_scan._scan_images


def killed_by_one(job: image_scan._ScanJob) -> image_scan._ScanResult:
    """What a worker does, unless one image kills it."""
    for place in range(len(job.scan_indices)):
        source = job.split.read_image(place)
        if isinstance(source, Path) and source.read_bytes() == b"killer":
            os.abort()
    return LOOK(job)
