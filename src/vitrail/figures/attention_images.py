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

from vitrail.config import PreprocessConfig
from vitrail.data.decode import ImageSource, decode
from vitrail.data.transforms import make_eval_input, normalize
from vitrail.errors import DataError
from vitrail.figures import attention, image_grids
from vitrail.figures.attention import Array, AttentionDistance, AttentionStats
from vitrail.figures.cka import GramMatrices, compute_gram_matrices
from vitrail.figures.crops import Box, compute_crop_box
from vitrail.figures.faithfulness import Faithfulness, measure_faithfulness
from vitrail.figures.relevance import compute_relevance
from vitrail.weights.trained import Trained, logits_to_probabilities

BATCH_IMAGES = 16
_MIN_SIDE = 224  # pixels: an image with a shorter side is enlarged
_MAX_SIDE = 2048  # but none to more than that
_HEAD_SIDE = 256  # pixels along a head's picture
_SEED = 0  # of the random order
_HEAD_COLUMNS = (6, 5, 4, 3)  # of heads, the first that fills its rows


class FigureImage(NamedTuple):
    """An image to look at."""

    name: str
    read: Callable[[], ImageSource]


class InputBatch(NamedTuple):
    """What a model sees of some images."""

    names: tuple[str, ...]
    crops: tuple[Box, ...]
    inputs: Tensor
    """(B, C, S, S), normalised."""


class TopPrediction(NamedTuple):
    """The class a model finds most probable."""

    class_index: int
    label: str
    probability: float


@dataclasses.dataclass(frozen=True)
class ImageDetails:
    """What a model did with the images that are to be drawn, by their names."""

    heads: dict[str, Array] = dataclasses.field(default_factory=dict)
    tokens: dict[str, Array] = dataclasses.field(default_factory=dict)
    relevance: dict[str, Array] = dataclasses.field(default_factory=dict)
    """To the class of the answer; a model without a head has neither."""
    predictions: dict[str, TopPrediction] = dataclasses.field(default_factory=dict)
    faithfulness: dict[str, list[Faithfulness]] = dataclasses.field(default_factory=dict)
    """Batch by batch, by what patches are ordered by."""
    gram_matrices: dict[tuple[str, ...], GramMatrices] = dataclasses.field(default_factory=dict)
    """Of the layers, by the names of a batch."""


class AttentionResults(NamedTuple):
    """What a model did with images, by their names."""

    distance: AttentionDistance
    crops: dict[str, Box]
    """The part of the image that it saw."""
    rollouts: dict[str, Array]
    details: ImageDetails
    first_inputs: Tensor
    """The pixels of the first batch."""


def iterate_inputs(
    images: Sequence[FigureImage],
    channels: int,
    preprocess: PreprocessConfig,
    on_unreadable: Callable[[str, str], None],
) -> Iterator[InputBatch]:
    """The images a few at a time; of those that cannot be read `refuse` is told the name and the reason."""
    for start in range(0, len(images), BATCH_IMAGES):
        found = []
        for image in images[start : start + BATCH_IMAGES]:
            try:
                whole = decode(image.read(), channels, name=image.name)
                view = make_eval_input(whole, preprocess)
            except DataError as error:
                on_unreadable(image.name, str(error))
            else:
                found.append((image.name, compute_crop_box(whole.shape[1], whole.shape[2], preprocess), view))
        if found:
            names, within, pixels = zip(*found, strict=True)
            yield InputBatch(names, within, normalize(torch.stack(pixels), preprocess))


def compute_attention_results(
    trained: Trained,
    batches: Iterator[InputBatch],
    detailed_names: Collection[str],
    report_progress: Callable[[int], None] = lambda _: None,
    *,
    faithfulness: bool = False,
) -> AttentionResults:
    """Distances and rollouts of all images, and the details of those whose names are `drawn`.

    `tell` is called with how many images are done.
    """
    within: dict[str, Box] = {}
    rollouts: dict[str, Array] = {}
    details, first = ImageDetails(), list[Tensor]()
    chance = torch.Generator().manual_seed(_SEED)

    def iterate_stats() -> Iterator[AttentionStats]:
        for batch in batches:
            first[:] = first or [batch.inputs]
            part = attention.compute_attention_stats(trained.model, batch.inputs)
            within.update(zip(batch.names, batch.crops, strict=True))
            rollouts.update(zip(batch.names, part.rollout, strict=True))
            places = [place for place, name in enumerate(batch.names) if name in detailed_names]
            if places:
                names, pixels = tuple(batch.names[place] for place in places), batch.inputs[places]
                details.heads.update(zip(names, part.heads[places], strict=True))
                details.tokens.update(zip(names, attention.compute_token_colors(trained.model, pixels), strict=True))
                details.gram_matrices[names] = compute_gram_matrices(trained.model, pixels)
                if trained.model.config.classes:
                    orders = {"rollout": part.rollout[places]} if faithfulness else {}
                    _add_relevance(trained, names, pixels, details, orders, chance)
            report_progress(len(rollouts))
            yield part

    distance = attention.average_attention_stats(trained.model, iterate_stats())
    return AttentionResults(distance, within, rollouts, details, first[0])


