"""Class names: those of ImageNet, and those in a text file."""

import functools
import importlib.resources
from pathlib import Path
from typing import NamedTuple

from vitrail.errors import UsageError


class ImageNetClass(NamedTuple):
    """A class of ImageNet-1k."""

    wordnet_id: str
    name: str


@functools.cache
def load_imagenet1k_classes() -> tuple[ImageNetClass, ...]:
    """The 1,000 ImageNet classes in the order of every published head."""
    text = importlib.resources.files("vitrail.weights").joinpath("imagenet1k.tsv").read_text(encoding="utf-8")
    return tuple(ImageNetClass(*line.split("\t")) for line in text.splitlines())


def list_imagenet1k_labels() -> tuple[str, ...]:
    """The names of the 1,000 ImageNet classes."""
    return tuple(entry.name for entry in load_imagenet1k_classes())


def read_label_file(path: Path) -> tuple[str, ...]:
    """The lines of a text file, one label each."""
    if not path.is_file():
        raise UsageError(f"labels {str(path)!r} are neither 'imagenet1k' nor a text file with a name on each line")
    try:
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text with a name on each line") from None


def resolve_labels(option: str) -> tuple[str, ...]:
    """The labels that the option --labels names: `imagenet1k`, or the path of a text file."""
    return list_imagenet1k_labels() if option == "imagenet1k" else read_label_file(Path(option))
