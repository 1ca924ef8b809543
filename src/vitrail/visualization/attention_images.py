"""Attention of a model on named images: measurements, and pictures of them.

B images of a batch   C channels   S image side
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from vitrail.config import PreprocessConfig
from vitrail.data.decode import ImageSource, decode
from vitrail.data.image_paths import ImageRef
from vitrail.data.transforms import make_eval_input, normalize
from vitrail.errors import DataError
from vitrail.files import write_atomically
from vitrail.inference.classifier import Classifier
from vitrail.runtime import workers
from vitrail.visualization import Array, Pixels, attention, image_grids
from vitrail.visualization.attention import AttentionDistance, AttentionStats
from vitrail.visualization.cka import GramMatrices, compute_gram_matrices
from vitrail.visualization.crops import Box, compute_crop_box
from vitrail.visualization.faithfulness import Faithfulness, measure_faithfulness
from vitrail.visualization.relevance import compute_relevance
from vitrail.weights.trained import Trained, logits_to_probabilities

BATCH_IMAGES = 16
_MIN_SIDE = 224  # pixels: images with a shorter side are enlarged
_MAX_SIDE = 2048  # pixels: the longest side after that
_MAX_ROLLOUT_SIDE = 1024  # pixels: longer sides of the images under `predict --attention` are reduced
_HEAD_SIDE = 256  # pixels of the longer side of a head's picture
_SEED = 0  # of the random order
_HEAD_COLUMNS = (6, 5, 4, 3)  # the first that fills all rows is taken


class FigureImage(NamedTuple):
    """An image for figures."""

    name: str
    read: Callable[[], ImageSource]


class InputBatch(NamedTuple):
    """Model inputs, with the names of their images."""

    names: tuple[str, ...]
    crops: tuple[Box, ...]
    inputs: Tensor  # (B, C, S, S), normalized


class TopPrediction(NamedTuple):
    """The most probable class."""

    class_index: int
    label: str
    probability: float


@dataclasses.dataclass(frozen=True)
class ImageDetails:
    """Measurements of the images that are drawn, by their names."""

    heads: dict[str, Array] = dataclasses.field(default_factory=dict)
    tokens: dict[str, Array] = dataclasses.field(default_factory=dict)
    relevance: dict[str, Array] = dataclasses.field(default_factory=dict)
    """For the predicted class; a model without a head has neither relevance nor predictions."""
    predictions: dict[str, TopPrediction] = dataclasses.field(default_factory=dict)
    faithfulness: dict[str, list[Faithfulness]] = dataclasses.field(default_factory=dict)
    """By the order in which patches are removed: one entry for each batch."""
    gram_matrices: dict[tuple[str, ...], GramMatrices] = dataclasses.field(default_factory=dict)
    """Of the layers, by the image names of a batch."""


class AttentionResults(NamedTuple):
    """Attention of one model on images, by their names."""

    distance: AttentionDistance
    crops: dict[str, Box]  # the part of each image inside the model input
    rollouts: dict[str, Array]
    details: ImageDetails
    first_inputs: Tensor  # the inputs of the first batch


def iterate_inputs(
    images: Sequence[FigureImage],
    channels: int,
    preprocess: PreprocessConfig,
    on_unreadable: Callable[[str, str], None],
) -> Iterator[InputBatch]:
    """Yield the images in batches; `on_unreadable` gets the name of each unreadable one and the reason."""
    for start in range(0, len(images), BATCH_IMAGES):
        samples = []
        for image in images[start : start + BATCH_IMAGES]:
            try:
                pixels = decode(image.read(), channels, name=image.name)
                model_input = make_eval_input(pixels, preprocess)
            except DataError as error:
                on_unreadable(image.name, str(error))
            else:
                crop = compute_crop_box(pixels.shape[1], pixels.shape[2], preprocess)
                samples.append((image.name, crop, model_input))
        if samples:
            names, crops, inputs = zip(*samples, strict=True)
            yield InputBatch(names, crops, normalize(torch.stack(inputs), preprocess))


def compute_attention_results(
    trained: Trained,
    batches: Iterator[InputBatch],
    detailed_names: Collection[str],
    report_progress: Callable[[int], None] = lambda _: None,
    *,
    faithfulness: bool = False,
) -> AttentionResults:
    """Measure distances and rollouts of all images, and the details of those in `detailed_names`.

    `report_progress` is called with the number of images done.
    """
    crops: dict[str, Box] = {}
    rollouts: dict[str, Array] = {}
    details, first_inputs = ImageDetails(), list[Tensor]()
    generator = torch.Generator().manual_seed(_SEED)

    def iterate_stats() -> Iterator[AttentionStats]:
        for batch in batches:
            first_inputs[:] = first_inputs or [batch.inputs]
            stats = attention.compute_attention_stats(trained.model, batch.inputs)
            crops.update(zip(batch.names, batch.crops, strict=True))
            rollouts.update(zip(batch.names, stats.rollout, strict=True))
            indices = [index for index, name in enumerate(batch.names) if name in detailed_names]
            if indices:
                names, inputs = tuple(batch.names[index] for index in indices), batch.inputs[indices]
                details.heads.update(zip(names, stats.heads[indices], strict=True))
                details.tokens.update(zip(names, attention.compute_token_colors(trained.model, inputs), strict=True))
                details.gram_matrices[names] = compute_gram_matrices(trained.model, inputs)
                if trained.model.config.classes:
                    orders = {"rollout": stats.rollout[indices]} if faithfulness else {}
                    _add_relevance(trained, names, inputs, details, orders, generator)
            report_progress(len(rollouts))
            yield stats

    distance = attention.average_attention_stats(trained.model, iterate_stats())
    return AttentionResults(distance, crops, rollouts, details, first_inputs[0])


def _add_relevance(
    trained: Trained,
    names: tuple[str, ...],
    inputs: Tensor,
    details: ImageDetails,
    orders: dict[str, Array],
    generator: torch.Generator,
) -> None:
    """Add the relevance of patches to the predicted classes, and if there are `orders` the faithfulness of all."""
    relevance = compute_relevance(trained.model, inputs)
    probabilities = _compute_probabilities(trained, torch.from_numpy(relevance.logits))
    labels = trained.labels or tuple(f"class {index}" for index in range(trained.model.config.classes))
    for name, values, index, row in zip(names, relevance.maps, relevance.classes.tolist(), probabilities, strict=True):
        details.relevance[name] = values
        details.predictions[name] = TopPrediction(index, labels[index], float(row[index]))
    if orders:
        orders = {"relevance": relevance.maps} | orders
        orders["random"] = torch.rand(relevance.maps.shape, generator=generator).numpy()
    device = next(trained.model.parameters()).device
    for order, maps in orders.items():
        curves = measure_faithfulness(
            lambda images: _compute_probabilities(trained, trained.model(images)),
            inputs.to(device),
            maps,
            relevance.classes,
        )
        details.faithfulness.setdefault(order, []).append(curves)


def _compute_probabilities(trained: Trained, logits: Tensor) -> Tensor:
    return logits_to_probabilities(logits, temperature=trained.temperature, multi_label=trained.multi_label)


def draw_attention_images(
    image: FigureImage, results: Mapping[str, AttentionResults], paths: Mapping[str, Path]
) -> None:
    """Write rollout, relevance, tokens and heads of one image to their `paths`, with several models side by side.

    All but the heads have the image's own size, or a multiple of it if the image is small.
    """
    pixels = decode(image.read(), name=image.name)
    factor = max(1, min(math.ceil(_MIN_SIDE / min(pixels.shape[1:])), _MAX_SIDE // max(pixels.shape[1:])))
    enlarged = image_grids.resize_image(pixels, factor)
    panels: dict[str, list[tuple[str, Pixels]]] = {kind: [] for kind in paths}
    for kind in panels.keys() - {"heads"}:
        panels[kind].append((Path(image.name).name, image_grids.to_rgb_array(enlarged)))
    for model, result in results.items():
        title = model if len(results) > 1 else ""
        for kind, caption, panel in _draw_model_panels(image.name, enlarged, factor, result):
            panels[kind].append((_format_caption(kind, title, caption), panel))
        for number, panel in enumerate(_draw_heads(image.name, pixels, result), 1):
            panels["heads"].append((f"{title}, head {number}" if title else f"head {number}", panel))
    counts = [len(result.details.heads[image.name]) for result in results.values()]
    head_columns = next((n for n in _HEAD_COLUMNS if not any(count % n for count in counts)), _HEAD_COLUMNS[0])
    for kind, titled in panels.items():
        captions, images = zip(*titled, strict=True)
        image_grids.write_panels(
            images, captions, paths[kind], columns=head_columns if kind == "heads" else len(titled)
        )


def _draw_model_panels(
    name: str, pixels: Pixels, factor: float, result: AttentionResults
) -> Iterator[tuple[str, str, Pixels]]:
    """Yield kind, prediction and picture of everything but the heads, over an image enlarged by `factor`."""
    crop, details = result.crops[name].scale(factor), result.details
    yield "rollout", "", image_grids.overlay_attention(pixels, result.rollouts[name], crop)
    yield "tokens", "", image_grids.paint_patch_colors(pixels, details.tokens[name], crop)
    if name in details.relevance:
        prediction = details.predictions[name]
        caption = f"{prediction.probability:.0%} {prediction.label}"
        yield "relevance", caption, image_grids.overlay_attention(pixels, details.relevance[name], crop)


def _format_caption(kind: str, model: str, prediction: str) -> str:
    title = model or ("attention rollout" if kind == "rollout" else kind)
    return f"{title}: {prediction}" if prediction else title


def _draw_heads(name: str, pixels: Tensor, result: AttentionResults) -> Iterator[Pixels]:
    factor = _HEAD_SIDE / max(pixels.shape[1:])
    reduced = image_grids.resize_image(pixels, factor)
    for head in result.details.heads[name]:
        yield image_grids.overlay_attention(reduced, head, result.crops[name].scale(factor))


def make_file_name(name: str, taken: Collection[str]) -> str:
    """An image's name without folder and suffix, in characters that any disk accepts, and not in `taken`."""
    stem = re.sub(r"[^\w.-]", "_", Path(name).stem, flags=re.ASCII)[:80]
    numbered = (f"{stem}-{number}" for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([stem], numbered) if candidate not in taken)


