"""Datasets made of Python objects: arrays, lists of (image, label), torch datasets; and those of installed packages."""

import dataclasses
import hashlib
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data import holdout
from vitrail.data.dataset import SPLITS, Dataset, build_dataset
from vitrail.data.randomness import sample_indices
from vitrail.data.sample_table import UNLABELED, SampleTable
from vitrail.errors import DataError, UsageError
from vitrail.formatting import pluralize

NAME = "images in memory"
DIGITS_NAME, FACES_NAME = "digits", "faces"
_FACES_CLASSES = ("face", "background")  # in the order of the images
_FACES_TRAIN, _FACES_VAL = 30, 35  # images of each class; the rest is for the test
_PIXELS = ((3,), (4,))  # the shapes of a pixel in an array (H, W, C)


class Samples(Protocol):
    """Pairs of (image, label) by number: a list of them, or a map-style torch Dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


InMemoryData = Samples | tuple[Any, Any] | Mapping[str, Samples | tuple[Any, Any]]
"""Samples, a pair of (images, labels), or one of these for each of train, val and test.

An image is a Pillow image, an array uint8 (H, W) or (H, W, C), a tensor uint8 (H, W) or (C, H, W), floats from 0 to 1
(C, H, W) as torchvision's ToTensor gives them, a path, or the bytes of a file. A label is a class name, a class number,
or None."""


@dataclasses.dataclass(frozen=True)
class MemoryStore:
    """Images of several sources, one after the other."""

    sources: tuple[Samples, ...]
    ends: tuple[int, ...]
    """The row after the last of each source."""
    table: SampleTable
    name_digits: int = 6
    is_remote = False

    def get_name(self, row: int) -> str:
        """Return the image's number, as a file name."""
        return f"{row:0{self.name_digits}d}.png"

    def read(self, row: int) -> Path | bytes | Image.Image:
        """Return the image as `decode` takes it."""
        number = int(np.searchsorted(self.ends, row, side="right"))
        start = self.ends[number - 1] if number else 0
        return convert_image(split_sample(self.sources[number][row - start])[0], self.get_name(row))


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Images and labels in two sequences, read as pairs."""

    images: Sequence[Any]
    targets: Sequence[Any]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int, /) -> Any:
        return self.images[index], self.targets[index]


def build_memory_dataset(data: InMemoryData, *, holdout_fraction: float = 0.1) -> Dataset:
    """The dataset of Python objects; missing val and test splits are held out, as for a folder."""
    if not isinstance(data, Mapping):
        sources, column_values = [_to_samples(data)], [holdout.NO_SPLIT]
    else:
        if unknown := sorted(data.keys() - set(SPLITS), key=str):
            raise UsageError(f"a dataset has no split {unknown[0]!r}: the keys are {', '.join(SPLITS)}")
        if not data:
            raise DataError("there are no images: the dictionary of splits is empty")
        sources = [_to_samples(part) for part in data.values()]
        column_values = [SPLITS.index(name) for name in data]
    lengths = [len(source) for source in sources]
    if not sum(lengths):
        raise DataError("there are no images: the data is empty")
    labels = [label for source in sources for label in _read_labels(source)]
    classes, indices = _number_classes(labels, next(filter(None, map(_get_class_names, sources)), None))
    store = MemoryStore(tuple(sources), tuple(np.cumsum(lengths).tolist()), SampleTable({"label": indices}))
    digest = hashlib.sha256(repr((classes, lengths)).encode() + indices.tobytes()).hexdigest()[:12]
    column = np.repeat(np.array(column_values, dtype=np.int8), lengths)
    return _hold_out(NAME, store, column, classes, f"memory-{digest}", holdout_fraction)


def open_digits(*, holdout_fraction: float = 0.1) -> Dataset:
    """Open the 1,797 handwritten digits of 8 x 8 pixels in scikit-learn's wheel (Alpaydin and Kaynak, UCI 1998).

    Their 17 gray levels are spread over 0 to 255.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError("digits come with scikit-learn: pip install 'vitrail[demo]'") from error
    digits = load_digits()
    pixels, labels = np.round(digits.images * (255 / 16)).astype(np.uint8), digits.target.astype(np.int32)
    store = MemoryStore((_Columns(pixels, labels),), (len(pixels),), SampleTable({"label": labels}), name_digits=4)
    column = np.full(len(pixels), holdout.NO_SPLIT, dtype=np.int8)
    return _hold_out(DIGITS_NAME, store, column, "0123456789", DIGITS_NAME, holdout_fraction)


