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
NAMED = 30
"""The most classes of a confusion: more would have no room for their names."""

_WIDTH, _HEIGHT = 340, 216  # a phone's width, so that letters keep their size there
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 18, 14, 36
_LETTER = 6.1  # the width of a letter of 11 pixels, about


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
    frame = _Frame((min(first, 0.0) if first < last else first - 1, last if first < last else first + 1),
                   _span(lowest, highest, most=1.0 if percent else math.inf))  # fmt: skip
    parts = [*_axes(frame, across, (lambda v: f"{v:.0%}") if percent else _short)]
    for number, line in enumerate(points):
        parts.append(_line([frame.place(*point) for point in line], f"line s{number}"))
        if len(line) == 1:
            parts.append(_dot(*frame.place(*line[0]), f"dot s{number}"))
    return _svg(label, parts)


def confusion(counts: NDArray[np.int64], names: Sequence[str], images: Sequence[int], *, label: str) -> Markup:
    """How often each class (rows) was taken for each (columns), for at most NAMED classes.

    The shade is the square root of the share of a class's images, since what matters, the mistakes, is rare; `images`
    are those of each class, also those that were taken for a class which is not shown.
    """
    texts = [_cut(name, 18) for name in names]
    longest = max(map(len, texts))
    cell = max(17.0, min(44.0, 300 / len(names)))
    left = 26 + longest * _LETTER + 8
    flat = longest * _LETTER < cell
    top = 40.0 if flat else 26 + longest * _LETTER + 6
    parts = [
        _text(left + cell * len(names) / 2, 13, "what the model said", "quiet"),
        f'<text class="quiet" text-anchor="middle" transform="translate(11 {top + cell * len(names) / 2:.1f})'
        ' rotate(-90)">true class</text>',
    ]
    for row, text in enumerate(texts):
        middle = cell * row + cell / 2
        parts.append(_text(left - 6, top + middle + 4, text, "", "end"))
        x = left + middle
        turn = "" if flat else f' transform="rotate(-90 {x + 4:.1f} {top - 7:.1f})" style="text-anchor:start"'
        shift = 0 if flat else 4
        parts.append(f'<text x="{x + shift:.1f}" y="{top - 7:.1f}" text-anchor="middle"{turn}>{escape(text)}</text>')
        for column in range(len(names)):
            number = int(counts[row, column])
            corner = (left + cell * column, top + cell * row)
            parts.append(_cell(corner, cell, number, number / max(1, images[row]), right=row == column))
    side = cell * len(names)
    return _svg(label, parts, left + side + 4, top + side + 4)


def _cell(corner: tuple[float, float], side: float, number: int, part: float, *, right: bool) -> str:
    x, y = corner
    square = f'x="{x + 0.5:.1f}" y="{y + 0.5:.1f}" width="{side - 1:.1f}" height="{side - 1:.1f}"'
    if not number:
        return f'<rect class="none" {square}/>'
    shade = math.sqrt(part)
    size = min(11.0, 1.5 * side / max(2, len(str(number))))
    words = _text(x + side / 2, y + side / 2 + size * 0.36, f"{number}", "inverse" if shade > 0.55 else "")
    words = words.replace("<text ", f'<text style="font-size:{size:.1f}px" ')
    return f'<rect class="bar {"a" if right else "b"}" {square} opacity="{max(0.12, shade):.2f}"/>{words}'


def reliability(probabilities: Sequence[float], right: Sequence[bool], *, label: str) -> Markup:
    """How often an answer is right against the probability it was given; a bar is as opaque as its images are many."""
    sure, hits = np.asarray(probabilities, dtype=float), np.asarray(right, dtype=float)
    numbers = np.clip(np.ceil(sure * BINS).astype(int) - 1, 0, BINS - 1)  # a bin holds its upper edge
    images = np.bincount(numbers, minlength=BINS)
    shares = np.bincount(numbers, weights=hits, minlength=BINS) / np.maximum(images, 1)
    frame = _Frame((0.0, 1.0), (0.0, 1.0))
    parts = [*_axes(frame, "probability of the answer", lambda value: f"{value:.0%}")]
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


def _axes(frame: _Frame, across: str, written: Callable[[float], str], *, named: bool = True) -> Iterator[str]:
    """Lines of a grid with their numbers, and the name of the axis across."""
    for value in _ticks(*frame.y):
        x, y = frame.place(frame.x[0], value)
        yield f'<line class="grid" x1="{x:.1f}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(x - 6, y + 4, written(value), "quiet", "end")
    for value in _ticks(*frame.x) if named else ():
        x, y = frame.place(value, frame.y[0])
        yield _text(x, y + 15, written(value) if frame.x == (0.0, 1.0) else _short(value), "quiet")
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 5, across, "quiet")


def _span(low: float, high: float, most: float = math.inf) -> tuple[float, float]:
    """The ends of an axis: room above, and something to divide by."""
    if high <= low:
        return low, low + (abs(low) or 1.0)
    return low, min(most, high + 0.04 * (high - low)) if high < most else most


def _ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from low to high, at most so many."""
    rough = (high - low) / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    """1234.5 -> 1,234; 0.0000123 -> 1.2e-5."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}".replace("e-0", "e-")


def _cut(name: str, letters: int) -> str:
    text = legible(name)
    return text if len(text) <= letters else text[: letters - 1].rstrip() + "…"
