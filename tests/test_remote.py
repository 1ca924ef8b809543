"""Sets that lie on an object store: the same images, splits and weights as here, and few requests."""

import itertools
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import s3_server
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.data.image_files import encode_image, list_names, make_image, read_contents, write_image_folder
from tests.data.parquet_tables import make_cells, write_table
from tests.s3_server import S3
from tests.training.test_training_run import build_recipe
from vitrail import remote
from vitrail.data import pack as pack_module
from vitrail.data import shards
from vitrail.data.dataset import Dataset
from vitrail.data.image_paths import iter_image_refs
from vitrail.data.shards import Sample
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.training.trainer import Trainer
from vitrail.training.training_run import TrainingRun
from vitrail.weights import tensor_files

_buckets = (f"data{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'vitrail[remote]'")
    with s3_server.run_server() as store:
        yield store


@pytest.fixture
def store(server: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    server.requests.clear()
    yield server
    server.failing = server.cut = 0


def uploaded(store: S3, root: Path) -> str:
    """The URL of a folder's files in a bucket of their own, for which a process has no client yet."""
    bucket = next(_buckets)
    for path in root.rglob("*"):
        if path.is_file():
            store.objects[f"{bucket}/{root.name}/{path.relative_to(root)}"] = path.read_bytes()
    return f"s3://{bucket}/{root.name}"


def in_file(root: Path) -> str:
    return f"file://{root}"


def in_memory(root: Path) -> str:
    url = f"memory://{next(_buckets)}/{root.name}"
    for path in root.rglob("*"):
        if path.is_file():
            remote.copy_to_remote(path, f"{url}/{path.relative_to(root)}")
    return url


def packed(place: Path, each: int = 8) -> Path:
    """A set of shards with its index: 3 shards of train, 1 of val."""
    samples = [
        Sample(
            split,
            f"{split}/{number}.png",
            encode_image(make_image(number + 100 * (split == "val")), "PNG"),
            (number % 2,),
        )
        for split, count in (("train", 3 * each), ("val", each))
        for number in range(count)
    ]
    written = [
        shards.write_shard(make(place), f"train-{part}.tar", samples[part * each :][:each], 0) for part in range(3)
    ]
    written.append(shards.write_shard(place, "val-0.tar", samples[3 * each :], 0))
    shards.finalize_shards(place, written, classes=("rose", "tulip"), multi_label=False, origin={})
    return place


def make(place: Path) -> Path:
    place.mkdir(exist_ok=True)
    return place


def nested(root: Path) -> Path:
    """What the order of a listing could confuse: folders in folders, hidden files, names around the slash."""
    write_image_folder(root, classes=("a", "a-b", "a.b", "B"), each=3)
    for name in ("a/deep/x.jpg", "a/deep.jpg", "a/Z.jpg", "a-b/.hidden.jpg", ".cache/x.jpg", "a/notes.txt"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_image(make_image(len(name))))
    return root


def alike(one: Dataset, two: Dataset) -> None:
    """The same images with the same names, labels and splits, in the same order."""
    assert one.classes == two.classes
    assert list_names(one) == list_names(two)
    assert {key: read_contents(split) for key, split in one.splits.items()} == {
        key: read_contents(split) for key, split in two.splits.items()
    }


PLACES: list[Callable[[Path], str]] = [in_file, in_memory]


# --- any store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("put", PLACES)
def test_a_folder_a_list_a_packed_set_and_tars_are_the_same_sets_elsewhere(
    tmp_path: Path, put: Callable[[Path], str]
) -> None:
    root = nested(tmp_path / "folder")
    rows = [f"{path.relative_to(root)},{path.parent.name}\n" for path in sorted(root.rglob("?.jpg"))]
    (root / "list.csv").write_text("path,label\n" + "".join(rows))
    (root / "list.jsonl").write_text('{"path": "a/0.jpg", "labels": ["x", "y"]}\n{"path": "B/0.jpg", "labels": []}\n')
    (root / "lists").mkdir()
    (root / "lists" / "up.csv").write_text("path,label\n../a/0.jpg,a\n./../B/0.jpg,b\n")
    shard_set = packed(tmp_path / "set")
    (tmp_path / "bare").mkdir()
    for tar in shard_set.glob("*.tar"):
        (tmp_path / "bare" / tar.name).write_bytes(tar.read_bytes())
    far, far_set, far_bare = put(root), put(shard_set), put(tmp_path / "bare")
    alike(open_dataset(far), open_dataset(str(root)))
    alike(open_dataset(f"{far}/"), open_dataset(str(root)))
    alike(open_dataset(f"{far}/list.csv"), open_dataset(f"{root}/list.csv"))
    alike(open_dataset(f"{far}/list.jsonl"), open_dataset(f"{root}/list.jsonl"))
    alike(open_dataset(f"{far}/lists/up.csv"), open_dataset(f"{root}/lists/up.csv"))
    alike(open_dataset(far_set), open_dataset(str(shard_set)))
    alike(open_dataset(far_bare), open_dataset(f"{tmp_path}/bare"))
    for pattern in ("train-{0..2}.tar", "*-?.tar", "val-0.tar"):
        alike(open_dataset(f"{far_bare}/{pattern}"), open_dataset(f"{tmp_path}/bare/{pattern}"))


def test_a_folder_elsewhere_that_changes_is_listed_again(tmp_path: Path) -> None:
    url = in_memory(write_image_folder(tmp_path / "set", each=4))
    before = open_dataset(url)
    assert list_names(open_dataset(url)) == list_names(before)
    (tmp_path / "more.jpg").write_bytes(encode_image(make_image(99)))
    remote.copy_to_remote(tmp_path / "more.jpg", f"{url}/rose/new.jpg")
    after = {name for split in list_names(open_dataset(url)).values() for name in split}
    assert after == {name for split in list_names(before).values() for name in split} | {"rose/new.jpg"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("memory://nothing/set", "holds no image"),
        ("memory://nothing/{000..001}.tar", "memory://nothing/000.tar does not exist"),
        ("memory://nothing/list.csv", "memory://nothing/list.csv does not exist"),
        ("memory://some/model.mat", "is a file; a dataset is a folder, shards"),
    ],
)
def test_what_is_not_there_or_cannot_be_read_elsewhere_is_named(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "model.mat").write_bytes(b"x")
    remote.copy_to_remote(tmp_path / "model.mat", "memory://some/model.mat")
    with pytest.raises(DataError, match=words.replace(".", r"\.")):
        open_dataset(name)


