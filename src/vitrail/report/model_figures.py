"""Figures of the report that need the weights or the images: mistakes, attention, filters, and the forward trace.

    B images   R, C rows and columns of patches

A sentence replaces what cannot be shown: a ResNet has no attention, and images may be missing.
"""

import base64
import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.dataset import Dataset, Split
from vitrail.data.transforms import normalize
from vitrail.errors import DataError, UsageError
from vitrail.formatting import pluralize
from vitrail.model import cost
from vitrail.model.vit import ViT
from vitrail.report import svg_charts
from vitrail.report.forward_trace import ForwardTrace, trace_forward
from vitrail.report.result_files import load_inputs
from vitrail.report.run_facts import PredictionRecord, RunFacts, get_image_name
from vitrail.visualization import Array, Pixels, attention, embeddings, image_grids, plots
from vitrail.weights.trained import Trained, is_label_predicted, logits_to_probabilities, require_preprocess

MAX_MISTAKES = 12
MAX_ROLLOUTS = 6
MAX_DISTANCE_IMAGES = 128  # for measuring attention distance
_MAX_CPU_IMAGES = 32
_CPU_BUDGET = 2 * 10**11  # multiply-adds: a few seconds on two cores
_BATCH_IMAGES = 32
_IMAGE_SIDE = 192  # pixels: two images fit side by side on a phone
_MAX_TILES = 16  # along a side of the position similarity, and cells along a tile: more would take megabytes
_MAX_HEADS = 12
_FRAME_COLOR = (213, 94, 0)


class ReportLabel(NamedTuple):
    """A label of a multi-label image that it has, or that is predicted."""

    name: str
    kind: Literal["right", "extra", "missing"]
    probability: float
    threshold: float


class ReportImage(NamedTuple):
    """An image, with its prediction if there is one."""

    name: str
    prediction: PredictionRecord | None
    image: str
    rollout: str | None  # the attention rollout; None for a model without attention
    labels: tuple[ReportLabel, ...] = ()  # of a multi-label model


class ReportFigure(NamedTuple):
    """A figure: an image as data URI, or a chart."""

    image: str | Markup
    caption: str


class TraceFigures(NamedTuple):
    """The forward trace of an image, with its pictures."""

    trace: ForwardTrace
    name: str
    image: str
    patches: str  # the image cut into patches, with a frame around the followed patch
    followed_patch: str
    heads: tuple[tuple[int, tuple[str, ...]], ...]  # by layer, from 1: the attention of each head


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """All figures of a model; a sentence replaces one that cannot be shown."""

    filters: ReportFigure | str
    positions: ReportFigure | str
    distance: ReportFigure | str
    entropy: ReportFigure | str
    rollouts: tuple[ReportImage, ...] | str
    mistakes: tuple[ReportImage, ...] | str
    trace: TraceFigures | str


def make_model_figures(
    facts: RunFacts, trained: Trained, images: "RunImages | str", device: torch.device
) -> ModelFigures:
    """Make the figures of a run's weights and images; `images` may be a sentence that says why there are none."""
    trained.model.to(device).eval()
    filters, positions = _make_filter_figure(trained), _catch_reason(lambda: _make_position_figure(trained))
    if isinstance(images, str):
        missing = dict.fromkeys(("distance", "entropy", "rollouts", "mistakes", "trace"), images)
        return ModelFigures(filters=filters, positions=positions, **missing)
    correct = [prediction.image for prediction in facts.predictions if prediction.correct]
    samples = sample_evenly(correct or list(images.rows), MAX_ROLLOUTS)
    mistakes = [mistake.image for mistake in facts.list_mistakes()[:MAX_MISTAKES]]
    distance, entropy = _make_distance_figures(trained, images)
    return ModelFigures(
        filters=filters,
        positions=positions,
        distance=distance,
        entropy=entropy,
        rollouts=_catch_reason(lambda: _make_report_images(trained, images, samples, require_attention=True)),
        mistakes=_make_report_images(trained, images, mistakes),
        trace=_catch_reason(lambda: _make_trace_figures(trained, images, samples[0])),
    )


# --- images ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RunImages:
    """Images of a run that can be shown: those with predictions, or a sample of val if there are none."""

    split: Split
    rows: dict[str, int]  # by name
    predictions: dict[str, PredictionRecord]


