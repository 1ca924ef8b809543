"""Results as one line of text and as HTML for notebooks, light or dark."""

import html
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.formatting import format_duration, pluralize
from vitrail.report import svg_charts
from vitrail.report.model_figures import encode_webp
from vitrail.report.run_facts import RunFacts
from vitrail.report.svg_charts import ChartLine

# Text takes the notebook's own color, light or dark; what the notebook says of tables must be overruled.
_STYLE = """<style>
.vitrail { max-width: 60em; } .vitrail p { margin: .4em 0; } .vitrail .quiet { opacity: .75; font-size: .9em; }
.vitrail table { margin: 0 0 .8em !important; border-collapse: collapse; }
.vitrail tr { background: none !important; border-bottom: 1px solid rgba(128, 128, 128, .25); }
.vitrail th, .vitrail td { text-align: left !important; vertical-align: top; padding: .3em 1.2em .3em 0 !important; }
.vitrail td { overflow-wrap: anywhere; } .vitrail td img { min-width: 5em; }
.vitrail img, .vitrail svg { max-width: 100%; height: auto; }
.vitrail figure { margin: 0; } .vitrail figcaption { font-size: .9em; } .vitrail .key { margin-left: .8em; }
.vitrail .key::before { content: "\\25CF\\00A0"; } .vitrail .key.k0::before { color: #2a83c8; }
.vitrail .key.k1::before { color: #d9682a; } .vitrail .row { display: flex; flex-wrap: wrap; gap: .5em 1.5em; }
.vitrail svg text { font: 11px sans-serif; fill: currentColor; } .vitrail svg text.inverse { fill: #fff; }
.vitrail .grid, .vitrail .none { stroke: currentColor; opacity: .15; fill: none; }
.vitrail .line { fill: none; stroke-width: 2; } .vitrail .s0 { stroke: #2a83c8; } .vitrail .s1 { stroke: #d9682a; }
.vitrail .dashed { stroke-dasharray: 4 4; } .vitrail .dot { stroke: none; }
.vitrail .dot.s0, .vitrail .bar.a { fill: #2a83c8; }
.vitrail .dot.s1, .vitrail .bar.b { fill: #d9682a; }
</style>"""
_IMAGES_WIDTH = 800  # pixels of the images shown
_RUN_IMAGES = {
    "val_batch0_pred.jpg": "predictions on held-out images",
    "reconstruction.jpg": "predictions of masked patches in validation images",
}


def summarize_run(facts: RunFacts) -> str:
    """A run's result in a few words."""
    if facts.pretraining is not None:
        patches = pluralize(facts.pretraining.patches, "masked patch")
        return f"loss {facts.pretraining.loss:.3f} of {patches} on {facts.pretraining.split}"
    if facts.result is None:
        evaluations = pluralize(len(next(iter(facts.epochs.values()), ())), "evaluation")
        return f"not ended, {evaluations} so far, {pluralize(facts.config['steps'], 'step')} planned"
    low, high = facts.result.interval
    images = pluralize(facts.result.images, f"{facts.result.split} image")
    return f"{facts.result.top1:.1%} of {images} correct, 95 % interval {low:.1%} to {high:.1%}"


def render_run(folder: Path, facts: RunFacts, notes: Sequence[str]) -> str:
    """A run's numbers, curves and a few predictions."""
    rows = {"result": summarize_run(facts), "model": facts.model, "data": facts.data}
    if facts.seconds is not None:
        rows["training"] = format_duration(facts.seconds)
    rows["folder"] = str(folder)
    if (folder / "report.html").is_file():
        rows["report"] = str(folder / "report.html")
    parts = [render_table(rows), *_render_curves(facts)]
    for name, caption in _RUN_IMAGES.items():
        if (folder / name).is_file():
            parts.append(render_figure(caption, render_image(folder / name, _IMAGES_WIDTH, alt=caption)))
    return wrap_html(*parts, *render_notes(notes))


def _render_curves(facts: RunFacts) -> list[str]:
    """The curves of loss and accuracy, where there was an evaluation."""
    if not (epochs := facts.epochs.get("epoch")):
        return []
    names = ("training", "validation")
    columns = [facts.epochs["train/loss"], facts.epochs["val/loss"]]
    losses = [ChartLine(name, epochs, column) for name, column in zip(names, columns, strict=True)]
    chart = svg_charts.draw_lines(losses, label="loss of training and validation", x_label="epoch")
    charts = [render_figure("loss", chart, names)]
    accuracy = facts.epochs["metrics/accuracy_top1"]
    if any(map(math.isfinite, accuracy)):
        what = "accuracy on val" if facts.pretraining is None else "accuracy on the colors of masked patches"
        chart = svg_charts.draw_lines([ChartLine(what, epochs, accuracy)], label=what, x_label="epoch", percent=True)
        charts.append(render_figure(what, chart))
    return [f'<div class="row">{"".join(charts)}</div>']


def render_figure(caption: str, content: str, keys: Sequence[str] = ()) -> str:
    """An image or a chart below its caption, with the colors of its lines."""
    legend = "".join(f'<span class="key k{i}">{html.escape(key)}</span>' for i, key in enumerate(keys))
    return f"<figure><figcaption>{html.escape(caption)}{legend}</figcaption>{content}</figure>"


def render_image(path: Path, width: int, *, alt: str) -> str:
    """A file as an image within the page, at most `width` pixels wide."""
    with Image.open(path) as picture:
        return render_picture(picture, width, alt=alt)


def render_picture(picture: Image.Image, width: int, *, alt: str) -> str:
    """A picture within the page, at most `width` pixels wide."""
    reduced = picture.convert("RGB")
    reduced.thumbnail((width, 10 * width), Image.Resampling.LANCZOS)
    return f'<img alt="{html.escape(alt)}" src="{encode_webp(np.asarray(reduced))}">'


def render_table(rows: dict[str, str]) -> str:
    """Names and values, one row each."""
    cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in rows.items())
    return f"<table>{cells}</table>"


def render_link(url: str, text: str) -> str:
    """A paragraph with a link, and text behind it."""
    address = html.escape(url)
    return f'<p><a href="{address}" target="_blank">{address}</a>{html.escape(text)}</p>'


def wrap_html(*parts: str) -> str:
    """Parts of a result in one element, with the style that they need."""
    return f'{_STYLE}<div class="vitrail">{"".join(parts)}</div>'


def render_confusion(confusion: NDArray[np.int64], names: Sequence[str]) -> str:
    """The confusion matrix of the classes that occur, where they are few enough to name."""
    occurring = np.flatnonzero(confusion.sum(axis=0) + confusion.sum(axis=1))
    if not 0 < len(occurring) <= svg_charts.MAX_NAMED_CLASSES:
        return ""
    counts, images = confusion[np.ix_(occurring, occurring)], confusion.sum(axis=1)[occurring]
    labels = [names[index] for index in occurring.tolist()]
    chart = svg_charts.draw_confusion_matrix(counts, labels, images.tolist(), label="confusion matrix")
    return render_figure("images of each class, by their predicted class", chart)


def render_notes(notes: Sequence[str]) -> list[str]:
    """A paragraph for each note."""
    return [f'<p class="quiet">{html.escape(note)}</p>' for note in notes]
