"""Charts as inline SVG: sharp at any size, small, printable, and colored by the page's own style, light or dark.

The figures in the run's folder (visualization/plots.py) are PNGs with fixed colors, for slides; these are
parts of a page.
Every chart has a label that states its message to screen readers.

    L classes
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import ArrayLike, NDArray

from vitrail.visualization.plots import make_printable, shorten_name

MAX_NAMED_CLASSES = 100  # the most classes of a confusion matrix: more names would not fit
MAX_MARKED_POINTS = 20  # the most points of a curve that get a marker each

_WIDTH, _HEIGHT = 340, 216  # a phone's width, so that letters keep their size there
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 18, 14, 36
_LETTER_WIDTH = 6.1  # the approximate width of a letter of 11 pixels
_MIN_DIGIT_SIZE = 7.0  # pixels: smaller digits are omitted, and the shade and the tooltip remain


class ChartLine(NamedTuple):
    """A line of a chart; points that are not finite are skipped."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


class CurveLine(NamedTuple):
    """A line of a learning curve: the mean accuracy at each number of images, and its spread over the draws."""

    color: int
    """The first, second or third of the page's."""
    means: Sequence[float]
    spreads: Sequence[float]


class _Axes(NamedTuple):
    """The ranges of a chart's axes."""

    x: tuple[float, float]
    y: tuple[float, float]

    def map_point(self, x: float, y: float) -> tuple[float, float]:
        x_share = (x - self.x[0]) / (self.x[1] - self.x[0])
        y_share = (y - self.y[0]) / (self.y[1] - self.y[0])
        return _LEFT + x_share * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - y_share * (_HEIGHT - _TOP - _BOTTOM)


def draw_lines(lines: Sequence[ChartLine], *, label: str, x_label: str, percent: bool = False) -> Markup:
    """Draw lines over epochs; an axis of percentages need not begin at zero."""
    points = [
        [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(x) and math.isfinite(y)] for line in lines
    ]
    all_points = [point for line in points for point in line]
    if not all_points:
        return _make_svg(label, [_draw_text(_WIDTH / 2, _HEIGHT / 2, "nothing to draw yet", "quiet")])
    highest = max(y for _, y in all_points)
    lowest = min(min(y for _, y in all_points), 0.9 * highest) if percent else 0.0
    first, last = min(x for x, _ in all_points), max(x for x, _ in all_points)
    axes = _Axes((min(first, 0.0), last if last > min(first, 0.0) else first + 1),
                 _compute_axis_range(lowest, highest, upper_limit=1.0 if percent else math.inf))  # fmt: skip
    format_value = (lambda value: f"{value:.0%}") if percent else _format_number
    min_steps = (1.0 if last >= 1 else 0.0, 0.01 if percent else 0.0)
    parts = [*_draw_axes(axes, x_label, format_value, min_steps=min_steps)]
    for index, line in enumerate(points):
        parts.append(_draw_line([axes.map_point(*point) for point in line], f"line s{index}"))
        if len(line) <= MAX_MARKED_POINTS:
            parts.extend(_draw_dot(*axes.map_point(*point), f"dot point s{index}") for point in line)
    return _make_svg(label, parts)


def draw_learning_curve(lines: Sequence[CurveLine], shots: Sequence[int], *, label: str, x_label: str) -> Markup:
    """Draw accuracies with bands of their spread; the numbers of images are evenly spaced, up to 100 %."""
    lowest = min(mean - spread for line in lines for mean, spread in zip(line.means, line.spreads, strict=True))
    axes = _Axes((-0.15, len(shots) - 0.85), (max(0.0, math.floor(10 * lowest) / 10), 1.0))
    parts = [*_draw_axes(axes, x_label, lambda value: f"{value:.0%}", show_x_ticks=False, min_steps=(0.0, 0.1))]
    for position, number in enumerate(shots):
        x, y = axes.map_point(position, axes.y[0])
        parts.append(_draw_text(x, y + 15, f"{number:,}", "quiet"))
    for color, means, spreads in lines:
        points = list(zip(range(len(shots)), means, spreads, strict=True))
        upper = [axes.map_point(position, min(1.0, mean + spread)) for position, mean, spread in points]
        lower = [axes.map_point(position, max(axes.y[0], mean - spread)) for position, mean, spread in points]
        parts.append(_draw_line([*upper, *reversed(lower)], f"band s{color}"))
    for line in lines:
        dots = [axes.map_point(position, mean) for position, mean in enumerate(line.means)]
        parts.append(_draw_line(dots, f"line s{line.color}"))
        parts.extend(_draw_dot(*point, f"dot point s{line.color}") for point in dots)
    return _make_svg(label, parts)


