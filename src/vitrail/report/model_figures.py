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
from vitrail.data.loader import iter_eval_batches
from vitrail.data.transforms import normalize
from vitrail.errors import DataError, UsageError
from vitrail.figures import attention, embeddings, image_grids
from vitrail.formatting import pluralize
from vitrail.model import cost
from vitrail.model.vit import ViT
from vitrail.report import data_uris, svg_charts
from vitrail.report.forward_trace import ForwardTrace, trace_forward
from vitrail.report.run_facts import PredictionRecord, RunFacts, get_image_name
from vitrail.weights.trained import Trained

MAX_MISTAKES = 12
MAX_ROLLOUTS = 6
MAX_DISTANCE_IMAGES = 128  # images that attention distance is measured on
_MAX_CPU_IMAGES = 32
_CPU_BUDGET = 2 * 10**11  # multiply-adds: some seconds of two cores
_BATCH_IMAGES = 32
_IMAGE_SIDE = 192  # pixels of a picture: on a phone two of them stand side by side
_MAX_TILES = 16  # along a side of the position similarity, and cells of a tile: all of them would be megabytes
_MAX_HEADS = 12  # whose attention is shown
_FRAME_COLOR = (213, 94, 0)


class ReportImage(NamedTuple):
    """An image with what was said of it, if anything was."""

    name: str
    prediction: PredictionRecord | None
    image: str
    rollout: str | None
    """Where the model looked; None of a model without attention."""


class ReportFigure(NamedTuple):
    """A figure: a picture as data URI or a chart."""

    image: str | Markup
    caption: str


class TraceFigures(NamedTuple):
    """The walk of an image, and its pictures."""

    trace: ForwardTrace
    name: str
    image: str
    patches: str
    """The image cut up, the patch that is followed framed."""
    followed_patch: str
    heads: tuple[tuple[int, tuple[str, ...]], ...]
    """By layer, from 1: what each head attends to."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """All of it; a sentence stands for what cannot be shown."""

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
    """What is to be seen of a run's weights, and of its images unless a sentence says why they are not here."""
    trained.model.to(device).eval()
    filters, positions = _make_filter_figure(trained), _catch_reason(lambda: _make_position_figure(trained))
    if isinstance(images, str):
        gone = dict.fromkeys(("distance", "entropy", "rollouts", "mistakes", "trace"), images)
        return ModelFigures(filters=filters, positions=positions, **gone)
    right = [answer.image for answer in facts.predictions if answer.right]
    some = sample_evenly(right or list(images.rows), MAX_ROLLOUTS)
    distance, entropy = _make_distance_figures(trained, images)
    return ModelFigures(
        filters=filters,
        positions=positions,
        distance=distance,
        entropy=entropy,
        rollouts=_catch_reason(lambda: _make_report_images(trained, images, some, require_attention=True)),
        mistakes=_make_report_images(
            trained, images, [answer.image for answer in facts.list_mistakes()[:MAX_MISTAKES]]
        ),
        trace=_catch_reason(lambda: _make_trace_figures(trained, images, some[0])),
    )


# --- images ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RunImages:
    """Images of a run that may be shown: those that its answers are of, or some of val where there are none."""

    split: Split
    rows: dict[str, int]
    """By name."""
    predictions: dict[str, PredictionRecord]
    classes: int


def find_run_images(facts: RunFacts, dataset: Dataset) -> RunImages:
    """Where the images of a run lie in its set; an error where the set is not the one it was."""
    of = "val" if facts.result is None else facts.result.split
    split = dataset.splits.get(of)
    if split is None:
        raise DataError(f"{facts.data} has no {of} any more")
    answers = {answer.image: answer for answer in facts.predictions}
    if not answers:
        return RunImages(
            split,
            {split.get_image_name(row): row for row in sample_evenly(range(len(split)), MAX_DISTANCE_IMAGES)},
            {},
            len(dataset.classes),
        )
    rows = {name: row for row in range(len(split)) if (name := split.get_image_name(row)) in answers}
    if left := len(answers) - len(rows):
        raise DataError(f"{facts.data} is not what it was: {left:,} of {len(answers):,} measured images are not there")
    return RunImages(split, rows, answers, len(dataset.classes))


