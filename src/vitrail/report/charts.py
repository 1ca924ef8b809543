"""Charts as inline SVG: sharp at any size, small, printable, and coloured by the page's own style, light or dark.

The figures of the run's folder (figures/draw.py) are PNGs with colours of their own, for slides; these are parts of a
page. Every chart carries its message as a label for those who do not see it.

    L classes
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from vitrail.figures.draw import legible

BINS = 15
"""Of equal width, in a reliability diagram."""
NAMED = 100
"""The most classes of a confusion: more would have no room for their names."""
POINTED = 20
"""The most points of a curve that are marked one by one."""

_WIDTH, _HEIGHT = 340, 216  # a phone's width, so that letters keep their size there
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 18, 14, 36
_LETTER = 6.1  # the width of a letter of 11 pixels, about
_LEGIBLE = 7.0  # pixels of a digit: where it would be smaller, the shade and the tip must do


class Curve(NamedTuple):
    """A line of a chart; what is no number is left out of it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


class _Frame(NamedTuple):
    """Where numbers lie in a chart."""

    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)


def curves(lines: Sequence[Curve], *, label: str, across: str, percent: bool = False) -> Markup:
    """Lines over epochs; where they are shares the axis need not begin at zero."""
    points = [
        [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(x) and math.isfinite(y)] for line in lines
    ]
    every = [point for line in points for point in line]
    if not every:
        return _svg(label, [_text(_WIDTH / 2, _HEIGHT / 2, "nothing to draw yet", "quiet")])
    highest = max(y for _, y in every)
    lowest = min(min(y for _, y in every), 0.9 * highest) if percent else 0.0
    first, last = min(x for x, _ in every), max(x for x, _ in every)
    frame = _Frame((min(first, 0.0), last if last > min(first, 0.0) else first + 1),
                   _span(lowest, highest, most=1.0 if percent else math.inf))  # fmt: skip
    written = (lambda value: f"{value:.0%}") if percent else _short
    parts = [*_axes(frame, across, written, least=(1.0 if last >= 1 else 0.0, 0.01 if percent else 0.0))]
    for number, line in enumerate(points):
        parts.append(_line([frame.place(*point) for point in line], f"line s{number}"))
        if len(line) <= POINTED:
            parts.extend(_dot(*frame.place(*point), f"dot point s{number}") for point in line)
    return _svg(label, parts)


def confusion(counts: NDArray[np.int64], names: Sequence[str], images: Sequence[int], *, label: str) -> Markup:
    """How often each class (rows) was taken for each (columns), for at most NAMED classes.

    The shade is the square root of the share of a class's images, since what matters, the mistakes, is rare; `images`
    are those of each class, also those that were taken for a class which is not shown.
    """
    texts = [cut(name, 18 if len(names) <= 40 else 14) for name in names]
    longest = max(map(len, texts))
    cell = max(10.4, min(44.0, 640 / len(names)))
    size = min(11.0, cell - 0.6)  # of a letter, in pixels
    room = longest * _LETTER * size / 11
    left, flat = 26 + room + 8, room < cell
    top = 40.0 if flat else 26 + room + 6
    side = cell * len(names)
    parts = [
        _text(left + side / 2, 13, "predicted class", "quiet"),
        f'<text class="quiet" text-anchor="middle" transform="translate(11 {top + side / 2:.1f})'
        ' rotate(-90)">true class</text>',
        _lattice(left, top, cell, len(names)),
    ]
    for row, text in enumerate(texts):
        middle = cell * row + cell / 2
        parts.append(_sized(_text(left - 6, top + middle + 0.36 * size, text, "", "end"), size))
        x = left + middle + (0 if flat else 0.36 * size)
        turn = "" if flat else f' transform="rotate(-90 {x:.1f} {top - 7:.1f})"'
        anchor = "middle" if flat else "start"
        column = f'<text x="{x:.1f}" y="{top - 7:.1f}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'
        parts.append(_sized(column, size))
        for column_number in np.flatnonzero(counts[row]).tolist():
            number = int(counts[row, column_number])
            corner = (left + cell * column_number, top + cell * row)
            tip = f"{names[row]}, predicted {names[column_number]}: {number:,} of {images[row]:,}"
            share = number / max(1, images[row])
            parts.append(_cell(corner, cell, number, share, tip, right=row == column_number))
    return _svg(label, parts, left + side + 4, top + side + 4)


def _sized(text: str, size: float) -> str:
    return text.replace("<text ", f'<text style="font-size:{size:.1f}px" ', 1)


