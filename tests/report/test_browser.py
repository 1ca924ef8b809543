"""The page in a real browser: no error, no request, nothing wider than the window, on a phone, a screen and paper."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from PIL import Image

from tests import browser
from tests.browser import Chromium
from tests.report.run_folders import write_run_folder
from vitrail.report.html_report import render_page
from vitrail.report.run_facts import gather_facts


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    with browser.open_browser() as running:
        yield running


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with names that do not break and many classes."""
    folder = tmp_path_factory.mktemp("wide")
    classes = [f"{'unbreakable' * 9}{number}" for number in range(28)]
    predictions = [(classes[n % 28], classes[(n // 3) % 28], 0.5) for n in range(200)]
    facts = gather_facts(
        write_run_folder(folder / "run", predictions=predictions, classes=classes, data=f"/data/{'photos' * 30}")
    )
    path = folder / "report.html"
    path.write_text(render_page(facts, None, "There are no weights yet.", None), encoding="utf-8")
    return path


LOOKS: list[tuple[int, bool, Literal["screen", "print"]]] = [
    *((width, dark, "screen") for width in (390, 1280) for dark in (False, True)),
    (760, False, "print"),
]


@pytest.mark.parametrize(("width", "dark", "media"), LOOKS)
def test_the_page_opens_without_an_error_a_request_or_overflow(
    chromium: Chromium, run: Path, wide: Path, width: int, dark: bool, media: Literal["screen", "print"]
) -> None:
    for path in (run / "report.html", wide):
        shown = chromium.visit(path.as_uri(), width=width, dark=dark, media=media)
        assert shown.problems == []
        assert shown.requests == [path.as_uri()]
        assert shown.overflow == []


@pytest.mark.parametrize(("width", "pixels"), [(390, 780), (1280, 1280)])
def test_a_screenshot_is_as_wide_as_the_window_and_not_blank(
    chromium: Chromium, run: Path, tmp_path: Path, width: int, pixels: int
) -> None:
    chromium.visit((run / "report.html").as_uri(), width=width).screenshot(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as picture:
        assert picture.width == pixels
        assert picture.height > 3 * picture.width
        assert len(picture.convert("RGB").resize((100, 400)).getcolors(40_000) or ()) > 500


def test_every_picture_is_drawn_and_every_chart_has_a_size(chromium: Chromium, run: Path) -> None:
    shown = chromium.visit((run / "report.html").as_uri(), width=390)
    assert shown.evaluate("[...document.images].filter(each => !each.naturalWidth).length") == 0
    assert shown.evaluate("document.images.length") > 10
    sizes = "[...document.querySelectorAll('main svg')].map(each => each.getBoundingClientRect().height)"
    assert min(shown.evaluate(sizes)) > 30  # two named bars


def test_the_first_screen_ends_with_what_to_do_next(chromium: Chromium, run: Path, tmp_path: Path) -> None:
    classes = [f"class number {number}" for number in range(21)]
    predictions = [(classes[n % 21], classes[(n // 3) % 21], 0.5) for n in range(200)]
    many = tmp_path / "report.html"
    facts = gather_facts(write_run_folder(tmp_path / "run", predictions=predictions, classes=classes))
    many.write_text(render_page(facts, None, "There are no weights yet.", None), encoding="utf-8")
    for path in (run / "report.html", many):
        shown = chromium.visit(path.as_uri(), width=1280, height=900)
        bottom = "document.querySelector('%s').getBoundingClientRect().bottom"
        assert 0 < shown.evaluate(bottom % ".findings") < shown.evaluate(bottom % "#next") < 900


@pytest.mark.parametrize("classes", [21, 100])
def test_a_confusion_of_many_classes_is_whole_at_1280_pixels(chromium: Chromium, tmp_path: Path, classes: int) -> None:
    names = [f"a flower with a long name, {number}" for number in range(classes)]
    predictions = [(name, names[(5 * place) % classes], 0.5) for place, name in enumerate(names)]
    path = tmp_path / "report.html"
    facts = gather_facts(write_run_folder(tmp_path / "run", predictions=predictions, classes=names))
    path.write_text(render_page(facts, None, "There are no weights yet.", None), encoding="utf-8")
    shown = chromium.visit(path.as_uri(), width=1280)
    assert shown.overflow == []
    scrolled = "(e => [e.scrollWidth, e.clientWidth])(document.querySelector('.wide .scroll'))"
    wide, room = shown.evaluate(scrolled)
    assert wide <= room  # nothing of it must be scrolled to
    letters = "[...document.querySelectorAll('.wide text')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    assert min(shown.evaluate(letters)) >= 7


def test_equations_are_set_in_one_line(chromium: Chromium, run: Path) -> None:
    shown = chromium.visit((run / "report.html").as_uri())
    shown.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    heights = shown.evaluate("[...document.querySelectorAll('math')].map(each => each.getBoundingClientRect().height)")
    assert len(heights) == 5
    assert all(10 < height < 60 for height in heights)


def test_dark_is_dark_light_is_light_and_paper_is_white(chromium: Chromium, run: Path) -> None:
    url = (run / "report.html").as_uri()
    colour = "getComputedStyle(document.body).backgroundColor"
    light, dark = (chromium.visit(url, dark=dark).evaluate(colour) for dark in (False, True))
    paper = chromium.visit(url, dark=True, media="print").evaluate(colour)
    brightness = [sum(int(part) for part in shade[4:-1].split(",")) for shade in (light, dark, paper)]
    assert brightness[0] > 700 > 120 > brightness[1]
    assert brightness[2] == 765


def test_a_browser_sees_what_a_page_does_wrong(chromium: Chromium, tmp_path: Path) -> None:
    """The instrument itself: planted faults are found."""
    path = tmp_path / "bad.html"
    path.write_text(
        "<!doctype html><title>x</title><div style='width:3000px'>wide</div><img src='http://127.0.0.1:9/x.png'>"
        "<script>console.error('planted'); throw new Error('thrown')</script>"
    )
    shown = chromium.visit(path.as_uri(), width=390)
    assert shown.requests == [path.as_uri(), "http://127.0.0.1:9/x.png"]
    assert any("planted" in each for each in shown.problems)
    assert any("Uncaught" in each for each in shown.problems)
    assert shown.overflow[1:] == ["DIV."]