def test_an_unknown_scheme_and_shards_to_be_written_elsewhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Protocol not known: nowhere"):
        open_dataset("nowhere://bucket/set")
    with pytest.raises(UsageError, match="pack into one"):
        pack_module.pack(open_dataset(str(write_image_folder(tmp_path / "set"))), Path("s3://bucket/shards"))


def test_a_missing_extra_is_named_with_its_pip_line() -> None:
    script = "import sys; sys.modules['s3fs'] = None; from vitrail.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "data", "check", "s3://bucket/set"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 2
    assert found.stderr == "vitrail: s3:// needs s3fs: pip install 'vitrail[remote]'\n"


def test_a_name_without_a_scheme_opens_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("a connection is made")

    monkeypatch.setattr(socket.socket, "connect", refused)
    root = write_image_folder(tmp_path / "set", "train", "val", each=4)
    (root / "list.csv").write_text("path,label\ns3://bucket/rose.jpg,rose\nhttps://host/tulip.jpg,tulip\n")
    assert len(read_contents(open_dataset(str(root)).splits["train"])) == 8
    listed = open_dataset(str(root / "list.csv")).splits["train"]
    assert [type(listed.read_image(index)) for index in range(2)] == [
        type(root)
    ] * 2  # paths, of files that are not there


# --- S3 --------------------------------------------------------------------------------------------------------------


