"""The page in a real browser: an image goes in, labels and attention come out, by mouse and keyboard alike."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import browser
from tests.browser import Chromium, Page
from tests.serving import indexes, serving
from vitrail.serving.request_handling import Service

SHOWN = "document.querySelectorAll('.head').length > 0 && !document.querySelector('.busy')"
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    with browser.open_browser() as running:
        yield running


@pytest.fixture(scope="module")
def service() -> Service:
    return serving.build_service()


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    with serving.run_server(service) as (host, port, _):
        yield f"http://{host}:{port}/"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "photo.jpg"
    path.write_bytes(serving.make_image_file(3, (90, 60), "JPEG"))
    return path


def upload(page: Page, path: Path) -> None:
    """Choose a file, as the dialog of the button would."""
    root = page.chromium.ask("DOM.getDocument", page.session)["root"]["nodeId"]
    node = page.chromium.ask("DOM.querySelector", page.session, nodeId=root, selector="#file")["nodeId"]
    page.chromium.ask("DOM.setFileInputFiles", page.session, nodeId=node, files=[str(path)])


def until(page: Page, expression: str) -> None:
    end = time.monotonic() + 20
    while not page.evaluate(expression):
        assert time.monotonic() < end, (expression, page.problems, page.evaluate("document.body.innerText"))
        time.sleep(0.02)


def press(page: Page, *keys: str) -> None:
    for key in keys:
        for kind in ("keyDown", "keyUp"):
            page.chromium.ask("Input.dispatchKeyEvent", page.session, type=kind, key=key, code=key,
                              windowsVirtualKeyCode=KEYS[key])  # fmt: skip


def slide(page: Page, selector: str, value: int) -> None:
    found = f"document.querySelector('{selector}')"
    page.evaluate(f"{found}.value = {value}; {found}.dispatchEvent(new Event('input'))")


def text(page: Page, selector: str) -> str:
    return str(page.evaluate(f"document.querySelector({selector!r}).textContent"))


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_an_image_gets_labels_bars_and_an_overlay(
    chromium: Chromium, url: str, service: Service, image: Path, width: int, dark: bool
) -> None:
    page = chromium.visit(url, width=width, dark=dark)
    assert page.overflow == []
    upload(page, image)
    until(page, SHOWN)
    for place, name in enumerate(("small", "other")):
        [answer] = service.models[name].classifier([image.read_bytes()], top=5)
        panel = f".panel:nth-child({place + 1})"
        assert text(page, f"{panel} .verdict") == answer[0][0]
        labels = page.evaluate(
            f"[...document.querySelectorAll('{panel} .name span:first-child')].map(e => e.textContent)"
        )
        assert labels == [label for label, _ in answer]
        share = page.evaluate(f"document.querySelector('{panel} .bars i').style.getPropertyValue('--share')")
        assert float(share.rstrip("%")) == pytest.approx(100 * answer[0][1], abs=0.01)
    assert page.evaluate("document.querySelectorAll('.rollout:not([hidden])').length") == 2
    assert page.evaluate("document.querySelector('.rollout').naturalWidth") == 32
    assert "small: " in text(page, "#status")
    assert page.overflow == []
    assert page.problems == []
    assert all(request.startswith((url, f"blob:{url}")) for request in page.requests)


def test_the_overlay_lies_on_what_the_model_sees_and_can_be_faded(chromium: Chromium, url: str, image: Path) -> None:
    page = chromium.visit(url)
    upload(page, image)
    until(page, SHOWN)
    box = "JSON.stringify(document.querySelector('%s').getBoundingClientRect())"
    photo, overlay = (json.loads(page.evaluate(box % name)) for name in (".photo", ".rollout"))
    assert overlay == pytest.approx(photo, abs=1)  # this model sees all of the image
    assert photo["width"] > 300
    slide(page, "#opacity", 20)
    until(page, "getComputedStyle(document.querySelector('.rollout')).opacity === '0.2'")
    assert text(page, "#opacity-text") == "20 %"


def test_patches_can_be_reached_by_keyboard_alone(chromium: Chromium, url: str, image: Path) -> None:
    page = chromium.visit(url)
    upload(page, image)
    until(page, SHOWN)
    for _ in range(20):
        press(page, "Tab")
        if page.evaluate("document.activeElement.className") == "stage":
            break
    assert page.evaluate("document.activeElement.className") == "stage"
    outline = "getComputedStyle(document.activeElement).outlineWidth"
    assert page.evaluate(outline) == "3px"
    press(page, "ArrowDown")
    assert "row 3, column 3 looks most at" in text(page, ".where")
    press(page, "ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowLeft")
    assert "row 2, column 1 looks most at" in text(page, ".where")
    assert page.evaluate("document.querySelectorAll('.map:not([hidden])').length") == 2  # both models follow
    press(page, "Escape")
    assert text(page, ".where").startswith("Attention rollout")
    assert page.evaluate("document.querySelectorAll('.rollout:not([hidden])').length") == 2


def test_pointing_at_a_patch_shows_its_attention_in_every_head_of_a_layer(
    chromium: Chromium, url: str, image: Path
) -> None:
    page = chromium.visit(url)
    upload(page, image)
    until(page, SHOWN)
    assert page.evaluate("document.querySelectorAll('.panel:first-child .head').length") == 4
    drawn = "[...document.querySelectorAll('.panel:first-child .head canvas')].map(c => c.toDataURL()).join()"
    before = page.evaluate(drawn)
    x, y = page.evaluate(
        "(() => { const b = document.querySelector('.seen').getBoundingClientRect();"
        " return [b.left + b.width * 0.9, b.top + b.height * 0.1]; })()"
    )
    page.chromium.ask("Input.dispatchMouseEvent", page.session, type="mouseMoved", x=x, y=y)
    until(page, "document.querySelector('.where').textContent.includes('row 1, column 4 looks')")
    pointed = page.evaluate(drawn)
    assert pointed != before
    slide(page, ".layer input", 1)
    until(page, "document.querySelector('.where').textContent.includes('layer 1')")
    assert page.evaluate(drawn) not in (before, pointed)
    page.evaluate("document.querySelector('.head').click()")
    assert "layer 1, head 1" in text(page, ".where")
    assert page.evaluate("document.querySelector('.head').getAttribute('aria-pressed')") == "true"
    assert page.problems == []


@pytest.mark.parametrize("name", ["text.jpg", "text.txt"])
def test_a_file_that_is_not_an_image_is_refused_in_words_and_clears_the_answer(
    chromium: Chromium, url: str, tmp_path: Path, image: Path, name: str
) -> None:
    page = chromium.visit(url)
    upload(page, image)
    until(page, SHOWN)
    (tmp_path / name).write_text("this is no image")
    upload(page, tmp_path / name)
    until(page, "!document.getElementById('problem').hidden")
    assert text(page, "#problem p").startswith("This is not an image.")
    assert page.evaluate("document.querySelectorAll('.panel').length") == 0
    assert page.evaluate("document.getElementById('shown').hidden")
    assert text(page, "#status") == ""
    assert page.evaluate("document.getElementById('again').hidden")  # it would be refused again
    upload(page, image)  # and the next one works
    until(page, SHOWN)
    assert page.evaluate("document.getElementById('problem').hidden")


def test_a_busy_server_is_said_and_asked_again(chromium: Chromium, url: str, service: Service, image: Path) -> None:
    page = chromium.visit(url)
    with contextlib.ExitStack() as full:
        full.enter_context(service.models["small"].queue.acquire(64))
        upload(page, image)
        until(page, "!document.getElementById('problem').hidden")
    assert text(page, "#problem p").startswith("Too busy: all 64 slots are taken. Try again in ")
    page.evaluate("document.getElementById('again').click()")
    until(page, SHOWN)


def test_the_veil_has_a_legend_and_says_what_rollout_is_not(chromium: Chromium, url: str, image: Path) -> None:
    page = chromium.visit(url)
    upload(page, image)
    until(page, SHOWN)
    shown = page.evaluate("document.querySelector('.legend').innerText.split(/\\s+/).join(' ')")
    assert shown == "little much attention"
    assert page.evaluate("getComputedStyle(document.querySelector('.legend i')).backgroundImage").startswith("linear")
    assert "It is not the reason for the answer" in text(page, ".where")


def test_the_classes_of_the_chosen_model_can_be_listed(chromium: Chromium, url: str, service: Service) -> None:
    page = chromium.visit(url)
    labels = list(service.models["small"].classifier.labels)
    assert text(page, "#list") == f"{len(labels)} classes"
    page.evaluate("document.getElementById('list').click()")
    until(page, "document.getElementById('classes').open")
    assert page.evaluate("[...document.querySelectorAll('#classes li')].map(e => e.textContent)") == labels
    assert text(page, "#classes-title") == "What small can answer"
    press(page, "Escape")
    until(page, "!document.getElementById('classes').open")


@pytest.mark.parametrize("touch", [False, True])
def test_a_finger_taps_and_a_mouse_points_and_drops(chromium: Chromium, url: str, image: Path, touch: bool) -> None:
    page = chromium.visit(url, width=390 if touch else 1280)
    page.chromium.ask("Emulation.setTouchEmulationEnabled", page.session, enabled=touch)
    assert page.evaluate("matchMedia('(pointer: coarse)').matches") == touch
    assert ("drop one anywhere" in page.evaluate("document.body.innerText")) != touch
    upload(page, image)
    until(page, SHOWN)
    hint = text(page, ".hint")
    assert hint.startswith("Tap a patch" if touch else "Point at a patch")
    shown = page.evaluate("document.body.innerText")
    assert [word in shown for word in ("arrow keys", "Point at", "drop")] == [not touch] * 3


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_of_the_api_opens_without_a_problem(chromium: Chromium, url: str, width: int) -> None:
    page = chromium.visit(f"{url}docs", width=width)
    assert page.problems == []
    assert page.overflow == []
    assert all(request.startswith(url) for request in page.requests)
    assert page.evaluate("getComputedStyle(document.querySelector('pre')).overflowX") == "auto"


@pytest.mark.parametrize("width", [390, 1280])
def test_similar_images_of_a_served_index_are_shown(chromium: Chromium, tmp_path: Path, width: int) -> None:
    index = indexes.build_index(tmp_path)
    photo, broken = (tmp_path / "images" / "photos" / f"{number}.png" for number in (4, 6))
    broken.write_bytes(b"an image no more")
    service = serving.build_service(index=index, image_root=tmp_path / "images")
    with serving.run_server(service) as (host, port, _):
        url = f"http://{host}:{port}/"
        page = chromium.visit(url, width=width)
        assert page.evaluate("document.getElementById('similar').hidden")
        upload(page, photo)
        until(page, SHOWN)
        until(page, "document.querySelectorAll('#similar li').length === 19")
        until(page, "document.querySelectorAll('#similar img').length === 11")  # those outside and the broken have none
        until(page, "[...document.querySelectorAll('#similar img')].every(e => e.complete && e.naturalWidth === 32)")
        assert text(page, "#similar-title") == "Most similar of 19 images, by the features of small"
        first = "#similar li:first-child"
        assert (text(page, f"{first} .file"), text(page, f"{first} .similarity")) == ("photos/4.png", "1.000")
        assert page.evaluate(f"document.querySelector('{first} img').alt") == "photos/4.png"
        assert page.overflow == []
        assert [each for each in page.problems if "/v1/thumbnail?row=6" not in each] == []
        assert all(request.startswith((url, f"blob:{url}")) for request in page.requests)
        if folder := os.environ.get("VITRAIL_TEST_SCREENSHOTS"):
            page.screenshot(Path(folder) / f"similar-{width}.png")


def test_a_key_is_asked_for(chromium: Chromium, image: Path) -> None:
    with serving.run_server(serving.build_service(key="sesame")) as (host, port, _):
        page = chromium.visit(f"http://{host}:{port}/")
        until(page, "!document.getElementById('locked').hidden")
        page.evaluate("document.getElementById('key').value = 'sesame'")
        page.evaluate("document.getElementById('locked').requestSubmit()")
        until(page, "document.getElementById('locked').hidden")
        upload(page, image)
        until(page, SHOWN)


def test_everything_that_is_worked_with_has_a_name(chromium: Chromium, url: str, image: Path) -> None:
    """What a screen reader would say of each control, from the browser's own accessibility tree."""
    page = chromium.visit(url)
    upload(page, image)
    until(page, SHOWN)
    nodes = page.chromium.ask("Accessibility.getFullAXTree", page.session)["nodes"]
    worked = ("button", "slider", "combobox", "MenuListPopup", "textbox", "application", "image")
    found = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
    named = [(role, name) for role, name in found if role in worked and role != "MenuListPopup"]
    assert {"button", "slider", "combobox", "application", "image"} <= {role for role, _ in named}
    assert [role for role, name in named if not name.strip()] == []
    assert ("image", "Attention rollout: bright where the model looked most") in named
