"""Shards: equal to the folder they came from, resumable, readable by anyone, and nothing hostile gets through."""

import json
import pickle
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.image_files import encode_image, list_names, make_image, read_contents, write_image_folder
from tests.data.test_pack import packed
from vitrail.data import sample_table, shards
from vitrail.data.folder import open_folder
from vitrail.data.pack import pack
from vitrail.data.shards import Sample, open_shards, write_shards
from vitrail.errors import DataError
from vitrail.files import compute_sha256


def test_shards_are_plain_tars_in_webdatasets_naming(tmp_path: Path) -> None:
    out = packed(tmp_path, each=2)
    with tarfile.open(out / "train-000000.tar") as tar:
        members = tar.getnames()
        assert members == [f"{number:09d}.{suffix}" for number in range(4) for suffix in ("jpg", "cls")]
        labels = [tar.extractfile(name).read() for name in members[1::2]]
        assert Counter(labels) == {b"0": 2, b"1": 2}
    described = json.loads((out / "set.json").read_text())
    assert described["images"] == {"train": 4, "val": 4, "test": 4}
    assert described["shards"]["val-000000.tar"]["sha256"] == compute_sha256(out / "val-000000.tar")


def test_a_set_rebuilt_meanwhile_is_noticed_and_never_mislabelled(tmp_path: Path) -> None:
    """Another process lists the folder again, grown by a class: our rows mean other images then."""
    root = write_image_folder(tmp_path / "set", "train", "val", classes=("b", "c"), each=4)
    before = open_folder(root)
    write_image_folder(root, "train", "val", classes=("a",), each=4, start=500)
    assert open_folder(root).classes == ("a", "b", "c")
    with pytest.raises(DataError, match="has changed since it was opened"):
        pack(before, tmp_path / "out")


def test_a_packed_set_without_val_gets_one_from_train_as_its_folder_does(tmp_path: Path) -> None:
    samples = [
        Sample(split, f"{split}{number}.jpg", encode_image(make_image(number)), (number % 2,))
        for split in ("train", "test")
        for number in range(20)
    ]
    write_shards(tmp_path / "set", samples, classes=["a", "b"], origin={})
    found = open_shards(tmp_path / "set")
    assert {name: split.count_per_class(2).tolist() for name, split in found.splits.items()} == {
        "train": [9, 9],
        "val": [1, 1],
        "test": [10, 10],
    }
    assert found.generated_splits == ("val",)
    assert list_names(open_shards(tmp_path / "set")) == list_names(found)
    assert sum(found.splits["train"].count_per_shard()) == 18


def test_a_set_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def samples() -> Any:
        yield Sample("train", "a.jpg", encode_image(make_image(0)), (0,))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path / "set", samples(), classes=["x"], origin={})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match=r"suffix '.txt'"):
        write_shards(tmp_path / "set", [Sample("train", "a.txt", b"", (0,))], classes=["x"], origin={})


@pytest.mark.parametrize("harm", ["cut", "missing", "no index", "no set", "bad json", "outside"])
def test_a_damaged_set_is_refused(tmp_path: Path, harm: str) -> None:
    out = packed(tmp_path, each=2)
    tar = out / "train-000000.tar"
    if harm == "cut":
        tar.write_bytes(tar.read_bytes()[:-512])
    elif harm == "missing":
        tar.unlink()
    elif harm == "no index":
        (out / "index" / "facts.json").unlink()
    elif harm == "no set":
        (out / "set.json").write_text('{"version": 1}')
    elif harm == "bad json":
        (out / "set.json").write_text("{")
    else:
        facts = out / "index" / "facts.json"
        facts.write_text(facts.read_text().replace("train-000000.tar", "../train-000000.tar"))
        tar.rename(tmp_path / "train-000000.tar")
    with pytest.raises(DataError, match="pack or download it again"):
        open_shards(out)


def test_shards_travel_to_processes_without_their_open_files(tmp_path: Path) -> None:
    split = open_shards(packed(tmp_path, each=30)).splits["train"]
    expected = read_contents(split)
    assert len(pickle.dumps(split)) < 3000
    assert read_contents(pickle.loads(pickle.dumps(split))) == expected


def test_more_shards_than_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 500)
    monkeypatch.setattr(shards, "_MAX_OPEN_FILES", 3)
    source = open_folder(write_image_folder(tmp_path / "set", "train", "val", each=10))
    pack(source, tmp_path / "out")
    train = open_shards(tmp_path / "out").splits["train"]
    assert len(train.count_per_shard()) > 10
    assert read_contents(train) == read_contents(source.splits["train"])


