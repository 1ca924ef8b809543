"""Figures of the report that need the weights or the images."""

import csv
import re
from pathlib import Path

import numpy as np

from tests import model_factory
from tests.data.image_files import write_image_folder
from tests.report.run_folders import isolate_home
from tests.report.test_write_report import CPU, MISSING, parse_page
from vitrail.data.sources import open_dataset
from vitrail.report.model_figures import (
    MAX_MISTAKES,
    MAX_ROLLOUTS,
    ReportFigure,
    RunImages,
    _list_labels,
    encode_webp,
    make_model_figures,
)
from vitrail.report.result_files import load_inputs
from vitrail.report.run_facts import gather_facts
from vitrail.report.write_report import write_report
from vitrail.visualization import image_grids
from vitrail.weights.trained import require_preprocess


def test_the_mistakes_shown_are_the_surest_of_the_table(run: Path) -> None:
    with (run / "predictions.csv").open(newline="") as file:
        wrong = [row for row in csv.DictReader(file) if row["correct"] == "0"]
    wrong.sort(key=lambda row: -float(row["probability"]))
    shown = re.findall(r"test/\w+/\d+\.jpg", parse_page(run / "report.html").sections["mistakes"])
    assert shown == [row["image"] for row in wrong][:MAX_MISTAKES]


def test_a_set_that_changed_is_not_mistaken_for_the_runs(run: Path, tmp_path: Path) -> None:
    write_image_folder(tmp_path / "other", "train", "val", "test", each=2)
    with isolate_home(tmp_path):
        write_report(run, open_dataset(str(tmp_path / "other")), CPU, tmp_path / "page.html")
    assert "has changed: 4 of 8 evaluated images are missing" in parse_page(tmp_path / "page.html").sections["mistakes"]


def test_the_worst_pictures_leave_room_below_five_megabytes(run: Path) -> None:
    """Noise is what compresses least: all pictures of images that a page may have, and of many positions, as noise."""
    facts = gather_facts(run)
    noise = np.random.default_rng(0).integers(0, 256, (3, 512, 512), dtype=np.uint8)
    one = len(encode_webp(image_grids.to_rgb_array(image_grids.resize_image(noise, 192 / 512))))
    images = 2 * (MAX_MISTAKES + MAX_ROLLOUTS + 2) * one
    places = make_model_figures(
        facts, model_factory.build_trained(model_factory.build_vit(patch=1, image_size=(64, 64))), MISSING, CPU
    ).positions
    assert isinstance(places, ReportFigure)
    assert "16 × 16 patches of 64 × 64, one in 4 each way" in places.caption
    assert images + len(places.image) < 3_000_000


def test_labels_of_an_image_are_right_extra_or_missing(tmp_path: Path) -> None:
    """One threshold is below every probability and the other above; one image has both labels and the other none."""
    write_image_folder(tmp_path / "set", "train", each=2)
    names = ["train/rose/0.jpg", "train/rose/1.jpg"]
    (tmp_path / "set" / "list.csv").write_text(f"path,labels,split\n{names[0]},a;b,test\n{names[1]},,test\n")
    split = open_dataset(str(tmp_path / "set" / "list.csv")).splits["test"]
    images = RunImages(split, {split.get_image_name(row): row for row in range(2)}, {})
    trained = model_factory.build_trained(
        model_factory.build_vit(classes=2), labels=("a", "b"), multi_label=True, label_thresholds=(0.0, 1.0)
    )
    inputs = load_inputs(split, range(2), require_preprocess(trained))
    both, none = _list_labels(trained, images, list(images.rows), inputs)
    assert {(label.name, label.kind, label.threshold) for label in both} == {("a", "right", 0), ("b", "missing", 1)}
    assert [(label.name, label.kind) for label in none] == [("a", "extra")]
    assert both[0].probability >= both[1].probability
