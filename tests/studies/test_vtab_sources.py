"""Tasks from datasets as published: labels by hand, and splits that share no image."""

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.image_files import encode_image, list_names, make_image
from vitrail.data.decode import decode
from vitrail.errors import DataError
from vitrail.studies import vtab_sources, vtab_tasks


@pytest.mark.parametrize(
    ("depths", "label"),
    [([3.0], 0), ([8.0], 0), ([8.01], 1), ([12.0, 8.5], 1), ([9.0], 2), ([9.4, 9.6], 3), ([10.0], 4), ([10.2], 5)],
)
def test_clevr_distance_is_the_range_of_the_closest_depth(depths: list[float], label: int) -> None:
    assert vtab_sources.label_clevr_distance(depths) == label


def test_clevr_counts_from_three_objects() -> None:
    assert [vtab_sources.label_clevr_count([9.0] * number) for number in (3, 4, 10)] == [0, 1, 7]


@pytest.mark.parametrize(
    ("objects", "label"),
    [
        ([("Car", 8.0)], 0),
        ([("Car", 8.1)], 1),
        ([("Van", 20.0), ("Pedestrian", 2.0)], 1),
        ([("Truck", 20.1)], 2),
        ([("Van", 30.0), ("Truck", 5.0)], 0),
        ([("Pedestrian", 3.0), ("Tram", 4.0), ("Misc", 1.0)], 3),
        ([], 3),
    ],
)
def test_kitti_distance_is_that_of_the_closest_vehicle(objects: list[tuple[str, float]], label: int) -> None:
    assert vtab_sources.label_kitti_distance(objects) == label


def test_dsprites_has_sixteen_bins_of_two_places_or_two_and_a_half_angles() -> None:
    assert vtab_sources.label_dsprites_bins(np.arange(32), 32).tolist() == [position // 2 for position in range(32)]
    angles = vtab_sources.label_dsprites_bins(np.arange(40), 40).tolist()
    assert angles[:11] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4]
    assert angles[-1] == 15


# --- datasets --------------------------------------------------------------------------------------------------------


def write_clevr(root: Path) -> Path:
    """Six scenes to train on and three of test, their counts and depths by their number."""
    for part, count in (("train", 20), ("val", 3)):
        (root / "images" / part).mkdir(parents=True)
        scenes = []
        for number in range(count):
            name = f"CLEVR_{part}_{number:06d}.png"
            (root / "images" / part / name).write_bytes(encode_image(make_image(number), "PNG"))
            objects = [{"pixel_coords": [1, 2, 7.75 + 0.5 * (number % 6) + k]} for k in range(3 + number % 8)]
            scenes.append({"image_filename": name, "objects": objects})
        (root / "scenes").mkdir(exist_ok=True)
        (root / "scenes" / f"CLEVR_{part}_scenes.json").write_text(json.dumps({"scenes": scenes}))
    return root


def get_number(name: str) -> int:
    return int(name.rpartition("_")[2].removesuffix(".png"))


@pytest.mark.parametrize(("task", "label"), [("clevr_count", lambda n: n % 8), ("clevr_dist", lambda n: n % 6)])
def test_clevr_is_read_from_its_scenes(task: str, label: Any, tmp_path: Path) -> None:
    write_clevr(tmp_path / "clevr" / "CLEVR_v1.0")
    assert vtab_tasks.find_source_kind(task, tmp_path) == "raw"
    dataset = vtab_tasks.open_vtab_dataset(task, tmp_path, 0)
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 18, "val": 2, "test": 3}
    for split in dataset.splits.values():
        for index in range(len(split)):
            assert split.get_labels(index) == (label(get_number(split.get_image_name(index))),)
            path = split.read_image(index)
            assert isinstance(path, Path)
            assert path.is_file()
    assert all("/val/" in name for name in list_names(dataset)["test"])
    assert not set(list_names(dataset)["train"]) & set(list_names(dataset)["val"])
    assert "vitrail's own draw (seed 0)" in dataset.notes[0]
    (tmp_path / "clevr/CLEVR_v1.0/scenes/CLEVR_val_scenes.json").write_text('{"scenes": [{}]}')
    with pytest.raises(DataError, match="has no CLEVR scenes"):
        vtab_tasks.open_vtab_dataset(task, tmp_path, 0)


