"""What only the weights and the images can show: mistakes and where the model looked, figures 1 to 4, one image's walk.

    B images   R, C rows and columns of patches

What cannot be shown is a sentence in its place: a ResNet has no attention, and images may be gone.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.dataset import Dataset, Split
from vitrail.data.loader import evaluation_batches
from vitrail.data.transforms import normalise
from vitrail.errors import DataError, UsageError
from vitrail.figures import attention, embeddings, pictures
from vitrail.model import count
from vitrail.model.vit import ViT
from vitrail.plurals import plural
from vitrail.report import charts, embedded
from vitrail.report.gather import Answer, Facts, called_in_set
from vitrail.report.walk import Walk, walk
from vitrail.weights.trained import Trained

MISTAKES = 12
ROLLOUTS = 6
MOST = 128  # images that attention distance is measured on
_CPU_MOST = 32
_CPU_BUDGET = 2 * 10**11  # multiply-adds: some seconds of two cores
_BATCH = 32
_SIDE = 192  # pixels of a picture: on a phone two of them stand side by side
_TILES = 16  # along a side of the position similarity, and cells of a tile: all of them would be megabytes
_HEADS = 12  # whose attention is shown
_FRAME = (213, 94, 0)


class Shown(NamedTuple):
    """An image with what was said of it, if anything was."""

    name: str
    answer: Answer | None
    image: str
    rollout: str | None
    """Where the model looked; None of a model without attention."""


class Plate(NamedTuple):
    """A figure: a picture as data URI or a chart."""

    picture: str | Markup
    caption: str


class Walked(NamedTuple):
    """The walk of an image, and its pictures."""

    walk: Walk
    name: str
    image: str
    patches: str
    """The image cut up, the patch that is followed framed."""
    followed: str
    heads: tuple[tuple[int, tuple[str, ...]], ...]
    """By layer, from 1: what each head attends to."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inside:
    """All of it; a sentence stands for what cannot be shown."""

    filters: Plate | str
    positions: Plate | str
    distance: Plate | str
    entropy: Plate | str
    rollouts: tuple[Shown, ...] | str
    mistakes: tuple[Shown, ...] | str
    walk: Walked | str


def look(facts: Facts, trained: Trained, images: "Images | str", device: torch.device) -> Inside:
    """What is to be seen of a run's weights, and of its images unless a sentence says why they are not here."""
    trained.model.to(device).eval()
    filters, positions = _filters(trained), _or_reason(lambda: _positions(trained))
    if isinstance(images, str):
        gone = dict.fromkeys(("distance", "entropy", "rollouts", "mistakes", "walk"), images)
        return Inside(filters=filters, positions=positions, **gone)
    right = [answer.image for answer in facts.answers if answer.right]
    some = spread(right or list(images.rows), ROLLOUTS)
    distance, entropy = _distance(trained, images)
    return Inside(
        filters=filters,
        positions=positions,
        distance=distance,
        entropy=entropy,
        rollouts=_or_reason(lambda: _shown(trained, images, some, attentive=True)),
        mistakes=_shown(trained, images, [answer.image for answer in facts.mistakes()[:MISTAKES]]),
        walk=_or_reason(lambda: _walked(trained, images, some[0])),
    )


# --- images ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Images:
    """Images of a run that may be shown: those that its answers are of, or some of val where there are none."""

    split: Split
    rows: dict[str, int]
    """By name."""
    answers: dict[str, Answer]
    classes: int


def found(facts: Facts, dataset: Dataset) -> Images:
    """Where the images of a run lie in its set; an error where the set is not the one it was."""
    of = "val" if facts.result is None else facts.result.split
    split = dataset.splits.get(of)
    if split is None:
        raise DataError(f"{facts.data} has no {of} any more")
    answers = {answer.image: answer for answer in facts.answers}
    if not answers:
        return Images(
            split, {split.name(row): row for row in spread(range(len(split)), MOST)}, {}, len(dataset.classes)
        )
    rows = {name: row for row in range(len(split)) if (name := split.name(row)) in answers}
    if left := len(answers) - len(rows):
        raise DataError(f"{facts.data} is not what it was: {left:,} of {len(answers):,} measured images are not there")
    return Images(split, rows, answers, len(dataset.classes))


def _views(trained: Trained, images: Images, names: Sequence[str]) -> Tensor:
    """uint8 (B, C, S, S) as the model sees them."""
    assert trained.preprocess is not None
    chosen = Split(images.split.store, np.array([images.split.rows[images.rows[name]] for name in names]))
    batches = evaluation_batches(chosen, trained.preprocess, batch=_BATCH, classes=images.classes)
    return torch.cat([batch.pixels for batch in batches])


def _normalised(trained: Trained, views: Tensor) -> Tensor:
    assert trained.preprocess is not None
    return normalise(views.to(next(trained.model.parameters()).device), trained.preprocess)


def _shown(trained: Trained, images: Images, names: Sequence[str], *, attentive: bool = False) -> tuple[Shown, ...]:
    """The images, and where the model looked; one that has no attention is refused if it must be `attentive`."""
    if not names:
        return ()
    views = _views(trained, images, names)
    maps: Sequence[NDArray[np.float32] | None] = [None] * len(names)
    if attentive or isinstance(trained.model, ViT):
        maps = list(attention.rollout(trained.model, _normalised(trained, views)))
    return tuple(
        _one(name, images.answers.get(name), view, rollout)
        for name, view, rollout in zip(names, views.numpy(), maps, strict=True)
    )


def _one(name: str, answer: Answer | None, view: NDArray[np.uint8], rollout: NDArray[np.float32] | None) -> Shown:
    image = _small(view)
    over = None if rollout is None else embedded.photo(pictures.overlaid(image, rollout))
    return Shown(called_in_set(name), answer, embedded.photo(pictures.plain(image)), over)


