"""Photos in the wheels of scikit-image, scikit-learn and matplotlib: at hand on any machine, without a download."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from vitrail.errors import UsageError


class SamplePhoto(NamedTuple):
    """A photo, and to whom it is owed."""

    name: str
    credit: str
    read: Callable[[], Image.Image]


def list_sample_photos() -> list[SamplePhoto]:
    """The photos, with their credits as their packages give them."""
    return [
        SamplePhoto("cat", "Stéfan van der Walt, CC0, from scikit-image", lambda: _read_skimage("chelsea")),
        SamplePhoto("coffee", "Rachel Michetti, CC0, from scikit-image", lambda: _read_skimage("coffee")),
        SamplePhoto("rocket", "SpaceX, public domain, from scikit-image", lambda: _read_skimage("rocket")),
        SamplePhoto("portrait", "Grace Hopper, US Navy, public domain, from matplotlib", _read_portrait),
        SamplePhoto("palace", "danielbuechele on Flickr, CC BY 2.0, from scikit-learn", lambda: _read_sklearn("china")),
        SamplePhoto("flower", "vultilion on Flickr, CC BY 2.0, from scikit-learn", lambda: _read_sklearn("flower")),
    ]


def _read_skimage(name: str) -> Image.Image:
    try:
        from skimage import data
    except ImportError as error:
        raise UsageError("some sample photos come with scikit-image: pip install 'vitrail[demo]'") from error
    return Image.fromarray(getattr(data, name)())


def _read_sklearn(name: str) -> Image.Image:
    try:
        from sklearn.datasets import load_sample_image
    except ImportError as error:
        raise UsageError("some sample photos come with scikit-learn: pip install 'vitrail[demo]'") from error
    return Image.fromarray(load_sample_image(f"{name}.jpg"))


def _read_portrait() -> Image.Image:
    import matplotlib

    with Image.open(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg") as file:
        return file.convert("RGB")
