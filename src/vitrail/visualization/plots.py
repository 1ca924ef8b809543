"""Plots of numbers: training curves, confusion matrices, reliability diagrams, risk-coverage curves, bars.

Only this module and paper_figures.py import matplotlib, and only inside functions: the import takes longer than many
commands. Figures do without pyplot, so they need no display, and a user's styles neither affect them nor are affected.
Equal numbers give equal bytes.
"""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrail.errors import DataError
from vitrail.files import write_atomically
from vitrail.formatting import pluralize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

WHITE, FAINT_GRAY, LIGHT_GRAY, GRAY, INK = "#ffffff", "#e6e6e6", "#b8b8b8", "#8c8c8c", "#333333"
BLUE, SKY_BLUE, ORANGE = "#0072b2", "#56b4e9", "#d55e00"  # safe for color-blind readers (Okabe and Ito, 2008)

MAX_NUMBERED_CLASSES, MAX_NAMED_CLASSES = 30, 120
"""The most classes of a confusion matrix with numbers in its cells, and the most that are all drawn."""

_SCREEN_DPI = 100
_MAX_NAME_LETTERS = 24
_GROUP_COLORS = (BLUE, ORANGE, SKY_BLUE, GRAY)
_STYLE = {
    "figure.dpi": _SCREEN_DPI,
    "font.size": 9,
    "text.parse_math": False,  # a class may be called "$5 or $10"
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRAY,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT_GRAY,
    "xtick.color": GRAY,
    "ytick.color": GRAY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.12,
}


def plot_training_curves(columns: Mapping[str, Sequence[float]], path: Path) -> None:
    """Plot the columns of results.csv over the epochs: losses, accuracies with the best epoch, the learning rate."""
    finite = {name: _mask_nonfinite(values) for name, values in columns.items()}
    if not len(finite["epoch"]):
        raise DataError(f"{path.name} needs at least one epoch; wait until the first has ended")
    with open_figure(path, (12, 3.8)) as figure:
        losses, accuracies, rates = figure.subplots(1, 3)
        _plot_epoch_curves(losses, finite, {"train/loss": ("training", GRAY), "val/loss": ("validation", BLUE)}, span=1)
        accuracy_styles = {"metrics/accuracy_top5": ("top-5", SKY_BLUE), "metrics/accuracy_top1": ("top-1", BLUE)}
        _plot_epoch_curves(accuracies, finite, accuracy_styles, span=0.1)
        _plot_epoch_curves(rates, finite, {"lr/pg0": ("", BLUE)}, span=1)
        losses.set_title("Loss")
        accuracies.set_title("Validation accuracy")
        rates.set_title("Learning rate")
        format_as_percent(accuracies.yaxis)
        rates.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _mark_best_epoch(accuracies, finite["epoch"], finite["metrics/accuracy_top1"])


def plot_confusion_matrix(counts: ArrayLike, labels: Sequence[str], path: Path, *, normalize: bool = False) -> None:
    """Plot how often each class (rows) was predicted as each class (columns): `counts` are whole numbers (L, L).

    If normalized, each row is divided by its sum, and a class without images is blank. If there are too many classes
    to name, only those in the most confused pairs are drawn: nobody could act on a thousand unnamed rows.
    """
    matrix = np.asarray(counts, dtype=np.int64)
    draws_all = len(matrix) <= MAX_NAMED_CLASSES
    classes = list(range(len(matrix))) if draws_all else select_most_confused(matrix, MAX_NUMBERED_CLASSES)
    drawn = matrix[np.ix_(classes, classes)]
    images = matrix.sum(axis=1)[classes, None]
    values = np.where(images > 0, drawn / np.maximum(images, 1), np.nan) if normalize else drawn.astype(float)
    highest = 1 if normalize else max(1, drawn.max())
    numbered = len(classes) <= MAX_NUMBERED_CLASSES
    side = max(0.34, min(1, 6 / len(classes))) if numbered else max(0.115, 10 / len(classes))  # of a cell, in inches
    with open_figure(path, (side * len(classes), side * len(classes)), tight=True) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_title("\n".join(_format_confusion_title(matrix, drawn, normalize)), linespacing=1.5)
        _shade_cells(axes, values / highest)
        _label_cells(axes, shorten_names([labels[index] for index in classes]), side)
        if numbered:
            _number_cells(axes, values, values / highest, side, _format_percent if normalize else _format_count)