def _add_relevance(
    trained: Trained,
    names: tuple[str, ...],
    inputs: Tensor,
    details: ImageDetails,
    orders: dict[str, Array],
    generator: torch.Generator,
) -> None:
    """Add the relevance of some images to their answers, and where there are other orders the curves of all."""
    found = compute_relevance(trained.model, inputs)
    probabilities = _compute_probabilities(trained, torch.from_numpy(found.logits))
    labels = trained.labels or tuple(f"class {number}" for number in range(trained.model.config.classes))
    for name, shown, number, row in zip(names, found.maps, found.classes.tolist(), probabilities, strict=True):
        details.relevance[name] = shown
        details.predictions[name] = TopPrediction(number, labels[number], float(row[number]))
    if orders:
        orders = {"relevance": found.maps} | orders
        orders["random"] = torch.rand(found.maps.shape, generator=generator).numpy()
    device = next(trained.model.parameters()).device
    for order, maps in orders.items():
        curves = measure_faithfulness(
            lambda images: _compute_probabilities(trained, trained.model(images)),
            inputs.to(device),
            maps,
            found.classes,
        )
        details.faithfulness.setdefault(order, []).append(curves)


def _compute_probabilities(trained: Trained, logits: Tensor) -> Tensor:
    return logits_to_probabilities(logits, temperature=trained.temperature, multi_label=trained.multi_label)


def draw_attention_images(
    image: FigureImage, results: Mapping[str, AttentionResults], paths: Mapping[str, Path]
) -> None:
    """Write rollout, relevance, tokens and heads of one image to their `places`, those of several models side by side.

    All but the heads are at the image's own size, or at a multiple where it is small.
    """
    whole = decode(image.read(), name=image.name)
    large = max(1, min(math.ceil(_MIN_SIDE / min(whole.shape[1:])), _MAX_SIDE // max(whole.shape[1:])))
    small = _HEAD_SIDE / max(whole.shape[1:])
    enlarged, reduced = image_grids.resize_image(whole, large), image_grids.resize_image(whole, small)
    several = len(results) > 1
    shown: dict[str, list[tuple[str, NDArray[np.uint8]]]] = {kind: [] for kind in paths}
    for model, each in results.items():
        box, details = each.crops[image.name], each.details
        rolled = image_grids.overlay_attention(enlarged, each.rollouts[image.name], box.scale(large))
        shown["rollout"].append((model if several else "attention rollout", rolled))
        colours = image_grids.paint_patch_colors(enlarged, details.tokens[image.name], box.scale(large))
        shown["tokens"].append((model if several else "tokens", colours))
        if image.name in details.relevance:
            answer = details.predictions[image.name]
            title = f"{model if several else 'relevance'}: {answer.probability:.0%} {answer.label}"
            relevant = image_grids.overlay_attention(enlarged, details.relevance[image.name], box.scale(large))
            shown["relevance"].append((title, relevant))
        for number, head in enumerate(details.heads[image.name], 1):
            title = f"{f'{model}, ' * several}head {number}"
            shown["heads"].append((title, image_grids.overlay_attention(reduced, head, box.scale(small))))
    plain = Path(image.name).name, image_grids.to_rgb_array(enlarged)
    counts = [len(each.details.heads[image.name]) for each in results.values()]
    columns = next(
        (number for number in _HEAD_COLUMNS if not any(count % number for count in counts)), _HEAD_COLUMNS[0]
    )
    for kind, panels in shown.items():
        panels = panels if kind == "heads" else [plain, *panels]
        titles, drawn = zip(*panels, strict=True)
        image_grids.write_panels(drawn, titles, paths[kind], columns=columns if kind == "heads" else len(panels))


def make_file_name(name: str, taken: Collection[str]) -> str:
    """An image's name without folder and ending, in letters that any disk takes, and like none that is `taken`."""
    plain = re.sub(r"[^\w.-]", "_", Path(name).stem, flags=re.ASCII)[:80]
    others = (f"{plain}-{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([plain], others) if each not in taken)
