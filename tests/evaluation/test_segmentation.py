"""IoU by hand, and a segmentation probe of squares whose color is their class (command: tests/cli/test_probe.py)."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests import model_factory
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.evaluation import segmentation
from vitrail.evaluation.probe_run import ProbeSettings
from vitrail.evaluation.segmentation import (
    compute_input_grid,
    compute_iou,
    compute_mean_iou,
    count_pixels,
    run_segmentation_probe,
)
from vitrail.weights.trained import Trained

COLORS = ((128, 128, 128), (255, 0, 0), (0, 0, 255))


def write_squares(root: Path, counts: dict[str, int], size: tuple[int, int] = (40, 48)) -> Path:
    """`root`/images/SPLIT/0.png ... and masks/SPLIT/0.png: a red or blue square on gray, and a row that is ignored."""
    generator = np.random.default_rng(0)
    for split, count in counts.items():
        for kind in ("images", "masks"):
            (root / kind / split / "squares").mkdir(parents=True)
        for number in range(count):
            top, left = generator.integers(0, 20, 2)
            mask = np.zeros(size, np.uint8)
            mask[top : top + 20, left : left + 20] = 1 + number % 2
            pixels = np.array(COLORS, np.uint8)[mask]
            mask[0] = 255
            Image.fromarray(pixels).save(root / "images" / split / "squares" / f"{number}.png")
            Image.fromarray(mask).save(root / "masks" / split / "squares" / f"{number}.png")
    return root


def probe(root: Path, trained: Trained | None = None, **changes: Any) -> dict[str, Any]:
    settings = ProbeSettings(
        **({"device": torch.device("cpu"), "methods": ("logistic",), "segmentation": root / "masks"} | changes)
    )
    trained = trained or model_factory.build_trained(model_factory.build_vit())
    facts = run_segmentation_probe(trained, open_dataset(str(root / "images")), "images", settings)
    assert facts is not None
    return facts


def test_iou_by_hand() -> None:
    """2 x 4 pixels, a logit for each: ignored pixels count nowhere, and a class that is nowhere has no IoU."""
    mask = np.array([[0, 0, 1, 255], [0, 1, 1, 255]], dtype=np.uint8)
    predicted = torch.tensor([[0, 1, 1, 2], [0, 1, 0, 0]])
    logits = torch.nn.functional.one_hot(predicted, 4).float()
    counts = count_pixels(logits, mask, 4)
    assert counts.tolist() == [[2, 2, 0, 0], [3, 3, 0, 0], [3, 3, 0, 0]]
    iou = compute_iou(counts)
    assert iou[:2].tolist() == [2 / 4, 2 / 4]  # class 0: 2 correct of 3 + 3 - 2; class 1 likewise
    assert np.isnan(iou[2:]).all()
    assert compute_mean_iou(counts) == 0.5
    both = counts + count_pixels(logits, np.full((2, 4), 2, np.uint8), 4)
    assert compute_iou(both)[:3].tolist() == [2 / 8, 2 / 7, 1 / 8]  # of all pixels together, not the images' mean


def test_logits_are_resampled_bilinearly_to_the_mask() -> None:
    """Two patches side by side, of 0 and 1, over 8 pixels: the border is where the logits are equal."""
    logits = torch.tensor([[[1.0, 0.0], [0.0, 3.0]]])  # equal a quarter of the way from the first center to the second
    mask = np.array([[0, 0, 0, 1, 1, 1, 1, 1]], dtype=np.uint8)
    assert count_pixels(logits, mask, 2).tolist() == [[3, 5], [3, 5], [3, 5]]


def test_squares_of_a_color_are_found(tmp_path: Path) -> None:
    root = write_squares(tmp_path, {"train": 12, "val": 4, "test": 4})
    (root / "masks" / "classes.txt").write_text("gray\nred\nblue\n")
    facts = probe(root, methods=("few-shot", "linear", "logistic"))
    assert (facts["split"], facts["images"], facts["chosen_on"], facts["patches"]) == ("test", 4, "val", [4, 4])
    linear, logistic = facts["scores"]
    assert list(logistic["iou"]) == ["gray", "red", "blue"]
    assert linear["learned"] == logistic["learned"] == 12 * 16
    assert logistic["miou"] == pytest.approx(np.mean(list(logistic["iou"].values())))
    assert logistic["miou"] > 0.5
    assert logistic["miou"] > probe(write_squares(tmp_path / "other", {"train": 2, "test": 4}))["scores"][0]["miou"]
    low, high = logistic["interval"]
    assert low <= logistic["miou"] <= high
    assert 0.75 < logistic["pixel_accuracy"] < 1


def test_image_and_mask_are_cut_into_the_same_patches_though_the_model_crops(tmp_path: Path) -> None:
    """A model that would see the center alone sees the whole image, so squares at the edge are found as well."""
    root = write_squares(tmp_path, {"train": 12, "val": 4, "test": 4}, size=(40, 80))
    trained = model_factory.build_trained(model_factory.build_vit())
    assert trained.preprocess is not None
    cropping = dataclasses.replace(trained, preprocess=dataclasses.replace(trained.preprocess, resize=(64,)))
    assert probe(root, cropping)["scores"] == probe(root, trained)["scores"]


def test_val_trains_too_where_that_is_asked_for_and_a_fifth_of_train_chooses_without_test(tmp_path: Path) -> None:
    root = write_squares(tmp_path, {"train": 10, "val": 4, "test": 4})
    score = probe(root, train_on_val=True)["scores"][0]
    assert (score["learned"], score["train_images"]) == (14 * 16, 14)
    two = write_squares(tmp_path / "two", {"train": 10, "val": 4})
    facts = probe(two)
    assert (facts["split"], facts["chosen_on"], facts["scores"][0]["train_images"]) == ("val", "a fifth of train", 10)


def test_images_without_a_mask_are_left_out_and_counted(tmp_path: Path) -> None:
    root = write_squares(tmp_path, {"train": 12, "val": 4, "test": 4})
    (root / "masks" / "train" / "squares" / "3.png").unlink()
    notes: list[str] = []
    facts = probe(root, notify=notes.append)
    assert facts["scores"][0]["train_images"] == 11
    assert notes[0].startswith("note: 1 of 20 images have no mask, such as ")
    for mask in (root / "masks" / "train" / "squares").iterdir():
        mask.unlink()
    with pytest.raises(DataError, match="needs masks of train, and of test or val"):
        probe(root)


def test_a_class_of_too_few_pixels_for_any_patch_counts_and_is_never_found(tmp_path: Path) -> None:
    root = write_squares(tmp_path, {"train": 12, "val": 4, "test": 4})
    path = root / "masks" / "test" / "squares" / "0.png"
    mask = np.array(Image.open(path))
    mask[5, 5] = 4
    Image.fromarray(mask).save(path)
    (score,) = probe(root)["scores"]
    assert list(score["iou"]) == [f"class {index}" for index in range(5)]
    assert (score["iou"]["class 3"], score["iou"]["class 4"]) == (None, 0)  # nowhere, and missed
    assert score["miou"] == pytest.approx(np.mean([iou for iou in score["iou"].values() if iou is not None]))


def test_masks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    root = write_squares(tmp_path, {"train": 4, "val": 2, "test": 2})
    (root / "masks" / "classes.txt").write_text("gray\nred\n")
    with pytest.raises(DataError, match="names 2 classes, and the masks have class 2"):
        probe(root)
    Image.new("L", (40, 48)).save(root / "masks" / "train" / "squares" / "0.png")
    with pytest.raises(DataError, match=r"0.png is 48 x 40 pixels and its image .*0.png 40 x 48: they must agree"):
        probe(root)
    for mask in (root / "masks").rglob("*.png"):
        Image.new("L", (48, 40)).save(mask)
    with pytest.raises(DataError, match="have one class or none"):
        probe(root)


def test_a_split_whose_pixels_are_all_ignored_is_refused(tmp_path: Path) -> None:
    root = write_squares(tmp_path, {"train": 4, "val": 2, "test": 2})
    for mask in (root / "masks" / "test").rglob("*.png"):
        Image.new("L", (48, 40), 255).save(mask)
    with pytest.raises(DataError, match=r"every pixel of the masks of test in .* is 255, which is ignored"):
        probe(root)


def test_features_that_do_not_fit_in_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_squares(tmp_path, {"train": 4, "val": 2, "test": 2})
    monkeypatch.setattr(segmentation, "get_device_memory", lambda _device: 1_000)
    with pytest.raises(DataError, match=r"the features of 8 images, . x . patches each, take .* this machine has 1"):
        probe(root)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": ("few-shot", "knn")}, "--segmentation fits a linear classifier: add linear or logistic"),
        (
            {"save": Path("x.safetensors")},
            "--save writes a classifier of images, and --segmentation fits one of",
        ),
    ],
)
def test_what_patches_do_not_have_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        probe(tmp_path, **changes)


def test_a_resnet_has_a_grid_and_a_probe_too(tmp_path: Path) -> None:
    trained = model_factory.build_trained(model_factory.build_bit())
    assert compute_input_grid(trained) == (4, 4)
    facts = probe(write_squares(tmp_path, {"train": 6, "val": 2, "test": 2}), trained)
    assert facts["features"] == trained.model.config.num_features
