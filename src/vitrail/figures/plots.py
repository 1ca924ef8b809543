"""Figures of numbers: how training went, what is taken for what, how far a probability can be trusted.

With plates.py the only module that imports matplotlib, and only where something is drawn: importing it costs more than
many a command.
Figures are objects of their own, without pyplot, so they need no display; a user's styles neither change them nor are
changed. Equal numbers give equal bytes.
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
    from matplotlib.figure import Figure

WHITE, FAINT_GRAY, LIGHT_GRAY, GRAY, INK = "#ffffff", "#e6e6e6", "#b8b8b8", "#8c8c8c", "#333333"
BLUE, SKY_BLUE, ORANGE = "#0072b2", "#56b4e9", "#d55e00"  # told apart by colour-blind eyes (Okabe and Ito, 2008)

MAX_NUMBERED_CLASSES, MAX_NAMED_CLASSES = 30, 120
"""The most classes of a confusion whose cells are numbered, and the most that are all drawn."""

_SCREEN_DPI = 100  # pixels
_MAX_NAME_LETTERS = 24  # the most of a class's name
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
    """Draw the columns of results.csv over the epochs: losses, accuracies with the best epoch, the learning rate."""
    from matplotlib.ticker import PercentFormatter

    finite = {name: _mask_nonfinite(values) for name, values in columns.items()}
    if not len(finite["epoch"]):
        raise DataError(f"there is no epoch to draw {path.name} of; wait until the first has ended")
    with open_figure(path, (12, 3.8)) as figure:
        losses, accuracies, rates = figure.subplots(1, 3)
        _plot_epoch_curves(losses, finite, {"train/loss": ("training", GRAY), "val/loss": ("validation", BLUE)}, span=1)
        top = {"metrics/accuracy_top5": ("top-5", SKY_BLUE), "metrics/accuracy_top1": ("top-1", BLUE)}
        _plot_epoch_curves(accuracies, finite, top, span=0.1)
        _plot_epoch_curves(rates, finite, {"lr/pg0": ("", BLUE)}, span=1)
        losses.set_title("Loss")
        accuracies.set_title("Validation accuracy")
        rates.set_title("Learning rate")
        accuracies.yaxis.set_major_formatter(PercentFormatter(1))
        rates.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _mark_best_epoch(accuracies, finite["epoch"], finite["metrics/accuracy_top1"])


def plot_confusion_matrix(counts: ArrayLike, labels: Sequence[str], path: Path, *, normalize: bool = False) -> None:
    """Draw how often each class (rows) was taken for each (columns): `counts` are whole numbers (L, L).

    Normalised, a row is divided by its sum, and a class without images is blank. Of more classes than can be named
    those in the pairs confused most are drawn: a thousand rows of dots would name nothing one could act on.
    """
    whole = np.asarray(counts, dtype=np.int64)
    classes = (
        list(range(len(whole)))
        if len(whole) <= MAX_NAMED_CLASSES
        else select_most_confused(whole, MAX_NUMBERED_CLASSES)
    )
    shown = whole[np.ix_(classes, classes)]
    images = whole.sum(axis=1)[classes, None]
    values = np.where(images > 0, shown / np.maximum(images, 1), np.nan) if normalize else shown.astype(float)
    most = 1 if normalize else max(1, shown.max())
    numbered = len(classes) <= MAX_NUMBERED_CLASSES
    side = max(0.34, min(1, 6 / len(classes))) if numbered else max(0.115, 10 / len(classes))  # of a cell, in inches
    with open_figure(path, (side * len(classes), side * len(classes)), tight=True) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_title("\n".join(_format_confusion_title(whole, shown, normalize)), linespacing=1.5)
        _shade_cells(axes, values / most)
        _label_cells(axes, shorten_names([labels[number] for number in classes]), side)
        if numbered:
            _number_cells(axes, values, values / most, side, _format_percent if normalize else _format_count)


def plot_reliability(bin_counts: ArrayLike, bin_correct: ArrayLike, path: Path, *, calibration_error: float) -> None:
    """Draw accuracy against predicted probability, by bins of equal width, and how many predictions each bin has.

    `calibration_error` is the expected calibration error, for the title.
    """
    from matplotlib.ticker import PercentFormatter

    images = np.asarray(bin_counts)
    shares, bins = np.asarray(bin_correct) / np.maximum(images, 1), len(images)
    middles = (np.arange(bins) + 0.5) / bins
    with open_figure(path, (6, 6.4)) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        upper.bar(middles, shares, width=0.92 / bins, color=BLUE)
        upper.plot([0, 1], [0, 1], color=ORANGE, linestyle="--", label="as often right as promised")
        upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="right answers")
        upper.legend(loc="upper left")
        upper.set_title(f"How far a probability can be trusted: expected calibration error {calibration_error:.1%}")
        bars = lower.bar(middles, images, width=0.92 / bins, color=GRAY)
        lower.bar_label(bars, [_format_count(count) if count else "" for count in images], fontsize=7, padding=2)
        lower.set(xlabel="probability of the answer", ylabel="images", yticks=[])
        lower.margins(y=0.2)
        lower.grid(visible=False)
        for axis in (upper.xaxis, upper.yaxis):
            axis.set_major_formatter(PercentFormatter(1))


def plot_risk_coverage(curves: Mapping[str, tuple[ArrayLike, ArrayLike]], path: Path) -> None:
    """Draw the share of right answers against the share of images that get one, the surest first, of each model."""
    from matplotlib.ticker import PercentFormatter

    colours = itertools.cycle((BLUE, ORANGE, SKY_BLUE, GRAY))
    with open_figure(path, (6, 4.4)) as figure:
        axes = figure.subplots()
        for (name, (coverage, accuracy)), colour in zip(curves.items(), colours, strict=False):
            axes.plot(np.asarray(coverage), np.asarray(accuracy), color=colour, label=shorten_names([name])[0])
        least = min(float(np.asarray(accuracy).min()) for _, accuracy in curves.values())
        axes.set(xlim=(0, 1), ylim=(max(0, least - 0.05), 1.005), xlabel="images that get an answer, the surest first")
        axes.set(ylabel="right answers")
        axes.set_title("What abstaining buys")
        if len(curves) > 1:
            axes.legend(loc="lower left")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(1))


def plot_accuracy_bars(
    groups: Mapping[str, Mapping[str, tuple[float, float | None]]], path: Path, *, title: str
) -> None:
    """Draw shares as bars, those of a group together and in one colour; a deviation is a line."""
    from matplotlib.ticker import PercentFormatter

    number = sum(map(len, groups.values()))
    with open_figure(path, (max(5, 0.55 * number + 1.5), 4.2)) as figure:
        axes = figure.subplots()
        first, names = 0, list[str]()
        for (group, values), colour in zip(
            groups.items(), itertools.cycle((BLUE, ORANGE, SKY_BLUE, GRAY)), strict=False
        ):
            here = list(range(first, first + len(values)))
            shares = [mean for mean, _ in values.values()]
            spread = [deviation or 0 for _, deviation in values.values()]
            drawn = axes.bar(here, shares, yerr=spread, ecolor=INK, width=0.72, color=colour, label=group)
            axes.bar_label(drawn, [f"{100 * share:.1f}" for share in shares], fontsize=7, padding=3)
            names, first = names + shorten_names(list(values)), first + len(values)
        axes.set_xticks(
            range(number), names, rotation=0 if number <= 6 else 60, ha="center" if number <= 6 else "right"
        )
        axes.set(ylim=(0, 1.22), yticks=np.linspace(0, 1, 6), ylabel="right answers")
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_title(make_printable(title))
        axes.legend(loc="upper left", ncols=len(groups), fontsize=8)


def select_most_confused(counts: NDArray[Any], max_classes: int) -> list[int]:
    """`most` classes: those of the pair confused most, either way, then of the next pair, partners side by side."""
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
    others = (number for number in range(len(counts)) if number not in chosen)  # where hardly anything is confused
    return chosen + list(itertools.islice(others, max_classes - len(chosen)))


def make_printable(text: str) -> str:
    """The name in one line, with a question mark for bytes of a file's name that are no text."""
    return " ".join(text.split()).encode(errors="replace").decode()