def plot_reliability(bin_counts: ArrayLike, bin_correct: ArrayLike, path: Path, *, calibration_error: float) -> None:
    """Draw accuracy against predicted probability, by bins of equal width, and how many predictions each bin has.

    `calibration_error` is the expected calibration error, for the title.
    """
    images = np.asarray(bin_counts)
    shares, bins = np.asarray(bin_correct) / np.maximum(images, 1), len(images)
    middles = (np.arange(bins) + 0.5) / bins
    with open_figure(path, (6, 6.4)) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        upper.bar(middles, shares, width=0.92 / bins, color=BLUE)
        upper.plot([0, 1], [0, 1], color=ORANGE, linestyle="--", label="perfect calibration")
        upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
        upper.legend(loc="upper left")
        upper.set_title(f"Calibration: expected calibration error {calibration_error:.1%}")
        bars = lower.bar(middles, images, width=0.92 / bins, color=GRAY)
        lower.bar_label(bars, [_format_count(count) if count else "" for count in images], fontsize=7, padding=2)
        lower.set(xlabel="predicted probability", ylabel="images", yticks=[])
        lower.margins(y=0.2)
        lower.grid(visible=False)
        format_as_percent(upper.xaxis, upper.yaxis)


def plot_risk_coverage(curves: Mapping[str, tuple[ArrayLike, ArrayLike]], path: Path) -> None:
    """Plot each model's accuracy against its coverage, the share of images it predicts, most confident first."""
    with open_figure(path, (6, 4.4)) as figure:
        axes = figure.subplots()
        for (name, (coverage, accuracy)), color in zip(curves.items(), itertools.cycle(_GROUP_COLORS), strict=False):
            label = shorten_name(name, _MAX_NAME_LETTERS)
            axes.plot(np.asarray(coverage), np.asarray(accuracy), color=color, label=label)
        lowest = min(float(np.asarray(accuracy).min()) for _, accuracy in curves.values())
        axes.set(xlim=(0, 1), ylim=(max(0, lowest - 0.05), 1.005), ylabel="accuracy")
        axes.set(xlabel="coverage: images that get a prediction, most confident first")
        axes.set_title("Accuracy with abstention")
        if len(curves) > 1:
            axes.legend(loc="lower left")
        format_as_percent(axes.xaxis, axes.yaxis)


def plot_f1_by_threshold(threshold_scores: ArrayLike, path: Path) -> None:
    """Plot F1 against one threshold for all labels: rows of the threshold, F1 over all labels and mean over classes."""
    thresholds, micro_f1, macro_f1 = np.asarray(threshold_scores).T
    with open_figure(path, (6, 4.4)) as figure:
        axes = figure.subplots()
        for scores, name, color in ((micro_f1, "all labels", BLUE), (macro_f1, "mean over classes", ORANGE)):
            axes.plot(thresholds, scores, color=color, label=name)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="threshold of all labels", ylabel="F1")
        axes.set_title("F1 by threshold")
        axes.legend(loc="lower left")
        format_as_percent(axes.xaxis, axes.yaxis)


def plot_accuracy_bars(
    groups: Mapping[str, Mapping[str, tuple[float, float | None]]], path: Path, *, title: str
) -> None:
    """Plot accuracies as bars, each group together and in one color, with error bars for standard deviations."""
    count = sum(map(len, groups.values()))
    legend = sum(0.09 * len(name) + 0.6 for name in groups)  # inches, in one row
    with open_figure(path, (max(5, 0.55 * count + 1.5, legend + 0.8), 4.2)) as figure:
        axes = figure.subplots()
        names: list[str] = []
        for (group, values), color in zip(groups.items(), itertools.cycle(_GROUP_COLORS), strict=False):
            positions = list(range(len(names), len(names) + len(values)))
            accuracies = [mean for mean, _ in values.values()]
            deviations = [deviation or 0 for _, deviation in values.values()]
            bars = axes.bar(positions, accuracies, yerr=deviations, ecolor=INK, width=0.72, color=color, label=group)
            axes.bar_label(bars, [f"{100 * accuracy:.1f}" for accuracy in accuracies], fontsize=7, padding=3)
            names += shorten_names(list(values))
        flat = count <= 6
        axes.set_xticks(range(count), names, rotation=0 if flat else 60, ha="center" if flat else "right")
        axes.set(ylim=(0, 1.22), yticks=np.linspace(0, 1, 6), ylabel="accuracy")
        axes.grid(visible=False, axis="x")
        format_as_percent(axes.yaxis)
        axes.set_title(make_printable(title))
        axes.legend(loc="upper left", ncols=len(groups), fontsize=8)