def _small(view: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return pictures.scaled(view, _SIDE / max(view.shape[1:]))


T = TypeVar("T")


def spread(values: Sequence[T], number: int) -> list[T]:
    """So many of the values, evenly from first to last."""
    places = np.linspace(0, len(values) - 1, min(number, len(values))).round().astype(int)
    return [values[place] for place in places.tolist()]


# --- figures 1 to 4 --------------------------------------------------------------------------------------------------


def _or_reason(make: Callable[[], T]) -> T | str:
    """What is made, or the sentence that says why this model has none."""
    try:
        return make()
    except UsageError as error:
        return f"{str(error)[:1].upper()}{str(error)[1:]}."


def _filters(trained: Trained) -> Plate:
    seen = embeddings.filters(trained.model)
    tiles = np.round(255 * seen.tiles).astype(np.uint8)
    tiles = tiles[..., :3] if tiles.shape[-1] >= 3 else tiles[..., :1].repeat(3, axis=-1)
    caption = (
        f"The first {len(tiles)} principal components of the filters of the {seen.layer}, each"
        f" {tiles.shape[1]} × {tiles.shape[2]} pixels. They hold {seen.explained.sum():.0%} of the filters' variance,"
        f" the first alone {seen.explained[0]:.0%}."
    )
    return Plate(embedded.exact(embedded.tiled(embedded.enlarged(tiles, 48), 7, 6)), caption)


def _positions(trained: Trained) -> Plate:
    maps = embeddings.position_similarity(trained.model).maps  # (R, C, R, C)
    step = -(-max(maps.shape) // _TILES)
    some = [range((side - 1) % step // 2, side, step) for side in maps.shape]
    seen = maps[np.ix_(*some)]
    rows, columns = seen.shape[:2]
    low = float(seen.min())
    tiles = embedded.heat(seen.reshape(-1, rows, columns), low, 1.0, 448 // max(rows, columns))
    every = "" if step == 1 else f" of {maps.shape[0]} × {maps.shape[1]}, one in {step} each way"
    caption = (
        f"How alike the position embedding of a patch is to every other's: one tile for each of {rows} × {columns}"
        f" patches{every}, in its place. Cosines from {low:.2f} (dark) to 1 (bright)."
    )
    return Plate(embedded.exact(embedded.tiled(tiles, columns, max(1, tiles.shape[2] // 8))), caption)


def _distance(trained: Trained, images: Images) -> tuple[Plate | str, Plate | str]:
    chosen = spread(list(images.rows), _affordable(trained))
    views = _views(trained, images, chosen)
    batches = (_normalised(trained, part) for part in views.split(_BATCH))
    seen = _or_reason(lambda: attention.attention_distance(trained.model, batches))
    if isinstance(seen, str):
        return seen, seen
    far = f"{seen.uniform_distance:.0f}"
    distance = charts.heads(seen.distance.astype(float), label="mean attention distance by layer", up="pixels")
    entropy = charts.heads(seen.entropy.astype(float), label="attention entropy by layer", up="bits")
    return (
        Plate(distance, f"How far each head looks, in pixels of the input, a dot a head, the line their mean; over"
              f" {plural(seen.images, 'image')}. Attention to all patches alike would give {far}."),
        Plate(entropy, f"How widely: the entropy of each head's attention. All patches alike would give"
              f" {seen.uniform_entropy:.1f} bits."),
    )  # fmt: skip


def _affordable(trained: Trained) -> int:
    """How many images attention is measured on: as many as take some seconds."""
    if next(trained.model.parameters()).device.type != "cpu":
        return MOST
    return max(4, min(_CPU_MOST, _CPU_BUDGET // count.multiply_adds(trained.model.config)))


# --- the walk --------------------------------------------------------------------------------------------------------


def _walked(trained: Trained, images: Images, name: str) -> Walked:
    [pixels] = _views(trained, images, [name])
    way, view = walk(trained, pixels), pixels.numpy()
    stride = way.config.stride
    top, left = (stride * place for place in way.followed)
    patch = pictures.plain(view[:, top : top + stride, left : left + stride])
    heads = tuple((each.layer, tuple(map(_head, each.heads[:_HEADS]))) for each in way.attending)
    return Walked(
        way,
        called_in_set(name),
        embedded.photo(pictures.plain(_small(view))),
        embedded.photo(_cut_up(view, way)),
        embedded.exact(embedded.enlarged(patch, 96)),
        heads,
    )


def _head(attention: NDArray[np.float32]) -> str:
    return embedded.exact(embedded.heat(attention, 0.0, float(attention.max()), 64))


def _cut_up(view: NDArray[np.uint8], way: Walk) -> NDArray[np.uint8]:
    """(C, S, S) -> (H, W, 4): the patches apart from each other, the one that is followed framed."""
    rows, columns = way.grid
    side = max(6, 240 // max(rows, columns))  # pixels of a patch here
    picture = Image.fromarray(pictures.plain(view)).resize((columns * side, rows * side), Image.Resampling.BOX)
    patches = np.array(picture).reshape(rows, side, columns, side, 3).swapaxes(1, 2)  # (R, C, side, side, 3)
    gap = max(2, side // 6)
    sheet = embedded.tiled(patches.reshape(-1, side, side, 3), columns, gap)
    top, left = (place * (side + gap) for place in way.followed)
    frame = sheet[max(0, top - gap) : top + side + gap, max(0, left - gap) : left + side + gap]
    frame[frame[..., 3] == 0] = (*_FRAME, 255)  # what is transparent there
    return sheet
