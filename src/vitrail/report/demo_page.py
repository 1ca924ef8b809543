"""The page of `vitrail demo`: one self-contained file with charts and images, and no scripts."""

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from markupsafe import Markup

import vitrail
from vitrail.data.dataset import Dataset
from vitrail.data.decode import decode
from vitrail.evaluation.probe import ProbeScore
from vitrail.report import fact_rows, svg_charts
from vitrail.report.model_figures import encode_webp
from vitrail.report.page_templates import load_template
from vitrail.report.svg_charts import CurveLine
from vitrail.training.learning_curve import METHODS, CurveSettings, LearningCurve
from vitrail.visualization import Pixels
from vitrail.weights.trained import Trained

_EXAMPLES = 12  # images of each class in the page


class PhotoPrediction(NamedTuple):
    """A photo with its likeliest labels."""

    name: str
    credit: str
    labels: tuple[tuple[str, float], ...]
    """Labels and probabilities, the likeliest first."""
    image: Pixels
    rollout: Pixels


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoFacts:
    """What the page shows."""

    model: Trained
    curves: tuple[LearningCurve, LearningCurve]
    """Of photographs, and of digits."""
    settings: CurveSettings
    """Of the photographs' curve."""
    data: Dataset
    """The photographs."""
    finetuned: dict[str, Any]
    photos: Sequence[PhotoPrediction]
    seconds: float


class CurveTable(NamedTuple):
    """A learning curve as the page shows it."""

    chart: Markup
    methods: list[tuple[str, str]]
    """With the color of each."""
    rows: list[tuple[int, list[str]]]
    """The images of each class, and the accuracy of each method."""


def render_demo_page(facts: DemoFacts) -> str:
    """Render the whole page."""
    photographs, digits = facts.curves
    return load_template("demo.html").render(
        facts=facts,
        date=f"{datetime.datetime.now(datetime.UTC):%-d %B %Y}",
        first={method: scores[0] for method, scores in photographs.scores.items()},
        last={method: scores[-1] for method, scores in photographs.scores.items()},
        photographs=photographs,
        digits=digits,
        photograph_table=_make_table(photographs),
        digit_table=_make_table(digits),
        examples=_draw_examples(facts.data),
        photos=[
            (photo, encode_webp(photo.image), encode_webp(photo.rollout), list_short_labels(photo.labels))
            for photo in facts.photos
        ],
        labels=len(facts.model.labels or ()),
        parameters=sum(parameter.numel() for parameter in facts.model.model.parameters()),
        rollout_caution=fact_rows.ROLLOUT_CAUTION,
        cores=torch.get_num_threads(),
        versions=f"vitrail {vitrail.__version__}, torch {torch.__version__}",
    )


def format_score(score: ProbeScore) -> str:
    """The mean accuracy with its standard deviation over the draws: 92.7 ± 3.7 %."""
    spread = "" if score.std is None else f" ± {100 * score.std:.1f}"
    return f"{100 * score.top1:.1f}{spread}"


def list_short_labels(labels: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """The labels, each by the first of its synonyms."""
    return [(label.partition(",")[0], probability) for label, probability in labels]


def _make_table(curve: LearningCurve) -> CurveTable:
    shots = [score.shots or 0 for score in next(iter(curve.scores.values()))]
    lines = [
        CurveLine(METHODS.index(method), [score.top1 for score in scores], [score.std or 0.0 for score in scores])
        for method, scores in curve.scores.items()
    ]
    ends = [f"{method} from {scores[0].top1:.1%} to {scores[-1].top1:.1%}" for method, scores in curve.scores.items()]
    chart = svg_charts.draw_learning_curve(
        lines,
        shots,
        label=f"accuracy from {shots[0]} to {shots[-1]} images of each class: {', '.join(ends)}",
        x_label="training images of each class",
    )
    rows = [
        (number, [format_score(scores[index]) for scores in curve.scores.values()])
        for index, number in enumerate(shots)
    ]
    return CurveTable(chart, [(method, "abc"[METHODS.index(method)]) for method in curve.scores], rows)


def _draw_examples(data: Dataset) -> list[tuple[str, str]]:
    """Each class, and a strip of its training images."""
    split = data.splits["train"]
    strips = []
    for label, name in enumerate(data.classes):
        rows = [row for row in range(len(split)) if split.get_labels(row) == (label,)][:_EXAMPLES]
        images = [decode(split.read_image(row), 3, name=split.get_image_name(row)).numpy() for row in rows]
        padded = [np.pad(image, ((0, 0), (0, 0), (0, 1)), constant_values=255) for image in images]
        strips.append((name, encode_webp(np.concatenate(padded, axis=2).transpose(1, 2, 0))))
    return strips