def plot_accuracy_curves(
    curves: Mapping[str, Sequence[tuple[float, float, float | None]]],
    path: Path,
    *,
    title: str,
    x_name: str,
    name_each_x: bool = False,
    colors: Mapping[str, str] | None = None,
) -> None:
    """Plot accuracies over numbers of any scale, a curve for each name: points are (x, mean, standard deviation).

    A band shows the standard deviation, where there are several runs. With `name_each_x` the axis has a number at each
    point, and none between them.
    `colors` are by name.
    """
    with open_figure(path, (6.4, 4.4)) as figure:
        axes = figure.subplots()
        for (name, points), next_color in zip(curves.items(), itertools.cycle(_GROUP_COLORS), strict=False):
            color = (colors or {}).get(name, next_color)
            x, means, deviations = (np.array(column, dtype=float) for column in zip(*sorted(points), strict=True))
            axes.plot(x, means, color=color, marker="o", label=shorten_name(name, _MAX_NAME_LETTERS))
            if np.isfinite(deviations).any():
                axes.fill_between(x, means - deviations, means + deviations, color=color, alpha=0.18, linewidth=0)
        axes.set_xscale("log")
        if name_each_x:
            values = sorted({x for points in curves.values() for x, *_ in points})
            axes.set_xticks(values, [f"{value:g}" for value in values])
            axes.set_xticks([], minor=True)
        axes.set(xlabel=x_name, ylabel="accuracy")
        format_as_percent(axes.yaxis)
        axes.set_title(make_printable(title))
        axes.legend(loc="best", fontsize=8)


def select_most_confused(counts: NDArray[Any], max_classes: int) -> list[int]:
    """`max_classes` classes: those of the most confused pair, either way, then the next pair, partners side by side."""
    mutual = np.triu(counts + counts.T, k=1)
    pairs = np.argwhere(mutual)
    order = np.argsort(-mutual[tuple(pairs.T)], kind="stable")
    chosen: list[int] = []
    for one, other in pairs[order].tolist():
        if len(chosen) == max_classes:
            break
        if one in chosen and other not in chosen:
            chosen.insert(chosen.index(one) + 1, other)
        elif other in chosen and one not in chosen:
            chosen.insert(chosen.index(other) + 1, one)
        elif one not in chosen and len(chosen) + 2 <= max_classes:
            chosen += [one, other]
    others = (index for index in range(len(counts)) if index not in chosen)  # when few classes are confused
    return chosen + list(itertools.islice(others, max_classes - len(chosen)))


def make_printable(text: str) -> str:
    """Put a name on one line, with a question mark for bytes of a file name that are not text."""
    return " ".join(text.split()).encode(errors="replace").decode()


def get_heat_colormap() -> NDArray[np.uint8]:
    """(256, 3): a perceptually uniform colormap from black over red to nearly white."""
    import matplotlib

    return matplotlib.colormaps["magma"](np.arange(256), bytes=True)[:, :3]


def get_font_path() -> Path:
    """The font of all figures, from matplotlib: Latin, Greek, Cyrillic and Arabic, boxes for other scripts."""
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"


def format_as_percent(*all_axis: "Axis") -> None:
    """Write the shares along these axes as percentages."""
    from matplotlib.ticker import PercentFormatter

    for axis in all_axis:
        axis.set_major_formatter(PercentFormatter(1))


@contextlib.contextmanager
def open_figure(
    path: Path, inches: tuple[float, float], *, tight: bool = False, dpi: int = _SCREEN_DPI
) -> Iterator["Figure"]:
    """Open an empty figure in vitrail's style, and write it to `path` unless the block raises.

    `tight` fits the paper to the content, even outside the figure, so that names of any length fit.
    """
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # it is drawn as a box
        figure = Figure(figsize=inches, layout=None if tight else "constrained")
        yield figure
        with write_atomically(path, overwrite=True) as temporary:
            box = "tight" if tight else None
            metadata = {"Software": None}  # matplotlib's version would change the bytes
            figure.savefig(temporary, format="png", dpi=dpi, metadata=metadata, bbox_inches=box, pad_inches=0.15)


def _mask_nonfinite(values: Sequence[float]) -> NDArray[np.float64]:
    """Replace values that are not finite by NaN: curves have gaps there."""
    numbers = np.asarray(values, dtype=float)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def _plot_epoch_curves(
    axes: "Axes", columns: Mapping[str, NDArray[np.float64]], styles: dict[str, tuple[str, str]], *, span: float
) -> None:
    """Plot columns over the epochs, with an axis that covers at least the fraction `span` below the largest value.

    With 1 the axis begins at zero; with less, a flat curve still does not fill it with noise.
    """
    from matplotlib.ticker import MaxNLocator

    epochs = columns["epoch"]
    for name, (label, color) in styles.items():
        finite = np.isfinite(np.pad(columns[name], 1, constant_values=np.nan))
        isolated = finite[1:-1] & ~finite[:-2] & ~finite[2:]  # without a neighbor there is no line
        marked = np.flatnonzero(isolated | (len(epochs) <= 30)).tolist()
        axes.plot(epochs, columns[name], color=color, label=label, marker="o", markevery=marked, clip_on=False)
    values = np.concatenate([columns[name] for name in styles])
    highest = np.nanmax(values, initial=0) or 1
    lowest = min(np.nanmin(values, initial=highest), highest * (1 - span))
    axes.set_ylim(lowest - 0.06 * (highest - lowest) * (lowest > 0), highest + 0.06 * (highest - lowest))
    margin = max(0.5, 0.03 * np.ptp(epochs))
    axes.set_xlim(epochs.min() - margin, epochs.max() + margin)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    if len(styles) > 1:
        axes.legend()