def _load_inputs(trained: Trained, images: RunImages, names: Sequence[str]) -> Tensor:
    """uint8 (B, C, S, S) as the model sees them."""
    assert trained.preprocess is not None
    chosen = Split(images.split.store, np.array([images.split.rows[images.rows[name]] for name in names]))
    batches = iter_eval_batches(chosen, trained.preprocess, batch_size=_BATCH_IMAGES, num_classes=images.classes)
    return torch.cat([batch.pixels for batch in batches])


def _normalize_inputs(trained: Trained, inputs: Tensor) -> Tensor:
    assert trained.preprocess is not None
    return normalize(inputs.to(next(trained.model.parameters()).device), trained.preprocess)


def _make_report_images(
    trained: Trained, images: RunImages, names: Sequence[str], *, require_attention: bool = False
) -> tuple[ReportImage, ...]:
    """The images, and where the model looked; one that has no attention is refused if it must be `attentive`."""
    if not names:
        return ()
    views = _load_inputs(trained, images, names)
    maps: Sequence[NDArray[np.float32] | None] = [None] * len(names)
    if require_attention or isinstance(trained.model, ViT):
        maps = list(attention.compute_rollout(trained.model, _normalize_inputs(trained, views)))
    return tuple(
        _make_report_image(name, images.predictions.get(name), view, rollout)
        for name, view, rollout in zip(names, views.numpy(), maps, strict=True)
    )


def _make_report_image(
    name: str, prediction: PredictionRecord | None, pixels: NDArray[np.uint8], rollout: NDArray[np.float32] | None
) -> ReportImage:
    image = _resize_input(pixels)
    over = None if rollout is None else data_uris.encode_webp(image_grids.overlay_attention(image, rollout))
    return ReportImage(get_image_name(name), prediction, data_uris.encode_webp(image_grids.to_rgb_array(image)), over)


