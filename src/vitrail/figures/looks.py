"""Images given by name, as a model sees them: what it did with each, and pictures of that.

B images of a batch   C channels   S image side
"""

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.config import Preprocess
from vitrail.data.decode import Source, decode
from vitrail.data.transforms import evaluation_view, normalise
from vitrail.errors import DataError
from vitrail.figures import attention, pictures
from vitrail.figures.attention import Array, Attended, AttentionDistance
from vitrail.figures.boxes import Box, seen
from vitrail.model.build import Model

BATCH = 16
_SMALL = 224  # pixels: an image with a shorter side is enlarged
_LARGE = 2048  # but none to more than that
_HEAD = 256  # pixels along a head's picture
_COLUMNS = (6, 5, 4, 3)  # of heads, the first that fills its rows


class Shown(NamedTuple):
    """An image to look at."""

    name: str
    read: Callable[[], Source]


class Views(NamedTuple):
    """What a model sees of some images."""

    names: tuple[str, ...]
    within: tuple[Box, ...]
    pixels: Tensor
    """(B, C, S, S), normalised."""


class Looked(NamedTuple):
    """What a model did with images, by their names."""

    distance: AttentionDistance
    within: dict[str, Box]
    """The part of the image that it saw."""
    rollouts: dict[str, Array]
    heads: dict[str, Array]
    """Of those alone that are to be drawn, like the tokens."""
    tokens: dict[str, Array]
    first: Tensor
    """The pixels of the first batch."""


def views(
    images: Sequence[Shown], channels: int, preprocess: Preprocess, refuse: Callable[[str, str], None]
) -> Iterator[Views]:
    """The images a few at a time; of those that cannot be read `refuse` is told the name and the reason."""
    for start in range(0, len(images), BATCH):
        found = []
        for image in images[start : start + BATCH]:
            try:
                whole = decode(image.read(), channels, name=image.name)
                view = evaluation_view(whole, preprocess)
            except DataError as error:
                refuse(image.name, str(error))
            else:
                found.append((image.name, seen(whole.shape[1], whole.shape[2], preprocess), view))
        if found:
            names, within, pixels = zip(*found, strict=True)
            yield Views(names, within, normalise(torch.stack(pixels), preprocess))


def look(
    model: Model, batches: Iterator[Views], drawn: Collection[str], tell: Callable[[int], None] = lambda _: None
) -> Looked:
    """One pass over the images, and a second one, for their tokens, over those whose names are `drawn`.

    `tell` is called with how many images are done.
    """
    within: dict[str, Box] = {}
    rollouts, heads, tokens = (dict[str, Array]() for _ in range(3))
    first: list[Tensor] = []

    def parts() -> Iterator[Attended]:
        for batch in batches:
            first[:] = first or [batch.pixels]
            part = attention.attended(model, batch.pixels)
            within.update(zip(batch.names, batch.within, strict=True))
            rollouts.update(zip(batch.names, part.rollout, strict=True))
            places = [place for place, name in enumerate(batch.names) if name in drawn]
            colours = attention.token_colours(model, batch.pixels[places]) if places else ()
            for place, colour in zip(places, colours, strict=True):
                heads[batch.names[place]] = part.heads[place]
                tokens[batch.names[place]] = colour
            tell(len(rollouts))
            yield part

    distance = attention.averaged(model, parts())
    return Looked(distance, within, rollouts, heads, tokens, first[0])


def draw(image: Shown, looks: Mapping[str, Looked], places: Mapping[str, Path]) -> None:
    """Write rollout, tokens and heads of one image to their `places`, those of several models side by side.

    Rollout and tokens are at the image's own size, or at a multiple where it is small.
    """
    whole = decode(image.read(), name=image.name)
    large = max(1, min(math.ceil(_SMALL / min(whole.shape[1:])), _LARGE // max(whole.shape[1:])))
    small = _HEAD / max(whole.shape[1:])
    enlarged, reduced = pictures.scaled(whole, large), pictures.scaled(whole, small)
    several, title = len(looks) > 1, Path(image.name).name
    rollouts, tokens, heads, captions = [], [], [], []
    for model, each in looks.items():
        box = each.within[image.name]
        rollouts.append(pictures.overlaid(enlarged, each.rollouts[image.name], box.scaled(large)))
        tokens.append(pictures.tinted(enlarged, each.tokens[image.name], box.scaled(large)))
        for number, head in enumerate(each.heads[image.name], 1):
            heads.append(pictures.overlaid(reduced, head, box.scaled(small)))
            captions.append(f"{model}, head {number}" if several else f"head {number}")
    for kind, what, shown in (("rollout", "attention rollout", rollouts), ("tokens", "tokens", tokens)):
        titles = [title, *(looks if several else [what])]
        pictures.panels([pictures.plain(enlarged), *shown], titles, places[kind], columns=1 + len(shown))
    counts = [len(each.heads[image.name]) for each in looks.values()]
    columns = next((number for number in _COLUMNS if not any(count % number for count in counts)), _COLUMNS[0])
    pictures.panels(heads, captions, places["heads"], columns=columns)


def file_name(name: str, taken: Collection[str]) -> str:
    """An image's name without folder and ending, in letters that any disk takes, and like none that is `taken`."""
    plain = re.sub(r"[^\w.-]", "_", Path(name).stem, flags=re.ASCII)[:80]
    others = (f"{plain}-{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([plain], others) if each not in taken)
