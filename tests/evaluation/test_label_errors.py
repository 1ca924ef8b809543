"""The search of a whole dataset for label errors: wrong labels, duplicates, rare classes, damaged files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests import model_factory
from tests.data.image_files import make_image
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.label_errors import LabelErrors, collect_facts, find_label_errors
from vitrail.evaluation.probe_run import ProbeSettings

COLORS = {"blue": (30, 60, 220), "red": (220, 50, 40), "yellow": (230, 210, 40)}


def make_colored(color: str, seed: int) -> Image.Image:
    """A picture of mostly one color, which even features of random weights tell apart."""
    return Image.blend(make_image(seed, (32, 32)), Image.new("RGB", (32, 32), COLORS[color]), 0.75)


def write_colors(root: Path, each: int = 12, splits: tuple[str, ...] = ("train", "val", "test")) -> Path:
    """`root`/SPLIT/COLOR/0.png ...; fewer in val and test."""
    seed = 0
    for split in splits:
        for color in COLORS:
            (root / split / color).mkdir(parents=True)
            for number in range(each if split == "train" else each // 3):
                make_colored(color, seed).save(root / split / color / f"{number}.png")
                seed += 1
    return root


def search(root: Path, **options: Any) -> LabelErrors:
    notes: list[str] = []
    settings = ProbeSettings(device=torch.device("cpu"), notify=notes.append)
    trained = model_factory.build_trained(model_factory.build_vit())
    return find_label_errors(trained, open_dataset(root), str(root), settings, **options)


def test_a_wrong_label_of_any_split_is_found_with_the_right_one(tmp_path: Path) -> None:
    root = write_colors(tmp_path / "colors")
    make_colored("red", 1000).save(root / "train" / "blue" / "wrong.png")
    make_colored("blue", 1001).save(root / "test" / "yellow" / "wrong.png")
    errors = search(root)
    found = {(row.split, row.image, row.label, row.likely_label) for row in errors.list_suspects()[:2]}
    assert found == {
        ("train", "train/blue/wrong.png", "blue", "red"),
        ("test", "test/yellow/wrong.png", "yellow", "blue"),
    }
    first = errors.list_suspects()[0]
    assert first.label_probability < first.likely_probability
    facts = collect_facts(errors)
    assert facts["images"] == {"train": 37, "val": 12, "test": 13}
    assert sum(facts["suspects"].values()) == len(errors.suspects) == sum(row["suspects"] for row in facts["pairs"])


def test_neighbors_are_the_most_similar_images_of_a_class_and_no_suspects(tmp_path: Path) -> None:
    errors = search(write_colors(tmp_path / "colors", splits=("train",)))
    values = torch.nn.functional.normalize(errors.features.values, dim=1)
    for label in range(3):
        neighbors = errors.find_neighbors(0, label, 2)
        allowed = [
            row for row in range(len(values))
            if row != 0 and int(errors.features.targets[row]) == label and row not in errors.suspects
        ]  # fmt: skip
        expected = sorted(allowed, key=lambda row: -float(values[row] @ values[0]))[:2]
        assert neighbors == expected


def test_a_duplicate_with_the_same_wrong_label_does_not_hide_it(tmp_path: Path) -> None:
    """Six copies of one picture with a wrong label: if five of them were trained on, the sixth would look right."""
    root = write_colors(tmp_path / "colors", splits=("train",))
    picture = make_colored("red", 1000)
    for number in range(6):
        picture.save(root / "train" / "blue" / f"wrong{number}.png")
    wrong = {row.image for row in search(root).list_suspects()}
    assert sum("wrong" in image for image in wrong) >= 4  # the folder's own val and test have some of them


def test_a_class_of_one_image_is_not_judged(tmp_path: Path) -> None:
    root = write_colors(tmp_path / "colors")
    (root / "train" / "odd").mkdir()
    make_image(77, (32, 32)).save(root / "train" / "odd" / "only.png")
    errors = search(root)
    assert errors.unjudged == 1
    assert not any(row.label == "odd" for row in errors.list_suspects())


def test_unreadable_images_are_left_out_and_many_are_refused(tmp_path: Path) -> None:
    root = write_colors(tmp_path / "colors")
    (root / "train" / "blue" / "0.png").write_bytes(b"no image")
    make_colored("red", 1000).save(root / "train" / "blue" / "wrong.png")
    errors = search(root)
    assert errors.list_suspects()[0].image == "train/blue/wrong.png"
    assert len(errors.dataset.splits["train"]) == 36
    for number in range(1, 9):
        (root / "train" / "blue" / f"{number}.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"9 images of 61 cannot be read, such as .*more than 10% are too many"):
        search(root)


def test_one_split_can_be_searched_and_others_are_refused(tmp_path: Path) -> None:
    root = write_colors(tmp_path / "colors", splits=("train", "val"))
    assert list(search(root, split="train").dataset.splits) == ["train"]
    with pytest.raises(UsageError, match=r"--split test: .* has the splits train, val"):
        search(root, split="test")
    with pytest.raises(UsageError, match="--folds is 1; it must be at least 2"):
        search(root, folds=1)


def test_images_of_several_labels_are_refused_by_name(tmp_path: Path) -> None:
    make_image(0).save(tmp_path / "0.png")
    make_image(1).save(tmp_path / "1.png")
    (tmp_path / "list.csv").write_text("path,labels\n0.png,a;b\n1.png,b\n")
    with pytest.raises(DataError, match=r"list\.csv is multi-label: label errors are looked for among images of one"):
        search(tmp_path / "list.csv")


def test_the_result_is_the_same_from_the_cache(tmp_path: Path) -> None:
    root = write_colors(tmp_path / "colors")
    first, second = search(root), search(root)
    np.testing.assert_array_equal(first.probabilities.numpy(), second.probabilities.numpy())
    assert first.suspects == second.suspects
