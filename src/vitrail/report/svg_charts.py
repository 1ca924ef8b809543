"""Charts as inline SVG: sharp at any size, small, printable, and coloured by the page's own style, light or dark.

The figures of the run's folder (figures/plots.py) are PNGs with colours of their own, for slides; these are parts of a
page. Every chart carries its message as a label for those who do not see it.

    L classes
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import ArrayLike, NDArray

from vitrail.figures.plots import make_printable

MAX_NAMED_CLASSES = 100
"""The most classes of a confusion: more would have no room for their names."""
MAX_MARKED_POINTS = 20
"""The most points of a curve that are marked one by one."""

_WIDTH, _HEIGHT = 340, 216  # a phone's width, so that letters keep their size there
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 18, 14, 36
_LETTER_WIDTH = 6.1  # the width of a letter of 11 pixels, about
_MIN_DIGIT_SIZE = 7.0  # pixels of a digit: where it would be smaller, the shade and the tip must do


class ChartLine(NamedTuple):
    """A line of a chart; what is no number is left out of it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


class _Axes(NamedTuple):
    """Where numbers lie in a chart."""

    x: tuple[float, float]
    y: tuple[float, float]

    def map_point(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)


def draw_lines(lines: Sequence[ChartLine], *, label: str, x_label: str, percent: bool = False) -> Markup:
    """Lines over epochs; where they are shares the axis need not begin at zero."""
    points = [
        [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(x) and math.isfinite(y)] for line in lines
    ]
    every = [point for line in points for point in line]
    if not every:
        return _make_svg(label, [_draw_text(_WIDTH / 2, _HEIGHT / 2, "nothing to draw yet", "quiet")])
    highest = max(y for _, y in every)
    lowest = min(min(y for _, y in every), 0.9 * highest) if percent else 0.0
    first, last = min(x for x, _ in every), max(x for x, _ in every)
    frame = _Axes((min(first, 0.0), last if last > min(first, 0.0) else first + 1),
                   _compute_axis_range(lowest, highest, upper_limit=1.0 if percent else math.inf))  # fmt: skip
    written = (lambda value: f"{value:.0%}") if percent else _format_number
    parts = [*_draw_axes(frame, x_label, written, min_steps=(1.0 if last >= 1 else 0.0, 0.01 if percent else 0.0))]
    for number, line in enumerate(points):
        parts.append(_draw_line([frame.map_point(*point) for point in line], f"line s{number}"))
        if len(line) <= MAX_MARKED_POINTS:
            parts.extend(_draw_dot(*frame.map_point(*point), f"dot point s{number}") for point in line)
    return _make_svg(label, parts)


def draw_confusion_matrix(
    counts: NDArray[np.int64], names: Sequence[str], images: Sequence[int], *, label: str
) -> Markup:
    """How often each class (rows) was taken for each (columns), for at most NAMED classes.

    The shade is the square root of the share of a class's images, since what matters, the mistakes, is rare; `images`
    are those of each class, also those that were taken for a class which is not shown.
    """
    texts = [shorten_name(name, 18 if len(names) <= 40 else 14) for name in names]
    longest = max(map(len, texts))
    cell = max(10.4, min(44.0, 640 / len(names)))
    size = min(11.0, cell - 0.6)  # of a letter, in pixels
    room = longest * _LETTER_WIDTH * size / 11
    left, flat = 26 + room + 8, room < cell
    top = 40.0 if flat else 26 + room + 6
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
        turn = "" if flat else f' transform="rotate(-90 {x:.1f} {top - 7:.1f})"'
        anchor = "middle" if flat else "start"
        column = f'<text x="{x:.1f}" y="{top - 7:.1f}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'
        parts.append(_set_font_size(column, size))
        for column_number in np.flatnonzero(counts[row]).tolist():
            number = int(counts[row, column_number])
            corner = (left + cell * column_number, top + cell * row)
            tip = f"{names[row]}, predicted {names[column_number]}: {number:,} of {images[row]:,}"
            share = number / max(1, images[row])
            parts.append(_draw_cell(corner, cell, number, share, tip, correct=row == column_number))
    return _make_svg(label, parts, left + side + 4, top + side + 4)