def draw_confusion_matrix(
    counts: NDArray[np.int64], names: Sequence[str], images: Sequence[int], *, label: str
) -> Markup:
    """Draw how often each class (rows) was predicted as each class (columns), for at most MAX_NAMED_CLASSES classes.

    The shade is the square root of the share of a class's images, since mistakes, which matter most, are rare.
    `images` counts those of each class, including those predicted as a class that is not shown.
    """
    texts = [shorten_name(name, 18 if len(names) <= 40 else 14) for name in names]
    cell = max(10.4, min(44.0, 640 / len(names)))
    size = min(11.0, cell - 0.6)  # of a letter, in pixels
    name_width = max(map(len, texts)) * _LETTER_WIDTH * size / 11
    left, flat = 26 + name_width + 8, name_width < cell
    top = 40.0 if flat else 26 + name_width + 6
    side = cell * len(names)
    parts = [
        _draw_text(left + side / 2, 13, "predicted class", "quiet"),
        f'<text class="quiet" text-anchor="middle" transform="translate(11 {top + side / 2:.1f})'
        ' rotate(-90)">true class</text>',
        _draw_lattice(left, top, cell, len(names)),
    ]
    for row, text in enumerate(texts):
        middle = cell * row + cell / 2
        parts.append(_set_font_size(_draw_text(left - 6, top + middle + 0.36 * size, text, "", "end"), size))
        x = left + middle + (0 if flat else 0.36 * size)
        rotation = "" if flat else f' transform="rotate(-90 {x:.1f} {top - 7:.1f})"'
        anchor = "middle" if flat else "start"
        heading = f'<text x="{x:.1f}" y="{top - 7:.1f}" text-anchor="{anchor}"{rotation}>{escape(text)}</text>'
        parts.append(_set_font_size(heading, size))
        for column in np.flatnonzero(counts[row]).tolist():
            count = int(counts[row, column])
            corner = (left + cell * column, top + cell * row)
            tooltip = f"{names[row]}, predicted {names[column]}: {count:,} of {images[row]:,}"
            share = count / max(1, images[row])
            parts.append(_draw_cell(corner, cell, count, share, tooltip, correct=row == column))
    return _make_svg(label, parts, left + side + 4, top + side + 4)


def _set_font_size(text: str, size: float) -> str:
    return text.replace("<text ", f'<text style="font-size:{size:.1f}px" ', 1)


def _draw_lattice(left: float, top: float, cell: float, cells: int) -> str:
    """Draw the lines between cells as one path: a rectangle for each of 10,000 cells would take a megabyte."""
    side = cell * cells
    horizontal = "".join(f"M{left:.1f} {top + cell * index:.1f}h{side:.1f}" for index in range(cells + 1))
    vertical = "".join(f"M{left + cell * index:.1f} {top:.1f}v{side:.1f}" for index in range(cells + 1))
    return f'<path class="none" d="{horizontal}{vertical}"/>'


def _draw_cell(
    corner: tuple[float, float], side: float, count: int, share: float, tooltip: str, *, correct: bool
) -> str:
    x, y = corner
    shade, color = math.sqrt(share), "a" if correct else "b"
    size = min(11.0, 1.5 * side / max(2, len(str(count))))
    text = _draw_text(x + side / 2, y + side / 2 + size * 0.36, f"{count}", "inverse" if shade > 0.55 else "")
    number = _set_font_size(text, size) if size >= _MIN_DIGIT_SIZE else ""
    opacity = max(0.12, shade)
    return _draw_bar(color, x + 0.5, y + 0.5, side - 1, side - 1, opacity=opacity, tooltip=tooltip) + number


