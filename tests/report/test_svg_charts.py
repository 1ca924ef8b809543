"""Charts: where marks stand, checked against numbers; and that a name is never markup."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.report import svg_charts
from vitrail.report.svg_charts import ChartLine

NAN = float("nan")


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)]


def lines(chart: str, kind: str) -> list[list[tuple[float, float]]]:
    return [points(path) for path in re.findall(rf'<path class="{kind}" d="([^"]*)"', chart)]


def test_a_curve_rises_where_its_numbers_do_and_keeps_their_ratios() -> None:
    chart = svg_charts.draw_lines([ChartLine("loss", (1, 2, 4), (4.0, 2.0, 1.0))], label="x", x_label="epoch")
    [[first, second, third]] = lines(chart, "line s0")
    assert (third[0] - second[0]) == pytest.approx(2 * (second[0] - first[0]), abs=0.3)
    assert (second[1] - first[1]) == pytest.approx(2 * (third[1] - second[1]), abs=0.3)
    assert first[1] < second[1] < third[1]  # down the page


def test_numbers_that_are_none_are_left_out_and_one_alone_is_a_dot() -> None:
    chart = svg_charts.draw_lines([ChartLine("loss", (1, 2, 3), (1.0, NAN, 2.0))], label="x", x_label="epoch")
    assert [len(line) for line in lines(chart, "line s0")] == [2]
    alone = svg_charts.draw_lines([ChartLine("loss", (3,), (0.5,))], label="x", x_label="epoch", percent=True)
    assert alone.count("<circle") == 1
    assert "nothing to draw" in svg_charts.draw_lines([ChartLine("loss", (1,), (NAN,))], label="x", x_label="epoch")


def written(chart: str) -> list[str]:
    return re.findall(r">([^<>]*)</text>", chart)


def test_a_short_run_has_a_point_for_each_epoch_and_ticks_at_whole_ones() -> None:
    chart = svg_charts.draw_lines([ChartLine("loss", (1, 2, 3), (4.0, 2.0, 1.0))], label="x", x_label="epoch")
    assert chart.count("<circle") == 3
    across = [text for text in written(chart) if text in ("0", "0.5", "1", "1.5", "2", "2.5", "3")]
    assert across[-4:] == ["0", "1", "2", "3"]
    one = svg_charts.draw_lines([ChartLine("top-1", (1.0,), (0.5,))], label="x", x_label="epoch", percent=True)
    assert written(one)[-3:] == ["0", "1", "epoch"]
    many = svg_charts.draw_lines([ChartLine("loss", range(50), range(50))], label="x", x_label="epoch")
    assert "<circle" not in many


def test_ticks_of_shares_differ_as_written() -> None:
    chart = svg_charts.draw_lines([ChartLine("top-1", (1, 2), (0.90, 0.907))], label="x", x_label="epoch", percent=True)
    shares = [text for text in written(chart) if text.endswith("%")]
    assert len(shares) == len(set(shares)) > 1


def test_a_small_learning_rate_fits_beside_its_axis() -> None:
    chart = svg_charts.draw_lines([ChartLine("rate", (1, 2), (0.00015, 0.00002))], label="x", x_label="epoch")
    assert "1.5e-4" in written(chart)
    assert max(map(len, written(chart))) <= 7


@pytest.mark.parametrize("classes", [21, 100])
def test_a_confusion_of_many_classes_fits_a_window_of_1280_and_its_letters_can_be_read(classes: int) -> None:
    counts = np.eye(classes, dtype=np.int64) * 8
    names = [f"a class with a long name, number {number}" for number in range(classes)]
    chart = svg_charts.draw_confusion_matrix(counts, names, [8] * classes, label="x")
    width = float(re.findall(r'<svg viewBox="0 0 (\d+)', chart)[0])
    assert width <= 1240
    sizes = [float(size) for size in re.findall(r"font-size:([\d.]+)px", chart)]
    assert len(sizes) == 3 * classes  # two names and a number for each class
    assert min(sizes) >= 7
    assert min(sizes[:2]) >= 9  # of a name
    assert len(chart) < 100_000


def test_bars_have_the_names_of_their_classes() -> None:
    chart = svg_charts.draw_named_bars(["cat", "dog"], [10, 5], label="x")
    assert written(chart) == ["cat", "10", "dog", "5"]
    widths = [float(width) for width in re.findall(r'<rect[^>]* width="([\d.]+)"', chart)]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)


def test_a_reliability_bar_is_as_high_as_its_share_of_right_answers() -> None:
    counts, correct = [*[0] * 7, 2, *[0] * 6, 4], [*[0] * 7, 1, *[0] * 6, 3]
    chart = svg_charts.draw_reliability(counts, correct, label="x", x_label="probability")
    heights = [float(height) for height in re.findall(r'<rect class="bar a"[^>]* height="([\d.]+)"', chart)]
    assert len(heights) == 2
    assert heights[0] / heights[1] == pytest.approx(0.5 / 0.75, abs=0.01)
    assert "2 predictions, 50.0% correct" in chart
    assert "4 predictions, 75.0% correct" in chart


def test_a_confusion_shows_every_count_that_is_not_zero_and_right_ones_in_another_colour() -> None:
    chart = svg_charts.draw_confusion_matrix(
        np.array([[5, 0, 2], [0, 7, 0], [1, 0, 0]]), ["a", "b", "c"], [7, 7, 1], label="x"
    )
    assert chart.count('class="bar a"') == 2
    assert chart.count('class="bar b"') == 2
    assert chart.count("<title>") == 4
    assert "c, predicted a: 1 of 1" in chart
    assert re.findall(r">(\d+)</text>", chart) == ["5", "2", "7", "1"]


def test_a_confusion_is_shaded_by_the_share_of_all_images_of_a_class() -> None:
    """Of 16 images of a, 4 were taken for a and 1 for b; the others for classes that have no column."""
    chart = svg_charts.draw_confusion_matrix(np.array([[4, 1], [0, 0]]), ["a", "b"], [16, 0], label="x")
    assert re.findall(r'opacity="([\d.]+)"', chart) == ["0.50", "0.25"]  # the roots of 4/16 and 1/16


@pytest.mark.parametrize(
    "chart",
    [
        svg_charts.draw_confusion_matrix(
            np.eye(2, dtype=np.int64), ["<script>alert(1)</script>", 'a"b & c'], [1, 1], label='"><script>'
        ),
        svg_charts.draw_lines([ChartLine("x", (1, 2), (1, 2))], label="<b>", x_label="<i>"),
        svg_charts.draw_columns([3, 2, 1], label="&", x_label="a < b"),
        svg_charts.draw_paired_columns([0.5, 0.2], [0.1, 0.9], label="x", x_label="layer"),
        svg_charts.draw_heads(np.array([[1.0, 2.0], [3.0, 4.0]]), label="x", y_label="pixels"),
        svg_charts.draw_reliability([0, 1], [0, 1], label="x", x_label="y"),
        svg_charts.draw_named_bars(["<script>", "b"], [2, 0], label="x"),
    ],
)
def test_charts_are_well_formed_and_names_are_no_markup(chart: str) -> None:
    root = ElementTree.fromstring(chart)
    assert root.get("aria-label")
    assert not {each.tag for each in root.iter()} & {"script", "b", "i"}


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_round_even_and_few(low: float, width: float) -> None:
    high = low + width
    found = svg_charts._compute_ticks(low, high)
    assert 1 <= len(found) <= 6
    assert low - 1e-6 * width <= min(found) <= max(found) <= high + 1e-6 * width
    steps = np.diff(found)
    assert np.allclose(steps, steps[:1])


def test_heads_are_dots_and_their_means_a_line() -> None:
    chart = svg_charts.draw_heads(np.array([[1.0, 3.0], [4.0, 8.0]]), label="x", y_label="pixels")
    dots = [float(y) for y in re.findall(r'cy="([\d.]+)"', chart)]
    [[first, second]] = lines(chart, "line s1")
    assert len(dots) == 4
    assert first[1] == pytest.approx((dots[0] + dots[1]) / 2, abs=0.1)
    assert second[1] == pytest.approx((dots[2] + dots[3]) / 2, abs=0.1)


def test_a_learning_curve_is_inside_its_band() -> None:
    curve = svg_charts.CurveLine(2, (0.5, 0.7, 0.9), (0.1, 0.05, 0.2))
    chart = svg_charts.draw_learning_curve([curve], (1, 5, 30), label="x", x_label="images")
    [line], [band] = lines(chart, "line s2"), lines(chart, "band s2")
    upper, lower = band[:3], band[:2:-1]
    for above, middle, below in zip(upper, line, lower, strict=True):
        assert above[0] == middle[0] == below[0]
        assert above[1] < middle[1] < below[1]  # down the page
    assert line[1][1] - upper[1][1] == pytest.approx(lower[1][1] - line[1][1], abs=0.2)
    assert line[2][1] - upper[2][1] < lower[2][1] - line[2][1]  # no accuracy is above 100 %
    assert [f">{shots}</text>" in chart for shots in (1, 5, 30)] == [True] * 3