def _lattice(left: float, top: float, cell: float, number: int) -> str:
    """The lines between cells, as one path: a rectangle for each of 10,000 cells would be a megabyte."""
    side = cell * number
    across = "".join(f"M{left:.1f} {top + cell * place:.1f}h{side:.1f}" for place in range(number + 1))
    down = "".join(f"M{left + cell * place:.1f} {top:.1f}v{side:.1f}" for place in range(number + 1))
    return f'<path class="none" d="{across}{down}"/>'


def _cell(corner: tuple[float, float], side: float, number: int, part: float, tip: str, *, right: bool) -> str:
    x, y = corner
    square = f'x="{x + 0.5:.1f}" y="{y + 0.5:.1f}" width="{side - 1:.1f}" height="{side - 1:.1f}"'
    shade = math.sqrt(part)
    size = min(11.0, 1.5 * side / max(2, len(str(number))))
    words = _text(x + side / 2, y + side / 2 + size * 0.36, f"{number}", "inverse" if shade > 0.55 else "")
    shown = _sized(words, size) if size >= _LEGIBLE else ""
    title = f"<title>{escape(legible(tip))}</title>"
    return f'<rect class="bar {"a" if right else "b"}" {square} opacity="{max(0.12, shade):.2f}">{title}</rect>{shown}'


def bin_answers(probabilities: Sequence[float], right: Sequence[bool]) -> tuple[list[int], list[int]]:
    """How many answers each of BINS bins of their probability has, and how many of these are right."""
    sure, hits = np.asarray(probabilities, dtype=float), np.asarray(right, dtype=float)
    numbers = np.clip(np.ceil(sure * BINS).astype(int) - 1, 0, BINS - 1)  # a bin holds its upper edge
    return (
        np.bincount(numbers, minlength=BINS).tolist(),
        np.bincount(numbers, weights=hits, minlength=BINS).astype(int).tolist(),
    )


def reliability(answers: Sequence[int], right: Sequence[int], *, label: str, across: str) -> Markup:
    """How often an answer is right against its probability, by bins; a bar is as opaque as its answers are many."""
    images = np.asarray(answers)
    shares = np.asarray(right) / np.maximum(images, 1)
    frame = _Frame((0.0, 1.0), (0.0, 1.0))
    parts = [*_axes(frame, across, lambda value: f"{value:.0%}", shares=True)]
    for number in np.flatnonzero(images).tolist():
        x, y = frame.place(number / BINS, float(shares[number]))
        width = frame.place((number + 1) / BINS, 0)[0] - x
        opacity = 0.25 + 0.75 * math.sqrt(images[number] / images.max())
        parts.append(
            f'<rect class="bar a" x="{x + 1:.1f}" y="{y:.1f}" width="{width - 2:.1f}"'
            f' height="{max(1.0, frame.place(0, 0)[1] - y):.1f}" opacity="{opacity:.2f}">'
            f"<title>{images[number]:,} answers, {shares[number]:.1%} right</title></rect>"
        )
    parts.append(_line([frame.place(0, 0), frame.place(1, 1)], "line dashed s1"))
    return _svg(label, parts)


def columns(heights: Sequence[float], *, label: str, across: str) -> Markup:
    """Numbers as columns beside each other, as many as there are."""
    frame = _Frame((0.0, float(len(heights))), _span(0.0, max(heights)))
    parts = [*_axes(frame, across, _short, named=False)]
    gap = 0.12 if len(heights) <= 60 else 0.0
    for number, height in enumerate(heights):
        x, y = frame.place(number + gap / 2, height)
        width = frame.place(number + 1 - gap / 2, 0)[0] - x
        base = frame.place(0, 0)[1]
        parts.append(f'<rect class="bar a" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{base - y:.1f}"/>')
    return _svg(label, parts)


def bars(names: Sequence[str], values: Sequence[int], *, label: str) -> Markup:
    """Numbers as named bars below each other."""
    texts = [cut(name, 22) for name in names]
    left, row, most = 8 + max(map(len, texts)) * _LETTER, 17.0, max(1, *values)
    full = max(120.0, _WIDTH - left - 40)
    parts = []
    for number, (text, value) in enumerate(zip(texts, values, strict=True)):
        y = number * row
        width = max(1.0, full * value / most)
        parts.append(_text(left - 6, y + 12, text, "", "end"))
        parts.append(f'<rect class="bar a" x="{left:.1f}" y="{y + 3:.1f}" width="{width:.1f}" height="{row - 6:.1f}"/>')
        parts.append(_text(left + width + 5, y + 12, f"{value:,}", "quiet", "start"))
    return _svg(label, parts, left + full + 40, row * len(names))


