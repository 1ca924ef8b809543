"""Datasets of Python objects: arrays, lists, torch datasets and dicts of splits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from vitrail.data.decode import decode
from vitrail.data.memory import build_memory_dataset, convert_image
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError

PIXELS = np.arange(30 * 4 * 4 * 3, dtype=np.uint32).reshape(30, 4, 4, 3).astype(np.uint8)
FLOATS = torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255  # as torchvision's ToTensor
LABELS = [index % 3 for index in range(30)]


class TorchImages(TorchDataset[tuple[Image.Image, int]]):
    """As torchvision's datasets: pairs of a Pillow image and a class number, and the names of the classes."""

    classes = ("cat", "dog", "fox")

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(PIXELS[index]), LABELS[index]


def read_all(dataset: Any) -> dict[int, tuple[bytes, int]]:
    """Pixels and label of every image, by its row."""
    rows = {}
    for split in dataset.splits.values():
        for index in range(len(split)):
            pixels = decode(split.read_image(index)).numpy().tobytes()
            rows[int(split.rows[index])] = pixels, split.get_labels(index)[0]
    return rows


@pytest.mark.parametrize(
    "data",
    [
        (PIXELS, LABELS),
        (torch.from_numpy(PIXELS).permute(0, 3, 1, 2), torch.tensor(LABELS)),
        [(Image.fromarray(pixels), label) for pixels, label in zip(PIXELS, LABELS, strict=True)],
        [{"image": pixels, "label": label} for pixels, label in zip(PIXELS, LABELS, strict=True)],
        TorchImages(),
        (FLOATS, LABELS),
        (FLOATS.numpy(), LABELS),
        (FLOATS.half(), LABELS),
        TensorDataset(FLOATS, torch.tensor(LABELS)),
    ],
    ids=["arrays", "tensors", "pairs", "mappings", "torch", "floats", "float arrays", "half", "float pairs"],
)
def test_every_kind_gives_the_same_images_and_labels(data: Any) -> None:
    dataset = build_memory_dataset(data)
    expected = {row: (PIXELS[row].transpose(2, 0, 1).tobytes(), LABELS[row]) for row in range(30)}
    assert read_all(dataset) == expected
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 24, "val": 3, "test": 3}


def test_classes_are_the_datasets_own_or_the_labels() -> None:
    assert build_memory_dataset(TorchImages()).classes == ("cat", "dog", "fox")
    assert build_memory_dataset((PIXELS, LABELS)).classes == ("0", "1", "2")
    assert build_memory_dataset((PIXELS, ["b", "a", "c"] * 10)).classes == ("a", "b", "c")
    assert build_memory_dataset((PIXELS, [None] * 30)).classes == ()


def test_a_dict_states_the_splits() -> None:
    parts = {"train": (PIXELS[:20], LABELS[:20]), "val": (PIXELS[20:], LABELS[20:])}
    dataset = open_dataset(parts)
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 20, "val": 10}
    assert dataset.generated_splits == ()
    assert read_all(dataset)[25] == (PIXELS[25].transpose(2, 0, 1).tobytes(), LABELS[25])


def test_targets_are_read_without_the_images() -> None:
    class Lazy(TorchImages):
        targets = LABELS

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            raise AssertionError("an image was read for its label")

    assert build_memory_dataset(Lazy()).splits["train"].count_per_class(3).tolist() == [8, 8, 8]


def test_an_opened_dataset_and_a_path_pass(tmp_path: Path) -> None:
    dataset = build_memory_dataset((PIXELS, LABELS))
    assert open_dataset(dataset) is dataset
    for name in ("rose", "tulip"):
        (tmp_path / name).mkdir()
        for index in range(4):
            Image.fromarray(PIXELS[index]).save(tmp_path / name / f"{index}.png")
    assert open_dataset(tmp_path).classes == ("rose", "tulip")


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], DataError, "empty"),
        ((PIXELS, LABELS[:5]), DataError, "30 images and 5 labels"),
        ([PIXELS[0]], DataError, r"a pair \(image, label\)"),
        ([(PIXELS[0], 0.5)], DataError, "class name or a class number, not float"),
        ([(PIXELS[0], "a"), (PIXELS[1], 1)], DataError, "names or numbers"),
        ([(PIXELS[0], -2)], DataError, "class numbers are from 0"),
        ({"dev": (PIXELS, LABELS)}, UsageError, "no split 'dev'"),
        (7, UsageError, "not int"),
    ],
)
def test_wrong_data_is_refused(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_memory_dataset(data)


@pytest.mark.parametrize("shape", [(3, 8, 8), (8, 8, 2)])
def test_arrays_whose_last_axis_is_no_pixel_are_refused(shape: tuple[int, ...]) -> None:
    dataset = build_memory_dataset([(np.zeros(shape, dtype=np.uint8), label) for label in LABELS])
    hint = "; move its channels to the end" if shape[0] == 3 else "; an image is"
    with pytest.raises(DataError, match=rf"uint8 \({shape[0]}, {shape[1]}, {shape[2]}\){hint}"):
        dataset.splits["train"].read_image(0)


def test_every_value_of_uint8_comes_back_from_floats() -> None:
    values = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    for pixels in (values.astype(np.float32) / 255, torch.from_numpy(values).to(torch.float16) / 255):
        assert np.array_equal(np.asarray(convert_image(pixels, "x")), values[0])
    assert convert_image(torch.from_numpy(values)[0], "x").size == (16, 16)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (FLOATS[0] * 2 - 1, "x has values from -1 to .* floats are from 0 to 1, .* Omit Normalize"),
        (FLOATS[0].numpy() * 255, "x has values from 0 to 47; floats are from 0 to 1"),
        (torch.full((1, 4, 4), torch.nan), "from nan to nan; floats are from 0 to 1"),
        (FLOATS[0].permute(1, 2, 0), r"x is torch.float32 \(4, 4, 3\); .* without other transforms"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), r"x is torch.int64 \(3, 4, 4\); an image is"),
    ],
)
def test_floats_that_are_no_image_are_refused_with_the_rule(pixels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        convert_image(pixels, "x")


def test_faces_come_with_their_splits() -> None:
    """Faces are brighter in the middle than at the top left corner, where backgrounds are often black."""
    pytest.importorskip("skimage")
    faces = open_dataset("faces")
    assert faces.classes == ("face", "background")
    sizes = {name: np.bincount([split.get_labels(row)[0] for row in range(len(split))]).tolist()
             for name, split in faces.splits.items()}  # fmt: skip
    assert sizes == {"train": [30, 30], "val": [35, 35], "test": [35, 35]}
    names = [split.get_image_name(row) for split in faces.splits.values() for row in range(len(split))]
    assert len(set(names)) == 200
    test = faces.splits["test"]
    means: dict[int, list[float]] = {0: [], 1: []}
    for row in range(len(test)):
        pixels = decode(test.read_image(row), 1, name="face")
        assert tuple(pixels.shape) == (1, 25, 25)
        means[test.get_labels(row)[0]].append(float(pixels.float().mean()))
    assert np.mean(means[0]) > np.mean(means[1]) + 20
    assert not faces.generated_splits
