"""ImageNet's own archives: class tars in a tar, flat validation images, and the devkit that has their labels."""

import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io

from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.data.image_files import encode_image, list_names, make_image, read_contents
from vitrail.data import imagenet, public_formats
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError

WNIDS = ("n01440764", "n01443537", "n15075141")
IDS = {"n01440764": 3, "n01443537": 1, "n15075141": 2, "n00001740": 4}  # the devkit's own numbers are in no order
TRUTH = (2, 3, 1, 1)  # of validation images 1 to 4: n15075141, n01440764, n01443537 twice


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))


def tar(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))
    return file.getvalue()


def meta() -> bytes:
    """The devkit's meta.mat: an array of structures, of which only the leaves are classes of images."""
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O"), ("children", "O")]
    synsets = np.zeros((len(IDS), 1), dtype=fields)
    for row, (wnid, number) in enumerate(IDS.items()):
        inner = wnid == "n00001740"
        children = np.array([1, 2, 3] * inner, np.uint16)
        synsets[row, 0] = (number, wnid, f"the words of {wnid}", len(children), children)
    file = io.BytesIO()
    scipy.io.savemat(file, {"synsets": synsets, "other": np.ones(3)}, do_compression=True)
    return file.getvalue()


def devkit() -> dict[str, bytes]:
    truth = "".join(f"{number}\n" for number in TRUTH).encode()
    return {"ILSVRC2012_validation_ground_truth.txt": truth, "meta.mat": meta()}


def images(first: int = 0) -> dict[str, dict[str, bytes]]:
    """Four images of each class."""
    return {
        wnid: {f"{wnid}_{n}.JPEG": encode_image(make_image(first + 10 * place + n)) for n in range(4)}
        for place, wnid in enumerate(WNIDS)
    }


