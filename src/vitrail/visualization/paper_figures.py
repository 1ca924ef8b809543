"""The paper's figures of one model, or of two side by side, with faithfulness curves and CKA.

Each function takes results of the other modules here, by model name, and writes a PNG for print. matplotlib is
imported inside functions, as in plots.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.formatting import pluralize
from vitrail.visualization import Array
from vitrail.visualization.attention import AttentionDistance
from vitrail.visualization.embeddings import Filters, PositionSimilarity
from vitrail.visualization.faithfulness import Faithfulness
from vitrail.visualization.plots import BLUE, GRAY, INK, ORANGE, format_as_percent, open_figure, shorten_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

_DPI = 200
_TILES_PER_ROW = 7  # as in the paper
_TILE_INCHES = 0.62
_MAX_TILES = 16  # the most position maps along a side; a larger grid is sampled evenly
_MOSAIC_INCHES = 3.3  # about
_MAX_NAME_LETTERS = 40  # of a model's name
_DISTANCE_LABELS = ("mean attention distance (pixels)", "attention entropy (bits)")


def plot_overview(
    panels: Mapping[str, tuple[Filters, PositionSimilarity, AttentionDistance]],
    path: Path,
    *,
    initial: Mapping[str, AttentionDistance],
) -> None:
    """Plot the paper's figure 7: filters, position similarity and attention distance, one row for each model."""
    tops = [_MOSAIC_INCHES + 0.6 + row * (_MOSAIC_INCHES + 1.2) for row in reversed(range(len(panels)))]
    maps_left = _TILES_PER_ROW * 1.14 * _TILE_INCHES + 0.6
    heads_left = maps_left + _MOSAIC_INCHES + 0.9
    with open_figure(path, (heads_left + 4.6, tops[0]), tight=True, dpi=_DPI) as figure:
        for (name, (filters, similarity, distance)), top in zip(panels.items(), tops, strict=True):
            _plot_tiles(figure, 0, top, filters, name)
            _plot_mosaic(figure, maps_left, top, similarity.maps, "cosine similarity of positions")
            axes = _add_axes(figure, heads_left, top - _MOSAIC_INCHES, 4.6, _MOSAIC_INCHES)
            _plot_heads(axes, distance, initial.get(name), "distance")
            axes.set(ylim=(0, None), ylabel=_DISTANCE_LABELS[0])
            axes.set_title(f"attention, {pluralize(distance.images, 'image')}")
            axes.legend(fontsize=8, loc="lower right")


def plot_filters(filters: Mapping[str, Filters], path: Path) -> None:
    """Plot the principal components as tiles in reading order, each with its share of the variance."""
    width, gap = _TILES_PER_ROW * 1.14 * _TILE_INCHES, 0.35
    top = max(_count_tile_rows(components) for components in filters.values()) * 1.36 * _TILE_INCHES
    with open_figure(path, (len(filters) * (width + gap), top), tight=True, dpi=_DPI) as figure:
        for column, (name, components) in enumerate(filters.items()):
            _plot_tiles(figure, column * (width + gap), top, components, name)