def _set_font_size(text: str, size: float) -> str:
    return text.replace("<text ", f'<text style="font-size:{size:.1f}px" ', 1)


def _draw_lattice(left: float, top: float, cell: float, number: int) -> str:
    """The lines between cells, as one path: a rectangle for each of 10,000 cells would be a megabyte."""
    side = cell * number
    across = "".join(f"M{left:.1f} {top + cell * place:.1f}h{side:.1f}" for place in range(number + 1))
    down = "".join(f"M{left + cell * place:.1f} {top:.1f}v{side:.1f}" for place in range(number + 1))
    return f'<path class="none" d="{across}{down}"/>'


def _draw_cell(corner: tuple[float, float], side: float, number: int, share: float, tip: str, *, correct: bool) -> str:
    x, y = corner
    square = f'x="{x + 0.5:.1f}" y="{y + 0.5:.1f}" width="{side - 1:.1f}" height="{side - 1:.1f}"'
    shade = math.sqrt(share)
    size = min(11.0, 1.5 * side / max(2, len(str(number))))
    words = _draw_text(x + side / 2, y + side / 2 + size * 0.36, f"{number}", "inverse" if shade > 0.55 else "")
    shown = _set_font_size(words, size) if size >= _MIN_DIGIT_SIZE else ""
    title = f"<title>{escape(make_printable(tip))}</title>"
    return (
        f'<rect class="bar {"a" if correct else "b"}" {square} opacity="{max(0.12, shade):.2f}">{title}</rect>{shown}'
    )


def draw_reliability(bin_counts: ArrayLike, bin_correct: ArrayLike, *, label: str, x_label: str) -> Markup:
    """How often an answer is right against its probability, by bins; a bar is as opaque as its answers are many."""
    images = np.asarray(bin_counts)
    shares = np.asarray(bin_correct) / np.maximum(images, 1)
    frame = _Axes((0.0, 1.0), (0.0, 1.0))
    parts = [*_draw_axes(frame, x_label, lambda value: f"{value:.0%}", x_as_shares=True)]
    for number in np.flatnonzero(images).tolist():
        x, y = frame.map_point(number / len(images), float(shares[number]))
        width = frame.map_point((number + 1) / len(images), 0)[0] - x
        opacity = 0.25 + 0.75 * math.sqrt(images[number] / images.max())
        parts.append(
            f'<rect class="bar a" x="{x + 1:.1f}" y="{y:.1f}" width="{width - 2:.1f}"'
            f' height="{max(1.0, frame.map_point(0, 0)[1] - y):.1f}" opacity="{opacity:.2f}">'
            f"<title>{images[number]:,} answers, {shares[number]:.1%} right</title></rect>"
        )
    parts.append(_draw_line([frame.map_point(0, 0), frame.map_point(1, 1)], "line dashed s1"))
    return _make_svg(label, parts)


def draw_columns(heights: Sequence[float], *, label: str, x_label: str) -> Markup:
    """Numbers as columns beside each other, as many as there are."""
    frame = _Axes((0.0, float(len(heights))), _compute_axis_range(0.0, max(heights)))
    parts = [*_draw_axes(frame, x_label, _format_number, show_x_ticks=False)]
    gap = 0.12 if len(heights) <= 60 else 0.0
    for number, height in enumerate(heights):
        x, y = frame.map_point(number + gap / 2, height)
        width = frame.map_point(number + 1 - gap / 2, 0)[0] - x
        base = frame.map_point(0, 0)[1]
        parts.append(f'<rect class="bar a" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{base - y:.1f}"/>')
    return _make_svg(label, parts)


def draw_named_bars(names: Sequence[str], values: Sequence[int], *, label: str) -> Markup:
    """Numbers as named bars below each other."""
    texts = [shorten_name(name, 22) for name in names]
    left, row, most = 8 + max(map(len, texts)) * _LETTER_WIDTH, 17.0, max(1, *values)
    full = max(120.0, _WIDTH - left - 40)
    parts = []
    for number, (text, value) in enumerate(zip(texts, values, strict=True)):
        y = number * row
        width = max(1.0, full * value / most)
        parts.append(_draw_text(left - 6, y + 12, text, "", "end"))
        parts.append(f'<rect class="bar a" x="{left:.1f}" y="{y + 3:.1f}" width="{width:.1f}" height="{row - 6:.1f}"/>')
        parts.append(_draw_text(left + width + 5, y + 12, f"{value:,}", "quiet", "start"))
    return _make_svg(label, parts, left + full + 40, row * len(names))