def validation() -> dict[str, bytes]:
    return {f"ILSVRC2012_val_{n:08d}.JPEG": encode_image(make_image(100 + n)) for n in range(1, 5)}


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A folder with the archives as they are given out."""
    folder = tmp_path / "raw"
    folder.mkdir()
    classes = {f"{wnid}.tar": tar(each) for wnid, each in images().items()}
    (folder / "ILSVRC2012_img_train.tar").write_bytes(tar(classes))
    (folder / "ILSVRC2012_img_val.tar").write_bytes(tar(validation()))
    inside = {f"ILSVRC2012_devkit_t12/data/{name}": data for name, data in devkit().items()}
    (folder / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(tar(inside)))
    return folder


def expected(wanted: dict[str, dict[str, bytes]]) -> list[tuple[bytes, tuple[int, ...]]]:
    return sorted((data, (WNIDS.index(wnid),)) for wnid, each in wanted.items() for data in each.values())


def labelled(number: int) -> int:
    """The class of a validation image, by the devkit as a person reads it."""
    return WNIDS.index(next(wnid for wnid, own in IDS.items() if own == TRUTH[number - 1]))


VALIDATION = [labelled(number) for number in range(1, 5)]


def test_the_archives_pack_as_they_are(raw: Path, tmp_path: Path, capsys: Capture) -> None:
    assert VALIDATION == [2, 0, 1, 1]
    dataset = open_dataset(str(raw))
    assert dataset.classes == WNIDS
    assert set(dataset.splits) == {"train", "val"}
    assert read_contents(dataset.splits["train"]) == expected(images())
    assert [dataset.splits["val"].get_labels(index)[0] for index in range(4)] == VALIDATION
    assert any("labels of 4 validation images come from the devkit" in note for note in dataset.notes)
    code, _, err = vitrail("data", "pack", str(raw), str(tmp_path / "packed"), capsys=capsys)
    assert code == 0, err
    packed = open_dataset(f"{tmp_path}/packed")
    assert packed.classes == WNIDS
    for split in ("train", "val"):
        assert read_contents(packed.splits[split]) == read_contents(dataset.splits[split])
    assert "n01440764/n01440764_0.JPEG" in " ".join(list_names(packed)["train"])


def test_one_tar_of_class_tars_is_data_too(raw: Path) -> None:
    """As ImageNet-21k is given out, without a split in its name."""
    (raw / "ILSVRC2012_img_train.tar").rename(raw / "winter21_whole.tar")
    dataset = open_dataset(str(raw / "winter21_whole.tar"))
    assert dataset.classes == WNIDS
    assert dataset.generated_splits == ("val", "test")
    assert sorted(item for split in dataset.splits.values() for item in read_contents(split)) == expected(images())


def test_class_tars_in_a_folder_are_classes(tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()
    for wnid, each in images().items():
        (tmp_path / "tars" / f"{wnid}.tar").write_bytes(tar(each))
    dataset = open_dataset(str(tmp_path / "tars"))
    assert dataset.classes == WNIDS
    assert sorted(item for split in dataset.splits.values() for item in read_contents(split)) == expected(images())


@pytest.mark.parametrize("kind", ["archive", "unpacked", "loose"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_flat_validation_folder_has_the_devkits_labels(tmp_path: Path, kind: str, alone: bool) -> None:
    root = tmp_path / "imagenet"
    val = root if alone else root / "val"
    val.mkdir(parents=True)
    for name, data in validation().items():
        (val / name).write_bytes(data)
    if not alone:
        for wnid, each in images().items():
            (root / "train" / wnid).mkdir(parents=True)
            for name, data in each.items():
                (root / "train" / wnid / name).write_bytes(data)
    if kind == "archive":
        inside = {f"ILSVRC2012_devkit_t12/data/{name}": data for name, data in devkit().items()}
        (root / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(tar(inside)))
    else:
        place = root / "ILSVRC2012_devkit_t12" / "data" if kind == "unpacked" else val
        place.mkdir(parents=True, exist_ok=True)
        for name, data in devkit().items():
            (place / name).write_bytes(data)
    dataset = open_dataset(str(root))
    assert dataset.classes == WNIDS
    assert [dataset.splits["val"].get_labels(index)[0] for index in range(4)] == VALIDATION
    assert list_names(dataset)["val"][0].endswith("ILSVRC2012_val_00000001.JPEG")
    if not alone:
        assert read_contents(dataset.splits["train"]) == expected(images())


@pytest.mark.parametrize("archive", ["ILSVRC2012_img_train.tar", "train"])
@pytest.mark.parametrize("val", ["val", "."])
def test_train_may_be_tars_beside_a_flat_validation_folder(
    raw: Path, tmp_path: Path, archive: str, val: str, capsys: Capture
) -> None:
    """As it lies after the small archive was unpacked and the large one was not."""
    (raw / "ILSVRC2012_img_val.tar").unlink()
    (raw / val).mkdir(exist_ok=True)
    for name, data in validation().items():
        (raw / val / name).write_bytes(data)
    if archive == "train":
        (raw / "ILSVRC2012_img_train.tar").unlink()
        (raw / "train").mkdir()
        for wnid, each in images().items():
            (raw / "train" / f"{wnid}.tar").write_bytes(tar(each))
    code, _, err = vitrail("data", "pack", str(raw), str(tmp_path / "packed"), capsys=capsys)
    assert code == 0, err
    assert "the labels of 4 validation images come from the devkit" in err
    assert "held out" not in err
    packed = open_dataset(f"{tmp_path}/packed")
    assert packed.classes == WNIDS
    assert read_contents(packed.splits["train"]) == expected(images())
    dataset = open_dataset(str(raw))
    assert [dataset.splits["val"].get_labels(index)[0] for index in range(4)] == VALIDATION
    assert read_contents(packed.splits["val"]) == read_contents(dataset.splits["val"])
    assert not (tmp_path / "home" / "vitrail" / "splits").exists()  # all of train is train

    (raw / archive / "n01440764.tar" if archive == "train" else raw / archive).unlink()
    if archive == "train":
        with pytest.raises(DataError, match=r"has 2 classes and the validation images have 3, which are not the same"):
            open_dataset(str(raw))
    (raw / "train.tar").write_bytes(tar({f"{wnid}.tar": tar(each) for wnid, each in images().items()}))
    (raw / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    with pytest.raises(DataError, match=r"put ILSVRC2012_devkit_t12\.tar\.gz there"):
        open_dataset(str(raw))


def test_what_lacks_labels_is_refused_with_what_has_them(raw: Path) -> None:
    (raw / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    with pytest.raises(DataError, match=r"labels are in the devkit: put ILSVRC2012_devkit_t12\.tar\.gz there"):
        open_dataset(str(raw))
    inside = {f"ILSVRC2012_devkit_t12/data/{name}": data for name, data in devkit().items()}
    for name, data in {"meta.mat": b"no mat", "ILSVRC2012_validation_ground_truth.txt": b"9\n"}.items():
        damaged = inside | {f"ILSVRC2012_devkit_t12/data/{name}": data}
        (raw / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(tar(damaged)))
        with pytest.raises(DataError, match=r"MATLAB file|not an ImageNet devkit"):
            open_dataset(str(raw))
    few = inside | {"ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt": b"1\n2\n3\n"}
    (raw / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(tar(few)))
    with pytest.raises(DataError, match="validation image 4 has no label: the devkit has labels for images 1 to 3"):
        open_dataset(str(raw))


@pytest.mark.parametrize("below", ["", "val"])
def test_validation_images_alone_have_no_labels_without_the_devkit(raw: Path, tmp_path: Path, below: str) -> None:
    inside = (raw / "ILSVRC2012_devkit_t12.tar.gz").read_bytes()
    (raw / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    root = tmp_path / "images"
    (root / below).mkdir(parents=True)
    for name, data in validation().items():
        (root / below / name).write_bytes(data)
    for source, place in ((root, root), (raw / "ILSVRC2012_img_val.tar", raw)):
        dataset = open_dataset(str(source))
        assert dataset.classes == ()
        assert sum(map(len, dataset.splits.values())) == 4
        assert any("put ILSVRC2012_devkit_t12.tar.gz there" in note for note in dataset.notes)
        (place / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(inside)
        assert open_dataset(str(source)).classes == WNIDS


def test_test_images_alone_have_no_labels(raw: Path) -> None:
    hidden = {f"ILSVRC2012_test_{n:08d}.JPEG": encode_image(make_image(n)) for n in range(1, 3)}
    (raw / "ILSVRC2012_img_test.tar").write_bytes(tar(hidden))
    dataset = open_dataset(str(raw / "ILSVRC2012_img_test.tar"))
    assert (dataset.classes, [len(split) for split in dataset.splits.values()]) == ((), [2])


def test_a_train_beside_a_flat_validation_folder_is_seen_when_it_comes(tmp_path: Path) -> None:
    root = tmp_path / "imagenet"
    (root / "val").mkdir(parents=True)
    for name, data in {**validation(), **devkit()}.items():
        (root / "val" / name).write_bytes(data)
    settle(root, 1e9)
    assert set(open_dataset(str(root)).splits) == {"val"}
    (root / "train").mkdir()
    settle(root, 1.1e9)
    assert set(open_dataset(str(root)).splits) == {"val"}
    for wnid, each in images().items():
        (root / "train" / wnid).mkdir()
        for name, data in each.items():
            (root / "train" / wnid / name).write_bytes(data)
    assert read_contents(open_dataset(str(root)).splits["train"]) == expected(images())


def settle(root: Path, seconds: float) -> None:
    """Let everything in a folder be so old that its listing is kept."""
    for path in (root, *root.rglob("*")):
        os.utime(path, (seconds, seconds))


def test_test_images_are_left_out_and_a_damaged_class_tar_is_named(raw: Path) -> None:
    hidden = {f"ILSVRC2012_test_{n:08d}.JPEG": encode_image(make_image(n)) for n in range(1, 3)}
    (raw / "ILSVRC2012_img_test.tar").write_bytes(tar(hidden))
    dataset = open_dataset(str(raw))
    assert set(dataset.splits) == {"train", "val"}
    assert any("2 test images have no published labels and were left out" in note for note in dataset.notes)
    whole = tar(images()["n01440764"])
    (raw / "ILSVRC2012_img_train.tar").write_bytes(tar({"n01440764.tar": whole[:900]}))
    with pytest.raises(DataError, match=r"train\.tar:n01440764\.tar is truncated or damaged"):
        open_dataset(str(raw))
    outside = tar({"../../n.JPEG": b"x"})
    (raw / "ILSVRC2012_img_train.tar").write_bytes(tar({"n01440764.tar": outside}))
    with pytest.raises(DataError, match="a path that leads outside"):
        open_dataset(str(raw))


def test_a_compressed_tar_is_refused_and_one_that_is_only_called_so_is_read(raw: Path) -> None:
    whole = (raw / "ILSVRC2012_img_train.tar").read_bytes()
    path = raw / "winter21_whole.tar.gz"
    path.write_bytes(whole)
    assert open_dataset(str(path)).classes == WNIDS
    path.write_bytes(gzip.compress(whole))
    with pytest.raises(DataError, match=r"is compressed, .*: gunzip .*winter21_whole\.tar\.gz"):
        open_dataset(str(path))


@pytest.mark.parametrize(("count", "words"), [(21_841, "fall 2011"), (21_843, "Google's"), (19_167, "winter 2021")])
def test_the_releases_of_imagenet_21k_are_told_apart(count: int, words: str) -> None:
    classes = [f"n{number:08d}" for number in range(count)]
    assert words in imagenet.describe_release(classes)
    assert imagenet.describe_release(classes[1:]) == ""
    assert imagenet.describe_release([f"{number}" for number in range(count)]) == ""


def test_pack_tells_of_the_release(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(imagenet._RELEASES, 3, imagenet._RELEASES[21_841])
    train = str(raw / "ILSVRC2012_img_train.tar")
    code, _, err = vitrail("data", "pack", train, str(tmp_path / "packed"), capsys=capsys)
    assert code == 0
    assert "note: 3 classes are ImageNet-21k of fall 2011. The heads of Google's checkpoints have 21,843" in err
    assert "n03931044 and n09859684, outputs 9,205 and 15,027" in err


def test_structures_are_read_as_scipy_reads_them() -> None:
    theirs: Any = scipy.io.loadmat(io.BytesIO(meta()), squeeze_me=True)["synsets"]
    ours = public_formats.read_structures(meta())["synsets"]
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert set(mine) == set(other.dtype.names)
        assert (mine["WNID"], mine["words"]) == (str(other["WNID"]), str(other["words"]))
        assert int(mine["ILSVRC2012_ID"].item()) == int(other["ILSVRC2012_ID"])
        assert np.array_equal(np.ravel(mine["children"]), np.ravel(other["children"]))
    assert public_formats.read_structures(meta()).keys() == {"synsets"}
    whole = meta()
    for end in range(140, len(whole), 7):
        with pytest.raises(DataError):
            public_formats.read_structures(whole[:end])