# --- an index that does not fit --------------------------------------------------------------------------------------

Columns = dict[str, Any]


def rewrite_index(out: Path, change: Callable[[Columns], object], *, honest: bool) -> None:
    """Change an index's columns; with the digest that belongs to them, or with that of the columns before."""
    facts = json.loads((out / "index" / "facts.json").read_text())
    columns = {name: np.load(out / "index" / f"{name}.npy") for name in facts["columns"]}
    change(columns)
    if honest:
        sample_table.write_table(out / "index", columns, {"files": facts["files"]})
        return
    for name, values in columns.items():
        np.save(out / "index" / f"{name}.npy", values)


def put(name: str, value: Any) -> Callable[[Columns], object]:
    """Set a column's second value."""
    return lambda columns: columns[name].__setitem__(1, value)


UNFIT: dict[str, Callable[[Columns], object]] = {
    "a label beyond the classes": put("label", 2),
    "a label below none": put("label", -2),
    "a shard that is not there": put("shard", 9),
    "a shard below the first": put("shard", -1),
    "shards that do not rise": lambda columns: columns.update(shard=columns["shard"][::-1].copy()),
    "an offset beyond the shard": put("offset", 2**40),
    "a negative offset": put("offset", -512),
    "a size beyond the shard": put("size", 2**40),
    "a size that overflows": put("size", 2**63 - 1),
    "a negative size": put("size", -1),
    "a split that is none": put("split", 3),
    "a negative split": put("split", -1),
    "names that end before they begin": put("name.ends", 0),
    "names that end beyond their bytes": lambda columns: columns["name.ends"].__setitem__(-1, 2**40),
    "names that leave bytes over": lambda columns: columns.update({"name.bytes": np.zeros(10**4, np.uint8)}),
    "a column that is shorter": lambda columns: columns.update(size=columns["size"][:-1]),
    "a column that is longer": lambda columns: columns.update(label=np.zeros(10**4, np.int32)),
    "a column of floats": lambda columns: columns.update(offset=columns["offset"].astype(float)),
    "a column of unsigned numbers": lambda columns: columns.update(shard=columns["shard"].astype(np.uint32)),
    "a column of texts": lambda columns: columns.update(label=columns["label"].astype(str)),
    "a column of pairs": lambda columns: columns.update(split=np.stack([columns["split"]] * 2, axis=1)),
    "a column that is missing": lambda columns: columns.pop("offset"),
    "several labels that do not rise": lambda columns: columns.update(
        {"label.ends": np.arange(len(columns["label"]), 0, -1)}
    ),
}


@pytest.mark.attack
@pytest.mark.parametrize("harm", UNFIT)
def test_an_index_that_does_not_fit_its_shards_is_refused_in_one_line(
    harm: str, tmp_path: Path, attacked: Callable[[str, str], None]
) -> None:
    out = packed(tmp_path, each=3)
    rewrite_index(out, UNFIT[harm], honest=True)
    with pytest.raises(DataError, match=r"is not a complete dataset of shards .*; pack or download it again") as caught:
        open_shards(out)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="is not a complete dataset of shards"):  # fetched, it is the same
        open_shards(f"file://{out}")
    attacked(f"a packed set's index with {harm}", "refused when it is opened, exit 3")


def test_an_index_that_fits_but_is_not_as_it_was_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = packed(tmp_path, each=3)
    rewrite_index(out, lambda columns: columns["label"].__setitem__(slice(None), 0), honest=False)
    with pytest.raises(DataError, match="is not as it was written"):
        open_shards(out)
    monkeypatch.setattr(shards, "MAX_VERIFIED_BYTES", 10)  # an index so large is not read whole
    open_shards(out)


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts.update(columns=["../../../etc/passwd"]),
        lambda facts: facts.update(columns="shard"),
        lambda facts: facts.update(columns=[7]),
        lambda facts: facts.update(columns=None),
        lambda facts: facts.update(files=[]),
        lambda facts: facts.update(files={"train-000000.tar": "x"}),
        lambda facts: facts.update(identity=7),
        lambda facts: facts.pop("files"),
    ],
)
def test_facts_that_are_none_are_refused(change: Callable[[Columns], object], tmp_path: Path) -> None:
    out = packed(tmp_path, each=2)
    facts = json.loads((out / "index" / "facts.json").read_text())
    change(facts)
    (out / "index" / "facts.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match="pack or download it again"):
        open_shards(out)