def draw_reliability(bin_counts: ArrayLike, bin_correct: ArrayLike, *, label: str, x_label: str) -> Markup:
    """Accuracy against the predicted probability, by bins; a bar is as opaque as its predictions are many."""
    images = np.asarray(bin_counts)
    shares = np.asarray(bin_correct) / np.maximum(images, 1)
    frame = _Axes((0.0, 1.0), (0.0, 1.0))
    parts = [*_draw_axes(frame, x_label, lambda value: f"{value:.0%}", x_as_shares=True)]
    for number in np.flatnonzero(images).tolist():
        x, y = frame.map_point(number / len(images), float(shares[number]))
        width = frame.map_point((number + 1) / len(images), 0)[0] - x
        opacity = 0.25 + 0.75 * math.sqrt(images[number] / images.max())
        height = max(1.0, frame.map_point(0, 0)[1] - y)
        tooltip = f"{images[number]:,} predictions, {shares[number]:.1%} correct"
        parts.append(_draw_bar("a", x + 1, y, width - 2, height, opacity=opacity, tooltip=tooltip))
    parts.append(_draw_line([frame.map_point(0, 0), frame.map_point(1, 1)], "line dashed s1"))
    return _make_svg(label, parts)


def draw_columns(heights: Sequence[float], *, label: str, x_label: str) -> Markup:
    """Draw numbers as columns side by side."""
    axes = _Axes((0.0, float(len(heights))), _compute_axis_range(0.0, max(heights)))
    parts = [*_draw_axes(axes, x_label, _format_number, show_x_ticks=False)]
    gap = 0.12 if len(heights) <= 60 else 0.0
    for index, height in enumerate(heights):
        x, y = axes.map_point(index + gap / 2, height)
        width = axes.map_point(index + 1 - gap / 2, 0)[0] - x
        base = axes.map_point(0, 0)[1]
        parts.append(_draw_bar("a", x, y, width, base - y, digits=2))
    return _make_svg(label, parts)


def draw_named_bars(names: Sequence[str], values: Sequence[int], *, label: str) -> Markup:
    """Draw numbers as horizontal bars with names."""
    texts = [shorten_name(name, 22) for name in names]
    left, row_height, highest = 8 + max(map(len, texts)) * _LETTER_WIDTH, 17.0, max(1, *values)
    max_width = max(120.0, _WIDTH - left - 40)
    parts = []
    for row, (text, value) in enumerate(zip(texts, values, strict=True)):
        y = row * row_height
        width = max(1.0, max_width * value / highest)
        parts.append(_draw_text(left - 6, y + 12, text, "", "end"))
        parts.append(_draw_bar("a", left, y + 3, width, row_height - 6))
        parts.append(_draw_text(left + width + 5, y + 12, f"{value:,}", "quiet", "start"))
    return _make_svg(label, parts, left + max_width + 40, row_height * len(names))


def draw_paired_columns(first: Sequence[float], second: Sequence[float], *, label: str, x_label: str) -> Markup:
    """Draw two columns for each layer, side by side."""
    axes = _Axes((0.0, float(len(first))), _compute_axis_range(0.0, max(*first, *second)))
    parts = [*_draw_axes(axes, x_label, _format_number, show_x_ticks=False)]
    base = axes.map_point(0, 0)[1]
    for layer, heights in enumerate(zip(first, second, strict=True)):
        for color, height in zip("ab", heights, strict=True):
            x, y = axes.map_point(layer + (0.12 if color == "a" else 0.5), height)
            width = axes.map_point(layer + 0.38, 0)[0] - axes.map_point(layer, 0)[0]
            parts.append(_draw_bar(color, x, y, width, base - y))
        if len(first) <= 16 or layer % 4 == 3:
            parts.append(_draw_text(axes.map_point(layer + 0.5, 0)[0], base + 14, f"{layer + 1}", "quiet"))
    return _make_svg(label, parts)


