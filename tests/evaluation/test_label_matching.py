"""A dataset's classes among a model's outputs."""

import json
from pathlib import Path

import pytest

from tests.data.image_files import write_image_folder
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError
from vitrail.evaluation import label_matching
from vitrail.weights.trained import load_imagenet1k_classes

IMAGENET = tuple(entry.name for entry in load_imagenet1k_classes())


def test_classes_are_found_by_name_in_any_order_and_number() -> None:
    assert label_matching.match_outputs(("tulip", "rose"), ("rose", "lily", "tulip"), 3) == [2, 0]


def test_imagenets_classes_are_found_by_their_wordnet_ids() -> None:
    assert label_matching.match_outputs(("n01443537", "n01440764"), IMAGENET, 1000) == [1, 0]
    some = (IMAGENET[7], IMAGENET[1])  # as Tiny-ImageNet's
    assert label_matching.match_outputs(("n01443537",), some, 2) == [1]
    with pytest.raises(DataError, match="no class 'n01440764'"):
        label_matching.match_outputs(("n01440764",), some, 2)
    with pytest.raises(DataError, match="no class 'n01443537'"):
        label_matching.match_outputs(("n01443537",), (IMAGENET[1], "my cat"), 2)


def test_classes_called_by_numbers_are_outputs_and_names_that_occur_twice_are_refused() -> None:
    assert label_matching.match_outputs(("2", "0"), ("rose", "lily", "tulip"), 3) == [2, 0]
    with pytest.raises(DataError, match="several classes called 'crane'"):
        label_matching.match_outputs(("crane",), ("crane", "lily", "crane"), 3)


def test_numbers_with_leading_zeros_are_names() -> None:
    with pytest.raises(DataError, match=r"no class '001': it has names such as 'rose', and numbers without lead"):
        label_matching.match_outputs(("001", "002"), ("rose", "lily", "tulip"), 3)
    assert label_matching.match_outputs(("002", "001"), ("001", "002"), 2) == [1, 0]


def test_without_names_the_order_counts() -> None:
    assert label_matching.match_outputs(("a", "b"), None, 2) == [0, 1]
    with pytest.raises(DataError, match="3 outputs without names, and the dataset 2 classes"):
        label_matching.match_outputs(("a", "b"), None, 3)


def test_an_unknown_class_is_named_with_the_nearest() -> None:
    with pytest.raises(
        DataError, match=r"no class 'rosa', nor any other of the dataset; the closest is 'rose'\. Fine-tu"
    ):
        label_matching.match_outputs(("rosa",), ("rose", "tulip"), 2)
    with pytest.raises(DataError, match=r"no class 'cat', nor any other of the dataset; it has 'rose'\. Fine-tune it"):
        label_matching.match_outputs(("cat", "dog"), ("rose", "tulip"), 2)
    with pytest.raises(DataError, match=r"no class 'rosa'; the closest is 'rose'"):
        label_matching.match_outputs(("rosa", "tulip"), ("rose", "tulip"), 2)


def test_a_subset_is_read_by_label_id_or_number(tmp_path: Path) -> None:
    file = tmp_path / "subset.txt"
    file.write_text(f"n01443537\n{IMAGENET[5]}\n\n7\n")
    assert label_matching.read_class_subset(file, IMAGENET, 1000) == [1, 5, 7]


@pytest.mark.parametrize(
    ("text", "message"), [("moon\n", "no class 'moon'"), ("", "at least one"), ("1\n1\n", "each once")]
)
def test_bad_subsets_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "subset.txt"
    file.write_text(text)
    with pytest.raises(DataError, match=message):
        label_matching.read_class_subset(file, None, 10)


def read_real(tmp_path: Path, lists: object, names: list[str] | None = None) -> list[frozenset[int]]:
    root = write_image_folder(tmp_path / "data", "test", each=2)
    if names is not None:
        paths = sorted(root.rglob("*.*"))
        for path, name in zip(paths, names, strict=True):
            path.rename(path.with_name(name))
    file = tmp_path / "real.json"
    file.write_text(json.dumps(lists))
    return label_matching.read_real_labels(file, open_dataset(str(root)).splits["test"])


def test_real_labels_go_by_the_number_in_imagenets_names(tmp_path: Path) -> None:
    names = [f"ILSVRC2012_val_{number:08}.JPEG" for number in (4, 1, 3, 2)]
    assert read_real(tmp_path, [[1], [2, 3], [], [4]], names) == [{1}, {4}, {2, 3}, frozenset()]


def test_real_labels_of_other_images_go_by_their_order(tmp_path: Path) -> None:
    assert read_real(tmp_path, [[1], [2], [], [4, 5]]) == [{1}, {2}, frozenset(), {4, 5}]


@pytest.mark.parametrize("lists", [[[1]] * 3, [[1]] * 5])
def test_a_real_file_of_the_wrong_length_is_refused(tmp_path: Path, lists: object) -> None:
    with pytest.raises(DataError, match="the dataset has 4 images"):
        read_real(tmp_path, lists)


@pytest.mark.parametrize("lists", [{"a": 1}, [1, 2], [["x"]]])
def test_a_file_of_something_else_is_refused(tmp_path: Path, lists: object) -> None:
    with pytest.raises(DataError, match="must hold a list of labels"):
        read_real(tmp_path, lists)