def get_heat_colormap() -> NDArray[np.uint8]:
    """(256, 3): colours whose equal steps look equal, from black over red to nearly white."""
    import matplotlib

    return matplotlib.colormaps["magma"](np.arange(256), bytes=True)[:, :3]


def get_font_path() -> Path:
    """The font of all figures, which comes with matplotlib: Latin, Greek, Cyrillic, Arabic; boxes for the others."""
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"


@contextlib.contextmanager
def open_figure(
    path: Path, inches: tuple[float, float], *, tight: bool = False, dpi: int = _SCREEN_DPI
) -> Iterator["Figure"]:
    """An empty figure in the house's look, written to `path` when the block ends well.

    `tight` fits the paper to what is drawn, which may then lie outside the figure: so names of any length find room.
    """
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # it is drawn as a box
        figure = Figure(figsize=inches, layout=None if tight else "constrained")
        yield figure
        with write_atomically(path, overwrite=True) as fresh:
            box = "tight" if tight else None
            nameless = {"Software": None}  # its version would change the bytes
            figure.savefig(fresh, format="png", dpi=dpi, metadata=nameless, bbox_inches=box, pad_inches=0.15)


def _mask_nonfinite(values: Sequence[float]) -> NDArray[np.float64]:
    """The values, with NaN for what cannot be drawn: curves have gaps there."""
    numbers = np.asarray(values, dtype=float)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def _plot_epoch_curves(
    axes: "Axes", columns: Mapping[str, NDArray[np.float64]], styles: dict[str, tuple[str, str]], *, span: float
) -> None:
    """The columns as lines over the epochs, and an axis that shows at least the share `span` below the largest value.

    With 1 it begins at zero; with less, one row or a flat curve still does not fill it with noise.
    """
    from matplotlib.ticker import MaxNLocator

    epochs = columns["epoch"]
    for name, (label, colour) in styles.items():
        known = np.isfinite(np.pad(columns[name], 1, constant_values=np.nan))
        alone = known[1:-1] & ~known[:-2] & ~known[2:]  # without a neighbour there is no line
        dots = np.flatnonzero(alone | (len(epochs) <= 30)).tolist()
        axes.plot(epochs, columns[name], color=colour, label=label, marker="o", markevery=dots, clip_on=False)
    values = np.concatenate([columns[name] for name in styles])
    most = np.nanmax(values, initial=0) or 1
    least = min(np.nanmin(values, initial=most), most * (1 - span))
    axes.set_ylim(least - 0.06 * (most - least) * (least > 0), most + 0.06 * (most - least))
    room = max(0.5, 0.03 * np.ptp(epochs))
    axes.set_xlim(epochs.min() - room, epochs.max() + room)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    if len(styles) > 1:
        axes.legend()


