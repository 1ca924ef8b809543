"""Lists of images as sets: columns, several labels, and the line that is wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.image_files import list_names
from vitrail.data.file_list import open_file_list
from vitrail.errors import DataError


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_csv_with_splits(tmp_path: Path) -> None:
    lines = ("Path,label,split", "a.jpg,rose,train", "sub/b.jpg,tulip,train", "/far/c.jpg,rose,val", "d.jpg,rose,test")
    found = open_file_list(written(tmp_path / "list.csv", *lines))
    assert found.classes == ("rose", "tulip")
    assert list_names(found) == {"train": ["a.jpg", "sub/b.jpg"], "val": ["/far/c.jpg"], "test": ["d.jpg"]}
    assert found.splits["train"].get_labels(1) == (1,)
    assert found.splits["train"].read_image(1) == tmp_path / "sub/b.jpg"
    assert found.splits["val"].read_image(0) == Path("/far/c.jpg")
    assert not found.multi_label


def test_several_labels_in_csv_and_json_lines_agree(tmp_path: Path) -> None:
    rows = [("a.jpg", ["sun", "sea"], "train"), ("b.jpg", [], "train"), ("c.jpg", ["sea"], "val")]
    csv = written(tmp_path / "l.csv", "path,labels,split", *(f"{p},{';'.join(ls)},{s}" for p, ls, s in rows))
    jsonl = written(tmp_path / "l.jsonl", *(json.dumps({"path": p, "labels": ls, "split": s}) for p, ls, s in rows))
    for found in (open_file_list(csv), open_file_list(jsonl)):
        assert found.multi_label
        assert found.classes == ("sea", "sun")
        assert [found.splits["train"].get_labels(number) for number in range(2)] == [(1, 0), ()]
        assert found.splits["val"].get_labels(0) == (0,)
        assert found.splits["train"].count_per_class(2).tolist() == [1, 1]


def test_one_hot_columns_are_labels(tmp_path: Path) -> None:
    lines = (",image,Rose,Tulip,split", "7,a.jpg,1.0,0.0,train", "8,b.jpg,0,1,train", "9,c.jpg,0,1,val")
    found = open_file_list(written(tmp_path / "l.csv", *lines))
    assert (found.classes, found.multi_label) == (("Rose", "Tulip"), False)
    assert [found.splits["train"].get_labels(number) for number in range(2)] == [(0,), (1,)]
    assert found.notes == ("labels are read from 2 columns of 0 and 1: Rose, Tulip",)
    rows = [{"path": "a.jpg", "sea": 1, "sun": 1}, {"path": "b.jpg", "sea": 0, "sun": 0}]
    found = open_file_list(written(tmp_path / "l.jsonl", *map(json.dumps, rows)))
    assert (found.classes, found.multi_label) == (("sea", "sun"), True)
    assert [found.splits["train"].get_labels(number) for number in range(2)] == [(0, 1), ()]
    with_label = open_file_list(written(tmp_path / "m.csv", "path,label,Rose,Tulip", "a.jpg,x,1,0", "b.jpg,y,0,1"))
    assert with_label.classes == ("x", "y")


def test_every_one_hot_column_is_a_class_and_a_cell_that_is_no_bit_is_refused(tmp_path: Path) -> None:
    found = open_file_list(written(tmp_path / "l.csv", "path,rose,tulip,iris", "a.jpg,1,0,0", "b.jpg,0,1,0"))
    assert found.classes == ("iris", "rose", "tulip")
    lines = ("path,rose,tulip", "a.jpg,1,0", "b.jpg,0,", "c.jpg,0,1")
    with pytest.raises(DataError, match=r"l\.csv, line 3: tulip is '', and most of its column is 0 or 1"):
        open_file_list(written(tmp_path / "l.csv", *lines))


@pytest.mark.parametrize(
    "lines",
    [
        ("path,species,is_adult,is_front", "a.jpg,fox,1,0", "b.jpg,owl,0,1", "c.jpg,fox,1,1"),
        ("path,x,y", "a.jpg,0,0", "b.jpg,0,0"),
    ],
)
def test_columns_beside_others_or_without_a_one_are_no_labels(tmp_path: Path, lines: tuple[str, ...]) -> None:
    found = open_file_list(written(tmp_path / "l.csv", *lines))
    assert found.classes == ()
    assert found.notes[-1] == "no column named label or labels: the images have no labels"
    assert not any("columns" in note for note in found.notes)


def test_without_splits_each_class_is_held_out(tmp_path: Path) -> None:
    rows = [f"{number}.jpg,{number % 3}" for number in range(60)]
    found = open_file_list(written(tmp_path / "l.csv", "path,label", *rows))
    assert {name: split.count_per_class(3).tolist() for name, split in found.splits.items()} == {
        "train": [16] * 3,
        "val": [2] * 3,
        "test": [2] * 3,
    }


def test_numbers_stand_in_their_order(tmp_path: Path) -> None:
    rows = [f"{number}.jpg,{number},train" for number in (10, 9, 2)]
    assert open_file_list(written(tmp_path / "l.csv", "path,label,split", *rows)).classes == ("2", "9", "10")


def test_images_alone_have_no_labels(tmp_path: Path) -> None:
    found = open_file_list(
        written(tmp_path / "l.jsonl", *(json.dumps({"path": f"{number}.jpg"}) for number in range(20)))
    )
    assert found.classes == ()
    assert found.splits["train"].get_labels(0) == ()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.csv", "name,label\na,b\n", "columns label, name; one must be named path"),
        ("l.csv", "path,label\n", "lists no image"),
        ("l.csv", "path,label\na.jpg,x\nb.jpg,\n", "line 3: label is ''; it must be one name"),
        ("l.csv", "path,label\n,x\n", "line 2 has no path"),
        ("l.csv", "path,label,split\na.jpg,x,somewhere\n", "line 2: split is 'somewhere'"),
        ("l.csv", "path,label,split\na.jpg,x,train\nb.jpg,x,\n", "has no split, while other lines"),
        ("l.jsonl", '{"path": "a.jpg", "label": "x"}\n{"path"\n', "line 2 is not JSON"),
        ("l.jsonl", "[1]\n", "line 1 is not a JSON object"),
        ("l.jsonl", '{"path": 3, "label": "x"}\n', "path is 3; it must be text"),
        ("l.jsonl", '{"path": "a", "labels": "x", "split": "val"}\n{"path": "a", "labels": {}}\n', "labels is {}"),
        ("l.jsonl", '{"path": "a", "label": null}\n', "label is None"),
        ("l.jsonl", '{"path": "\\ud800.png", "label": "x"}\n', "is not a file name"),
        ("l.jsonl", '\n{"path": "a", "split": "val"}\n\n{"path": "b"}\n', "line 4 has no split"),
    ],
)
def test_the_wrong_line_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        open_file_list(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    path.write_bytes(b"path,label\n\xff\xfe,\x00\n")
    with pytest.raises(DataError, match="UTF-8"):
        open_file_list(path)


PIPED = """
import resource, sys
from pathlib import Path
from vitrail.data import file_list
from vitrail.errors import DataError
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30,) * 2)
try:
    print(*file_list.iter_image_paths(Path(sys.argv[1])))