def draw_paired_columns(first: Sequence[float], second: Sequence[float], *, label: str, x_label: str) -> Markup:
    """Two columns for each layer, side by side."""
    frame = _Axes((0.0, float(len(first))), _compute_axis_range(0.0, max(*first, *second)))
    parts = [*_draw_axes(frame, x_label, _format_number, show_x_ticks=False)]
    base = frame.map_point(0, 0)[1]
    for layer, heights in enumerate(zip(first, second, strict=True)):
        for kind, height in zip("ab", heights, strict=True):
            x, y = frame.map_point(layer + (0.12 if kind == "a" else 0.5), height)
            width = frame.map_point(layer + 0.38, 0)[0] - frame.map_point(layer, 0)[0]
            parts.append(
                f'<rect class="bar {kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{base - y:.1f}"/>'
            )
        if len(first) <= 16 or layer % 4 == 3:
            parts.append(_draw_text(frame.map_point(layer + 0.5, 0)[0], base + 14, f"{layer + 1}", "quiet"))
    return _make_svg(label, parts)


def draw_heads(values: NDArray[np.float64], *, label: str, y_label: str) -> Markup:
    """A dot for each head (layers, heads) over its layer, and the line of their means."""
    layers = len(values)
    frame = _Axes((0.5, layers + 0.5), _compute_axis_range(0.0, float(values.max())))
    parts = [
        *_draw_axes(frame, "layer", _format_number, show_x_ticks=False),
        _draw_text(_LEFT, 9, y_label, "quiet", "start"),
    ]
    for layer, row in enumerate(values.tolist(), 1):
        parts.extend(_draw_dot(*frame.map_point(layer, value), "dot s0") for value in row)
        if layers <= 16 or layer % 4 == 0:
            parts.append(
                _draw_text(*frame.map_point(layer, frame.y[0]), f"{layer}", "quiet").replace("<text ", '<text dy="14" ')
            )
    means = [frame.map_point(layer, float(row.mean())) for layer, row in enumerate(values, 1)]
    parts.append(_draw_line(means, "line s1"))
    return _make_svg(label, parts)


# --- parts -----------------------------------------------------------------------------------------------------------


def _make_svg(label: str, parts: Sequence[str], width: float = _WIDTH, height: float = _HEIGHT) -> Markup:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return Markup(f'<svg {size} role="img" aria-label="{escape(make_printable(label))}">{"".join(parts)}</svg>')  # noqa: S704


def _draw_text(x: float, y: float, text: str, kind: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(make_printable(text))}</text>'


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
    """Lines of a grid with their numbers, and the name of the axis across.

    With `shares` the numbers across are written like those up; `least` are the least steps across and up.
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
    """The ends of an axis: room above, and something to divide by."""
    if high <= low:
        return low, low + (abs(low) or 1.0)
    return low, min(upper_limit, high + 0.04 * (high - low)) if high < upper_limit else upper_limit


def _compute_ticks(low: float, high: float, max_ticks: int = 5, *, min_step: float = 0.0) -> list[float]:
    """Round numbers from low to high, at most so many, at least so far apart."""
    rough = max(min_step, (high - low) / max_ticks)
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in _get_round_steps(min_step) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _get_round_steps(min_step: float) -> Sequence[float]:
    """Round steps; not 2.5 where only whole ones will do."""
    return (1, 2, 5, 10) if min_step else (1, 2, 2.5, 5, 10)


def _format_number(value: float) -> str:
    """1234.5 -> 1,234; 0.00015 -> 1.5e-4, which an axis has room for."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if not 0 < abs(value) < 1e-3:
        return f"{value:.3g}"
    digits, power = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def shorten_name(name: str, max_letters: int) -> str:
    """A name of at most so many letters."""
    text = make_printable(name)
    return text if len(text) <= max_letters else text[: max_letters - 1].rstrip() + "…"
