"""Results as HTML: tables, notes and confusion matrices, with every name escaped."""

import numpy as np

from vitrail.api import notebook
from vitrail.report.svg_charts import MAX_NAMED_CLASSES


def test_tables_and_notes_are_escaped() -> None:
    assert notebook.render_table({"a<b": "<c>"}) == "<table><tr><th>a&lt;b</th><td>&lt;c&gt;</td></tr></table>"
    assert notebook.render_notes(["1 < 2"]) == ['<p class="quiet">1 &lt; 2</p>']
    html = notebook.wrap_html("<p>x</p>")
    assert html.startswith("<style")
    assert html.endswith('<div class="vitrail"><p>x</p></div>')


def test_a_confusion_matrix_names_the_classes_that_occur() -> None:
    confusion = np.zeros((4, 4), np.int64)
    confusion[0, 0], confusion[0, 2] = 7, 2
    html = notebook.render_confusion(confusion, ["<b>", "never", "tulip", "nor this"])
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert "tulip" in html
    assert "never" not in html
    assert "nor this" not in html


def test_no_matrix_is_drawn_of_no_images_or_of_too_many_classes() -> None:
    assert notebook.render_confusion(np.zeros((2, 2), np.int64), ["a", "b"]) == ""
    many = MAX_NAMED_CLASSES + 1
    assert notebook.render_confusion(np.eye(many, dtype=np.int64), [str(index) for index in range(many)]) == ""