except DataError as error:
    print(error)
"""


@pytest.mark.attack
def test_a_list_may_come_through_a_pipe_but_not_without_end(
    tmp_path: Path, attacked: Callable[[str, str], None]
) -> None:
    for suffix in (".csv", ".jsonl"):
        (tmp_path / f"zero{suffix}").symlink_to("/dev/zero")
        command = [sys.executable, "-c", PIPED, str(tmp_path / f"zero{suffix}")]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        assert "has a line of over 1,048,576 characters" in said
    os.mkfifo(tmp_path / "pipe.csv")
    with subprocess.Popen([sys.executable, "-c", PIPED, str(tmp_path / "pipe.csv")], stdout=subprocess.PIPE) as reader:
        (tmp_path / "pipe.csv").write_text("path,label\na.jpg,0\nb.jpg,1\n")
        lines = reader.communicate(timeout=20)[0].decode().split()
    assert lines == [str(tmp_path / name) for name in ("a.jpg", "b.jpg")]
    attacked("a list that is a link to /dev/zero", "refused after 1 MiB; a list through a pipe is read")


@pytest.mark.attack
def test_labels_of_any_number_of_digits_are_names_in_the_order_of_their_values(
    tmp_path: Path, attacked: Callable[[str, str], None]
) -> None:
    labels = ["9" * 5_000, "10", "9", "010", "1" + "0" * 5_000, "0", "9999999"]
    (tmp_path / "a.csv").write_text("path,label\n" + "".join(f"{n}.jpg,{label}\n" for n, label in enumerate(labels)))
    classes = open_file_list(tmp_path / "a.csv").classes
    assert classes == ("0", "9", "010", "10", "9999999", "9" * 5_000, "1" + "0" * 5_000)
    attacked("labels of 5,000 digits and of 9,999,999 in a list", "7 classes, sorted without making numbers of them")