def draw_heads(head_values: NDArray[np.floating], *, label: str, y_label: str) -> Markup:
    """Draw a dot for each head (layers, heads) over its layer, and the line of their means."""
    values, layers = head_values.astype(float), len(head_values)
    axes = _Axes((0.5, layers + 0.5), _compute_axis_range(0.0, float(values.max())))
    parts = [
        *_draw_axes(axes, "layer", _format_number, show_x_ticks=False),
        _draw_text(_LEFT, 9, y_label, "quiet", "start"),
    ]
    for layer, row in enumerate(values.tolist(), 1):
        parts.extend(_draw_dot(*axes.map_point(layer, value), "dot s0") for value in row)
        if layers <= 16 or layer % 4 == 0:
            tick = _draw_text(*axes.map_point(layer, axes.y[0]), f"{layer}", "quiet")
            parts.append(tick.replace("<text ", '<text dy="14" '))
    means = [axes.map_point(layer, float(row.mean())) for layer, row in enumerate(values, 1)]
    parts.append(_draw_line(means, "line s1"))
    return _make_svg(label, parts)


# --- parts -----------------------------------------------------------------------------------------------------------


def _make_svg(label: str, parts: Sequence[str], width: float = _WIDTH, height: float = _HEIGHT) -> Markup:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return Markup(f'<svg {size} role="img" aria-label="{escape(make_printable(label))}">{"".join(parts)}</svg>')  # noqa: S704


def _draw_text(x: float, y: float, text: str, kind: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(make_printable(text))}</text>'


def _draw_bar(
    color: str, x: float, y: float, width: float, height: float, opacity: float = 1, tooltip: str = "", digits: int = 1
) -> str:
    """Draw a rectangle, opaque and without a tooltip by default; narrow columns need more digits of x and width."""
    bar = f'<rect class="bar {color}" x="{x:.{digits}f}" y="{y:.1f}" width="{width:.{digits}f}" height="{height:.1f}"'
    title = f"<title>{escape(make_printable(tooltip))}</title>"
    return f'{bar} opacity="{opacity:.2f}">{title}</rect>' if tooltip else f"{bar}/>"


def _draw_line(points: Sequence[tuple[float, float]], kind: str) -> str:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class="{kind}" d="M{path}"/>'


def _draw_dot(x: float, y: float, kind: str) -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def _draw_axes(
    axes: _Axes,
    x_label: str,
    format_value: Callable[[float], str],
    *,
    show_x_ticks: bool = True,
    x_as_shares: bool = False,
    min_steps: tuple[float, float] = (0.0, 0.0),
) -> Iterator[str]:
    """Draw grid lines with their numbers, and the label of the x axis.

    With `x_as_shares` the x axis has the format of the y axis; `min_steps` are the smallest tick distances of x and y.
    """
    for value in _compute_ticks(*axes.y, min_step=min_steps[1]):
        x, y = axes.map_point(axes.x[0], value)
        yield f'<line class="grid" x1="{x:.1f}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _draw_text(x - 6, y + 4, format_value(value), "quiet", "end")
    for value in _compute_ticks(*axes.x, min_step=min_steps[0]) if show_x_ticks else ():
        x, y = axes.map_point(value, axes.y[0])
        yield _draw_text(x, y + 15, format_value(value) if x_as_shares else _format_number(value), "quiet")
    yield _draw_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 5, x_label, "quiet")


def _compute_axis_range(low: float, high: float, upper_limit: float = math.inf) -> tuple[float, float]:
    """The ends of an axis, with a margin at the top, and never equal."""
    if high <= low:
        return low, low + (abs(low) or 1.0)
    return low, min(upper_limit, high + 0.04 * (high - low)) if high < upper_limit else upper_limit


def _compute_ticks(low: float, high: float, max_ticks: int = 5, *, min_step: float = 0.0) -> list[float]:
    """Round numbers from low to high, at most `max_ticks` of them and at least `min_step` apart."""
    rough = max(min_step, (high - low) / max_ticks)
    power = 10 ** math.floor(math.log10(rough))
    factors = (1, 2, 5, 10) if min_step else (1, 2, 2.5, 5, 10)  # without 2.5 if steps must be whole
    step = next(power * factor for factor in factors if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _format_number(value: float) -> str:
    """1234.5 -> 1,234; 0.00015 -> 1.5e-4, which an axis has room for."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if not 0 < abs(value) < 1e-3:
        return f"{value:.3g}"
    digits, power = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(power)}"