def _resize_input(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return image_grids.resize_image(pixels, _IMAGE_SIDE / max(pixels.shape[1:]))


T = TypeVar("T")


def sample_evenly(values: Sequence[T], number: int) -> list[T]:
    """So many of the values, evenly from first to last."""
    places = np.linspace(0, len(values) - 1, min(number, len(values))).round().astype(int)
    return [values[place] for place in places.tolist()]


# --- figures 1 to 4 --------------------------------------------------------------------------------------------------


def _catch_reason(make: Callable[[], T]) -> T | str:
    """What is made, or the sentence that says why this model has none."""
    try:
        return make()
    except UsageError as error:
        return f"{str(error)[:1].upper()}{str(error)[1:]}."


def _make_filter_figure(trained: Trained) -> ReportFigure:
    seen = embeddings.compute_filters(trained.model)
    tiles = np.round(255 * seen.tiles).astype(np.uint8)
    tiles = tiles[..., :3] if tiles.shape[-1] >= 3 else tiles[..., :1].repeat(3, axis=-1)
    caption = (
        f"The first {len(tiles)} principal components of the filters of the {seen.layer}, each"
        f" {tiles.shape[1]} × {tiles.shape[2]} pixels. They hold {seen.explained_variance_ratio.sum():.0%} of the filters' variance,"
        f" the first alone {seen.explained_variance_ratio[0]:.0%}."
    )
    return ReportFigure(
        data_uris.encode_png(data_uris.arrange_tiles(data_uris.enlarge_tiles(tiles, 48), 7, 6)), caption
    )


def _make_position_figure(trained: Trained) -> ReportFigure:
    maps = embeddings.compute_position_similarity(trained.model).maps  # (R, C, R, C)
    step = -(-max(maps.shape) // _MAX_TILES)
    some = [range((side - 1) % step // 2, side, step) for side in maps.shape]
    seen = maps[np.ix_(*some)]
    rows, columns = seen.shape[:2]
    low = float(seen.min())
    tiles = data_uris.apply_heat_colormap(seen.reshape(-1, rows, columns), low, 1.0, 448 // max(rows, columns))
    every = "" if step == 1 else f" of {maps.shape[0]} × {maps.shape[1]}, one in {step} each way"
    caption = (
        f"How alike the position embedding of a patch is to every other's: one tile for each of {rows} × {columns}"
        f" patches{every}, in its place. Cosines from {low:.2f} (dark) to 1 (bright)."
    )
    return ReportFigure(
        data_uris.encode_png(data_uris.arrange_tiles(tiles, columns, max(1, tiles.shape[2] // 8))), caption
    )


def _make_distance_figures(trained: Trained, images: RunImages) -> tuple[ReportFigure | str, ReportFigure | str]:
    chosen = sample_evenly(list(images.rows), _choose_image_count(trained))
    views = _load_inputs(trained, images, chosen)
    batches = (_normalize_inputs(trained, part) for part in views.split(_BATCH_IMAGES))
    seen = _catch_reason(lambda: attention.compute_attention_distance(trained.model, batches))
    if isinstance(seen, str):
        return seen, seen
    far = f"{seen.uniform_distance:.0f}"
    distance = svg_charts.draw_heads(
        seen.distance.astype(float), label="mean attention distance by layer", y_label="pixels"
    )
    entropy = svg_charts.draw_heads(seen.entropy.astype(float), label="attention entropy by layer", y_label="bits")
    return (
        ReportFigure(distance, f"How far each head looks, in pixels of the input, a dot a head, the line their mean; over"
              f" {pluralize(seen.images, 'image')}. Attention to all patches alike would give {far}."),
        ReportFigure(entropy, f"How widely: the entropy of each head's attention. All patches alike would give"
              f" {seen.uniform_entropy:.1f} bits."),
    )  # fmt: skip


def _choose_image_count(trained: Trained) -> int:
    """How many images attention is measured on: as many as take some seconds."""
    if next(trained.model.parameters()).device.type != "cpu":
        return MAX_DISTANCE_IMAGES
    return max(4, min(_MAX_CPU_IMAGES, _CPU_BUDGET // cost.count_multiply_adds(trained.model.config)))


# --- the walk --------------------------------------------------------------------------------------------------------


def _make_trace_figures(trained: Trained, images: RunImages, name: str) -> TraceFigures:
    [pixels] = _load_inputs(trained, images, [name])
    way, view = trace_forward(trained, pixels), pixels.numpy()
    stride = way.config.stride
    top, left = (stride * place for place in way.followed_patch)
    patch = image_grids.to_rgb_array(view[:, top : top + stride, left : left + stride])
    heads = tuple((each.layer, tuple(map(_encode_head, each.heads[:_MAX_HEADS]))) for each in way.attention)
    return TraceFigures(
        way,
        get_image_name(name),
        data_uris.encode_webp(image_grids.to_rgb_array(_resize_input(view))),
        data_uris.encode_webp(_draw_patches(view, way)),
        data_uris.encode_png(data_uris.enlarge_tiles(patch, 96)),
        heads,
    )


def _encode_head(attention: NDArray[np.float32]) -> str:
    return data_uris.encode_png(data_uris.apply_heat_colormap(attention, 0.0, float(attention.max()), 64))


def _draw_patches(pixels: NDArray[np.uint8], trace: ForwardTrace) -> NDArray[np.uint8]:
    """(C, S, S) -> (H, W, 4): the patches apart from each other, the one that is followed framed."""
    rows, columns = trace.grid
    side = max(6, 240 // max(rows, columns))  # pixels of a patch here
    picture = Image.fromarray(image_grids.to_rgb_array(pixels)).resize(
        (columns * side, rows * side), Image.Resampling.BOX
    )
    patches = np.array(picture).reshape(rows, side, columns, side, 3).swapaxes(1, 2)  # (R, C, side, side, 3)
    gap = max(2, side // 6)
    sheet = data_uris.arrange_tiles(patches.reshape(-1, side, side, 3), columns, gap)
    top, left = (place * (side + gap) for place in trace.followed_patch)
    frame = sheet[max(0, top - gap) : top + side + gap, max(0, left - gap) : left + side + gap]
    frame[frame[..., 3] == 0] = (*_FRAME_COLOR, 255)  # what is transparent there
    return sheet
