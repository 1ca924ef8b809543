"""Progress is shown in a notebook or on a terminal and nowhere else; notes go to the logger."""

import contextlib
import io
import logging
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import vitrail
from tests.api.conftest import FAST, SHORT, make_trained
from vitrail.api.keyword_errors import name_keywords
from vitrail.api.progress import NotebookBar, NoteCollector, find_notebook_display, show_progress
from vitrail.errors import UsageError


class Handle:
    """What IPython's `display` returns: it remembers what it was updated with."""

    def __init__(self, shown: list[Any]) -> None:
        self.shown = shown

    def update(self, html: Any) -> None:
        self.shown.append(html)


def fake_ipython(monkeypatch: pytest.MonkeyPatch, shell: object) -> list[Any]:
    """An IPython with that shell; return what is displayed."""
    shown: list[Any] = []

    def display(html: Any, **options: Any) -> Handle:
        assert options == {"display_id": True}
        shown.append(html)
        return Handle(shown)

    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.__dict__.update(get_ipython=lambda: shell, display=module)
    module.__dict__.update(display=display, HTML=str)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_notebook_shows_a_bar(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    shown = fake_ipython(monkeypatch, SimpleNamespace(kernel=object()))
    assert find_notebook_display() is not None
    with show_progress("<training>") as update:
        update(1, 4)
        update(4, 4, "loss <1>")
    first = NotebookBar("<training>", done=1, total=4)
    assert '&lt;training&gt; <progress value="1" max="4"' in first._repr_html_()
    assert "&lt;training&gt;: 4, done in" in shown[-1]._repr_html_()
    assert "loss &lt;1&gt;" in shown[-1]._repr_html_()
    vitrail.predict("model.safetensors", "photos/test")
    assert repr(shown[-1]).startswith("predicting: ")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("shell", [None, SimpleNamespace()])
def test_ipython_without_a_kernel_is_no_notebook(monkeypatch: pytest.MonkeyPatch, shell: object) -> None:
    shown = fake_ipython(monkeypatch, shell)
    assert find_notebook_display() is None
    with show_progress("work") as update:
        update(1, 1)
    assert shown == []


def test_a_terminal_shows_a_bar_and_a_file_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    for stream, is_shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with show_progress("predicting") as update:
            update(1, 2)
        assert ("predicting" in stream.getvalue()) == is_shown


def test_notes_are_logged_and_those_worth_keeping_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vitrail")
    notes = NoteCollector()
    for sentence in ("epoch 1: loss 2", "note: held out", "warning: random weights"):
        notes(sentence)
    assert notes == ["note: held out", "warning: random weights"]
    levels = [(record.name, record.levelname) for record in caplog.records]
    assert levels == [("vitrail", "INFO"), ("vitrail", "INFO"), ("vitrail", "WARNING")]


def test_notes_of_a_call_name_its_keywords() -> None:
    @name_keywords
    def collect(*, minutes: float | None = None, balanced: bool = False) -> NoteCollector:
        return NoteCollector()

    sentence = "note: --minutes 3 is short; --balanced helps, as `vitrail train --minutes 3` does"
    notes = [collect(), NoteCollector()]
    for each in notes:
        each(sentence)
    assert list(notes[0]) == ["note: minutes=3 is short; balanced=True helps, as `vitrail train --minutes 3` does"]
    assert list(notes[1]) == [sentence]


def test_the_notes_of_a_run_name_keywords() -> None:
    data = [(np.full((8, 8, 3), 5 * label, np.uint8), label) for label in [0] * 80 + [1] * 8]
    splits: Any = {"train": data, "val": data}
    run = vitrail.finetune(splits, make_trained(), **SHORT | {"epochs": 0.1})
    assert [note for note in run.notes if note.endswith("; balanced=True gives every class the same weight")]
    assert not [note for note in run.notes if re.search(r"(?<!vitrail )--[a-z]", note)]


CALLS: dict[str, Callable[..., Any]] = {
    "finetune": lambda **own: vitrail.finetune("photos", "model.safetensors", **SHORT | {"epochs": 0.4}, **own),
    "evaluate": lambda **own: vitrail.evaluate("model.safetensors", "photos", **FAST, **own),
    "probe": lambda **own: vitrail.probe("model.safetensors", "photos", methods="knn", **FAST, **own),
    "predict": lambda **own: vitrail.predict("model.safetensors", "photos", **FAST, **own),
    "embed": lambda **own: vitrail.embed("model.safetensors", "photos", **FAST, **own),
}


@pytest.mark.parametrize("name", CALLS)
def test_progress_and_notes_go_where_the_caller_wants_them(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="vitrail")
    shown = fake_ipython(monkeypatch, SimpleNamespace(kernel=object()))
    titles: list[str] = []
    notes: list[str] = []

    @contextlib.contextmanager
    def watch(title: str) -> Iterator[Callable[..., None]]:
        titles.append(title)
        yield lambda *_: None

    result = CALLS[name](progress=watch, notify=notes.append)
    assert titles
    assert shown == []
    assert not caplog.records
    assert set(getattr(result, "notes", ())) <= set(notes)
    assert name != "finetune" or notes
    CALLS[name](progress=False)
    assert shown == []


def test_an_error_names_keywords_whoever_is_notified() -> None:
    with pytest.raises(UsageError, match=r"^batch is 0; it must be at least 1$"):
        vitrail.evaluate("model.safetensors", "photos", batch=0, notify=print)