def test_dsprites_is_read_from_its_array(tmp_path: Path) -> None:
    """Each image shows its own number in its first pixels, so its label can be looked up again."""
    count = 40
    latents = np.zeros((count, 6), dtype=np.int64)
    latents[:, 3], latents[:, 4] = np.arange(count), np.arange(count) * 7 % 32
    images = np.zeros((count, 64, 64), dtype=np.uint8)
    for number in range(count):
        images[number, 0, :8] = [number >> bit & 1 for bit in range(8)]
    (tmp_path / "dsprites").mkdir()
    np.savez_compressed(tmp_path / "dsprites" / "dsprites_ndarray.npz", imgs=images, latents_classes=latents)
    for task, expected in (("dsprites_loc", latents[:, 4] // 2), ("dsprites_ori", latents[:, 3] * 16 // 40)):
        dataset = vtab_tasks.open_vtab_dataset(task, tmp_path, 0)
        assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 32, "val": 4, "test": 4}
        numbers = []
        for split in dataset.splits.values():
            for index in range(len(split)):
                pixels = decode(split.read_image(index), 1)[0, 0, :8]
                assert set(pixels.tolist()) <= {0, 255}
                numbers.append(sum(int(bit > 0) << position for position, bit in enumerate(pixels)))
                assert split.get_labels(index) == (expected[numbers[-1]],)
        assert sorted(numbers) == list(range(count))
        again = vtab_tasks.open_vtab_dataset(task, tmp_path, 0)  # from the cache
        assert list_names(again) == list_names(dataset)


def write_norb(root: Path, *, packed: bool) -> Path:
    """24 training and 12 test images of two cameras; the first shows its number, the second 255."""
    root.mkdir(parents=True)
    for part, count, first in (("5x46789x9x18x6x2x96x96-training", 24, 0), ("5x01235x9x18x6x2x96x96-testing", 12, 100)):
        pixels = np.full((count, 2, 96, 96), 255, dtype=np.uint8)
        pixels[:, 0] = (first + np.arange(count))[:, None, None]
        info = np.array([[4, n % 9, 2 * (n % 18), 0] for n in range(count)], dtype="<i4")
        for kind, magic, array in (("dat", 0x1E3D4C55, pixels), ("info", 0x1E3D4C54, info)):
            lengths = list(array.shape) + [1] * (3 - array.ndim)
            content = struct.pack(f"<ii{len(lengths)}i", magic, array.ndim, *lengths) + array.tobytes()
            path = root / f"smallnorb-{part}-{kind}.mat"
            if packed:
                path.with_suffix(".mat.gz").write_bytes(gzip.compress(content))
            else:
                path.write_bytes(content)
    return root


@pytest.mark.parametrize("packed", [False, True])
def test_smallnorb_is_read_from_its_matrices(packed: bool, tmp_path: Path) -> None:
    write_norb(tmp_path / "smallnorb", packed=packed)
    for task, period in (("smallnorb_azi", 18), ("smallnorb_ele", 9)):
        dataset = vtab_tasks.open_vtab_dataset(task, tmp_path, 0)
        assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 24, "val": 6, "test": 6}
        for name, split in dataset.splits.items():
            for index in range(len(split)):
                value = int(decode(split.read_image(index), 1)[0, 0, 0])
                assert (value >= 100) == (name != "train")
                assert split.get_labels(index) == (value % 100 % period,)
    next((tmp_path / "smallnorb").glob("*-testing-info*")).unlink()
    with pytest.raises(DataError, match=r"lacks smallnorb-.*-testing-info.mat"):
        vtab_tasks.open_vtab_dataset("smallnorb_azi", tmp_path, 1)


def write_kitti(root: Path, *, drives: bool) -> Path:
    """Forty frames of ten drives: the one of number n has a car n meters ahead, every fifth none."""
    (root / "training" / "image_2").mkdir(parents=True)
    (root / "training" / "label_2").mkdir()
    for number in range(40):
        (root / "training" / "image_2" / f"{number:06d}.png").write_bytes(encode_image(make_image(number), "PNG"))
        kind = "Car" if number % 5 else "Cyclist"
        line = f"{kind} 0.00 0 -0.20 712.40 143.00 810.73 307.92 1.89 0.48 1.20 1.84 1.47 {number}.0 0.01\n"
        (root / "training" / "label_2" / f"{number:06d}.txt").write_text(
            line + "DontCare -1 -1 -10 1 1 1 1 -1 -1 -1 1 1 1 1\n"
        )
    if drives:
        (root / "mapping").mkdir()
        lines = [f"2011_09_26 2011_09_26_drive_{number // 4:04d}_sync {number:010d}" for number in range(40)]
        (root / "mapping" / "train_mapping.txt").write_text("\n".join(lines))
        (root / "mapping" / "train_rand.txt").write_text(",".join(str(number + 1) for number in range(40)))
    return root


@pytest.mark.parametrize("drives", [False, True])
def test_kitti_is_read_from_its_labels_and_keeps_drives_apart(drives: bool, tmp_path: Path) -> None:
    write_kitti(tmp_path / "kitti", drives=drives)
    dataset = vtab_tasks.open_vtab_dataset("kitti", tmp_path, 0)
    assert sum(len(split) for split in dataset.splits.values()) == 40
    by_split = {}
    for name, split in dataset.splits.items():
        for index in range(len(split)):
            number = int(Path(split.get_image_name(index)).stem)
            expected = 3 if number % 5 == 0 else 0 if number <= 8 else 1 if number <= 20 else 2
            assert split.get_labels(index) == (expected,)
        by_split[name] = {int(Path(split.get_image_name(index)).stem) // 4 for index in range(len(split))}
    assert any("in several splits" in note for note in dataset.notes) != drives
    if drives:
        assert sum(map(len, by_split.values())) == 10  # no drive is in two splits
    assert len(dataset.splits["test"]) == 4  # 9.5 % of forty, and a whole drive


def test_labels_outside_of_the_tasks_classes_are_refused(tmp_path: Path) -> None:
    root = write_clevr(tmp_path / "clevr")
    scene = {"image_filename": "CLEVR_val_000000.png", "objects": [{"pixel_coords": [0, 0, 9.0]}] * 11}
    (root / "scenes" / "CLEVR_val_scenes.json").write_text(json.dumps({"scenes": [scene]}))
    with pytest.raises(DataError, match="test has labels 8 to 8 of 8 classes"):
        vtab_tasks.open_vtab_dataset("clevr_count", tmp_path, 0)