def _mark_best_epoch(axes: "Axes", epochs: NDArray[np.float64], accuracies: NDArray[np.float64]) -> None:
    """Mark the first epoch of the highest accuracy; the kept weights may be later ones of equal accuracy."""
    if np.isnan(accuracies).all():
        return
    best = int(np.nanargmax(accuracies))
    axes.plot(epochs[best], accuracies[best], "o", color=ORANGE, markersize=9, fillstyle="none", markeredgewidth=2)
    axes.set_title(f"best {accuracies[best]:.2%}, epoch {epochs[best].round(1):g}", loc="right", color=ORANGE)


def _format_confusion_title(matrix: NDArray[Any], drawn: NDArray[Any], normalize: bool) -> Iterator[str]:
    images, correct = int(matrix.sum()), int(matrix.trace())
    summary = f"{pluralize(images, 'image')}, accuracy {correct / max(1, images):.1%}"
    if len(drawn) < len(matrix):
        yield f"Confusion matrix of the {len(drawn):,} most confused classes of {len(matrix):,}"
        yield f"{summary}; {drawn.sum() - drawn.trace():,} of {images - correct:,} mistakes are here"
    else:
        yield "Confusion matrix"
        yield summary
    if len(drawn) > MAX_NUMBERED_CLASSES:
        yield f"white: none, full color: {'all of a true class' if normalize else f'{drawn.max():,} images'}"
    elif normalize:
        yield "in % of the images of each true class"


def _shade_cells(axes: "Axes", shades: NDArray[np.float64]) -> None:
    """Shade cells from white to full color for values from 0 to 1: correct blue, mistakes orange, no images gray.

    The shade is the square root of the value, since mistakes, which matter most, are rare.
    """
    from matplotlib.colors import to_rgb

    full = np.where(np.eye(len(shades), dtype=bool)[..., None], to_rgb(BLUE), to_rgb(ORANGE))  # (L, L, 3)
    cells = 1 - (1 - full) * shades[..., None] ** 0.5
    cells[np.isnan(shades)] = to_rgb(FAINT_GRAY)
    axes.imshow(cells, interpolation="nearest")


def _label_cells(axes: "Axes", names: Sequence[str], side: float) -> None:
    positions, size = range(len(names)), min(9, 72 * 0.8 * side)
    flat = max(map(len, names)) * size * 0.65 < 72 * 0.85 * side  # whether the names fit side by side
    axes.set_xticks(positions, names, fontsize=size, rotation=0 if flat else 90)
    axes.set_yticks(positions, names, fontsize=size)
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)


def _number_cells(
    axes: "Axes",
    values: NDArray[np.float64],
    shades: NDArray[np.float64],
    side: float,
    format_value: Callable[[float], str],
) -> None:
    texts = {cell: format_value(value) for cell, value in np.ndenumerate(values) if not np.isnan(value)}
    size = min(9, 72 * 0.8 * side / (0.64 * max(map(len, texts.values()), default=1)))
    for (row, column), text in texts.items():
        shade = shades[row, column]
        color = WHITE if shade > 0.6 else INK if shade else LIGHT_GRAY
        axes.text(column, row, text, color=color, fontsize=size, ha="center", va="center", in_layout=False)


def _format_percent(share: float) -> str:
    """Whole percents; only exact values are shown as 0 or 100."""
    if 0 < share < 0.005:
        return "<1"
    return ">99" if 0.995 <= share < 1 else f"{100 * share:.0f}"


def _format_count(count: float) -> str:
    """A count in about five characters."""
    return f"{count:.0f}" if count < 1e5 else f"{count / 1e3:.0f}k" if count < 1e7 else f"{count / 1e6:.0f}M"


def shorten_name(name: str, max_letters: int) -> str:
    """A name of at most `max_letters` letters; a longer one ends in an ellipsis."""
    text = make_printable(name)
    return text if len(text) <= max_letters else text[: max_letters - 1].rstrip() + "…"


def shorten_names(names: Sequence[str], max_letters: int = _MAX_NAME_LETTERS) -> list[str]:
    """Cut off the ends of long names, or their middles if several names begin alike."""
    texts = [make_printable(name) for name in names]
    shortened = [shorten_name(name, max_letters) for name in names]
    half = max_letters // 2
    return [
        short if text == short or shortened.count(short) == 1 else f"{text[:half].rstrip()}…{text[1 - half :].lstrip()}"
        for text, short in zip(texts, shortened, strict=True)
    ]
