"""Images given by name, as a model sees them: what it did with each, and pictures of that.

B images of a batch   C channels   S image side
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.config import Preprocess
from vitrail.data.decode import Source, decode
from vitrail.data.transforms import evaluation_view, normalise
from vitrail.errors import DataError
from vitrail.figures import attention, pictures
from vitrail.figures.attention import Array, Attended, AttentionDistance
from vitrail.figures.boxes import Box, seen
from vitrail.figures.cka import Products, compute_products
from vitrail.figures.faithfulness import Faithfulness, measure_faithfulness
from vitrail.figures.relevance import compute_relevance
from vitrail.weights.trained import Trained

BATCH = 16
_SMALL = 224  # pixels: an image with a shorter side is enlarged
_LARGE = 2048  # but none to more than that
_HEAD = 256  # pixels along a head's picture
_SEED = 0  # of the random order
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


class Answer(NamedTuple):
    """The class a model finds most probable."""

    number: int
    label: str
    probability: float


@dataclasses.dataclass(frozen=True)
class Details:
    """What a model did with the images that are to be drawn, by their names."""

    heads: dict[str, Array] = dataclasses.field(default_factory=dict)
    tokens: dict[str, Array] = dataclasses.field(default_factory=dict)
    relevance: dict[str, Array] = dataclasses.field(default_factory=dict)
    """To the class of the answer; a model without a head has neither."""
    answers: dict[str, Answer] = dataclasses.field(default_factory=dict)
    curves: dict[str, list[Faithfulness]] = dataclasses.field(default_factory=dict)
    """Batch by batch, by what patches are ordered by."""
    products: dict[tuple[str, ...], Products] = dataclasses.field(default_factory=dict)
    """Of the layers, by the names of a batch."""


class Looked(NamedTuple):
    """What a model did with images, by their names."""

    distance: AttentionDistance
    within: dict[str, Box]
    """The part of the image that it saw."""
    rollouts: dict[str, Array]
    details: Details
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
    trained: Trained,
    batches: Iterator[Views],
    drawn: Collection[str],
    tell: Callable[[int], None] = lambda _: None,
    *,
    faithfulness: bool = False,
) -> Looked:
    """Distances and rollouts of all images, and the details of those whose names are `drawn`.

    `tell` is called with how many images are done.
    """
    within: dict[str, Box] = {}
    rollouts: dict[str, Array] = {}
    details, first = Details(), list[Tensor]()
    chance = torch.Generator().manual_seed(_SEED)

    def parts() -> Iterator[Attended]:
        for batch in batches:
            first[:] = first or [batch.pixels]
            part = attention.attended(trained.model, batch.pixels)
            within.update(zip(batch.names, batch.within, strict=True))
            rollouts.update(zip(batch.names, part.rollout, strict=True))
            places = [place for place, name in enumerate(batch.names) if name in drawn]
            if places:
                names, pixels = tuple(batch.names[place] for place in places), batch.pixels[places]
                details.heads.update(zip(names, part.heads[places], strict=True))
                details.tokens.update(zip(names, attention.token_colours(trained.model, pixels), strict=True))
                details.products[names] = compute_products(trained.model, pixels)
                if trained.model.config.classes:
                    orders = {"rollout": part.rollout[places]} if faithfulness else {}
                    _explain(trained, names, pixels, details, orders, chance)
            tell(len(rollouts))
            yield part

    distance = attention.averaged(trained.model, parts())
    return Looked(distance, within, rollouts, details, first[0])


def _explain(
    trained: Trained,
    names: tuple[str, ...],
    pixels: Tensor,
    details: Details,
    orders: dict[str, Array],
    chance: torch.Generator,
) -> None:
    """Add the relevance of some images to their answers, and where there are other orders the curves of all."""
    found = compute_relevance(trained.model, pixels)
    probabilities = _probabilities(trained, torch.from_numpy(found.logits))
    labels = trained.labels or tuple(f"class {number}" for number in range(trained.model.config.classes))
    for name, shown, number, row in zip(names, found.maps, found.classes.tolist(), probabilities, strict=True):
        details.relevance[name] = shown
        details.answers[name] = Answer(number, labels[number], float(row[number]))
    if orders:
        orders = {"relevance": found.maps} | orders
        orders["random"] = torch.rand(found.maps.shape, generator=chance).numpy()
    device = next(trained.model.parameters()).device
    for order, maps in orders.items():
        curves = measure_faithfulness(
            lambda images: _probabilities(trained, trained.model(images)), pixels.to(device), maps, found.classes
        )
        details.curves.setdefault(order, []).append(curves)


def _probabilities(trained: Trained, logits: Tensor) -> Tensor:
    scaled = logits / trained.temperature
    return scaled.sigmoid() if trained.several else scaled.softmax(dim=1)


def draw(image: Shown, looks: Mapping[str, Looked], places: Mapping[str, Path]) -> None:
    """Write rollout, relevance, tokens and heads of one image to their `places`, those of several models side by side.

    All but the heads are at the image's own size, or at a multiple where it is small.
    """
    whole = decode(image.read(), name=image.name)
    large = max(1, min(math.ceil(_SMALL / min(whole.shape[1:])), _LARGE // max(whole.shape[1:])))
    small = _HEAD / max(whole.shape[1:])
    enlarged, reduced = pictures.scaled(whole, large), pictures.scaled(whole, small)
    several = len(looks) > 1
    shown: dict[str, list[tuple[str, NDArray[np.uint8]]]] = {kind: [] for kind in places}
    for model, each in looks.items():
        box, details = each.within[image.name], each.details
        rolled = pictures.overlaid(enlarged, each.rollouts[image.name], box.scaled(large))
        shown["rollout"].append((model if several else "attention rollout", rolled))
        colours = pictures.tinted(enlarged, details.tokens[image.name], box.scaled(large))
        shown["tokens"].append((model if several else "tokens", colours))
        if image.name in details.relevance:
            answer = details.answers[image.name]
            title = f"{model if several else 'relevance'}: {answer.probability:.0%} {answer.label}"
            relevant = pictures.overlaid(enlarged, details.relevance[image.name], box.scaled(large))
            shown["relevance"].append((title, relevant))
        for number, head in enumerate(details.heads[image.name], 1):
            title = f"{f'{model}, ' * several}head {number}"
            shown["heads"].append((title, pictures.overlaid(reduced, head, box.scaled(small))))
    plain = Path(image.name).name, pictures.plain(enlarged)
    counts = [len(each.details.heads[image.name]) for each in looks.values()]
    columns = next((number for number in _COLUMNS if not any(count % number for count in counts)), _COLUMNS[0])
    for kind, panels in shown.items():
        panels = panels if kind == "heads" else [plain, *panels]
        titles, drawn = zip(*panels, strict=True)
        pictures.panels(drawn, titles, places[kind], columns=columns if kind == "heads" else len(panels))


def file_name(name: str, taken: Collection[str]) -> str:
    """An image's name without folder and ending, in letters that any disk takes, and like none that is `taken`."""
    plain = re.sub(r"[^\w.-]", "_", Path(name).stem, flags=re.ASCII)[:80]
    others = (f"{plain}-{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([plain], others) if each not in taken)
