"""Shards: equal to the folder they came from, resumable, readable by anyone, and nothing hostile gets through."""

import io
import json
import os
import pickle
import tarfile
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.pictures import content, encoded, folder, names, picture
from vitrail.data import sample_table, shards
from vitrail.data.audit import read_excluded_images
from vitrail.data.dataset import without_images
from vitrail.data.file_list import open_file_list
from vitrail.data.folder import open_folder
from vitrail.data.pack import pack
from vitrail.data.shards import Sample, open_shards, write_shards
from vitrail.data.webdataset import expand_braces, open_tars
from vitrail.errors import DataError, UsageError
from vitrail.files import compute_sha256


def packed(tmp_path: Path, **options: Any) -> Path:
    pack(open_folder(folder(tmp_path / "set", "train", "val", "test", **options)), tmp_path / "out")
    return tmp_path / "out"


def test_shards_equal_the_folder_they_came_from(tmp_path: Path) -> None:
    out = packed(tmp_path, each=7)
    source, found, foreign = open_folder(tmp_path / "set"), open_shards(out), open_tars(str(out / "*.tar"))
    assert found.classes == source.classes
    assert foreign.classes == ("0", "1")  # anyone's reader knows the numbers alone
    for name, split in source.splits.items():
        assert content(found.splits[name]) == content(split)
        assert content(foreign.splits[name]) == content(split)
        inside = {found.splits[name].get_image_name(index).split(":")[1] for index in range(len(split))}
        assert inside == {split.get_image_name(index) for index in range(len(split))}


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


def test_classes_are_mixed_and_shards_cut_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 6000)
    out = packed(tmp_path, each=40)
    train = open_shards(out).splits["train"]
    assert len(train.count_per_shard()) > 3
    assert sum(train.count_per_shard()) == 80
    first = [train.get_labels(index)[0] for index in range(train.count_per_shard()[0])]
    assert len(set(first)) == 2


def test_equal_sets_give_equal_bytes(tmp_path: Path) -> None:
    one, two = packed(tmp_path / "a"), packed(tmp_path / "b")
    for file in sorted(one.glob("*.tar")):
        assert file.read_bytes() == (two / file.name).read_bytes()


def test_several_labels_and_none_survive(tmp_path: Path) -> None:
    root = folder(tmp_path / "set", classes=("x",), each=4)
    rows = [("x/0.jpg", ["sun", "sea"]), ("x/1.jpg", []), ("x/2.jpg", ["sea"]), ("x/3.jpg", ["sun"])]
    lines = [json.dumps({"path": path, "labels": labels, "split": "train"}) for path, labels in rows]
    lines.append(json.dumps({"path": "x/0.jpg", "labels": ["sea"], "split": "val"}))
    (root / "list.jsonl").write_text("\n".join(lines))
    pack(open_file_list(root / "list.jsonl"), tmp_path / "out")
    found, foreign = open_shards(tmp_path / "out"), open_tars(str(tmp_path / "out" / "*.tar"))
    expected = content(open_file_list(root / "list.jsonl").splits["train"])
    assert found.multi_label
    assert found.classes == ("sea", "sun")
    for split in (found.splits["train"], foreign.splits["train"]):
        assert content(split) == expected
    (root / "flat").mkdir()
    for path in (root / "x").iterdir():
        path.rename(root / "flat" / path.name)
    pack(open_folder(root / "flat"), tmp_path / "unlabelled")
    assert open_shards(tmp_path / "unlabelled").splits["train"].get_labels(0) == ()
    assert not open_shards(tmp_path / "unlabelled").multi_label