def find_run_images(facts: RunFacts, dataset: Dataset) -> RunImages:
    """Find the images of a run in its dataset; raise an error if the dataset has changed."""
    split_name = "val" if facts.result is None else facts.result.split
    split = dataset.splits.get(split_name)
    if split is None:
        raise DataError(f"{facts.data} no longer has a split {split_name}")
    predictions = {prediction.image: prediction for prediction in facts.predictions}
    if not predictions:
        samples = sample_evenly(range(len(split)), MAX_DISTANCE_IMAGES)
        return RunImages(split, {split.get_image_name(row): row for row in samples}, {})
    rows = {name: row for row in range(len(split)) if (name := split.get_image_name(row)) in predictions}
    if missing := len(predictions) - len(rows):
        raise DataError(f"{facts.data} has changed: {missing:,} of {len(predictions):,} evaluated images are missing")
    return RunImages(split, rows, predictions)


def _load_inputs(trained: Trained, images: RunImages, names: Sequence[str]) -> Tensor:
    """Load model inputs, uint8 (B, C, S, S)."""
    return load_inputs(images.split, [images.rows[name] for name in names], require_preprocess(trained))


def _normalize_inputs(trained: Trained, inputs: Tensor) -> Tensor:
    return normalize(inputs.to(next(trained.model.parameters()).device), require_preprocess(trained))


def _make_report_images(
    trained: Trained, images: RunImages, names: Sequence[str], *, require_attention: bool = False
) -> tuple[ReportImage, ...]:
    """Load images with their attention rollout; `require_attention` refuses a model that has none."""
    if not names:
        return ()
    inputs = _load_inputs(trained, images, names)
    rollouts: Sequence[Array | None] = [None] * len(names)
    if require_attention or isinstance(trained.model, ViT):
        rollouts = list(attention.compute_rollout(trained.model, _normalize_inputs(trained, inputs)))
    labels = _list_labels(trained, images, names, inputs) if trained.multi_label else [()] * len(names)
    report_images = []
    for name, pixels, rollout, own_labels in zip(names, inputs.numpy(), rollouts, labels, strict=True):
        image = _resize_input(pixels)
        overlay = None if rollout is None else encode_webp(image_grids.overlay_attention(image, rollout))
        encoded = encode_webp(image_grids.to_rgb_array(image))
        prediction = images.predictions.get(name)
        report_images.append(ReportImage(get_image_name(name), prediction, encoded, overlay, own_labels))
    return tuple(report_images)


@torch.inference_mode()
def _list_labels(
    trained: Trained, images: RunImages, names: Sequence[str], inputs: Tensor
) -> list[tuple[ReportLabel, ...]]:
    """The labels that each image has, and those that are predicted, the likeliest first."""
    logits = trained.model(_normalize_inputs(trained, inputs)).float().cpu()
    probabilities = logits_to_probabilities(logits, trained.temperature, multi_label=True)
    predicted = is_label_predicted(probabilities, trained.label_thresholds).tolist()
    thresholds, classes = trained.label_thresholds or (0.5,) * logits.shape[1], trained.labels or ()
    listed = []
    for name, values, is_predicted in zip(names, probabilities.tolist(), predicted, strict=True):
        truth = images.split.get_labels(images.rows[name])
        kinds: dict[int, Literal["right", "extra", "missing"]] = {
            label: "missing" if not is_predicted[label] else "right" if label in truth else "extra"
            for label in range(len(classes))
            if label in truth or is_predicted[label]
        }
        rows = [ReportLabel(classes[label], kind, values[label], thresholds[label]) for label, kind in kinds.items()]
        listed.append(tuple(sorted(rows, key=lambda row: -row.probability)))
    return listed


def _resize_input(pixels: Pixels) -> Pixels:
    return image_grids.resize_image(pixels, _IMAGE_SIDE / max(pixels.shape[1:]))


T = TypeVar("T")


def sample_evenly(values: Sequence[T], count: int) -> list[T]:
    """Take `count` of the values, evenly spaced from first to last."""
    indices = np.linspace(0, len(values) - 1, min(count, len(values))).round().astype(int)
    return [values[index] for index in indices.tolist()]