def pairs(first: Sequence[float], second: Sequence[float], *, label: str, across: str) -> Markup:
    """Two columns for each layer, side by side."""
    frame = _Frame((0.0, float(len(first))), _span(0.0, max(*first, *second)))
    parts = [*_axes(frame, across, _short, named=False)]
    base = frame.place(0, 0)[1]
    for layer, heights in enumerate(zip(first, second, strict=True)):
        for kind, height in zip("ab", heights, strict=True):
            x, y = frame.place(layer + (0.12 if kind == "a" else 0.5), height)
            width = frame.place(layer + 0.38, 0)[0] - frame.place(layer, 0)[0]
            parts.append(
                f'<rect class="bar {kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{base - y:.1f}"/>'
            )
        if len(first) <= 16 or layer % 4 == 3:
            parts.append(_text(frame.place(layer + 0.5, 0)[0], base + 14, f"{layer + 1}", "quiet"))
    return _svg(label, parts)


def heads(values: NDArray[np.float64], *, label: str, up: str) -> Markup:
    """A dot for each head (layers, heads) over its layer, and the line of their means."""
    layers = len(values)
    frame = _Frame((0.5, layers + 0.5), _span(0.0, float(values.max())))
    parts = [*_axes(frame, "layer", _short, named=False), _text(_LEFT, 9, up, "quiet", "start")]
    for layer, row in enumerate(values.tolist(), 1):
        parts.extend(_dot(*frame.place(layer, value), "dot s0") for value in row)
        if layers <= 16 or layer % 4 == 0:
            parts.append(
                _text(*frame.place(layer, frame.y[0]), f"{layer}", "quiet").replace("<text ", '<text dy="14" ')
            )
    means = [frame.place(layer, float(row.mean())) for layer, row in enumerate(values, 1)]
    parts.append(_line(means, "line s1"))
    return _svg(label, parts)


# --- parts -----------------------------------------------------------------------------------------------------------


def _svg(label: str, parts: Sequence[str], width: float = _WIDTH, height: float = _HEIGHT) -> Markup:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return Markup(f'<svg {size} role="img" aria-label="{escape(legible(label))}">{"".join(parts)}</svg>')  # noqa: S704


def _text(x: float, y: float, words: str, kind: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(legible(words))}</text>'


def _line(points: Sequence[tuple[float, float]], kind: str) -> str:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class="{kind}" d="M{path}"/>'


def _dot(x: float, y: float, kind: str) -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def _axes(
    frame: _Frame,
    across: str,
    written: Callable[[float], str],
    *,
    named: bool = True,
    shares: bool = False,
    least: tuple[float, float] = (0.0, 0.0),
) -> Iterator[str]:
    """Lines of a grid with their numbers, and the name of the axis across.

    With `shares` the numbers across are written like those up; `least` are the least steps across and up.
    """
    for value in _ticks(*frame.y, least=least[1]):
        x, y = frame.place(frame.x[0], value)
        yield f'<line class="grid" x1="{x:.1f}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(x - 6, y + 4, written(value), "quiet", "end")
    for value in _ticks(*frame.x, least=least[0]) if named else ():
        x, y = frame.place(value, frame.y[0])
        yield _text(x, y + 15, written(value) if shares else _short(value), "quiet")
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 5, across, "quiet")


def _span(low: float, high: float, most: float = math.inf) -> tuple[float, float]:
    """The ends of an axis: room above, and something to divide by."""
    if high <= low:
        return low, low + (abs(low) or 1.0)
    return low, min(most, high + 0.04 * (high - low)) if high < most else most


def _ticks(low: float, high: float, most: int = 5, *, least: float = 0.0) -> list[float]:
    """Round numbers from low to high, at most so many, at least so far apart."""
    rough = max(least, (high - low) / most)
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in _steps(least) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _steps(least: float) -> Sequence[float]:
    """Round steps; not 2.5 where only whole ones will do."""
    return (1, 2, 5, 10) if least else (1, 2, 2.5, 5, 10)


def _short(value: float) -> str:
    """1234.5 -> 1,234; 0.00015 -> 1.5e-4, which an axis has room for."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if not 0 < abs(value) < 1e-3:
        return f"{value:.3g}"
    digits, power = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def cut(name: str, letters: int) -> str:
    """A name of at most so many letters."""
    text = legible(name)
    return text if len(text) <= letters else text[: letters - 1].rstrip() + "…"