def open_faces() -> Dataset:
    """Open the 200 photographs of 25 x 25 pixels in scikit-image's wheel: 100 faces and 100 pieces of background.

    They are from Labeled Faces in the Wild (Huang et al. 2012). 30 images of each class are for training, 35 for
    validation and 35 for the test, always the same.
    """
    try:
        from skimage.data import lfw_subset
    except ImportError as error:
        raise UsageError("faces come with scikit-image: pip install 'vitrail[demo]'") from error
    pixels = np.round(lfw_subset() * 255).astype(np.uint8)
    each = len(pixels) // len(_FACES_CLASSES)
    labels = np.repeat(np.arange(len(_FACES_CLASSES), dtype=np.int32), each)
    column = np.full(len(pixels), SPLITS.index("test"), dtype=np.int8)
    for label in range(len(_FACES_CLASSES)):
        order = label * each + sample_indices(each, each, f"{FACES_NAME} {label}")
        column[order[:_FACES_TRAIN]] = SPLITS.index("train")
        column[order[_FACES_TRAIN : _FACES_TRAIN + _FACES_VAL]] = SPLITS.index("val")
    store = MemoryStore(
        (_Columns(pixels, labels.tolist()),), (len(pixels),), SampleTable({"label": labels}), name_digits=3
    )
    return _hold_out(FACES_NAME, store, column, _FACES_CLASSES, FACES_NAME, holdout_fraction=0.1)


def _hold_out(
    name: str,
    store: MemoryStore,
    column: holdout.SplitColumn,
    classes: Sequence[str],
    identity: str,
    holdout_fraction: float,
) -> Dataset:
    """The dataset with the splits that it lacks, if any."""
    split = holdout.complete_splits(
        column, store.table, store.get_name, identity=identity, holdout_fraction=holdout_fraction
    )
    return build_dataset(name, store, SampleTable({"split": split.column}, split.build_metadata(classes)))


def split_sample(sample: Any) -> tuple[Any, Any]:
    """The image and the label of a sample: a pair, or a mapping with `image` and `label`."""
    if isinstance(sample, Mapping) and "image" in sample:
        return sample["image"], sample.get("label")
    if isinstance(sample, tuple | list) and len(sample) == 2:
        return sample[0], sample[1]
    raise DataError(f"a sample is a pair (image, label), not {type(sample).__name__}")


def get_image(sample: Any) -> Any:
    """The image of a sample, or the sample itself where it is an image."""
    is_sample = isinstance(sample, Mapping) or (isinstance(sample, tuple) and len(sample) == 2)
    return split_sample(sample)[0] if is_sample else sample


def _to_samples(data: Any) -> Samples:
    if isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], tuple):
        images, labels = data
        if not (hasattr(images, "__len__") and hasattr(labels, "__len__")):
            kinds = f"{type(images).__name__} and {type(labels).__name__}"
            raise UsageError(f"a pair is of images and their labels, both with a length, not {kinds}")
        if len(images) != len(labels):
            counts = f"{pluralize(len(images), 'image')} and {pluralize(len(labels), 'label')}"
            raise DataError(f"{counts}: give one label for each image")
        return _Columns(images, labels)
    if isinstance(data, str | bytes) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UsageError(
            f"data is a name, a list of (image, label), a pair (images, labels) or a torch Dataset with a length, not"
            f" {type(data).__name__}"
        )
    return cast(Samples, data)


def _read_labels(source: Samples) -> Sequence[Any]:
    """The labels of all samples; from `targets`, where a dataset has it as torchvision's do, without an image read."""
    targets = getattr(source, "targets", None)
    if targets is not None and len(targets) == len(source):
        return targets.tolist() if isinstance(targets, np.ndarray | Tensor) else list(targets)
    return [split_sample(source[index])[1] for index in range(len(source))]


def _get_class_names(source: Samples) -> tuple[str, ...] | None:
    """The names of a dataset's classes, where it has them as torchvision's do."""
    names = getattr(source, "classes", None)
    return tuple(map(str, names)) if isinstance(names, list | tuple) and names else None