def _count_tile_rows(components: Filters) -> int:
    return -(-len(components.tiles) // _TILES_PER_ROW)


def _plot_tiles(figure: "Figure", left: float, top: float, components: Filters, name: str) -> None:
    tiles, ratios, rows = components.tiles, components.explained_variance_ratio, _count_tile_rows(components)
    columns, height = _TILES_PER_ROW * 1.14, rows * 1.36 * _TILE_INCHES
    axes = _add_axes(figure, left, top - height, columns * _TILE_INCHES, height)
    axes.set_axis_off()
    variance = f"{float(ratios.sum()):.0%} of its variance"
    title = f"{len(tiles)} principal components of the {components.layer}, {variance}"
    axes.set_title(f"{_shorten_model_name(name)}\n{title}" if name else title, fontsize=9)
    for index, (tile, ratio) in enumerate(zip(tiles, ratios, strict=True)):
        x, y = index % _TILES_PER_ROW * 1.14, index // _TILES_PER_ROW * 1.36
        rgb = tile[..., :3] if tile.shape[-1] >= 3 else tile[..., :1].repeat(3, axis=-1)
        axes.imshow(rgb, extent=(x, x + 1, y + 1, y), interpolation="nearest")
        axes.text(x + 0.5, y + 1.06, f"{ratio:.1%}", fontsize=6, color=GRAY, ha="center", va="top")
    axes.set(xlim=(0, columns), ylim=(rows * 1.36, 0))


def plot_position_similarity(
    similarities: Mapping[str, PositionSimilarity],
    path: Path,
    *,
    initial: Mapping[str, PositionSimilarity] | None = None,
) -> None:
    """Plot a map of cosines for each patch, one row of the figure for each model, and the profiles beside them.

    `initial` are the same networks before training.
    """
    initial = initial or {}
    step, row_height = _MOSAIC_INCHES + 0.75, _MOSAIC_INCHES + 1.0
    right = (1 + bool(initial)) * step - 0.55  # where the maps end
    with open_figure(path, (right + 4, len(similarities) * row_height), tight=True, dpi=_DPI) as figure:
        for row, (name, similarity) in enumerate(similarities.items()):
            top = (len(similarities) - row) * row_height
            mosaic = _plot_mosaic(figure, 0, top, similarity.maps, _shorten_model_name(name) if name else "trained")
            height = max(_MOSAIC_INCHES / 2, mosaic.axes.get_position().height * figure.get_figheight())
            if name in initial:
                _plot_mosaic(figure, step, top, initial[name].maps, "at initialization")
            bar = figure.colorbar(mosaic, cax=_add_axes(figure, right, top - height, 0.09, height))
            bar.set_ticks([-1, -0.5, 0, 0.5, 1])
            bar.set_label("cosine similarity", labelpad=2)
            bar.outline.set_visible(False)
            _plot_profiles(_add_axes(figure, right + 1.35, top - height, 2.8, height), similarity, initial.get(name))


def _plot_mosaic(figure: "Figure", left: float, top: float, maps: Array, title: str) -> "AxesImage":
    """Draw each patch's map at the patch's place, with white lines between; a large grid is sampled evenly."""
    step = -(-max(maps.shape) // _MAX_TILES)
    rows, columns = (range((side - 1) % step // 2, side, step) for side in maps.shape[:2])
    padded = np.pad(maps[np.ix_(rows, columns)], ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=np.nan)
    mosaic = padded.transpose(0, 2, 1, 3).reshape(len(rows) * padded.shape[2], -1)[:-1, :-1]
    dots = max(1, _MOSAIC_INCHES * _DPI // max(mosaic.shape))  # of a cell: a whole number, so that widths are equal
    height, width = (side * dots / _DPI for side in mosaic.shape)
    axes = _add_axes(figure, left, top - height, width, height)
    y_ends, x_ends = (_compute_axis_ends(cells, side) for cells, side in zip(mosaic.shape, maps.shape[2:], strict=True))
    image = axes.imshow(
        mosaic, cmap="viridis", vmin=-1, vmax=1, extent=(*x_ends, *y_ends[::-1]), interpolation="nearest", aspect="auto"
    )
    for axis, patches, inches in ((axes.xaxis, columns, width), (axes.yaxis, rows, height)):
        every = max(-(-len(patches) // 8), round(0.3 * len(patches) / inches))  # so that numbers do not touch
        axis.set_ticks(range(1, len(patches) + 1, every), [str(index + 1) for index in patches[::every]])
    axes.set(xlabel="input patch column", ylabel="input patch row")
    axes.set_title(title)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)
    return image


def _compute_axis_ends(cells: int, side: int) -> tuple[float, float]:
    """The ends of an axis of so many cells on which maps of `side` cells are centered at 1, 2, ..."""
    first = 1 - side / 2 / (side + 1)
    return first, first + cells / (side + 1)


def _plot_profiles(axes: "Axes", trained: PositionSimilarity, initial: PositionSimilarity | None) -> None:
    from matplotlib.ticker import MaxNLocator

    for similarity, style, suffix in ((trained, "-", ""), (initial, ":", ", at initialization")):
        if similarity is not None:
            options: dict[str, Any] = {"linestyle": style, "marker": "o", "markersize": 2.5}
            axes.plot(similarity.by_row, color=BLUE, label=f"rows apart{suffix}", **options)
            axes.plot(similarity.by_column, color=ORANGE, label=f"columns apart{suffix}", **options)
    axes.set(xlabel="patches apart, in one column or one row", ylabel="mean cosine similarity")
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.legend(fontsize=8)


def plot_attention_distance(
    distances: Mapping[str, AttentionDistance], path: Path, *, initial: Mapping[str, AttentionDistance] | None = None
) -> None:
    """Plot each head's mean attention distance and entropy over the depth, one column of the figure for each model.

    `initial` are the same networks before training.
    """
    initial = initial or {}
    rows, columns = (1, 2) if len(distances) == 1 else (2, len(distances))
    with open_figure(path, (4.8 * columns, 0.2 + 3.5 * rows), dpi=_DPI) as figure:
        panels = figure.subplots(rows, columns).reshape(2, len(distances))
        for field, label, row in zip(("distance", "entropy"), _DISTANCE_LABELS, panels, strict=True):
            top = max(_get_highest(distance, field) for distance in (*distances.values(), *initial.values()))
            for (name, distance), axes in zip(distances.items(), row, strict=True):
                _plot_heads(axes, distance, initial.get(name), field)
                axes.set(ylim=(0, 1.08 * top or 1), ylabel=label)
        for (name, distance), axes in zip(distances.items(), panels[0], strict=True):
            images = pluralize(distance.images, "image")
            axes.set_title(f"{_shorten_model_name(name)}, {images}" if name else images)
        panels[0, 0].legend(fontsize=8, loc="lower right")


def _plot_heads(axes: "Axes", trained: AttentionDistance, initial: AttentionDistance | None, field: str) -> None:
    from matplotlib.ticker import MaxNLocator

    values = getattr(trained, field)  # (layers, H)
    layers = np.arange(1, len(values) + 1)
    if initial is not None:
        means = getattr(initial, field).mean(axis=1)
        axes.plot(layers, means, color=GRAY, linestyle="--", linewidth=1.2, label="at initialization, mean")
    axes.plot(np.repeat(layers, values.shape[1]), values.ravel(), "o", color=BLUE, alpha=0.65, mew=0, label="a head")
    axes.plot(layers, values.mean(axis=1), color=ORANGE, label="mean of the heads")
    uniform = getattr(trained, f"uniform_{field}")
    axes.axhline(uniform, color=INK, linestyle=":", linewidth=1, label="uniform attention")
    axes.set(xlabel="network depth (layer)", xlim=(0.4, len(layers) + 0.6))
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))


def plot_faithfulness(curves_by_model: Mapping[str, Mapping[str, Faithfulness]], path: Path) -> None:
    """Plot the mean probability over deletion and insertion, one row of the figure for each model, with the areas.

    The curves of a model are by the order of the patches: relevance, rollout, random.
    """
    with open_figure(path, (9.6, 3.7 * len(curves_by_model)), dpi=_DPI) as figure:
        panels = figure.subplots(len(curves_by_model), 2, squeeze=False, sharey="row")
        for (name, curves), row in zip(curves_by_model.items(), panels, strict=True):
            for field, axes in zip(("deletion", "insertion"), row, strict=True):
                images = pluralize(len(next(iter(curves.values())).deletion), "image")
                axes.set_title(f"{field.capitalize()}, {_shorten_model_name(name)}, {images}")
                _plot_faithfulness_curves(axes, curves, field)
            row[0].set_ylabel("mean probability of the class")


def _plot_faithfulness_curves(axes: "Axes", curves: Mapping[str, Faithfulness], field: str) -> None:
    styles = {"relevance": (ORANGE, "-"), "rollout": (BLUE, "-"), "random": (GRAY, "--")}
    for order, curve in curves.items():
        color, style = styles[order]
        label = f"{order}, area {getattr(curve, f'{field}_area'):.3f}"
        means = getattr(curve, field).mean(axis=0)
        axes.plot(curve.fractions, means, color=color, linestyle=style, marker="o", label=label)
    axes.set(xlabel=f"patches {'removed' if field == 'deletion' else 'inserted'}, most relevant first")
    axes.set(xlim=(-0.02, 1.02), ylim=(0, None))
    axes.legend(fontsize=8, loc="upper right" if field == "deletion" else "lower right")
    format_as_percent(axes.xaxis, axes.yaxis)


def plot_cka(similarities: Mapping[tuple[str, str], Array], path: Path) -> None:
    """Plot the similarity of layers as a map for each pair of models; layer 0 is the embedding."""
    from matplotlib.ticker import MaxNLocator

    side = 3.6
    with open_figure(path, (0.9 + side * len(similarities), side), dpi=_DPI) as figure:
        panels = figure.subplots(1, len(similarities), squeeze=False)[0]
        for ((one, other), values), axes in zip(similarities.items(), panels, strict=True):
            image = axes.imshow(values, cmap="magma", vmin=0, vmax=1, origin="lower", interpolation="nearest")
            axes.set_title("Within " + _shorten_model_name(one) if one == other else "Between both")
            own_label = "layer (0: the embedding)"
            axes.set(xlabel=own_label if one == other else f"layer of {_shorten_model_name(other)}")
            axes.set(ylabel=own_label if one == other else f"layer of {_shorten_model_name(one)}")
            axes.grid(visible=False)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(9, integer=True))
        bar = figure.colorbar(image, ax=list(panels), shrink=0.85)
        bar.set_label("linear CKA")
        bar.outline.set_visible(False)


def _get_highest(distances: AttentionDistance, field: str) -> float:
    return max(float(getattr(distances, field).max()), getattr(distances, f"uniform_{field}"))


def _shorten_model_name(model: str) -> str:
    return shorten_name(model, _MAX_NAME_LETTERS)


def _add_axes(figure: "Figure", left: float, bottom: float, width: float, height: float) -> "Axes":
    """Add axes at a position in inches."""
    figure_width, figure_height = figure.get_size_inches()
    return figure.add_axes((left / figure_width, bottom / figure_height, width / figure_width, height / figure_height))