def learned(data: str, place: Path, workers: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The losses and the weights of a short run."""
    task = TrainingRun(
        recipe=build_recipe(epochs=2, batch=8), dataset=open_dataset(data), device=torch.device("cpu"), workers=workers
    )
    Trainer(task, place).run()
    lines = [json.loads(line) for line in (place / "events.jsonl").read_text().splitlines()]
    losses = [{key: value for key, value in line.items() if "loss" in key} for line in lines]
    return losses, tensor_files.read_tensors(place / "weights" / "last.safetensors").tensors


def test_training_on_shards_of_a_store_gives_the_weights_of_training_on_them_here(store: S3, tmp_path: Path) -> None:
    here = packed(tmp_path / "set")
    url = uploaded(store, here)
    for pattern, workers in (("", (0, 2)), ("/train-{0..2}.tar", (2,))):  # by the index beside them, and without
        losses, weights = learned(f"{here}{pattern}", tmp_path / f"here {len(pattern)}", workers=0)
        for count in workers:
            far_losses, far_weights = learned(f"{url}{pattern}", tmp_path / f"far {len(pattern)} {count}", count)
            assert far_losses == losses
            assert far_weights.keys() == weights.keys()
            assert all(torch.equal(far_weights[name], weights[name]) for name in weights)


def test_a_folder_and_a_list_of_a_store_are_the_same_sets_as_here(store: S3, tmp_path: Path) -> None:
    root = nested(tmp_path / "folder")
    (root / "train.jsonl").write_text("".join(json.dumps({"path": f"a/{n}.jpg", "label": n}) + "\n" for n in range(3)))
    url = uploaded(store, root)
    store.objects[f"{url.removeprefix('s3://')}/empty/"] = b""  # some tools make folders so
    alike(open_dataset(f"{url}/"), open_dataset(str(root)))
    alike(open_dataset(f"{url}/train.jsonl"), open_dataset(f"{root}/train.jsonl"))


def test_an_object_whose_name_leads_outside_of_the_cache_is_not_fetched(store: S3, tmp_path: Path) -> None:
    url = uploaded(store, packed(tmp_path / "set"))
    store.objects[f"{url[5:]}/index/../../../outside"] = b"x"
    store.objects[f"{url[5:]}/index/deep/../../../../outside"] = b"x"
    assert len(open_dataset(url).splits["train"]) == 24
    assert not [line for line in store.requests if line.endswith("outside")]


def test_an_image_is_one_request_and_an_index_is_fetched_once(store: S3, tmp_path: Path) -> None:
    url = uploaded(store, packed(tmp_path / "set"))
    first = open_dataset(url)
    assert any("/index/" in line for line in store.requests)
    store.requests.clear()
    again = open_dataset(url)
    assert not [line for line in store.requests if line.startswith("GET") and "/set/" in line]
    store.requests.clear()
    images = [source for _, source in again.splits["train"].read_images(range(24))]
    assert sorted(store.requests) == sorted(f"GET {url[5:]}/train-{part}.tar" for part in range(3) for _ in range(8))
    assert images == [first.splits["train"].read_image(index) for index in range(24)]
    store.requests.clear()
    walked = open_dataset(f"{url}/train-{{0..2}}.tar")
    assert (
        sum(line.startswith("GET") and line.endswith(".tar") for line in store.requests) == 3
    )  # small: one range each
    store.requests.clear()
    assert len(open_dataset(f"{url}/train-{{0..2}}.tar").splits) == len(walked.splits)
    assert not any(line.startswith("GET") and line.endswith(".tar") for line in store.requests)


def test_a_set_packed_anew_is_noticed_and_one_with_a_shard_missing_is_refused(store: S3, tmp_path: Path) -> None:
    url = uploaded(store, packed(tmp_path / "set"))
    assert len(open_dataset(url).splits["train"]) == 24
    for path in packed(tmp_path / "other", each=4).rglob("*.*"):
        store.objects[f"{url[5:]}/{path.relative_to(tmp_path / 'other')}"] = path.read_bytes()
    assert len(open_dataset(url).splits["train"]) == 12
    del store.objects[f"{url[5:]}/train-1.tar"]
    with pytest.raises(DataError, match=r"set/train-1\.tar is missing or does not have the [\d,]+ bytes"):
        open_dataset(url)


def test_a_store_that_fails_in_passing_is_asked_again(store: S3, tmp_path: Path) -> None:
    split = open_dataset(uploaded(store, packed(tmp_path / "set"))).splits["train"]
    expected = split.read_image(0)
    store.failing = 1
    assert split.read_image(0) == expected
    store.cut = 1  # half of the image comes, then the connection breaks
    assert split.read_image(0) == expected


def test_a_store_that_fails_for_good_is_named_with_exit_code_3(store: S3, tmp_path: Path, capsys: Capture) -> None:
    store.failing = 10**9
    code, _, err = vitrail("data", "check", "s3://failing/set/0.tar", capsys=capsys)
    assert code == 3
    assert re.search(r"vitrail: s3://failing/set/0\.tar cannot be reached: .*(InternalError|Server Error)", err)
    assert len(store.requests) < 20


def test_a_folder_of_a_store_is_checked_and_measured_as_here(store: S3, tmp_path: Path) -> None:
    url = uploaded(store, write_image_folder(tmp_path / "set", "train", "val", each=3))
    store.objects[f"{url[5:]}/train/rose/bad.jpg"] = b"no image"
    report = tmp_path / "report.json"
    # in a process of its own: the server that forks workers keeps the environment in which it began
    command = [sys.executable, "-m", "vitrail", "data", "check", url, "--out", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert json.loads(report.read_text())["bad"][0]["name"] == "train/rose/bad.jpg"
    split = open_dataset(url).splits["train"]
    store.requests.clear()
    sizes = [pack_module._measure_image_bytes(split, index) for index in range(len(split))]
    assert not store.requests  # packing asks for every size first, and for every image but once
    assert sizes == [len(image) for _, image in split.read_images(range(len(split))) if isinstance(image, bytes)]


# --- Parquet ---------------------------------------------------------------------------------------------------------


def test_parquet_files_on_a_store_are_the_same_as_here_with_few_requests(store: S3, tmp_path: Path) -> None:
    """As DATA and as PATHS, from bytes and from paths beside them."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'vitrail[parquet]'")
    root = tmp_path / "set"
    cells = make_cells(24)
    for split, rows in (("train", slice(0, 16)), ("val", slice(16, 24))):
        labels = ["rose", "tulip"] * (len(cells[rows]) // 2)
        write_table(root / f"{split}-0.parquet", {"image": cells[rows], "label": labels})
    (root / "photos").mkdir()
    (root / "photos" / "0.jpg").write_bytes(cells[0])
    write_table(root / "lists" / "test.parquet", {"path": ["../photos/0.jpg"], "label": ["rose"]})
    url = uploaded(store, root)
    here, there = open_dataset(f"{root}/*.parquet"), open_dataset(f"{url}/*.parquet")
    alike(here, there)
    train = open_dataset(f"{url}/*.parquet").splits["train"]
    store.requests.clear()
    assert [content for _, content in train.read_images(range(16))] == cells[:16]
    reads = [line for line in store.requests if line.startswith("GET")]
    assert len(reads) == 4, reads  # a request for each row group of four
    refs = list(iter_image_refs([f"{url}/val-0.parquet"]))
    assert [ref.name for ref in refs] == [f"{url}/val-0.parquet#{row}" for row in range(8)]
    assert [ref.read() for ref in refs] == cells[16:]
    assert [ref.read() for ref in iter_image_refs([f"{url}/lists/test.parquet"])] == cells[:1]
    assert open_dataset(f"{url}/lists/test.parquet").splits["test"].read_image(0) == cells[0]
    store.objects[f"{url.removeprefix('s3://')}/damaged.parquet"] = b"PAR1 but no footer"
    with pytest.raises(DataError, match=r"damaged.parquet cannot be read as Parquet"):
        open_dataset(f"{url}/damaged.parquet")