# --- `vitrail predict --attention` -----------------------------------------------------------------------------------


def iterate_picture_paths(images: Iterator[ImageRef], folder: Path) -> Iterator[tuple[ImageRef, Path]]:
    """Name a picture for each image; the names are remembered, since no two may be the same."""
    taken: set[str] = set()
    for image in images:
        taken.add(name := make_file_name(image.name, taken))
        yield image, folder / f"{name}.png"


def draw_rollouts(
    classifier: Classifier, images: Sequence[tuple[ImageRef, Path]], inputs: Sequence[Tensor], threads: int
) -> None:
    """Draw what the model attends to: each image, decoded once more, in gray under its rollout in color."""
    batch = normalize(torch.stack(list(inputs)), classifier.preprocess)
    rollouts = attention.compute_rollout(classifier.model, batch)
    pictures = [(image, path, rollout) for (image, path), rollout in zip(images, rollouts, strict=True)]
    for _ in workers.prefetch_batches(lambda picture: _draw_overlay(classifier, *picture), [pictures], threads):
        pass


def _draw_overlay(classifier: Classifier, image: ImageRef, path: Path, rollout: Array) -> None:
    whole = decode(image.read(), classifier.model.config.channels, name=image.name)
    height, width = whole.shape[1:]
    factor = min(math.ceil(max(1, _MIN_SIDE / min(height, width))), _MAX_ROLLOUT_SIDE / max(height, width))
    crop = compute_crop_box(height, width, classifier.preprocess).scale(factor)
    overlay = image_grids.overlay_attention(image_grids.resize_image(whole, factor), rollout, crop)
    with write_atomically(path, overwrite=True) as fresh:
        Image.fromarray(overlay).save(fresh, "PNG")