# --- filters, positions and attention --------------------------------------------------------------------------------


def _catch_reason(make: Callable[[], T]) -> T | str:
    """Make a figure, or return the sentence that says why this model has none."""
    try:
        return make()
    except UsageError as error:
        return f"{str(error)[:1].upper()}{str(error)[1:]}."


def _make_filter_figure(trained: Trained) -> ReportFigure:
    filters = embeddings.compute_filters(trained.model)
    tiles = np.round(255 * filters.tiles).astype(np.uint8)
    tiles = tiles[..., :3] if tiles.shape[-1] >= 3 else tiles[..., :1].repeat(3, axis=-1)
    ratios = filters.explained_variance_ratio
    caption = (
        f"The first {len(tiles)} principal components of the filters of the {filters.layer}, each"
        f" {tiles.shape[1]} × {tiles.shape[2]} pixels. They explain {ratios.sum():.0%} of the filters' variance, the"
        f" first alone {ratios[0]:.0%}."
    )
    sheet = _arrange_tiles(_enlarge_tiles(tiles, 48), 7, 6)
    return ReportFigure(_encode_png(sheet), caption)


def _make_position_figure(trained: Trained) -> ReportFigure:
    maps = embeddings.compute_position_similarity(trained.model).maps  # (R, C, R, C)
    step = -(-max(maps.shape) // _MAX_TILES)
    samples = maps[np.ix_(*(range((side - 1) % step // 2, side, step) for side in maps.shape))]
    rows, columns = samples.shape[:2]
    low = float(samples.min())
    tiles = _apply_heat_colormap(samples.reshape(-1, rows, columns), low, 1.0, 448 // max(rows, columns))
    sampling = "" if step == 1 else f" of {maps.shape[0]} × {maps.shape[1]}, one in {step} each way"
    caption = (
        f"The similarity of each patch's position embedding to all others: one tile for each of {rows} × {columns}"
        f" patches{sampling}, at its place. Cosines from {low:.2f} (dark) to 1 (bright)."
    )
    sheet = _arrange_tiles(tiles, columns, max(1, tiles.shape[2] // 8))
    return ReportFigure(_encode_png(sheet), caption)


def _make_distance_figures(trained: Trained, images: RunImages) -> tuple[ReportFigure | str, ReportFigure | str]:
    names = sample_evenly(list(images.rows), _choose_image_count(trained))
    inputs = _load_inputs(trained, images, names)
    batches = (_normalize_inputs(trained, batch) for batch in inputs.split(_BATCH_IMAGES))
    stats = _catch_reason(lambda: attention.compute_attention_distance(trained.model, batches))
    if isinstance(stats, str):
        return stats, stats
    distance = svg_charts.draw_heads(stats.distance, label="mean attention distance by layer", y_label="pixels")
    entropy = svg_charts.draw_heads(stats.entropy, label="attention entropy by layer", y_label="bits")
    distance_caption = (
        f"The mean attention distance in pixels of the model input, over {pluralize(stats.images, 'image')}: one dot"
        f" for each head, and the line of their mean. Uniform attention would have {stats.uniform_distance:.0f}."
    )
    uniform_bits = f"{stats.uniform_entropy:.1f} bits"
    entropy_caption = f"The entropy of each head's attention. Uniform attention would have {uniform_bits}."
    return ReportFigure(distance, distance_caption), ReportFigure(entropy, entropy_caption)


def _choose_image_count(trained: Trained) -> int:
    """How many images to measure attention on: as many as take a few seconds."""
    if next(trained.model.parameters()).device.type != "cpu":
        return MAX_DISTANCE_IMAGES
    return max(4, min(_MAX_CPU_IMAGES, _CPU_BUDGET // cost.count_multiply_adds(trained.model.config)))


# --- the forward trace -----------------------------------------------------------------------------------------------


def _make_trace_figures(trained: Trained, images: RunImages, name: str) -> TraceFigures:
    [model_input] = _load_inputs(trained, images, [name])
    trace, pixels = trace_forward(trained, model_input), model_input.numpy()
    stride = trace.config.stride
    top, left = (stride * index for index in trace.followed_patch)
    patch = image_grids.to_rgb_array(pixels[:, top : top + stride, left : left + stride])
    return TraceFigures(
        trace,
        name=get_image_name(name),
        image=encode_webp(image_grids.to_rgb_array(_resize_input(pixels))),
        patches=encode_webp(_draw_patches(pixels, trace)),
        followed_patch=_encode_png(_enlarge_tiles(patch, 96)),
        heads=tuple((layer.layer, tuple(map(_encode_head, layer.heads[:_MAX_HEADS]))) for layer in trace.attention),
    )


def _encode_head(weights: Array) -> str:
    return _encode_png(_apply_heat_colormap(weights, 0.0, float(weights.max()), 64))


def _draw_patches(pixels: Pixels, trace: ForwardTrace) -> Pixels:
    """(C, S, S) -> (H, W, 4): the patches with gaps between them, and a frame around the followed one."""
    (rows, columns), stride = trace.grid, trace.config.stride
    pixels = pixels[:, : rows * stride, : columns * stride]
    side = max(6, 240 // max(rows, columns))  # of a drawn patch, in pixels
    image = Image.fromarray(image_grids.to_rgb_array(pixels))
    resized = image.resize((columns * side, rows * side), Image.Resampling.BOX)
    patches = np.array(resized).reshape(rows, side, columns, side, 3).swapaxes(1, 2)  # (R, C, side, side, 3)
    gap = max(2, side // 6)
    sheet = _arrange_tiles(patches.reshape(-1, side, side, 3), columns, gap)
    top, left = (index * (side + gap) for index in trace.followed_patch)
    frame = sheet[max(0, top - gap) : top + side + gap, max(0, left - gap) : left + side + gap]
    frame[frame[..., 3] == 0] = (*_FRAME_COLOR, 255)  # the transparent gap around the patch
    return sheet


# --- images as data URIs, so that the page needs no other file -------------------------------------------------------


def encode_webp(pixels: Pixels) -> str:
    """Encode (H, W, 3), or 4 channels with transparency, as WebP."""
    return _encode_data_uri(pixels, "WEBP", quality=80)


def _encode_png(pixels: Pixels) -> str:
    """Encode the same as PNG, for images of few colors or pixels."""
    return _encode_data_uri(pixels, "PNG", optimize=True)


def encode_image_file(path: Path, max_width: int) -> str:
    """Encode an image file, reduced to at most `max_width` pixels."""
    with Image.open(path) as file:
        image = file.convert("RGB")
    image.thumbnail((max_width, 10 * max_width), Image.Resampling.LANCZOS)
    return encode_webp(np.asarray(image))


def _encode_data_uri(pixels: Pixels, image_format: str, **options: object) -> str:
    content = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(content, image_format, **options)
    return f"data:image/{image_format.lower()};base64,{base64.b64encode(content.getvalue()).decode()}"


def _apply_heat_colormap(values: NDArray[np.floating], low: float, high: float, side: int) -> Pixels:
    """(..., R, C) -> (..., H, W, 3): dark at `low`, bright at `high`, the longer side about `side` pixels."""
    scaled = np.clip((values - low) / (high - low if high > low else 1.0), 0, 1)
    return _enlarge_tiles(plots.get_heat_colormap()[(255 * scaled).round().astype(np.uint8)], side)


def _enlarge_tiles(tiles: Pixels, side: int) -> Pixels:
    """Enlarge (..., H, W, 3) with sharp pixels, by the whole factor that brings the longer side near `side`."""
    factor = max(1, side // max(tiles.shape[-3:-1]))
    return tiles.repeat(factor, axis=-3).repeat(factor, axis=-2)


def _arrange_tiles(tiles: Pixels, columns: int, gap: int) -> Pixels:
    """(n, H, W, 3) -> one image (H', W', 4), transparent between the tiles."""
    count, height, width = tiles.shape[:3]
    rows = -(-count // columns)
    sheet = np.zeros((rows * (height + gap) - gap, columns * (width + gap) - gap, 4), dtype=np.uint8)
    for index, tile in enumerate(tiles):
        top, left = index // columns * (height + gap), index % columns * (width + gap)
        sheet[top : top + height, left : left + width, :3] = tile
        sheet[top : top + height, left : left + width, 3] = 255
    return sheet