def _mark_best_epoch(axes: "Axes", epochs: NDArray[np.float64], accuracies: NDArray[np.float64]) -> None:
    """The first epoch of the highest accuracy; the weights that are kept may be later ones that are as good."""
    if np.isnan(accuracies).all():
        return
    best = int(np.nanargmax(accuracies))
    axes.plot(epochs[best], accuracies[best], "o", color=ORANGE, markersize=9, fillstyle="none", markeredgewidth=2)
    axes.set_title(f"best {accuracies[best]:.2%}, epoch {epochs[best].round(1):g}", loc="right", color=ORANGE)


def _format_confusion_title(whole: NDArray[Any], shown: NDArray[Any], normalize: bool) -> Iterator[str]:
    images, right = int(whole.sum()), int(whole.trace())
    summary = f"{pluralize(images, 'image')}, {right / max(1, images):.1%} right"
    if len(shown) < len(whole):
        yield f"Confusion matrix of the {pluralize(len(shown), 'class')}, of {len(whole):,}, in the pairs confused most"
        yield f"{summary}; {shown.sum() - shown.trace():,} of {images - right:,} mistakes are here"
    else:
        yield "Confusion matrix"
        yield summary
    if len(shown) > MAX_NUMBERED_CLASSES:
        yield f"white: none, full colour: {'all of a true class' if normalize else f'{shown.max():,} images'}"
    elif normalize:
        yield "in % of the images of each true class"


def _shade_cells(axes: "Axes", shades: NDArray[np.float64]) -> None:
    """Cells from white to full colour as their numbers go from 0 to 1: right answers blue, mistakes orange.

    The shade is the number's square root, since what matters, the mistakes, is rare. No images: grey.
    """
    from matplotlib.colors import to_rgb

    full = np.where(np.eye(len(shades), dtype=bool)[..., None], to_rgb(BLUE), to_rgb(ORANGE))  # (L, L, 3)
    cells = 1 - (1 - full) * shades[..., None] ** 0.5
    cells[np.isnan(shades)] = to_rgb(FAINT_GRAY)
    axes.imshow(cells, interpolation="nearest")


def _label_cells(axes: "Axes", names: Sequence[str], side: float) -> None:
    places, size = range(len(names)), min(9, 72 * 0.8 * side)
    flat = max(map(len, names)) * size * 0.65 < 72 * 0.85 * side  # do the names fit side by side
    axes.set_xticks(places, names, fontsize=size, rotation=0 if flat else 90)
    axes.set_yticks(places, names, fontsize=size)
    axes.set(xlabel="what the model said", ylabel="true class")
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
    texts = {place: format_value(value) for place, value in np.ndenumerate(values) if not np.isnan(value)}
    size = min(9, 72 * 0.8 * side / (0.64 * max(map(len, texts.values()), default=1)))
    for (row, column), text in texts.items():
        shade = shades[row, column]
        colour = WHITE if shade > 0.6 else INK if shade else LIGHT_GRAY
        axes.text(column, row, text, color=colour, fontsize=size, ha="center", va="center", in_layout=False)


def _format_percent(share: float) -> str:
    """Whole percents; what is not nothing or everything does not look like it."""
    if 0 < share < 0.005:
        return "<1"
    return ">99" if 0.995 <= share < 1 else f"{100 * share:.0f}"


def _format_count(count: float) -> str:
    """The count in about five letters."""
    return f"{count:.0f}" if count < 1e5 else f"{count / 1e3:.0f}k" if count < 1e7 else f"{count / 1e6:.0f}M"


def shorten_names(names: Sequence[str], max_letters: int = _MAX_NAME_LETTERS) -> list[str]:
    """The names, the end of long ones cut off, or their middle where several begin alike."""
    texts = [make_printable(name) for name in names]
    cut = [text if len(text) <= max_letters else text[: max_letters - 1].rstrip() + "…" for text in texts]
    half = max_letters // 2
    return [
        short if text == short or cut.count(short) == 1 else f"{text[:half].rstrip()}…{text[1 - half :].lstrip()}"
        for text, short in zip(texts, cut, strict=True)
    ]
