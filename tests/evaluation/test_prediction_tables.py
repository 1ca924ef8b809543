"""CSV files of predictions and classes, by hand."""

import csv
from pathlib import Path

import torch

from tests.data.image_files import write_image_folder
from vitrail.data.sources import open_dataset
from vitrail.evaluation import prediction_tables
from vitrail.evaluation.label_metrics import measure_labels
from vitrail.evaluation.predictions import _make_predictions, count_predictions

LOGITS = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_row_for_each_image_has_both_names_probability_loss_and_whether_it_is_correct(tmp_path: Path) -> None:
    split = open_dataset(str(write_image_folder(tmp_path / "data", "test", each=2))).splits[
        "test"
    ]  # two of rose, two of tulip
    predictions = _make_predictions(LOGITS, torch.tensor([0, 0, 1, 1]), 1.0, multi_label=False)
    prediction_tables.write_predictions(split, ("rose", "tulip"), ("r", "=t", "x"), predictions, tmp_path / "p.csv")
    rows = read_rows(tmp_path / "p.csv")
    assert [row["image"] for row in rows] == [split.get_image_name(index) for index in range(4)]
    assert [row["label"] for row in rows] == ["rose", "rose", "tulip", "tulip"]
    assert [row["predicted"] for row in rows] == ["r", "'=t", "r", "'=t"]  # no spreadsheet takes it for a formula
    assert [row["correct"] for row in rows] == ["1", "0", "0", "1"]
    assert {row["probability"] for row in rows} == {f"{LOGITS[0].softmax(dim=0)[0]:.6f}"}
    assert rows[0]["loss"] == f"{predictions.losses[0]:.6f}"


def test_a_row_for_each_class_that_has_images_or_was_predicted(tmp_path: Path) -> None:
    predictions = _make_predictions(LOGITS, torch.tensor([0, 0, 0, 1]), 1.0, multi_label=False)
    counts = count_predictions(predictions, 3)
    prediction_tables.write_class_table(counts, ("a", "b", "c"), tmp_path / "classes.csv")
    rows = [list(row.values()) for row in read_rows(tmp_path / "classes.csv")]
    assert rows == [["a", "3", "2", "0.666667", "1.000000"], ["b", "1", "1", "1.000000", "0.500000"]]
    prediction_tables.write_class_table(counts, ("a", "b", "c"), tmp_path / "classes.csv", [5, 6, 7])
    assert [row["train_images"] for row in read_rows(tmp_path / "classes.csv")] == ["5", "6", "7"]


def test_a_row_for_each_label_of_multi_label_predictions(tmp_path: Path) -> None:
    targets = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 1, 0], [1, 1, 0]])
    scores = measure_labels(_make_predictions(LOGITS - 1, targets, 1.0, multi_label=True))
    prediction_tables.write_label_scores(scores, ("a", "b", "c"), (0.5, 0.25, 0.75), tmp_path / "labels.csv")
    rows = read_rows(tmp_path / "labels.csv")
    assert [(row["images"], row["correct"], row["predicted"]) for row in rows] == [
        ("2", "1", "2"),
        ("3", "2", "2"),
        ("0", "0", "0"),
    ]
    assert [row["recall"] for row in rows] == ["0.500000", "0.666667", ""]
    assert [row["f1"] for row in rows] == ["0.500000", "0.800000", "0.000000"]
    assert rows[2]["average_precision"] == ""
    assert [row["threshold"] for row in rows] == ["0.500000", "0.250000", "0.750000"]
