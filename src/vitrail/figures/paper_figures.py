"""Figures of what is inside models, of one or of two side by side: the paper's, faithfulness curves and CKA.

Each function takes what the other modules here computed, by the name of the model, and writes a PNG for print.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.figures.attention import AttentionDistance
from vitrail.figures.embeddings import Filters, PositionSimilarity
from vitrail.figures.faithfulness import Faithfulness
from vitrail.figures.plots import BLUE, GRAY, INK, ORANGE, open_figure, shorten_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

_DPI = 200
_TILES_PER_ROW = 7  # tiles in a row of filters, as in the paper
_TILE_INCHES = 0.62  # inches
_MAX_TILES = 16  # the most position maps along a side; of a larger grid some are drawn, evenly spread
_MOSAIC_INCHES = 3.3  # inches, about
_MAX_NAME_LETTERS = 40  # of a model's name
_DISTANCE_LABELS = ("mean attention distance (pixels)", "attention entropy (bits)")


def plot_filters(filters: Mapping[str, Filters], path: Path) -> None:
    """Draw the components as tiles in reading order, each with the share of the variance that it explains."""
    rows = max(-(-len(each.tiles) // _TILES_PER_ROW) for each in filters.values())
    width, height = _TILES_PER_ROW * 1.14 * _TILE_INCHES, rows * 1.36 * _TILE_INCHES
    gap = 0.35
    with open_figure(path, (len(filters) * (width + gap), height), tight=True, dpi=_DPI) as figure:
        for place, (name, each) in enumerate(filters.items()):
            axes = _add_axes(figure, place * (width + gap), 0, width, height)
            axes.set_axis_off()
            share = float(each.explained_variance_ratio.sum())
            what = f"{len(each.tiles)} principal components of the {each.layer}, {share:.0%} of its variance"
            axes.set_title(f"{_shorten_model_name(name)}\n{what}" if name else what, fontsize=9)
            for number, (tile, share) in enumerate(zip(each.tiles, each.explained_variance_ratio, strict=True)):
                left, upper = number % _TILES_PER_ROW * 1.14, number // _TILES_PER_ROW * 1.36
                shades = tile[..., :3] if tile.shape[-1] >= 3 else tile[..., :1].repeat(3, axis=-1)
                axes.imshow(shades, extent=(left, left + 1, upper + 1, upper), interpolation="nearest")
                axes.text(left + 0.5, upper + 1.06, f"{share:.1%}", fontsize=6, color=GRAY, ha="center", va="top")
            axes.set(xlim=(0, _TILES_PER_ROW * 1.14), ylim=(rows * 1.36, 0))


def plot_position_similarity(
    similarities: Mapping[str, PositionSimilarity],
    path: Path,
    *,
    initial: Mapping[str, PositionSimilarity] | None = None,
) -> None:
    """Draw a map of cosines for each patch, a row of the figure for each model, and the profiles beside them.

    `initial` are the same networks before training.
    """
    beginnings = initial or {}
    step, line = _MOSAIC_INCHES + 0.75, _MOSAIC_INCHES + 1.0
    right = (1 + bool(beginnings)) * step - 0.55  # where the maps end
    with open_figure(path, (right + 4, len(similarities) * line), tight=True, dpi=_DPI) as figure:
        for place, (name, each) in enumerate(similarities.items()):
            top = (len(similarities) - place) * line
            drawn = _plot_mosaic(figure, 0, top, each.maps, _shorten_model_name(name) if name else "trained")
            height = max(_MOSAIC_INCHES / 2, drawn.axes.get_position().height * figure.get_figheight())
            if name in beginnings:
                _plot_mosaic(figure, step, top, beginnings[name].maps, "at initialisation")
            bar = figure.colorbar(drawn, cax=_add_axes(figure, right, top - height, 0.09, height))
            bar.set_ticks([-1, -0.5, 0, 0.5, 1])
            bar.set_label("cosine similarity", labelpad=2)
            bar.outline.set_visible(False)
            _plot_profiles(_add_axes(figure, right + 1.35, top - height, 2.8, height), each, beginnings.get(name))


def _plot_mosaic(figure: "Figure", left: float, top: float, maps: NDArray[np.float32], title: str) -> "AxesImage":
    """The maps in the places of their patches, a white line between them; of a large grid every second or so."""
    step = -(-max(maps.shape) // _MAX_TILES)
    rows, columns = (range((side - 1) % step // 2, side, step) for side in maps.shape[:2])
    lined = np.pad(maps[np.ix_(rows, columns)], ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=np.nan)
    picture = lined.transpose(0, 2, 1, 3).reshape(len(rows) * lined.shape[2], -1)[:-1, :-1]
    dots = max(
        1, _MOSAIC_INCHES * _DPI // max(picture.shape)
    )  # of a cell: a whole number, or some would be wider than others
    height, width = (side * dots / _DPI for side in picture.shape)
    axes = _add_axes(figure, left, top - height, width, height)
    high, wide = (_compute_axis_ends(cells, side) for cells, side in zip(picture.shape, maps.shape[2:], strict=True))
    extent = (wide[0], wide[1], high[1], high[0])
    drawn = axes.imshow(picture, cmap="viridis", vmin=-1, vmax=1, extent=extent, interpolation="nearest", aspect="auto")
    for axis, places, inches in ((axes.xaxis, columns, width), (axes.yaxis, rows, height)):
        every = max(-(-len(places) // 8), round(0.3 * len(places) / inches))  # numbers that do not touch
        axis.set_ticks(range(1, len(places) + 1, every), [str(place + 1) for place in places[::every]])
    axes.set(xlabel="input patch column", ylabel="input patch row")
    axes.set_title(title)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)
    return drawn


def _compute_axis_ends(cells: int, side: int) -> tuple[float, float]:
    """Where an axis of so many cells begins and ends if maps of `side` cells have their middles at 1, 2, ..."""
    first = 1 - side / 2 / (side + 1)
    return first, first + cells / (side + 1)


def _plot_profiles(axes: "Axes", trained: PositionSimilarity, initial: PositionSimilarity | None) -> None:
    from matplotlib.ticker import MaxNLocator

    for each, style, when in ((trained, "-", ""), (initial, ":", ", at initialisation")):
        if each is not None:
            look: dict[str, Any] = {"linestyle": style, "marker": "o", "markersize": 2.5}
            axes.plot(each.by_row, color=BLUE, label=f"rows apart{when}", **look)
            axes.plot(each.by_column, color=ORANGE, label=f"columns apart{when}", **look)
    axes.set(xlabel="patches apart, in one column or one row", ylabel="mean cosine similarity")
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.legend(fontsize=8)


def plot_attention_distance(
    distances: Mapping[str, AttentionDistance], path: Path, *, initial: Mapping[str, AttentionDistance] | None = None
) -> None:
    """Draw each head's mean attention distance and entropy over the depth, a column of the figure for each model.

    `initial` are the same networks before training.
    """
    beginnings = initial or {}
    rows, columns = (1, 2) if len(distances) == 1 else (2, len(distances))
    with open_figure(path, (4.8 * columns, 0.2 + 3.5 * rows), dpi=_DPI) as figure:
        panels = figure.subplots(rows, columns).reshape(2, len(distances))
        for field, label, line in zip(("distance", "entropy"), _DISTANCE_LABELS, panels, strict=True):
            top = max(_get_highest(each, field) for each in (*distances.values(), *beginnings.values()))
            for (name, each), axes in zip(distances.items(), line, strict=True):
                _plot_heads(axes, each, beginnings.get(name), field)
                axes.set(ylim=(0, 1.08 * top or 1), ylabel=label)
        for (name, each), axes in zip(distances.items(), panels[0], strict=True):
            images = f"{each.images:,} image{'s' * (each.images > 1)}"
            axes.set_title(f"{_shorten_model_name(name)}, {images}" if name else images)
        panels[0, 0].legend(fontsize=8, loc="lower right")


def _plot_heads(axes: "Axes", trained: AttentionDistance, initial: AttentionDistance | None, field: str) -> None:
    from matplotlib.ticker import MaxNLocator

    values = getattr(trained, field)  # (layers, H)
    layers = np.arange(1, len(values) + 1)
    if initial is not None:
        means = getattr(initial, field).mean(axis=1)
        axes.plot(layers, means, color=GRAY, linestyle="--", linewidth=1.2, label="at initialisation, mean")
    axes.plot(np.repeat(layers, values.shape[1]), values.ravel(), "o", color=BLUE, alpha=0.65, mew=0, label="a head")
    axes.plot(layers, values.mean(axis=1), color=ORANGE, label="mean of the heads")
    even = getattr(trained, f"uniform_{field}")
    axes.axhline(even, color=INK, linestyle=":", linewidth=1, label="attention to all patches alike")
    axes.set(xlabel="network depth (layer)", xlim=(0.4, len(layers) + 0.6))
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))


def plot_faithfulness(curves_by_model: Mapping[str, Mapping[str, Faithfulness]], path: Path) -> None:
    """Draw the mean probability over deletion and insertion, a row of the figure for each model, with the areas.

    `found` are a model's curves by what patches are ordered by: relevance, rollout, random.
    """
    from matplotlib.ticker import PercentFormatter

    looks = {"relevance": (ORANGE, "-"), "rollout": (BLUE, "-"), "random": (GRAY, "--")}
    with open_figure(path, (9.6, 3.7 * len(curves_by_model)), dpi=_DPI) as figure:
        panels = figure.subplots(len(curves_by_model), 2, squeeze=False, sharey="row")
        for (name, curves), line in zip(curves_by_model.items(), panels, strict=True):
            for field, axes in zip(("deletion", "insertion"), line, strict=True):
                for order, each in curves.items():
                    colour, style = looks[order]
                    label = f"{order}, area {getattr(each, f'{field}_area'):.3f}"
                    means = getattr(each, field).mean(axis=0)
                    axes.plot(each.fractions, means, color=colour, linestyle=style, marker="o", label=label)
                images = len(next(iter(curves.values())).deletion)
                axes.set_title(
                    f"{field.capitalize()}, {_shorten_model_name(name)}, {images:,} image{'s' * (images > 1)}"
                )
                axes.set(xlabel=f"patches {'removed' if field == 'deletion' else 'inserted'}, first of the order first")
                axes.set(xlim=(-0.02, 1.02), ylim=(0, None))
                axes.legend(fontsize=8, loc="upper right" if field == "deletion" else "lower right")
                axes.xaxis.set_major_formatter(PercentFormatter(1))
                axes.yaxis.set_major_formatter(PercentFormatter(1))
            line[0].set_ylabel("mean probability of the class")


def plot_cka(similarities: Mapping[tuple[str, str], NDArray[np.float32]], path: Path) -> None:
    """Draw the similarity of layers as a map for each pair of models; layer 0 is the embedding."""
    from matplotlib.ticker import MaxNLocator

    side = 3.6
    with open_figure(path, (0.9 + side * len(similarities), side), dpi=_DPI) as figure:
        panels = figure.subplots(1, len(similarities), squeeze=False)[0]
        for ((one, other), values), axes in zip(similarities.items(), panels, strict=True):
            drawn = axes.imshow(values, cmap="magma", vmin=0, vmax=1, origin="lower", interpolation="nearest")
            axes.set_title("Within " + _shorten_model_name(one) if one == other else "Between both")
            within = "layer (0: the embedding)"
            axes.set(xlabel=within if one == other else f"layer of {_shorten_model_name(other)}")
            axes.set(ylabel=within if one == other else f"layer of {_shorten_model_name(one)}")
            axes.grid(visible=False)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(9, integer=True))
        bar = figure.colorbar(drawn, ax=list(panels), shrink=0.85)
        bar.set_label("linear CKA")
        bar.outline.set_visible(False)


def _get_highest(distances: AttentionDistance, field: str) -> float:
    return max(float(getattr(distances, field).max()), getattr(distances, f"uniform_{field}"))


def _shorten_model_name(model: str) -> str:
    return shorten_names([model], _MAX_NAME_LETTERS)[0]


def _add_axes(figure: "Figure", left: float, bottom: float, width: float, height: float) -> "Axes":
    """Axes at a place in inches."""
    across, down = figure.get_size_inches()
    return figure.add_axes((left / across, bottom / down, width / across, height / down))
