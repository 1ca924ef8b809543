"""What a look at every image finds, and what it costs the second time; large sets by their headers and a sample."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.image_files import encode_image, make_image, write_image_folder
from vitrail.data import image_scan
from vitrail.data.decode import decode
from vitrail.data.folder import open_folder
from vitrail.data.image_scan import BAD, DECODED, HEADER_ONLY, scan_dataset
from vitrail.data.memory import build_memory_dataset
from vitrail.data.pack import pack
from vitrail.data.shards import open_shards
from vitrail.files import get_cache_home


def test_facts_are_those_of_the_pixels(tmp_path: Path) -> None:
    scan = scan_dataset(open_folder(write_image_folder(tmp_path, "train", "val", each=3)))
    for image in range(12):
        split = list(scan.dataset.splits.values())[scan.split_index[image]]
        pixels = decode(split.read_image(int(scan.index_in_split[image]))).double() / 255
        facts = scan.image_facts[image]
        assert facts["status"] == DECODED
        assert (facts["height"], facts["width"]) == pixels.shape[1:]
        assert np.allclose(facts["mean"], pixels.mean(dim=(1, 2)), atol=1e-6)
        assert np.allclose(facts["square"], (pixels**2).mean(dim=(1, 2)), atol=1e-6)
    assert len({facts["digest"].tobytes() for facts in scan.image_facts}) == 12


def test_of_a_large_set_a_stated_sample_is_decoded_and_the_rest_known_by_headers(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path, "train", "val", each=10)
    (root / "train" / "rose" / "3.jpg").write_bytes(b"<html>")
    whole = (root / "train" / "rose" / "4.jpg").read_bytes()
    (root / "train" / "rose" / "4.jpg").write_bytes(whole[:-40])
    scan = scan_dataset(open_folder(root), max_decoded=15)
    status = scan.image_facts["status"]
    assert len(scan.fingerprinted_images) == 15
    assert (status == DECODED).sum() + (status == BAD).sum() >= 15
    assert (status == HEADER_ONLY).sum() >= 40 - 15 - 2
    assert scan.bad_reasons[3].startswith("is not an image of a known format (JPEG, PNG, ")  # even by its header
    cut = 4 in scan.fingerprinted_images
    assert (status[4] == BAD) == cut  # a header does not show that the rest is missing
    again = scan_dataset(open_folder(root), max_decoded=15)
    assert again.cached_count == 40 - len(scan.bad_reasons)  # what was bad is looked at again
    assert np.array_equal(again.image_facts, scan.image_facts)
    assert np.array_equal(again.fingerprints, scan.fingerprints)
    assert again.bad_reasons == scan.bad_reasons
    deeper = scan_dataset(open_folder(root))
    assert deeper.cached_count == 15
    assert deeper.image_facts["status"][4] == BAD


def test_a_change_of_size_or_time_is_looked_at_again_and_shards_too(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "set", "train", "val", each=4)
    path = root / "train" / "rose" / "2.jpg"
    first = scan_dataset(open_folder(root))
    os.utime(path, (1, 1))
    assert scan_dataset(open_folder(root)).cached_count == 15
    path.write_bytes(encode_image(make_image(500)))
    third = scan_dataset(open_folder(root))
    assert third.cached_count == 15
    assert third.image_facts[2]["digest"] != first.image_facts[2]["digest"]
    pack(open_folder(root), tmp_path / "packed")
    assert scan_dataset(open_shards(tmp_path / "packed")).cached_count == 0
    assert scan_dataset(open_shards(tmp_path / "packed")).cached_count == 16


def test_what_was_seen_before_ctrl_c_is_not_seen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_scan, "_CHUNK_IMAGES", 4)
    root = write_image_folder(tmp_path / "set", "train", "val", each=10)

    def interrupted(done: int, total: int) -> None:
        if done >= total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan_dataset(open_folder(root), progress=interrupted)
    assert 20 <= scan_dataset(open_folder(root)).cached_count < 40


def test_a_damaged_cache_is_looked_past(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "set", "train", "val", each=2)
    scan_dataset(open_folder(root))
    [facts] = (get_cache_home() / "examined").glob("*/facts.npy")
    facts.write_bytes(b"\x93NUMPY")
    assert scan_dataset(open_folder(root)).cached_count == 0
    assert scan_dataset(open_folder(root)).cached_count == 8


def test_a_crash_of_the_decoder_is_pinned_on_its_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool dies with the process; the images it held are looked at one by one."""
    root = write_image_folder(tmp_path / "set", "train", "val", each=4)
    (root / "train" / "tulip" / "1.jpg").write_bytes(b"killer")
    monkeypatch.setattr(image_scan, "_scan_in_worker", scan_or_abort)
    scan = scan_dataset(open_folder(root))
    assert scan.bad_reasons == {5: "the process that decoded it died (a crash, or out of memory)"}
    assert (scan.image_facts["status"] == DECODED).sum() == 15


SCAN_IMAGES = image_scan._scan_images


def scan_or_abort(job: image_scan._ScanJob) -> list[image_scan._ScanResult]:
    """Scan as a worker does, unless one image kills it."""
    for index in range(len(job.images)):
        source = job.split.read_image(index)
        if isinstance(source, Path) and source.read_bytes() == b"killer":
            os.abort()
    return SCAN_IMAGES(job)


def test_images_in_memory_are_scanned_here_and_leave_the_process_as_it_was() -> None:
    """A script that trains on arrays still prints its errors, and computes with all of its threads."""
    dataset = build_memory_dataset(([make_image(seed) for seed in range(6)], [0, 1] * 3))
    stderr, threads = os.fstat(2), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert len(scan_dataset(dataset).image_facts) == 6
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert os.path.samestat(os.fstat(2), stderr)
