"""The demo's page: its numbers, and that names are never markup. tests/api/test_demo.py has the whole of it."""

import dataclasses

import numpy as np
import pytest

from tests.model_factory import build_trained, build_vit
from vitrail.data.memory import build_memory_dataset
from vitrail.evaluation.probe import ProbeScore
from vitrail.report.demo_page import (
    DemoFacts,
    PhotoPrediction,
    format_score,
    list_short_labels,
    render_demo_page,
)
from vitrail.report.fact_rows import format_probability
from vitrail.training.learning_curve import METHODS, CurveSettings, LearningCurve


def make_score(method: str, shots: int, *correct: int) -> ProbeScore:
    return ProbeScore(
        method=method, train_images=2 * shots, correct=correct, test_images=50, setting=("k", 1), shots=shots
    )


@pytest.fixture
def facts() -> DemoFacts:
    scores = {method: (make_score(method, 1, 40, 44), make_score(method, 30, 49, 47)) for method in METHODS}
    curve = LearningCurve(data="faces", classes=("a", "b"), test_images=50, scores=scores)
    black = np.zeros((4, 6, 3), np.uint8)
    images = np.zeros((6, 5, 5), np.uint8)
    return DemoFacts(
        model=build_trained(build_vit()),
        curves=(curve, dataclasses.replace(curve, scores={METHODS[0]: scores[METHODS[0]]})),
        settings=CurveSettings(),
        data=build_memory_dataset({"train": (images, [0, 1] * 3), "val": (images, [0, 1] * 3)}),
        finetuned={
            "top1": 0.9, "correct": 9, "images": 10, "split": "test", "interval": [0.6, 0.98], "epochs": 2.0,
            "seconds": 3.0, "baselines": {"built-in": 8, "nearest neighbor": 5},
        },
        photos=[PhotoPrediction("cat", "A & B", (("tabby, <b>", 0.75), ("lynx", 0.25)), black, black)],
        seconds=61.0,
    )  # fmt: skip


def test_the_page_shows_the_numbers(facts: DemoFacts) -> None:
    page = render_demo_page(facts)
    assert '<div class="big">84<small>' in page
    assert page.count('<td class="n">84.0 ± 5.7</td>') == 4  # three methods, and one of the digits
    assert "<b>9 of 10</b> test images" in page
    assert "<b>80.0\N{NO-BREAK SPACE}%</b>" in page  # eight of ten, not fine-tuned


def test_a_label_is_its_first_synonym_and_never_markup(facts: DemoFacts) -> None:
    page = render_demo_page(dataclasses.replace(facts, data=dataclasses.replace(facts.data, classes=("<i>", "b"))))
    assert "<span>tabby</span>" in page
    assert "A &amp; B" in page
    assert "<i>" not in page
    assert list_short_labels([("tabby, cat", 0.5)]) == [("tabby", 0.5)]


def test_a_score_of_one_draw_has_no_deviation() -> None:
    assert format_score(make_score("built-in", 1, 40)) == "80.0"
    assert format_score(make_score("built-in", 1, 40, 44)) == "84.0 ± 5.7"


def test_a_small_probability_is_not_none() -> None:
    assert [format_probability(value) for value in (0.994, 0.004)] == ["99\N{NO-BREAK SPACE}%", "<1\N{NO-BREAK SPACE}%"]