def test_packing_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 3000)
    dataset = open_folder(folder(tmp_path / "set", "train", "val", "test", each=10))

    def interrupted(done: int, total: int) -> None:
        if done >= total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(dataset, tmp_path / "out", progress=interrupted)
    assert not (tmp_path / "out").exists()
    gathering = tmp_path / "out.packing"
    before = {path.name: path.stat().st_mtime_ns for path in gathering.glob("*.tar")}
    assert before
    steps: list[tuple[int, int]] = []
    pack(dataset, tmp_path / "out", progress=lambda done, total: steps.append((done, total)))
    assert steps[0][0] >= len(before) > 0
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")}
    assert all(after[name] == time for name, time in before.items())
    assert not gathering.exists()
    assert content(open_shards(tmp_path / "out").splits["train"]) == content(dataset.splits["train"])


def test_a_changed_set_does_not_go_on_with_another_ones_shards(tmp_path: Path) -> None:
    dataset = open_folder(folder(tmp_path / "set", each=10))
    with pytest.raises(KeyboardInterrupt):
        pack(dataset, tmp_path / "out", progress=lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    (tmp_path / "set" / "rose" / "0.jpg").unlink()
    with pytest.raises(UsageError, match="another packing"):
        pack(open_folder(tmp_path / "set"), tmp_path / "out")


def test_changed_labels_do_not_go_on_with_the_old_ones(tmp_path: Path) -> None:
    root = folder(tmp_path / "set", classes=("x",), each=6)
    rows = [(f"x/{number}.jpg", "ab"[number % 2]) for number in range(6)]

    def written(rows: list[tuple[str, str]]) -> Path:
        lines = "\n".join(f"{path},{label},train" for path, label in rows)
        (root / "list.csv").write_text(f"path,label,split\n{lines}\n")
        return root / "list.csv"

    with pytest.raises(KeyboardInterrupt):
        pack(
            open_file_list(written(rows)),
            tmp_path / "out",
            progress=lambda *_: (_ for _ in ()).throw(KeyboardInterrupt),
        )
    swapped = [(path, "ba"["ab".index(label)]) for path, label in rows]
    with pytest.raises(UsageError, match="another packing"):
        pack(open_file_list(written(swapped)), tmp_path / "out")


def test_a_set_rebuilt_meanwhile_is_noticed_and_never_mislabelled(tmp_path: Path) -> None:
    """Another process lists the folder again, grown by a class: our rows mean other images then."""
    root = folder(tmp_path / "set", "train", "val", classes=("b", "c"), each=4)
    before = open_folder(root)
    folder(root, "train", "val", classes=("a",), each=4, start=500)
    assert open_folder(root).classes == ("a", "b", "c")
    with pytest.raises(DataError, match="has changed since it was opened"):
        pack(before, tmp_path / "out")


def test_the_kind_of_labels_survives(tmp_path: Path) -> None:
    root = folder(tmp_path / "set", classes=("x",), each=3)
    lines = [json.dumps({"path": f"x/{number}.jpg", "labels": ["a"], "split": "train"}) for number in range(3)]
    (root / "several.jsonl").write_text("\n".join(lines))
    pack(open_file_list(root / "several.jsonl"), tmp_path / "several")
    assert open_shards(tmp_path / "several").multi_label
    partly = [{"path": "x/0.jpg", "label": "a", "split": "train"}, {"path": "x/1.jpg", "split": "train"}]
    (root / "partly.jsonl").write_text("\n".join(map(json.dumps, partly)))
    pack(open_file_list(root / "partly.jsonl"), tmp_path / "partly")
    found = open_shards(tmp_path / "partly")
    assert not found.multi_label
    assert content(found.splits["train"]) == content(open_file_list(root / "partly.jsonl").splits["train"])


def test_class_names_that_are_no_utf8_survive(tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9")
    try:
        root = folder(tmp_path / "set", "train", "val", classes=("a", odd), each=2)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    pack(open_folder(root), tmp_path / "out")
    assert open_shards(tmp_path / "out").classes == ("a", odd)


def test_a_packed_set_without_val_gets_one_from_train_as_its_folder_does(tmp_path: Path) -> None:
    samples = [
        Sample(split, f"{split}{number}.jpg", encoded(picture(number)), (number % 2,))
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
    assert names(open_shards(tmp_path / "set")) == names(found)
    assert sum(found.splits["train"].count_per_shard()) == 18


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    dataset = open_folder(folder(tmp_path / "set", each=10))
    (tmp_path / "set" / "rose" / "3.jpg").unlink()
    with pytest.raises(DataError, match=r"rose/3.jpg cannot be read"):
        pack(dataset, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_report_says_is_left_out(tmp_path: Path) -> None:
    dataset = open_folder(folder(tmp_path / "set", "train", "val", each=3))
    report = tmp_path / "data_report.json"
    unwanted = [{"split": "train", "name": "train/rose/1.jpg"}, {"split": "val", "name": "val/tulip/0.jpg"}]
    report.write_text(json.dumps({"data": dataset.name, "leave_out": unwanted}))
    left = names(without_images(dataset, read_excluded_images(report, dataset)))
    assert "train/rose/1.jpg" not in left["train"]
    assert (len(left["train"]), len(left["val"])) == (5, 5)
    report.write_text("{}")
    with pytest.raises(DataError, match=r"not a data_report.json"):
        read_excluded_images(report, dataset)
    report.write_text(json.dumps({"data": "/another", "leave_out": []}))
    with pytest.raises(UsageError, match="is the report of /another"):
        read_excluded_images(report, dataset)
    with pytest.raises(UsageError, match="which would then contain itself"):
        pack(dataset, tmp_path / "set" / "out")
    every = {(key, name) for key, part in names(dataset).items() for name in part}
    with pytest.raises(DataError, match="nothing is left"):
        without_images(dataset, every)


def test_a_set_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def samples() -> Any:
        yield Sample("train", "a.jpg", encoded(picture(0)), (0,))
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
    expected = content(split)
    assert len(pickle.dumps(split)) < 3000
    assert content(pickle.loads(pickle.dumps(split))) == expected


def test_more_shards_than_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 500)
    monkeypatch.setattr(shards, "_MAX_OPEN_FILES", 3)
    source = open_folder(folder(tmp_path / "set", "train", "val", each=10))
    pack(source, tmp_path / "out")
    train = open_shards(tmp_path / "out").splits["train"]
    assert len(train.count_per_shard()) > 10
    assert content(train) == content(source.splits["train"])


# --- tars of other makers --------------------------------------------------------------------------------------------


def tar_of(path: Path, *members: tuple[str, bytes] | tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                header = tarfile.TarInfo(member[0])
                header.size = len(member[1])
                tar.addfile(header, io.BytesIO(member[1]))
    return path


IMAGE = encoded(picture(0))


def class_tar() -> bytes:
    file, header = io.BytesIO(), tarfile.TarInfo("a.jpg")
    header.size = len(IMAGE)
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(header, io.BytesIO(IMAGE))
    return file.getvalue()


CLASS_TAR = class_tar()


def test_names_numbers_and_json_are_labels(tmp_path: Path) -> None:
    tar_of(
        tmp_path / "train-0.tar",
        ("n/a.jpg", IMAGE),
        ("n/a.json", b'{"label": "rose", "width": 3}'),
        ("n/b.cls", b"tulip\n"),
        ("n/b.seg.png", encoded(picture(1), "PNG")),
        ("n/c.txt", b"no image here"),
    )
    tar_of(tmp_path / "val-0.tar", ("n/a.jpg", IMAGE), ("n/a.cls", b"rose"))
    found = open_tars(str(tmp_path / "*.tar"))
    assert found.classes == ("rose", "tulip")
    assert names(found) == {
        "train": ["train-0.tar:n/a.jpg", "train-0.tar:n/b.seg.png"],
        "val": ["val-0.tar:n/a.jpg"],
    }
    assert found.splits["train"].read_image(0) == IMAGE
    assert found.splits["train"].get_labels(1) == (1,)


def test_a_number_is_a_place_in_the_head_even_if_others_do_not_occur(tmp_path: Path) -> None:
    tar_of(tmp_path / "train.tar", ("a.jpg", IMAGE), ("a.cls", b"7"), ("b.jpg", IMAGE), ("b.cls", b"003"))
    tar_of(tmp_path / "val.tar", ("a.jpg", IMAGE), ("a.cls", b"0"))
    found = open_tars(str(tmp_path / "*.tar"))
    assert len(found.classes) == 8
    assert [found.splits["train"].get_labels(index) for index in (0, 1)] == [(7,), (3,)]


def test_braces_count(tmp_path: Path) -> None:
    assert expand_braces("s/{08..11}.tar") == ["s/08.tar", "s/09.tar", "s/10.tar", "s/11.tar"]
    assert expand_braces("{0..1}-{0..1}.tar") == ["0-0.tar", "0-1.tar", "1-0.tar", "1-1.tar"]
    for number in range(3):
        tar_of(tmp_path / f"{number:03d}.tar", (f"{number}.jpg", IMAGE), (f"{number}.cls", b"0"))
    assert sum(map(len, open_tars(str(tmp_path / "{000..002}.tar")).splits.values())) == 3
    with pytest.raises(DataError, match=r"003.tar does not exist"):
        open_tars(str(tmp_path / "{000..003}.tar"))
    with pytest.raises(DataError, match="count upwards"):
        expand_braces("{5..1}.tar")


def entry(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.linkname = kind, target
    return header


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([entry("a.jpg", tarfile.SYMTYPE, "/etc/passwd")], "not a regular file"),
        ([entry("a.jpg", tarfile.LNKTYPE, "b.jpg")], "not a regular file"),
        ([entry("a.jpg", tarfile.CHRTYPE)], "not a regular file"),
        ([entry("a.jpg", tarfile.FIFOTYPE)], "not a regular file"),
        ([("../a.jpg", IMAGE)], "leads outside"),
        ([("x/../../a.jpg", IMAGE)], "leads outside"),
        ([("/etc/a.jpg", IMAGE)], "leads outside"),
        ([("a.jpg", IMAGE), ("a.png", IMAGE)], "two images named a"),
        ([("a.jpg", IMAGE), ("a.cls", b"\xff\xfe")], "a.cls cannot be read"),
        ([("a.jpg", IMAGE), ("a.json", b'{"label": {}}')], "is not a label"),
        ([("a.jpg", IMAGE), ("a.json", b"[" * 100_000)], "a.json cannot be read"),
        ([("a.jpg", IMAGE), ("a.cls", b"0"), ("b.jpg", IMAGE)], "b.jpg has neither"),
        ([("a.jpg", IMAGE), ("a.cls", b"99999999999")], "below 1,000,000"),
        ([("1.tar", CLASS_TAR), ("9000000.tar", CLASS_TAR)], "9000000.tar: the label is 9000000; .*below 1,000,000"),
        ([("a.jpg", IMAGE), ("a.json", b" " * 2**21)], "limit for labels is 1 MiB"),
        ([("a.txt", b"x")], "holds no image"),
    ],
)
def test_hostile_and_senseless_tars_are_refused(tmp_path: Path, members: list[Any], message: str) -> None:
    path = tar_of(tmp_path / "x.tar", *members)
    with pytest.raises(DataError, match=message):
        open_tars(str(path))


def test_class_tars_named_by_numbers_are_classes_whatever_zeros_they_begin_with(tmp_path: Path) -> None:
    found = open_tars(str(tar_of(tmp_path / "x.tar", ("000.tar", CLASS_TAR), ("002.tar", CLASS_TAR))))
    assert found.classes == ("0", "1", "2")
    labels = {
        name: split.get_labels(row) for key, split in found.splits.items() for row, name in enumerate(names(found)[key])
    }
    assert labels == {"x.tar:000/a.jpg": (0,), "x.tar:002/a.jpg": (2,)}


def test_damaged_tars_are_refused(tmp_path: Path) -> None:
    whole = tar_of(tmp_path / "x.tar", ("a.jpg", IMAGE), ("a.cls", b"0")).read_bytes()
    for broken in (b"", b"x" * 2000, whole[:700], whole[:100], b"\x1f\x8b" + bytes(3000)):
        (tmp_path / "x.tar").write_bytes(broken)
        with pytest.raises(DataError, match=r"x\.tar"):
            open_tars(str(tmp_path / "x.tar"))


def test_damage_in_the_middle_of_a_tar_is_not_its_end(tmp_path: Path) -> None:
    """Python's tarfile stops there without a word, and the rest of the set would be missing."""
    members = [
        (f"{number}.{suffix}", content) for number in range(6) for suffix, content in (("jpg", IMAGE), ("cls", b"0"))
    ]
    whole = tar_of(tmp_path / "x.tar", *members).read_bytes()
    header = whole.index(b"3.jpg")
    flipped = whole[: header + 150] + bytes([whole[header + 150] ^ 1]) + whole[header + 151 :]
    for broken in (flipped, whole[:header], whole[: header + 200]):
        (tmp_path / "x.tar").write_bytes(broken)
        with pytest.raises(DataError, match="truncated or damaged at byte"):
            open_tars(str(tmp_path / "x.tar"))


def test_a_size_that_lies_is_refused(tmp_path: Path) -> None:
    header = tarfile.TarInfo("a.jpg")
    header.size = 10**12
    (tmp_path / "x.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + IMAGE)
    with pytest.raises(DataError, match="truncated or damaged"):
        open_tars(str(tmp_path / "x.tar"))


def test_mutated_tars_are_read_or_refused_and_nothing_is_written(tmp_path: Path) -> None:
    """300 tars with flipped bytes: an index or one DataError, and no new file anywhere."""
    generator = np.random.default_rng(0)
    path = tar_of(tmp_path / "x.tar", ("a.jpg", IMAGE), ("a.cls", b"0"), ("b.jpg", IMAGE), ("b.cls", b"1"))
    whole = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    for _ in range(300):
        broken = whole.copy()
        places = generator.integers(0, len(broken), 8)
        places[:4] %= 512  # half of the harm in the first header
        broken[places] = generator.integers(0, 256, 8)
        path.write_bytes(broken.tobytes())
        try:
            found = open_tars(str(path))
            for split in found.splits.values():
                for index in range(len(split)):
                    split.read_image(index)
        except DataError:
            pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.tar"]


@pytest.mark.attack
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.cls", b"9999999"),
        ("a.cls", b"9" * 5_000),
        ("a.cls", b"0" * 100_000 + b"7" * 100_000),
        ("a.json", b'{"label": 9999999}'),
        ("a.json", b'{"label": "' + b"9" * 5_000 + b'"}'),
        ("a.json", b'{"labels": [1, ' + b"9" * 4_000 + b"]}"),
        ("a.json", b'{"label": ' + b"9" * 5_000 + b"}"),
    ],
)
def test_a_label_that_no_set_has_is_refused_before_classes_are_counted_to_it(
    name: str, content: bytes, tmp_path: Path, attacked: Callable[[str, str], None]
) -> None:
    tar_of(tmp_path / "x.tar", ("a.jpg", IMAGE), (name, content))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"x\.tar:a\.\w+") as caught:
        open_tars(str(tmp_path / "x.tar"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000
    assert len(str(caught.value)) < 400
    attacked(f"a label of {len(content):,} bytes in a {name[1:]}, {content[:20]!r}", "refused by its length")


def test_the_zeros_of_a_label_do_not_count(tmp_path: Path) -> None:
    tar_of(tmp_path / "train.tar", ("a.jpg", IMAGE), ("a.cls", b"0" * 100 + b"3"), ("b.jpg", IMAGE), ("b.cls", b"000"))
    assert open_tars(str(tmp_path / "train.tar")).classes == ("0", "1", "2", "3")


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
