"""`vitrail.suspects`: images in memory, its texts, and training on what it wrote."""

import csv
from pathlib import Path

import numpy as np
import pytest

import vitrail
from tests.api.conftest import FAST, make_trained
from tests.evaluation.test_label_errors import COLORS, make_colored
from vitrail.errors import UsageError


def make_samples() -> list[tuple[np.ndarray, str]]:
    """Images of three colors; the first is red, and labeled blue."""
    samples = [(np.asarray(make_colored(color, seed)), color) for seed in range(12) for color in COLORS]
    return [(np.asarray(make_colored("red", 1000)), "blue"), *samples]


def test_images_in_memory_are_searched_and_trained_on_with_the_decisions(tmp_path: Path) -> None:
    samples = make_samples()
    found = vitrail.suspects(samples, make_trained(), action="drop", out=tmp_path / "found", **FAST)
    first = found.rows[0]
    assert (first.image, first.label, first.likely_label) == ("000000.png", "blue", "red")
    assert repr(found) == f"Suspects({len(found)} of 37 labels of images in memory look wrong)"
    html = found._repr_html_()
    assert "blue → red 1" in html
    assert "data:image/webp;base64," in html
    assert str(tmp_path / "found" / "suspects.html") in html
    table = tmp_path / "found" / "suspects.csv"
    with table.open(newline="") as file:
        dropped = sum(row["action"] == "drop" for row in csv.DictReader(file))
    assert dropped == sum(row.split == "train" for row in found.rows)
    if not dropped:  # the wrong image was held out
        table.write_text(table.read_text().replace("1,,", "1,drop,", 1))
    run = vitrail.finetune(samples, make_trained(), relabel=table, epochs=1, batch=8, out=tmp_path / "run", **FAST)
    images = sum(run.config["images"].values())
    assert images == 37 - run.config["relabel"]["dropped"] < 37


def test_mistakes_are_named_as_keywords(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="split is 'tset'; it takes 'train', 'val', 'test' or 'all'; did you mean"):
        vitrail.suspects("photos", make_trained(), split="tset", **FAST)
    with pytest.raises(UsageError, match=r"^folds is 1; it must be at least 2"):
        vitrail.suspects("photos", make_trained(), folds=1, **FAST)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"^out=.* must be a local folder that is new or empty"):
        vitrail.suspects("photos", make_trained(), out=tmp_path, **FAST)
