"""Small files in the formats of the public datasets, and what a dataset made of them holds."""

import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import scipy.io
from numpy.typing import NDArray
from PIL import Image

from vitrail.data import public_formats
from vitrail.data.dataset import Dataset
from vitrail.data.decode import decode
from vitrail.files import get_data_home

Get = Callable[..., Dataset]


def draw_noise(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def make_jpeg(number: int) -> bytes:
    """The bytes of an image file that differs from others; nobody decodes it on the way."""
    return b"\xff\xd8 picture %d" % number


def make_tar(members: Mapping[str, bytes], mode: Literal["w", "w:gz", "w:xz"] = "w:gz") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return file.getvalue()


def make_zip(members: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def make_deb(members: Mapping[str, bytes]) -> bytes:
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": make_tar(members, "w:xz")}
    packed = b"!<arch>\n"
    for name, content in parts.items():
        packed += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        packed += content + b"\n" * (len(content) % 2)
    return packed


def make_idx(array: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def make_png(array: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def make_mat(**variables: Any) -> bytes:
    file = io.BytesIO()
    scipy.io.savemat(file, variables, do_compression=True)
    return file.getvalue()


def list_labels(dataset: Dataset, split: str) -> list[int]:
    return [dataset.splits[split].get_labels(row)[0] for row in range(len(dataset.splits[split]))]


def read_files(dataset: Dataset, split: str) -> dict[str, tuple[Any, int]]:
    """Name inside the set -> bytes, label."""
    rows = dataset.splits[split]
    return {
        rows.get_image_name(row).partition(":")[2]: (rows.read_image(row), rows.get_labels(row)[0])
        for row in range(len(rows))
    }


def read_pixels(dataset: Dataset, split: str, channels: int = 3) -> NDArray[np.uint8]:
    """(N, H, W, C)."""
    rows = dataset.splits[split]
    return np.stack([decode(rows.read_image(row), channels).permute(1, 2, 0).numpy() for row in range(len(rows))])


def make_cifar_records(images: NDArray[np.uint8], *numbers: Sequence[int]) -> bytes:
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.concatenate([np.array(numbers, np.uint8).T, planes], axis=1).tobytes()


def make_cifar10_binary(images: NDArray[np.uint8], numbers: Sequence[int]) -> dict[str, bytes]:
    """Two images in each of five batches, then the others for test."""
    root = "cifar-10-batches-bin/"
    batches = {
        f"{root}data_batch_{n + 1}.bin": make_cifar_records(images[2 * n : 2 * n + 2], numbers[2 * n : 2 * n + 2])
        for n in range(5)
    }
    names = "\n".join(public_formats.CIFAR10_CLASSES).encode() + b"\n\n"
    test = make_cifar_records(images[10:], numbers[10:])
    return {f"{root}batches.meta.txt": names, **batches, f"{root}test_batch.bin": test, f"{root}readme.html": b"hi"}


CIFAR_LABELS = [3, 9, 0, 1, 2, 4, 5, 6, 7, 8, 9, 0, 5]
CIFAR_SPLITS = {"train": 10, "test": 3}


def make_flowers(**changes: Any) -> dict[str, bytes]:
    numbers = {"trnid": [[5, 1]], "valid": [[2]], "tstid": [[3, 4, 6]], **changes}
    return {
        "102flowers.tgz": make_tar({f"jpg/image_{n:05d}.jpg": make_jpeg(n) for n in range(1, 8)}),
        "imagelabels.mat": make_mat(labels=np.array([[77, 1, 102, 3, 55, 6, 7]], np.uint8)),
        "setid.mat": make_mat(**{name: np.array(value, np.uint16) for name, value in numbers.items()}),
    }


FLOWER_SPLITS = {"train": 2, "val": 1, "test": 3}


def make_tiny_imagenet() -> dict[str, bytes]:
    root = "tiny-imagenet-200/"
    return {
        f"{root}wnids.txt": b"n02124075\nn04067472\n",
        f"{root}words.txt": b"n00001740\tentity\nn04067472\treel\nn02124075\tEgyptian cat\n",
        f"{root}val/val_annotations.txt": b"val_0.JPEG\tn04067472\t0\t32\t44\t62\nval_1.JPEG\tn02124075\t0\t0\t1\t1\n",
        f"{root}val/images/val_0.JPEG": make_jpeg(1),
        f"{root}val/images/val_1.JPEG": make_jpeg(2),
        f"{root}test/images/test_0.JPEG": make_jpeg(3),
        f"{root}train/n04067472/images/n04067472_0.JPEG": make_jpeg(4),
        f"{root}train/n04067472/n04067472_boxes.txt": b"no",
        f"{root}train/n02124075/images/n02124075_499.JPEG": make_jpeg(5),
    }


def is_cache_empty() -> bool:
    return not (get_data_home() / "data").exists() or not list((get_data_home() / "data").iterdir())


def make_idx_files() -> tuple[dict[str, bytes], NDArray[np.uint8]]:
    images = draw_noise(5, 28, 28)
    numbers = np.array([7, 0, 9, 1, 2], np.uint8)
    return {
        "train-images-idx3-ubyte": make_idx(images[:3]),
        "train-labels-idx1-ubyte": make_idx(numbers[:3]),
        "t10k-images-idx3-ubyte": make_idx(images[3:]),
        "t10k-labels-idx1-ubyte": make_idx(numbers[3:]),
    }, images


def make_apt_files() -> dict[str, bytes]:
    members = {
        f"./usr/share/datasets/fashion-mnist/{name}.gz": gzip.compress(c) for name, c in make_idx_files()[0].items()
    }
    return {"dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb": make_deb(members)}


def make_loose_files() -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(content) for name, content in make_idx_files()[0].items()}
