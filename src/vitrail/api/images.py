"""The images that `predict`, `embed` and `figures` take: files and folders, and images in memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail import remote
from vitrail.data.decode import ImageSource
from vitrail.data.image_paths import STDIN, iter_image_refs
from vitrail.data.memory import Samples, convert_image, get_image
from vitrail.errors import DataError, UsageError
from vitrail.files import suggest_path

_IMAGE_FORMS = "a path, the bytes of a file, a Pillow image, an array uint8 (H, W) or (H, W, 3), or a tensor (C, H, W)"

Images = ImageSource | NDArray[Any] | Tensor | Samples | Sequence[ImageSource | NDArray[Any] | Tensor]
"""Files, folders, globs, shards and lists, as the commands take them; or Pillow images, arrays, tensors, bytes of
files, or a torch Dataset, whose labels are left out."""
ListedImage = ImageSource | Callable[[], ImageSource]
"""An image, or a function that reads it, as of a torch Dataset."""


def list_images(images: Images) -> list[ListedImage]:
    """The images one by one; an array or a tensor of one image is one."""
    listed: Any = images
    if _is_one_image(images):
        return [_convert_image(images, 0)]
    is_indexed = hasattr(images, "__len__") and hasattr(images, "__getitem__")
    if isinstance(images, Mapping) or not (is_indexed or isinstance(images, Iterable)):
        kind = type(images).__name__
        raise UsageError(f"an image is {_IMAGE_FORMS}; give one, a list of them or a torch Dataset, not {kind}")
    if is_indexed and not isinstance(images, Sequence | np.ndarray | Tensor):
        return [partial(_read_sample, listed, index) for index in range(len(listed))]
    return [_convert_image(get_image(image), index) for index, image in enumerate(listed)]


def is_stdin(image: ListedImage) -> bool:
    """Whether an image is the list of images on standard input, which can be read once."""
    return isinstance(image, str) and image == STDIN


def check_found(images: Iterable[ListedImage]) -> None:
    """Refuse a path that does not exist, and a folder or a pattern without an image."""
    for image in images:
        if not isinstance(image, str | Path) or is_stdin(image) or remote.is_remote(str(image)):
            continue
        name = str(image)
        first = next(iter_image_refs([name]), None)
        if first is not None and first.name == name and first.error:
            raise DataError(first.error)
        if first is not None and first.location == name and not Path(name).exists():
            raise DataError(f"{name} does not exist{suggest_path(Path(name))}")


def _is_one_image(images: Any) -> bool:
    if isinstance(images, Tensor):
        return images.ndim == 2 or (images.ndim == 3 and len(images) in (1, 3, 4))
    if isinstance(images, np.ndarray):
        is_tensor = images.ndim == 3 and len(images) in (1, 3) and np.issubdtype(images.dtype, np.floating)
        return images.ndim == 2 or (images.ndim == 3 and images.shape[2] in (3, 4)) or is_tensor
    return isinstance(images, str | Path | bytes | Image.Image)


def _read_sample(samples: Samples, index: int) -> ImageSource:
    return _convert_image(get_image(samples[index]), index)


def _convert_image(image: Any, index: int) -> ImageSource:
    """An image as `decode` takes it; a name stays as it is, for it may be a folder."""
    if isinstance(image, str | Path | bytes | Image.Image):
        return image
    if isinstance(image, np.ndarray | Tensor):
        return convert_image(image, f"image {index}")
    raise UsageError(f"images[{index}] is of type {type(image).__name__}; an image is {_IMAGE_FORMS}")
