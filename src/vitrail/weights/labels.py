"""Class names."""

import functools
import importlib.resources
from pathlib import Path
from typing import NamedTuple

from vitrail.errors import UsageError


class ImageNetClass(NamedTuple):
    wordnet_id: str
    name: str


@functools.cache
def load_imagenet1k_classes() -> tuple[ImageNetClass, ...]:
    """The 1,000 ImageNet classes in the order of every published head."""
    text = importlib.resources.files("vitrail.weights").joinpath("imagenet1k.tsv").read_text(encoding="utf-8")
    return tuple(ImageNetClass(*line.split("\t")) for line in text.splitlines())


def read_labels(source: str) -> tuple[str, ...]:
    """`imagenet1k`, or the lines of a text file."""
    if source == "imagenet1k":
        return tuple(entry.name for entry in load_imagenet1k_classes())
    path = Path(source)
    if not path.is_file():
        raise UsageError(f"labels {source!r} are neither 'imagenet1k' nor a text file with a name on each line")
    try:
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no UTF-8 text with a name on each line") from None
