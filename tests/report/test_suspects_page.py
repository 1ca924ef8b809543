"""suspects.csv and suspects.html: what is in them, and the page in a real browser."""

import base64
import csv
import json
from pathlib import Path

import pytest

from tests import browser
from tests.data.test_relabel import list_labels
from tests.evaluation.test_label_errors import make_colored, search, write_colors
from vitrail.data.relabel import relabel_dataset
from vitrail.data.sources import open_dataset
from vitrail.evaluation.label_errors import LabelErrors
from vitrail.formatting import unquote_cell
from vitrail.report.suspects_page import CSV_COLUMNS, make_csv_rows, write_suspects

SAVE = """(async () => {
  URL.createObjectURL = (blob) => { window.saved = blob; return "data:,"; };
  const forms = [...document.querySelectorAll("form")];
  forms[0].elements.action.value = "relabel";
  forms[1].elements.likely_label.value = CLASS;
  forms[1].elements.likely_label.dispatchEvent(new Event("input", { bubbles: true }));
  HTMLAnchorElement.prototype.click = () => {};
  document.getElementById("save").click();
  window.text = await window.saved.text();
})()"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> LabelErrors:
    """Three colors, with two wrong labels, one of them of an image whose name is markup and a formula."""
    root = write_colors(tmp_path_factory.mktemp("data") / "colors")
    make_colored("red", 1000).save(root / "train" / "blue" / "=<b>wrong.png")
    make_colored("blue", 1001).save(root / "test" / "yellow" / "wrong.png")
    return search(root)


@pytest.fixture(scope="module")
def folder(errors: LabelErrors, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write_suspects(errors, folder, action=None, model="a <model>")
    return folder


def test_the_table_has_a_row_for_each_suspect_and_no_decision(errors: LabelErrors, folder: Path) -> None:
    with (folder / "suspects.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    suspects = errors.list_suspects()
    assert tuple(rows[0]) == CSV_COLUMNS
    assert [unquote_cell(row["image"]) for row in rows] == [suspect.image for suspect in suspects]
    assert {row["action"] for row in rows} == {""}
    assert [row["rank"] for row in rows] == [str(number) for number in range(1, len(suspects) + 1)]


def test_an_action_is_for_training_images_alone(errors: LabelErrors) -> None:
    rows = make_csv_rows(errors.list_suspects(), "drop")
    assert {row[1] for row in rows if row[2] == "train"} == {"drop"}
    assert {row[1] for row in rows if row[2] != "train"} == {""}


def test_the_page_holds_its_images_and_escapes_names(errors: LabelErrors, folder: Path) -> None:
    page = (folder / "suspects.html").read_text(encoding="utf-8")
    assert page.count("<article") == len(errors.suspects)
    assert "<b>wrong" not in page
    assert "a &lt;model&gt;" in page
    sources = [part.partition('"')[0] for part in page.split('src="')[1:]]
    assert len(sources) >= 7 * 2, "a suspect and three neighbors of each class"
    assert all(base64.b64decode(source.partition("base64,")[2])[:4] == b"RIFF" for source in sources)
    assert all(source.startswith("data:image/webp;base64,") for source in sources)


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_the_page_opens_without_an_error_a_request_or_overflow(folder: Path, width: int, dark: bool) -> None:
    address = (folder / "suspects.html").as_uri()
    with browser.open_browser() as chromium:
        shown = chromium.visit(address, width=width, dark=dark)
        assert (shown.problems, shown.requests, shown.overflow) == ([], [address], [])


def test_decisions_made_on_the_page_are_saved_as_a_table_that_relabels(
    errors: LabelErrors, folder: Path, tmp_path: Path
) -> None:
    first, second = errors.list_suspects()[:2]
    other = next(name for name in errors.dataset.classes if name not in (second.label, second.likely_label))
    with browser.open_browser() as chromium:
        page = chromium.visit((folder / "suspects.html").as_uri())
        page.evaluate(SAVE.replace("CLASS", json.dumps(other)))
        text = next(filter(None, (page.evaluate("window.text") for _ in range(200))))
        assert page.evaluate("document.getElementById('count').textContent").startswith("relabel 2, drop 0, keep 0")
        page.evaluate(SAVE.replace("CLASS", '"nothing"').partition("HTMLAnchor")[0] + "})()")
        assert "1 with an unknown class" in page.evaluate("document.getElementById('count').textContent")
        assert page.evaluate("document.getElementById('save').disabled")
        assert page.problems == []
    (tmp_path / "suspects.csv").write_text(text, newline="")
    corrected = relabel_dataset(open_dataset(Path(errors.dataset.name)), tmp_path / "suspects.csv")
    assert corrected.label_changes is not None
    assert (corrected.label_changes.changed, corrected.label_changes.dropped) == (2, 0)
    labels = list_labels(corrected)
    assert (labels[first.image], labels[second.image]) == (first.likely_label, other)