def _number_classes(labels: Sequence[Any], names: tuple[str, ...] | None) -> tuple[tuple[str, ...], Any]:
    """The names of the classes, and the class of each label, int32 (n,)."""
    if all(label is None for label in labels):
        return (), np.full(len(labels), UNLABELED, dtype=np.int32)
    if any(isinstance(label, str) for label in labels):
        if wrong := next((label for label in labels if not isinstance(label, str)), None):
            raise DataError(f"labels are names or numbers, and these are both: {wrong!r:.40} is no name")
        classes = names or tuple(sorted(set(labels)))
        numbers = {name: number for number, name in enumerate(classes)}
        if unknown := set(labels) - numbers.keys():
            raise DataError(f"the label {min(unknown)!r:.40} is none of the dataset's classes")
        return classes, np.array([numbers[label] for label in labels], dtype=np.int32)
    try:
        indices = np.array([operator.index(label) for label in labels], dtype=np.int32)
    except TypeError:
        wrong = next(label for label in labels if not hasattr(label, "__index__"))
        raise DataError(f"a label is a class name or a class number, not {type(wrong).__name__}") from None
    classes = names or tuple(map(str, range(int(indices.max()) + 1)))
    if indices.min() < 0 or indices.max() >= len(classes):
        raise DataError(
            f"class numbers are from 0 to {len(classes) - 1}, and one is {indices.min()} to {indices.max()}"
        )
    return classes, indices


def convert_image(image: Any, name: str) -> Path | bytes | Image.Image:
    """An image in memory as `decode` takes it; `name` is its name in errors."""
    if isinstance(image, Image.Image | bytes | Path):
        return image
    if isinstance(image, str):
        return Path(image)
    pixels = image.detach().cpu() if isinstance(image, Tensor) else image
    if isinstance(pixels, Tensor):
        channels_last = pixels.permute(1, 2, 0) if pixels.ndim == 3 else pixels
        pixels = (channels_last.float() if pixels.is_floating_point() else channels_last).numpy()
    elif _is_floating(pixels) and pixels.ndim == 3:
        pixels = pixels.transpose(1, 2, 0)
    if _is_floating(pixels) and pixels.shape[2:] in ((1,), (3,)) and pixels.size:
        pixels = _quantize_floats(pixels, name)
    pixels = pixels[..., 0] if isinstance(pixels, np.ndarray) and pixels.shape[2:] == (1,) else pixels
    if (
        isinstance(pixels, np.ndarray)
        and pixels.dtype == np.uint8
        and (pixels.ndim == 2 or pixels.shape[2:] in _PIXELS)
    ):
        return Image.fromarray(np.ascontiguousarray(pixels))
    raise DataError(_describe_wrong_image(image, name))


def _is_floating(pixels: Any) -> bool:
    return isinstance(pixels, np.ndarray) and np.issubdtype(pixels.dtype, np.floating)


def _quantize_floats(pixels: NDArray[Any], name: str) -> NDArray[np.uint8]:
    """Floats from 0 to 1 as the uint8 that torchvision's ToTensor made them of, to the bit."""
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= 0 and high <= 1):  # NaN too
        raise DataError(
            f"{name} has values from {low:.3g} to {high:.3g}; floats are from 0 to 1, as of torchvision's ToTensor."
            " Omit Normalize: vitrail normalizes"
        )
    return np.round(pixels.astype(np.float64) * 255).astype(np.uint8)


def _describe_wrong_image(image: Any, name: str) -> str:
    kind = f"{image.dtype} {tuple(image.shape)}" if isinstance(image, np.ndarray | Tensor) else type(image).__name__
    first = isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[0] in (1, 3, 4)
    hint = "; move its channels to the end, images.transpose(0, 2, 3, 1)" if first and image.ndim == 3 else ""
    return (
        f"{name} is {kind}{hint}; an image is a Pillow image, uint8 (H, W, C) as array or (C, H, W) as tensor, floats"
        " from 0 to 1 (C, H, W) of 1 or 3 channels, a path or the bytes of a file. Give a dataset without other"
        " transforms: vitrail resizes, augments and normalizes"
    )
